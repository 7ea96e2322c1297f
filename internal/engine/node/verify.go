// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

// awaitAdvertised compares what the node advertises with what it must.
func awaitAdvertised(v *View) (Result, bool) {
	differences := advertisedDifferences(v)
	if len(differences) == 0 {
		return Result{}, false
	}
	r := Result{
		State: Verifying, Reason: v1alpha1.ReasonVerifying,
		Message: "the node does not advertise yet what it must: " + format.List(differences),
	}
	if remaining, is := keepsPluginOff(v); is {
		if r.After = remaining; remaining <= 0 {
			r.Next = atOnce(removeTaints(v)...)
		}
		return r, true
	}
	remaining := v.OrGrace(verifyRemaining(v, v.Snapshot.Plugin.Overruled)) // after another controller was overruled NVIDIA's programs start anew
	if v.TargetIsLastGood() {
		r.State, r.Reason = Degraded, v1alpha1.ReasonNotAdvertised
		r.Message += cmp.Or(readsOther(v), unhealthyDevices(v), otherMPSRoot(v), "; look at the pods of NVIDIA's device plugin on the node")
		actions, after := recordPluginRestart(v)
		if remaining <= 0 {
			actions = append(actions, removeTaints(v)...)
		} else if v.Taint() != nil {
			after = timing.Sooner(after, remaining)
		}
		r.Next, r.After = atOnce(actions...), after
		return r, true
	}
	if remaining <= 0 && !v.Snapshot.Plugin.Ready {
		// What the device plugin reads is not the operator's, so another layout of the GPUs would be offered no better.
		r.Message += cmp.Or(readsOther(v), "; NVIDIA's device plugin is being pointed at the operator's ConfigMap")
		r.Next = atOnce(removeTaints(v)...)
		return r, true
	}
	if until := remaining - timing.VerifyTimeout/2; until > 0 {
		r.After = until
		return r, true
	}
	restarts, after := recordPluginRestart(v) // it may have read what another controller had written into the ConfigMap
	if remaining <= 0 && (len(restarts) == 0 || slices.ContainsFunc(restarts, v.IsFought)) {
		message := fmt.Sprintf("not advertised within %s: %s; %s", timing.VerifyTimeout, format.List(differences), cmp.Or(pluginTroubles(v),
			strings.TrimPrefix(otherMPSRoot(v), "; "), "if the device plugin logs \"device plugin already connected\", restart the kubelet"))
		return failChange(v, r, v1alpha1.ReasonNotAdvertised, message), true
	}
	r.Next, r.After = atOnce(restarts...), timing.Sooner(remaining, after)
	return r, true
}

// verifyRemaining is for how long a node may yet take to offer its target. Another attempt may find its config selected
// since the former one, also that of a policy that was created again.
func verifyRemaining(v *View, since time.Time) time.Duration {
	since = timing.Latest(since, timing.Latest(ConfigSelectedAt(v), v.Node.GPU.Spec.ChangeTime.Time))
	if v.Policy != nil {
		since = latestOf(v, since, v.Policy.CreationTimestamp.Time)
	}
	return since.Add(timing.VerifyTimeout).Sub(v.Snapshot.Now)
}

// verifyAnew has the time for verifying begin anew, in a patch.
func verifyAnew(v *View, patch action.PatchNode) {
	if _, current := timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationSelected], v.Target.Config); current && v.Target.Config != "" {
		patch.Annotations[v1alpha1.AnnotationSelected] = new(timing.Stamp(v.Target.Config, v.Snapshot.Now))
	}
}

// restartsLate has what offers the GPUs verified after a restart, once for each, that is due later than that: the controller was away, or others blocked it.
func restartsLate(v *View, patch action.PatchNode) {
	if !v.TargetIsLastGood() && verifyRemaining(v, time.Time{}) <= 0 {
		verifyAnew(v, patch)
	}
}

// awaitLimited gives the node, with a slot, the memory limit that the driver is to enforce, and waits until the agent has said what came of it.
// Where a limit does not read back the change has failed. Whatever else keeps the driver from limiting is reported alone.
func awaitLimited(v *View) (Result, bool) {
	const reports = time.Minute // an agent of an earlier version never does
	if memoryOf(v).Limited() != v1alpha1.MemoryLimitEnforce {
		return Result{}, false
	}
	if awaitsLimit(v) {
		return Result{
			State: PendingNonDisruptive, Reason: underwayReason(v), Next: withSlot(v, requestLimit(v)),
			Message: "the driver does not limit the memory of pods yet; the change disturbs nothing that runs",
		}, true
	}
	c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionMemoryLimited)
	remaining := v.Node.GPU.Spec.ChangeTime.Add(reports).Sub(v.Snapshot.Now)
	switch reported := found && c.ObservedGeneration >= v.Node.GPU.Generation; {
	case reported && c.Reason == v1alpha1.ReasonNotEnforced:
		r := Result{State: Failed, Reason: c.Reason, Message: "a memory limit did not read back as it was set: " + c.Message}
		r.Next = atOnce(recordFailure(v, r.Reason, r.Message)...)
		return r, true
	case !reported && remaining > 0:
		return Result{
			State: Verifying, Reason: v1alpha1.ReasonVerifying, After: remaining, Message: "the agent has not reported yet what the driver limits",
		}, true
	}
	return Result{}, false
}

// readsOther adds to a message why NVIDIA's device plugin does not read the operator's ConfigMap; empty if it does, or
// nothing keeps it from that.
func readsOther(v *View) string {
	if v.Snapshot.Plugin.Ready || v.Snapshot.Plugin.Message == "" {
		return ""
	}
	return "; " + v.Snapshot.Plugin.Message
}

// otherMPSRoot adds to a message that NVIDIA's device plugin looks for MPS daemons elsewhere than where they usually are;
// empty if it does not, or none is to serve the node. Where the operator's are only its installation knows.
func otherMPSRoot(v *View) string {
	o := v.Snapshot.Plugin.Operands
	if o == nil || v.Target.Strategy != v1alpha1.StrategyMPS || o.MPSRoot == "" || o.MPSRoot == deviceplugin.MPSRoot {
		return ""
	}
	return fmt.Sprintf("; ClusterPolicy %s has spec.devicePlugin.mps.root %s: the operator's must be the same (chart value mps.root), "+
		"or remove it there", o.Name, o.MPSRoot)
}

// awaitPluginSettled waits until what the node advertises is not the device plugin's default any more, which it
// advertises at each start. Where the default is the same the plugin is started once more all the same, and the kubelet
// refuses pods in that moment. So it does until one is there, while the Node says for up to 10 s more what it offered before: a node that the taint keeps
// from its users waits for that.
func awaitPluginSettled(v *View) (Result, bool) {
	if v.Target.Config == "" || v.Target.Expected == nil {
		return Result{}, false
	}
	serves := false
	for _, p := range v.Node.Pods {
		if !isPluginPod(v, p) || !p.MountsConfig || p.Terminating || p.ReadySince.IsZero() {
			continue
		}
		serves = true
		if remaining := p.ReadySince.Add(timing.PluginSettles).Sub(v.Snapshot.Now); remaining > 0 {
			return Result{
				State: Verifying, Reason: v1alpha1.ReasonVerifying, After: remaining,
				Message: fmt.Sprintf("Waiting for the device plugin: pod %s/%s has just started, with its default config", p.Namespace, p.Name),
			}, true
		}
	}
	applied, _ := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	since := timing.Latest(ConfigSelectedAt(v), timing.Latest(v.Node.GPU.Spec.ChangeTime.Time, applied.LastTransitionTime.Time))
	remaining := since.Add(timing.PluginAway).Sub(v.Snapshot.Now)
	return Result{
		State: Verifying, Reason: v1alpha1.ReasonVerifying, After: remaining, Message: "Waiting for the device plugin: none is Ready on the node",
	}, !serves && v.Taint() != nil && remaining > 0
}

// keepsPluginOff reports whether our taint may keep NVIDIA's device plugin off the node, whose DaemonSet does not
// tolerate it, and how long the taint may yet stand: no longer where nothing is offered that it would keep pods off,
// and for a while where the node offers something though no plugin is there. A kubelet that has lost the plugin's end
// does that for ever.
func keepsPluginOff(v *View) (remaining time.Duration, is bool) {
	if v.Taint() == nil {
		return 0, false
	}
	if AdvertisesNoGPU(v) {
		return 0, true
	}
	if slices.ContainsFunc(v.Node.Pods, func(p cluster.Pod) bool { return p.KeptBy(cluster.DeployLabels()[0]) }) {
		return 0, false
	}
	return ConfigSelectedAt(v).Add(timing.PluginAway).Sub(v.Snapshot.Now), true
}

// advertisedDifferences lists how what the node advertises differs from what it must: every resource of NVIDIA's whole
// GPUs and instances counts, also one that is not expected.
func advertisedDifferences(v *View) []string {
	if v.Target.Expected == nil {
		return nil
	}
	names := maps.Clone(v.Target.Expected)
	maps.Copy(names, v.Node.OfferedGPUs(v.Stack))
	var differences []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if want, has := v.Target.Expected[name], v.Node.Allocatable[name]; want != has {
			differences = append(differences, fmt.Sprintf("%s is %d instead of %d", name, has, want))
		}
	}
	return orNotApplied(v, differences)
}

// orNotApplied adds, where nothing else differs, that the agent has not reached what it is asked for.
func orNotApplied(v *View, differences []string) []string {
	if len(differences) == 0 && !v.OnlyComputeMode() && !condition.IsTrue(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied) {
		return []string{agentMessage(v, "the GPUs are not shared as asked")}
	}
	return differences
}
