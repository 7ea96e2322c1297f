// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	ctrl "sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	mpsfake "github.com/gpusharing/gpu-sharing-operator/test/mps/fake"
)

var errInjected = errors.New("nvmlSomething: ERROR_UNKNOWN")

type nobody struct{}

func (nobody) List(context.Context) ([]Allocation, error) { return nil, nil }

func (nobody) Advertised(context.Context) ([]string, error) { return nil, nil }

// on is a controller of this hardware, without a cluster.
func on(t *testing.T, h gpu.Hardware) *Controller {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	clock := mpsfake.NewClock(time.Unix(1_800_000_000, 0))
	control := mps.NewControl(hostfake.NewRunner(), root, clock)
	return New(Config{
		Hardware: h, MPS: mps.NewView(control), Processes: hostfake.NewProcesses("boot"), Allocations: nobody{}, Clock: clock,
	})
}

// reconcileSpec does what a reconcile does between reading the spec and reporting.
func reconcileSpec(t *testing.T, c *Controller, desired []v1alpha1.DeviceSpec) (after observation, o outcome) {
	t.Helper()
	before, err := c.observe(t.Context())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	after, o, err = c.converge(t.Context(), v1alpha1.GPUNodeSpec{Devices: desired}, before)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return after, o
}

// layout is a desired state of a GPU; nil is MIG off.
type layout []v1alpha1.InstanceCount

func (l layout) desired(devices []gpu.Device) []v1alpha1.DeviceSpec {
	var desired []v1alpha1.DeviceSpec
	for _, d := range devices {
		sharing := v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}
		if l != nil {
			sharing = v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: l}
		}
		desired = append(desired, v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: sharing})
	}
	return desired
}

func layouts(one, two, three, seven string) map[string]layout {
	n := func(profile string, count int32) v1alpha1.InstanceCount {
		return v1alpha1.InstanceCount{Profile: profile, Count: count}
	}
	return map[string]layout{
		"whole":           nil,
		"MIG mode only":   {},
		"sevenths":        {n(one, 7)},
		"thirds":          {n(two, 3)},
		"halves":          {n(three, 2)},
		"3g, 2g and 2g":   {n(three, 1), n(two, 2)},
		"a mix":           {n(one, 2), n(two, 1), n(three, 1)},
		"one that is all": {n(seven, 1)},
	}
}

// TestEveryChangeSurvivesEachCallFailing takes two GPUs from every layout to every other one, with each call failing
// once. Each GPU is then as desired or as before, to the placement, without orphans; the reconcile says what failed;
// and the next reconcile reaches the desired state.
func TestEveryChangeSurvivesEachCallFailing(t *testing.T) {
	for model, all := range map[sim.Model]map[string]layout{
		sim.A100: layouts("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"),
		sim.H100: layouts("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"),
	} {
		for from, start := range all {
			h := sim.New(model, model)
			c := on(t, h)
			desired := start.desired(observed(t, h))
			_, o := reconcileSpec(t, c, desired)
			NewWithT(t).Expect(o.retry()).NotTo(HaveOccurred())
			for to, end := range all {
				t.Run(fmt.Sprintf("%s from %s to %s", model, from, to), func(t *testing.T) {
					survivesEachFailure(t, h, end.desired(observed(t, h)))
				})
			}
		}
	}
}

func observed(t *testing.T, h gpu.Hardware) []gpu.Device {
	t.Helper()
	inv, err := h.Observe(t.Context())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return inv.Devices
}

func survivesEachFailure(t *testing.T, start *sim.Hardware, desired []v1alpha1.DeviceSpec) {
	t.Helper()
	before := observed(t, start)
	for k := 1; ; k++ {
		h := start.Clone()
		calls := 0
		h.Fail = func(op sim.Op, _ string) error {
			if op == sim.OpObserve {
				return nil
			}
			if calls++; calls == k {
				return errInjected
			}
			return nil
		}
		c := on(t, h)
		after, o := reconcileSpec(t, c, desired)
		if calls < k {
			expectDesired(t, desired, after.devices)
			return
		}
		expectRolledBack(t, desired, before, after.devices, o, k)
		after, o = reconcileSpec(t, c, desired)
		NewWithT(t).Expect(o.retry()).NotTo(HaveOccurred())
		expectDesired(t, desired, after.devices)
	}
}

func expectDesired(t *testing.T, desired []v1alpha1.DeviceSpec, devices []gpu.Device) {
	t.Helper()
	for i, d := range devices {
		NewWithT(t).Expect(plan.Same(desired[i].Sharing, plan.Observed(d))).To(BeTrue(), "%+v", d.State)
	}
}

func expectRolledBack(t *testing.T, desired []v1alpha1.DeviceSpec, before, after []gpu.Device, o outcome, k int) {
	t.Helper()
	g := NewWithT(t)
	g.Expect(o.retry()).To(MatchError(errInjected), "call %d", k)
	g.Expect(o.failures).To(HaveLen(1))
	for i, d := range after {
		g.Expect(d.PendingMIG).To(Equal(d.State.MIG))
		g.Expect(slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return i.Partial })).To(BeFalse())
		if d.UUID != o.failures[0].step.Device() {
			g.Expect(plan.Same(desired[i].Sharing, plan.Observed(d))).To(BeTrue(), "the other GPU matches the desired state after call %d", k)
			continue
		}
		g.Expect(d.State.MIG).To(Equal(before[i].State.MIG), "call %d", k)
		g.Expect(where(d)).To(Equal(where(before[i])), "call %d", k)
	}
}

func where(d gpu.Device) []string {
	var places []string
	for _, i := range d.State.Instances {
		places = append(places, i.Profile+" at "+i.Placement.String())
	}
	return places
}

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

// TestNoInotifyEndsNoAgent: the kernel counts instances by user ID, and root of a container has the agent's. Without one the pods are looked for
// as often as without an event.
func TestNoInotifyEndsNoAgent(t *testing.T) {
	m := &MemoryLimiter{again: make(chan struct{}, 1), LimitSources: LimitSources{Cgroups: host.Cgroups{Folder: t.TempDir()}}}
	ctx, cancel := context.WithCancel(t.Context())
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	none := files
	none.Cur = 3
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil { // as if all instances were taken
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &files) //nolint:errcheck // the limit of before
	done := make(chan error, 1)
	go func() { done <- m.watch(ctx, make(chan ctrl.GenericEvent)) }()
	for range 3 { // a look after which it watches, and two that let it try again
		select {
		case m.again <- struct{}{}:
		case err := <-done:
			t.Fatalf("the watch, and with it the agent, ended: %v", err)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
