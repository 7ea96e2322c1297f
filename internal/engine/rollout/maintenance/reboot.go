// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package maintenance

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
)

// Down waits for a node that is being rebooted. Nothing but the node itself can end that.
func Down(v *view.View) gate.Judgement {
	j := gate.Judgement{
		State: state.Unknown, Reason: v1alpha1.ReasonRebooting,
		Message: "the node is being rebooted, as rollout.reboot allows; waiting until its agent is Ready again",
	}
	j.After = max(v.Node.GPU.Spec.ChangeTime.Add(timing.RebootTimeout).Sub(v.World.Now), 0)
	if j.After == 0 {
		j.Reason = v1alpha1.ReasonAgentNotReporting
		j.Message = fmt.Sprintf("the node was rebooted and its agent is not Ready again within %s; look at the machine", timing.RebootTimeout)
	}
	return j
}

// AwaitReboot leaves a stranded node to its users until an administrator reboots it. There is no other state to go back to, and to drain
// it once more, or to pause NVIDIA's clients, would bring nothing.
func AwaitReboot(v *view.View) gate.Judgement {
	j := gate.Judgement{State: state.Failed, Reason: v1alpha1.ReasonRebootRequired}
	j.Next = gate.AtOnce(gate.LetGo(v, "only a reboot of the node helps")...)
	what := gate.AgentMessage(v, "A MIG mode of the node changes only at a reboot")
	reason, message, stalled := v.Stalled()
	switch {
	case stalled:
		j.Reason, j.Message = reason, message
	case v.Rules().Reboot == v1alpha1.RebootModeIfRequired && view.RebootDestroys(v) != "":
		j.Message = fmt.Sprintf("%s. The operator does not reboot the node, because that destroys the MIG instances of %s, which no policy "+
			"selects. Reboot the node", what, view.RebootDestroys(v))
	case v.Rules().Reboot == v1alpha1.RebootModeIfRequired:
		j.Message = what + ". The policy lets the operator reboot the node, but the agent cannot. Reboot the node, or let the agent do it"
	case v.Policy == nil:
		j.Message = what + ". The last policy did not let the operator reboot the node (rollout.reboot: Never). Reboot the node"
	default:
		j.Message = what + ". The policy does not let the operator reboot the node (rollout.reboot: Never). Reboot the node, or set " +
			"rollout.reboot to IfRequired"
	}
	return j
}
