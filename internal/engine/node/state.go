// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

// How far a node is on its way, and how a node in a state counts in the status of its policy:
//
//	Unknown, Unsupported                                                     nothing is done
//	PendingNonDisruptive ─────────────────────────────────┐
//	PendingDisruptive → Draining → StoppingOperands → Idle ─┴→ Applying → Selecting → Verifying → Finishing → UpToDate
//	                        │                                   └────→ Failed ←─────────┘
//	                        └ not idle in time: Failed                   └ back to the last good state, or the baseline
//
// A state is derived in each reconcile and never stored. A node that was UpToDate and advertises something else, or
// whose labels another controller set again, is Degraded: it is reported, and holds no slot for that.

// State is how far a node is on its way. It is derived in each reconcile and never stored.
type State string

// The states. Those that a disruptive change goes through are in its order, from PendingDisruptive on; Failed and
// Degraded stand beside it.
const (
	Unknown              State = "Unknown"              // the agent has not reported the GPUs, or does not run
	Unsupported          State = "Unsupported"          // the node cannot satisfy the policy until the policy or the node changes
	PendingNonDisruptive State = "PendingNonDisruptive" // differs from the desired state; no step needs a GPU or instance idle
	PendingDisruptive    State = "PendingDisruptive"    // differs from the desired state; some step needs a GPU or instance idle
	Draining             State = "Draining"             // tainted; pods or processes use what must be idle
	StoppingOperands     State = "StoppingOperands"     // drained; NVIDIA's own operands must end
	Idle                 State = "Idle"                 // nothing blocks the change
	Applying             State = "Applying"             // the agent changes the GPUs
	Failed               State = "Failed"               // the change failed: the node is rolled back, or left to its users until it is tried again
	Selecting            State = "Selecting"            // the config of the device plugin is made visible and selected
	Verifying            State = "Verifying"            // the node does not advertise yet what it must
	Finishing            State = "Finishing"            // done but for what the operator still takes off: its taint, an override, operands that are stopped
	Degraded             State = "Degraded"             // was up to date, and no longer advertises or selects what it must; no GPU is changed
	UpToDate             State = "UpToDate"             // all stages are passed; the node advertises what it must, where that is known
)

// Standing is how a node counts in the status of its policy. The lower, the worse.
type Standing int

const (
	// NodeFailed is a node on which the change failed. The node is tried again when something changes, or
	// at the time that its message names.
	NodeFailed Standing = iota
	// NodeUnsupported is a node that cannot satisfy the policy.
	NodeUnsupported
	// NodeBlocked is a node whose change waits for something that the rollout itself does not bring about: pods or
	// processes that use the GPUs, an agent that does not report, NVIDIA's programs, another controller.
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
	case ClassOf(reason).Is(Transient):
		return NodeWaiting
	}
	return NodeBlocked
}

// Updated reports whether a node with that state counts as updated: its GPUs have become as its policy asks, and the
// config of the policy was selected. Another controller may have set the label again since (Degraded).
func Updated(s State) bool {
	return s == Verifying || s == Finishing || s == Degraded || s == UpToDate
}

// Worrying reports whether a person should look at a node with that state and reason: its change failed or cannot be
// made, or something on it is left undone. Others are on their way, or wait for something that ends by itself.
func Worrying(state, reason string) bool {
	return state == string(Failed) || state == string(Unsupported) || ClassOf(reason).Is(NeedsAttention)
}
