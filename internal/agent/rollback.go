// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// rollBack makes the GPUs on which a step failed what they were before the reconcile, as far as that can be done, so
// that what was usable stays so until the spec is tried again. It returns what is so then.
func (c applier) rollBack(ctx context.Context, before, now observation, o *outcome) (observation, error) {
	if len(o.failures) == 0 {
		return now, nil
	}
	var broken []gpu.Device
	for _, d := range before.devices {
		if slices.ContainsFunc(o.failures, func(f failure) bool { return f.leaves(d.UUID) }) {
			broken = append(broken, d)
		}
	}
	steps := plan.Back(broken, now.devices)
	if len(steps) == 0 {
		return now, nil
	}
	var back outcome
	if _, err := c.run(ctx, steps, now, &back); err != nil {
		return now, err
	}
	now, err := c.observe(ctx)
	if err != nil {
		return now, err
	}
	o.restored = restored(broken, now.devices, back)
	return now, nil
}

// leaves reports whether a failure leaves a GPU that has to be rolled back. One whose MPS daemon does not start has
// not: to go back might mean another reset, and the daemon is tried again.
func (f failure) leaves(uuid string) bool {
	return !errors.Is(f.err, mps.ErrDaemon) && slices.Contains(plan.GPUs(f.step), uuid)
}

// restored says which GPUs are as they were, and why others are not.
func restored(before, now []gpu.Device, back outcome) []string {
	left := plan.Back(before, now)
	var said []string
	for _, d := range before {
		if !slices.ContainsFunc(left, func(s plan.Step) bool { return slices.Contains(plan.GPUs(s), d.UUID) }) {
			said = append(said, d.String()+" is as it was before")
		}
	}
	for _, f := range back.failures {
		said = append(said, "rolling back failed: "+f.err.Error())
	}
	for _, wait := range back.waits {
		said = append(said, "rolling back waits: "+wait)
	}
	return said
}
