// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// The baseline is the state in which a node and each of its GPUs were found. It is recorded in GPUNode.spec and in a
// copy on the Node. Labels of mig-manager that come later are recorded in the patch that changes them.
//
//	first change of a GPU → recordDevices, saveBaselineCopy → … → released: forgetNode, dropBaselineCopy

// baselineCopy returns the copy as it must be once the node has its target; empty if no policy governs the node, so
// that nothing is to be added.
func baselineCopy(v *View) string {
	if v.Saved == nil {
		v.Saved = new(baselineCopyAtTarget(v, false))
	}
	return *v.Saved
}

func baselineCopyAtTarget(v *View, reached bool) string {
	if v.Policy == nil && !managerUnrecorded(v) {
		return ""
	}
	spec := *v.Node.GPU.Spec.DeepCopy()
	recordDevices(v, &spec)
	if v.Policy == nil {
		return cluster.CopyOf(spec)
	}
	spec.Baseline.Devices, _ = withFoundIntervals(v, spec.Baseline.Devices)
	if reached {
		spec.Baseline.Devices = withoutRestored(v, spec.Baseline.Devices)
	}
	spec.Release, spec.Numbering = ReleaseFor(v.Policy), policy.Number(v.Policy, PolicyNode(v.Node))
	saved := cluster.SavedOf(spec)
	if AgentNeverRequested(v) {
		saved.Untouched = cluster.Version(&v.Node.GPU)
	}
	return saved.Text()
}

// AgentNeverRequested reports whether the agent has not been asked for anything yet. If both objects lost the baseline,
// the labels of the operator on the Node tell that it was.
func AgentNeverRequested(v *View) bool {
	if v.Node.GPU.Spec.Baseline == nil {
		return !operatorInCharge(v)
	}
	return v.Node.Untouched
}

// saveBaselineCopy puts the copy into a patch that belongs to a change, unless it lacks only what the GPUNode is to forget (writeReachedSpec): where that
// write is refused, each would write its copy after the other without end.
func saveBaselineCopy(v *View, patch action.PatchNode) {
	text, has := baselineCopy(v), v.Node.Annotations[v1alpha1.AnnotationBaseline]
	if text != "" && has != text && has != baselineCopyAtTarget(v, true) {
		patch.Annotations[v1alpha1.AnnotationBaseline] = &text
	}
}

// lacksOnlyNumbering reports whether the copy is of an earlier version, which kept no numbering. The next change of the node adds it; one that rests
// stays Ready when the operator is upgraded.
func lacksOnlyNumbering(v *View, text string) bool {
	has := v.Node.Annotations[v1alpha1.AnnotationBaseline]
	var saved cluster.SavedBaseline
	if text == has || json.Unmarshal([]byte(text), &saved) != nil || saved.Numbering == nil {
		return false
	}
	saved.Numbering = nil
	return saved.Text() == has
}

// unsavedBaseline returns the patch that must come before the agent is asked to change GPUs, if it is still to be
// written: the Node has a copy of their baseline, which names no other policy.
func unsavedBaseline(v *View) (action.PatchNode, bool) {
	patch := v.Patch("recording the baseline")
	if len(v.Steps) == 0 && (v.Node.ChangedFor == "" || v.Node.ChangedFor == v.Target.Policy) {
		return patch, false // nothing but the label of the Node changes, and that patch has the copy
	}
	saveBaselineCopy(v, patch)
	noteSeen(v, patch)
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

// valueBefore returns the value that a label had before the operator, as far as that can be told from the value that it
// has.
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
	return selected || isOwnMIGConfig(v) || SelectsOwnConfig(v)
}

// restoreConfigLabel takes the label that selects a configuration of the operator's back to the baseline, on a node
// that NVIDIA's DRA driver serves now: nothing reads it there. The label of another author stays.
func restoreConfigLabel(v *View, labels map[string]*string) {
	delete(labels, v1alpha1.LabelConfig)
	if !SelectsOwnConfig(v) {
		return
	}
	labels[v1alpha1.LabelConfig] = labelBefore(v, v1alpha1.LabelConfig)
}

// labelBefore is the value of a label in the baseline; nil: the node had none.
func labelBefore(v *View, name string) *string {
	if b := v.Node.GPU.Spec.Baseline; b != nil {
		if before, had := b.Labels[name]; had {
			return &before
		}
	}
	return nil
}

// LeaveLostConfig takes that label back if it selects a configuration of the operator's that is nowhere any more, as
// after an uninstallation by force, and will not be written: NVIDIA's config-manager would end there for ever.
func LeaveLostConfig(v *View) []action.Action {
	if !SelectsOwnConfig(v) || !configLost(v, v.Node.Labels[v1alpha1.LabelConfig]) {
		return nil
	}
	patch := v.Patch("taking back a label that selects a configuration which is gone")
	restoreConfigLabel(v, patch.Labels)
	return []action.Action{patch}
}

// configLost reports whether a configuration of the operator's is nowhere any more, and will not be written.
func configLost(v *View, key string) bool {
	_, written := v.Snapshot.Configs[key]
	_, copied := v.Snapshot.ConfigsCopy[key]
	return !written && !copied && (v.Desired == nil || !slices.Contains(v.Desired.Config.Keys(), key))
}

// isOwnMIGConfig reports whether the value of nvidia.com/mig.config is one that the operator writes.
func isOwnMIGConfig(v *View) bool {
	config := v.Node.Labels[v1alpha1.LabelMIGConfig]
	return config == migConfigPlaceholder || migmanager.Ours(config)
}

// isOwnConfig reports whether a config is one that the operator has rendered, and not one that it copied from the
// ConfigMap that was there before. The keys of a stand-alone plugin are told by who wrote or selected them alone.
func isOwnConfig(v *View, key string) bool {
	if _, copied := v.Snapshot.Plugin.Configs[key]; copied && !deviceplugin.IsDefault(key) {
		return false
	}
	_, written := v.Snapshot.Configs[key]
	_, selected := timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationSelected], key)
	standAlone := !v.Snapshot.Plugin.ClusterPolicy && v.Snapshot.Plugin.Reason == ""
	return written || deviceplugin.Rendered(key) && (selected || !standAlone)
}

// SelectsOwnConfig reports whether the label of the node selects such a config.
func SelectsOwnConfig(v *View) bool {
	key, has := v.Node.Labels[v1alpha1.LabelConfig]
	return has && isOwnConfig(v, key)
}

// recordDevices adds to the baseline the GPUs of the target that it does not list. Those that it lists keep their
// order, so that the ones that were recorded first can be forgotten first once there are too many (cluster.Bounded).
func recordDevices(v *View, spec *v1alpha1.GPUNodeSpec) {
	if spec.Baseline == nil {
		spec.Baseline = baselineFound(v)
	}
	if managerUnrecorded(v) {
		cluster.AddManagerLabels(spec.Baseline, baselineFound(v).Labels)
	}
	if v.Policy == nil {
		return // nothing new is changed
	}
	devices := slices.Clone(spec.Baseline.Devices)
	if releasedAsIs(*spec) {
		devices = slices.DeleteFunc(devices, func(d v1alpha1.DeviceSpec) bool {
			return !cluster.Lists(v.Target.Devices, d.UUID) && !leftUnderMPS(&v.Node.GPU, d.UUID) // it may be away
		})
	}
	var added []v1alpha1.DeviceSpec
	for _, d := range v.Devices {
		if cluster.Lists(v.Target.Devices, d.UUID) && !cluster.Lists(devices, d.UUID) {
			added = append(added, deviceBefore(v, d))
		}
	}
	spec.Baseline.Devices = cluster.Bounded(append(devices, cluster.SortedByUUID(added)...), v.Node.GPU.Status.Devices)
}

// managerUnrecorded reports whether the label of mig-manager came after the baseline, which lacks it, and is to be changed.
func managerUnrecorded(v *View) bool {
	b, value := v.Node.GPU.Spec.Baseline, v.Node.Labels[v1alpha1.LabelMIGManager]
	return b != nil && b.Labels[v1alpha1.LabelMIGManager] == "" && value != "" && value != "false" && mustDisableMIGManager(v)
}

// The agent sets an interval as soon as GPUNode.spec has the former one, and then nothing else tells what that was. So
// the copy on the Node gets a former interval first, and the GPUNode takes it from there, as it takes all that it lacks
// (cluster.Node.WithCopy).

// recordFoundIntervals is the patch that records the time-slice intervals that the agent has found and waits to change;
// ok if there are any.
func recordFoundIntervals(v *View) (patch action.PatchNode, ok bool) {
	patch = v.Patch("recording the time-slice intervals that the GPUs had")
	if b := v.Node.GPU.Spec.Baseline; b != nil {
		if _, found := withFoundIntervals(v, b.Devices); found {
			saveBaselineCopy(v, patch)
		}
	}
	return patch, len(patch.Annotations) > 0
}

// withFoundIntervals adds the intervals that the agent has found and has not changed yet.
func withFoundIntervals(v *View, devices []v1alpha1.DeviceSpec) (with []v1alpha1.DeviceSpec, found bool) {
	return plan.WithFound(devices, v.Node.GPU.Spec.Devices, v.Devices)
}

// deviceBefore returns the state to which a GPU without an entry in the baseline returns: as it is, unless that is the
// operator's doing.
func deviceBefore(v *View, d gpu.Device) v1alpha1.DeviceSpec {
	sharing := plan.Observed(d)
	lost := v.Node.GPU.Spec.Baseline == nil && operatorInCharge(v)
	if lost || cluster.Lists(v.Node.GPU.Spec.Devices, d.UUID) || sharedBy(sharing, v1alpha1.MPSDaemonOwnerGPUSharing) {
		was := unpartitioned(d.UUID)
		if slices.ContainsFunc(v.Target.Devices, func(t v1alpha1.DeviceSpec) bool { return t.UUID == d.UUID && plan.Timed(t.Sharing) }) {
			was.Sharing.TimeSliceInterval = v1alpha1.TimeSliceIntervalDefault // what it has may be the operator's doing
		}
		return was
	}
	return v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: sharing}
}

// baselineUnrecorded reports whether the baseline lacks a GPU that is to be changed.
func baselineUnrecorded(v *View) bool {
	b := v.Node.GPU.Spec.Baseline
	return b == nil || v.Policy != nil && slices.ContainsFunc(v.Target.Devices, func(d v1alpha1.DeviceSpec) bool {
		return !cluster.Lists(b.Devices, d.UUID)
	})
}

// withoutRestored leaves out the GPUs that the policy does not select and that are back in their baseline.
func withoutRestored(v *View, devices []v1alpha1.DeviceSpec) []v1alpha1.DeviceSpec {
	if v.Desired == nil || v.FallsBack {
		return devices
	}
	return slices.DeleteFunc(slices.Clone(devices), func(d v1alpha1.DeviceSpec) bool { return cluster.Lists(v.Desired.Restored, d.UUID) })
}

// While the agent partitions a node, NVIDIA's mig-manager does not run there, and what its labels say is not true. Its
// state is removed. Its configuration gets a value of ours, because the GPU Operator sets all-disabled again where
// there is none and keeps what there is. No file of mig-manager's holds a configuration of that name: if it came back
// by mistake, it would refuse the value and change nothing. The release restores both labels together with the GPUs.
const (
	// migConfigPlaceholder is the value of v1alpha1.LabelMIGConfig while the agent partitions a node.
	migConfigPlaceholder = "gpu-sharing-operator"
	// migConfigDefault is what the GPU Operator sets where there is none.
	migConfigDefault = "all-disabled"
)

// overwriteMIGLabels adds to a patch what mig-manager's labels are to be on a node that the agent partitions. It
// replaces what was there before, and no later value of another author.
func overwriteMIGLabels(v *View, labels map[string]*string) {
	if !mustDisableMIGManager(v) || v.Target.ReleasesNode {
		return
	}
	baseline := v.Node.GPU.Spec.Baseline
	if baseline == nil {
		baseline = baselineFound(v)
	}
	if _, has := v.Node.Labels[v1alpha1.LabelMIGConfigState]; has {
		labels[v1alpha1.LabelMIGConfigState] = nil
	}
	is, was := v.Node.Labels[v1alpha1.LabelMIGConfig], baseline.Labels[v1alpha1.LabelMIGConfig]
	_, deployed := v.Node.Labels[v1alpha1.LabelMIGManager]
	replaces := is == "" && deployed || is != "" && (slices.Contains([]string{was, migConfigDefault}, is) || migmanager.Ours(is))
	if replaces && !v.TargetIsLastGood() {
		labels[v1alpha1.LabelMIGConfig] = new(migConfigPlaceholder)
	}
}

// restoreMIGLabels adds to a patch what mig-manager's labels were before the agent partitioned the node.
func restoreMIGLabels(v *View, labels map[string]*string) {
	if !v.Target.ReleasesNode || v.Node.Labels[v1alpha1.LabelMIGConfig] != migConfigPlaceholder {
		return
	}
	for _, name := range []string{v1alpha1.LabelMIGConfig, v1alpha1.LabelMIGConfigState} {
		labels[name] = labelBefore(v, name)
	}
}
