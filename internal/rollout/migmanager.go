// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// The labels by which NVIDIA's mig-manager is told what to do and says how far it is.
const (
	labelMIGConfig = nvidiaDomain + "mig.config"
	labelMIGState  = nvidiaDomain + "mig.config.state"
)

// migAtWork says whether a state of NVIDIA's mig-manager is one in which it has begun and not ended.
func migAtWork(state string) bool { return state == "pending" || state == "rebooting" }

// migManagerWorks says whether NVIDIA's mig-manager runs on the node and has begun to change it.
func (v *view) migManagerWorks() bool {
	runs := func(p Pod) bool { return !p.Terminating && p.NodeSelector[v1alpha1.LabelMIGManager] != "" }
	return migAtWork(v.node.Labels[labelMIGState]) && slices.ContainsFunc(v.node.Pods, runs)
}

// drivesMIGManager says whether the policy of the node has its GPUs partitioned by NVIDIA's mig-manager.
func (v *view) drivesMIGManager() bool {
	return v.by != nil && v.by.Spec.Sharing.MIG != nil && v.by.Spec.Sharing.MIG.Actuator == v1alpha1.MIGActuatorMIGManager
}

// migManagerLeft is how much is left of the time that NVIDIA's mig-manager may take for what it has begun by itself.
func (v *view) migManagerLeft() (left time.Duration, works bool) {
	if v.drivesMIGManager() || !v.migManagerWorks() {
		return 0, false
	}
	if v.node.HeldSince.IsZero() {
		return leftTimeout, true
	}
	return v.node.HeldSince.Add(leftTimeout).Sub(v.world.Now), true
}

// migManagerKeepsUsOff says whether a change has to wait for NVIDIA's mig-manager. One that is stuck is waited for no
// longer where it has to leave the node anyway.
func (v *view) migManagerKeepsUsOff() bool {
	left, works := v.migManagerLeft()
	return works && (left > 0 || !v.fences())
}

func (v *view) migManagerAtWork() string {
	return fmt.Sprintf("NVIDIA's mig-manager is changing the node (%s=%s, %s=%s)",
		labelMIGConfig, v.node.Labels[labelMIGConfig], labelMIGState, v.node.Labels[labelMIGState])
}

// migManagerStuck finds a mig-manager that has begun and not ended. It is not ours to repair.
func (v *view) migManagerStuck(State) finding {
	left, works := v.migManagerLeft()
	switch {
	case !works:
		return finding{}
	case left > 0:
		return finding{after: left}
	}
	return finding{
		reason: v1alpha1.ReasonMIGManagerStuck,
		message: fmt.Sprintf("%s since %s and has not ended; look at its log, and delete its pod to make it try again",
			v.migManagerAtWork(), clock(v.node.HeldSince)),
	}
}
