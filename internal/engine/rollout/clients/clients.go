// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package clients

import (
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/baseline"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
)

// Pause is the patch that stops those of NVIDIA's clients that run, and records them.
func Pause(v *view.View) (patch action.PatchNode, pauses bool) {
	patch = v.Patch("pausing NVIDIA's GPU clients")
	recorded := append(view.Ours(v), view.Overlaid(v)...)
	for _, name := range world.DeployLabels() {
		if v.Node.Labels[name] == "true" {
			patch.Labels[name] = new(world.PausedValue)
			recorded = append(recorded, name)
		}
	}
	slices.Sort(recorded)
	patch.Annotations[v1alpha1.AnnotationPaused] = new(strings.Join(recorded, ","))
	baseline.SaveBaseline(v, patch)
	patch.Locked = true
	return patch, len(patch.Labels) > 0
}

// Resume is the patch that starts those of NVIDIA's clients again that we paused. Where another controller's pause lies
// over ours the record stays until ours is back.
func Resume(v *view.View) (patch action.PatchNode, resumes bool) {
	patch = v.Patch("resuming NVIDIA's GPU clients")
	recorded, paused := v.Node.Annotations[v1alpha1.AnnotationPaused]
	if !paused || keepsPaused(v) {
		return patch, false
	}
	for _, name := range view.Ours(v) {
		patch.Labels[name] = new("true")
	}
	switch rest := strings.Join(view.Overlaid(v), ","); rest {
	case "":
		patch.Annotations[v1alpha1.AnnotationPaused] = nil
	case recorded:
		return patch, false
	default:
		patch.Annotations[v1alpha1.AnnotationPaused] = &rest
	}
	return patch, true
}

// NotEnding are the pods of NVIDIA's on the node that must end and have not: those that are being deleted, and the test
// workloads of its validator, which is asked for at each pause.
func NotEnding(v *view.View) []string {
	var names []string
	for _, p := range v.Node.Pods {
		if p.Validator || p.Terminating && p.NVIDIA && world.SelectsDeploy(p.NodeSelector) {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	slices.Sort(names)
	return names
}

// KeepPluginAway pauses NVIDIA's clients where the device plugin runs, or may start, before the agent has made its instances.
func KeepPluginAway(v *view.View) (patch action.PatchNode, pauses bool) {
	if !view.MakesInstances(v) || v.Node.Labels[world.DeployLabels()[0]] != "true" {
		return action.PatchNode{}, false
	}
	return Pause(v)
}

// keepsPaused reports whether NVIDIA's clients have to stay paused until the driver is replaced.
func keepsPaused(v *view.View) bool {
	m, is := view.UnderMaintenance(v)
	return is && m.Unloads && view.MakesInstances(v)
}
