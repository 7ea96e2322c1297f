// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// disableMIGManager keeps NVIDIA's mig-manager off a node whose MIG instances are the operator's: only one may drive MIG. Its label
// is recorded in the baseline before it is changed, and stays until the node goes back to that.
func disableMIGManager(v *View) (Result, bool) {
	value := v.Node.Labels[v1alpha1.LabelMIGManager]
	if !mustDisableMIGManager(v) {
		return Result{}, false
	}
	j := Result{State: PausingClients, Reason: v1alpha1.ReasonPausingClients, Next: withSlot(v)}
	if value == "" || value == "false" {
		remain := clientPods(v, v1alpha1.LabelMIGManager)
		j.Message = "waiting until NVIDIA's mig-manager is gone: " + format.List(remain)
		return j, len(remain) > 0
	}
	patch := v.Patch("keeping NVIDIA's mig-manager off the node")
	patch.Labels[v1alpha1.LabelMIGManager] = new("false")
	claimMIG(v, patch.Labels)
	saveBaselineCopy(v, patch)
	patch.Locked = true // on a Node that was restored from a backup meanwhile, the copy of the baseline would be missing
	j.Message, j.Next = "NVIDIA's mig-manager is being kept off the node, since only one may drive MIG", withSlot(v, patch)
	return j, true
}

// migManagerIsBack reports whether a user or another controller lets NVIDIA's mig-manager back onto a node that was verified without it.
func migManagerIsBack(v *View) bool {
	return !v.Target.Final && mustDisableMIGManager(v) && v.Reached() && v.Node.Labels[v1alpha1.LabelMIGManager] == "true"
}

// disablesMIGManagerAgain says whether the label that keeps NVIDIA's mig-manager off the node is to be set, and notes in the patch that
// another controller is overruled.
func disablesMIGManagerAgain(v *View, patch action.PatchNode) bool {
	manager := v.Node.Labels[v1alpha1.LabelMIGManager]
	if v.Target.Final || !mustDisableMIGManager(v) || manager == "" || manager == "false" {
		return false
	}
	if !migManagerIsBack(v) {
		return true
	}
	if overruledLeft(v, v1alpha1.LabelMIGManager) > 0 {
		return false
	}
	noteOverruled(v, patch, v1alpha1.LabelMIGManager)
	return true
}

// keepMIGManagerOff keeps NVIDIA's mig-manager off a node on which nothing else is changed while both of NVIDIA's programs offer its GPUs: where a ClusterPolicy takes
// the place of a GPUCluster, the GPU Operator starts it and asks it for no instances, also while pods use those that the operator made.
func keepMIGManagerOff(v *View) []action.Action {
	spec := &v.Node.GPU.Spec
	if v.Stack != dra.Both || spec.Baseline == nil || spec.MIGActuator != "" || !mustDisableMIGManager(v) || v.Node.Labels[v1alpha1.LabelMIGManager] != "true" ||
		overruledLeft(v, v1alpha1.LabelMIGManager) > 0 {
		return nil
	}
	patch := v.Patch("keeping NVIDIA's mig-manager off instances that the operator made")
	patch.Labels[v1alpha1.LabelMIGManager] = new("false")
	patch.Locked = true
	noteOverruled(v, patch, v1alpha1.LabelMIGManager)
	return []action.Action{patch}
}

// migManagerEnabledByOthers finds that a user or another controller let NVIDIA's mig-manager back onto the node, again.
func migManagerEnabledByOthers(v *View, _ State) finding {
	left := overruledLeft(v, v1alpha1.LabelMIGManager)
	if !migManagerIsBack(v) || left <= 0 {
		return finding{}
	}
	return finding{
		Reason: v1alpha1.ReasonMIGManagerUnfenced, After: left,
		Message: fmt.Sprintf("a user or another controller sets %s=true again, so NVIDIA's mig-manager runs on a node whose instances the operator makes; "+
			"it is set back to false at %s; find who does it (kubectl get node %s --show-managed-fields -o yaml), or use "+
			"sharing.mig.actuator MIGManager", v1alpha1.LabelMIGManager, format.Clock(v.Snapshot.Now.Add(left)), v.Node.Name),
	}
}

// migConfigIgnored finds that a user tells NVIDIA's mig-manager what to do on a node where it does not run.
func migConfigIgnored(v *View, _ State) finding {
	spec := v.Node.GPU.Spec
	if v.Policy == nil || v.Target.Final || spec.Baseline == nil || !mustDisableMIGManager(v) || partitionedByManager(v) {
		return finding{}
	}
	was, asked := spec.Baseline.Labels[v1alpha1.LabelMIGConfig], v.Node.Labels[v1alpha1.LabelMIGConfig]
	if asked == was || asked == "" || asked == migConfigClaimed || was == "" && asked == migConfigDefault {
		return finding{}
	}
	return finding{
		Reason: v1alpha1.ReasonMIGConfigIgnored,
		Message: fmt.Sprintf("a user or another controller set %s=%s (it was %q before the operator); it has no effect, since policy %s partitions the "+
			"node and NVIDIA's mig-manager is kept off; say it in the policy, and set the label back",
			v1alpha1.LabelMIGConfig, asked, was, v.Policy.Name),
	}
}
