// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
)

// GPUNode.spec holds what the agent is asked for (the desired state, what mig-manager applies now, the permission to
// reboot, the memory guard, the claims that block nothing) and what must outlive the policy: the baseline, the
// numbering of the GPUs and how the node is released. The last good state and a failure are in its status.rollout.
//
//	View.Target → requestTarget → reached: recordReached | failed: recordFailure (failure.go)

// setSpec makes a spec the GPUNode's.
func (v *View) setSpec(spec v1alpha1.GPUNodeSpec, why string) action.SetSpec {
	return action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: why}
}

// lookAgain lets the agent open the driver.
func lookAgain(v *View, why string) action.SetSpec {
	spec := keptSpec(v)
	spec.MIGConfigName, spec.ChangeTime = "", metav1.NewTime(v.Snapshot.Now)
	return v.setSpec(spec, why)
}

// permitReboot gives the permission. The time that the agent has begins anew with it.
func permitReboot(v *View) action.SetSpec {
	spec := keptSpec(v)
	spec.Reboot = &v1alpha1.RebootPermission{Hash: v.Target.Hash(), BootID: v.Node.GPU.Status.BootID}
	spec.ChangeTime = metav1.NewTime(v.Snapshot.Now)
	return v.setSpec(spec, "letting the agent reboot the node")
}

// withdrawRebootPermission withdraws a permission that the agent has not used, and reports whether there was one. A
// spent one stays, so that no other is given.
func withdrawRebootPermission(v *View, spec *v1alpha1.GPUNodeSpec) bool {
	withdraws := spec.Reboot != nil && spec.Reboot.BootID == v.Node.GPU.Status.BootID
	if withdraws {
		spec.Reboot = nil
	}
	return withdraws
}

// requestTarget asks the agent for the target.
func requestTarget(v *View) action.SetSpec {
	spec := keptSpec(v)
	setMemory(v, &spec)
	spec.ConfigName, spec.Devices = v.Target.Config, cluster.SortedByUUID(v.Target.Devices)
	spec.ChangeTime, spec.Reboot = metav1.NewTime(v.Snapshot.Now), nil
	spec.MIGActuator, spec.MIGConfigName = v.Target.Actuator, managerRequest(v)
	why := "applying policy " + v.Target.Policy
	switch {
	case v.FallsBack:
		why = "going back to the last good state"
	case v.Policy == nil:
		why = "going back to the state in which the node was found"
	}
	return v.setSpec(spec, why)
}

// withdrawRequest asks the agent for nothing any more, and keeps the baseline.
func withdrawRequest(v *View, why string) action.SetSpec {
	spec := *v.Node.GPU.Spec.DeepCopy()
	spec.ConfigName, spec.Devices, spec.Reboot, spec.MIGConfigName, spec.ChangeTime = "", nil, nil, "", metav1.NewTime(v.Snapshot.Now)
	return v.setSpec(spec, why)
}

// keptSpec is the spec with what every change keeps, the baseline of each GPU recorded before its first.
func keptSpec(v *View) v1alpha1.GPUNodeSpec {
	spec := *v.Node.GPU.Spec.DeepCopy()
	recordDevices(v, &spec)
	spec.PolicyName, spec.Strategy, spec.OnDemand = v.Target.Policy, v.Target.Strategy, ""
	spec.AdminClaims = AdminClaims(v.Node)
	if !awaitsLimit(v) { // which takes a slot
		setMemory(v, &spec)
	}
	switch {
	case v.Policy != nil:
		if of := v.Policy.OnDemand(); of != nil {
			spec.OnDemand = of.Mode
		}
		spec.Release = ReleaseFor(v.Policy)
		spec.Numbering = policy.Number(v.Policy, PolicyNode(v.Node))
	case cluster.Owner(v.Node, nil) != "":
		if spec.Release == nil {
			spec.Release = &v1alpha1.Release{}
		}
		spec.Release.PolicyName = cluster.Owner(v.Node, nil) // the copy on the Node may be lost
	}
	return spec
}

// requestLimit asks the agent for the memory limit of the policy.
func requestLimit(v *View) action.SetSpec {
	spec := keptSpec(v)
	setMemory(v, &spec)
	spec.ChangeTime = metav1.NewTime(v.Snapshot.Now)
	return v.setSpec(spec, "asking for the memory limit of policy "+v.Target.Policy)
}

// setMemory sets what the spec says of memory, and who else limits it.
func setMemory(v *View, spec *v1alpha1.GPUNodeSpec) {
	spec.Memory = memoryOf(v)
	spec.MemoryOwner = MemoryOwner(v.Node, spec.Memory)
}

// MemoryOwner is who else limits memory on a node, where that matters; empty: nobody, or the driver is not to limit it.
func MemoryOwner(n *cluster.Node, memory *v1alpha1.TimeSlicedMemory) string {
	if memory.Limited() == v1alpha1.MemoryLimitNone {
		return ""
	}
	return n.MemoryOwner
}

// recordBaseline notes the state of the node, and changes nothing.
func recordBaseline(v *View) action.SetSpec {
	return v.setSpec(keptSpec(v), "recording the state in which the node was found")
}

// recordReached records the target as the last good state. A node that is back at its baseline is forgotten.
func recordReached(v *View) []action.Action {
	if v.Target.ReleasesNode {
		return forgetNode(v)
	}
	spec := keptSpec(v)
	spec.Reboot = nil
	var actions []action.Action
	if !v.FallsBack {
		good := v.Target.Sharing()
		good.Devices = withoutRestored(v, cluster.SortedByUUID(good.Devices))
		spec.Devices, spec.Baseline.Devices = withoutRestored(v, spec.Devices), withoutRestored(v, spec.Baseline.Devices)
		if last := v.Node.GPU.Status.Rollout; last.Failed != nil || !equality.Semantic.DeepEqual(last.LastGood, good) {
			status := v1alpha1.GPUNodeStatus{Rollout: v1alpha1.RolloutStatus{LastGood: good}}
			actions = []action.Action{action.Report{Node: v.Node.Name, Status: status, Policy: v.Ref(), Why: "recording the last good state"}}
		}
	}
	return append(actions, writeReachedSpec(v, spec, "recording what the node reached")...)
}

// forgetNode removes both records of the baseline. The copy on the Node names the policy in whose budget the node
// counts, so it goes last of what the Node has: another policy may govern the node already, and must not count a taint
// as its own for which it had no slot.
func forgetNode(v *View) []action.Action {
	var actions []action.Action
	patch := v.Patch("forgetting the baseline")
	if dropBaselineCopy(v, patch); len(patch.Annotations) > 0 {
		actions = append(actions, patch)
	}
	return append(actions, writeReachedSpec(v, v1alpha1.GPUNodeSpec{}, "forgetting the node, which is in its baseline")...)
}

// writeReachedSpec writes the spec of a node that has reached it. The copy on the Node comes first: GPUs that it lists
// and the spec does not are added to the spec again.
func writeReachedSpec(v *View, spec v1alpha1.GPUNodeSpec, why string) []action.Action {
	if !v.Node.BaselineLost && equality.Semantic.DeepEqual(spec, v.Node.GPU.Spec) {
		return nil
	}
	var actions []action.Action
	if spec.Baseline != nil {
		patch, text := v.Patch("recording the baseline"), cluster.CopyOf(spec)
		if v.Node.Annotations[v1alpha1.AnnotationBaseline] != text && !lacksOnlyNumbering(v, text) {
			patch.Annotations[v1alpha1.AnnotationBaseline] = &text
			actions = append(actions, patch)
		}
	}
	return append(actions, v.setSpec(spec, why))
}
