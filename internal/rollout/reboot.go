// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

// rebootTimeout is how long a node may take to reboot and its GPUs to be as wished then: a cloud machine is back in
// minutes, and the GPU Operator's driver container may have to build the driver first.
const rebootTimeout = 30 * time.Minute

// A GPU that cannot be reset takes a new MIG mode only at a reboot. That shows when the agent has tried: the mode is
// pending then, and everything else of the way there is done. What is left goes the same way as any disruptive change,
// with the whole node to become idle: taint, drain, and in place of the wish, which the spec has already, the permission
// to end the boot that the agent has reported. In another boot that permission is spent, so the node is never rebooted
// twice for one wish.

// awaitsReboot says whether a GPU takes its wished MIG mode only at a reboot.
func (v *view) awaitsReboot() bool {
	c, found := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired)
	return found && c.Status == metav1.ConditionTrue && wishes(v.node.GPU.Spec, v.to) &&
		(c.ObservedGeneration == v.node.GPU.Generation || v.permitted())
}

// pendsReboot reports whether the agent has tried what the spec asks for, and a GPU takes its MIG mode only at a reboot.
func (v *view) pendsReboot() bool {
	return condition.IsTrueAt(v.node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired, v.node.GPU.Generation)
}

// mayReboot says whether the operator may reboot the node if it has to: the policy allows it, the agent can, and it destroys nothing
// that is not the operator's.
func (v *view) mayReboot() bool {
	return v.rules().Reboot == v1alpha1.RebootModeIfRequired && v.node.GPU.Status.CanReboot && v.rebootDestroys() == ""
}

// rebootDestroys names the GPUs whose MIG instances would be gone after a reboot, because the agent makes those of its spec only; empty
// if there are none.
func (v *view) rebootDestroys() string {
	var names []string
	for _, d := range v.have {
		if len(d.State.Instances) > 0 && !lists(v.to.devices, d.UUID) {
			names = append(names, fmt.Sprintf("GPU %d", d.Index))
		}
	}
	return list(names)
}

// reboots says whether what is left to do is to reboot the node.
func (v *view) reboots() bool { return v.awaitsReboot() && v.mayReboot() }

// permitted says whether the agent has, or had, the permission to reboot the node for the target.
func (v *view) permitted() bool {
	p := v.node.GPU.Spec.Reboot
	return p != nil && p.Hash == v.to.hash()
}

// rebooting lets the agent reboot a node that nobody uses, then waits for it.
func (v *view) rebooting(j judgement) judgement {
	if v.permitted() {
		return v.applying()
	}
	j.State, j.reason = StateQuiet, v1alpha1.ReasonRebooting
	j.message = "a MIG mode changes only at a reboot; nobody uses a GPU of the node, and it is going to be rebooted"
	j.start = []Action{v.permitReboot()}
	return j
}

// goneDown waits for a node that is being rebooted. Nothing but the node itself can end that.
func (v *view) goneDown() judgement {
	j := judgement{
		State: StateUndiscovered, reason: v1alpha1.ReasonRebooting,
		message: "the node is being rebooted, as rollout.reboot allows; waiting until its agent is Ready again",
	}
	j.after = max(v.node.GPU.Spec.ChangeTime.Add(rebootTimeout).Sub(v.world.Now), 0)
	if j.after == 0 {
		j.reason = v1alpha1.ReasonAgentNotReporting
		j.message = fmt.Sprintf("the node was rebooted and its agent is not Ready again within %s; look at the machine", rebootTimeout)
	}
	return j
}

// permitReboot gives the permission. The time that the agent has begins anew with it.
func (v *view) permitReboot() SetSpec {
	spec := v.kept()
	spec.Reboot = &v1alpha1.RebootPermission{Hash: v.to.hash(), BootID: v.node.GPU.Status.BootID}
	spec.ChangeTime = metav1.NewTime(v.world.Now)
	return SetSpec{Node: v.node.Name, Spec: spec, Policy: v.ref(), Why: "letting the agent reboot the node"}
}

// withdrawReboot withdraws a permission that the agent has not used, and reports whether there was one. A spent one stays, so that no
// other is given.
func (v *view) withdrawReboot(spec *v1alpha1.GPUNodeSpec) bool {
	withdraws := spec.Reboot != nil && spec.Reboot.BootID == v.node.GPU.Status.BootID
	if withdraws {
		spec.Reboot = nil
	}
	return withdraws
}

// stranded reports whether the way back of a node has come to where only a reboot helps, and the operator makes none: it may not, the
// agent cannot, or the node was rebooted in vain.
func (v *view) stranded() bool {
	c, _ := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired)
	helpless := c.Reason == v1alpha1.ReasonRebootInVain || !v.permitted() && !v.mayReboot()
	if v.wish != nil && !v.fallsBack || !v.awaitsReboot() || !helpless {
		return false
	}
	drained := func(s plan.Step) bool { // the step is possible once the node is drained and NVIDIA's clients are paused
		waits := func(d gpu.Device) bool { return d.PendingMIG != d.State.MIG && slices.Contains(plan.GPUs(s), d.UUID) }
		disrupts := s.Needs() > plan.NeedsNothing || s.Closes()
		return disrupts && !slices.ContainsFunc(v.have, waits)
	}
	return !slices.ContainsFunc(v.steps, drained)
}

// awaitsSomebody leaves a stranded node to its users until somebody reboots it. There is no other state to go back to, and to drain
// it once more, or to pause NVIDIA's clients, would bring nothing.
func (v *view) awaitsSomebody() judgement {
	j := judgement{State: StateFailed, reason: v1alpha1.ReasonRebootRequired, actions: v.letGo("only a reboot of the node helps")}
	what := v.agentSays("A MIG mode of the node changes only at a reboot")
	reason, message, stalled := v.stalled()
	switch {
	case stalled:
		j.reason, j.message = reason, message
	case v.rules().Reboot == v1alpha1.RebootModeIfRequired && v.rebootDestroys() != "":
		j.message = fmt.Sprintf("%s. The operator does not reboot the node, because that destroys the MIG instances of %s, which no policy "+
			"selects. Reboot the node", what, v.rebootDestroys())
	case v.rules().Reboot == v1alpha1.RebootModeIfRequired:
		j.message = what + ". The policy lets the operator reboot the node, but the agent cannot. Reboot the node, or let the agent do it"
	case v.by == nil:
		j.message = what + ". The last policy did not let the operator reboot the node (rollout.reboot: Never). Reboot the node"
	default:
		j.message = what + ". The policy does not let the operator reboot the node (rollout.reboot: Never). Reboot the node, or set " +
			"rollout.reboot to IfRequired"
	}
	return j
}

// waitsForReboot says why a node that needs a reboot is not rebooted by the operator, and what helps.
func (v *view) waitsForReboot() (message string, is bool) {
	switch {
	case !v.awaitsReboot() || v.reboots():
		return "", false
	case v.rules().Reboot != v1alpha1.RebootModeIfRequired:
		return "; the policy does not let the operator do it (rollout.reboot: Never): set it to IfRequired, or reboot the node " +
			fmt.Sprintf("within %s", applyTimeout), true
	case v.rebootDestroys() != "":
		return fmt.Sprintf("; the operator does not reboot the node, because that destroys the MIG instances of %s, which the policy does not "+
			"select: reboot the node within %s, or select these GPUs too", v.rebootDestroys(), applyTimeout), true
	}
	return fmt.Sprintf("; the policy lets the operator reboot the node (rollout.reboot: IfRequired), but its agent cannot: "+
		"let it, as it says, or reboot the node within %s", applyTimeout), true
}
