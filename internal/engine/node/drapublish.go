// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Of NVIDIA's DRA driver, on a node that the driver alone serves, a change needs this: what it lacks for a policy, the restart by which it
// looks at the GPUs again, and the proof that it publishes them.
//
//	draLacks → … GPUs changed → publishing: not as the agent reports → pod deleted, once → published | late → failed
//	duplicatedClasses, hangingClaims, draPluginFailing: what is left half-done

// The driver looks at the GPUs when its kubelet plugin starts, and never else. So after a change its pod on the node is deleted: pods that
// run keep what they have. DCGM and its exporter look at the instances when they start too, so they are deleted with it unless they have
// started since the change. The annotation gpusharing.io/instances has, as beside the device plugin, what the driver will have seen once
// the pods that it lists are gone; it is written before a pod is deleted, so that this happens once for the GPUs and the boot. Should the
// pod have been replaced just before without the cache showing that, gpusharing.io/plugin-restarted allows one restart more.

// draRestartReason is why the pod is deleted.
const draRestartReason = "it has not seen the GPUs and MIG instances that are there"

// publishing is the gate that NVIDIA's DRA driver publishes the GPUs and instances as the agent reports them, by UUID, and that classes
// offer them.
func publishing(v *View) (Result, bool) {
	if dynamicMIG(v) != nil {
		return Result{}, false // what it publishes is not what the agent sees
	}
	stale := v.Node.Published.Stale(v.Node.GPU.Status.Devices, v.Target.Shares)
	differs := stale
	if !v.Target.Final { // a release does not wait for a GPU that is unhealthy
		differs = v.Node.Published.Differs(v.Node.GPU.Status.Devices, v.Target.Shares)
	}
	differs = append(slices.Clone(differs), unofferedResources(v)...)
	if len(differs) == 0 && !v.OnlyComputeMode() && !condition.IsTrue(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied) {
		differs = append(differs, agentMessage(v, "the GPUs are not shared as asked"))
	}
	if len(differs) == 0 {
		return Result{}, false
	}
	j := Result{
		State: Verifying, Reason: v1alpha1.ReasonVerifying,
		Message: "NVIDIA's DRA driver does not publish yet what it must: " + format.List(differs),
	}
	if len(stale) > 0 {
		j.Next, j.After = restartDRAPlugin(v)
	}
	if j.Next != nil {
		j.Message = "restarting NVIDIA's DRA driver on the node, because " + draRestartReason
		return j, true
	}
	return publishingOverdue(v, j), true
}

// unofferedResources lists the resources of the target that no DeviceClass offers yet.
func unofferedResources(v *View) []string {
	var lacking []string
	for _, class := range DeviceClasses(v) {
		if _, offered := dra.Offering(v.Snapshot.DRA.Classes, class.Resource); !offered {
			lacking = append(lacking, "no DeviceClass serves "+class.Resource)
		}
	}
	return lacking
}

// publishingOverdue gives up a change that is not published in time. What was published before is waited for.
func publishingOverdue(v *View, j Result) Result {
	message := fmt.Sprintf("not within %s: %s; look at the pod of NVIDIA's DRA driver on the node", timing.VerifyTimeout, j.Message)
	if v.Reached() || v.FallsBack {
		j.State, j.Reason = Degraded, v1alpha1.ReasonNotPublished
		return j
	}
	since := timing.Latest(ConfigSelectedAt(v), v.Node.GPU.Spec.ChangeTime.Time)
	left := since.Add(timing.VerifyTimeout).Sub(v.Snapshot.Now)
	if left <= 0 {
		return failChange(v, j, v1alpha1.ReasonNotPublished, message)
	}
	j.After = timing.Sooner(j.After, left)
	return j
}

// restartDRAPlugin has the driver look at the GPUs again: first it is recorded which pods have to go, then these are deleted. after is when to do so
// once more.
func restartDRAPlugin(v *View) (next nextStep, after time.Duration) {
	pods := draPluginPods(v)
	seen, leaving := enumeratedInstances(v)
	if now := publishOccasion(v); seen != now && len(pods) > 0 {
		if left, starts := draPluginStarting(v, pods); starts {
			return nil, left
		}
		return atOnce(recordRestart(v, now, append(slices.Clone(pods), unawareMonitors(v)...))), 0
	}
	var deletions []action.Action
	waits := false
	for _, p := range v.Node.Pods {
		if !slices.Contains(leaving, p.UID) {
			continue
		}
		waits = true
		if !p.Terminating {
			deletions = append(deletions, deletePod(v, p, draRestartReason))
		}
	}
	if waits || len(pods) == 0 {
		return atOnce(deletions...), 0
	}
	return restartDRAPluginAgain(v, pods)
}

// draPublishesWithin is how long a driver may take to publish after its pod became Ready.
const draPublishesWithin = 10 * time.Second

// draPluginStarting reports whether a pod of the driver is on its way to publish what is there: it looks at the GPUs when it starts. after is when to
// look again; 0: when the pod changes.
func draPluginStarting(v *View, pods []cluster.Pod) (after time.Duration, is bool) {
	for _, p := range pods {
		if p.Terminating {
			continue
		}
		left := p.ReadySince.Add(draPublishesWithin).Sub(v.Snapshot.Now)
		if is = is || p.ReadySince.IsZero() || left > 0; left > 0 {
			after = timing.Sooner(after, left)
		}
	}
	return after, is
}

// restartDRAPluginAgain restarts pods that have run for long enough to publish, at most once for the GPUs and the boot.
func restartDRAPluginAgain(v *View, pods []cluster.Pod) (next nextStep, after time.Duration) {
	now := publishOccasion(v)
	if v.Node.Annotations[v1alpha1.AnnotationRestarted] == now {
		return nil, 0
	}
	for _, p := range pods {
		if left := p.Scheduled.Add(timing.VerifyTimeout / 2).Sub(v.Snapshot.Now); left > 0 {
			after = timing.Sooner(after, left)
		}
	}
	if after > 0 {
		return nil, after
	}
	patch := recordRestart(v, now, pods)
	patch.Annotations[v1alpha1.AnnotationRestarted] = &now
	return atOnce(patch), 0
}

// recordRestart notes the pods that have to go before the driver has seen the GPUs.
func recordRestart(v *View, now string, pods []cluster.Pod) action.PatchNode {
	uids := make([]string, 0, len(pods))
	for _, p := range pods {
		uids = append(uids, p.UID)
	}
	slices.Sort(uids)
	patch := v.Patch("restarting NVIDIA's DRA driver on the node, because " + draRestartReason)
	patch.Annotations[v1alpha1.AnnotationInstances] = new(withoutPods(now, uids))
	return patch
}

// dropRestartStamps removes what was recorded of restarts from a node that is released, once the driver publishes its baseline.
func dropRestartStamps(v *View, patch action.PatchNode) {
	if v.Target.Final && dynamicMIG(v) == nil && len(v.Node.Published.Stale(v.Node.GPU.Status.Devices, v.Target.Shares)) > 0 {
		return
	}
	for _, name := range []string{v1alpha1.AnnotationInstances, v1alpha1.AnnotationRestarted} {
		if _, has := v.Node.Annotations[name]; has && v.Target.Final {
			patch.Annotations[name] = nil
		}
	}
}

// unawareMonitors are the pods of DCGM and its exporter that were on the node before the change was done, so they have not seen its instances.
func unawareMonitors(v *View) []cluster.Pod {
	changed := ConfigSelectedAt(v)
	return slices.DeleteFunc(slices.Clone(v.Node.Pods), func(p cluster.Pod) bool {
		return !isMonitorPod(v, p) || !changed.IsZero() && p.Scheduled.After(changed)
	})
}

// draPluginPods are those of the driver's kubelet plugin on the node.
func draPluginPods(v *View) []cluster.Pod {
	var pods []cluster.Pod
	for _, p := range v.Node.Pods {
		if p.DRA {
			pods = append(pods, p)
		}
	}
	return pods
}

// publishOccasion names that for which the driver is restarted: the GPUs and instances that it must publish, and the boot of the node.
func publishOccasion(v *View) string {
	const hashed = 8
	status := &v.Node.GPU.Status
	sum := sha256.Sum256([]byte(strings.Join(append(dra.UUIDs(status.Devices), status.BootID), " ")))
	return hex.EncodeToString(sum[:hashed])
}
