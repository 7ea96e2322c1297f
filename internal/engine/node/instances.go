// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
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

// instancesHashBytes is the length of that hash in bytes.
const instancesHashBytes = 8

// enumeratedInstances is what the device plugin has seen, once the pods that leave are gone; empty if that is not known. A value that the
// operator does not write tells as little as none: the plugin is not restarted for it.
func enumeratedInstances(v *View) (seen string, leaving []string) {
	seen, uids, _ := strings.Cut(v.Node.Annotations[v1alpha1.AnnotationInstances], "@")
	if hash, err := hex.DecodeString(seen); err != nil || seen != "" && len(hash) != instancesHashBytes {
		return "", nil
	}
	if uids != "" {
		leaving = strings.Split(uids, ",")
	}
	return seen, leaving
}

// withoutPods notes instances that are seen once the pods with these UIDs are gone.
func withoutPods(instances string, uids []string) string {
	if len(uids) == 0 {
		return instances
	}
	return instances + "@" + strings.Join(uids, ",")
}

// monitorPods are the UIDs of the pods of DCGM and its exporter that the GPU Operator runs on the node. They see the instances
// that are there when they start (NVIDIA/dcgm-exporter issue 714), and NVIDIA's mig-manager restarts them too.
func monitorPods(v *View) []string {
	var uids []string
	for _, p := range v.Node.Pods {
		if isMonitorPod(v, p) {
			uids = append(uids, p.UID)
		}
	}
	slices.Sort(uids)
	return uids
}

// isMonitorPod reports whether a pod is one of those.
func isMonitorPod(v *View, p cluster.Pod) bool {
	selects := slices.ContainsFunc(cluster.MonitorLabels(), p.KeptBy)
	return selects && p.Controller == "DaemonSet" && v.ByGPUOperator()
}

// stampResumed notes in a patch that lets the device plugin start anew which instances it will see, where another note is there. Pods
// that the pause has not ended yet have seen others, and stay now.
func stampResumed(v *View, patch action.PatchNode) {
	if v.ByDriver() {
		return // there the note is about NVIDIA's DRA driver, which goes on running
	}
	seen, _ := enumeratedInstances(v)
	now := hashOfInstances(v)
	if value, starts := patch.Labels[cluster.DeployLabels()[0]]; starts && value != nil && seen != "" && now != "" && seen != now {
		patch.Annotations[v1alpha1.AnnotationInstances] = new(withoutPods(now, append(pluginPodUIDs(v), monitorPods(v)...)))
	}
}

// hashOfInstances names the MIG instances of the node by their UUIDs, as the agent reports them; empty if there are none.
func hashOfInstances(v *View) string {
	var uuids []string
	for _, d := range v.Node.GPU.Status.Devices {
		for _, i := range d.Instances {
			uuids = append(uuids, i.UUID)
		}
	}
	if len(uuids) == 0 {
		return ""
	}
	slices.Sort(uuids)
	sum := sha256.Sum256([]byte(strings.Join(uuids, " ")))
	return hex.EncodeToString(sum[:instancesHashBytes])
}

// pluginPodUIDs are the UIDs of the pods of the device plugin.
func pluginPodUIDs(v *View) []string {
	var uids []string
	for _, p := range v.Node.Pods {
		if isPluginPod(v, p) {
			uids = append(uids, p.UID)
		}
	}
	slices.Sort(uids)
	return uids
}

// isPluginPod says whether a pod is one of the device plugin, whichever ConfigMap it reads. A stand-alone one is known by ours,
// and cannot be told from GPU Feature Discovery beside it, which may be started anew as well.
func isPluginPod(v *View, p cluster.Pod) bool {
	standAlone := !v.Snapshot.Plugin.ClusterPolicy && p.MountsConfig && p.Controller == "DaemonSet"
	return standAlone || p.KeptBy(cluster.DeployLabels()[0])
}
