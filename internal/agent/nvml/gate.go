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

// others says whether more than one operation is going on, and what is closed when that changes.
func (g *gate) others() (changed <-chan struct{}, more bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed, g.calls > 1
}

// pass is an operation that the gate has let in.
type pass struct {
	*gate

	uuids           []string
	abandoned, over bool
}

// enter lets an operation in. One that looks at the whole node waits for those that were abandoned, of whose work it
// would see half. One that will reset comes in beside others that wait to. One whose caller has gone does not begin:
// nobody would close what it opens.
func (g *gate) enter(ctx context.Context, resets bool, uuids ...string) (*pass, error) {
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
	return &pass{gate: g, uuids: uuids}, nil
}

// leave ends the operation, and reports whether its caller had gone.
func (p *pass) leave() (abandoned bool) {
	p.now(func() {
		p.over = true
		p.calls--
		for _, uuid := range p.uuids {
			delete(p.busy, uuid)
		}
		if abandoned = p.abandoned; abandoned {
			p.gate.abandoned--
		}
	})
	return abandoned
}

// abandon notes that the caller has gone.
func (p *pass) abandon() {
	p.now(func() {
		if !p.over {
			p.abandoned = true
			p.gate.abandoned++
		}
	})
}

// reset makes a reset of the operation, whose handles must not be used any more.
func (p *pass) reset(ctx context.Context) error {
	p.now(func() { p.calls, p.waiting = p.calls-1, p.waiting+1 })
	err := p.when(ctx, func() bool { return p.calls == 0 && !p.gate.alone }, func() {
		p.waiting, p.resets = p.waiting-1, p.resets+1
		p.crowd = max(p.crowd, p.resets)
	})
	if err != nil {
		p.now(func() { p.waiting, p.calls = p.waiting-1, p.calls+1 })
		return fmt.Errorf("waiting for NVML operations on other GPUs to return: %w", err)
	}
	return nil
}

// met says whether another reset has run beside this one.
func (p *pass) met() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.crowd > 1
}

// single makes the reset the only one.
func (p *pass) single(ctx context.Context) error {
	p.now(func() { p.resets, p.waiting = p.resets-1, p.waiting+1 })
	may := func() bool { return p.calls == 0 && p.resets == 0 }
	err := p.when(ctx, may, func() { p.waiting, p.resets, p.gate.alone = p.waiting-1, 1, true })
	if err != nil {
		p.now(func() { p.waiting, p.resets = p.waiting-1, p.resets+1 })
	}
	return err
}

// call makes an operation of the reset again, which may open handles, once no other reset is left.
func (p *pass) call(ctx context.Context) {
	p.now(func() {
		if p.resets--; p.resets == 0 {
			p.crowd, p.gate.alone = 0, false
		}
	})
	none := func() bool { return p.resets == 0 }
	_ = p.when(context.WithoutCancel(ctx), none, func() { p.calls++ }) // resets end by their own deadlines
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
