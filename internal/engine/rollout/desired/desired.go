// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/baseline"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// LookAgain lets the agent open the driver.
func LookAgain(v *view.View, why string) action.SetSpec {
	spec := kept(v)
	spec.MIGConfigName, spec.ChangeTime = "", metav1.NewTime(v.World.Now)
	return action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: why}
}

// PermitReboot gives the permission. The time that the agent has begins anew with it.
func PermitReboot(v *view.View) action.SetSpec {
	spec := kept(v)
	spec.Reboot = &v1alpha1.RebootPermission{Hash: v.Target.Hash(), BootID: v.Node.GPU.Status.BootID}
	spec.ChangeTime = metav1.NewTime(v.World.Now)
	return action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: "letting the agent reboot the node"}
}

// withdrawReboot withdraws a permission that the agent has not used, and reports whether there was one. A spent one stays, so that no
// other is given.
func withdrawReboot(v *view.View, spec *v1alpha1.GPUNodeSpec) bool {
	withdraws := spec.Reboot != nil && spec.Reboot.BootID == v.Node.GPU.Status.BootID
	if withdraws {
		spec.Reboot = nil
	}
	return withdraws
}

// SetSpec asks the agent for the target.
func SetSpec(v *view.View) action.SetSpec {
	spec := kept(v)
	spec.ConfigName, spec.Devices = v.Target.Config, world.SortedByUUID(v.Target.Devices)
	spec.ChangeTime, spec.Reboot = metav1.NewTime(v.World.Now), nil
	spec.MIGActuator, spec.MIGConfigName = v.Target.Actuator, ""
	if v.Partitions() {
		spec.MIGConfigName = view.Config(v).Name
	}
	why := "applying policy " + v.Target.Policy
	switch {
	case v.FallsBack:
		why = "going back to the last good state"
	case v.Policy == nil:
		why = "going back to the state in which the node was found"
	}
	return action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: why}
}

// Withdraw asks the agent for nothing any more, and keeps the baseline.
func Withdraw(v *view.View, why string) action.SetSpec {
	spec := *v.Node.GPU.Spec.DeepCopy()
	spec.ConfigName, spec.Devices, spec.Reboot, spec.MIGConfigName, spec.ChangeTime = "", nil, nil, "", metav1.NewTime(v.World.Now)
	return action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: why}
}

// kept is the spec with what every change keeps, the baseline of each GPU recorded before its first.
func kept(v *view.View) v1alpha1.GPUNodeSpec {
	spec := *v.Node.GPU.Spec.DeepCopy()
	baseline.Record(v, &spec)
	spec.PolicyName, spec.Strategy, spec.MemoryGuard = v.Target.Policy, v.Target.Strategy, nil
	spec.AdminClaims = view.AdminClaims(v.Node)
	switch {
	case v.Policy != nil:
		spec.MemoryGuard = view.GuardOf(v.Policy)
		spec.Release = view.ReleaseOf(v.Policy)
		spec.Numbering = policy.Number(v.Policy, view.PolicyNode(v.Node))
	case world.Owner(v.Node, nil) != "":
		if spec.Release == nil {
			spec.Release = &v1alpha1.Release{}
		}
		spec.Release.PolicyName = world.Owner(v.Node, nil) // the copy on the Node may be lost
	}
	return spec
}

// RecordBaseline notes the state of the node, and changes nothing.
func RecordBaseline(v *view.View) action.SetSpec {
	return action.SetSpec{Node: v.Node.Name, Spec: kept(v), Policy: v.Ref(), Why: "recording the state in which the node was found"}
}

// RecordFailure records that the desired state failed, and withdraws the permission to reboot the node for it.
func RecordFailure(v *view.View, reason, message string) []action.Action {
	const most = 1024 // of the schema, in characters
	failed := &v1alpha1.FailedChange{
		Hash: v.DesiredHash(), Reason: reason, Message: format.Cut(message, most), Attempt: v.Attempt(), Time: metav1.NewTime(v.World.Now.Truncate(time.Second)),
	}
	status := v1alpha1.GPUNodeStatus{Rollout: v1alpha1.RolloutStatus{LastGood: v.Node.GPU.Status.Rollout.LastGood, Failed: failed}}
	actions := []action.Action{action.Report{Node: v.Node.Name, Status: status, Policy: v.Ref(), Why: "recording that the change failed"}}
	if spec := *v.Node.GPU.Spec.DeepCopy(); withdrawReboot(v, &spec) {
		actions = append(actions, action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: "withdrawing the permission to reboot the node"})
	}
	return actions
}

// RecordReached records the target as the last good state. A node that is back at its baseline is forgotten.
func RecordReached(v *view.View) []action.Action {
	if v.Target.Final {
		return forget(v)
	}
	spec := kept(v)
	spec.Reboot = nil
	var actions []action.Action
	if !v.FallsBack {
		good := v.Target.Sharing()
		good.Devices = baseline.WithoutRestored(v, world.SortedByUUID(good.Devices))
		spec.Devices, spec.Baseline.Devices = baseline.WithoutRestored(v, spec.Devices), baseline.WithoutRestored(v, spec.Baseline.Devices)
		if last := v.Node.GPU.Status.Rollout; last.Failed != nil || !equality.Semantic.DeepEqual(last.LastGood, good) {
			status := v1alpha1.GPUNodeStatus{Rollout: v1alpha1.RolloutStatus{LastGood: good}}
			actions = []action.Action{action.Report{Node: v.Node.Name, Status: status, Policy: v.Ref(), Why: "recording the last good state"}}
		}
	}
	return append(actions, writeReached(v, spec, "recording what the node reached")...)
}

// forget removes both records of the baseline. The copy on the Node names the policy in whose budget the node counts, so it goes last of
// what the Node has: another policy may govern the node already, and must not count a taint as its own for which it had no slot.
func forget(v *view.View) []action.Action {
	var actions []action.Action
	patch := v.Patch("forgetting the baseline")
	if baseline.DropCopy(v, patch); len(patch.Annotations) > 0 {
		actions = append(actions, patch)
	}
	return append(actions, writeReached(v, v1alpha1.GPUNodeSpec{}, "forgetting the node, which is in its baseline")...)
}

// writeReached writes the spec of a node that has reached it. The copy on the Node comes first: GPUs that it lists and the spec does
// not are added to the spec again.
func writeReached(v *view.View, spec v1alpha1.GPUNodeSpec, why string) []action.Action {
	if !v.Node.BaselineLost && equality.Semantic.DeepEqual(spec, v.Node.GPU.Spec) {
		return nil
	}
	var actions []action.Action
	if spec.Baseline != nil {
		patch, text := v.Patch("recording the baseline"), world.CopyOf(spec)
		if v.Node.Annotations[v1alpha1.AnnotationBaseline] != text {
			patch.Annotations[v1alpha1.AnnotationBaseline] = &text
			actions = append(actions, patch)
		}
	}
	return append(actions, action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: why})
}
