// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// The baseline is the state in which a node and each of its GPUs were found. It is recorded in GPUNode.spec and in a copy on the Node.
//
//	first change of a GPU → recordDevices, saveBaselineCopy → … → released: forgetNode, dropBaselineCopy

// baselineCopy returns the copy as it must be once the node has its target; empty if no policy governs the node, so that nothing is
// to be added.
func baselineCopy(v *View) string {
	if v.Saved == nil {
		v.Saved = new(baselineCopyAtTarget(v))
	}
	return *v.Saved
}

func baselineCopyAtTarget(v *View) string {
	if v.Policy == nil {
		return ""
	}
	spec := *v.Node.GPU.Spec.DeepCopy()
	recordDevices(v, &spec)
	spec.Baseline.Devices, _ = withFoundIntervals(v, spec.Baseline.Devices)
	spec.Release = ReleaseFor(v.Policy)
	saved := cluster.SavedOf(spec)
	if AgentNeverRequested(v) {
		saved.Untouched = cluster.Version(&v.Node.GPU)
	}
	return saved.Text()
}

// AgentNeverRequested reports whether the agent has not been asked for anything yet. If both objects lost the baseline, the labels of the
// operator on the Node tell that it was.
func AgentNeverRequested(v *View) bool {
	if v.Node.GPU.Spec.Baseline == nil {
		return !operatorInCharge(v)
	}
	var saved cluster.SavedBaseline
	err := json.Unmarshal([]byte(v.Node.Annotations[v1alpha1.AnnotationBaseline]), &saved)
	return err == nil && v.Node.BaselineLost && saved.Untouched == cluster.Version(&v.Node.GPU)
}

// saveBaselineCopy puts the copy into a patch that belongs to a change.
func saveBaselineCopy(v *View, patch action.PatchNode) {
	if text := baselineCopy(v); text != "" && v.Node.Annotations[v1alpha1.AnnotationBaseline] != text {
		patch.Annotations[v1alpha1.AnnotationBaseline] = &text
	}
}

// baselineUnsaved is the gate before the agent is asked to change GPUs: the Node has a copy of their baseline, which names no other policy.
func baselineUnsaved(v *View) (action.PatchNode, bool) {
	patch := v.Patch("recording the baseline")
	if len(v.Steps) == 0 && (v.Node.ChangedFor == "" || v.Node.ChangedFor == v.Target.Policy) {
		return patch, false // nothing but the label of the Node changes, and that patch has the copy
	}
	saveBaselineCopy(v, patch)
	return patch, len(patch.Annotations) > 0
}

// dropBaselineCopy removes the copy of a node that is back.
func dropBaselineCopy(v *View, patch action.PatchNode) {
	if _, has := v.Node.Annotations[v1alpha1.AnnotationBaseline]; has {
		patch.Annotations[v1alpha1.AnnotationBaseline] = nil
	}
}

// baselineFound returns the labels of a node before it is first changed.
func baselineFound(v *View) *v1alpha1.Baseline {
	b := &v1alpha1.Baseline{}
	for _, name := range baselineLabels() {
		value, has := v.Node.Labels[name]
		if value, has = valueBefore(v, name, value, has); has {
			if b.Labels == nil {
				b.Labels = map[string]string{}
			}
			b.Labels[name] = value
		}
	}
	return b
}

// valueBefore returns the value that a label had before the operator, as far as that can be told from the value that it has.
func valueBefore(v *View, name, value string, has bool) (string, bool) {
	if !has {
		return "", false
	}
	forManager := isOwnMIGConfig(v)
	switch name {
	case v1alpha1.LabelConfig:
		return value, !isOwnConfig(v, value)
	case v1alpha1.LabelMIGManager:
		if value == "false" && operatorInCharge(v) {
			return "true", true // it is never taken off a node where it was not
		}
	case v1alpha1.LabelMIGConfig:
		return value, !forManager
	case v1alpha1.LabelMIGConfigState:
		return value, !forManager && !cluster.ManagerAtWork(value)
	}
	return value, true
}

// operatorInCharge reports whether the operator shares the GPUs of the node, by what it has written on the Node.
func operatorInCharge(v *View) bool {
	_, selected := v.Node.Annotations[v1alpha1.AnnotationSelected]
	return selected || isOwnMIGConfig(v) || isOwnConfig(v, v.Node.Labels[v1alpha1.LabelConfig])
}

// restoreConfigLabel takes the label that selects a configuration of the operator's back to the baseline, on a node that NVIDIA's DRA driver
// serves now: nothing reads it there. The label of another author stays.
func restoreConfigLabel(v *View, labels map[string]*string) {
	delete(labels, v1alpha1.LabelConfig)
	value, has := v.Node.Labels[v1alpha1.LabelConfig]
	if !has || !isOwnConfig(v, value) {
		return
	}
	labels[v1alpha1.LabelConfig] = nil
	if b := v.Node.GPU.Spec.Baseline; b != nil {
		if before, had := b.Labels[v1alpha1.LabelConfig]; had {
			labels[v1alpha1.LabelConfig] = &before
		}
	}
}

// isOwnMIGConfig reports whether the value of nvidia.com/mig.config is one that the operator writes.
func isOwnMIGConfig(v *View) bool {
	config := v.Node.Labels[v1alpha1.LabelMIGConfig]
	return config == migConfigClaimed || migmanager.Ours(config)
}

// isOwnConfig reports whether a config is one that the operator has rendered, and not one that it copied from the ConfigMap that
// was there before.
func isOwnConfig(v *View, key string) bool {
	if _, copied := v.Snapshot.Plugin.Configs[key]; copied && !deviceplugin.IsDefault(key) {
		return false
	}
	_, written := v.Snapshot.Configs[key]
	return written || v.Snapshot.Plugin.ClusterPolicy && deviceplugin.Rendered(key)
}
