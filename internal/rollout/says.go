// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// configManager begins the names of the containers that follow the label of the node (contract §2.1).
const configManager = "config-manager"

// pluginStarts is how long the daemon set of the device plugin may take to bring a pod to the node.
const pluginStarts = time.Minute

// pluginFailing finds pods of NVIDIA's that serve the configuration and do not run as they should.
func (v *view) pluginFailing(s State) finding {
	if !slices.Contains([]State{StateSelecting, StateVerifying, StateDegraded, StateUpToDate, StateFailed}, s) {
		return finding{} // nobody waits for them
	}
	f := finding{message: v.pluginSays()}
	for _, p := range v.node.Pods {
		for _, t := range p.Troubles {
			left, is := t.is(v.world.Now)
			if !is {
				continue
			}
			f.reason, f.after = v1alpha1.ReasonDevicePluginFailing, Sooner(f.after, left)
			if strings.HasPrefix(t.Container, configManager) {
				f.reason = v1alpha1.ReasonConfigManagerFailing
			}
		}
	}
	switch {
	case f.reason == v1alpha1.ReasonConfigManagerFailing:
		var after time.Duration
		f.repair, after = v.restart("its config-manager keeps ending", func(p Pod) bool { return v.configManagerFails(p) })
		f.after = Sooner(f.after, after)
	case f.message != "" && f.reason == "" && (s == StateVerifying || s == StateDegraded):
		f.reason = v1alpha1.ReasonDevicePluginFailing
		if left := v.selectedAt().Add(pluginStarts).Sub(v.world.Now); left > 0 {
			return finding{after: left} // it may be on its way
		}
	case f.reason == "":
		f.message = ""
	}
	return f
}

// configManagerFails says whether the config-manager of a pod keeps ending though the key that the node selects is there.
func (v *view) configManagerFails(p Pod) bool {
	_, written := v.world.Keys[v.node.Labels[v1alpha1.LabelConfig]]
	return written && p.MountsConfig && slices.ContainsFunc(p.Troubles, func(t Trouble) bool {
		_, is := t.is(v.world.Now)
		return is && strings.HasPrefix(t.Container, configManager)
	})
}

// pluginSays is what the pods say that serve the configuration of the node; empty if all is well with them.
func (v *view) pluginSays() string {
	var says []string
	running := false
	for _, p := range v.node.Pods {
		running = running || v.isPlugin(p) && !p.Terminating
		for _, t := range p.Troubles {
			if _, is := t.is(v.world.Now); is {
				says = append(says, v.complaint(p, t))
			}
		}
	}
	if !running {
		says = append(says, v.noPlugin())
	}
	slices.Sort(says)
	return strings.Join(says, "; ")
}

func (v *view) complaint(p Pod, t Trouble) string {
	says := fmt.Sprintf("container %s of pod %s/%s %s", t.Container, p.Namespace, p.Name, t.Why)
	if !strings.HasPrefix(t.Container, configManager) {
		return fmt.Sprintf("%s; look at `kubectl logs -n %s %s -c %s --previous`", says, p.Namespace, p.Name, t.Container)
	}
	key := v.node.Labels[v1alpha1.LabelConfig]
	if _, written := v.world.Keys[key]; written || key == "" {
		return says + ", though the key that the node selects is there; the pod is started anew if that goes on"
	}
	return fmt.Sprintf("%s: the node selects the key %s (%s), which the ConfigMap that the pod mounts does not hold",
		says, key, v1alpha1.LabelConfig)
}

// noPlugin says why no pod of the device plugin is on the node.
func (v *view) noPlugin() string {
	label := deployLabels()[0]
	if value := v.node.Labels[label]; value != "true" && v.world.Wiring.ClusterPolicy {
		return fmt.Sprintf("no pod of NVIDIA's device plugin is on the node, since its label %s is %q; set it to true if nobody "+
			"is at work there", label, value)
	}
	return "no pod of NVIDIA's device plugin is on the node; look at its daemon set, and whether its pods tolerate the " +
		"node's taints"
}
