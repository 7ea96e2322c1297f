// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
)

// NVIDIA's device plugin looks at the GPUs when it starts and when another key is selected, and never else. MIG instances
// that were made anew under the same key have other UUIDs, also where there are as many as before: containers would be
// given devices that do not exist. The annotation gpusharing.io/instances says which instances it has seen:
//
//	<hash>          of the UUIDs that were there when the key was selected, or when the plugin was started
//	<hash>@<uid>    the same, as soon as the pods with these UIDs (by comma) are gone, which have seen others: of the device
//	                plugin, and of DCGM, which does not notice instances either
//
// So it is written before a pod is deleted, and a pass may end between the two.

// instancesHash is the length of that hash in bytes.
const instancesHash = 8

// unseenInstances is why the device plugin is started anew.
const unseenInstances = "it has not seen the MIG instances that are there"

// rereads is why it is started anew on a node without any.
const rereads = "it does not advertise what the configuration that the node selects promises"

// enumerating has the device plugin look again where the MIG instances are not those that it has seen. To start it anew
// is the least that does: nothing signals it under the same key, and any other key would be advertised meanwhile. Pods
// that run keep what they hold.
func (v *view) enumerating() (judgement, bool) {
	seen, leaving := v.enumerated()
	j := judgement{
		State: StateSelecting, reason: v1alpha1.ReasonSelecting,
		message: "starting NVIDIA's device plugin anew, since the MIG instances are not those that it has seen",
	}
	if now := v.instances(); seen != "" && seen != now {
		plugins := v.plugins()
		if len(plugins) == 0 { // it may have come, and looked, without our knowing yet
			return judgement{}, false
		}
		patch := v.patch(j.message)
		patch.Annotations[v1alpha1.AnnotationInstances] = new(now + "@" + strings.Join(append(plugins, v.monitors()...), ","))
		j.actions = []Action{patch}
		return j, true
	}
	why := unseenInstances
	if v.instances() == "" {
		why, j.message = rereads, "starting NVIDIA's device plugin anew, since it does not advertise what it must"
	}
	waits, plugin := false, false
	for _, p := range v.node.Pods {
		if !slices.Contains(leaving, p.UID) {
			continue
		}
		waits, plugin = true, plugin || v.isPlugin(p)
		if !p.Terminating {
			j.actions = append(j.actions, v.deletePod(p, why))
		}
	}
	if !plugin {
		j.message = "restarting NVIDIA's DCGM, which does not notice new MIG instances"
	}
	return j, waits
}

// enumerated is what the device plugin has seen, once the pods that leave are gone; empty if that is not known. A value that the
// operator does not write tells as little as none: the plugin is not restarted for it.
func (v *view) enumerated() (seen string, leaving []string) {
	seen, uids, _ := strings.Cut(v.node.Annotations[v1alpha1.AnnotationInstances], "@")
	if hash, err := hex.DecodeString(seen); err != nil || seen != "" && len(hash) != instancesHash {
		return "", nil
	}
	if uids != "" {
		leaving = strings.Split(uids, ",")
	}
	return seen, leaving
}

// stampInstances notes in a patch that makes the device plugin look which instances it will see.
func (v *view) stampInstances(patch PatchNode) {
	_, has := v.node.Annotations[v1alpha1.AnnotationInstances]
	seen, leaving := v.enumerated()
	_, selects := patch.Labels[v1alpha1.LabelConfig]
	_, resumes := patch.Annotations[v1alpha1.AnnotationPaused]
	if restarted, has := v.node.Annotations[v1alpha1.AnnotationRestarted]; has && (v.to.final || restarted != v.occasion()) {
		patch.Annotations[v1alpha1.AnnotationRestarted] = nil
	}
	now := v.instances()
	switch {
	case v.to.final || now == "" && !v.leaves():
		if has {
			patch.Annotations[v1alpha1.AnnotationInstances] = nil
		}
	case now != "" && now != seen && (selects || resumes || seen == "" && len(leaving) == 0):
		patch.Annotations[v1alpha1.AnnotationInstances] = new(v.willSee(now, seen, resumes && !selects))
	}
}

// willSee notes the instances that will be seen, and the pods that have to go before they are. A device plugin that is only resumed may
// not have ended, and has then seen others.
func (v *view) willSee(now, seen string, resumed bool) string {
	if resumed && seen != "" {
		return without(now, append(v.plugins(), v.monitors()...))
	}
	return v.withMonitors(now, seen)
}

// leaves reports whether a pod that has to go is still there.
func (v *view) leaves() bool {
	_, leaving := v.enumerated()
	return slices.ContainsFunc(v.node.Pods, func(p Pod) bool { return slices.Contains(leaving, p.UID) })
}

// withMonitors adds to the instances that the device plugin will see the pods of DCGM, which have seen others. It is left
// alone on a node that is taken over as it is.
func (v *view) withMonitors(now, seen string) string {
	uids := v.monitors()
	if seen == "" && v.node.GPU.Status.Rollout.LastGood == nil {
		return now
	}
	return without(now, uids)
}

// without notes instances that are seen once the pods with these UIDs are gone.
func without(instances string, uids []string) string {
	if len(uids) == 0 {
		return instances
	}
	return instances + "@" + strings.Join(uids, ",")
}

// monitors are the UIDs of the pods of DCGM and its exporter that the GPU Operator runs on the node. They see the instances
// that are there when they start (NVIDIA/dcgm-exporter issue 714), and NVIDIA's mig-manager restarts them too.
func (v *view) monitors() []string {
	var uids []string
	for _, p := range v.node.Pods {
		selects := p.NodeSelector[deployPrefix+"dcgm"] != "" || p.NodeSelector[deployPrefix+"dcgm-exporter"] != ""
		if selects && p.Controller == "DaemonSet" && v.world.Wiring.ClusterPolicy {
			uids = append(uids, p.UID)
		}
	}
	slices.Sort(uids)
	return uids
}

// stampResumed notes in a patch that lets the device plugin start anew which instances it will see, where another note is there. Pods
// that the pause has not ended yet have seen others, and stay now.
func (v *view) stampResumed(patch PatchNode) {
	seen, _ := v.enumerated()
	now := v.instances()
	if value, starts := patch.Labels[deployLabels()[0]]; starts && value != nil && seen != "" && now != "" && seen != now {
		patch.Annotations[v1alpha1.AnnotationInstances] = new(without(now, append(v.plugins(), v.monitors()...)))
	}
}

// instances names the MIG instances of the node by their UUIDs, as the agent reports them; empty if there are none.
func (v *view) instances() string {
	var uuids []string
	for _, d := range v.node.GPU.Status.Devices {
		for _, i := range d.Instances {
			uuids = append(uuids, i.UUID)
		}
	}
	if len(uuids) == 0 {
		return ""
	}
	slices.Sort(uuids)
	sum := sha256.Sum256([]byte(strings.Join(uuids, " ")))
	return hex.EncodeToString(sum[:instancesHash])
}

// plugins are the UIDs of the pods of the device plugin.
func (v *view) plugins() []string {
	var uids []string
	for _, p := range v.node.Pods {
		if v.isPlugin(p) {
			uids = append(uids, p.UID)
		}
	}
	slices.Sort(uids)
	return uids
}

// isPlugin says whether a pod is one of the device plugin, whichever ConfigMap it reads. A stand-alone one is known by ours,
// and cannot be told from GPU Feature Discovery beside it, which may be started anew as well.
func (v *view) isPlugin(p Pod) bool {
	return p.NodeSelector[deployLabels()[0]] != "" || !v.world.Wiring.ClusterPolicy && p.MountsConfig && p.Controller == "DaemonSet"
}

// restartPlugin starts the device plugin anew where it does not advertise what it must though it was verified: it has not seen the
// MIG instances, or it started while the key had another content. It does so once for the key and the instances of a boot, and never
// where the plugin reports devices as unhealthy: a plugin that starts anew offers those again. One that has been started lately is
// left alone: then that is not why. The patch has enumerating delete the pods.
func (v *view) restartPlugin() (actions []Action, after time.Duration) {
	applied := condition.IsTrue(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	if v.node.Annotations[v1alpha1.AnnotationRestarted] == v.occasion() || len(v.node.Unhealthy) > 0 || !applied || !v.visible() {
		return nil, 0
	}
	restarts, after := v.restart(rereads, func(p Pod) bool { return v.isPlugin(p) })
	if len(restarts) == 0 {
		return nil, after
	}
	patch := v.patch("starting NVIDIA's device plugin anew, since it does not advertise what it must")
	patch.Annotations[v1alpha1.AnnotationRestarted] = new(v.occasion())
	patch.Annotations[v1alpha1.AnnotationInstances] = new(v.instances() + "@" + strings.Join(v.plugins(), ","))
	return []Action{patch}, 0
}

// occasion names that for which the device plugin is started anew at most once.
func (v *view) occasion() string {
	return v.instances() + "/" + v.node.GPU.Status.BootID + "/" + v.to.key
}

// visible reports whether the ConfigMap has the key, so that a device plugin that starts anew reads it.
func (v *view) visible() bool {
	data, written := v.world.Keys[v.to.key]
	return written && data == v.to.data && v.node.Labels[v1alpha1.LabelConfig] == v.to.key && v.world.Wiring.Ready
}

// sick adds to a message how many devices NVIDIA's device plugin reports as unhealthy; empty if it reports none.
func (v *view) sick() string {
	var sick []string
	for _, name := range slices.Sorted(maps.Keys(v.node.Unhealthy)) {
		sick = append(sick, fmt.Sprintf("%d of %s", v.node.Unhealthy[name], name))
	}
	if len(sick) == 0 {
		return ""
	}
	return fmt.Sprintf("; NVIDIA's device plugin reports devices as unhealthy (%s): look at the GPU (nvidia-smi, XID errors in "+
		"the kernel's log), then restart the plugin's pod", list(sick))
}
