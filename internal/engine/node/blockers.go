// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
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
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The pods and processes that block a change are named, and the pods that are evicted chosen.
//
//	View.Blockers → BlockersOf, describeBlockers (for people) | chooseEvictions → Evict; not chosen: pods that would come back at once

// describeBlockers lists who uses what must be freed: pods once, other processes by name and PID.
func describeBlockers(v *View) string {
	var names []string
	for _, b := range v.Blockers {
		names = append(names, fmt.Sprintf("%s (%s)", blockerName(v, b), blockerPlace(v, b)))
	}
	slices.Sort(names)
	return format.List(slices.Compact(names))
}

func blockerName(v *View, b plan.Blocker) string {
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

func blockerPlace(v *View, b plan.Blocker) string {
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
func onlyOnNode(v *View, b plan.Blocker) bool {
	p := v.PodOf(b)
	return b.UUID == "" && p != nil && p.Claim == "" && (!p.InitHolds || v.ByDriver())
}

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

// chooseEvictions asks for the eviction of the pods that block the change, where the policy says so. Pods of DaemonSets
// and of the kubelet itself would come back at once: they stay, and are named. Whether a pod has a controller or an
// emptyDir volume makes no difference.
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
		switch {
		case p.Terminating:
		case p.ReturnsAtOnce():
			stay = append(stay, fmt.Sprintf("pod %s/%s, which would come back at once", p.Namespace, p.Name))
		case b.UUID == "" && !needsAllIdle(v):
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
				Why: evictionReason(v, b),
			})
		}
	}
	slices.SortFunc(evict, func(a, b action.Action) int { return strings.Compare(a.String(), b.String()) })
	slices.Sort(stay)
	return evict, stay
}

// evictionReason is the reason of an eviction.
func evictionReason(v *View, b plan.Blocker) string {
	if onlyOnNode(v, b) {
		return "it runs on " + blockerPlace(v, b)
	}
	return "it holds " + blockerPlace(v, b)
}

// needsAllIdle reports whether the change needs every GPU and every MIG instance of the node idle, so that a pod is in
// its way whichever of them the pod holds.
func needsAllIdle(v *View) bool {
	steps, whole := v.Steps, slices.Concat(v.EndingNVIDIAMPS(), managerClears(v))
	if v.Managed() {
		steps = plan.WithoutMIG(steps)
	}
	for _, d := range v.Devices {
		frees := func(instance int) bool {
			return OnlyRebootLeft(v) || slices.ContainsFunc(whole, func(o gpu.Device) bool { return o.UUID == d.UUID }) ||
				slices.ContainsFunc(steps, func(s plan.Step) bool { return plan.Blocks(s, d.UUID, instance) })
		}
		if !d.State.MIG && !frees(gpu.WholeGPU) || slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return !frees(i.ID) }) {
			return false
		}
	}
	return true
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

// justBoundPod is a pod that asks for a GPU and was bound to the node so recently that the agent may not have reported
// what it holds, and for how long it has been there.
func justBoundPod(v *View) (name string, age time.Duration) {
	for _, p := range v.Node.Pods {
		age := v.Snapshot.Now.Sub(p.Scheduled)
		if p.GPU && p.Claim == "" && !p.Terminating && !p.Scheduled.IsZero() && age < timing.ReportAfter && !podReported(v, p) {
			return p.Namespace + "/" + p.Name, age
		}
	}
	return "", 0
}

// podReported says whether the agent knows what a pod holds.
func podReported(v *View, p cluster.Pod) bool {
	for _, d := range v.Devices {
		holds := func(h gpu.Holder) bool { return h.Namespace == p.Namespace && h.Pod == p.Name }
		uses := func(u gpu.Process) bool { return u.PodUID != "" && u.PodUID == p.UID }
		if slices.ContainsFunc(d.Holders, holds) || slices.ContainsFunc(d.Processes, uses) {
			return true
		}
	}
	return false
}

// Blocker is a pod, or a process outside pods, that uses what a change needs to be idle, or a pod that blocks the
// reboot of its node.
type Blocker struct {
	// Name says who: "pod team/train", "process 4711 (python)".
	Name string
	// Uses says what of the node: "GPU 1", "GPU 0, instance 2g.10gb at 2:2", "the node, which must be rebooted".
	Uses string
	// Fate says what becomes of it: "is evicted".
	Fate string
}

// BlockersOf are the pods and processes that block the plan, each with what becomes of it.
func BlockersOf(v *View) []Blocker {
	users := make([]Blocker, 0, len(v.Blockers))
	for _, b := range v.Blockers {
		users = append(users, Blocker{Name: blockerUser(v, b), Uses: blockerPlace(v, b), Fate: FateOf(v, b)})
	}
	slices.SortFunc(users, func(a, b Blocker) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Uses, b.Uses))
	})
	return slices.Compact(users)
}

// blockerUser is NameOf without what is to be done about a process.
func blockerUser(v *View, b plan.Blocker) string {
	if v.PodOf(b) == nil && b.Holder == nil && b.Claim == "" {
		return fmt.Sprintf("process %d (%s)", b.Process.PID, b.Process.Name)
	}
	return blockerName(v, b)
}

// FateOf says what becomes of a blocker. It follows what evictions does.
func FateOf(v *View, b plan.Blocker) string {
	p := v.PodOf(b)
	switch {
	case b.Claim != "":
		return fateOfClaim(v, b.Claim)
	case p == nil && b.Holder == nil && b.Process.PodUID == "":
		return "is waited for; it runs outside pods, so end it on the node"
	case p != nil && p.Terminating:
		return "is ending already"
	case drainIsOver(v):
		return "is waited for, however long: the time for draining is over, and the node takes new pods"
	}
	switch mode := v.DrainMode(); {
	case mode == v1alpha1.DrainModeNever:
		return "is waited for, however long, while the node takes new pods (rollout.drain.mode Never)"
	case mode != v1alpha1.DrainModeEvict:
		return fmt.Sprintf("is waited for, up to %s (rollout.drain)", v.DrainTimeout())
	case p == nil:
		return "is gone already and is waited for"
	}
	return fateOfPod(v, b, p)
}

// fateOfClaim says what becomes of a ResourceClaim for which no pod of the node is known.
func fateOfClaim(v *View, name string) string {
	for _, c := range v.Node.Claims {
		if c.Name == name && len(c.Others) > 0 {
			others := make([]string, 0, len(c.Others))
			for _, o := range c.Others {
				others = append(others, o.String())
			}
			return fmt.Sprintf("is waited for; no pod of the node uses it, but it is reserved for %s. Delete that if its work is over", format.List(others))
		}
	}
	return "is waited for; no pod of the node uses it, so delete it unless one is to come"
}

// fateOfPod says what becomes of a pod where the policy says Evict.
func fateOfPod(v *View, b plan.Blocker, p *cluster.Pod) string {
	switch {
	case p.ReturnsAtOnce():
		return "is not evicted, since it would come back at once; end it yourself"
	case b.UUID == "" && !needsAllIdle(v):
		return "is not evicted, because nobody reports which GPU it holds, and the change does not need all of them"
	case comesBackByClaim(v, p) != "":
		return "is not evicted, because another would come by the same ResourceClaim, in spite of the DeviceTaintRule; scale its workload down"
	case returnsDespiteTaint(v, p):
		return "is not evicted, since another would come in spite of the taint; scale its workload down"
	}
	return "is evicted, as far as PodDisruptionBudgets allow"
}

// drainIsOver reports whether nobody is evicted or kept off any more, though the change still waits for its blockers.
func drainIsOver(v *View) bool {
	if v.FallsBack {
		return v.Taint() == nil
	}
	f := failedChange(v)
	return f != nil && f.Reason == v1alpha1.ReasonDrainTimedOut
}

// String tells who uses what, and what becomes of it.
func (u Blocker) String() string { return fmt.Sprintf("%s uses %s: %s", u.Name, u.Uses, u.Fate) }
