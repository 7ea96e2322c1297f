// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// managerLeft is how much is left of the time that NVIDIA's mig-manager may take for what it has begun by itself.
func managerLeft(v *View) (left time.Duration, works bool) {
	if partitionedByManager(v) || !managerWorks(v) {
		return 0, false
	}
	if v.Node.HeldSince.IsZero() {
		return timing.LeftTimeout, true
	}
	return v.Node.HeldSince.Add(timing.LeftTimeout).Sub(v.Snapshot.Now), true
}

// ManagerHoldsUpChange says whether a change has to wait for NVIDIA's mig-manager. One that is stuck is waited for no
// longer where it has to leave the node anyway.
func ManagerHoldsUpChange(v *View) bool {
	left, works := managerLeft(v)
	return works && (left > 0 || !mustDisableMIGManager(v))
}

// ManagerChanging is the message for a node that NVIDIA's mig-manager is changing.
func ManagerChanging(v *View) string {
	return fmt.Sprintf("NVIDIA's mig-manager is changing the node (%s)", managerState(v))
}

// managerStuck finds a mig-manager that has begun and not ended. It is not ours to repair.
func managerStuck(v *View, _ State) finding {
	left, works := managerLeft(v)
	switch {
	case !works:
		return finding{}
	case left > 0:
		return finding{After: left}
	}
	return finding{
		Reason: v1alpha1.ReasonMIGManagerStuck,
		Message: fmt.Sprintf("%s since %s and has not ended; look at its log, and delete its pod to make it try again",
			ManagerChanging(v), format.Clock(v.Node.HeldSince)),
	}
}
