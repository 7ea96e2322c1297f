// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidiamig

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// managerLeft is how much is left of the time that NVIDIA's mig-manager may take for what it has begun by itself.
func managerLeft(v *view.View) (left time.Duration, works bool) {
	if view.AsksManager(v) || !view.ManagerWorks(v) {
		return 0, false
	}
	if v.Node.HeldSince.IsZero() {
		return timing.LeftTimeout, true
	}
	return v.Node.HeldSince.Add(timing.LeftTimeout).Sub(v.World.Now), true
}

// HoldsUpChange says whether a change has to wait for NVIDIA's mig-manager. One that is stuck is waited for no
// longer where it has to leave the node anyway.
func HoldsUpChange(v *view.View) bool {
	left, works := managerLeft(v)
	return works && (left > 0 || !view.Fences(v))
}

// Changing is the message for a node that NVIDIA's mig-manager is changing.
func Changing(v *view.View) string {
	return fmt.Sprintf("NVIDIA's mig-manager is changing the node (%s)", view.ManagerState(v))
}

// Stuck finds a mig-manager that has begun and not ended. It is not ours to repair.
func Stuck(v *view.View, _ state.State) gate.Finding {
	left, works := managerLeft(v)
	switch {
	case !works:
		return gate.Finding{}
	case left > 0:
		return gate.Finding{After: left}
	}
	return gate.Finding{
		Reason: v1alpha1.ReasonMIGManagerStuck,
		Message: fmt.Sprintf("%s since %s and has not ended; look at its log, and delete its pod to make it try again",
			Changing(v), format.Clock(v.Node.HeldSince)),
	}
}
