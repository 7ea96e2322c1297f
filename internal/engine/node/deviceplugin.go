// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The pods of NVIDIA's device plugin on a node: which config they read, which MIG instances they have seen, why they do
// not run, and when they are started anew.
//
//	instances changed → awaitPluginEnumerated → deleted → seen
//	not advertised → recordPluginRestart

// devicePlugin is that plugin as offering.
type devicePlugin struct{}

func (devicePlugin) ReadsConfigs() bool        { return true }
func (devicePlugin) ByClaims() bool            { return false }
func (devicePlugin) lacks(*View) *plan.Problem { return nil }
func (devicePlugin) findings() []findingFunc   { return []findingFunc{pluginFailing, pluginOutdated} }

func (devicePlugin) gates() []gateFunc {
	return []gateFunc{awaitLabelUncontested, awaitSelected, awaitPluginEnumerated, awaitAdvertised, awaitPluginSettled}
}

func (devicePlugin) taint(v *View) []action.Action {
	return []action.Action{action.Taint{
		Node: v.Node.Name, Policy: v.Ref(), Baseline: baselineCopy(v),
		Taint: corev1.Taint{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule, TimeAdded: new(metav1.NewTime(v.Snapshot.Now))},
	}}
}

// configManagerContainer begins the names of the containers that follow the label of the node.
const configManagerContainer = "config-manager"

// pluginStarts is how long the DaemonSet of the device plugin may take to bring a pod to the node.
const pluginStarts = time.Minute

// pluginFailing finds pods of NVIDIA's that serve the configuration and do not run as they should.
func pluginFailing(v *View, s State) Finding {
	if !slices.Contains([]State{Selecting, Verifying, Degraded, UpToDate, Failed}, s) {
		return Finding{} // nobody waits for them
	}
	f := Finding{Message: pluginTroubles(v)}
	for _, p := range v.Node.Pods {
		for _, t := range p.Troubles {
			remaining, is := t.Counts(v.Snapshot.Now)
			if !is {
				continue
			}
			f.Reason, f.After = v1alpha1.ReasonDevicePluginFailing, timing.Sooner(f.After, remaining)
			if strings.HasPrefix(t.Container, configManagerContainer) {
				f.Reason = v1alpha1.ReasonConfigManagerFailing
			}
		}
	}
	switch {
	case f.Reason == v1alpha1.ReasonConfigManagerFailing:
		var after time.Duration
		f.Repair, after = restartPlugin(v, "its config-manager keeps ending", func(p cluster.Pod) bool { return configManagerFails(v, p) })
		f.After = timing.Sooner(f.After, after)
	case f.Message != "" && f.Reason == "" && (s == Verifying || s == Degraded):
		f.Reason = v1alpha1.ReasonDevicePluginFailing
		if remaining := ConfigSelectedAt(v).Add(pluginStarts).Sub(v.Snapshot.Now); remaining > 0 {
			return Finding{After: remaining} // it may be on its way
		}
	case f.Reason == "":
		f.Message = ""
	}
	return f
}

// configManagerFails reports whether the config-manager of a pod keeps ending though the key that the node selects is
// there.
func configManagerFails(v *View, p cluster.Pod) bool {
	_, written := v.Snapshot.Configs[v.Node.Labels[v1alpha1.LabelConfig]]
	return written && p.MountsConfig && slices.ContainsFunc(p.Troubles, func(t cluster.Trouble) bool {
		_, is := t.Counts(v.Snapshot.Now)
		return is && strings.HasPrefix(t.Container, configManagerContainer)
	})
}

// pluginTroubles is what the pods say that serve the configuration of the node; empty if all is well with them.
func pluginTroubles(v *View) string {
	var says []string
	running := false
	for _, p := range v.Node.Pods {
		running = running || isPluginPod(v, p) && !p.Terminating
		for _, t := range p.Troubles {
			if _, is := t.Counts(v.Snapshot.Now); is {
				says = append(says, describeTrouble(v, p, t))
			}
		}
	}
	if !running {
		says = append(says, noPluginPod(v))
	}
	slices.Sort(says)
	return strings.Join(says, "; ")
}

func describeTrouble(v *View, p cluster.Pod, t cluster.Trouble) string {
	says := fmt.Sprintf("container %s of pod %s/%s %s", t.Container, p.Namespace, p.Name, t.Why)
	if !strings.HasPrefix(t.Container, configManagerContainer) {
		return fmt.Sprintf("%s; look at `kubectl logs -n %s %s -c %s --previous`", says, p.Namespace, p.Name, t.Container)
	}
	key := v.Node.Labels[v1alpha1.LabelConfig]
	if _, written := v.Snapshot.Configs[key]; written || key == "" {
		return says + ", though the key that the node selects is there; the pod is started anew if that goes on"
	}
	return fmt.Sprintf("%s: the node selects the key %s (%s), which the ConfigMap that the pod mounts does not hold",
		says, key, v1alpha1.LabelConfig)
}

// noPluginPod says why no pod of the device plugin is on the node.
func noPluginPod(v *View) string {
	label := cluster.DeployLabels()[0]
	if value := v.Node.Labels[label]; value != "true" && v.Snapshot.Plugin.ClusterPolicy {
		return fmt.Sprintf("no pod of NVIDIA's device plugin is on the node, since its label %s is %q; set it to true if nobody "+
			"is at work there", label, value)
	}
	return "no pod of NVIDIA's device plugin is on the node; look at its DaemonSet, and whether its pods tolerate the " +
		"node's taints"
}

// pluginsReadingOthers are the pods of NVIDIA's device plugin and GPU Feature Discovery that were started before the
// ClusterPolicy named our ConfigMap, and read another one or none.
func pluginsReadingOthers(v *View) []string {
	var names []string
	for _, p := range v.Node.Pods {
		if readsOthersConfig(p) {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	slices.Sort(names)
	return names
}

// readsOthersConfig reports whether a pod of NVIDIA's device plugin or GPU Feature Discovery reads another ConfigMap
// than the operator's.
func readsOthersConfig(p cluster.Pod) bool {
	reads := p.KeptBy(cluster.DeployLabels()[0]) || p.KeptBy(cluster.DeployLabels()[1])
	return reads && !p.MountsConfig
}

// restartPlugin deletes pods of NVIDIA's DaemonSets on the node, so that they start anew. One that has been started
// lately is left alone: then that does not help.
func restartPlugin(v *View, why string, which func(cluster.Pod) bool) (actions []action.Action, after time.Duration) {
	if !v.Snapshot.Plugin.ClusterPolicy {
		return nil, 0
	}
	for _, p := range v.Node.Pods {
		if p.Terminating || p.Scheduled.IsZero() || p.Controller != "DaemonSet" || !which(p) {
			continue // one that has just been made is about to start
		}
		if remaining := p.Scheduled.Add(timing.PluginRestart).Sub(v.Snapshot.Now); remaining > 0 {
			after = timing.Sooner(after, remaining)
			continue
		}
		actions = append(actions, deletePod(v, p, why))
	}
	return actions, after
}

// Why the device plugin is started anew, with MIG instances and without, and what is said of it.
const (
	unseenInstances = "it has not seen the MIG instances that are there"
	pluginRereads   = "it does not advertise what the configuration that the node selects promises"
	startsAnew      = "starting NVIDIA's device plugin anew, since it does not advertise what it must"
)

// awaitPluginEnumerated has the device plugin look again where the MIG instances are not those that it has seen: it is
// started anew. Nothing signals it under the same key, and another would be advertised meanwhile. Pods that run keep
// what they hold.
func awaitPluginEnumerated(v *View) (Result, bool) {
	seen, leaving, known := enumeratedInstances(v)
	r := Result{
		State: Selecting, Reason: v1alpha1.ReasonSelecting,
		Message: "starting NVIDIA's device plugin anew, since the MIG instances are not those that it has seen",
	}
	if now := hashOfInstances(v); known && seen != now {
		plugins := pluginPodUIDs(v)
		if len(plugins) == 0 { // it may have come, and looked, without our knowing yet
			return Result{}, false
		}
		patch := v.Patch(r.Message)
		patch.Annotations[v1alpha1.AnnotationInstances] = new(withoutPods(now, append(plugins, monitorPods(v)...)))
		r.Next = atOnce(patch)
		return r, true
	}
	why := unseenInstances
	if hashOfInstances(v) == "" {
		why, r.Message = pluginRereads, startsAnew
	}
	waits, plugin := false, false
	var deletions []action.Action
	for _, p := range v.Node.Pods {
		if !slices.Contains(leaving, p.UID) {
			continue
		}
		waits, plugin = true, plugin || isPluginPod(v, p)
		if !p.Terminating {
			deletions = append(deletions, deletePod(v, p, why))
		}
	}
	if !plugin {
		r.Message = "restarting NVIDIA's DCGM, which does not notice new MIG instances"
	}
	r.Next = atOnce(deletions...)
	return r, waits
}

// stampSeen notes in a patch that makes the device plugin look which instances it will see.
func (devicePlugin) stampSeen(v *View, patch action.PatchNode) {
	seen, _, known := enumeratedInstances(v)
	_, selects := patch.Labels[v1alpha1.LabelConfig]
	_, starts := patch.Annotations[v1alpha1.AnnotationStopped]
	if restarted, has := v.Node.Annotations[v1alpha1.AnnotationRestarted]; has && (v.Target.ReleasesNode || restarted != restartOccasion(v)) {
		patch.Annotations[v1alpha1.AnnotationRestarted] = nil
	}
	looks := selects || starts || !known
	switch _, has := v.Node.Annotations[v1alpha1.AnnotationInstances]; {
	case v.Target.ReleasesNode:
		if has && (looks || pluginLooked(v)) {
			patch.Annotations[v1alpha1.AnnotationInstances] = nil
		}
	case looks && seen != hashOfInstances(v):
		patch.Annotations[v1alpha1.AnnotationInstances] = new(pluginWillSee(v, known, selects))
	}
}

// pluginWillSee notes the instances that will be seen, and the pods that go before: DCGM's, but on a node that is taken
// over as it is, and a device plugin that has seen others (it may not have ended).
func pluginWillSee(v *View, known, selects bool) string {
	now := hashOfInstances(v)
	switch {
	case known && !selects:
		return withoutPods(now, append(pluginPodUIDs(v), monitorPods(v)...))
	case now == "" || !known && v.Node.GPU.Status.Rollout.LastGood == nil:
		return withoutPods(now, nil)
	}
	return withoutPods(now, monitorPods(v))
}

// pluginLooked reports whether no plugin is there that has seen others.
func pluginLooked(v *View) bool {
	seen, leaving, _ := enumeratedInstances(v)
	leaves := func(p cluster.Pod) bool { return slices.Contains(leaving, p.UID) }
	return len(pluginPodUIDs(v)) == 0 || seen == hashOfInstances(v) && !slices.ContainsFunc(v.Node.Pods, leaves)
}

// noteSeen notes what a device plugin that nothing stops has seen.
func noteSeen(v *View, patch action.PatchNode) {
	_, _, known := enumeratedInstances(v)
	if !known && v.ReadsConfigs() && !v.Snapshot.Plugin.ClusterPolicy && slices.ContainsFunc(v.Steps, plan.ChangesMIG) {
		patch.Annotations[v1alpha1.AnnotationInstances] = new(withoutPods(hashOfInstances(v), nil))
	}
}

// recordPluginRestart has the device plugin started anew where it does not advertise what it must: it has not seen the
// MIG instances, or it started while the config had another content. It does so once for the config and the instances
// of a boot, and never where the plugin reports devices as unhealthy: a plugin that starts anew offers those again. The
// patch has awaitPluginEnumerated delete the pods.
func recordPluginRestart(v *View) (actions []action.Action, after time.Duration) {
	applied := condition.IsTrue(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	if v.Node.Annotations[v1alpha1.AnnotationRestarted] == restartOccasion(v) || len(v.Node.Unhealthy(v.Target.Expected)) > 0 || !applied || !restartReadsConfig(v) {
		return nil, 0
	}
	restarts, after := restartPlugin(v, pluginRereads, func(p cluster.Pod) bool { return isPluginPod(v, p) })
	if len(restarts) == 0 {
		return nil, after
	}
	patch := v.Patch(startsAnew)
	patch.Annotations[v1alpha1.AnnotationRestarted] = new(restartOccasion(v))
	patch.Annotations[v1alpha1.AnnotationInstances] = new(withoutPods(hashOfInstances(v), pluginPodUIDs(v)))
	restartsLate(v, patch)
	return []action.Action{patch}, 0
}

// restartOccasion names that for which it is started anew at most once.
func restartOccasion(v *View) string {
	return hashOfInstances(v) + "/" + v.Node.GPU.Status.BootID + "/" + v.Target.Config
}

// restartReadsConfig reports whether a device plugin that starts anew reads the config of the target: the ConfigMap has
// it, the node selects it, and the plugin is configured to read the ConfigMap.
func restartReadsConfig(v *View) bool {
	data, written := v.Snapshot.Configs[v.Target.Config]
	return written && data == v.Target.Data && v.Node.Labels[v1alpha1.LabelConfig] == v.Target.Config && v.Snapshot.Plugin.Ready
}

// unhealthyDevices adds to a message how many devices NVIDIA's device plugin reports as unhealthy; empty if it reports
// none.
func unhealthyDevices(v *View) string {
	all := v.Node.Unhealthy(v.Target.Expected)
	var sick []string
	reports := "reports devices as unhealthy"
	for _, name := range slices.Sorted(maps.Keys(all)) {
		sick = append(sick, fmt.Sprintf("%d of %s", all[name], name))
		if v.Node.Allocatable[name] == 0 {
			reports = "has stopped, or reports devices as unhealthy"
		}
	}
	if len(sick) == 0 {
		return ""
	}
	return fmt.Sprintf("; NVIDIA's device plugin %s (%s): look at the GPU (nvidia-smi, XID errors in the kernel's log), then restart the "+
		"plugin's pod", reports, format.List(sick))
}
