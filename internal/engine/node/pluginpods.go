// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// The pods of NVIDIA's device plugin on a node: which config they read, which MIG instances they have seen, why they do not run, and when
// they are started anew.
//
//	instances changed → pluginEnumerating → deleted → seen
//	not advertised → restartPluginOnce

// configManagerContainer begins the names of the containers that follow the label of the node.
const configManagerContainer = "config-manager"

// pluginStarts is how long the DaemonSet of the device plugin may take to bring a pod to the node.
const pluginStarts = time.Minute

// pluginFailing finds pods of NVIDIA's that serve the configuration and do not run as they should.
func pluginFailing(v *View, s State) finding {
	if v.ByDriver() {
		return finding{} // NVIDIA's DRA driver serves the node
	}
	if !slices.Contains([]State{Selecting, Verifying, Degraded, UpToDate, Failed}, s) {
		return finding{} // nobody waits for them
	}
	f := finding{Message: pluginTroubles(v)}
	for _, p := range v.Node.Pods {
		for _, t := range p.Troubles {
			left, is := t.Counts(v.Snapshot.Now)
			if !is {
				continue
			}
			f.Reason, f.After = v1alpha1.ReasonDevicePluginFailing, timing.Sooner(f.After, left)
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
		if left := ConfigSelectedAt(v).Add(pluginStarts).Sub(v.Snapshot.Now); left > 0 {
			return finding{After: left} // it may be on its way
		}
	case f.Reason == "":
		f.Message = ""
	}
	return f
}

// configManagerFails says whether the config-manager of a pod keeps ending though the key that the node selects is there.
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

// readsOthersConfig reports whether a pod of NVIDIA's device plugin or GPU Feature Discovery reads another ConfigMap than the operator's.
func readsOthersConfig(p cluster.Pod) bool {
	reads := p.KeptBy(cluster.DeployLabels()[0]) || p.KeptBy(cluster.DeployLabels()[1])
	return reads && !p.MountsConfig
}

// restartPlugin deletes pods of NVIDIA's DaemonSets on the node, so that they start anew. One that has been started lately is
// left alone: then that does not help.
func restartPlugin(v *View, why string, which func(cluster.Pod) bool) (actions []action.Action, after time.Duration) {
	if !v.Snapshot.Plugin.ClusterPolicy {
		return nil, 0
	}
	for _, p := range v.Node.Pods {
		if p.Terminating || p.Scheduled.IsZero() || p.Controller != "DaemonSet" || !which(p) {
			continue // one that has just been made is about to start
		}
		if left := p.Scheduled.Add(timing.PluginRestart).Sub(v.Snapshot.Now); left > 0 {
			after = timing.Sooner(after, left)
			continue
		}
		actions = append(actions, deletePod(v, p, why))
	}
	return actions, after
}
