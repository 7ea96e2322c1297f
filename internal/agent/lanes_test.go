// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// lazy is hardware whose driver leaves the reset that activates a MIG mode to us. Its resets begin when so many
// modes are set, and last until so many have begun.
type lazy struct {
	*sim.Hardware

	broken string // GPU whose mode cannot be set
	expect int

	mu    sync.Mutex
	set   int // modes
	begun []string
	all   chan struct{}
}

func (l *lazy) SetMIG(_ context.Context, uuid string, enabled bool) error {
	if uuid == l.broken {
		return errInjected
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.set++
	l.Update(func(n *sim.Node) {
		g, _ := n.GPU(uuid)
		g.PendingMIG = enabled
	})
	return gpu.ErrResetRequired
}

func (l *lazy) Reset(ctx context.Context, uuids ...string) error {
	l.mu.Lock()
	l.begun = append(l.begun, uuids...)
	if l.set < l.expect {
		l.mu.Unlock()
		return errors.New("the mode of another GPU is not set yet")
	}
	if len(l.begun) == l.expect {
		close(l.all)
	}
	l.mu.Unlock()
	select {
	case <-l.all:
		return l.Hardware.Reset(ctx, uuids...)
	case <-time.After(10 * time.Second):
		return fmt.Errorf("resets begin one after the other: %v", l.begun)
	}
}

func TestResetsBeginTogether(t *testing.T) {
	sevenths := layout{v1alpha1.InstanceCount{Profile: "1g.5gb", Count: 7}}
	for name, broken := range map[string]bool{"of all GPUs": false, "of those whose mode could be set": true} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			h := &lazy{Hardware: sim.New(slices.Repeat([]sim.Model{sim.A100}, 8)...), expect: 8, all: make(chan struct{})}
			have := observed(t, h)
			if broken {
				h.broken, h.expect = have[5].UUID, 7
			}
			after, o := reconcileSpec(t, on(t, h), sevenths.desired(have))
			g.Expect(h.begun).To(HaveLen(h.expect))
			for i, d := range after.devices {
				if broken && i == 5 {
					g.Expect(d.State.MIG).To(BeFalse())
					continue
				}
				g.Expect(d.State.Instances).To(HaveLen(7), "%v", o.failures)
			}
			if broken {
				g.Expect(o.retry()).To(MatchError(errInjected))
				return
			}
			g.Expect(o.retry()).NotTo(HaveOccurred())
		})
	}
}
