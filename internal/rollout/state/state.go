// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package state

// State is how far a node is on its way. It is derived in each pass and never stored.
type State string

// The states, in the order in which a disruptive change goes through them.
const (
	Unknown              State = "Undiscovered"    // the agent has not reported the GPUs, or does not run
	Unsupported          State = "Impossible"      // the wish cannot be met on this node until it or the node changes
	PendingNonDisruptive State = "StaleGentle"     // differs from the wish; no step needs anything idle
	PendingDisruptive    State = "StaleDisruptive" // differs from the wish; some step needs a GPU or instance idle
	Draining             State = "Draining"        // tainted; pods or processes hold what must be freed
	PausingClients       State = "Quiescing"       // drained; NVIDIA's own clients must close their handles
	Idle                 State = "Quiet"           // nothing is in the way
	Applying             State = "Applying"        // the agent changes the GPUs
	Failed               State = "Failed"          // the wish failed here; the node goes back to its last good state
	Selecting            State = "Selecting"       // the device-plugin configuration is made visible and selected
	Verifying            State = "Verifying"       // the node does not yet advertise what it must
	Releasing            State = "Releasing"       // done but for our taint
	Degraded             State = "Degraded"        // was up to date and does not advertise that any more; nothing is changed
	UpToDate             State = "UpToDate"
)
