// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// answering is how the MPS pod's answer to a desired state is waited for.
func answering() pace { return pace{every: 200 * time.Millisecond, atMost: 30 * time.Second} }

// View is the agent's view of the MPS daemons of its node.
type View struct {
	control Control
	files   files
	clock   clock.Clock
}

var _ plan.MPS = (*View)(nil)

// NewView makes a view of the daemons that control speaks with.
func NewView(control Control) *View {
	return &View{control: control, files: control.files, clock: control.clock}
}

// Start implements plan.MPS: it writes the desired state and waits until the MPS pod has fulfilled it and the daemon
// answers.
func (v *View) Start(ctx context.Context, d plan.Daemon) error {
	if err := checkResource(d.Resource); err != nil {
		return err
	}
	if err := v.request(ctx, d); err != nil {
		return err
	}
	var failed error
	err := answering().poll(ctx, v.clock, func() (bool, error) {
		r, recorded, err := v.files.record(d.Resource)
		if err != nil || !recorded || !sameDaemon(r.Daemon, d) || r.inProgress() {
			return false, err
		}
		if r.Error != "" && !r.Applied { // one that was started and does not answer may answer again
			failed = recordedError(r.Error)
			return true, nil
		}
		_, err = v.control.Ask(ctx, d.Resource)
		return err == nil, err
	})
	if err != nil {
		return v.unanswered("start", d.Resource, err)
	}
	return failed
}

// unanswered is the error that the MPS pod did not do what was asked of it: with its own reason, if it has recorded
// one.
func (v *View) unanswered(do, resource string, err error) error {
	r, recorded, readErr := v.files.record(resource)
	if readErr == nil && recorded && r.Error != "" && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("the MPS pod of this node did not %s the %w: %w", do, ErrDaemon, recordedError(r.Error))
	}
	return fmt.Errorf("the MPS pod of this node did not %s the %w, does the pod run? %w", do, ErrDaemon, err)
}

// request writes the desired state of a daemon, unless it is written already. NVIDIA's own daemon is left alone.
func (v *View) request(ctx context.Context, d plan.Daemon) error {
	_, recorded, err := v.files.record(d.Resource)
	if err != nil {
		return err
	}
	if !recorded {
		if _, answers, err := v.control.ask(ctx, d.Resource); answers || err != nil {
			return cmp.Or(err, errExternal)
		}
	}
	var standing plan.Daemon
	if found, err := v.files.read(desiredFile(d.Resource), &standing); err == nil && found && sameDaemon(standing, d) {
		return nil
	}
	return v.files.write(desiredFile(d.Resource), d)
}

// Stop implements plan.MPS: it takes the desired state back and waits until the daemon is gone. That a daemon does not
// answer is not enough: one that hangs still serves its clients. The MPS pod removes its record last.
func (v *View) Stop(ctx context.Context, resource string) error {
	if err := checkResource(resource); err != nil {
		return err
	}
	if err := v.files.remove(desiredFile(resource)); err != nil {
		return err
	}
	err := answering().poll(ctx, v.clock, func() (bool, error) {
		_, recorded, err := v.files.record(resource)
		if err != nil || recorded {
			return false, err
		}
		_, answers, err := v.control.ask(ctx, resource)
		return !answers && err == nil, err
	})
	if err != nil {
		return v.unanswered("stop", resource, err)
	}
	return nil
}

// Prune takes back the desired states for daemons that do not answer and that nobody keeps. Such a desired state is
// left when the MPS pod went before its daemon was stopped; it would bring the daemon back with the pod.
func (v *View) Prune(ctx context.Context, keep func(plan.Daemon) bool) error {
	desired, err := v.files.desired()
	if err != nil {
		return err
	}
	var errs []error
	for _, desired := range desired {
		if keep(desired) {
			continue
		}
		_, answers, err := v.control.ask(ctx, desired.Resource)
		if err == nil && !answers {
			err = v.files.remove(desiredFile(desired.Resource))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Observe finds the daemons that answer.
func (v *View) Observe(ctx context.Context) ([]Serving, error) {
	resources, err := v.files.resources(recordName, startedMarker)
	if err != nil {
		return nil, err
	}
	var serving []Serving
	for _, resource := range resources {
		s, answers, err := v.observe(ctx, resource)
		if err != nil {
			return nil, err
		}
		if answers {
			serving = append(serving, s)
		}
	}
	return serving, nil
}

// Recorded are the daemons of the MPS pod as it last recorded them. It asks no daemon.
func (v *View) Recorded() ([]Serving, error) {
	resources, err := v.files.resources(recordName)
	if err != nil {
		return nil, err
	}
	recorded := make([]Serving, 0, len(resources))
	for _, resource := range resources {
		r, found, err := v.files.record(resource)
		if err != nil {
			return nil, err
		}
		if found {
			recorded = append(recorded, Serving{Daemon: r.Daemon, Use: r.Use, Failing: r.Error != ""})
		}
	}
	return recorded, nil
}

// observe looks at one daemon. A daemon that does not answer as after it was limited has the limits that it answers.
func (v *View) observe(ctx context.Context, resource string) (Serving, bool, error) {
	r, recorded, err := v.files.record(resource)
	if err != nil {
		return Serving{}, false, err
	}
	percentage, answers, err := v.control.ask(ctx, resource)
	if err != nil || !answers {
		return Serving{}, false, err
	}
	if r.unreadable { // which GPUs it serves is not known before the MPS pod has written the record again
		return Serving{}, false, fmt.Errorf("%w in %s", errContent, v.files.path(recordFile(resource)))
	}
	s := Serving{Daemon: r.Daemon, External: !recorded, Use: r.Use}
	s.Resource, s.MultiUser = resource, r.MultiUser
	if !r.Applied || percentage != r.Answered {
		s.ActiveThreadPercentage = percentage
	}
	return s, true, nil
}

// Assign sets the MPS daemon of each GPU: the one that lists it, or else an external one, which serves every GPU that
// is not in MIG mode. A daemon that serves is only seen through its pipe, never through the hardware.
func Assign(devices []gpu.Device, serving []Serving) []gpu.Device {
	assigned := slices.Clone(devices)
	for i := range assigned {
		assigned[i].State.MPS = daemonOf(assigned[i], serving)
	}
	return assigned
}

func daemonOf(device gpu.Device, serving []Serving) *gpu.MPSDaemon {
	var external *gpu.MPSDaemon
	for _, s := range serving {
		daemon := &gpu.MPSDaemon{
			Resource: s.Resource, External: s.External, MultiUser: s.MultiUser, ActiveThreadPercentage: s.ActiveThreadPercentage,
		}
		if s.External {
			external = daemon
			continue
		}
		for _, d := range s.Devices {
			if d.UUID == device.UUID {
				daemon.PinnedMemoryLimitMiB = d.PinnedMemoryLimitMiB
				return daemon
			}
		}
	}
	if device.State.MIG {
		return nil
	}
	return external
}
