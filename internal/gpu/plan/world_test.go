// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

var errInjected = errors.New("injected")

// world is a simulated node with its MPS daemons, and the agent's loop over it.
//
// It is stricter than the hardware where the order of a plan matters: while a daemon serves a GPU its MIG mode and
// compute mode do not change, and a daemon starts on GPUs in EXCLUSIVE_PROCESS only. The real ones allow both, and go
// wrong later: a server keeps the GPU busy, and clients get past their limits.
type world struct {
	*sim.Hardware
	daemons map[string]plan.Daemon // of ours, by resource
	foreign map[string]plan.Daemon // NVIDIA's
	calls   int                    // that change something, so far
	fail    func(call int) error   // asked before each of them
	lazy    bool                   // the driver leaves the reset that activates a MIG mode to us
}

func newWorld(models ...sim.Model) *world {
	return &world{Hardware: sim.New(models...), daemons: map[string]plan.Daemon{}, foreign: map[string]plan.Daemon{}}
}

// copy is a world of its own in the same state.
func (w *world) copy() *world {
	c := *w
	c.Hardware, c.daemons, c.foreign = w.Clone(), maps.Clone(w.daemons), maps.Clone(w.foreign)
	return &c
}

func (w *world) devices(t *testing.T) []gpu.Device {
	t.Helper()
	inv, err := w.Observe(t.Context())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	for i := range inv.Devices {
		d := &inv.Devices[i]
		d.State.MPS = w.serves(d.UUID)
		if !d.State.MIG {
			d.State.TimeSlice = w.hidden(d.UUID)
		}
	}
	return inv.Devices
}

// hidden is the time slice that was set on a GPU, also where MIG mode hides it.
func (w *world) hidden(uuid string) (slice gpu.TimeSlice) {
	w.Update(func(n *sim.Node) {
		g, _ := n.GPU(uuid)
		slice = g.Slice
	})
	return slice
}

func (w *world) SetTimeSlice(ctx context.Context, uuid string, slice gpu.TimeSlice) error {
	if err := w.call(); err != nil {
		return err
	}
	return w.Hardware.SetTimeSlice(ctx, uuid, slice)
}

func (w *world) serves(uuid string) *gpu.MPSDaemon {
	for external, daemons := range map[bool]map[string]plan.Daemon{false: w.daemons, true: w.foreign} {
		for _, d := range daemons {
			for _, served := range d.Devices {
				if served.UUID == uuid {
					return &gpu.MPSDaemon{
						Resource: d.Resource, External: external, MultiUser: d.MultiUser,
						ActiveThreadPercentage: d.ActiveThreadPercentage, PinnedMemoryLimitMiB: served.PinnedMemoryLimitMiB,
					}
				}
			}
		}
	}
	return nil
}

func (w *world) call() error {
	w.calls++
	if w.fail == nil {
		return nil
	}
	return w.fail(w.calls)
}

// touch is what each change of a GPU as a whole must respect.
func (w *world) touch(uuid string) error {
	if err := w.call(); err != nil {
		return err
	}
	if w.serves(uuid) != nil {
		return fmt.Errorf("%w: an MPS server holds %s", gpu.ErrBusy, uuid)
	}
	var err error
	w.Update(func(n *sim.Node) {
		if g, _ := n.GPU(uuid); len(g.Holders) > 0 {
			err = fmt.Errorf("%s is taken from %v", uuid, g.Holders)
		}
	})
	return err
}

func (w *world) SetMIG(ctx context.Context, uuid string, enabled bool) error {
	if w.mode(uuid) == enabled { // which takes back what is pending
		if err := w.call(); err != nil {
			return err
		}
	} else if err := w.touch(uuid); err != nil {
		return err
	}
	if w.lazy {
		return w.note(uuid, enabled)
	}
	return w.Hardware.SetMIG(ctx, uuid, enabled)
}

func (w *world) mode(uuid string) (enabled bool) {
	w.Update(func(n *sim.Node) {
		g, _ := n.GPU(uuid)
		enabled = g.MIG
	})
	return enabled
}

// note leaves a MIG mode pending.
func (w *world) note(uuid string, enabled bool) (err error) {
	w.Update(func(n *sim.Node) {
		g, _ := n.GPU(uuid)
		g.PendingMIG = enabled
		if g.MIG != enabled {
			err = gpu.ErrResetRequired
		}
	})
	return err
}

func (w *world) Reset(ctx context.Context, uuids ...string) error {
	for _, uuid := range uuids {
		if err := w.touch(uuid); err != nil {
			return err
		}
	}
	return w.Hardware.Reset(ctx, uuids...)
}

func (w *world) SetComputeMode(ctx context.Context, uuid string, mode gpu.ComputeMode) error {
	if err := w.touch(uuid); err != nil {
		return err
	}
	return w.Hardware.SetComputeMode(ctx, uuid, mode)
}

func (w *world) CreateInstance(ctx context.Context, uuid, profile string, at gpu.Placement) error {
	if err := w.call(); err != nil {
		return err
	}
	return w.Hardware.CreateInstance(ctx, uuid, profile, at)
}

func (w *world) DestroyInstance(ctx context.Context, uuid string, id int) error {
	if err := w.call(); err != nil {
		return err
	}
	var err error
	w.Update(func(n *sim.Node) {
		g, _ := n.GPU(uuid)
		for _, h := range g.Holders {
			if h.Instance == id {
				err = fmt.Errorf("instance %d is taken from %v", id, h)
			}
		}
	})
	if err != nil {
		return err
	}
	return w.Hardware.DestroyInstance(ctx, uuid, id)
}

// Start implements plan.MPS as NVIDIA's control daemon behaves: it refuses limits that make no sense and GPUs in MIG
// mode, and two daemons cannot serve one GPU. A daemon that runs takes new limits, but neither other GPUs nor other
// users.
func (w *world) Start(_ context.Context, d plan.Daemon) error {
	if err := w.call(); err != nil {
		return err
	}
	if len(d.Devices) == 0 || d.ActiveThreadPercentage < 1 || d.ActiveThreadPercentage > 100 || w.foreign[d.Resource].Resource != "" {
		return fmt.Errorf("a daemon cannot run like this: %+v", d)
	}
	if now, runs := w.daemons[d.Resource]; runs && (now.MultiUser != d.MultiUser || len(now.Devices) != len(d.Devices)) {
		return fmt.Errorf("a daemon that runs as %+v must be stopped to run as %+v", now, d)
	}
	for _, served := range d.Devices {
		if err := w.servable(d.Resource, served); err != nil {
			return err
		}
	}
	w.daemons[d.Resource] = d
	return nil
}

func (w *world) servable(resource string, d plan.DaemonDevice) (err error) {
	if other := w.serves(d.UUID); other != nil && other.Resource != resource {
		return fmt.Errorf("%s is served for %s already", d.UUID, other.Resource)
	}
	w.Update(func(n *sim.Node) {
		g, _ := n.GPU(d.UUID)
		if g.MIG || g.ComputeMode != gpu.ComputeExclusiveProcess || d.PinnedMemoryLimitMiB < 0 {
			err = fmt.Errorf("%s is not fit for MPS: MIG %v, compute mode %s, limit %d", d.UUID, g.MIG, g.ComputeMode, d.PinnedMemoryLimitMiB)
		}
	})
	return err
}

// Stop implements plan.MPS. Stopping what does not run is no error; clients do not survive it.
func (w *world) Stop(_ context.Context, resource string) error {
	if err := w.call(); err != nil {
		return err
	}
	var err error
	w.Update(func(n *sim.Node) {
		for _, d := range w.daemons[resource].Devices {
			g, _ := n.GPU(d.UUID)
			for _, p := range g.Processes {
				if !p.MPSServer {
					err = fmt.Errorf("stopping MPS kills %v", p)
				}
			}
			if len(g.Holders) > 0 {
				err = fmt.Errorf("%s is taken from %v", d.UUID, g.Holders)
			}
		}
	})
	if err == nil {
		delete(w.daemons, resource)
	}
	return err
}

func (w *world) tools() plan.Tools { return plan.Tools{Hardware: w, MPS: w} }

// reconcile is what the agent does once: observe, plan, check before each step what blocks it, stop at the first that
// cannot go on, or after so many.
func (w *world) reconcile(t *testing.T, desired []v1alpha1.DeviceSpec, atMost int) (done int, err error) {
	t.Helper()
	steps, err := plan.Node(desired, w.devices(t))
	if err != nil {
		return 0, err
	}
	for _, s := range steps {
		if done == atMost {
			return done, nil
		}
		if blockers := plan.Blockers(s, w.devices(t)); s.Needs() != plan.NeedsNothing && len(blockers) > 0 {
			return done, fmt.Errorf("%s: in use by %v", s, blockers)
		}
		if err := s.Do(t.Context(), w.tools()); err != nil {
			return done, err
		}
		done++
	}
	return done, nil
}

const all = 1000

// settle reconciles until nothing is left to do, and says what keeps it from that.
func (w *world) settle(t *testing.T, desired []v1alpha1.DeviceSpec) error {
	t.Helper()
	var err error
	for range 6 {
		var done int
		if done, err = w.reconcile(t, desired, all); err == nil && done == 0 {
			return w.differs(t, desired)
		}
	}
	return errors.Join(errors.New("does not settle"), err, w.differs(t, desired))
}

// differs says in which way the node is not as desired.
func (w *world) differs(t *testing.T, desired []v1alpha1.DeviceSpec) error {
	t.Helper()
	for _, d := range w.devices(t) {
		for _, spec := range desired {
			if spec.UUID != d.UUID {
				continue
			}
			if !plan.Met(spec.Sharing, plan.Observed(d)) {
				return fmt.Errorf("%s is %+v, desired %+v", d, plan.Observed(d), spec.Sharing)
			}
			if want := gpu.TimeSlice(spec.Sharing.TimeSliceInterval); want != "" && cmp.Or(w.hidden(d.UUID), gpu.TimeSliceDefault) != want {
				return fmt.Errorf("%s has time slice %s, desired %s", d, w.hidden(d.UUID), want)
			}
			if orphan := slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return i.Partial }); orphan {
				return fmt.Errorf("%s has orphans: %v", d, d.State.Instances)
			}
			if d.PendingMIG != d.State.MIG {
				return fmt.Errorf("%s has MIG mode %v pending", d, d.PendingMIG)
			}
			if want := spec.Sharing.MPS != nil; want != (d.State.ComputeMode == gpu.ComputeExclusiveProcess) {
				return fmt.Errorf("%s has compute mode %s", d, d.State.ComputeMode)
			}
		}
	}
	return nil
}
