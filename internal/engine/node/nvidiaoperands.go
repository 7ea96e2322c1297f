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

// NVIDIA's operands on a node are stopped and started again by their deploy labels.
//
//	stopPatch → they end → the GPUs are changed → startPatch, with the MIG instances that the device plugin will see

// mustStop are the deploy labels of those of NVIDIA's operands that block the change. Its device plugin and GFD hold no instance (nos, and
// NVIDIA's own DRA driver, destroy them beside it), and until a plugin that was stopped is back its kubelet publishes twice: pods that wait do not wait for
// that too. Where the node is to offer as many of each as now, nothing would tell when the plugin that goes on has looked again, so there it stops, as
// where no taint keeps pods off (MustStayUntainted).
func mustStop(v *View) []string {
	if v.ForDemand && v.Tainted() && len(advertisedDifferences(v)) > 0 {
		return cluster.DeployLabels()[2:]
	}
	return cluster.DeployLabels()
}

// stopPatch is the patch that stops those of some of NVIDIA's operands that run, and records them. Those that join do
// not begin its time anew.
func stopPatch(v *View, deploy []string) (patch action.PatchNode, stops bool) {
	patch = v.Patch("stopping NVIDIA's operands")
	recorded := append(StoppedByOperator(v), stoppedUnderneath(v)...)
	for _, name := range deploy {
		if v.Node.Labels[name] == "true" {
			patch.Labels[name] = new(cluster.StoppedValue)
			recorded = append(recorded, name)
		}
	}
	_, since := cluster.Stopped(v.Node.Annotations)
	if since.IsZero() {
		since = v.Snapshot.Now
	}
	patch.Annotations[v1alpha1.AnnotationStopped] = cluster.StoppedRecord(recorded, since)
	saveBaselineCopy(v, patch)
	patch.Locked = true
	return patch, len(patch.Labels) > 0
}

// startPatch is the patch that starts those of NVIDIA's operands again that we stopped. Where another controller's value
// lies over ours the record stays until ours is back.
func startPatch(v *View) (patch action.PatchNode, starts bool) {
	patch = v.Patch("starting NVIDIA's operands again")
	recorded, stopped := v.Node.Annotations[v1alpha1.AnnotationStopped]
	if !stopped || keepsOperandsStopped(v) {
		return patch, false
	}
	for _, name := range StoppedByOperator(v) {
		patch.Labels[name] = new("true")
	}
	patch.Annotations[v1alpha1.AnnotationStopped] = nil
	if rest := stoppedUnderneath(v); len(rest) > 0 {
		_, since := cluster.Stopped(v.Node.Annotations)
		record := cluster.StoppedRecord(rest, since)
		patch.Annotations[v1alpha1.AnnotationStopped] = record
		return patch, *record != recorded
	}
	return patch, true
}

// podsNotEnding are the pods of NVIDIA's on the node that must end and have not: those that are being deleted, and the
// test workloads of its validator, which is asked for at each stop.
func podsNotEnding(v *View) []string {
	var names []string
	for _, p := range v.Node.Pods {
		if p.Validator || p.Terminating && p.NVIDIA && cluster.SelectsDeploy(p.NodeSelector) {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	slices.Sort(names)
	return names
}

// keepPluginAway stops NVIDIA's operands where the device plugin runs, or may start, before the agent has made its
// instances.
func keepPluginAway(v *View) (patch action.PatchNode, stops bool) {
	if !agentMakesInstances(v) || v.Node.Labels[cluster.DeployLabels()[0]] != "true" {
		return action.PatchNode{}, false
	}
	return stopPatch(v, cluster.DeployLabels())
}

// keepsOperandsStopped reports whether NVIDIA's operands have to stay stopped until the driver is replaced.
func keepsOperandsStopped(v *View) bool {
	m, is := UnderMaintenance(v)
	return is && m.Unloads && agentMakesInstances(v)
}

// UnavailableForOther reports whether the node is still kept from its users on behalf of another policy than the one
// that governs it now. It counts in the budget of that one until its scheduling is restored, so the write that restores
// it must not record the policy that governs the node now, in whose budget there may be no slot.
func (v *View) UnavailableForOther() bool {
	return v.Policy != nil && v.Node.ChangedFor != "" && v.Node.ChangedFor != v.Policy.Name && v.MadeUnavailable()
}

// StoppedByOperator are the deploy labels that we stopped and that still are.
func StoppedByOperator(v *View) []string {
	recorded, _ := cluster.Stopped(v.Node.Annotations)
	return slices.DeleteFunc(recorded, func(name string) bool { return v.Node.Labels[name] != cluster.StoppedValue })
}

// stoppedUnderneath are the deploy labels that we stopped and over whose value another controller has put its own. It
// restores ours when it is done (NVIDIA/k8s-driver-manager joins both by an underscore).
func stoppedUnderneath(v *View) []string {
	recorded, _ := cluster.Stopped(v.Node.Annotations)
	return slices.DeleteFunc(recorded, func(name string) bool { return !strings.HasPrefix(v.Node.Labels[name], cluster.StoppedValue+"_") })
}

// ByGPUOperator reports whether deploy labels start and stop NVIDIA's programs on the node. A GPU Operator whose device
// plugin is off runs the others by them all the same. Beside NVIDIA's DRA driver the labels themselves are its sign,
// because nothing of the ClusterPolicy is configured.
func (v *View) ByGPUOperator() bool {
	return v.Snapshot.Plugin.ClusterPolicy || !v.ReadsConfigs() && slices.ContainsFunc(cluster.DeployLabels(), func(name string) bool { return v.Node.Labels[name] != "" })
}

// operandPods are the pods on the node that one of the deploy labels keeps there.
func operandPods(v *View, deploy ...string) []string {
	var names []string
	for _, p := range v.Node.Pods {
		if slices.ContainsFunc(deploy, p.KeptBy) {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	slices.Sort(names)
	return names
}

// NVIDIA's device plugin looks at the GPUs when it starts and when another key is selected, and never else. MIG
// instances that were made anew under the same key have other UUIDs, also where there are as many as before: containers
// would be given devices that do not exist. The annotation gpusharing.io/instances says which it has seen, no hash none:
//
//	<hash>          of the UUIDs that were there when the key was selected, or when the plugin was started
//	<hash>@<uid>    the same, as soon as the pods with these UIDs (by comma) are gone, which have seen others: of the device
//	                plugin, and of DCGM, which does not notice instances either
//
// So it is written before a pod is deleted, and a reconcile may end between the two.

// instancesHashBytes is how long that hash is.
const instancesHashBytes = 8

// enumeratedInstances is what the device plugin has seen, once the pods that leave are gone; empty: none. A value that
// the operator does not write tells nothing.
func enumeratedInstances(v *View) (seen string, leaving []string, known bool) {
	seen, uids, known := strings.Cut(v.Node.Annotations[v1alpha1.AnnotationInstances], "@")
	if hash, err := hex.DecodeString(seen); err != nil || seen != "" && len(hash) != instancesHashBytes {
		return "", nil, false
	}
	if uids != "" {
		leaving = strings.Split(uids, ",")
	}
	return seen, leaving, known || seen != ""
}

// withoutPods notes instances that are seen once these pods are gone.
func withoutPods(instances string, uids []string) string {
	if len(uids) == 0 && instances != "" {
		return instances
	}
	return instances + "@" + strings.Join(uids, ",")
}

// monitorPods are the UIDs of the pods of DCGM and its exporter that the GPU Operator runs on the node. They see the
// instances that are there when they start (NVIDIA/dcgm-exporter issue 714), and NVIDIA's mig-manager restarts them
// too.
func monitorPods(v *View) []string { return podUIDs(v, isMonitorPod) }

// isMonitorPod reports whether a pod is one of those.
func isMonitorPod(v *View, p cluster.Pod) bool {
	selects := slices.ContainsFunc(cluster.MonitorLabels(), p.KeptBy)
	return selects && p.Controller == "DaemonSet" && v.ByGPUOperator()
}

// stampResumed notes in a patch that lets the device plugin start anew which instances it will see, where another note
// is there. Pods that the stop has not ended yet have seen others, and stay now.
func stampResumed(v *View, patch action.PatchNode) {
	if !v.ReadsConfigs() {
		return // there the note is about NVIDIA's DRA driver, which goes on running
	}
	seen, _, _ := enumeratedInstances(v)
	now := hashOfInstances(v)
	if value, starts := patch.Labels[cluster.DeployLabels()[0]]; starts && value != nil && seen != "" && now != "" && seen != now {
		patch.Annotations[v1alpha1.AnnotationInstances] = new(withoutPods(now, append(pluginPodUIDs(v), monitorPods(v)...)))
	}
}

// hashOfInstances names the MIG instances of the node by their UUIDs, as the agent reports them; empty if there are
// none.
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
func pluginPodUIDs(v *View) []string { return podUIDs(v, isPluginPod) }

// podUIDs are the UIDs of pods of the node, sorted.
func podUIDs(v *View, of func(*View, cluster.Pod) bool) []string {
	var uids []string
	for _, p := range v.Node.Pods {
		if of(v, p) {
			uids = append(uids, p.UID)
		}
	}
	slices.Sort(uids)
	return uids
}

// isPluginPod reports whether a pod is one of the device plugin, whichever ConfigMap it reads. A stand-alone one is
// known by ours, and cannot be told from GPU Feature Discovery beside it, which may be started anew as well.
func isPluginPod(v *View, p cluster.Pod) bool {
	standAlone := !v.Snapshot.Plugin.ClusterPolicy && p.MountsConfig && p.Controller == "DaemonSet"
	return standAlone || p.KeptBy(cluster.DeployLabels()[0])
}
