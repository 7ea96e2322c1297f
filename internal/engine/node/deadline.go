// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// DrainLeft is how much of the time for draining is left.
func DrainLeft(v *View) time.Duration {
	since := DrainingSince(v)
	if since.IsZero() {
		return v.DrainTimeout()
	}
	if c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired); found && OnlyRebootLeft(v) {
		since = timing.Latest(since, c.LastTransitionTime.Time) // only then the other GPUs have to be idle too
	}
	return since.Add(v.DrainTimeout()).Sub(v.Snapshot.Now)
}

// DrainingSince is when the time for draining began; zero if it has not, or if that is not recorded.
func DrainingSince(v *View) time.Time {
	switch t := v.Taint(); {
	case t != nil && t.TimeAdded != nil:
		return t.TimeAdded.Time
	case t == nil && MustStayUntainted(v) && len(OwnPauses(v)) > 0:
		return v.Node.HeldSince
	}
	return time.Time{}
}
