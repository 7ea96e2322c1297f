// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// The values of v1alpha1.LabelMIGConfigState.
const (
	managerPending   = "pending"
	managerRebooting = "rebooting"
	managerSuccess   = "success"
	managerFailed    = "failed"
)

// managerAtWork says whether a state of NVIDIA's mig-manager is one in which it has begun and not ended.
func managerAtWork(state string) bool { return state == managerPending || state == managerRebooting }

// managerPods are the pods of NVIDIA's mig-manager on the node.
func (v *view) managerPods() []Pod {
	var pods []Pod
	for _, p := range v.node.Pods {
		if p.NodeSelector[v1alpha1.LabelMIGManager] != "" && !p.Terminating {
			pods = append(pods, p)
		}
	}
	return pods
}

// managerState says what NVIDIA's mig-manager says.
func (v *view) managerState() string {
	return fmt.Sprintf("%s=%s, %s=%s", v1alpha1.LabelMIGConfig, v.node.Labels[v1alpha1.LabelMIGConfig],
		v1alpha1.LabelMIGConfigState, v.node.Labels[v1alpha1.LabelMIGConfigState])
}

// managerLogs is the command that shows what NVIDIA's mig-manager says.
func (v *view) managerLogs() string {
	pods := v.managerPods()
	if len(pods) == 0 {
		return "there is no pod of it on the node"
	}
	return fmt.Sprintf("kubectl logs -n %s %s", pods[0].Namespace, pods[0].Name)
}

// managerWorks says whether NVIDIA's mig-manager runs on the node and has begun to change it.
func (v *view) managerWorks() bool {
	return managerAtWork(v.node.Labels[v1alpha1.LabelMIGConfigState]) && len(v.managerPods()) > 0
}

// managerLeft is how much is left of the time that NVIDIA's mig-manager may take for what it has begun by itself.
func (v *view) managerLeft() (left time.Duration, works bool) {
	if v.asksManager() || !v.managerWorks() {
		return 0, false
	}
	if v.node.HeldSince.IsZero() {
		return leftTimeout, true
	}
	return v.node.HeldSince.Add(leftTimeout).Sub(v.world.Now), true
}

// managerKeepsUsOff says whether a change has to wait for NVIDIA's mig-manager. One that is stuck is waited for no
// longer where it has to leave the node anyway.
func (v *view) managerKeepsUsOff() bool {
	left, works := v.managerLeft()
	return works && (left > 0 || !v.fences())
}

func (v *view) managerChanges() string {
	return fmt.Sprintf("NVIDIA's mig-manager is changing the node (%s)", v.managerState())
}

// managerStuck finds a mig-manager that has begun and not ended. It is not ours to repair.
func (v *view) managerStuck(State) finding {
	left, works := v.managerLeft()
	switch {
	case !works:
		return finding{}
	case left > 0:
		return finding{after: left}
	}
	return finding{
		reason: v1alpha1.ReasonMIGManagerStuck,
		message: fmt.Sprintf("%s since %s and has not ended; look at its log, and delete its pod to make it try again",
			v.managerChanges(), clock(v.node.HeldSince)),
	}
}
