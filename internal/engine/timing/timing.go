// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package timing

import (
	"strconv"
	"strings"
	"time"
)

// ManagerTimeout is how long mig-manager may take: it waits five minutes for each of NVIDIA's operands to end.
const ManagerTimeout = 20 * time.Minute

// Stamp is a key with a time: <key>@<seconds since 1970>.
func Stamp(key string, at time.Time) string { return key + "@" + strconv.FormatInt(at.Unix(), 10) }

// Stamped is the time of a stamp of that key; ok is false if it is of another key or none.
func Stamped(value, key string) (at time.Time, ok bool) {
	is, at, ok := Parse(value)
	return at, ok && is == key
}

// Parse returns the key and the time of a stamp; ok is false if value is none.
func Parse(value string) (key string, at time.Time, ok bool) {
	key, seconds, found := strings.Cut(value, "@")
	if !found {
		return "", time.Time{}, false
	}
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return "", time.Time{}, false
	}
	return key, time.Unix(n, 0), true
}

// Patience is how long another controller is left alone that reverts again what the operator had set once more: the
// same as with the fields of the ClusterPolicy.
const Patience = time.Hour

// mostPatience is the longest that Backoff returns.
const mostPatience = 8 * Patience

// Backoff returns how long a node is left to its users after a change has timed out so many times in succession:
// Patience, then twice as long each time, up to eight hours.
func Backoff(times int) time.Duration {
	return Doubled(Patience, mostPatience, times)
}

// Doubled is how long is waited after something has failed so many times in succession: first, then twice as long each
// time, up to longest.
func Doubled(first, longest time.Duration, times int) time.Duration {
	wait := first
	for i := 1; i < times && wait < longest; i++ {
		wait *= 2
	}
	return min(wait, longest)
}

// ClocksDiffer is by how much the clocks of two machines may differ.
const ClocksDiffer = time.Minute

// PoliciesReturn is how long after a GPUNode was made anew its node waits for a policy before it is restored. Who
// restores a cluster from a backup, or installs definitions again, creates the policies in the minutes after them.
const PoliciesReturn = 10 * time.Minute

// Deadlines of the states that wait for another program.
const (
	// ApplyTimeout is how long an agent may take. NVIDIA's own tools wait five minutes for each operand and reset GPUs
	// in turn, so a change that is on its way ends well before.
	ApplyTimeout = 15 * time.Minute
	// StopTimeout is how long NVIDIA's programs may take to end: as long as its mig-manager waits for each.
	StopTimeout = 5 * time.Minute
	// VerifyTimeout is how long a node may take to advertise what was selected. The plugin retries every 30 s, and MPS
	// under the GPU Operator needs up to three minutes (GFD, NFD, scheduling of the MPS pod).
	VerifyTimeout = 5 * time.Minute
	// VisibleAfter is how long after a sync is triggered a new key is visible in a pod, where no agent says when it is:
	// 0.1 to 0.9 s were measured.
	VisibleAfter = 2 * time.Second
	// AgentSilent is how long after a new desired state an agent that watched a pod may say nothing of it. The kubelet
	// projects by itself within 90 s.
	AgentSilent = 3 * time.Minute
	// PluginRestart is how long a device plugin is left alone before it is started anew.
	PluginRestart = 10 * time.Minute
	// PluginAway is how long a node may go without the device plugin under our taint before that is taken for the
	// reason, and how long a plugin that must be there is waited for if its pod does not show.
	PluginAway = 30 * time.Second
	// ManagerReturns is how long the pod of NVIDIA's mig-manager may take to come back to a node, and to begin with
	// what its label names.
	ManagerReturns = 30 * time.Second
	// PluginSettles is how long after NVIDIA's device plugin became Ready it surely runs the configuration that the
	// node selects. It starts with the default, and its config-manager corrects that once it has read the Node.
	PluginSettles = 5 * time.Second
	// ClaimsSettle is how long after the devices of a node were tainted a claim may still be allocated by a scheduler
	// that had not seen the taint.
	ClaimsSettle = 3 * time.Second
	// ReportAfter is how long after a pod was bound to a node the agent has surely reported what it holds.
	ReportAfter = 20 * time.Second
)

// Latest returns the later of two times.
func Latest(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// MaintenanceTimeout is how long a node under maintenance keeps its slot in the budget. A driver container that builds
// the driver takes up to 20 minutes.
const MaintenanceTimeout = 30 * time.Minute

// Grace is how long no deadline counts as missed since a controller began to lead, or the machine's agent came back: what
// passed it meanwhile may have come to its end unseen, or starts just now.
const Grace = 2 * time.Minute

// NodeFeatureTimeout is how long NFD may take to change the label nvidia.com/mps.capable. It acts once per second.
const NodeFeatureTimeout = 30 * time.Second

// RebootTimeout is how long a node may take to reboot and its GPUs to match the desired state then: a cloud machine is
// back in minutes, and the GPU Operator's driver container may have to build the driver first.
const RebootTimeout = 30 * time.Minute

// Sooner is the earlier of two times to look again; 0 is never, and so is less.
func Sooner(a, b time.Duration) time.Duration {
	if a <= 0 || b > 0 && b < a {
		return max(b, 0)
	}
	return a
}

// Deadlines of what is left half-done.
const (
	// UnrepairedTimeout is how long NVIDIA's operands may be stopped, and its mig-manager at work, while neither says
	// anything new. It waits five minutes at most for each operand, and tells nothing meanwhile.
	UnrepairedTimeout = 15 * time.Minute
	// EndTimeout is how long a pod may still be there after it must have ended.
	EndTimeout = 2 * time.Minute
	// OutdatedTimeout is how long pods may go on reading another ConfigMap before they are started anew.
	OutdatedTimeout = 10 * time.Minute
)
