// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	drivers "github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// sideBySide does the same to all GPUs at once.
func sideBySide(inv gpu.Inventory, do func(uuid string) error) error {
	errs := make([]error, len(inv.Devices))
	var running sync.WaitGroup
	for i, d := range inv.Devices {
		running.Go(func() { errs[i] = do(d.UUID) })
	}
	running.Wait()
	return errors.Join(errs...)
}

func TestGPUsAreChangedSideBySide(t *testing.T) {
	g := NewWithT(t)
	h := on(t, slices.Repeat([]sim.Model{sim.H100}, 8)...)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	const each = time.Second
	g.Expect(driver(t).SetLatency("nvmlDeviceSetMigMode", each)).To(Succeed())
	start := time.Now()
	g.Expect(sideBySide(inv, func(uuid string) error { return h.SetMIG(t.Context(), uuid, true) })).To(Succeed())
	g.Expect(time.Since(start)).To(BeNumerically("<", 4*each), "one after the other they take eight times as long as one")
	expectSame(t, h)
}

// What vanishes while it is looked at does not fail the observation, though NVML says that it is not there.
func TestGPUsAreObservedWhileTheyAreChanged(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.H100, sim.H100)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(sideBySide(inv, func(uuid string) error { return h.SetMIG(t.Context(), uuid, true) })).To(Succeed())
	g.Expect(driver(t).SetLatency("nvmlGpuInstanceGetComputeInstances", time.Millisecond)).To(Succeed())
	ended := make(chan struct{})
	var changing sync.WaitGroup
	t.Cleanup(changing.Wait)
	changing.Go(func() {
		defer close(ended)
		for range 20 {
			g.Expect(h.CreateInstance(t.Context(), inv.Devices[0].UUID, "1g.10gb", gpu.Placement{Start: 2, Size: 1})).To(Succeed())
			g.Expect(h.DestroyInstance(t.Context(), inv.Devices[0].UUID, 9)).To(Succeed())
		}
	})
	for looks := 0; ; looks++ {
		_, err := h.Observe(t.Context())
		g.Expect(err).NotTo(HaveOccurred())
		select {
		case <-ended:
			changing.Wait()
			g.Expect(looks).To(BeNumerically(">", 0))
			return
		default:
		}
	}
}

func TestAHangOnOneGPUDoesNotHoldAnother(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.H100, sim.H100)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	hang := simdriver.Fault{Call: "nvmlDeviceSetMigMode", GPU: inv.Devices[0].UUID, Hang: 5 * time.Second, Times: 1}
	g.Expect(driver(t).AddFault(hang)).To(Succeed())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	g.Expect(h.SetMIG(ctx, inv.Devices[0].UUID, true)).To(MatchError(ContainSubstring("NVML has not returned")))

	ctx, cancel = context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	g.Expect(h.SetMIG(ctx, inv.Devices[1].UUID, true)).To(Succeed())

	ctx, cancel = context.WithTimeout(t.Context(), 500*time.Millisecond) // longer than a reset waits for others
	defer cancel()
	err = h.Reset(ctx, inv.Devices[1].UUID)
	g.Expect(err).To(MatchError(context.DeadlineExceeded), "the call that hangs has handles open")
	_, err = h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred(), "once it has returned")
}

// resetter is the program that resets, and how many of it run.
type resetter struct {
	smi func(context.Context, ...string) (string, error)
	shy bool          // finds the GPU in use while another resets
	met chan struct{} // closed once two have run at the same time, for which each waits

	once          sync.Once
	mu            sync.Mutex
	running, most int
	calls         []string
}

func (r *resetter) SMI(ctx context.Context, args ...string) (string, error) {
	if args[0] != "--gpu-reset" {
		return r.smi(ctx, args...)
	}
	r.mu.Lock()
	r.running++
	r.most = max(r.most, r.running)
	r.calls = append(r.calls, args...)
	met := r.running > 1
	if met {
		r.once.Do(func() { close(r.met) })
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running--
	}()
	if r.shy && met {
		return "", errors.New("nvidia-smi: exit status 255: GPU 0000" + args[2] + " is currently being used by one or more other processes")
	}
	select {
	case <-r.met:
	case <-time.After(10 * time.Second):
	}
	return r.smi(ctx, args...)
}

func TestGPUsAreResetSideBySide(t *testing.T) {
	cases := map[string]struct{ persistent, shy bool }{
		"each by itself": {},
		"with persistence mode, which is restored":     {persistent: true},
		"by a program that bears no other beside it":   {shy: true},
		"by such a program, and with persistence mode": {shy: true, persistent: true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			closed := on(t, slices.Repeat([]sim.Model{sim.A100}, 4)...)
			inv, err := closed.Observe(t.Context())
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(closed.Close()).To(Succeed())
			r := &resetter{smi: smiOf(driver(t)), shy: c.shy, met: make(chan struct{})}
			library, err := drivers.Node{Host: "/"}.Library(driver(t).Root())
			g.Expect(err).NotTo(HaveOccurred())
			h := nvml.New(nvml.Options{Library: library, SMI: r.SMI, Gather: time.Second, After: atOnce, Module: moduleOf(driver(t))})
			if c.persistent {
				for _, d := range inv.Devices {
					rig{t, driver(t)}.SetPersistence(d.UUID, true)
				}
			}
			g.Expect(sideBySide(inv, func(uuid string) error { return h.Reset(t.Context(), uuid) })).To(Succeed())
			g.Expect(r.most).To(BeNumerically(">", 1), strings.Join(r.calls, " "))
			for _, d := range inv.Devices {
				g.Expect(rig{t, driver(t)}.Persistence(d.UUID)).To(Equal(c.persistent))
			}
			g.Expect(h.Close()).To(Succeed())
		})
	}
}
