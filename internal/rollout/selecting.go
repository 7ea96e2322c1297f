// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
)

// selecting makes the key of the target visible in the pods that read it, then selects it and resumes NVIDIA's clients in
// one patch. A label that names a key before it is visible makes NVIDIA's config-manager exit.
func (v *view) selecting() (judgement, bool) {
	selected, resume, complete := v.selectPatch()
	if complete {
		return judgement{}, false
	}
	j := judgement{State: StateSelecting, reason: v1alpha1.ReasonSelecting}
	if _, changes := selected.Labels[v1alpha1.LabelConfig]; changes && v.to.key != "" {
		if message, wait := v.hidden(); wait {
			j.message = message
			return j, true
		}
		if left := v.pluginUnseen(); left > 0 {
			j.message = "Waiting for the device plugin: the node advertises GPUs, and the controller does not see the plugin's pod yet"
			j.after = left
			return j, true
		}
		if nudges, left, unseen := v.nudge(); len(unseen) > 0 {
			j.message = fmt.Sprintf("making the configuration %s visible to NVIDIA's device plugin; waiting for %s", v.to.key, list(unseen))
			j.actions, j.after = nudges, left
			return j, true
		}
	}
	j.message = fmt.Sprintf("selecting the configuration %s", v.to.key)
	switch {
	case v.to.key == "":
		j.message = "taking back the label " + v1alpha1.LabelConfig
	case resume && len(selected.Labels) > 0 && v.node.Labels[v1alpha1.LabelConfig] == v.to.key:
		j.message = "resuming NVIDIA's GPU clients"
	}
	selected.Why = j.message
	j.actions = []Action{selected}
	return j, true
}

// selectPatch is the one patch that brings the labels of the node to the target; complete if nothing is to be done.
func (v *view) selectPatch() (patch PatchNode, resumes, complete bool) {
	patch, resumes = v.resume()
	labels := maps.Clone(v.to.labels)
	if labels == nil {
		labels = map[string]*string{}
	}
	if _, has := v.node.Labels[v1alpha1.LabelMIGManager]; !has {
		delete(labels, v1alpha1.LabelMIGManager) // the operator never removes it: it is another machine, or another controller's work
	}
	labels[v1alpha1.LabelConfig] = nil
	if v.to.key != "" {
		labels[v1alpha1.LabelConfig] = new(v.to.key)
	}
	if v.fencesAgain(patch) {
		labels[v1alpha1.LabelMIGManager] = new("false")
	}
	if v.configReset() {
		if v.overruledLeft(v1alpha1.LabelConfig) > 0 {
			delete(labels, v1alpha1.LabelConfig)
		} else {
			v.overrule(patch, v1alpha1.LabelConfig)
		}
	}
	v.releaseLabels(labels)
	v.claimMIG(labels)
	v.unclaimMIG(labels)
	v.unpause(labels)
	for name, want := range labels {
		value, has := v.node.Labels[name]
		if has != (want != nil) || has && value != *want {
			patch.Labels[name] = want
		}
	}
	v.stampSelected(patch)
	v.stampInstances(patch)
	switch {
	case v.to.final:
		v.dropCopy(patch)
	case !v.heldByOther():
		v.saveBaseline(patch)
	}
	return patch, resumes, len(patch.Labels) == 0 && len(patch.Annotations) == 0
}

// stampSelected notes when the key was selected, as far as anybody needs to know: until the node has advertised it.
func (v *view) stampSelected(patch PatchNode) {
	if _, asked := v.node.Annotations[v1alpha1.AnnotationMIGConfig]; asked {
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = nil
	}
	at, has := v.node.Annotations[v1alpha1.AnnotationSelected]
	_, current := stamped(at, v.to.key)
	_, selects := patch.Labels[v1alpha1.LabelConfig]
	_, resumes := patch.Annotations[v1alpha1.AnnotationPaused]
	switch {
	case v.to.key == "" || v.to.final:
		if has {
			patch.Annotations[v1alpha1.AnnotationSelected] = nil
		}
		if _, has := v.node.Annotations[v1alpha1.AnnotationOverruled]; has {
			patch.Annotations[v1alpha1.AnnotationOverruled] = nil
		}
	case selects || resumes || !current && !v.reached():
		patch.Annotations[v1alpha1.AnnotationSelected] = new(stamp(v.to.key, v.world.Now))
	}
}

func (v *view) selectedAt() time.Time {
	at, _ := stamped(v.node.Annotations[v1alpha1.AnnotationSelected], v.to.key)
	return at
}

// hidden says why the key cannot be made visible yet.
func (v *view) hidden() (message string, is bool) {
	if v.to.final {
		return "", false // not ours to write or to wire: it is what was there before
	}
	if _, written := v.world.Keys[v.to.key]; !written {
		if v.fallsBack {
			return "", false // likewise
		}
		return fmt.Sprintf("writing the configuration %s into the ConfigMap", v.to.key), true
	}
	if !v.world.Wiring.Ready {
		return "NVIDIA's device plugin is being pointed at the operator's ConfigMap", true
	}
	if old := v.readingOthers(); len(old) > 0 {
		return "waiting until these pods have restarted with the operator's ConfigMap: " + list(old), true
	}
	return "", false
}

// pluginUnseen is how long to wait yet for the pod of NVIDIA's device plugin on a node that advertises GPUs. The cache may show a
// Node earlier than the pods on it, and a pod that has just started need not see the config that the Node is to select.
func (v *view) pluginUnseen() time.Duration {
	runs := func(p Pod) bool { return v.isPlugin(p) && !p.Terminating }
	off := v.world.Wiring.ClusterPolicy && v.node.Labels[deployLabels()[0]] != labelTrue
	if off || v.advertisesNoGPU() || slices.ContainsFunc(v.node.Pods, runs) {
		return 0
	}
	return max(v.node.GPU.Spec.ChangeTime.Add(pluginAway).Sub(v.world.Now), 0)
}

// readingOthers are the pods of NVIDIA's device plugin and GPU Feature Discovery that were started before the
// ClusterPolicy named our ConfigMap, and read another one or none.
func (v *view) readingOthers() []string {
	var names []string
	for _, p := range v.node.Pods {
		if readsOthers(p) {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	slices.Sort(names)
	return names
}

func readsOthers(p Pod) bool {
	reads := p.NodeSelector[deployLabels()[0]] != "" || p.NodeSelector[deployLabels()[1]] != ""
	return reads && !p.MountsConfig
}

// nudge makes the kubelet project the ConfigMap into the pods that mount it and do not see the key yet, again and again:
// one that comes before the kubelet knows of the key is lost. left is when to look again.
func (v *view) nudge() (nudges []Action, left time.Duration, unseen []string) {
	for _, p := range v.node.Pods {
		if !p.MountsConfig || p.Terminating {
			continue
		}
		at, nudged := stamped(p.Nudge, v.to.key)
		age := v.world.Now.Sub(at)
		sees, watched := v.sees(p)
		if sees || !watched && nudged && age >= visibleAfter {
			continue
		}
		unseen = append(unseen, p.Namespace+"/"+p.Name)
		if !nudged || age >= visibleAfter {
			nudges = append(nudges, Nudge{
				Node: v.node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Value: stamp(v.to.key, v.world.Now),
			})
			age = 0
		}
		left = max(left, visibleAfter-age)
	}
	slices.Sort(unseen)
	return nudges, left, unseen
}

// nudgeAhead nudges while the agent is at work, so that the key is visible when it is done.
func (v *view) nudgeAhead() []Action {
	if _, wait := v.hidden(); wait || v.to.key == "" || v.node.Labels[v1alpha1.LabelConfig] == v.to.key {
		return nil
	}
	nudges, _, _ := v.nudge()
	return nudges
}

// sees says whether a pod has the key before it as the agent reports it, and watched whether the agent will: it saw the
// pod's config-manager with another key, and has not been silent for too long.
func (v *view) sees(p Pod) (sees, watched bool) {
	config, since := v.node.GPU.Status.Config, v.node.GPU.Spec.ChangeTime
	listed := slices.Contains(config.PodUIDs, p.UID)
	if config.Name == v.to.key && config.ChangeTime.Equal(&since) {
		return listed, false
	}
	return false, listed && v.world.Now.Sub(since.Time) < agentSilent
}

// differs says how what the node advertises differs from what it must: every resource of NVIDIA's whole GPUs and
// instances counts, also one that is not expected.
func (v *view) differs() []string {
	if v.to.expected == nil {
		return nil
	}
	names := map[string]bool{}
	for name := range v.to.expected {
		names[name] = true
	}
	for name, count := range v.node.Allocatable {
		if count != 0 && ofGPU(name) {
			names[name] = true
		}
	}
	var differs []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if want, has := v.to.expected[name], v.node.Allocatable[name]; want != has {
			differs = append(differs, fmt.Sprintf("%s is %d instead of %d", name, has, want))
		}
	}
	if len(differs) == 0 && !v.onlyComputeMode() && !condition.IsTrue(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplied) {
		differs = append(differs, v.agentSays("the GPUs are not shared as asked"))
	}
	return differs
}

// ofGPU says whether a resource is one that NVIDIA's device plugin makes of GPUs.
func ofGPU(name string) bool {
	return strings.HasPrefix(name, "nvidia.com/gpu") || strings.HasPrefix(name, "nvidia.com/mig-")
}
