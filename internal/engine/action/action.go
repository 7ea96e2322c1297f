// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package action

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Action is one change of the API. Actions are a closed set: WriteConfigs, TriggerSync, PatchNode, Taint, Untaint,
// KeepTaints, Evict, DeletePod, KeepMPSOff, AllowMPS, TaintDevices, UntaintDevices, WriteClass, DeleteClass, SetSpec
// and Report. Each is idempotent, and each stands alone: when one fails the others may still be carried out, and what
// is missing is decided again in the next reconcile. String is what logs and events print.
type Action interface {
	String() string
	// NodeName is the name of the node that the action concerns; empty for WriteConfigs, WriteClass and DeleteClass.
	NodeName() string
	// For is the policy on whose behalf it is done: zero for what no policy asks for. Before Taint, TaintDevices,
	// Evict, SetSpec and PatchNode of a policy the executor makes sure by one uncached read in each reconcile that the
	// policy still has this generation, and otherwise leaves the action out.
	For() PolicyRef
	isAction()
}

// PolicyRef is a policy at a generation.
type PolicyRef struct {
	Name       string
	Generation int64
}

// WriteConfigs applies our ConfigMap with exactly Data (server-side: keys that we applied before and are not in Data
// go, keys of others stay). It creates the ConfigMap if there is none. It comes first in a decision.
type WriteConfigs struct {
	Data map[string]string
}

// TriggerSync sets the annotation v1alpha1.AnnotationSync of a pod that mounts our ConfigMap, so that the kubelet
// projects the ConfigMap into it at once. A pod that is gone is no error.
type TriggerSync struct {
	Node           string
	Namespace, Pod string
	UID            string // precondition of the patch
	Value          string // <key>@<seconds since 1970>
}

// PatchNode changes labels and annotations of a Node in one patch. A nil value removes the entry; entries that are not
// named stay. It selects a config, stops and starts NVIDIA's operands again, and disables NVIDIA's mig-manager.
type PatchNode struct {
	Node        string
	Labels      map[string]*string
	Annotations map[string]*string
	Policy      PolicyRef
	// Why is what the patch is for, in a few words: "selecting research-5f3a1c", "stopping NVIDIA's operands".
	Why string
	// Locked says that the patch takes something from the node, so it carries the resource version of the Node that the
	// snapshot was read from, as Taint does, and is left to the next reconcile when the Node has changed since.
	Locked bool

	stamps []string // labels and annotations that have this value already, but for the time (Restamped)
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

// KeepTaints makes Want the taints on a node that are there for a policy's sake, besides v1alpha1.TaintChanging: it
// adds what is missing, takes off what is ours and not among them, and records what is ours in the annotation
// v1alpha1.AnnotationTaints, in one patch with optimistic lock. rollout.Retaint says how.
type KeepTaints struct {
	Node   string
	Want   []corev1.Taint
	Policy PolicyRef
}

// Evict asks for the eviction of a pod through the Eviction API, without waiting for it. A refusal by a
// PodDisruptionBudget (429) is no error: the next reconcile asks again.
type Evict struct {
	Node           string
	Namespace, Pod string
	UID            string // precondition of the eviction
	Why            string // what it holds that must be freed
	Policy         PolicyRef
}

// DeletePod deletes a pod of NVIDIA's: one of a DaemonSet, so that it starts anew and sees the MIG instances or the
// config that are there, or a test of the GPU Operator's validator, which holds a GPU. A pod that is gone is no error.
type DeletePod struct {
	Node           string
	Namespace, Pod string
	UID            string // precondition of the deletion
	Why            string
	Occasion       string // that of another pod of the node for another one is no repeat
}

// KeepMPSOff applies the operator's NodeFeature for a node, which sets the label nvidia.com/mps.capable to false, so
// that NVIDIA's MPS DaemonSet has no pod there.
type KeepMPSOff struct {
	Node   string
	Policy PolicyRef
}

// AllowMPS deletes the operator's NodeFeature for a node. One that is gone is no error.
type AllowMPS struct {
	Node string
}

// TaintDevices applies the operator's DeviceTaintRule for a node, which keeps new pods off all devices that NVIDIA's
// DRA driver publishes there. Pods that have one stay.
type TaintDevices struct {
	Node   string
	Since  time.Time // when the taint is added
	Policy PolicyRef
}

// UntaintDevices deletes that rule. One that is gone is no error.
type UntaintDevices struct {
	Node   string
	Edited bool // another controller edited the rule, so the change that needs one makes another
}

// WriteClass applies the operator's DeviceClass for a MIG profile, so that pods get its instances by an extended
// resource.
type WriteClass struct{ Class dra.Write }

// DeleteClass deletes a DeviceClass of the operator's. One that is gone is no error.
type DeleteClass struct{ Name string }

// SetSpec applies GPUNode.spec as a whole (server-side): what Spec leaves out goes.
type SetSpec struct {
	Node   string
	Spec   v1alpha1.GPUNodeSpec
	Policy PolicyRef
	Why    string // "applying policy a100", "going back to the last good state", "letting the agent reboot the node"

	again bool // the GPUNode has this spec already, but for the time (Restamped)
}

// Report applies what the controller writes of the status of a GPUNode (server-side): rollout, observedGeneration, and
// the conditions Ready, Reconciling and Stalled. Status has nothing else.
type Report struct {
	Node   string
	Status v1alpha1.GPUNodeStatus
	Why    string // "recording the last good state", "reporting GPUInUse"
	// Policy is the policy that governs the node, if one does. The report is written all the same if the policy changes
	// meanwhile.
	Policy PolicyRef
	// Stuck reports that the node cannot return to its baseline as yet, which no policy can report.
	Stuck bool
}

// SetsSpec reports whether an action writes GPUNode.spec.
func SetsSpec(a Action) bool {
	_, is := a.(SetSpec)
	return is
}

// KeepsOff reports whether an action keeps new pods off the GPUs of a node.
func KeepsOff(a Action) bool {
	switch a.(type) {
	case Taint, TaintDevices:
		return true
	}
	return false
}

// OverrideName is the name of the operator's NodeFeature for a node. NFD reads the objects outside its own namespace in
// the order of their names, and a later one overwrites an earlier one (NFD pkg/nfd-master/nfd-master.go). So the name
// must sort after nvidia-features-for-<node> of GFD.
func OverrideName(node string) string { return "zz-gpu-sharing-" + node }

// NameOf is what tells a taint from the others of a node: its key and effect.
func NameOf(t corev1.Taint) string { return t.Key + ":" + string(t.Effect) }

// WithValue is a taint as kubectl writes it.
func WithValue(t corev1.Taint) string {
	if t.Value == "" {
		return NameOf(t)
	}
	return fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect)
}

// Names lists taints as kubectl writes them.
func Names(taints []corev1.Taint) []string {
	var all []string
	for _, t := range taints {
		all = append(all, WithValue(t))
	}
	return all
}
