// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// Standing is how a node counts in the status of its policy. The lower, the worse.
type Standing int

const (
	// NodeFailed is a node on which the change failed. The node is tried again only when something changes.
	NodeFailed Standing = iota
	// NodeUnsupported is a node that cannot satisfy the policy.
	NodeUnsupported
	// NodeBlocked is a node whose change waits for something that the rollout itself does not bring about: pods or processes that use the GPUs,
	// an agent that does not report, NVIDIA's programs, another controller.
	NodeBlocked
	// NodeWaiting is a node that the rollout has not come to yet, or is changing.
	NodeWaiting
	// NodeReady is a node that advertises what the policy asks for.
	NodeReady
)

// StandingOf is the standing of a node with that state and reason.
func StandingOf(s State, reason string) Standing {
	switch {
	case s == UpToDate:
		return NodeReady
	case s == Failed:
		return NodeFailed
	case s == Unsupported:
		return NodeUnsupported
	case passesByItself(reason):
		return NodeWaiting
	}
	return NodeBlocked
}

// passesByItself reports whether a node with that reason waits for its turn, or for a step of the rollout that ends by itself.
func passesByItself(reason string) bool {
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

// Updated reports whether the GPUs of a node with that state are as its policy asks, and the node selects the config of the policy.
func Updated(s State) bool {
	return s == Verifying || s == Releasing || s == Degraded || s == UpToDate
}

// NeedsAttention reports whether a person should look at a node with that state and reason: its change failed or cannot be made, or something
// on it is left undone. Others are on their way, or wait for something that passes.
func NeedsAttention(state, reason string) bool {
	if state == string(Failed) || state == string(Unsupported) {
		return true
	}
	return slices.Contains([]string{
		v1alpha1.ReasonNotAdvertised, v1alpha1.ReasonClientsLeftPaused, v1alpha1.ReasonClientsNotEnding,
		v1alpha1.ReasonMIGManagerStuck, v1alpha1.ReasonMIGManagerUnfenced, v1alpha1.ReasonMIGConfigIgnored,
		v1alpha1.ReasonConfigManagerFailing, v1alpha1.ReasonDevicePluginFailing, v1alpha1.ReasonDevicePluginOutdated,
		v1alpha1.ReasonComputeModeLeft, v1alpha1.ReasonNodeFeatureIgnored, v1alpha1.ReasonMPSCapableReset, v1alpha1.ReasonMPSCapableStale,
		v1alpha1.ReasonChangedByOthers,
	}, reason)
}
