// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// NVIDIA's MPS DaemonSet is kept off the nodes that the operator's MPS daemons serve, and let back afterwards
// (docs/dev/contracts.md#nvidias-mps-daemonset).
//
//	prepareForMPS, awaitNVIDIAMPSOff → label nvidia.com/mps.capable=false → its pods are gone → … → mpsOverrideNotNeeded → AllowNVIDIAMPS
//
// The operator keeps the label false:
//
//	by NodeFeature   an object of ours overrides that of GFD: under the GPU Operator, and where another object names the label
//	by hand          where no NodeFeature names the label but a user has set it, or NFD does not answer: a patch of the Node,
//	                 which records the value before (annotation gpusharing.io/mps-capable)
//	not at all       where the label is not set, and nothing sets it: a stand-alone device plugin without NFD

// nvidiaMPSPods are the pods of NVIDIA's MPS DaemonSet on the node.
func nvidiaMPSPods(v *View) []string { return operandPods(v, cluster.LabelMPSCapable) }

// noNodeFeatures reports why the label cannot be overridden on the node, as far as that is known in advance; nil if it
// can. Without the kind, GFD writes its labels to a file and NFD keeps them on the node, whatever a client patches.
func noNodeFeatures(v *View) *plan.Problem {
	value, labelled := v.Node.Labels[cluster.LabelMPSCapable]
	_, patched := v.Node.Annotations[v1alpha1.AnnotationMPSCapable]
	if v.Snapshot.Plugin.NodeFeatures || !v.Snapshot.Plugin.ClusterPolicy || !labelled || patched || !sharedByOwnMPS(v.Target.Devices) || servesMPS(v) {
		return nil
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonNoNodeFeatures,
		Message: fmt.Sprintf("The node carries %s=%s, so NVIDIA's MPS DaemonSet would run beside the operator's daemons, and the cluster has no kind NodeFeature "+
			"to override it. Install Node Feature Discovery v0.17 or newer",
			cluster.LabelMPSCapable, value),
	}
}

// prepareForMPS keeps NVIDIA's MPS DaemonSet off a node that it does not serve, before the node is drained: that
// disturbs nobody, and where it cannot be done nobody is evicted for nothing. Meanwhile the node stays in the state
// before.
func prepareForMPS(v *View, before State) (Result, bool) {
	if len(v.EndingNVIDIAMPS()) > 0 {
		return Result{}, false
	}
	r, pending := awaitNVIDIAMPSOff(v)
	if r.State != Failed {
		r.State = before
	}
	return r, pending
}

// awaitNVIDIAMPSRecorded is the gate before NVIDIA's MPS daemon ends: the baseline says that it served the node.
func awaitNVIDIAMPSRecorded(v *View) (Result, bool) {
	if !baselineUnrecorded(v) || len(v.EndingNVIDIAMPS()) == 0 {
		return Result{}, false
	}
	return Result{
		State: StoppingOperands, Reason: underwayReason(v), Message: "Recording the state in which the node was found",
		Next: withSlot(v, recordBaseline(v)),
	}, true
}

// awaitNVIDIAMPSOff is the gate before the operator's MPS daemons start: NVIDIA's MPS DaemonSet has no pod on the node
// and gets none.
func awaitNVIDIAMPSOff(v *View) (Result, bool) {
	if !ExcludesNVIDIAMPS(v) || servesMPS(v) {
		return Result{}, false
	}
	r := Result{State: StoppingOperands, Reason: v1alpha1.ReasonDisablingNVIDIAMPS, Next: withSlot(v)}
	message, remaining := nvidiaMPSUnreported(v)
	switch {
	case remaining > 0 && !MPSLabelOverridden(v):
		r.Message, r.After, r.Next = message, remaining, nil
	case OverriddenByNodeFeature(v) && v.Node.Features.OverriddenSince.IsZero():
		r.Message = fmt.Sprintf("Keeping NVIDIA's MPS DaemonSet off the node by NodeFeature %s", action.OverrideName(v.Node.Name))
		r.Next = withSlot(v, action.KeepMPSOff{Node: v.Node.Name, Policy: v.Ref()})
	case nvidiaMPSKeptOff(v):
		return awaitMPSPods(v, r, nvidiaMPSPods(v))
	case OverriddenByNodeFeature(v) && !nfdTimedOut(v):
		return awaitNFD(v, r)
	default:
		return setMPSLabel(v, r)
	}
	return r, true
}

// nvidiaMPSUnreported is for how long, at most, NVIDIA's MPS daemon may serve the node and have clients though the agent
// does not report it yet: the pod of the daemon, one of a client or the agent itself has just come. Until then nothing
// is done that ends the daemon.
func nvidiaMPSUnreported(v *View) (message string, remaining time.Duration) {
	if v.Target.IsBaseline || len(v.EndingNVIDIAMPS()) > 0 || len(nvidiaMPSPods(v)) == 0 {
		return "", 0
	}
	came := []time.Time{v.Node.AgentSince}
	for _, p := range v.Node.Pods {
		if p.KeptBy(cluster.LabelMPSCapable) {
			came = append(came, p.Scheduled, p.ReadySince)
		}
	}
	remaining = latestOf(v, came...).Add(timing.ReportAfter).Sub(v.Snapshot.Now)
	if pod, age := justBoundPod(v); pod != "" {
		remaining = max(remaining, timing.ReportAfter-age)
	}
	return "Waiting for the agent to report whether NVIDIA's MPS daemon serves the node: " + format.List(nvidiaMPSPods(v)), remaining
}

// hasNVIDIAMPSClients reports whether NVIDIA's MPS daemon serves a GPU that is in use, or may be, whatever the node is to be.
func hasNVIDIAMPSClients(v *View) bool {
	used := NewView(v.Snapshot, v.Node)
	used.Devices = plan.Devices(v.Node.GPU.Status.Devices)
	serves := len(used.Devices) == 0 && len(nvidiaMPSPods(v)) > 0 // a GPUNode that was made anew does not tell yet
	for _, d := range used.Devices {
		if d.State.MPS != nil && d.State.MPS.External {
			serves = true
			addUsers(used, d)
		}
	}
	mayUse := func(p cluster.Pod) bool {
		return p.GPU && (!podReported(used, &p) || reportedOf(used, &p) < asksFor(&p))
	}
	return len(used.Blockers) > 0 || serves && slices.ContainsFunc(v.Node.Pods, mayUse)
}

// nvidiaMPSKeptOff reports whether the label is false, and stays so whatever GFD says. That GFD itself says false
// proves nothing: it says so until the node selects a configuration that shares by MPS. So the operator's NodeFeature
// has a label of its own.
func nvidiaMPSKeptOff(v *View) bool {
	value, labelled := v.Node.Labels[cluster.LabelMPSCapable]
	if !OverriddenByNodeFeature(v) {
		return value == cluster.LabelFalse || !labelled
	}
	return value == cluster.LabelFalse && (v.Node.Labels[v1alpha1.LabelOverridden] == cluster.LabelTrue || nfdTimedOut(v))
}

// awaitMPSPods waits until the pods of NVIDIA's MPS DaemonSet are gone, which the label no longer keeps on the node.
func awaitMPSPods(v *View, r Result, pods []string) (Result, bool) {
	if len(pods) == 0 {
		return Result{}, false
	}
	r.Message = "Waiting until the pods of NVIDIA's MPS DaemonSet are gone: " + format.List(pods)
	if since := mpsOverriddenSince(v); !since.IsZero() {
		if r.After = since.Add(timing.StopTimeout).Sub(v.Snapshot.Now); r.After <= 0 {
			return failKeepingNVIDIAMPSOff(v, r, v1alpha1.ReasonOperandsNotEnding, fmt.Sprintf("The pods of NVIDIA's MPS DaemonSet did not end within "+
				"%s: %s. Look at the kubelet and the container runtime of the node", timing.StopTimeout, format.List(pods)))
		}
	}
	return r, true
}

// mpsOverriddenSince is since when the label is overridden; zero if it is not.
func mpsOverriddenSince(v *View) time.Time {
	_, at, _ := mpsLabelBefore(v)
	if at.Before(v.Node.Features.OverriddenSince) {
		return v.Node.Features.OverriddenSince
	}
	return at
}

// awaitNFD waits until NFD has changed the label.
func awaitNFD(v *View, r Result) (Result, bool) {
	r.After = v.Node.Features.OverriddenSince.Add(timing.NodeFeatureTimeout).Sub(v.Snapshot.Now)
	if r.After <= 0 {
		return failKeepingNVIDIAMPSOff(v, r, v1alpha1.ReasonNodeFeatureIgnored, nodeFeatureIgnored(v))
	}
	r.Message = fmt.Sprintf("Waiting until Node Feature Discovery sets %s=false", cluster.LabelMPSCapable)
	return r, true
}

// nodeFeatureIgnored is the message that NFD does not do what the operator's NodeFeature says.
func nodeFeatureIgnored(v *View) string {
	return fmt.Sprintf("NFD ignored NodeFeature %s for %s, unlike %s; look at restrictions.denyNodeFeatureLabels, denyLabelNs and "+
		"labelWhiteList of nfd-master", action.OverrideName(v.Node.Name), timing.NodeFeatureTimeout, v.Node.Features.Author)
}

// nfdTimedOut reports whether NFD has not acted on the operator's NodeFeature in time, and no other object names the
// label.
func nfdTimedOut(v *View) bool {
	f := v.Node.Features
	return f.Others == "" && v.Snapshot.Now.Sub(f.OverriddenSince) >= timing.NodeFeatureTimeout
}

// setMPSLabel sets the label where NFD does not, once in an hour.
func setMPSLabel(v *View, r Result) (Result, bool) {
	if remaining := mpsLabelRemaining(v); remaining > 0 {
		return failKeepingNVIDIAMPSOff(v, r, v1alpha1.ReasonMPSCapableReset, mpsLabelReset(v))
	}
	r.Message = fmt.Sprintf("Keeping NVIDIA's MPS DaemonSet off the node by %s=false", cluster.LabelMPSCapable)
	r.Next = withSlot(v, patchMPSCapable(v))
	return r, true
}

// failKeepingNVIDIAMPSOff gives the change up: the node stays as it was.
func failKeepingNVIDIAMPSOff(v *View, r Result, reason, message string) (Result, bool) {
	r.After = 0
	if r.Next = nil; hasFallback(v) {
		r.Next = atOnce(RestoreScheduling(v, "NVIDIA's MPS DaemonSet cannot be kept off the node")...)
	}
	return failChange(v, r, reason, message), true
}

// leaveToNVIDIAMPS leaves a node that was verified to NVIDIA's MPS daemon, because another controller let it back
// within the hour.
func leaveToNVIDIAMPS(v *View) Result {
	return Result{
		State: Degraded, Reason: v1alpha1.ReasonMPSCapableReset, Message: mpsLabelReset(v), After: mpsLabelRemaining(v),
		Next: atOnce(RestoreScheduling(v, "another controller lets NVIDIA's MPS daemon back")...),
	}
}

// patchMPSCapable sets the label and records in the same patch what it was before the operator first set it.
func patchMPSCapable(v *View) action.PatchNode {
	patch := v.Patch("keeping NVIDIA's MPS DaemonSet off the node")
	before, _, recorded := mpsLabelBefore(v)
	if !recorded {
		before = v.Node.Labels[cluster.LabelMPSCapable]
	}
	patch.Labels[cluster.LabelMPSCapable] = new(cluster.LabelFalse)
	patch.Annotations[v1alpha1.AnnotationMPSCapable] = new(timing.Stamp(before, v.Snapshot.Now))
	saveBaselineCopy(v, patch)
	patch.Locked = true
	return patch
}

// mpsLabelRemaining is how long another controller is still left alone that sets the label back.
func mpsLabelRemaining(v *View) time.Duration {
	_, at, recorded := mpsLabelBefore(v)
	if !recorded {
		return 0
	}
	return at.Add(timing.Patience).Sub(v.Snapshot.Now)
}

func mpsLabelReset(v *View) string {
	return fmt.Sprintf("Another controller set %s=%s again, which the operator had set to false. Find it (kubectl get node %s "+
		"--show-managed-fields -o yaml) and remove that label there", cluster.LabelMPSCapable, v.Node.Labels[cluster.LabelMPSCapable], v.Node.Name)
}

// nvidiaMPSNotKeptOff finds that NVIDIA's MPS DaemonSet is allowed on a node that the operator's daemons serve, and
// puts that right.
func nvidiaMPSNotKeptOff(v *View, _ State) Finding {
	if !servesMPS(v) || v.Target.IsBaseline && !sharedByOwnMPS(v.Node.GPU.Spec.Devices) && servedByNVIDIAMPS(v) && v.Selects() {
		return Finding{}
	}
	allowed := v.Node.Labels[cluster.LabelMPSCapable] == cluster.LabelTrue
	switch {
	case OverriddenByNodeFeature(v) && v.Node.Features.OverriddenSince.IsZero():
		f := Finding{Repair: []action.Action{action.KeepMPSOff{Node: v.Node.Name}}}
		if allowed {
			f.Reason = v1alpha1.ReasonDisablingNVIDIAMPS
			f.Message = fmt.Sprintf("NodeFeature %s is missing, which keeps NVIDIA's MPS DaemonSet off the node. The operator writes it again",
				action.OverrideName(v.Node.Name))
		}
		return f
	case !allowed:
		return Finding{}
	case OverriddenByNodeFeature(v) && !nfdTimedOut(v):
		remaining := v.Node.Features.OverriddenSince.Add(timing.NodeFeatureTimeout).Sub(v.Snapshot.Now)
		if remaining > 0 {
			return Finding{After: remaining}
		}
		return Finding{Reason: v1alpha1.ReasonNodeFeatureIgnored, Message: nodeFeatureIgnored(v)}
	}
	if remaining := mpsLabelRemaining(v); remaining > 0 {
		return Finding{Reason: v1alpha1.ReasonMPSCapableReset, Message: mpsLabelReset(v), After: remaining}
	}
	return Finding{Repair: []action.Action{patchMPSCapable(v)}}
}

// servedByNVIDIAMPS reports whether NVIDIA's MPS daemon serves the target.
func servedByNVIDIAMPS(v *View) bool {
	return sharedByDaemonOf(v.Target.Devices, v1alpha1.MPSDaemonOwnerNVIDIA)
}

// mpsOverrideNotNeeded lets NVIDIA's MPS DaemonSet back where the operator's daemons are gone, once that does no harm:
// GFD says false, or the node selects the configuration from before and that asks for NVIDIA's daemon, or its DRA driver
// serves the node, beside which that daemon does not run (2^40+720295).
func mpsOverrideNotNeeded(v *View, _ State) Finding {
	if ExcludesNVIDIAMPS(v) || !MPSLabelOverridden(v) {
		return Finding{}
	}
	found := v.Target.IsBaseline && v.Selects() || !v.ReadsConfigs()
	confirmed, gfdRuns := untilGFDConfirms(v)
	if v.Node.Features.Others == cluster.LabelTrue && (!found || !servedByNVIDIAMPS(v) && (!gfdRuns || confirmed > 0)) {
		f := staleSharingLabels(v)
		if found {
			f.After = timing.Sooner(f.After, confirmed)
		}
		return f
	}
	return Finding{Repair: AllowNVIDIAMPS(v, found)}
}

// AllowNVIDIAMPS deletes the NodeFeature and, on a node that goes back to how it was found, restores the label.
func AllowNVIDIAMPS(v *View, restore bool) []action.Action {
	var actions []action.Action
	if !v.Node.Features.OverriddenSince.IsZero() {
		actions = append(actions, action.AllowMPS{Node: v.Node.Name})
	}
	if before, _, patched := mpsLabelBefore(v); patched && restore {
		patch := v.Patch("restoring the label " + cluster.LabelMPSCapable)
		patch.Labels[cluster.LabelMPSCapable], patch.Annotations[v1alpha1.AnnotationMPSCapable] = nil, nil
		if before != "" {
			patch.Labels[cluster.LabelMPSCapable] = &before
		}
		actions = append(actions, patch)
	}
	return actions
}

// allowingNVIDIAMPS waits until NVIDIA's MPS DaemonSet is allowed on the node again (mpsOverrideNotNeeded), before
// the node is forgotten.
func allowingNVIDIAMPS(v *View, r Result) Result {
	r.State, r.Reason = Finishing, underwayReason(v)
	r.Message = fmt.Sprintf("Waiting until the operator no longer overrides %s", cluster.LabelMPSCapable)
	_, gfdRuns := untilGFDConfirms(v)
	if f := staleSharingLabels(v); f.Reason != "" && v.Node.Features.Others == cluster.LabelTrue && !gfdRuns {
		r.State, r.Reason = Failed, f.Reason
	}
	return r
}

// untilGFDConfirms is how long GFD must still run on the node until what it says is surely about the configuration that
// the node selects now. A node that was found before NVIDIA's daemon had started, as new nodes are, has a baseline
// without it, so then only GFD tells that the configuration from before asks for that daemon.
func untilGFDConfirms(v *View) (remaining time.Duration, runs bool) {
	for _, p := range v.Node.Pods {
		if p.KeptBy(cluster.DeployLabels()[1]) && !p.Terminating && len(p.Troubles) == 0 {
			since := timing.Latest(mpsEndedSince(v), timing.Latest(p.Scheduled, p.ReadySince))
			return since.Add(timing.VerifyTimeout).Sub(v.Snapshot.Now), true
		}
	}
	return 0, false
}

// mpsEndedSince is since when the node shares its GPUs otherwise; of a GPUNode that was made anew, since when the label
// is overridden at the latest.
func mpsEndedSince(v *View) time.Time {
	return timing.Latest(v.Node.GPU.Spec.ChangeTime.Time, v.Node.Features.OverriddenSince)
}

// staleSharingLabels finds that GFD still says that the node shares by MPS, long after another configuration was
// selected.
func staleSharingLabels(v *View) Finding {
	since := mpsEndedSince(v)
	if since.IsZero() {
		return Finding{}
	}
	if remaining := since.Add(timing.VerifyTimeout).Sub(v.Snapshot.Now); remaining > 0 {
		return Finding{After: remaining}
	}
	return Finding{
		Reason: v1alpha1.ReasonMPSCapableStale,
		Message: fmt.Sprintf("NodeFeature %s still says %s=true, though the node no longer shares its GPUs by MPS, so the operator keeps its own "+
			"NodeFeature %s. Look at the pod of GPU Feature Discovery on the node", v.Node.Features.Author, cluster.LabelMPSCapable,
			action.OverrideName(v.Node.Name)),
	}
}

// sharedByOwnMPS reports whether an MPS daemon of the operator shares one of the GPUs.
func sharedByOwnMPS(devices []v1alpha1.DeviceSpec) bool {
	return sharedByDaemonOf(devices, v1alpha1.MPSDaemonOwnerGPUSharing)
}

// sharedByDaemonOf reports whether a GPU of the list is shared by an MPS daemon of that owner.
func sharedByDaemonOf(devices []v1alpha1.DeviceSpec, owner v1alpha1.MPSDaemonOwner) bool {
	return slices.ContainsFunc(devices, func(d v1alpha1.DeviceSpec) bool { return sharedBy(d.Sharing, owner) })
}

func sharedBy(s v1alpha1.DeviceSharing, owner v1alpha1.MPSDaemonOwner) bool {
	return s.MPS != nil && s.MPS.Owner == owner
}

// servesMPS reports whether the operator's MPS daemons serve the node, or the agent is asked to start them.
func servesMPS(v *View) bool {
	return sharedByOwnMPS(v.Node.GPU.Spec.Devices) || slices.ContainsFunc(v.Devices, func(d gpu.Device) bool {
		return d.State.MPS != nil && !d.State.MPS.External
	})
}

// mustRemoveNVIDIAMPS reports whether NVIDIA's MPS daemon must leave the node and to stop NVIDIA's operands does not
// keep it off: beside a stand-alone plugin no deploy label stops it, and where the node selects its configuration
// already, another controller has let it back.
func mustRemoveNVIDIAMPS(v *View) bool {
	letBack := v.Target.Config != "" && !v.Target.IsBaseline && v.Selects()
	return (!v.Snapshot.Plugin.ClusterPolicy || letBack) && len(v.EndingNVIDIAMPS()) > 0
}

// ExcludesNVIDIAMPS reports whether NVIDIA's MPS DaemonSet must have no pod on the node.
func ExcludesNVIDIAMPS(v *View) bool {
	return sharedByOwnMPS(v.Target.Devices) || servesMPS(v) || mustRemoveNVIDIAMPS(v)
}

// OverriddenByNodeFeature reports whether a NodeFeature overrides the label of the node.
func OverriddenByNodeFeature(v *View) bool {
	return v.Snapshot.Plugin.NodeFeatures && (v.Snapshot.Plugin.ClusterPolicy || v.Node.Features.Others != "")
}

// mpsLabelBefore is what the label was before the operator first set it (empty: it was not set), and when the operator
// set it last.
func mpsLabelBefore(v *View) (before string, at time.Time, recorded bool) {
	before, seconds, recorded := strings.Cut(v.Node.Annotations[v1alpha1.AnnotationMPSCapable], "@")
	if n, err := strconv.ParseInt(seconds, 10, 64); recorded && err == nil {
		at = time.Unix(n, 0)
	}
	return before, at, recorded
}

// Selects reports whether the node selects the configuration of the target.
func (v *View) Selects() bool { return v.Node.Labels[v1alpha1.LabelConfig] == v.Target.Config }

// MPSLabelOverridden reports whether something of the operator's overrides the label.
func MPSLabelOverridden(v *View) bool {
	_, _, patched := mpsLabelBefore(v)
	return patched || !v.Node.Features.OverriddenSince.IsZero()
}
