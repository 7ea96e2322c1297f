// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// pausedValue is what NVIDIA's mig-manager sets deploy labels to meanwhile, so that NVIDIA's other tools recognise it.
const pausedValue = "paused-for-mig-change"

// deployLabels start and stop NVIDIA's GPU clients on a node, in the order in which mig-manager pauses them.
func deployLabels() []string {
	return []string{
		deployPrefix + "device-plugin", deployPrefix + "gpu-feature-discovery", deployPrefix + "dcgm", deployPrefix + "dcgm-exporter",
		deployPrefix + "nvsm",
	}
}

// ours are the deploy labels that we paused and that still are.
func (v *view) ours() []string {
	var ours []string
	for name := range strings.SplitSeq(v.node.Annotations[v1alpha1.AnnotationPaused], ",") {
		if slices.Contains(deployLabels(), name) && v.node.Labels[name] == pausedValue {
			ours = append(ours, name)
		}
	}
	return ours
}

// overlaid are the deploy labels that we paused and over whose value another controller has put its own pause. It restores
// ours when it is done (NVIDIA/k8s-driver-manager joins both by an underscore).
func (v *view) overlaid() []string {
	var overlaid []string
	for name := range strings.SplitSeq(v.node.Annotations[v1alpha1.AnnotationPaused], ",") {
		if slices.Contains(deployLabels(), name) && strings.HasPrefix(v.node.Labels[name], pausedValue+"_") {
			overlaid = append(overlaid, name)
		}
	}
	return overlaid
}

// paused is the gate before steps that need all handles closed: NVIDIA's clients are stopped and gone. A label of any
// value but true and false is somebody else's pause, and is left to them.
func (v *view) paused() (judgement, bool) {
	if !v.closes() || !v.world.Wiring.ClusterPolicy {
		return judgement{}, false
	}
	j := judgement{State: StateQuiescing, reason: v1alpha1.ReasonPausingClients}
	for _, name := range deployLabels() {
		value := v.node.Labels[name]
		if value != "" && value != "true" && value != "false" && !slices.Contains(v.ours(), name) {
			j.message = fmt.Sprintf("another controller has set %s=%s; waiting until it is true or false again", name, value)
			return j, true
		}
	}
	if patch, pauses := v.pause(); pauses {
		j.message, j.start = "pausing NVIDIA's GPU clients, which must close their handles", []Action{patch}
		return j, true
	}
	remain := v.clients(v.ours()...)
	for _, p := range v.node.Pods {
		if !p.Validator {
			continue
		}
		remain = append(remain, p.Namespace+"/"+p.Name)
		if !p.Terminating {
			j.actions = append(j.actions, v.deletePod(p, "it is a test of the GPU Operator's validator and holds a GPU"))
		}
	}
	j.message = "waiting until NVIDIA's GPU clients are gone: " + list(remain)
	return j, len(remain) > 0
}

// pause is the patch that stops those of NVIDIA's clients that run, and records them.
func (v *view) pause() (patch PatchNode, pauses bool) {
	patch = v.patch("pausing NVIDIA's GPU clients")
	recorded := append(v.ours(), v.overlaid()...)
	for _, name := range deployLabels() {
		if v.node.Labels[name] == "true" {
			patch.Labels[name] = new(pausedValue)
			recorded = append(recorded, name)
		}
	}
	slices.Sort(recorded)
	patch.Annotations[v1alpha1.AnnotationPaused] = new(strings.Join(recorded, ","))
	v.saveBaseline(patch)
	patch.Locked = true
	return patch, len(patch.Labels) > 0
}

// clients are the pods on the node that one of the deploy labels keeps there.
func (v *view) clients(deploy ...string) []string {
	var names []string
	for _, p := range v.node.Pods {
		if slices.ContainsFunc(deploy, func(name string) bool { return p.NodeSelector[name] != "" }) {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	slices.Sort(names)
	return names
}

// resume is the patch that starts those of NVIDIA's clients again that we paused. Where another controller's pause lies
// over ours the record stays until ours is back.
func (v *view) resume() (patch PatchNode, resumes bool) {
	patch = v.patch("resuming NVIDIA's GPU clients")
	recorded, paused := v.node.Annotations[v1alpha1.AnnotationPaused]
	if !paused || v.keepsPaused() {
		return patch, false
	}
	for _, name := range v.ours() {
		patch.Labels[name] = new("true")
	}
	switch rest := strings.Join(v.overlaid(), ","); rest {
	case "":
		patch.Annotations[v1alpha1.AnnotationPaused] = nil
	case recorded:
		return patch, false
	default:
		patch.Annotations[v1alpha1.AnnotationPaused] = &rest
	}
	return patch, true
}

// fence keeps NVIDIA's mig-manager off a node whose MIG instances are the operator's: only one may drive MIG. Its label
// is recorded in the baseline before it is changed, and stays until the node goes back to that.
func (v *view) fence() (judgement, bool) {
	value := v.node.Labels[v1alpha1.LabelMIGManager]
	if !v.fences() {
		return judgement{}, false
	}
	j := judgement{State: StateQuiescing, reason: v1alpha1.ReasonPausingClients}
	if value == "" || value == "false" {
		remain := v.clients(v1alpha1.LabelMIGManager)
		j.message = "waiting until NVIDIA's mig-manager is gone: " + list(remain)
		return j, len(remain) > 0
	}
	patch := v.patch("keeping NVIDIA's mig-manager off the node")
	patch.Labels[v1alpha1.LabelMIGManager] = new("false")
	v.claimMIG(patch.Labels)
	v.saveBaseline(patch)
	patch.Locked = true // on a Node that was restored from a backup meanwhile, the copy of the baseline would be missing
	j.message, j.start = "NVIDIA's mig-manager is being kept off the node, since only one may drive MIG", []Action{patch}
	return j, true
}

// fences says whether NVIDIA's mig-manager has to stay off the node.
func (v *view) fences() bool {
	return v.world.Wiring.ClusterPolicy && !v.managed() && v.touchesMIG()
}

// touchesMIG says whether MIG mode is on somewhere on the node or will be.
func (v *view) touchesMIG() bool {
	for _, d := range v.have {
		if d.State.MIG || d.PendingMIG {
			return true
		}
	}
	return slices.ContainsFunc(v.to.devices, func(d v1alpha1.DeviceSpec) bool {
		return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled
	})
}

func (v *view) patch(why string) PatchNode {
	return PatchNode{
		Node: v.node.Name, Policy: v.ref(), Why: why,
		Labels: map[string]*string{}, Annotations: map[string]*string{},
	}
}

// stamp is a key with a time: <key>@<seconds since 1970>.
func stamp(key string, at time.Time) string { return key + "@" + strconv.FormatInt(at.Unix(), 10) }

// stamped is the time of a stamp of that key; ok is false if it is of another key or none.
func stamped(value, key string) (at time.Time, ok bool) {
	seconds, found := strings.CutPrefix(value, key+"@")
	if !found {
		return time.Time{}, false
	}
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return time.Time{}, false
	}
	return time.Unix(n, 0), true
}
