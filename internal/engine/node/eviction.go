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
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// The pods that are evicted are chosen from the blockers.
//
//	View.Blockers → chooseEvictions → Evict | not chosen: pods that would come back at once

// evictionRefusals are why the API server does not evict pods that block the change.
func evictionRefusals(v *View) []string {
	var refused []string
	for _, b := range v.Blockers {
		if p := v.PodOf(b); p != nil && p.Refused != "" && !p.Terminating {
			refused = append(refused, p.Refused)
		}
	}
	slices.Sort(refused)
	return slices.Compact(refused)
}

// chooseEvictions asks for the eviction of the pods that block the change, where the policy says so. Pods in whose
// place another would come at once stay, and are named: those of DaemonSets and of the kubelet itself, those that came
// in spite of the taint, and those of a controller that can share a ResourceClaim (comesBackByClaim). So do those of
// which nobody reports what they hold, where that matters. For the rest it makes no difference whether a pod has a
// controller or an emptyDir volume.
func chooseEvictions(v *View) (evict []action.Action, stay []string) {
	if v.DrainMode() != "Evict" {
		return nil, nil
	}
	seen := map[string]bool{}
	for _, b := range v.Blockers {
		p := v.PodOf(b)
		if p == nil || seen[p.UID] {
			continue
		}
		seen[p.UID] = true
		if p.Terminating {
			continue
		}
		if why := stays(v, b, p); why != "" {
			stay = append(stay, fmt.Sprintf("pod %s/%s %s", p.Namespace, p.Name, why))
			continue
		}
		evict = append(evict, action.Evict{
			Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Policy: v.Ref(), Why: evictionReason(v, b),
		})
	}
	slices.SortFunc(evict, func(a, b action.Action) int { return strings.Compare(a.String(), b.String()) })
	slices.Sort(stay)
	return evict, stay
}

// stays says why a pod is not evicted, and what to do about it; empty: it is.
func stays(v *View, b plan.Blocker, p *cluster.Pod) string {
	switch claim := comesBackByClaim(v, p); {
	case p.ReturnsAtOnce():
		return "is not evicted, since it would come back at once; end it"
	case b.UUID == "" && !needsAllIdle(v):
		return "is not evicted, because nobody reports which GPU it holds, and the change does not need all of them"
	case keepsNVIDIAMPS(v, b):
		return "is not evicted, because the policy does not select its GPU, which NVIDIA's MPS daemon serves too; end the pod"
	case claim != "":
		return fmt.Sprintf("is not evicted, since ResourceClaim %s, which pods can share, stays; scale its workload down", claim)
	case mayBeOfFormer(v, b, p):
		return "is not evicted until it is known that no former pod of its name holds that GPU"
	case claimUnknown(v, p):
		return "is not evicted until its ResourceClaim is known"
	case returnsDespiteTaint(v, p):
		return "is not evicted, since it came in spite of the taint, as another would after it; scale its workload down"
	}
	return ""
}

// keepsNVIDIAMPS reports whether a pod is only waited for because NVIDIA's MPS daemon serves its GPU, which the target
// does not list. No policy evicts it.
func keepsNVIDIAMPS(v *View, b plan.Blocker) bool {
	blocks := func(s plan.Step) bool { return plan.Blocks(s, b.UUID, b.Instance) }
	return b.UUID != "" && !cluster.Lists(v.Target.Devices, b.UUID) && !OnlyRebootLeft(v) && !slices.ContainsFunc(v.Steps, blocks) &&
		slices.ContainsFunc(v.EndingNVIDIAMPS(), func(d gpu.Device) bool { return d.UUID == b.UUID })
}

// evictionReason is the reason of an eviction.
func evictionReason(v *View, b plan.Blocker) string {
	if onlyOnNode(v, b) {
		return "it runs on " + blockerUse(v, b)
	}
	return "it holds " + blockerUse(v, b)
}

// needsAllIdle reports whether the change needs every GPU and every MIG instance of the node idle, so that a pod is in
// its way whichever of them the pod holds.
func needsAllIdle(v *View) bool {
	others := func(d gpu.Device) bool { return !cluster.Lists(v.Target.Devices, d.UUID) } // those are waited for
	frees := frees(v, slices.DeleteFunc(v.EndingNVIDIAMPS(), others))
	for _, d := range v.Devices {
		stays := func(i gpu.Instance) bool { return !frees(d.UUID, i.ID) }
		if !d.State.MIG && !frees(d.UUID, gpu.WholeGPU) || slices.ContainsFunc(d.State.Instances, stays) {
			return false
		}
	}
	return true
}

// frees tells whether the change needs a GPU or an instance idle. NVIDIA's MPS daemon ends on some GPUs for it.
func frees(v *View, ending []gpu.Device) func(uuid string, instance int) bool {
	steps, whole := v.AgentSteps(), slices.Concat(ending, managerClears(v))
	return func(uuid string, instance int) bool {
		return OnlyRebootLeft(v) || slices.ContainsFunc(whole, func(d gpu.Device) bool { return d.UUID == uuid }) ||
			slices.ContainsFunc(steps, func(s plan.Step) bool { return plan.Blocks(s, uuid, instance) })
	}
}

// schedulingRace is how long after a taint a scheduler may bind a pod for which it had chosen the node before.
const schedulingRace = 3 * time.Second

// returnsDespiteTaint reports whether a pod came to the node in spite of the operator's taint: it tolerates every
// taint, or its author names the node. Another one would take its place at once, so to evict it frees nothing.
func returnsDespiteTaint(v *View, p *cluster.Pod) bool {
	t := v.Taint()
	if t == nil || t.TimeAdded == nil || p.Scheduled.IsZero() {
		return false
	}
	after := p.Scheduled.Sub(t.TimeAdded.Time)
	return after > schedulingRace || p.Tolerates && after > 0
}

// comesBackByClaim is the ResourceClaim by which what takes the place of an evicted pod would get the same device, in
// spite of the operator's DeviceTaintRule; empty if there is none. The scheduler looks at taints when it allocates a
// claim, and one that no pod owns stays allocated as long as a pod uses it (kubernetes
// pkg/scheduler/framework/plugins/dynamicresources).
func comesBackByClaim(v *View, p *cluster.Pod) string {
	if p.Controller == "" {
		return ""
	}
	for _, c := range v.Node.Claims {
		if c.Shared && p.Has(c) {
			return c.Name
		}
	}
	return ""
}

// claimUnknown reports whether a pod came just now by a ResourceClaim that the cache of the controller does not show yet.
// It may be a monitor's, by which nothing is held.
func claimUnknown(v *View, p *cluster.Pod) bool {
	return v.ByClaims() && !slices.ContainsFunc(v.Node.Claims, p.Has) && v.Snapshot.Now.Sub(p.Scheduled) < timing.ReportAfter
}

// justBoundPod is a pod that asks for a GPU and was bound to the node so recently that the agent may not have reported
// what it holds, and for how long it has been there. Where the agent reports a pod of that name, what that has is waited for in any case, so this one
// matters only where it may be given something else that the change takes.
func justBoundPod(v *View) (name string, age time.Duration) {
	for i := range v.Node.Pods {
		p := &v.Node.Pods[i]
		if unreported(v, p) && (reportedOf(v, p) == 0 && !v.ForDemand || mayBeGiven(v, p)) {
			return p.Namespace + "/" + p.Name, sinceCame(v, p)
		}
	}
	return "", 0
}

// unreported reports whether a pod that asks for GPUs of the device plugin came so recently that the agent need not have reported what it holds.
func unreported(v *View, p *cluster.Pod) bool {
	return (!v.ForDemand || !v.ByClaims()) && p.GPU && p.Claim == "" && !p.Terminating && justCame(v, p) && !podReported(v, p)
}

// mayBeGiven reports whether a pod asks for instances of which the change takes one, or for whole GPUs, as an instance is called too under the MIG
// strategy single: none of those goes for pods that wait.
func mayBeGiven(v *View, p *cluster.Pod) bool {
	taken, frees := map[string]bool{}, frees(v, v.EndingNVIDIAMPS())
	for _, d := range v.Devices {
		for _, i := range d.State.Instances {
			taken[plan.ResourceOf(i.Profile)] = taken[plan.ResourceOf(i.Profile)] || frees(d.UUID, i.ID)
		}
	}
	for name, count := range p.Requests {
		if takes, isInstance := taken[name]; count > 0 && (takes || !isInstance && !v.ForDemand) {
			return true
		}
	}
	return p.Requests == nil && !v.ForDemand
}

// usedLately reports whether a change for pods that wait would destroy more instances of a profile than have been idle for idleSeconds: since it was decided, a
// pod was given one that was to go.
func usedLately(v *View) bool {
	if !v.ForDemand || v.Snapshot.Now.IsZero() || v.TargetIsLastGood() || v.Policy == nil || v.Policy.OnDemand() == nil {
		return false
	}
	idle, since, frees := time.Duration(v.Policy.OnDemand().IdleSeconds)*time.Second, v.Node.IdleSince(), frees(v, nil)
	return slices.ContainsFunc(v.Devices, func(d gpu.Device) bool {
		forPod := func(e v1alpha1.GPUDemand) bool { return e.UUID == d.UUID && e.FirstPod != "" }
		goes := func(i gpu.Instance) bool { return frees(d.UUID, i.ID) }
		return slices.ContainsFunc(v.Node.GPU.Status.Demand, forPod) && plan.UsedLately(&d, goes, since, idle, v.Snapshot.Now)
	})
}

// sinceCame is for how long the agent can have reported a pod. One that has just come reports all of them anew.
func sinceCame(v *View, p *cluster.Pod) time.Duration {
	return v.Snapshot.Now.Sub(latestOf(v, p.Scheduled, v.Node.AgentSince))
}

// justCame is false where nothing may depend on the time (View): a change waits for such a pod all the same (justBoundPod).
func justCame(v *View, p *cluster.Pod) bool {
	return !v.Snapshot.Now.IsZero() && !p.Scheduled.IsZero() && sinceCame(v, p) < timing.ReportAfter
}

// podReported reports whether the agent knows what a pod holds, but for what an init container may hold besides.
func podReported(v *View, p *cluster.Pod) bool {
	for _, d := range v.Devices {
		if slices.ContainsFunc(d.Processes, func(u gpu.Process) bool { return u.PodUID != "" && u.PodUID == p.UID }) {
			return true
		}
	}
	return reportedOf(v, p) > 0 && !mayBeFormers(v, p)
}

// mayBeFormers reports whether what the agent reports by the name of a pod may be what a former pod of that name has, on which the kubelet still
// works (as after kubectl delete --force): the pod has just come, or it is more than the pod asks for.
func mayBeFormers(v *View, p *cluster.Pod) bool {
	return p.GPU && justCame(v, p) && recurs(p) || p.Requests != nil && !v.ByClaims() && reportedOf(v, p) > asksFor(p)
}

// recurs reports whether a former pod can have had the name of a pod: ReplicaSets, Jobs and DaemonSets draw them at random. Who says so of a pod that
// is none of theirs risks only that.
func recurs(p *cluster.Pod) bool {
	return p.Controller != "ReplicaSet" && p.Controller != "Job" && p.Controller != "DaemonSet"
}

// mayBeOfFormer reports whether a blocker may be a former pod of the name of p, which then need not go: the agent reports it by name, and the change
// does not need all GPUs, of which p has one in any case.
func mayBeOfFormer(v *View, b plan.Blocker, p *cluster.Pod) bool {
	byName := b.Holder != nil && b.Holder.Container != ""
	return byName && mayBeFormers(v, p) && !needsAllIdle(v)
}

// reportedOf is how many GPUs and instances the agent reports that a pod of that name holds.
func reportedOf(v *View, p *cluster.Pod) (count int64) {
	for _, d := range v.Devices {
		seen := map[int]bool{}
		for _, h := range d.Holders {
			if h.Namespace == p.Namespace && h.Pod == p.Name && !seen[h.Instance] {
				seen[h.Instance] = true
				count++
			}
		}
	}
	return count
}

func asksFor(p *cluster.Pod) (count int64) {
	for _, n := range p.Requests {
		count += n
	}
	return count
}
