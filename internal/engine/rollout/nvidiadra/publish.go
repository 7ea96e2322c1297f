// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidiadra

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/clients"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// The driver looks at the GPUs when its kubelet plugin starts, and never else. So after a change its pod on the node is deleted: pods that
// run keep what they have. DCGM and its exporter look at the instances when they start too, so they are deleted with it unless they have
// started since the change. The annotation gpusharing.io/instances has, as beside the device plugin, what the driver will have seen once
// the pods that it lists are gone; it is written before a pod is deleted, so that this happens once for the GPUs and the boot. Should the
// pod have been replaced just before without the cache showing that, gpusharing.io/plugin-restarted allows one restart more.

// restarts is why the pod is deleted.
const restarts = "it has not seen the GPUs and MIG instances that are there"

// Publishing is the gate that NVIDIA's DRA driver publishes the GPUs and instances as the agent reports them, by UUID, and that classes
// offer them.
func Publishing(v *view.View) (gate.Judgement, bool) {
	if Dynamic(v) != nil {
		return gate.Judgement{}, false // what it publishes is not what the agent sees
	}
	stale := v.Node.Published.Stale(v.Node.GPU.Status.Devices, v.Target.Shares)
	differs := stale
	if !v.Target.Final { // a release does not wait for a GPU that is unhealthy
		differs = v.Node.Published.Differs(v.Node.GPU.Status.Devices, v.Target.Shares)
	}
	differs = append(slices.Clone(differs), unoffered(v)...)
	if len(differs) == 0 && !v.OnlyComputeMode() && !condition.IsTrue(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied) {
		differs = append(differs, gate.AgentMessage(v, "the GPUs are not shared as asked"))
	}
	if len(differs) == 0 {
		return gate.Judgement{}, false
	}
	j := gate.Judgement{
		State: state.Verifying, Reason: v1alpha1.ReasonVerifying,
		Message: "NVIDIA's DRA driver does not publish yet what it must: " + format.List(differs),
	}
	if len(stale) > 0 {
		j.Next, j.After = restart(v)
	}
	if j.Next != nil {
		j.Message = "restarting NVIDIA's DRA driver on the node, because " + restarts
		return j, true
	}
	return overdue(v, j), true
}

// unoffered lists the resources of the target that no DeviceClass offers yet.
func unoffered(v *view.View) []string {
	var lacking []string
	for _, class := range Classes(v) {
		if _, offered := dra.Offering(v.World.DRA.Classes, class.Resource); !offered {
			lacking = append(lacking, "no DeviceClass serves "+class.Resource)
		}
	}
	return lacking
}

// overdue gives up a change that is not published in time. What was published before is waited for.
func overdue(v *view.View, j gate.Judgement) gate.Judgement {
	message := fmt.Sprintf("not within %s: %s; look at the pod of NVIDIA's DRA driver on the node", timing.VerifyTimeout, j.Message)
	if v.Reached() || v.FallsBack {
		j.State, j.Reason = state.Degraded, v1alpha1.ReasonNotPublished
		return j
	}
	since := timing.Latest(view.SelectedAt(v), v.Node.GPU.Spec.ChangeTime.Time)
	left := since.Add(timing.VerifyTimeout).Sub(v.World.Now)
	if left <= 0 {
		return gate.Fail(v, j, v1alpha1.ReasonNotPublished, message)
	}
	j.After = timing.Sooner(j.After, left)
	return j
}

// restart has the driver look at the GPUs again: first it is recorded which pods have to go, then these are deleted. after is when to do so
// once more.
func restart(v *view.View) (next gate.Next, after time.Duration) {
	pods := pods(v)
	seen, leaving := clients.Enumerated(v)
	if now := occasion(v); seen != now && len(pods) > 0 {
		if left, starts := starting(v, pods); starts {
			return nil, left
		}
		return gate.AtOnce(record(v, now, append(slices.Clone(pods), unaware(v)...))), 0
	}
	var deletions []action.Action
	waits := false
	for _, p := range v.Node.Pods {
		if !slices.Contains(leaving, p.UID) {
			continue
		}
		waits = true
		if !p.Terminating {
			deletions = append(deletions, gate.DeletePod(v, p, restarts))
		}
	}
	if waits || len(pods) == 0 {
		return gate.AtOnce(deletions...), 0
	}
	return restartAgain(v, pods)
}

// publishesWithin is how long a driver may take to publish after its pod became Ready.
const publishesWithin = 10 * time.Second

// starting reports whether a pod of the driver is on its way to publish what is there: it looks at the GPUs when it starts. after is when to
// look again; 0: when the pod changes.
func starting(v *view.View, pods []world.Pod) (after time.Duration, is bool) {
	for _, p := range pods {
		if p.Terminating {
			continue
		}
		left := p.ReadySince.Add(publishesWithin).Sub(v.World.Now)
		if is = is || p.ReadySince.IsZero() || left > 0; left > 0 {
			after = timing.Sooner(after, left)
		}
	}
	return after, is
}

// restartAgain restarts pods that have run for long enough to publish, at most once for the GPUs and the boot.
func restartAgain(v *view.View, pods []world.Pod) (next gate.Next, after time.Duration) {
	now := occasion(v)
	if v.Node.Annotations[v1alpha1.AnnotationRestarted] == now {
		return nil, 0
	}
	for _, p := range pods {
		if left := p.Scheduled.Add(timing.VerifyTimeout / 2).Sub(v.World.Now); left > 0 {
			after = timing.Sooner(after, left)
		}
	}
	if after > 0 {
		return nil, after
	}
	patch := record(v, now, pods)
	patch.Annotations[v1alpha1.AnnotationRestarted] = &now
	return gate.AtOnce(patch), 0
}

// record notes the pods that have to go before the driver has seen the GPUs.
func record(v *view.View, now string, pods []world.Pod) action.PatchNode {
	uids := make([]string, 0, len(pods))
	for _, p := range pods {
		uids = append(uids, p.UID)
	}
	slices.Sort(uids)
	patch := v.Patch("restarting NVIDIA's DRA driver on the node, because " + restarts)
	patch.Annotations[v1alpha1.AnnotationInstances] = new(clients.Without(now, uids))
	return patch
}

// DropStamps removes what was recorded of restarts from a node that is released, once the driver publishes its baseline.
func DropStamps(v *view.View, patch action.PatchNode) {
	if v.Target.Final && Dynamic(v) == nil && len(v.Node.Published.Stale(v.Node.GPU.Status.Devices, v.Target.Shares)) > 0 {
		return
	}
	for _, name := range []string{v1alpha1.AnnotationInstances, v1alpha1.AnnotationRestarted} {
		if _, has := v.Node.Annotations[name]; has && v.Target.Final {
			patch.Annotations[name] = nil
		}
	}
}

// unaware are the pods of DCGM and its exporter that were on the node before the change was done, so they have not seen its instances.
func unaware(v *view.View) []world.Pod {
	changed := view.SelectedAt(v)
	return slices.DeleteFunc(slices.Clone(v.Node.Pods), func(p world.Pod) bool {
		return !clients.IsMonitor(v, p) || !changed.IsZero() && p.Scheduled.After(changed)
	})
}

// pods are those of the driver's kubelet plugin on the node.
func pods(v *view.View) []world.Pod {
	var pods []world.Pod
	for _, p := range v.Node.Pods {
		if p.DRA {
			pods = append(pods, p)
		}
	}
	return pods
}

// occasion names that for which the driver is restarted: the GPUs and instances that it must publish, and the boot of the node.
func occasion(v *view.View) string {
	const hashed = 8
	status := &v.Node.GPU.Status
	sum := sha256.Sum256([]byte(strings.Join(append(dra.UUIDs(status.Devices), status.BootID), " ")))
	return hex.EncodeToString(sum[:hashed])
}
