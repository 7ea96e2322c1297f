// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package baseline

import (
	"encoding/json"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// Copied returns the copy as it must be once the node has its target; empty if no policy governs the node, so that nothing is
// to be added.
func Copied(v *view.View) string {
	if v.Saved == nil {
		v.Saved = new(copyAtTarget(v))
	}
	return *v.Saved
}

func copyAtTarget(v *view.View) string {
	if v.Policy == nil {
		return ""
	}
	spec := *v.Node.GPU.Spec.DeepCopy()
	Record(v, &spec)
	spec.Baseline.Devices, _ = withFound(v, spec.Baseline.Devices)
	spec.Release = view.ReleaseOf(v.Policy)
	saved := world.SavedOf(spec)
	if NeverAsked(v) {
		saved.Untouched = world.Version(&v.Node.GPU)
	}
	return saved.Text()
}

// NeverAsked reports whether the agent has not been asked for anything yet. If both objects lost the baseline, the labels of the
// operator on the Node tell that it was.
func NeverAsked(v *view.View) bool {
	if v.Node.GPU.Spec.Baseline == nil {
		return !inCharge(v)
	}
	var saved world.SavedBaseline
	err := json.Unmarshal([]byte(v.Node.Annotations[v1alpha1.AnnotationBaseline]), &saved)
	return err == nil && v.Node.BaselineLost && saved.Untouched == world.Version(&v.Node.GPU)
}

// SaveBaseline puts the copy into a patch that belongs to a change.
func SaveBaseline(v *view.View, patch action.PatchNode) {
	if text := Copied(v); text != "" && v.Node.Annotations[v1alpha1.AnnotationBaseline] != text {
		patch.Annotations[v1alpha1.AnnotationBaseline] = &text
	}
}

// Unsaved is the gate before the agent is asked to change GPUs: the Node has a copy of their baseline, which names no other policy.
func Unsaved(v *view.View) (action.PatchNode, bool) {
	patch := v.Patch("recording the baseline")
	if len(v.Steps) == 0 && (v.Node.ChangedFor == "" || v.Node.ChangedFor == v.Target.Policy) {
		return patch, false // nothing but the label of the Node changes, and that patch has the copy
	}
	SaveBaseline(v, patch)
	return patch, len(patch.Annotations) > 0
}

// DropCopy removes the copy of a node that is back.
func DropCopy(v *view.View, patch action.PatchNode) {
	if _, has := v.Node.Annotations[v1alpha1.AnnotationBaseline]; has {
		patch.Annotations[v1alpha1.AnnotationBaseline] = nil
	}
}

// found returns the labels of a node before it is first changed.
func found(v *view.View) *v1alpha1.Baseline {
	b := &v1alpha1.Baseline{}
	for _, name := range view.RecordedLabels() {
		value, has := v.Node.Labels[name]
		if value, has = theirs(v, name, value, has); has {
			if b.Labels == nil {
				b.Labels = map[string]string{}
			}
			b.Labels[name] = value
		}
	}
	return b
}

// theirs returns the value that a label had before the operator, as far as that can be told from the value that it has.
func theirs(v *view.View, name, value string, has bool) (string, bool) {
	if !has {
		return "", false
	}
	forManager := ourMIGConfig(v)
	switch name {
	case v1alpha1.LabelConfig:
		return value, !ourKey(v, value)
	case v1alpha1.LabelMIGManager:
		if value == "false" && inCharge(v) {
			return "true", true // it is never taken off a node where it was not
		}
	case v1alpha1.LabelMIGConfig:
		return value, !forManager
	case v1alpha1.LabelMIGConfigState:
		return value, !forManager && !world.ManagerAtWork(value)
	}
	return value, true
}

// inCharge reports whether the operator shares the GPUs of the node, by what it has written on the Node.
func inCharge(v *view.View) bool {
	_, selected := v.Node.Annotations[v1alpha1.AnnotationSelected]
	return selected || ourMIGConfig(v) || ourKey(v, v.Node.Labels[v1alpha1.LabelConfig])
}

// UnselectConfig takes the label that selects a configuration of the operator's back to the baseline, on a node that NVIDIA's DRA driver
// serves now: nothing reads it there. The label of another author stays.
func UnselectConfig(v *view.View, labels map[string]*string) {
	delete(labels, v1alpha1.LabelConfig)
	value, has := v.Node.Labels[v1alpha1.LabelConfig]
	if !has || !ourKey(v, value) {
		return
	}
	labels[v1alpha1.LabelConfig] = nil
	if b := v.Node.GPU.Spec.Baseline; b != nil {
		if before, had := b.Labels[v1alpha1.LabelConfig]; had {
			labels[v1alpha1.LabelConfig] = &before
		}
	}
}

// ourMIGConfig reports whether the value of nvidia.com/mig.config is one that the operator writes.
func ourMIGConfig(v *view.View) bool {
	config := v.Node.Labels[v1alpha1.LabelMIGConfig]
	return config == Claimed || migmanager.Ours(config)
}

// ourKey reports whether a config is one that the operator has rendered, and not one that it copied from the ConfigMap that
// was there before.
func ourKey(v *view.View, key string) bool {
	if _, copied := v.World.Plugin.Configs[key]; copied && !deviceplugin.IsDefault(key) {
		return false
	}
	_, written := v.World.Configs[key]
	return written || v.World.Plugin.ClusterPolicy && deviceplugin.Rendered(key)
}
