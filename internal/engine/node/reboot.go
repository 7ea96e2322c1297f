// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// A GPU that cannot be reset takes a new MIG mode only at a reboot. That shows when the agent has tried: the mode is
// pending then, and everything else of the way there is done. What is left goes the same way as any disruptive change,
// with the whole node to become idle: taint, drain, and in place of the desired state, which the spec has already, the
// permission to end the boot that the agent has reported. In another boot that permission is spent, so the node is
// never rebooted twice for one desired state.

// targetNeedsReboot reports whether a GPU takes the desired MIG mode only at a reboot.
func targetNeedsReboot(v *View) bool {
	c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired)
	return found && c.Status == metav1.ConditionTrue && specMatches(v.Node.GPU.Spec, v.Target) &&
		(c.ObservedGeneration == v.Node.GPU.Generation || rebootPermitted(v))
}

// specNeedsReboot reports whether the agent has tried what the spec asks for, and a GPU takes its MIG mode only at a
// reboot.
func specNeedsReboot(v *View) bool {
	return condition.IsTrueAt(v.Node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired, v.Node.GPU.Generation)
}

// mayReboot reports whether the operator may reboot the node if it has to: the policy allows it, the agent can, and it
// destroys nothing that is not the operator's.
func mayReboot(v *View) bool {
	return v.RolloutSpec().Reboot == v1alpha1.RebootModeIfRequired && v.Node.GPU.Status.CanReboot && rebootDestroys(v) == ""
}

// rebootDestroys names the GPUs whose MIG instances would be gone after a reboot, because the agent makes those of its
// spec only; empty if there are none.
func rebootDestroys(v *View) string {
	var names []string
	for _, d := range v.Devices {
		if len(d.State.Instances) > 0 && !cluster.Lists(v.Target.Devices, d.UUID) {
			names = append(names, fmt.Sprintf("GPU %d", d.Index))
		}
	}
	return format.List(names)
}

// OnlyRebootLeft reports whether what is left to do is to reboot the node.
func OnlyRebootLeft(v *View) bool { return targetNeedsReboot(v) && mayReboot(v) }

// emptiesNode reports whether all that is left to do is to reboot the node, which the policy does only once the node's
// other pods have left it too. Once the reboot is permitted nothing waits for them any more. A new node of Karpenter is
// not emptied: that needs the taint, for which Karpenter would start another node, with pods of its own.
func emptiesNode(v *View) bool {
	return OnlyRebootLeft(v) && !rebootPermitted(v) && (!MustStayUntainted(v) || v.Taint() != nil) && v.RolloutSpec().Drain.BeforeReboot == v1alpha1.BeforeRebootAllPods
}

// rebootPermitted reports whether the agent has, or had, the permission to reboot the node for the target.
func rebootPermitted(v *View) bool {
	p := v.Node.GPU.Spec.Reboot
	return p != nil && p.Hash == v.Target.Hash()
}

// needsManualReboot reports whether the way back of a node has come to where only a reboot helps, and the operator
// makes none: it may not, the agent cannot, or the node was rebooted in vain.
func needsManualReboot(v *View) bool {
	c, _ := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired)
	helpless := c.Reason == v1alpha1.ReasonRebootInVain || !rebootPermitted(v) && !mayReboot(v)
	if v.Desired != nil && !v.FallsBack || !targetNeedsReboot(v) || !helpless {
		return false
	}
	possibleOnceDrained := func(s plan.Step) bool { // the step is possible once the node is drained and NVIDIA's operands are stopped
		waits := func(d gpu.Device) bool { return d.PendingMIG != d.State.MIG && slices.Contains(plan.GPUs(s), d.UUID) }
		needsIdle := s.Needs() > plan.NeedsNothing || s.Closes()
		return needsIdle && !slices.ContainsFunc(v.Devices, waits)
	}
	return !slices.ContainsFunc(v.Steps, possibleOnceDrained)
}

// whyNotRebooted says why a node that needs a reboot is not rebooted by the operator, and what helps.
func whyNotRebooted(v *View) (message string, is bool) {
	switch {
	case !targetNeedsReboot(v) || OnlyRebootLeft(v):
		return "", false
	case v.RolloutSpec().Reboot != v1alpha1.RebootModeIfRequired:
		return "; the policy does not let the operator do it (rollout.reboot: Never): set it to IfRequired, or reboot the node " +
			fmt.Sprintf("within %s", timing.ApplyTimeout), true
	case rebootDestroys(v) != "":
		return fmt.Sprintf("; the operator does not reboot the node, because that destroys the MIG instances of %s, which the policy does not "+
			"select: reboot the node within %s, or select these GPUs too", rebootDestroys(v), timing.ApplyTimeout), true
	}
	return fmt.Sprintf("; the policy lets the operator reboot the node (rollout.reboot: IfRequired), but its agent cannot: "+
		"let it, as it says, or reboot the node within %s", timing.ApplyTimeout), true
}

// beingRebooted is the result of a node that is being rebooted. Nothing but the node itself can end that.
func beingRebooted(v *View) Result {
	r := Result{
		State: Unknown, Reason: v1alpha1.ReasonRebooting,
		Message: "the node is being rebooted, as rollout.reboot allows; waiting until its agent is Ready again",
	}
	r.After = max(v.Node.GPU.Spec.ChangeTime.Add(timing.RebootTimeout).Sub(v.Snapshot.Now), 0)
	if r.After == 0 {
		r.Reason = v1alpha1.ReasonAgentNotReporting
		r.Message = fmt.Sprintf("the node was rebooted and its agent is not Ready again within %s; look at the machine", timing.RebootTimeout)
	}
	return r
}

// leftUntilManualReboot leaves such a node to its users until an administrator reboots it. There is no other state to
// go back to, and to drain it once more, or to stop NVIDIA's operands, would bring nothing.
func leftUntilManualReboot(v *View) Result {
	r := Result{State: Failed, Reason: v1alpha1.ReasonRebootRequired}
	r.Next = atOnce(RestoreScheduling(v, "only a reboot of the node helps")...)
	what := agentMessage(v, "A MIG mode of the node changes only at a reboot")
	reason, message, stalled := v.ApplyStalled()
	switch {
	case stalled:
		r.Reason, r.Message = reason, message
	case v.RolloutSpec().Reboot == v1alpha1.RebootModeIfRequired && rebootDestroys(v) != "":
		r.Message = fmt.Sprintf("%s. The operator does not reboot the node, because that destroys the MIG instances of %s, which no policy "+
			"selects. Reboot the node", what, rebootDestroys(v))
	case v.RolloutSpec().Reboot == v1alpha1.RebootModeIfRequired:
		r.Message = what + ". The policy lets the operator reboot the node, but the agent cannot. Reboot the node, or let the agent do it"
	case v.Policy == nil:
		r.Message = what + ". The last policy did not let the operator reboot the node (rollout.reboot: Never). Reboot the node"
	default:
		r.Message = what + ". The policy does not let the operator reboot the node (rollout.reboot: Never). Reboot the node, or set " +
			"rollout.reboot to IfRequired"
	}
	return r
}

// rebooting lets the agent reboot a node that nobody uses, then waits for it.
func rebooting(v *View, r Result) Result {
	if rebootPermitted(v) {
		return applying(v)
	}
	r.State, r.Reason = Idle, v1alpha1.ReasonRebooting
	r.Message = "a MIG mode changes only at a reboot; nobody uses a GPU of the node, and it is going to be rebooted"
	r.Next = withSlot(v, permitReboot(v))
	return r
}
