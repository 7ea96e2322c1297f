// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/migmanager"
)

// Two objects hold the baseline of a node, so that it survives the loss of either: GPUNode.spec.baseline, and a copy in the
// annotation v1alpha1.AnnotationBaseline of the Node. The copy is part of the first patch of the Node that belongs to a change,
// so it costs no write of its own. Where the two differ
//
//	labels   are those of the GPUNode; those of the copy count if the GPUNode has no baseline
//	GPUs     are those of both; the entry of the GPUNode counts where both have one
//
// What is missing in either is written again. If both are lost, what the operator itself has written is not taken for what was
// found (theirs).

// savedBaseline is the annotation.
type savedBaseline struct {
	v1alpha1.Baseline `json:",inline"`
	// Retain is true if the node stays as it is once no policy governs it.
	Retain bool `json:"retain,omitempty"`
	// Untouched names the GPUNode as it was when the copy was written (version), if it had no baseline then. As long as it is that
	// version the agent has been asked for nothing. So the GPUs of the copy do not count: a driver upgrade, a reboot or a user may
	// have changed them since, also long after a change was held back.
	Untouched string `json:"untouched,omitempty"`
	// Policy is the policy on whose behalf the node is changed.
	Policy string `json:"policy,omitempty"`
}

// version names a version of the spec of a GPUNode. One that was deleted and made anew, or restored from a backup, is another.
func version(n *v1alpha1.GPUNode) string { return fmt.Sprintf("%s/%d", n.UID, n.Generation) }

// WithCopy returns the node with the spec of a GPUNode, and with all that the copy of the baseline on the Node has.
func (n Node) WithCopy(gpuNode *v1alpha1.GPUNode) Node {
	n.GPU, n.BaselineLost, n.ChangedFor = *gpuNode, false, ""
	spec := &n.GPU.Spec
	var saved savedBaseline
	if text := n.Annotations[v1alpha1.AnnotationBaseline]; text == "" || json.Unmarshal([]byte(text), &saved) != nil {
		return n
	}
	n.ChangedFor = saved.Policy
	if spec.Baseline == nil {
		if saved.Untouched == version(gpuNode) {
			saved.Devices = nil
		}
		spec.Baseline, n.BaselineLost = &saved.Baseline, true
		if saved.Retain && spec.Release == nil {
			spec.Release = &v1alpha1.Release{ReleasePolicy: v1alpha1.ReleasePolicyRetain}
		}
		return n
	}
	both := spec.Baseline.DeepCopy()
	for _, d := range saved.Devices {
		if !lists(both.Devices, d.UUID) {
			both.Devices = append(both.Devices, d)
		}
	}
	if len(both.Devices) > len(spec.Baseline.Devices) {
		both.Devices = sorted(both.Devices)
		spec.Baseline, n.BaselineLost = both, true
	}
	return n
}

// owner returns the policy in whose budget a node counts: the one that governs it, or the one that releases it. The copy on the
// Node is written with the first write of a change that disturbs the node, so it is the later one of the two records. Empty: not
// known.
func owner(n *Node, by *v1alpha1.GPUSharingPolicy) string {
	switch {
	case by != nil:
		return by.Name
	case n.ChangedFor == "" && n.GPU.Spec.Release != nil:
		return n.GPU.Spec.Release.PolicyName
	}
	return n.ChangedFor
}

// copied returns the copy as it must be once the node has its target; empty if no policy governs the node, so that nothing is
// to be added.
func (v *view) copied() string {
	if v.saved == nil {
		v.saved = new(v.copyAtTarget())
	}
	return *v.saved
}

func (v *view) copyAtTarget() string {
	if v.by == nil {
		return ""
	}
	spec := *v.node.GPU.Spec.DeepCopy()
	v.record(&spec)
	spec.Release = releaseOf(v.by)
	saved := savedOf(spec)
	if v.neverAsked() {
		saved.Untouched = version(&v.node.GPU)
	}
	return saved.text()
}

// neverAsked reports whether the agent has not been asked for anything yet. If both objects lost the baseline, the labels of the
// operator on the Node tell that it was.
func (v *view) neverAsked() bool {
	if v.node.GPU.Spec.Baseline == nil {
		return !v.inCharge()
	}
	var saved savedBaseline
	err := json.Unmarshal([]byte(v.node.Annotations[v1alpha1.AnnotationBaseline]), &saved)
	return err == nil && v.node.BaselineLost && saved.Untouched == version(&v.node.GPU)
}

// copyOf returns the copy of the baseline in a spec.
func copyOf(spec v1alpha1.GPUNodeSpec) string { return savedOf(spec).text() }

func savedOf(spec v1alpha1.GPUNodeSpec) savedBaseline {
	saved := savedBaseline{Baseline: *spec.Baseline}
	if r := spec.Release; r != nil {
		saved.Retain, saved.Policy = r.ReleasePolicy == v1alpha1.ReleasePolicyRetain, r.PolicyName
	}
	return saved
}

func (s savedBaseline) text() string {
	text, err := json.Marshal(s)
	if err != nil { // cannot be: the types hold strings and numbers only
		return ""
	}
	return string(text)
}

// saveBaseline puts the copy into a patch that belongs to a change.
func (v *view) saveBaseline(patch PatchNode) {
	if text := v.copied(); text != "" && v.node.Annotations[v1alpha1.AnnotationBaseline] != text {
		patch.Annotations[v1alpha1.AnnotationBaseline] = &text
	}
}

// unsaved is the gate before the agent is asked to change GPUs: the Node has a copy of their baseline, which names no other policy.
func (v *view) unsaved() (PatchNode, bool) {
	patch := v.patch("recording the baseline")
	if len(v.steps) == 0 && (v.node.ChangedFor == "" || v.node.ChangedFor == v.to.policy) {
		return patch, false // nothing but the label of the Node changes, and that patch has the copy
	}
	v.saveBaseline(patch)
	return patch, len(patch.Annotations) > 0
}

// heldByOther reports whether the node is still kept from its users on behalf of another policy than the one that governs it now.
// It counts in the budget of that one until it is given back, so what gives it back must not record the policy that governs it now,
// in whose budget there may be no slot.
func (v *view) heldByOther() bool {
	return v.by != nil && v.node.ChangedFor != "" && v.node.ChangedFor != v.by.Name && v.disturbed()
}

// dropCopy removes the copy of a node that is back.
func (v *view) dropCopy(patch PatchNode) {
	if _, has := v.node.Annotations[v1alpha1.AnnotationBaseline]; has {
		patch.Annotations[v1alpha1.AnnotationBaseline] = nil
	}
}

// found returns the labels of a node before it is first changed.
func (v *view) found() *v1alpha1.Baseline {
	b := &v1alpha1.Baseline{}
	for _, name := range recordedLabels() {
		value, has := v.node.Labels[name]
		if value, has = v.theirs(name, value, has); has {
			if b.Labels == nil {
				b.Labels = map[string]string{}
			}
			b.Labels[name] = value
		}
	}
	return b
}

// theirs returns the value that a label had before the operator, as far as that can be told from the value that it has.
func (v *view) theirs(name, value string, has bool) (string, bool) {
	if !has {
		return "", false
	}
	forManager := v.ourMIGConfig()
	switch name {
	case v1alpha1.LabelConfig:
		return value, !v.ourKey(value)
	case v1alpha1.LabelMIGManager:
		if value == "false" && v.inCharge() {
			return "true", true // it is never taken off a node where it was not
		}
	case v1alpha1.LabelMIGConfig:
		return value, !forManager
	case v1alpha1.LabelMIGConfigState:
		return value, !forManager && !managerAtWork(value)
	}
	return value, true
}

// inCharge reports whether the operator shares the GPUs of the node, by what it has written on the Node.
func (v *view) inCharge() bool {
	_, selected := v.node.Annotations[v1alpha1.AnnotationSelected]
	return selected || v.ourMIGConfig() || v.ourKey(v.node.Labels[v1alpha1.LabelConfig])
}

// ourMIGConfig reports whether the value of nvidia.com/mig.config is one that the operator writes.
func (v *view) ourMIGConfig() bool {
	config := v.node.Labels[v1alpha1.LabelMIGConfig]
	return config == claimed || migmanager.Ours(config)
}

// ourKey reports whether a config is one that the operator has rendered, and not one that it copied from the ConfigMap that
// was there before.
func (v *view) ourKey(key string) bool {
	if _, copied := v.world.Wiring.Keys[key]; copied && !deviceplugin.IsDefault(key) {
		return false
	}
	_, written := v.world.Keys[key]
	return written || v.world.Wiring.ClusterPolicy && deviceplugin.Rendered(key)
}

// keepBaseline writes again what either object has lost of the baseline of a node that stays as it is.
func (m *member) keepBaseline() []Action {
	spec := m.node.GPU.Spec
	if spec.Baseline == nil {
		return nil
	}
	var actions []Action
	if _, has := m.node.Annotations[v1alpha1.AnnotationBaseline]; !has {
		patch := m.patch("recording the baseline")
		patch.Annotations[v1alpha1.AnnotationBaseline] = new(copyOf(spec))
		actions = append(actions, patch)
	}
	if m.node.BaselineLost {
		actions = append(actions, SetSpec{Node: m.node.Name, Spec: spec, Why: "recording the baseline"})
	}
	return actions
}

func lists(devices []v1alpha1.DeviceSpec, uuid string) bool {
	return slices.ContainsFunc(devices, func(d v1alpha1.DeviceSpec) bool { return d.UUID == uuid })
}
