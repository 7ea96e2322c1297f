// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// Two objects hold the baseline of a node, so that it survives the loss of either: GPUNode.spec.baseline, and a copy in
// the annotation v1alpha1.AnnotationBaseline of the Node. The copy is part of the first patch of the Node that belongs
// to a change, so it costs no write of its own. Where the two differ
//
//	labels   are those of the GPUNode; those of the copy count if the GPUNode has no baseline, and those of mig-manager if it lacks them
//	GPUs     are those of both; the entry of the GPUNode counts where both have one, with the time-slice interval of the copy if it has none
//	indexes  and their policy are those of the copy only if the GPUNode has no baseline
//
// A GPU that the node does not have now may come back, so its entry stays as long as there is room (Bounded).
//
// What is missing in either is written again. If both are lost, what the operator itself has written is not taken for
// what was found (valueBefore of internal/engine/node).

// SavedBaseline is the annotation.
type SavedBaseline struct {
	v1alpha1.Baseline `json:",inline"`
	// Retain is true if the node stays as it is once no policy governs it.
	Retain bool `json:"retain,omitempty"`
	// Untouched names the GPUNode as it was when the copy was written (Version), if it had no baseline then. As long as
	// it is that version the agent has been asked for nothing. So the GPUs of the copy do not count: a driver upgrade,
	// a reboot or a user may have changed them since, also long after a change was held back.
	Untouched string `json:"untouched,omitempty"`
	// Policy is the policy on whose behalf the node is changed.
	Policy string `json:"policy,omitempty"`
	// Numbering is that for its indexes.
	Numbering *v1alpha1.Numbering `json:"numbering,omitempty"`
}

// Version names a version of the spec of a GPUNode. One that was deleted and made anew, or restored from a backup, is
// another.
func Version(n *v1alpha1.GPUNode) string { return fmt.Sprintf("%s/%d", n.UID, n.Generation) }

// WithCopy returns the node with the spec of a GPUNode, and with all that the copy of the baseline on the Node has.
func (n Node) WithCopy(gpuNode *v1alpha1.GPUNode) Node {
	n.GPU, n.BaselineLost, n.Untouched, n.ChangedFor, n.CopyNumbers = *gpuNode, false, false, "", false
	spec := &n.GPU.Spec
	var saved SavedBaseline
	if text := n.Annotations[v1alpha1.AnnotationBaseline]; text == "" || json.Unmarshal([]byte(text), &saved) != nil {
		return n
	}
	n.ChangedFor, n.CopyNumbers = saved.Policy, saved.Numbering != nil
	if spec.Baseline == nil {
		if n.Untouched = saved.Untouched == Version(gpuNode); n.Untouched {
			saved.Devices = nil
		} else if saved.Numbering != nil {
			spec.PolicyName, spec.Numbering = saved.Policy, saved.Numbering
		}
		saved.Devices = Bounded(saved.Devices, gpuNode.Status.Devices)
		spec.Baseline, n.BaselineLost = &saved.Baseline, true
		if saved.Retain && spec.Release == nil {
			spec.Release = &v1alpha1.Release{ReleasePolicy: v1alpha1.ReleasePolicyRetain}
		}
		return n
	}
	both := spec.Baseline.DeepCopy()
	lost := addIntervals(both.Devices, saved.Devices)
	lost = AddManagerLabels(both, saved.Labels) || lost
	for _, d := range saved.Devices {
		if !Lists(both.Devices, d.UUID) && (len(both.Devices) < MostGPUs || has(gpuNode.Status.Devices, d.UUID)) {
			both.Devices, lost = append(both.Devices, d), true
		}
	}
	if lost {
		both.Devices = Bounded(both.Devices, gpuNode.Status.Devices)
		spec.Baseline, n.BaselineLost = both, true
	}
	return n
}

// AddManagerLabels adds to a baseline the labels of NVIDIA's mig-manager that were found, if that came after the rest.
func AddManagerLabels(b *v1alpha1.Baseline, found map[string]string) (added bool) {
	if found[v1alpha1.LabelMIGManager] == "" || b.Labels[v1alpha1.LabelMIGManager] != "" {
		return false
	}
	labels := maps.Clone(found)
	delete(labels, v1alpha1.LabelConfig)
	maps.Copy(labels, b.Labels)
	b.Labels = labels
	return true
}

// MostGPUs is how many GPUs a baseline lists at most: the API server refuses a GPUNode with more.
const MostGPUs = 64

// Bounded returns at most MostGPUs entries of a baseline, in their order. Those of GPUs that the node does not have go
// first, and of these the ones that were recorded first. What is lost with them: if such a GPU comes back, it counts as
// a new one, whose baseline is the state in which it comes.
func Bounded(devices []v1alpha1.DeviceSpec, have []v1alpha1.DeviceStatus) []v1alpha1.DeviceSpec {
	excess := len(devices) - MostGPUs
	return slices.DeleteFunc(slices.Clone(devices), func(d v1alpha1.DeviceSpec) bool {
		goes := excess > 0 && !has(have, d.UUID)
		if goes {
			excess--
		}
		return goes
	})
}

func has(devices []v1alpha1.DeviceStatus, uuid string) bool {
	return slices.ContainsFunc(devices, func(d v1alpha1.DeviceStatus) bool { return d.UUID == uuid })
}

// addIntervals adds the time-slice intervals that entries lack, and reports whether there are any.
func addIntervals(entries, saved []v1alpha1.DeviceSpec) (added bool) {
	for i := range entries {
		at := slices.IndexFunc(saved, func(d v1alpha1.DeviceSpec) bool { return d.UUID == entries[i].UUID })
		if at >= 0 && entries[i].Sharing.TimeSliceInterval == "" && saved[at].Sharing.TimeSliceInterval != "" {
			entries[i].Sharing.TimeSliceInterval, added = saved[at].Sharing.TimeSliceInterval, true
		}
	}
	return added
}

// Owner returns the policy in whose budget a node counts: the one that governs it, or the one that releases it. The
// copy on the Node is written with the first write of a change that disturbs the node, so it is the later one of the
// two records. Empty: not known.
func Owner(n *Node, by *v1alpha1.GPUSharingPolicy) string {
	switch {
	case by != nil:
		return by.Name
	case n.ChangedFor == "" && n.GPU.Spec.Release != nil:
		return n.GPU.Spec.Release.PolicyName
	}
	return n.ChangedFor
}

// CopyOf returns the copy of the baseline in a spec.
func CopyOf(spec v1alpha1.GPUNodeSpec) string { return SavedOf(spec).Text() }

// SavedOf is the baseline in a spec, as the copy on the Node records it.
func SavedOf(spec v1alpha1.GPUNodeSpec) SavedBaseline {
	saved := SavedBaseline{Baseline: *spec.Baseline, Numbering: spec.Numbering}
	if r := spec.Release; r != nil {
		saved.Retain, saved.Policy = r.ReleasePolicy == v1alpha1.ReleasePolicyRetain, r.PolicyName
	}
	return saved
}

// Text is the copy as the annotation of the Node has it.
func (s SavedBaseline) Text() string {
	text, err := json.Marshal(s)
	if err != nil { // cannot be: the types hold strings and numbers only
		return ""
	}
	return string(text)
}

// Lists reports whether a GPU is in a list.
func Lists(devices []v1alpha1.DeviceSpec, uuid string) bool {
	return slices.ContainsFunc(devices, func(d v1alpha1.DeviceSpec) bool { return d.UUID == uuid })
}

// SortedByUUID returns the GPUs in the order of their UUIDs.
func SortedByUUID(devices []v1alpha1.DeviceSpec) []v1alpha1.DeviceSpec {
	return slices.SortedFunc(slices.Values(devices), func(a, b v1alpha1.DeviceSpec) int { return cmp.Compare(a.UUID, b.UUID) })
}
