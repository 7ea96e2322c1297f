// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package eviction

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Describe lists who uses what must be freed: pods once, other processes by name and PID.
func Describe(v *view.View) string {
	var names []string
	for _, b := range v.Blockers {
		names = append(names, fmt.Sprintf("%s (%s)", nameOf(v, b), placeOf(v, b)))
	}
	slices.Sort(names)
	return format.List(slices.Compact(names))
}

func nameOf(v *view.View, b plan.Blocker) string {
	switch p := v.PodOf(b); {
	case p != nil:
		return fmt.Sprintf("pod %s/%s", p.Namespace, p.Name)
	case b.Holder != nil:
		return fmt.Sprintf("pod %s/%s", b.Holder.Namespace, b.Holder.Pod)
	case b.Claim != "":
		return "ResourceClaim " + b.Claim
	case b.Process.PodUID != "":
		return fmt.Sprintf("process %d (%s) of a pod that is gone", b.Process.PID, b.Process.Name)
	}
	return fmt.Sprintf("process %d (%s), which runs outside pods and has to be ended there", b.Process.PID, b.Process.Name)
}

func placeOf(v *view.View, b plan.Blocker) string {
	at := slices.IndexFunc(v.Devices, func(d gpu.Device) bool { return d.UUID == b.UUID })
	if at < 0 {
		switch p := v.PodOf(b); {
		case p != nil && p.Claim != "":
			return "GPUs, by ResourceClaim " + p.Claim
		case b.Claim != "":
			return "GPUs that the node does not publish"
		case onlyOnNode(v, b):
			return "the node, which must be rebooted"
		}
		return "a GPU, by an init container"
	}
	place := fmt.Sprintf("GPU %d", v.Devices[at].Index)
	for _, i := range v.Devices[at].State.Instances {
		if i.ID == b.Instance {
			return fmt.Sprintf("%s, instance %s at %s", place, i.Profile, i.Placement)
		}
	}
	return place
}

// onlyOnNode reports whether a blocker is a pod that holds no GPU, and blocks the reboot of its node.
func onlyOnNode(v *view.View, b plan.Blocker) bool {
	p := v.PodOf(b)
	return b.UUID == "" && p != nil && p.Claim == "" && (!p.InitHolds || v.ByDriver())
}

// Refusals are why the API server does not evict pods that block the change.
func Refusals(v *view.View) []string {
	var refused []string
	for _, b := range v.Blockers {
		if p := v.PodOf(b); p != nil && p.Refused != "" && !p.Terminating {
			refused = append(refused, p.Refused)
		}
	}
	slices.Sort(refused)
	return slices.Compact(refused)
}

// Choose asks for the eviction of the pods that block the change, where the policy says so. Pods of DaemonSets and of the
// kubelet itself would come back at once: they stay, and are named. Whether a pod has a controller or an emptyDir volume makes no
// difference.
func Choose(v *view.View) (evict []action.Action, stay []string) {
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
		switch {
		case p.Terminating:
		case p.ReturnsAtOnce():
			stay = append(stay, fmt.Sprintf("pod %s/%s, which would come back at once", p.Namespace, p.Name))
		case b.UUID == "" && !freesAll(v):
			stay = append(stay, fmt.Sprintf("pod %s/%s, because nobody reports which GPU it holds, and the change does not need all of them",
				p.Namespace, p.Name))
		case comesBackByClaim(v, p) != "":
			stay = append(stay, fmt.Sprintf("pod %s/%s, because another would come in its place in spite of the DeviceTaintRule: ResourceClaim %s, which pods "+
				"can share, stays allocated. Scale its workload down", p.Namespace, p.Name, comesBackByClaim(v, p)))
		case returnsDespiteTaint(v, p):
			stay = append(stay, fmt.Sprintf("pod %s/%s, which came to the node in spite of the taint, as another would after it; "+
				"scale its workload down", p.Namespace, p.Name))
		default:
			evict = append(evict, action.Evict{
				Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Policy: v.Ref(),
				Why: why(v, b),
			})
		}
	}
	slices.SortFunc(evict, func(a, b action.Action) int { return strings.Compare(a.String(), b.String()) })
	slices.Sort(stay)
	return evict, stay
}

// why is the reason of an eviction.
func why(v *view.View, b plan.Blocker) string {
	if onlyOnNode(v, b) {
		return "it runs on " + placeOf(v, b)
	}
	return "it holds " + placeOf(v, b)
}

// freesAll reports whether the change needs every GPU and every MIG instance of the node idle, so that a pod is in its way whichever of
// them the pod holds.
func freesAll(v *view.View) bool {
	steps, whole := v.Steps, slices.Concat(v.LeavesNVIDIA(), view.Cleared(v))
	if v.Managed() {
		steps = plan.WithoutMIG(steps)
	}
	for _, d := range v.Devices {
		frees := func(instance int) bool {
			return view.Reboots(v) || slices.ContainsFunc(whole, func(o gpu.Device) bool { return o.UUID == d.UUID }) ||
				slices.ContainsFunc(steps, func(s plan.Step) bool { return plan.Blocks(s, d.UUID, instance) })
		}
		if !d.State.MIG && !frees(gpu.WholeGPU) || slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return !frees(i.ID) }) {
			return false
		}
	}
	return true
}

// raceTime is how long after a taint a scheduler may bind a pod for which it had chosen the node before.
const raceTime = 3 * time.Second

// returnsDespiteTaint reports whether a pod came to the node in spite of the operator's taint: it tolerates every taint, or its author
// names the node. Another one would take its place at once, so to evict it frees nothing.
func returnsDespiteTaint(v *view.View, p *world.Pod) bool {
	t := v.Taint()
	if t == nil || t.TimeAdded == nil || p.Scheduled.IsZero() {
		return false
	}
	after := p.Scheduled.Sub(t.TimeAdded.Time)
	return after > raceTime || p.Tolerates && after > 0
}

// comesBackByClaim is the ResourceClaim by which what takes the place of an evicted pod would get the same device, in spite of the operator's
// DeviceTaintRule; empty if there is none. The scheduler looks at taints when it allocates a claim, and one that no pod owns stays allocated as long
// as a pod uses it (kubernetes pkg/scheduler/framework/plugins/dynamicresources).
func comesBackByClaim(v *view.View, p *world.Pod) string {
	if !v.ByDriver() || p.Controller == "" {
		return ""
	}
	for _, c := range v.Node.Claims {
		if c.Shared && p.Has(c) {
			return c.Name
		}
	}
	return ""
}

// JustBound is a pod that asks for a GPU and was bound to the node so recently that the agent may not have reported what
// it holds, and for how long it has been there.
func JustBound(v *view.View) (name string, age time.Duration) {
	for _, p := range v.Node.Pods {
		age := v.World.Now.Sub(p.Scheduled)
		if p.GPU && p.Claim == "" && !p.Terminating && !p.Scheduled.IsZero() && age < timing.ReportAfter && !Reported(v, p) {
			return p.Namespace + "/" + p.Name, age
		}
	}
	return "", 0
}

// Reported says whether the agent knows what a pod holds.
func Reported(v *view.View, p world.Pod) bool {
	for _, d := range v.Devices {
		holds := func(h gpu.Holder) bool { return h.Namespace == p.Namespace && h.Pod == p.Name }
		uses := func(u gpu.Process) bool { return u.PodUID != "" && u.PodUID == p.UID }
		if slices.ContainsFunc(d.Holders, holds) || slices.ContainsFunc(d.Processes, uses) {
			return true
		}
	}
	return false
}
