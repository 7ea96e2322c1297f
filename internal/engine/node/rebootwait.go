// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// awaitNodeUp waits for a node that is being rebooted. Nothing but the node itself can end that.
func awaitNodeUp(v *View) Result {
	j := Result{
		State: Unknown, Reason: v1alpha1.ReasonRebooting,
		Message: "the node is being rebooted, as rollout.reboot allows; waiting until its agent is Ready again",
	}
	j.After = max(v.Node.GPU.Spec.ChangeTime.Add(timing.RebootTimeout).Sub(v.Snapshot.Now), 0)
	if j.After == 0 {
		j.Reason = v1alpha1.ReasonAgentNotReporting
		j.Message = fmt.Sprintf("the node was rebooted and its agent is not Ready again within %s; look at the machine", timing.RebootTimeout)
	}
	return j
}

// awaitReboot leaves a stranded node to its users until an administrator reboots it. There is no other state to go back to, and to drain
// it once more, or to pause NVIDIA's clients, would bring nothing.
func awaitReboot(v *View) Result {
	j := Result{State: Failed, Reason: v1alpha1.ReasonRebootRequired}
	j.Next = atOnce(RestoreScheduling(v, "only a reboot of the node helps")...)
	what := agentMessage(v, "A MIG mode of the node changes only at a reboot")
	reason, message, stalled := v.Stalled()
	switch {
	case stalled:
		j.Reason, j.Message = reason, message
	case v.Rules().Reboot == v1alpha1.RebootModeIfRequired && rebootDestroys(v) != "":
		j.Message = fmt.Sprintf("%s. The operator does not reboot the node, because that destroys the MIG instances of %s, which no policy "+
			"selects. Reboot the node", what, rebootDestroys(v))
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
