// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// How far a node is on its way, and how a node in a state counts in the status of its policy:
//
//	Unknown, Unsupported                                                     nothing is done
//	PendingNonDisruptive ─────────────────────────────────┐
//	PendingDisruptive → Draining → PausingClients → Idle ─┴→ Applying → Selecting → Verifying → Releasing → UpToDate
//	                        │                                   └────→ Failed ←─────────┘
//	                        └ not idle in time: Failed                   └ back to the last good state, or the baseline
//
// A state is derived in each reconcile and never stored. A node that was UpToDate and advertises something else is Degraded: it is
// reported, and keeps no other node waiting.

// State is how far a node is on its way. It is derived in each reconcile and never stored.
type State string

// The states, in the order in which a disruptive change goes through them.
const (
	Unknown              State = "Unknown"              // the agent has not reported the GPUs, or does not run
	Unsupported          State = "Unsupported"          // the node cannot satisfy the policy until the policy or the node changes
	PendingNonDisruptive State = "PendingNonDisruptive" // differs from the desired state; no step needs a GPU or instance idle
	PendingDisruptive    State = "PendingDisruptive"    // differs from the desired state; some step needs a GPU or instance idle
	Draining             State = "Draining"             // tainted; pods or processes use what must be idle
	PausingClients       State = "PausingClients"       // drained; NVIDIA's own GPU clients must end
	Idle                 State = "Idle"                 // nothing blocks the change
	Applying             State = "Applying"             // the agent changes the GPUs
	Failed               State = "Failed"               // the change failed; the node is rolled back to its last good state
	Selecting            State = "Selecting"            // the config of the device plugin is made visible and selected
	Verifying            State = "Verifying"            // the node does not advertise yet what it must
	Releasing            State = "Releasing"            // done but for the operator's taint
	Degraded             State = "Degraded"             // was up to date and no longer advertises what it must; nothing is changed
	UpToDate             State = "UpToDate"             // the node advertises what it must
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
