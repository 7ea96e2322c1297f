// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// configReset reports whether another controller set the label that selects a configuration after the operator had.
func configReset(v *View) bool {
	_, selected := timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationSelected], v.Target.Config)
	return selected && v.Target.Config != "" && !v.Target.ReleasesNode && v.ReadsConfigs() && v.Node.Labels[v1alpha1.LabelConfig] != v.Target.Config
}

// awaitLabelUncontested leaves a label alone for an hour that another controller sets again and again. A change that is
// not verified yet fails by it, so that the node returns to what it was; one that is makes the node degraded.
func awaitLabelUncontested(v *View) (Result, bool) {
	remaining := overruledFor(v, v1alpha1.LabelConfig)
	if !configReset(v) || remaining <= 0 {
		return Result{}, false
	}
	who := "Another controller or user"
	if v.Node.ConfigWriter != "" {
		who = fmt.Sprintf("Field manager %q", v.Node.ConfigWriter)
	}
	where := "Remove the label where it comes from; on OpenShift, remove the label from the MachineSet"
	if machine := v.Node.Annotations[cluster.AnnotationMachine]; machine != "" {
		where = fmt.Sprintf("OpenShift copies the labels of a MachineSet to its nodes: remove the label from the MachineSet of Machine %s", machine)
	}
	message := fmt.Sprintf("%s sets %s=%s on the node again, and the operator selects %s. %s", who, v1alpha1.LabelConfig,
		v.Node.Labels[v1alpha1.LabelConfig], v.Target.Config, where)
	r := Result{State: Selecting, Reason: v1alpha1.ReasonConfigLabelReset, After: remaining}
	if !v.TargetIsLastGood() {
		r = failChange(v, r, v1alpha1.ReasonConfigLabelReset, message)
		r.After = remaining
		return r, true
	}
	r.State, r.Next = Degraded, atOnce(RestoreScheduling(v, "another controller selects the configuration")...)
	r.Message = fmt.Sprintf("%s. The operator sets the label again at %s", message, format.Clock(v.Snapshot.Now.Add(remaining)))
	return r, true
}

// othersConfigAgain reports whether a node differs from what it was at most by NVIDIA's MPS daemon, which serves the configuration that another
// controller selects again within a day: ended, it would come back with the device plugin.
func othersConfigAgain(v *View) bool {
	return overruledFor(v, v1alpha1.LabelConfig) > -24*time.Hour && len(v.Steps) == 0 && v.TargetIsLastGood() && configReset(v)
}

// leftToOthersConfig reports whether such a node is left as it is.
func leftToOthersConfig(v *View) bool {
	return othersConfigAgain(v) && overruledFor(v, v1alpha1.LabelConfig) > 0
}

// overruledFor is how long another controller is still left alone that sets a label again; long past if none does.
func overruledFor(v *View, label string) time.Duration {
	for part := range strings.SplitSeq(v.Node.Annotations[v1alpha1.AnnotationOverruled], ",") {
		if at, did := timing.Stamped(part, label); did {
			return at.Add(timing.Patience).Sub(v.Snapshot.Now)
		}
	}
	return math.MinInt64
}

// noteOverruled notes in a patch that the operator sets a label again which another controller had set.
func noteOverruled(v *View, patch action.PatchNode, label string) {
	noted := v.Node.Annotations[v1alpha1.AnnotationOverruled]
	if in, has := patch.Annotations[v1alpha1.AnnotationOverruled]; has && in != nil {
		noted = *in
	}
	parts := []string{timing.Stamp(label, v.Snapshot.Now)}
	for part := range strings.SplitSeq(noted, ",") {
		if part != "" && !strings.HasPrefix(part, label+"@") {
			parts = append(parts, part)
		}
	}
	slices.Sort(parts)
	patch.Annotations[v1alpha1.AnnotationOverruled] = new(strings.Join(parts, ","))
}

// awaitSelected makes the config of the target visible in the pods that read it, then selects it and starts NVIDIA's
// operands again in one patch. A label that names a config before it is visible makes NVIDIA's config-manager exit.
func awaitSelected(v *View) (Result, bool) {
	selected, start, complete := selectPatch(v)
	if complete {
		return Result{}, false
	}
	r := Result{State: Selecting, Reason: v1alpha1.ReasonSelecting}
	if _, changes := selected.Labels[v1alpha1.LabelConfig]; changes && v.Target.Config != "" && v.ReadsConfigs() {
		if message, wait := hidden(v); wait {
			r.Message = message
			return r, true
		}
		if remaining := pluginUnseen(v); remaining > 0 {
			r.Message = "Waiting for the device plugin: the controller does not see the plugin's pod yet, which may not see the configuration"
			r.After = remaining
			return r, true
		}
		if syncs, remaining, unseen := triggerSyncs(v); len(unseen) > 0 {
			r.Message = fmt.Sprintf("making the configuration %s visible to NVIDIA's device plugin; waiting for %s", v.Target.Config, format.List(unseen))
			r.Next, r.After = atOnce(syncs...), remaining
			return r, true
		}
		if message, remaining := beforeSelecting(v); remaining > 0 {
			r.Message, r.After = message, remaining
			return r, true
		}
	}
	r.Message = fmt.Sprintf("selecting the configuration %s", v.Target.Config)
	switch {
	case !v.ReadsConfigs():
		r.Message = "recording what NVIDIA's DRA driver must publish"
	case v.Target.Config == "":
		r.Message = "taking back the label " + v1alpha1.LabelConfig
	case start && len(selected.Labels) > 0 && v.Node.Labels[v1alpha1.LabelConfig] == v.Target.Config:
		r.Message = "starting NVIDIA's operands again"
	}
	selected.Why = r.Message
	r.Next = atOnce(selected)
	return r, true
}

// beforeSelecting is what is waited for, and how long: the report of NVIDIA's MPS daemon, of which GFD would say false, and end it; and, before a change for pods
// that wait, the kubelet that admits a pod.
func beforeSelecting(v *View) (message string, remaining time.Duration) {
	if message, remaining = nvidiaMPSUnreported(v); remaining > 0 || !v.ForDemand {
		return message, remaining
	}
	pod, remaining := beingAdmitted(v)
	return fmt.Sprintf("pod %s was placed on the node just now; waiting until its kubelet has admitted it", pod), remaining
}

// beingAdmitted is a pod that was bound to the node just now, and how long its kubelet may yet take to admit it. It asks the device plugin, and refuses the pod
// while that looks again. Others may come meanwhile, so that time ends in any case.
func beingAdmitted(v *View) (pod string, remaining time.Duration) {
	since := v.Node.GPU.Spec.ChangeTime.Time
	if t := v.Taint(); t != nil && t.TimeAdded != nil {
		since = timing.Latest(since, t.TimeAdded.Time)
	}
	for i := range v.Node.Pods {
		if p := &v.Node.Pods[i]; !p.Running && unreported(v, p) {
			pod, remaining = p.Namespace+"/"+p.Name, max(remaining, timing.ReportAfter-sinceCame(v, p))
		}
	}
	return pod, min(remaining, since.Add(2*timing.ReportAfter).Sub(v.Snapshot.Now))
}

// selectPatch is the one patch that brings the labels of the node to the target; complete if nothing is to be done.
func selectPatch(v *View) (patch action.PatchNode, starts, complete bool) {
	patch, starts = startPatch(v)
	labels := maps.Clone(v.Target.Labels)
	if labels == nil {
		labels = map[string]*string{}
	}
	if _, has := v.Node.Labels[v1alpha1.LabelMIGManager]; !has {
		delete(labels, v1alpha1.LabelMIGManager) // the operator never removes it: it is another machine, or another controller's work
	}
	selectConfig(v, labels)
	if disablesMIGManagerAgain(v, patch) {
		labels[v1alpha1.LabelMIGManager] = new("false")
	}
	if configReset(v) {
		if overruledFor(v, v1alpha1.LabelConfig) > 0 {
			delete(labels, v1alpha1.LabelConfig)
		} else {
			noteOverruled(v, patch, v1alpha1.LabelConfig)
		}
	}
	restoreManagerLabels(v, labels)
	overwriteMIGLabels(v, labels)
	restoreMIGLabels(v, labels)
	startManagersOperands(v, labels)
	for name, want := range labels {
		value, has := v.Node.Labels[name]
		if has != (want != nil) || has && value != *want {
			patch.Labels[name] = want
		}
	}
	stampSelected(v, patch)
	if _, isTimedOut := v.Node.Annotations[v1alpha1.AnnotationTimedOut]; isTimedOut {
		patch.Annotations[v1alpha1.AnnotationTimedOut] = nil
	}
	v.stampSeen(v, patch)
	if rests := len(patch.Labels)+len(patch.Annotations) == 0; !rests || !lacksOnlyNumbering(v, baselineCopy(v)) {
		saveSelectedCopy(v, patch)
	}
	return patch, starts, len(patch.Labels) == 0 && len(patch.Annotations) == 0
}

// saveSelectedCopy is saveBaselineCopy, unless the node is released, or is kept from its users on behalf of another policy.
func saveSelectedCopy(v *View, patch action.PatchNode) {
	if !v.Target.ReleasesNode && !v.UnavailableForOther() {
		saveBaselineCopy(v, patch)
	}
}

// selectConfig adds to the labels the one that selects the configuration of the target. Where NVIDIA's DRA driver
// serves the node nothing reads one.
func selectConfig(v *View, labels map[string]*string) {
	labels[v1alpha1.LabelConfig] = nil
	switch {
	case !v.ReadsConfigs():
		restoreConfigLabel(v, labels)
	case v.Target.Config != "":
		labels[v1alpha1.LabelConfig] = new(v.Target.Config)
	}
}

// stampSelected notes when the config was selected, as far as anybody needs to know: until the node has advertised it.
func stampSelected(v *View, patch action.PatchNode) {
	stampManagerRequest(v, patch)
	at, has := v.Node.Annotations[v1alpha1.AnnotationSelected]
	_, current := timing.Stamped(at, v.Target.Config)
	_, selects := patch.Labels[v1alpha1.LabelConfig]
	_, starts := patch.Annotations[v1alpha1.AnnotationStopped]
	switch {
	case v.Target.Config == "" || v.Target.ReleasesNode:
		if has {
			patch.Annotations[v1alpha1.AnnotationSelected] = nil
		}
		if _, has := v.Node.Annotations[v1alpha1.AnnotationOverruled]; has {
			patch.Annotations[v1alpha1.AnnotationOverruled] = nil
		}
	case selects || starts || !current && !v.TargetIsLastGood():
		patch.Annotations[v1alpha1.AnnotationSelected] = new(timing.Stamp(v.Target.Config, v.Snapshot.Now))
	}
}

// hidden says why the config cannot be made visible yet.
func hidden(v *View) (message string, is bool) {
	if v.Target.ReleasesNode {
		return "", false // not ours to write or to configure: it is what was there before
	}
	if _, written := v.Snapshot.Configs[v.Target.Config]; !written {
		if v.Target.IsBaseline {
			return "", false // likewise
		}
		return fmt.Sprintf("writing the configuration %s into the ConfigMap", v.Target.Config), true
	}
	if !v.Snapshot.Plugin.Ready {
		return "NVIDIA's device plugin is being configured to use the operator's ConfigMap", true
	}
	if old := pluginsReadingOthers(v); len(old) > 0 {
		return "waiting until these pods have restarted with the operator's ConfigMap: " + format.List(old), true
	}
	return "", false
}

// pluginUnseen is how long to wait yet for the pod of NVIDIA's device plugin on a node that may have one. The cache may
// show a Node earlier than the pods on it, and a pod that has just started need not see the config that the Node is to
// select. It advertises nothing yet then, so what the Node advertises does not tell whether there is one.
func pluginUnseen(v *View) time.Duration {
	runs := func(p cluster.Pod) bool { return isPluginPod(v, p) && !p.Terminating }
	off := v.Snapshot.Plugin.ClusterPolicy && v.Node.Labels[cluster.DeployLabels()[0]] != cluster.LabelTrue
	if off || slices.ContainsFunc(v.Node.Pods, runs) {
		return 0
	}
	return max(v.Node.GPU.Spec.ChangeTime.Add(timing.PluginAway).Sub(v.Snapshot.Now), 0)
}

// syncAhead triggers syncs while the agent is at work, so that the config is visible when it is done.
func syncAhead(v *View) []action.Action {
	if _, wait := hidden(v); wait || !v.ReadsConfigs() || v.Target.Config == "" || v.Node.Labels[v1alpha1.LabelConfig] == v.Target.Config {
		return nil
	}
	syncs, _, _ := triggerSyncs(v)
	return syncs
}

// triggerSyncs makes the kubelet project the ConfigMap into the pods that mount it and do not see the config yet, again
// and again: one that comes before the kubelet knows of the config is lost. left is when to look again.
func triggerSyncs(v *View) (syncs []action.Action, remaining time.Duration, unseen []string) {
	for _, p := range v.Node.Pods {
		if !p.MountsConfig || p.Terminating {
			continue
		}
		at, synced := timing.Stamped(p.SyncTriggered, v.Target.Config)
		age := v.Snapshot.Now.Sub(at)
		sees, watched := seesConfig(v, p)
		if sees || !watched && synced && age >= timing.VisibleAfter {
			continue
		}
		unseen = append(unseen, p.Namespace+"/"+p.Name)
		if !synced || age >= timing.VisibleAfter {
			syncs = append(syncs, action.TriggerSync{
				Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Value: timing.Stamp(v.Target.Config, v.Snapshot.Now),
			})
			age = 0
		}
		remaining = max(remaining, timing.VisibleAfter-age)
	}
	slices.Sort(unseen)
	return syncs, remaining, unseen
}

// seesConfig reports whether a pod has the config before it as the agent reports it, or its twin, beside which it was written; and watched whether the
// agent will: it saw the pod's config-manager with another config, and has not been silent for too long.
func seesConfig(v *View, p cluster.Pod) (sees, watched bool) {
	config, since := v.Node.GPU.Status.Config, v.Node.GPU.Spec.ChangeTime
	listed := slices.Contains(config.PodUIDs, p.UID)
	twin := v.ForDemand && config.Name == v.Desired.Config.Twin && v.Target.Config == v.Desired.Config.Key
	if listed && twin || config.Name == v.Target.Config && config.ChangeTime.Equal(&since) {
		return listed, false
	}
	return false, listed && v.Snapshot.Now.Sub(since.Time) < timing.AgentSilent
}
