// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidiamps

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/baseline"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// mpsPods are the pods of NVIDIA's MPS DaemonSet on the node.
func mpsPods(v *view.View) []string { return view.Clients(v, world.LabelMPSCapable) }

// NoNodeFeatures reports why the label cannot be overridden on the node, as far as that is known in advance; nil if it can.
// Without the kind, GFD writes its labels to a file and NFD keeps them on the node, whatever a client patches.
func NoNodeFeatures(v *view.View) *plan.Problem {
	value, labelled := v.Node.Labels[world.LabelMPSCapable]
	_, patched := v.Node.Annotations[v1alpha1.AnnotationMPSCapable]
	if v.World.Plugin.NodeFeatures || !v.World.Plugin.ClusterPolicy || !labelled || patched || !view.OwnsMPS(v.Target.Devices) || view.ServesMPS(v) {
		return nil
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonNoNodeFeatures,
		Message: fmt.Sprintf("The node carries %s=%s and the cluster has no kind NodeFeature that could override it, so NVIDIA's MPS "+
			"DaemonSet would run beside the operator's MPS daemons. Install Node Feature Discovery v0.17 or newer, or use another strategy",
			world.LabelMPSCapable, value),
	}
}

// Prepare keeps NVIDIA's MPS DaemonSet off a node that it does not serve, before the node is drained: that disturbs
// nobody, and where it cannot be done nobody is evicted for nothing. Meanwhile the node stays in the state before.
func Prepare(v *view.View, before state.State) (gate.Judgement, bool) {
	if len(v.LeavesNVIDIA()) > 0 {
		return gate.Judgement{}, false
	}
	g, pending := KeepOff(v)
	if g.State != state.Failed {
		g.State = before
	}
	return g, pending
}

// Remember is the gate before NVIDIA's MPS daemon ends: the baseline says that it served the node.
func Remember(v *view.View) (gate.Judgement, bool) {
	if !baseline.Unrecorded(v) || len(v.LeavesNVIDIA()) == 0 {
		return gate.Judgement{}, false
	}
	return gate.Judgement{
		State: state.PausingClients, Reason: gate.Underway(v), Message: "Recording the state in which the node was found",
		Next: gate.WithSlot(v, desired.RecordBaseline(v)),
	}, true
}

// KeepOff is the gate before the operator's MPS daemons start: NVIDIA's MPS DaemonSet has no pod on the node and gets none.
func KeepOff(v *view.View) (gate.Judgement, bool) {
	if !view.ExcludesNVIDIA(v) || view.ServesMPS(v) {
		return gate.Judgement{}, false
	}
	j := gate.Judgement{State: state.PausingClients, Reason: v1alpha1.ReasonDisablingNVIDIAMPS, Next: gate.WithSlot(v)}
	switch {
	case view.ByNodeFeature(v) && v.Node.Features.OverriddenSince.IsZero():
		j.Message = fmt.Sprintf("Keeping NVIDIA's MPS DaemonSet off the node by NodeFeature %s", action.OverrideName(v.Node.Name))
		j.Next = gate.WithSlot(v, action.KeepMPSOff{Node: v.Node.Name, Policy: v.Ref()})
	case keptOff(v):
		return awaitMPSPods(v, j, mpsPods(v))
	case view.ByNodeFeature(v) && !unanswered(v):
		return awaitNFD(v, j)
	default:
		return labelByHand(v, j)
	}
	return j, true
}

// keptOff reports whether the label is false, and stays so whatever GFD says. That GFD itself says false proves nothing: it
// says so until the node selects a configuration that shares by MPS. So the operator's NodeFeature has a label of its own.
func keptOff(v *view.View) bool {
	value, labelled := v.Node.Labels[world.LabelMPSCapable]
	if !view.ByNodeFeature(v) {
		return value == world.LabelFalse || !labelled
	}
	return value == world.LabelFalse && (v.Node.Labels[v1alpha1.LabelOverridden] == world.LabelTrue || unanswered(v))
}

// awaitMPSPods waits until the pods of NVIDIA's MPS DaemonSet are gone, which the label no longer keeps on the node.
func awaitMPSPods(v *view.View, j gate.Judgement, pods []string) (gate.Judgement, bool) {
	if len(pods) == 0 {
		return gate.Judgement{}, false
	}
	j.Message = "Waiting until the pods of NVIDIA's MPS DaemonSet are gone: " + format.List(pods)
	if since := overriddenSince(v); !since.IsZero() {
		if j.After = since.Add(timing.PauseTimeout).Sub(v.World.Now); j.After <= 0 {
			return failKeepingOff(v, j, v1alpha1.ReasonClientsNotEnding, fmt.Sprintf("The pods of NVIDIA's MPS DaemonSet did not end within "+
				"%s: %s. Look at the kubelet and the container runtime of the node", timing.PauseTimeout, format.List(pods)))
		}
	}
	return j, true
}

// overriddenSince is since when the label is overridden; zero if it is not.
func overriddenSince(v *view.View) time.Time {
	_, at, _ := view.LabelBefore(v)
	if at.Before(v.Node.Features.OverriddenSince) {
		return v.Node.Features.OverriddenSince
	}
	return at
}

// awaitNFD waits until NFD has changed the label.
func awaitNFD(v *view.View, j gate.Judgement) (gate.Judgement, bool) {
	j.After = v.Node.Features.OverriddenSince.Add(timing.NodeFeatureTimeout).Sub(v.World.Now)
	if j.After <= 0 {
		return failKeepingOff(v, j, v1alpha1.ReasonNodeFeatureIgnored, ignored(v))
	}
	j.Message = fmt.Sprintf("Waiting until Node Feature Discovery sets %s=false", world.LabelMPSCapable)
	return j, true
}

// ignored is the message that NFD does not do what the operator's NodeFeature says.
func ignored(v *view.View) string {
	return fmt.Sprintf("Node Feature Discovery did not set %s=false and %s=true within %s, as NodeFeature %s asks: NodeFeature %s says %s=%s. "+
		"Look at the log of nfd-master and its options restrictions.denyNodeFeatureLabels, nodeFeatureNamespaceSelector, disableLabels "+
		"and allowOverwrite, denyLabelNs, labelWhiteList and noPublish",
		world.LabelMPSCapable, v1alpha1.LabelOverridden, timing.NodeFeatureTimeout, action.OverrideName(v.Node.Name), v.Node.Features.Author, world.LabelMPSCapable,
		v.Node.Features.Others)
}

// unanswered reports whether NFD has not acted on the operator's NodeFeature in time, and no other object names the label.
func unanswered(v *view.View) bool {
	f := v.Node.Features
	return f.Others == "" && v.World.Now.Sub(f.OverriddenSince) >= timing.NodeFeatureTimeout
}

// labelByHand sets the label where NFD does not, once in an hour.
func labelByHand(v *view.View, j gate.Judgement) (gate.Judgement, bool) {
	if left := LabelLeft(v); left > 0 {
		return failKeepingOff(v, j, v1alpha1.ReasonMPSCapableReset, labelReset(v))
	}
	j.Message = fmt.Sprintf("Keeping NVIDIA's MPS DaemonSet off the node by %s=false", world.LabelMPSCapable)
	j.Next = gate.WithSlot(v, patchMPSCapable(v))
	return j, true
}

// failKeepingOff gives the change up: the node stays as it was.
func failKeepingOff(v *view.View, j gate.Judgement, reason, message string) (gate.Judgement, bool) {
	j.After = 0
	if j.Next = nil; gate.HasFallback(v) {
		j.Next = gate.AtOnce(gate.LetGo(v, "NVIDIA's MPS DaemonSet cannot be kept off the node")...)
	}
	return gate.Fail(v, j, reason, message), true
}

// LeaveToNVIDIA leaves a node that was verified to NVIDIA's MPS daemon, because another client let it back within the hour.
func LeaveToNVIDIA(v *view.View) gate.Judgement {
	return gate.Judgement{
		State: state.Degraded, Reason: v1alpha1.ReasonMPSCapableReset, Message: labelReset(v), After: LabelLeft(v),
		Next: gate.AtOnce(gate.LetGo(v, "another client lets NVIDIA's MPS daemon back")...),
	}
}

// patchMPSCapable sets the label and records in the same patch what it was before the operator first set it.
func patchMPSCapable(v *view.View) action.PatchNode {
	patch := v.Patch("keeping NVIDIA's MPS DaemonSet off the node")
	before, _, recorded := view.LabelBefore(v)
	if !recorded {
		before = v.Node.Labels[world.LabelMPSCapable]
	}
	patch.Labels[world.LabelMPSCapable] = new(world.LabelFalse)
	patch.Annotations[v1alpha1.AnnotationMPSCapable] = new(timing.Stamp(before, v.World.Now))
	baseline.SaveBaseline(v, patch)
	patch.Locked = true
	return patch
}

// LabelLeft is how long another client is still left alone that sets the label back.
func LabelLeft(v *view.View) time.Duration {
	_, at, recorded := view.LabelBefore(v)
	if !recorded {
		return 0
	}
	return at.Add(timing.Patience).Sub(v.World.Now)
}

func labelReset(v *view.View) string {
	return fmt.Sprintf("Another client set %s=%s again, which the operator had set to false. Find it (kubectl get node %s "+
		"--show-managed-fields -o yaml) and remove that label there", world.LabelMPSCapable, v.Node.Labels[world.LabelMPSCapable], v.Node.Name)
}

// NotKeptOff finds that NVIDIA's MPS DaemonSet is allowed on a node that the operator's daemons serve, and puts that right.
func NotKeptOff(v *view.View, _ state.State) gate.Finding {
	if !view.ServesMPS(v) || v.Target.Before && !view.OwnsMPS(v.Node.GPU.Spec.Devices) && byNVIDIA(v) && v.Selects() {
		return gate.Finding{}
	}
	allowed := v.Node.Labels[world.LabelMPSCapable] == world.LabelTrue
	switch {
	case view.ByNodeFeature(v) && v.Node.Features.OverriddenSince.IsZero():
		f := gate.Finding{Repair: []action.Action{action.KeepMPSOff{Node: v.Node.Name}}}
		if allowed {
			f.Reason = v1alpha1.ReasonDisablingNVIDIAMPS
			f.Message = fmt.Sprintf("NodeFeature %s is missing, which keeps NVIDIA's MPS DaemonSet off the node. The operator writes it again",
				action.OverrideName(v.Node.Name))
		}
		return f
	case !allowed:
		return gate.Finding{}
	case view.ByNodeFeature(v) && !unanswered(v):
		left := v.Node.Features.OverriddenSince.Add(timing.NodeFeatureTimeout).Sub(v.World.Now)
		if left > 0 {
			return gate.Finding{After: left}
		}
		return gate.Finding{Reason: v1alpha1.ReasonNodeFeatureIgnored, Message: ignored(v)}
	}
	if left := LabelLeft(v); left > 0 {
		return gate.Finding{Reason: v1alpha1.ReasonMPSCapableReset, Message: labelReset(v), After: left}
	}
	return gate.Finding{Repair: []action.Action{patchMPSCapable(v)}}
}

// byNVIDIA reports whether NVIDIA's MPS daemon serves the target.
func byNVIDIA(v *view.View) bool {
	return view.DaemonOf(v.Target.Devices, v1alpha1.MPSDaemonOwnerNVIDIA)
}

// NotNeeded lets NVIDIA's MPS DaemonSet back where the operator's daemons are gone, once that does no harm: GFD says false,
// or the node was found with NVIDIA's daemon and selects the configuration from before.
func NotNeeded(v *view.View, _ state.State) gate.Finding {
	if view.ExcludesNVIDIA(v) || !view.Overridden(v) {
		return gate.Finding{}
	}
	found := v.Target.Before && v.Selects()
	if v.Node.Features.Others == world.LabelTrue && (!found || !byNVIDIA(v)) {
		return Stale(v)
	}
	return gate.Finding{Repair: Allow(v, found)}
}

// Allow deletes the NodeFeature and, on a node that goes back to how it was found, restores the label.
func Allow(v *view.View, restore bool) []action.Action {
	var actions []action.Action
	if !v.Node.Features.OverriddenSince.IsZero() {
		actions = append(actions, action.AllowMPS{Node: v.Node.Name})
	}
	if before, _, patched := view.LabelBefore(v); patched && restore {
		patch := v.Patch("restoring the label " + world.LabelMPSCapable)
		patch.Labels[world.LabelMPSCapable], patch.Annotations[v1alpha1.AnnotationMPSCapable] = nil, nil
		if before != "" {
			patch.Labels[world.LabelMPSCapable] = &before
		}
		actions = append(actions, patch)
	}
	return actions
}

// Stale finds that GFD still says that the node shares by MPS, long after another configuration was selected.
func Stale(v *view.View) gate.Finding {
	since := v.Node.GPU.Spec.ChangeTime
	if since.IsZero() {
		return gate.Finding{}
	}
	if left := since.Add(timing.VerifyTimeout).Sub(v.World.Now); left > 0 {
		return gate.Finding{After: left}
	}
	return gate.Finding{
		Reason: v1alpha1.ReasonMPSCapableStale,
		Message: fmt.Sprintf("NodeFeature %s still says %s=true, though the node no longer shares its GPUs by MPS, so the operator keeps its own "+
			"NodeFeature %s. Look at the pod of GPU Feature Discovery on the node", v.Node.Features.Author, world.LabelMPSCapable,
			action.OverrideName(v.Node.Name)),
	}
}
