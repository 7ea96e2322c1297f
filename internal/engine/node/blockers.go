// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// The pods and processes that block a change are found and named. Which pods are evicted is decided in eviction.go.
//
//	steps, devices, pods, claims → addReported, addClaims, addUnreportedHolders → View.Blockers → BlockersOf, describeBlockers

// describeBlockers lists who uses what must be freed: pods once, other processes by name and PID.
func describeBlockers(v *View) string { return format.List(blockerNames(v)) }

// blockersIn is describeBlockers in so many characters, and their number where there is no room for one.
func blockersIn(v *View, most int) string {
	names := blockerNames(v)
	if text := format.ListIn(names, most); utf8.RuneCountInString(text) <= most || len(names) == 1 && most > 0 {
		return text
	}
	return fmt.Sprintf("%d users", len(names))
}

func blockerNames(v *View) []string {
	var names []string
	for _, b := range v.Blockers {
		names = append(names, fmt.Sprintf("%s (%s)", blockerName(v, b), blockerUse(v, b)))
	}
	slices.Sort(names)
	return slices.Compact(names)
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

func blockerUse(v *View, b plan.Blocker) string {
	at := slices.IndexFunc(v.Devices, func(d gpu.Device) bool { return d.UUID == b.UUID })
	if at < 0 {
		switch p := v.PodOf(b); {
		case p != nil && p.Claim != "":
			return "GPUs, by ResourceClaim " + p.Claim
		case b.Claim != "":
			return "GPUs that the node does not publish"
		case onlyOnNode(v, b):
			return "the node, which must be rebooted"
		case p != nil && !p.InitHolds:
			return "a GPU or instance that the agent has not reported yet"
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
	return emptiesNode(v) && b.UUID == "" && p != nil && p.Claim == "" && (!p.InitHolds || v.ByClaims())
}

// Blocker is a pod, or a process outside pods, that uses what a change needs to be idle, or a pod that blocks the
// reboot of its node.
type Blocker struct {
	// Name says who: "pod team/train", "process 4711 (python)".
	Name string
	// Uses says what of the node: "GPU 1", "GPU 0, instance 2g.10gb at 2:2", "the node, which must be rebooted".
	Uses string
	// Handling says what becomes of it: "is evicted".
	Handling string
}

// BlockersOf are the pods and processes that block the plan, each with what becomes of it.
func BlockersOf(v *View) []Blocker {
	users := make([]Blocker, 0, len(v.Blockers))
	for _, b := range v.Blockers {
		users = append(users, Blocker{Name: blockerUser(v, b), Uses: blockerUse(v, b), Handling: HandlingOf(v, b)})
	}
	slices.SortFunc(users, func(a, b Blocker) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Uses, b.Uses))
	})
	return slices.Compact(users)
}

// blockerUser is blockerName without what is to be done about a process.
func blockerUser(v *View, b plan.Blocker) string {
	if v.PodOf(b) == nil && b.Holder == nil && b.Claim == "" {
		return fmt.Sprintf("process %d (%s)", b.Process.PID, b.Process.Name)
	}
	return blockerName(v, b)
}

// HandlingOf says what becomes of a blocker. It follows chooseEvictions.
func HandlingOf(v *View, b plan.Blocker) string {
	p := v.PodOf(b)
	switch {
	case b.Claim != "":
		return claimHandling(v, b.Claim)
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
	return cmp.Or(stays(v, b, p), "is evicted, as far as PodDisruptionBudgets allow")
}

// claimHandling says what becomes of a ResourceClaim for which no pod of the node is known.
func claimHandling(v *View, name string) string {
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

// drainIsOver reports whether nobody is evicted or kept off any more, though the change still waits for its blockers.
func drainIsOver(v *View) bool {
	if v.FallsBack {
		return v.Taint() == nil
	}
	f := recordedFailure(v)
	return f != nil && f.Reason == v1alpha1.ReasonDrainTimedOut
}

// String tells who uses what, and what becomes of it.
func (u Blocker) String() string { return fmt.Sprintf("%s uses %s: %s", u.Name, u.Uses, u.Handling) }

// addOtherPods adds the pods that hold no GPU. Those that would come back at once, and the operator's own, go down with
// the node.
func addOtherPods(v *View) {
	known := map[*cluster.Pod]bool{} // a node may have hundreds of pods
	for _, b := range v.Blockers {
		known[v.PodOf(b)] = true
	}
	for i := range v.Node.Pods {
		if p := &v.Node.Pods[i]; !p.ReturnsAtOnce() && !p.Own && !known[p] {
			addBlocker(v, unknownUse(p))
		}
	}
}

// unknownUse is a pod as a blocker of which no agent reports that it uses a GPU.
func unknownUse(p *cluster.Pod) plan.Blocker {
	return plan.Blocker{Holder: &gpu.Holder{Namespace: p.Namespace, Pod: p.Name, Instance: gpu.WholeGPU}, Instance: gpu.WholeGPU}
}

// addUnreportedHolders adds the pods of which an init container, or a ResourceClaim, holds a GPU: which one, nobody
// reports.
func addUnreportedHolders(v *View) {
	if v.ByClaims() {
		addClaims(v)
		return
	}
	for i := range v.Node.Pods {
		if p := &v.Node.Pods[i]; p.InitHolds && (!podReported(v, p) || reportedOf(v, p) < asksFor(p)) || p.Claim != "" && !podBlocks(v, p) {
			addBlocker(v, unknownUse(p))
		}
	}
}

// addClaims adds who has devices of the node by ResourceClaims: pods, also those whose containers have not started yet,
// and claims that no pod of the node uses as yet. A device that the node does not publish counts as any of its GPUs,
// until NVIDIA's DRA driver publishes all that is there: then it is gone.
func addClaims(v *View) {
	gone := len(v.Node.Published.Differs(v.Node.GPU.Status.Devices, 0)) == 0
	for _, c := range v.Node.Claims {
		for _, device := range c.Of(v.Node.Name) {
			uuid, instance, known := v.Node.Published.Locate(device, v.Node.GPU.Status.Devices)
			if known && !OnlyRebootLeft(v) && !claimBlocks(v, c, uuid, instance) {
				continue
			}
			for _, b := range claimants(v, c) {
				if b.Instance = instance; known {
					b.UUID = uuid
				} else if gone && v.PodOf(b) != nil && v.PodOf(b).Starting {
					continue // it cannot start, so it has nothing that the change could take away
				}
				if b.Claim != "" || !podBlocks(v, v.PodOf(b)) {
					addBlocker(v, b)
				}
			}
		}
	}
}

// claimBlocks reports whether who has an instance by a claim blocks a step. While no container has it yet the agent does not know of it, which chooses what it
// destroys: for pods that wait it destroys nothing of that GPU.
func claimBlocks(v *View, c dra.Claim, uuid string, instance int) bool {
	started := slices.ContainsFunc(v.Node.Pods, func(p cluster.Pod) bool { return p.Has(c) && !p.Starting })
	return slices.ContainsFunc(v.Steps, func(s plan.Step) bool {
		return podBlocksStep(s, v, uuid, instance) || v.ForDemand && !started && destroysInstance(s) && s.Device() == uuid
	})
}

// podBlocksStep reports whether who uses an instance blocks a step. If only the GPU is known, any of its instances may
// be the one.
func podBlocksStep(s plan.Step, v *View, uuid string, instance int) bool {
	if plan.Blocks(s, uuid, instance) {
		return true
	}
	at := slices.IndexFunc(v.Devices, func(d gpu.Device) bool { return d.UUID == uuid })
	return at >= 0 && v.Devices[at].State.MIG && instance == gpu.WholeGPU &&
		slices.ContainsFunc(v.Devices[at].State.Instances, func(i gpu.Instance) bool { return plan.Blocks(s, uuid, i.ID) })
}

// claimants are the pods of the node for which a claim is reserved, or the claim itself if there are none.
func claimants(v *View, c dra.Claim) []plan.Blocker {
	var all []plan.Blocker
	for i := range v.Node.Pods {
		if p := &v.Node.Pods[i]; p.Has(c) {
			all = append(all, unknownUse(p))
		}
	}
	if len(all) == 0 {
		return []plan.Blocker{{Claim: c.Name, Instance: gpu.WholeGPU}}
	}
	return all
}

func podBlocks(v *View, p *cluster.Pod) bool {
	return slices.ContainsFunc(v.Blockers, func(b plan.Blocker) bool { return v.PodOf(b) == p })
}

// addUsers adds all who use a GPU or one of its instances.
func addUsers(v *View, d gpu.Device) {
	for i := range d.Processes {
		if !d.Processes[i].MPSServer {
			addBlocker(v, plan.Blocker{UUID: d.UUID, Instance: d.Processes[i].Instance, Process: &d.Processes[i]})
		}
	}
	for i := range d.Holders {
		addReported(v, plan.Blocker{UUID: d.UUID, Instance: d.Holders[i].Instance, Holder: &d.Holders[i]})
	}
}

// addReported adds a blocker that the agent reports, unless it holds nothing.
func addReported(v *View, b plan.Blocker) {
	if p := v.PodOf(b); b.Holder == nil || p == nil || !monitors(v, p) {
		addBlocker(v, b)
	}
}

func addBlocker(v *View, b plan.Blocker) {
	if p := v.PodOf(b); p != nil && p.Validator && v.ByGPUOperator() && v.Closes() {
		return // it is deleted with NVIDIA's other operands
	}
	known := func(o plan.Blocker) bool {
		return o.UUID == b.UUID && o.Claim == b.Claim && samePointee(o.Process, b.Process) && samePointee(o.Holder, b.Holder)
	}
	if !slices.ContainsFunc(v.Blockers, known) {
		v.Blockers = append(v.Blockers, b)
	}
}

// monitors reports whether all devices of the node that a pod has are by ResourceClaims with adminAccess, by which
// nothing is held. The agent reports its containers as users until it has such claims in its spec.
func monitors(v *View, p *cluster.Pod) bool {
	watches := false
	for _, c := range v.Node.Claims {
		switch {
		case !p.Has(c):
		case len(c.Of(v.Node.Name)) > 0:
			return false
		case isAdmins(c, v.Node):
			watches = true
		}
	}
	return watches
}

func samePointee[T comparable](a, b *T) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}
