// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/clusterpolicy"
)

// World is everything that a decision depends on, as one pass read it from the cache. Decide changes none of it.
type World struct {
	// Now is the time of the pass.
	Now time.Time
	// Wiring is how NVIDIA's device plugin is installed and whether it reads our ConfigMap.
	Wiring Wiring
	// Keys is the content of our ConfigMap: those keys that our field manager owns. Nil when there is none yet.
	Keys map[string]string
	// Copied is the content of the copy of our ConfigMap in the operator's namespace.
	Copied map[string]string
	// Policies are all policies, with their last status.
	Policies []v1alpha1.GPUSharingPolicy
	// Nodes are all nodes that have a GPUNode.
	Nodes []Node
	// Unscheduled are the pods that ask for GPUs or instances and are on no node.
	Unscheduled []Pod
	// NodePools are the NodePools of Karpenter, by name; nil: none, or not known.
	NodePools map[string]NodePool
	// ReadinessTaint says that nodes that Karpenter made get the startup taint v1alpha1.TaintStartupReadiness, since every Karpenter
	// of the cluster is v1.13 or newer. False: Karpenter's nodes get none from the operator.
	ReadinessTaint bool
	// UnscheduledVersion tells one value of Unscheduled from another, for Memory. 0: not known, so nothing is remembered of them.
	UnscheduledVersion int64
	// Repeats counts what was written in the last hour; nil: nothing is held back for that.
	Repeats *Repeats
	// Sightings remembers other controllers that were seen a moment ago; nil: only the annotation on the Node does.
	Sightings *Sightings
	// mpsUsers are the pods that hold GPUs on nodes where NVIDIA's MPS DaemonSet runs. Decide finds them.
	mpsUsers []string
}

// Wiring is how NVIDIA's device plugin is installed and whether it reads our ConfigMap.
type Wiring struct {
	// Reason is why no policy can be honoured in this cluster: DRAStackActive or NoDevicePlugin. Empty: one can.
	Reason string
	// Message says what, where and what to do next; set with Reason, and when something keeps Ready from becoming true.
	Message string
	// Ready says that the device plugin is configured to read our ConfigMap. Until then no key is selected on a node.
	Ready bool
	// ClusterPolicy says that the GPU Operator runs the device plugin, so that its deploy labels start and stop NVIDIA's
	// programs on a node. False: a stand-alone device plugin.
	ClusterPolicy bool
	// NodeFeatures reports whether the API server has the kind NodeFeature of Node Feature Discovery (NFD).
	NodeFeatures bool
	// Operands is what the ClusterPolicy says of NVIDIA's daemon sets; nil with a stand-alone device plugin.
	Operands *clusterpolicy.Operands
	// NoMIGManager is why NVIDIA's mig-manager cannot be asked for anything in this cluster; empty: it can.
	NoMIGManager string
	// MIGReady says that NVIDIA's mig-manager is configured to read our ConfigMap, and that the file for it is there.
	MIGReady bool
	// Keys are the keys that the wiring itself needs in our ConfigMap, each with its content: the default key
	// (deviceplugin.Default) and those copied from the ConfigMap that was there before us (deviceplugin.Adopt).
	Keys map[string]string
}

// Node is a node that has GPUs, with what is on it.
type Node struct {
	Name string
	// Version tells one value of the node from another, for Memory: with another version anything else may differ. 0: not
	// known, so nothing is remembered of the node.
	Version     int64
	Labels      map[string]string
	Annotations map[string]string
	Taints      []corev1.Taint
	// Created is when the node joined.
	Created time.Time
	// Allocatable is Node.status.allocatable of the extended resources nvidia.com/*.
	Allocatable map[string]int64
	// Unhealthy is, by resource, the number of devices that NVIDIA's device plugin has registered and reports as unhealthy:
	// capacity less allocatable. Nil if there are none.
	Unhealthy map[string]int64
	// GPU is the GPUNode of the node: its spec and status.rollout as last written by the controller, the rest of its status as last
	// written by its agent.
	GPU v1alpha1.GPUNode
	// BaselineLost is true if the GPUNode lacks what the copy of its baseline on the Node has. GPU.Spec has it.
	BaselineLost bool
	// ChangedFor is the policy on whose behalf the node was changed last, by the copy of its baseline; empty: not recorded.
	ChangedFor string
	// AgentReady says that a pod of the agent on the node is Ready.
	AgentReady bool
	// HeldSince is since when, at the latest, a label on it says that somebody is at work there: a deploy label of NVIDIA's
	// that is neither true nor false, or mig-manager's state. Zero if none does, or it is not known.
	HeldSince time.Time
	// ConfigWriter is the field manager that set the label nvidia.com/device-plugin.config last, if that is another than the
	// operator; empty: not known.
	ConfigWriter string
	// Slicer is an extended resource by which another operator that partitions GPUs shows on the node; empty: none does.
	Slicer string
	// SlicerLeft is such a resource with quantity 0. The kubelet lists a resource for ever, so it tells a plugin that restarts from
	// one that is uninstalled only by how long this lasts. Empty: none is listed.
	SlicerLeft string
	// DRA is an object, besides pods, by which NVIDIA's DRA driver shows that it offers the GPUs of the node, such as
	// "DaemonSet nvidia-dra/kubelet-plugin"; empty: none does.
	DRA string
	// Features is what the NodeFeature objects of the node say about the label nvidia.com/mps.capable.
	Features NodeFeatures
	// Pods are the pods bound to the node that have not finished (phase neither Succeeded nor Failed).
	Pods []Pod
}

// Pod is what of a pod matters here.
type Pod struct {
	Namespace, Name, UID string
	// Controller is the kind of its controlling owner, such as DaemonSet; empty if it has none.
	Controller string
	// Mirror marks the mirror of a static pod: it has the annotation kubernetes.io/config.mirror.
	Mirror bool
	// Terminating says that its deletion timestamp is set.
	Terminating bool
	// EndsBy is its deletion timestamp: when it must have ended.
	EndsBy time.Time
	// GPU reports that one of its containers requests GPUs or MIG instances.
	GPU bool
	// Asks are the resources of GPUs and instances that it asks for; nil for none.
	Asks map[string]int64
	// Workload names what has made it, such as "Deployment team/web"; set for pods that ask for GPUs.
	Workload string
	// InitHolds reports that an init container holds, or is about to hold, a GPU. The kubelet reports to no agent which GPUs
	// init containers hold, other than sidecars.
	InitHolds bool
	// Claim is the ResourceClaim, as namespace/name, by which it has GPUs of NVIDIA's DRA driver; empty: it has none, or nobody
	// reports that.
	Claim string
	// Refused is why the API server refused to evict it when the controller last asked, and what to do about it; empty: it did
	// not, or has not been asked for a minute.
	Refused string
	// Tolerates reports that it tolerates v1alpha1.TaintChanging; set for pods that ask for GPUs.
	Tolerates bool
	// Scheduled is when it was bound to the node: the last transition of its condition PodScheduled. Zero if not known.
	Scheduled time.Time
	// NodeSelector is spec.nodeSelector: NVIDIA's programs select the deploy label that starts and stops them.
	NodeSelector map[string]string
	// DRA says that it offers GPUs through ResourceClaims: the kubelet plugin of NVIDIA's DRA driver.
	DRA bool
	// MountsConfig says that one of its volumes is our ConfigMap.
	MountsConfig bool
	// Nudge is the value of its annotation v1alpha1.AnnotationNudge.
	Nudge string
	// Validator says that it is a test workload of the GPU Operator's validator, which holds a GPU or an instance.
	Validator bool
	// ReadySince is when it became Ready; zero if it is not.
	ReadySince time.Time
	// Troubles are the containers that do not run as they should; of NVIDIA's programs only.
	Troubles []Trouble
	// Serves says that it is one of the pods without which the GPUs of the node are not offered: NVIDIA's programs, and the
	// worker of Node Feature Discovery, whose labels start them.
	Serves bool
	// Tolerations are its tolerations, but for those that every pod of a daemon set has.
	Tolerations []corev1.Toleration
}

// Action is one change of the API. Actions are a closed set: WriteKeys, Nudge, PatchNode, Taint, Untaint, KeepTaints, Evict,
// DeletePod, KeepMPSOff, AllowMPS, SetSpec and Report. Each is idempotent, and each stands alone: when one fails the others may still be carried out,
// and what is missing is decided again in the next pass. String is what logs and events print.
type Action interface {
	String() string
	// Target is the name of the node that the action concerns; empty for WriteKeys.
	Target() string
	// For is the policy on whose behalf it is done: zero for what no policy asks for. Before Taint, Evict, SetSpec and
	// PatchNode of a policy the executor makes sure by one uncached read in each pass that the policy still has this
	// generation, and otherwise leaves the action out.
	For() PolicyRef
	isAction()
}

// PolicyRef is a policy at a generation.
type PolicyRef struct {
	Name       string
	Generation int64
}

// WriteKeys applies our ConfigMap with exactly Data (server-side: keys that we applied before and are not in Data go,
// keys of others stay). It creates the ConfigMap if there is none. It comes first in a decision.
type WriteKeys struct {
	Data map[string]string
}

// Nudge sets the annotation v1alpha1.AnnotationNudge of a pod that mounts our ConfigMap, so that the kubelet projects the
// ConfigMap into it at once. A pod that is gone is no error.
type Nudge struct {
	Node           string
	Namespace, Pod string
	UID            string // precondition of the patch
	Value          string // <key>@<seconds since 1970>
}

// PatchNode changes labels and annotations of a Node in one patch. A nil value removes the entry; entries that are not
// named stay. It selects a key, pauses and resumes NVIDIA's clients, and fences NVIDIA's mig-manager.
type PatchNode struct {
	Node        string
	Labels      map[string]*string
	Annotations map[string]*string
	Policy      PolicyRef
	// Why is what the patch is for, in a few words: "selecting research-5f3a1c", "pausing NVIDIA's GPU clients".
	Why string
	// Locked says that the patch takes something from the node, so it carries the resource version of the Node that the
	// world was read from, as Taint does, and is left to the next pass when the Node has changed since.
	Locked bool
}

// Taint adds a taint to a node, as a merge patch with optimistic lock (taints are an atomic list). A node that has a
// taint of that key and effect already is left alone.
type Taint struct {
	Node  string
	Taint corev1.Taint // with TimeAdded
	// Baseline is the copy of the node's baseline that is written in the same patch (v1alpha1.AnnotationBaseline).
	Baseline string
	Policy   PolicyRef
}

// Untaint removes our taint v1alpha1.TaintChanging, likewise with optimistic lock.
type Untaint struct {
	Node string
}

// KeepTaints makes Want the taints on a node that are there for a policy's sake, besides v1alpha1.TaintChanging: it adds
// what is missing, takes off what is ours and not among them, and records what is ours in the annotation
// v1alpha1.AnnotationTaints, in one patch with optimistic lock. Retaint says how.
type KeepTaints struct {
	Node   string
	Want   []corev1.Taint
	Policy PolicyRef
}

// Evict asks for the eviction of a pod through the Eviction API, without waiting for it. A refusal by a
// PodDisruptionBudget (429) is no error: the next pass asks again.
type Evict struct {
	Node           string
	Namespace, Pod string
	UID            string // precondition of the eviction
	Why            string // what it holds that must be freed
	Policy         PolicyRef
}

// DeletePod deletes a pod of one of NVIDIA's daemon sets, so that it starts anew: the MPS control daemon does not notice
// a new configuration otherwise. A pod that is gone is no error.
type DeletePod struct {
	Node           string
	Namespace, Pod string
	UID            string // precondition of the deletion
	Why            string
}

// KeepMPSOff applies the operator's NodeFeature for a node, which sets the label nvidia.com/mps.capable to false, so that
// NVIDIA's MPS DaemonSet has no pod there.
type KeepMPSOff struct {
	Node   string
	Policy PolicyRef
}

// AllowMPS deletes the operator's NodeFeature for a node. One that is gone is no error.
type AllowMPS struct {
	Node string
}

// SetSpec applies GPUNode.spec as a whole (server-side): what Spec leaves out goes.
type SetSpec struct {
	Node   string
	Spec   v1alpha1.GPUNodeSpec
	Policy PolicyRef
	Why    string // "applying the policy", "rolling back", "restoring the baseline", "recording the last good state"
}

// Report applies what the controller writes of the status of a GPUNode (server-side): rollout, observedGeneration, and the conditions
// Ready, Reconciling and Stalled. Status has nothing else.
type Report struct {
	Node   string
	Status v1alpha1.GPUNodeStatus
	Why    string // "recording the last good state", "reporting GPUInUse"
	// Policy is the policy that governs the node, if one does. The report is written all the same if the policy changes meanwhile.
	Policy PolicyRef
	// Stuck reports that the node cannot return to its baseline as yet, which no policy can report.
	Stuck bool
}

// State is how far a node is on its way. It is derived in each pass and never stored.
type State string

// The states, in the order in which a disruptive change goes through them.
const (
	StateUndiscovered    State = "Undiscovered"    // the agent has not reported the GPUs, or does not run
	StateImpossible      State = "Impossible"      // the wish cannot be met on this node until it or the node changes
	StateStaleGentle     State = "StaleGentle"     // differs from the wish; no step needs anything idle
	StateStaleDisruptive State = "StaleDisruptive" // differs from the wish; some step needs a GPU or instance idle
	StateDraining        State = "Draining"        // tainted; pods or processes hold what must be freed
	StateQuiescing       State = "Quiescing"       // drained; NVIDIA's own clients must close their handles
	StateQuiet           State = "Quiet"           // nothing is in the way
	StateApplying        State = "Applying"        // the agent changes the GPUs
	StateFailed          State = "Failed"          // the wish failed here; the node goes back to its last good state
	StateSelecting       State = "Selecting"       // the device-plugin configuration is made visible and selected
	StateVerifying       State = "Verifying"       // the node does not yet advertise what it must
	StateReleasing       State = "Releasing"       // done but for our taint
	StateDegraded        State = "Degraded"        // was up to date and does not advertise that any more; nothing is changed
	StateUpToDate        State = "UpToDate"
)

// NodeState is what was found out about one node.
type NodeState struct {
	Node string
	// Policy governs the node; empty: none does, and the node goes or went back to its baseline.
	Policy string
	State  State
	// Reason is one of the constants of the API; Ready when State is UpToDate.
	Reason string
	// Message says what, where and what to do next; empty when State is UpToDate.
	Message string
	// Plan are the steps that bring the GPUs to the wish, as the agent will carry them out.
	Plan []string
	// InTheWay are those who use what the plan needs to be idle, sorted by name.
	InTheWay []User
	// Key is the key of the device-plugin configuration that the node is to select; empty: none.
	Key string
	// Advertised are the extended resources of GPUs and instances that the node advertises now.
	Advertised map[string]int64
	// Expected are the extended resources that the node advertises once it is up to date.
	Expected map[string]int64
	// Devices are the GPUs that the operator changes or has changed, each with its desired state or its baseline.
	Devices []v1alpha1.DeviceSpec
	// Replicas is how often each GPU or instance is advertised by its resource once the node is up to date; nil: no policy governs it.
	Replicas map[string]int32
	// Retained reports whether the node stays as it is because the last policy that governed it has releasePolicy Retain.
	Retained bool
}

// Decision is one safe pass towards what the policies ask.
type Decision struct {
	// Actions are what is to be done now, in this order.
	Actions []Action
	// Policies is the status of each policy by name, complete and ready to be applied: conditions that did not change
	// keep their last transition time.
	Policies map[string]v1alpha1.GPUSharingPolicyStatus
	// Unmet tells of each policy the workloads of which no node meets the request once all policies are in force, a line each.
	Unmet map[string][]string
	// Nodes are the states of all nodes that a policy governs or governed, by name.
	Nodes []NodeState
	// Wire says that the device plugin has to read our ConfigMap: a policy governs some node and is not paused, or a node
	// is not back at its baseline. Once the ClusterPolicy names our ConfigMap, a policy that governs no node is enough. False: the
	// ClusterPolicy may be put back to what it was.
	Wire bool
	// Held is why devicePlugin.config of the ClusterPolicy must not change now, in either direction; empty if it may.
	Held string
	// KeepStrategy is true if a node that no policy changes has GPUs in MIG mode and no config of its own, so that the default
	// config must offer its instances as mig.strategy of the ClusterPolicy said.
	KeepStrategy bool
	// Tolerations are those in the ClusterPolicy that shall be ours: exactly these and no others.
	Tolerations []corev1.Toleration
	// WireMIG says that NVIDIA's mig-manager has to read our ConfigMap: it partitions the GPUs of some node, or is to go back
	// to what it did there before.
	WireMIG bool
	// After is when to decide again though nothing changes, because a deadline or the time of a nudge passes; 0: never.
	After time.Duration
}
