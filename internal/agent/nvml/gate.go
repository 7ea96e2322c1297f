// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// gate says who may go on: operations on different GPUs side by side, which NVML allows, and those on one GPU one after
// the other. An operation may hold handles, and a reset needs every handle closed, so there are either operations or
// resets; once a reset waits, no new operation begins.
type gate struct {
	mu        sync.Mutex
	changed   chan struct{}   // closed at the next change
	busy      map[string]bool // GPUs with an operation; everyGPU for one that looks at all
	calls     int             // operations that may hold handles
	abandoned int             // operations that have not returned and whose callers have gone
	waiting   int             // operations that wait to be resets
	resets    int             // resets, for which the library is closed
	crowd     int             // the most of them at once since there were none
	alone     bool            // a reset wants no other beside it
}

// everyGPU is in the place of a UUID for an operation that looks at the whole node.
const everyGPU = ""

func newGate() *gate { return &gate{changed: make(chan struct{}), busy: map[string]bool{}} }

// when waits until may is true, and makes the change in the same moment. It gives up when ctx ends.
func (g *gate) when(ctx context.Context, may func() bool, change func()) error {
	for {
		g.mu.Lock()
		if may() {
			g.make(change)
			g.mu.Unlock()
			return nil
		}
		changed := g.changed
		g.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// now makes a change for which nothing is waited.
func (g *gate) now(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.make(change)
}

func (g *gate) make(change func()) {
	change()
	close(g.changed)
	g.changed = make(chan struct{})
}

// others reports whether more than one operation is going on, and what is closed when that changes.
func (g *gate) others() (changed <-chan struct{}, more bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed, g.calls > 1
}

// operation is one that the gate has let in.
type operation struct {
	*gate

	uuids           []string
	abandoned, over bool
}

// enter lets an operation in. One that looks at the whole node waits for those that were abandoned, of whose work it
// would see half. One that will reset comes in beside others that wait to. One whose caller has gone does not begin:
// nobody would close what it opens.
func (g *gate) enter(ctx context.Context, resets bool, uuids ...string) (*operation, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	may := func() bool {
		taken := slices.ContainsFunc(uuids, func(uuid string) bool {
			return g.busy[uuid] || uuid == everyGPU && g.abandoned > 0
		})
		return !taken && g.resets == 0 && (resets || g.waiting == 0)
	}
	err := g.when(ctx, may, func() {
		for _, uuid := range uuids {
			g.busy[uuid] = true
		}
		g.calls++
	})
	if err != nil {
		return nil, fmt.Errorf("waiting for an earlier NVML operation to return: %w", err)
	}
	return &operation{gate: g, uuids: uuids}, nil
}

// leave ends the operation, and reports whether its caller had gone.
func (o *operation) leave() (abandoned bool) {
	o.now(func() {
		o.over = true
		o.calls--
		for _, uuid := range o.uuids {
			delete(o.busy, uuid)
		}
		if abandoned = o.abandoned; abandoned {
			o.gate.abandoned--
		}
	})
	return abandoned
}

// abandon notes that the caller has gone.
func (o *operation) abandon() {
	o.now(func() {
		if !o.over {
			o.abandoned = true
			o.gate.abandoned++
		}
	})
}

// reset makes a reset of the operation, whose handles must not be used any more.
func (o *operation) reset(ctx context.Context) error {
	o.now(func() { o.calls, o.waiting = o.calls-1, o.waiting+1 })
	err := o.when(ctx, func() bool { return o.calls == 0 && !o.gate.alone }, func() {
		o.waiting, o.resets = o.waiting-1, o.resets+1
		o.crowd = max(o.crowd, o.resets)
	})
	if err != nil {
		o.now(func() { o.waiting, o.calls = o.waiting-1, o.calls+1 })
		return fmt.Errorf("waiting for NVML operations on other GPUs to return: %w", err)
	}
	return nil
}

// met reports whether another reset has run beside this one.
func (o *operation) met() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.crowd > 1
}

// single makes the reset the only one.
func (o *operation) single(ctx context.Context) error {
	o.now(func() { o.resets, o.waiting = o.resets-1, o.waiting+1 })
	may := func() bool { return o.calls == 0 && o.resets == 0 }
	err := o.when(ctx, may, func() { o.waiting, o.resets, o.gate.alone = o.waiting-1, 1, true })
	if err != nil {
		o.now(func() { o.waiting, o.resets = o.waiting-1, o.resets+1 })
	}
	return err
}

// call makes an operation of the reset again, which may open handles, once no other reset is left.
func (o *operation) call(ctx context.Context) {
	o.now(func() {
		if o.resets--; o.resets == 0 {
			o.crowd, o.gate.alone = 0, false
		}
	})
	none := func() bool { return o.resets == 0 }
	_ = o.when(context.WithoutCancel(ctx), none, func() { o.calls++ }) // resets end by their own deadlines
}

// shut closes the gate for a caller that closes the library; false if it is in use.
func (g *gate) shut() (open func(), ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.calls+g.waiting+g.resets > 0 {
		return nil, false
	}
	g.resets++
	return func() { g.now(func() { g.resets-- }) }, true
}
