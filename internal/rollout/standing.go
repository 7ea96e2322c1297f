// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"

// standing is how a node counts in the status of its policy. The lower, the worse.
type standing int

const (
	// nodeFailed: the change failed. The node is tried again only when something changes.
	nodeFailed standing = iota
	// nodeUnsupported: the node cannot satisfy the policy.
	nodeUnsupported
	// nodeBlocked: the change waits for something that the rollout itself does not bring about: pods or processes that use the GPUs,
	// an agent that does not report, NVIDIA's programs, another controller.
	nodeBlocked
	// nodeWaiting: the rollout has not come to the node yet, or is changing it.
	nodeWaiting
	// nodeReady: the node advertises what the policy asks for.
	nodeReady
)

// standingOf is the standing of a node with that state and reason.
func standingOf(s State, reason string) standing {
	switch {
	case s == StateUpToDate:
		return nodeReady
	case s == StateFailed:
		return nodeFailed
	case s == StateImpossible:
		return nodeUnsupported
	case passes(reason):
		return nodeWaiting
	}
	return nodeBlocked
}

// passes reports whether a node with that reason waits for its turn, or for a step of the rollout that ends by itself.
func passes(reason string) bool {
	switch reason {
	case v1alpha1.ReasonProgressing, v1alpha1.ReasonPaused, v1alpha1.ReasonInvalidWindow, v1alpha1.ReasonOutsideWindow,
		v1alpha1.ReasonWaitingForFirst, v1alpha1.ReasonWaitingForBudget, v1alpha1.ReasonRolloutHalted,
		v1alpha1.ReasonConfiguringDevicePlugin, v1alpha1.ReasonPausingClients, v1alpha1.ReasonDisablingNVIDIAMPS,
		v1alpha1.ReasonApplying, v1alpha1.ReasonRebooting, v1alpha1.ReasonMIGManagerPartitioning,
		v1alpha1.ReasonSelecting, v1alpha1.ReasonVerifying:
		return true
	}
	return false
}

// updated reports whether the GPUs of a node with that state are as its policy asks, and the node selects the config of the policy.
func updated(s State) bool {
	return s == StateVerifying || s == StateReleasing || s == StateDegraded || s == StateUpToDate
}
