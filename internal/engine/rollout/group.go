// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// Group is the nodes that share the budget of one policy: those that it governs, and those that it releases, also once
// it is deleted.
type Group struct {
	By         *v1alpha1.GPUSharingPolicy // nil: it is deleted
	Members    []*member                  // that it governs, by name
	Leaving    []*member                  // that it releases and that go back to their baselines, by name
	Lost       []lostNodes                // that another policy governs
	Unaffected []*member                  // that no policy governs, and that stay as they are
	// Counted are nodes of other groups that hold a slot here too: another policy governs them now, and they are still
	// tainted on behalf of this one; or it is not known on whose behalf they are.
	Counted []*member
	// Awaited are nodes that the policy may turn out to govern once their agents have reported their GPUs.
	Awaited []string
	// Unrecorded is the number of nodes whose GPUNode does not say yet how this policy releases them.
	Unrecorded int

	Beyond     int             // how many policies there are, if this one is beyond those that the operator follows
	Windows    timing.Calendar // in which disruptive changes start
	Invalid    error           // why the policy has no valid windows
	NextWindow *metav1.Time    // for which some node waits

	Failures int
	Halted   bool
	Changes  bool // a node is changed, or is to be, for another reason than pods that wait
}

// member is a node in the group that paces it.
type member struct {
	*node.View
	node.Result
	Slot
	// Actions are what is done about the node now. The step of its result (Result.Next) is among them once the budget
	// allows it.
	Actions     []action.Action
	CachedState *NodeState // its state, if that stays the same until something changes
	Unchanged   bool       // nothing is done about it until something changes: all that is said here stays the same
	Summary     summary
	TaintStatus taintStatus
	Demand      demandTally
	FirstSince  time.Time // of the last step of the node for which this one waits (WaitingForFirst)
	// Unserved reports that a policy selects the node, but no policy can be honoured in this cluster.
	Unserved bool
}

// summary is what a decision reads of each of all nodes. Of an unchanged node it is computed once.
type summary struct {
	NeedsPlugin, ByDefault, NeedsMIGManager bool
	// Configs are those that the Node and its GPUNode name: selected, asked for, and of the last good state. Empty:
	// none.
	Configs [3]string
	Offer   offer
}

// Slot is the slot that a node holds in the budget of its group. A node takes it with the first write of a change and
// gives it up when the change has succeeded, has failed and was rolled back, or has made no step until the deadline.
type Slot struct {
	HoldsSlot bool
	SlotUntil time.Time // deadline; set with HoldsSlot and SlotExpired
	// SlotExpired reports that the change is not over, but its deadline is: the node counts no longer.
	SlotExpired bool
}

// taintStatus is why a node lacks a taint that a policy keeps on it. Such taints are no part of the change that the
// budget paces: a taint keeps new pods off and disturbs none.
type taintStatus struct {
	Reason, Message string // why the node lacks a taint of its policy; empty: it does not
}

// lostNodes are nodes that a policy selects and another one governs.
type lostNodes struct {
	To    string
	Nodes []string // by name
}

// lost is how many nodes that the policy selects another one governs.
func (g *Group) lost() (count int) {
	for _, l := range g.Lost {
		count += len(l.Nodes)
	}
	return count
}

// demandTally is what unmetFinder and status count on a node.
type demandTally struct {
	Demands []podDemand // of the pods of the node
	Counts  []v1alpha1.ResourceCount
	Single  map[string]bool // the resources of which a container gets no more than one
}

// A cluster may have ten thousand pods that wait and thousands of nodes. So that a reconcile does not cost the product
// of both, pods with the same request and node selector are one demand, which is compared with the nodes once, and only
// with those that have one of the labels that it selects.

// Demand names a request of GPUs or instances and a node selector by their hashes: that is what decides where a pod may
// start.
type Demand struct{ Requests, Selector uint64 }

// podDemand is the demand of a pod of a node.
type podDemand struct {
	Demand
	Pod int // index in Node.Pods
}

// offer is what a node offers to pods once it is as its policy asks.
type offer struct {
	Policy    string // that governs the node; empty if none does
	Labels    map[string]string
	Resources map[string]int64
	// Single are the resources of which NVIDIA's device plugin gives a container no more than one.
	Single map[string]bool
}

// NodeState is what was found out about one node.
type NodeState struct {
	Node string
	// Policy governs the node; empty: none does, and the node goes or went back to its baseline.
	Policy string
	State  node.State
	// Reason is one of the constants of the API; Ready when State is UpToDate.
	Reason string
	// Message says what, where and what to do next; empty when State is UpToDate.
	Message string
	// Plan are the steps that bring the GPUs to the desired state, as the agent will carry them out.
	Plan []string
	// Blockers are those who use what the plan needs to be idle, sorted by name.
	Blockers []node.Blocker
	// ConfigName is the key of the device-plugin configuration that the node is to select; empty: none.
	ConfigName string
	// Advertised are the extended resources of GPUs and instances that the node advertises now.
	Advertised map[string]int64
	// Expected are the extended resources that the node advertises once it is up to date.
	Expected map[string]int64
	// Devices are the GPUs that the operator changes or has changed, each with its desired state or its baseline.
	Devices []v1alpha1.DeviceSpec
	// Replicas is how often each GPU or instance is advertised by its resource once the node is up to date; nil: no
	// policy governs it.
	Replicas map[string]int32
	// Limited reports whether its policy has the driver limit the memory of pods on time-sliced GPUs.
	Limited bool
	// Retained reports whether the node stays as it is because the last policy that governed it has releasePolicy
	// Retain.
	Retained bool
}

// HeldUp reports whether the change of the node has failed, cannot be made, or waits for what must come before it: the
// agent, a slot, users or NVIDIA's operands.
func (m *member) HeldUp() bool {
	return slices.Contains([]node.State{
		node.Failed, node.Unsupported, node.Unknown, node.PendingDisruptive, node.Draining, node.StoppingOperands,
	}, m.State)
}

// Paused reports whether the policy changes nothing as yet.
func (m *member) Paused() bool { return m.Policy != nil && m.Policy.Spec.Rollout.Paused }

// HasStatus reports whether there is anything to say about the node.
func (m *member) HasStatus() bool { return m.Policy != nil || m.Node.GPU.Spec.Baseline != nil }

// InvalidWindow is the message of a policy with an invalid maintenance window.
func (g *Group) InvalidWindow() string {
	return fmt.Sprintf("%s. Nothing changes until you correct it", g.Invalid)
}
