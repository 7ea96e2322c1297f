// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// NVIDIA's GPU clients on a node are paused and resumed by their deploy labels.
//
//	pausePatch → they end → the GPUs are changed → resumePatch, with the MIG instances that the device plugin will see

// pausePatch is the patch that stops those of NVIDIA's clients that run, and records them.
func pausePatch(v *View) (patch action.PatchNode, pauses bool) {
	patch = v.Patch("pausing NVIDIA's GPU clients")
	recorded := append(OwnPauses(v), overlaidPauses(v)...)
	for _, name := range cluster.DeployLabels() {
		if v.Node.Labels[name] == "true" {
			patch.Labels[name] = new(cluster.PausedValue)
			recorded = append(recorded, name)
		}
	}
	slices.Sort(recorded)
	patch.Annotations[v1alpha1.AnnotationPaused] = new(strings.Join(recorded, ","))
	saveBaselineCopy(v, patch)
	patch.Locked = true
	return patch, len(patch.Labels) > 0
}

// resumePatch is the patch that starts those of NVIDIA's clients again that we paused. Where another controller's pause lies
// over ours the record stays until ours is back.
func resumePatch(v *View) (patch action.PatchNode, resumes bool) {
	patch = v.Patch("resuming NVIDIA's GPU clients")
	recorded, paused := v.Node.Annotations[v1alpha1.AnnotationPaused]
	if !paused || keepsClientsPaused(v) {
		return patch, false
	}
	for _, name := range OwnPauses(v) {
		patch.Labels[name] = new("true")
	}
	switch rest := strings.Join(overlaidPauses(v), ","); rest {
	case "":
		patch.Annotations[v1alpha1.AnnotationPaused] = nil
	case recorded:
		return patch, false
	default:
		patch.Annotations[v1alpha1.AnnotationPaused] = &rest
	}
	return patch, true
}

// podsNotEnding are the pods of NVIDIA's on the node that must end and have not: those that are being deleted, and the test
// workloads of its validator, which is asked for at each pause.
func podsNotEnding(v *View) []string {
	var names []string
	for _, p := range v.Node.Pods {
		if p.Validator || p.Terminating && p.NVIDIA && cluster.SelectsDeploy(p.NodeSelector) {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	slices.Sort(names)
	return names
}

// keepPluginAway pauses NVIDIA's clients where the device plugin runs, or may start, before the agent has made its instances.
func keepPluginAway(v *View) (patch action.PatchNode, pauses bool) {
	if !agentMakesInstances(v) || v.Node.Labels[cluster.DeployLabels()[0]] != "true" {
		return action.PatchNode{}, false
	}
	return pausePatch(v)
}

// keepsClientsPaused reports whether NVIDIA's clients have to stay paused until the driver is replaced.
func keepsClientsPaused(v *View) bool {
	m, is := UnderMaintenance(v)
	return is && m.Unloads && agentMakesInstances(v)
}
