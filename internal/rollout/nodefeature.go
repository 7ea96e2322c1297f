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
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

// The operator's own MPS daemons serve every node that a policy shares by MPS. NVIDIA's MPS DaemonSet must not be on such a
// node: it reads the default configuration only, and when it starts it unmounts the shared memory of the daemons that run.
// It is on each node with the label nvidia.com/mps.capable=true, which GPU Feature Discovery (GFD) asks for as soon as the
// node selects a configuration that shares by MPS. Node Feature Discovery (NFD) makes the label from NodeFeature objects.
// The operator keeps the label false:
//
//	by NodeFeature   an object of ours overrides that of GFD: under the GPU Operator, and where another object names the label
//	by hand          where no NodeFeature names the label but a user has set it, or NFD does not answer: a patch of the Node,
//	                 which records the value before (annotation gpusharing.io/mps-capable)
//	not at all       where the label is not set, and nothing sets it: a stand-alone device plugin without NFD
//
// On the way in: GPUs drained where NVIDIA's daemon serves them, label overridden, label false and no pod of the DaemonSet on
// the node, spec written. On the way out: our daemons gone, the other configuration selected, GFD's own object says
// false, override deleted.

const (
	labelTrue  = "true"
	labelFalse = "false"
)

// nodeFeatureTimeout is how long NFD may take to change the label. It acts once per second.
const nodeFeatureTimeout = 30 * time.Second

// OverrideName is the name of the operator's NodeFeature for a node. NFD reads the objects outside its own namespace in
// the order of their names, and a later one overwrites an earlier one (NFD pkg/nfd-master/nfd-master.go). So the name must
// sort after nvidia-features-for-<node> of GFD.
func OverrideName(node string) string { return "zz-gpu-sharing-" + node }

// ownsMPS reports whether an MPS daemon of the operator shares one of the GPUs.
func ownsMPS(devices []v1alpha1.DeviceSpec) bool {
	return daemonOf(devices, v1alpha1.MPSDaemonOwnerGPUSharing)
}

func daemonOf(devices []v1alpha1.DeviceSpec, owner v1alpha1.MPSDaemonOwner) bool {
	return slices.ContainsFunc(devices, func(d v1alpha1.DeviceSpec) bool {
		return d.Sharing.MPS != nil && d.Sharing.MPS.Owner == owner
	})
}

// servesMPS reports whether the operator's MPS daemons serve the node, or the agent is asked to start them.
func (v *view) servesMPS() bool {
	return ownsMPS(v.node.GPU.Spec.Devices) || slices.ContainsFunc(v.have, func(d gpu.Device) bool {
		return d.State.MPS != nil && !d.State.MPS.External
	})
}

// ousts reports whether NVIDIA's MPS daemon must leave the node and to pause NVIDIA's clients does not keep it off: beside a stand-alone
// plugin no deploy label stops it, and where the node selects its configuration already, another client has let it back.
func (v *view) ousts() bool {
	letBack := v.to.key != "" && !v.to.before && v.selects()
	return (!v.world.Wiring.ClusterPolicy || letBack) && len(v.leavesNVIDIA()) > 0
}

// excludesNVIDIA reports whether NVIDIA's MPS DaemonSet must have no pod on the node.
func (v *view) excludesNVIDIA() bool { return ownsMPS(v.to.devices) || v.servesMPS() || v.ousts() }

// byNodeFeature reports whether a NodeFeature overrides the label of the node.
func (v *view) byNodeFeature() bool {
	return v.world.Wiring.NodeFeatures && (v.world.Wiring.ClusterPolicy || v.node.Features.Others != "")
}

// mpsPods are the pods of NVIDIA's MPS DaemonSet on the node.
func (v *view) mpsPods() []string { return v.clients(LabelMPSCapable) }

// noNodeFeatures reports why the label cannot be overridden on the node, as far as that is known in advance; nil if it can.
// Without the kind, GFD writes its labels to a file and NFD keeps them on the node, whatever a client patches.
func (v *view) noNodeFeatures() *plan.Problem {
	value, labelled := v.node.Labels[LabelMPSCapable]
	_, patched := v.node.Annotations[v1alpha1.AnnotationMPSCapable]
	if v.world.Wiring.NodeFeatures || !v.world.Wiring.ClusterPolicy || !labelled || patched || !ownsMPS(v.to.devices) || v.servesMPS() {
		return nil
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonNoNodeFeatures,
		Message: fmt.Sprintf("The node carries %s=%s and the cluster has no kind NodeFeature that could override it, so NVIDIA's MPS "+
			"DaemonSet would run beside the operator's MPS daemons. Install Node Feature Discovery v0.17 or newer, or use another strategy",
			LabelMPSCapable, value),
	}
}

// prepareMPS keeps NVIDIA's MPS DaemonSet off a node that it does not serve, before the node is drained: that disturbs
// nobody, and where it cannot be done nobody is evicted for nothing.
func (v *view) prepareMPS(j judgement) (judgement, bool) {
	if len(v.leavesNVIDIA()) > 0 {
		return judgement{}, false
	}
	g, pending := v.keepMPSOff()
	if g.giveUp = j.giveUp; g.State != StateFailed {
		g.State = j.State
	}
	return g, pending
}

// remember is the gate before NVIDIA's MPS daemon ends: the baseline says that it served the node.
func (v *view) remember() (judgement, bool) {
	if !v.unrecorded() || len(v.leavesNVIDIA()) == 0 {
		return judgement{}, false
	}
	return judgement{
		State: StateQuiescing, reason: v.underway(), message: "Recording the state in which the node was found",
		start: []Action{v.recordBaseline()},
	}, true
}

// keepMPSOff is the gate before the operator's MPS daemons start: NVIDIA's MPS DaemonSet has no pod on the node and gets none.
func (v *view) keepMPSOff() (judgement, bool) {
	if !v.excludesNVIDIA() || v.servesMPS() {
		return judgement{}, false
	}
	j := judgement{State: StateQuiescing, reason: v1alpha1.ReasonDisablingNVIDIAMPS}
	switch {
	case v.byNodeFeature() && v.node.Features.OverriddenSince.IsZero():
		j.message = fmt.Sprintf("Keeping NVIDIA's MPS DaemonSet off the node by NodeFeature %s", OverrideName(v.node.Name))
		j.start = []Action{KeepMPSOff{Node: v.node.Name, Policy: v.ref()}}
	case v.keptOff():
		return v.awaitMPSPods(j, v.mpsPods())
	case v.byNodeFeature() && !v.unanswered():
		return v.awaitNFD(j)
	default:
		return v.labelByHand(j)
	}
	return j, true
}

// keptOff reports whether the label is false, and stays so whatever GFD says. That GFD itself says false proves nothing: it
// says so until the node selects a configuration that shares by MPS. So the operator's NodeFeature has a label of its own.
func (v *view) keptOff() bool {
	value, labelled := v.node.Labels[LabelMPSCapable]
	if !v.byNodeFeature() {
		return value == labelFalse || !labelled
	}
	return value == labelFalse && (v.node.Labels[v1alpha1.LabelOverridden] == labelTrue || v.unanswered())
}

// awaitMPSPods waits until the pods of NVIDIA's MPS DaemonSet are gone, which the label no longer keeps on the node.
func (v *view) awaitMPSPods(j judgement, pods []string) (judgement, bool) {
	if len(pods) == 0 {
		return judgement{}, false
	}
	j.message = "Waiting until the pods of NVIDIA's MPS DaemonSet are gone: " + list(pods)
	if since := v.overriddenSince(); !since.IsZero() {
		if j.after = since.Add(quiesceTimeout).Sub(v.world.Now); j.after <= 0 {
			return v.failKeepingOff(j, v1alpha1.ReasonClientsNotEnding, fmt.Sprintf("The pods of NVIDIA's MPS DaemonSet did not end within "+
				"%s: %s. Look at the kubelet and the container runtime of the node", quiesceTimeout, list(pods)))
		}
	}
	return j, true
}

// overriddenSince is since when the label is overridden; zero if it is not.
func (v *view) overriddenSince() time.Time {
	_, at, _ := v.labelBefore()
	if at.Before(v.node.Features.OverriddenSince) {
		return v.node.Features.OverriddenSince
	}
	return at
}

// awaitNFD waits until NFD has changed the label.
func (v *view) awaitNFD(j judgement) (judgement, bool) {
	j.after = v.node.Features.OverriddenSince.Add(nodeFeatureTimeout).Sub(v.world.Now)
	if j.after <= 0 {
		return v.failKeepingOff(j, v1alpha1.ReasonNodeFeatureIgnored, v.ignored())
	}
	j.message = fmt.Sprintf("Waiting until Node Feature Discovery sets %s=false", LabelMPSCapable)
	return j, true
}

// ignored is the message that NFD does not do what the operator's NodeFeature says.
func (v *view) ignored() string {
	return fmt.Sprintf("Node Feature Discovery did not set %s=false and %s=true within %s, as NodeFeature %s asks: NodeFeature %s says %s=%s. "+
		"Look at the log of nfd-master and its options restrictions.denyNodeFeatureLabels, nodeFeatureNamespaceSelector, disableLabels "+
		"and allowOverwrite, denyLabelNs, labelWhiteList and noPublish",
		LabelMPSCapable, v1alpha1.LabelOverridden, nodeFeatureTimeout, OverrideName(v.node.Name), v.node.Features.Author, LabelMPSCapable,
		v.node.Features.Others)
}

// unanswered reports whether NFD has not acted on the operator's NodeFeature in time, and no other object names the label.
func (v *view) unanswered() bool {
	f := v.node.Features
	return f.Others == "" && v.world.Now.Sub(f.OverriddenSince) >= nodeFeatureTimeout
}

// labelByHand sets the label where NFD does not, once in an hour.
func (v *view) labelByHand(j judgement) (judgement, bool) {
	if left := v.labelLeft(); left > 0 {
		return v.failKeepingOff(j, v1alpha1.ReasonMPSCapableReset, v.labelReset())
	}
	j.message = fmt.Sprintf("Keeping NVIDIA's MPS DaemonSet off the node by %s=false", LabelMPSCapable)
	j.start = []Action{v.patchMPSCapable()}
	return j, true
}

// failKeepingOff gives the change up: the node stays as it was.
func (v *view) failKeepingOff(j judgement, reason, message string) (judgement, bool) {
	j.after = 0
	if v.wish != nil {
		j.actions = v.letGo("NVIDIA's MPS DaemonSet cannot be kept off the node")
	}
	return v.fail(j, reason, message), true
}

// besideNVIDIA leaves a node that was verified to NVIDIA's MPS daemon, because another client let it back within the hour.
func (v *view) besideNVIDIA() judgement {
	return judgement{
		State: StateDegraded, reason: v1alpha1.ReasonMPSCapableReset, message: v.labelReset(), after: v.labelLeft(),
		actions: v.letGo("another client lets NVIDIA's MPS daemon back"),
	}
}

// patchMPSCapable sets the label and records in the same patch what it was before the operator first set it.
func (v *view) patchMPSCapable() PatchNode {
	patch := v.patch("keeping NVIDIA's MPS DaemonSet off the node")
	before, _, recorded := v.labelBefore()
	if !recorded {
		before = v.node.Labels[LabelMPSCapable]
	}
	patch.Labels[LabelMPSCapable] = new(labelFalse)
	patch.Annotations[v1alpha1.AnnotationMPSCapable] = new(stamp(before, v.world.Now))
	v.saveBaseline(patch)
	patch.Locked = true
	return patch
}

// labelBefore is what the label was before the operator first set it (empty: it was not set), and when the operator set it
// last.
func (v *view) labelBefore() (before string, at time.Time, recorded bool) {
	before, seconds, recorded := strings.Cut(v.node.Annotations[v1alpha1.AnnotationMPSCapable], "@")
	if n, err := strconv.ParseInt(seconds, 10, 64); recorded && err == nil {
		at = time.Unix(n, 0)
	}
	return before, at, recorded
}

// labelLeft is how long another client is still left alone that sets the label back.
func (v *view) labelLeft() time.Duration {
	_, at, recorded := v.labelBefore()
	if !recorded {
		return 0
	}
	return at.Add(patience).Sub(v.world.Now)
}

func (v *view) labelReset() string {
	return fmt.Sprintf("Another client set %s=%s again, which the operator had set to false. Find it (kubectl get node %s "+
		"--show-managed-fields -o yaml) and remove that label there", LabelMPSCapable, v.node.Labels[LabelMPSCapable], v.node.Name)
}

// notKeptOff finds that NVIDIA's MPS DaemonSet is allowed on a node that the operator's daemons serve, and puts that right.
func (v *view) notKeptOff(State) finding {
	if !v.servesMPS() || v.to.before && !ownsMPS(v.node.GPU.Spec.Devices) && v.byNVIDIA() && v.selects() {
		return finding{}
	}
	allowed := v.node.Labels[LabelMPSCapable] == labelTrue
	switch {
	case v.byNodeFeature() && v.node.Features.OverriddenSince.IsZero():
		f := finding{repair: []Action{KeepMPSOff{Node: v.node.Name}}}
		if allowed {
			f.reason = v1alpha1.ReasonDisablingNVIDIAMPS
			f.message = fmt.Sprintf("NodeFeature %s is missing, which keeps NVIDIA's MPS DaemonSet off the node. The operator writes it again",
				OverrideName(v.node.Name))
		}
		return f
	case !allowed:
		return finding{}
	case v.byNodeFeature() && !v.unanswered():
		left := v.node.Features.OverriddenSince.Add(nodeFeatureTimeout).Sub(v.world.Now)
		if left > 0 {
			return finding{after: left}
		}
		return finding{reason: v1alpha1.ReasonNodeFeatureIgnored, message: v.ignored()}
	}
	if left := v.labelLeft(); left > 0 {
		return finding{reason: v1alpha1.ReasonMPSCapableReset, message: v.labelReset(), after: left}
	}
	return finding{repair: []Action{v.patchMPSCapable()}}
}

// byNVIDIA reports whether NVIDIA's MPS daemon serves the target.
func (v *view) byNVIDIA() bool { return daemonOf(v.to.devices, v1alpha1.MPSDaemonOwnerNVIDIA) }

// selects reports whether the node selects the configuration of the target.
func (v *view) selects() bool { return v.node.Labels[v1alpha1.LabelConfig] == v.to.key }

// notNeeded lets NVIDIA's MPS DaemonSet back where the operator's daemons are gone, once that does no harm: GFD says false,
// or the node was found with NVIDIA's daemon and selects the configuration from before.
func (v *view) notNeeded(State) finding {
	if v.excludesNVIDIA() || !v.overridden() {
		return finding{}
	}
	found := v.to.before && v.selects()
	if v.node.Features.Others == labelTrue && (!found || !v.byNVIDIA()) {
		return v.stale()
	}
	return finding{repair: v.allowMPS(found)}
}

// overridden reports whether something of the operator's overrides the label.
func (v *view) overridden() bool {
	_, _, patched := v.labelBefore()
	return patched || !v.node.Features.OverriddenSince.IsZero()
}

// allowMPS deletes the NodeFeature and, on a node that goes back to how it was found, restores the label.
func (v *view) allowMPS(restore bool) []Action {
	var actions []Action
	if !v.node.Features.OverriddenSince.IsZero() {
		actions = append(actions, AllowMPS{Node: v.node.Name})
	}
	if before, _, patched := v.labelBefore(); patched && restore {
		patch := v.patch("restoring the label " + LabelMPSCapable)
		patch.Labels[LabelMPSCapable], patch.Annotations[v1alpha1.AnnotationMPSCapable] = nil, nil
		if before != "" {
			patch.Labels[LabelMPSCapable] = &before
		}
		actions = append(actions, patch)
	}
	return actions
}

// stale finds that GFD still says that the node shares by MPS, long after another configuration was selected.
func (v *view) stale() finding {
	since := v.node.GPU.Spec.ChangeTime
	if since.IsZero() {
		return finding{}
	}
	if left := since.Add(verifyTimeout).Sub(v.world.Now); left > 0 {
		return finding{after: left}
	}
	return finding{
		reason: v1alpha1.ReasonMPSCapableStale,
		message: fmt.Sprintf("NodeFeature %s still says %s=true, though the node no longer shares its GPUs by MPS, so the operator keeps its own "+
			"NodeFeature %s. Look at the pod of GPU Feature Discovery on the node", v.node.Features.Author, LabelMPSCapable,
			OverrideName(v.node.Name)),
	}
}
