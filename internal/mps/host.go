// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

const (
	// wishPoll is how often the wishes are looked at: a folder with few files, so that a wish is answered at once.
	wishPoll = 500 * time.Millisecond
	// healthPoll is how often each daemon is asked whether it is there, and one that failed is tried again.
	healthPoll = 5 * time.Second
)

// errExternal says that a daemon is not ours to change.
var errExternal = fmt.Errorf("%w: NVIDIA's own MPS daemon set serves this resource; "+
	"take nvidia.com/mps.capable off the node, or leave MPS there to NVIDIA's", ErrDaemon)

// Host keeps the daemons of a node as they are wished. It is the whole of the MPS pod.
type Host struct {
	control Control
	files   files
	clock   clock.Clock
}

// NewHost makes the host of the daemons that control speaks with.
func NewHost(control Control) *Host {
	return &Host{control: control, files: control.files, clock: control.clock}
}

// Run converges until the context ends. The daemons are then left running: the pod takes them with it, and where
// there is no pod their clients live on.
func (h *Host) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	var nextHealth time.Time
	for {
		now := h.clock.Now()
		thorough := !now.Before(nextHealth)
		if thorough {
			nextHealth = now.Add(healthPoll)
		}
		if err := h.Converge(ctx, thorough); err != nil && ctx.Err() == nil {
			log.Error(err, "MPS daemons are not as wished, trying again")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-h.clock.After(wishPoll):
		}
	}
}

// Converge starts, limits and ends daemons once. A daemon whose record says that it is as wished, or that it failed, is
// looked at again only when thorough. Each daemon's error is in its record as well.
func (h *Host) Converge(ctx context.Context, thorough bool) error {
	wishes, err := h.files.wishes()
	if err != nil {
		return err
	}
	ours, err := h.files.resources(recordName)
	if err != nil {
		return err
	}
	var errs []error
	for _, resource := range ours {
		if !slices.ContainsFunc(wishes, func(d plan.Daemon) bool { return d.Resource == resource }) {
			errs = append(errs, h.end(ctx, resource))
		}
	}
	for _, wish := range wishes {
		errs = append(errs, h.ensure(ctx, wish, thorough))
	}
	return errors.Join(append(errs, h.markReady(wishes, ours))...)
}

// end ends a daemon of ours. Its record goes last, so that a crash before that does not disown the daemon.
func (h *Host) end(ctx context.Context, resource string) error {
	if err := h.control.Quit(ctx, resource); err != nil {
		return fmt.Errorf("stopping %w for %s: %w", ErrDaemon, resource, err)
	}
	logr.FromContextOrDiscard(ctx).Info("Stopped MPS", "resource", resource)
	return h.files.remove(recordFile(resource))
}

// ensure makes a daemon as wished.
func (h *Host) ensure(ctx context.Context, wish plan.Daemon, thorough bool) error {
	if err := checkResource(wish.Resource); err != nil {
		return err
	}
	was, recorded, err := h.files.record(wish.Resource)
	if err != nil {
		return err
	}
	asked := recorded && !was.inProgress() && sameDaemon(was.Daemon, wish)
	if asked && !thorough {
		return nil
	}
	percentage, answers, err := h.control.ask(ctx, wish.Resource)
	switch {
	case err != nil:
		return err
	case answers && !recorded:
		return errExternal
	case answers && asked && was.Applied && percentage == was.Answered:
		return nil
	}
	return h.apply(ctx, wish, answers)
}

// apply starts a daemon, or limits the one that answers, with the record written before and after.
func (h *Host) apply(ctx context.Context, wish plan.Daemon, answers bool) error {
	now := record{Daemon: wish}
	if err := h.files.write(recordFile(wish.Resource), now); err != nil {
		return err
	}
	did, do := "Started MPS", h.control.Start
	if answers {
		did, do = "Limited MPS", h.control.Limit
	}
	err := do(ctx, wish)
	if err == nil {
		now.Answered, err = h.control.Ask(ctx, wish.Resource)
	}
	if err != nil {
		err = fmt.Errorf("starting %w for %s: %w", ErrDaemon, wish.Resource, err)
		now.Error = err.Error()
	} else {
		now.Applied = true
		logr.FromContextOrDiscard(ctx).Info(did, "resource", wish.Resource, "activeThreadPercentage", wish.ActiveThreadPercentage)
	}
	return errors.Join(err, h.files.write(recordFile(wish.Resource), now))
}

// markReady sets NVIDIA's marker that all daemons run. Where we run none, and had none to end, it is not ours.
func (h *Host) markReady(wishes []plan.Daemon, ours []string) error {
	if len(wishes) == 0 && len(ours) == 0 {
		return nil
	}
	ready := len(wishes) > 0
	for _, wish := range wishes {
		r, recorded, err := h.files.record(wish.Resource)
		if err != nil {
			return err
		}
		ready = ready && recorded && r.Applied
	}
	if _, err := h.files.root.Stat(readyMarker); (err == nil) == ready {
		return nil
	}
	return h.files.mark(readyMarker, ready)
}
