// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

// podOf is the pod of a blocker; nil if it has none, or one that is gone already.
func (v *view) podOf(b plan.Blocker) *Pod {
	at := slices.IndexFunc(v.node.Pods, func(p Pod) bool {
		if b.Holder != nil {
			return p.Namespace == b.Holder.Namespace && p.Name == b.Holder.Pod
		}
		return b.Process.PodUID != "" && p.UID == b.Process.PodUID
	})
	if at < 0 {
		return nil
	}
	return &v.node.Pods[at]
}

// inTheWay lists who uses what must be freed: pods once, other processes by name and PID.
func (v *view) inTheWay() string {
	var names []string
	for _, b := range v.blockers {
		names = append(names, fmt.Sprintf("%s (%s)", v.nameOf(b), v.placeOf(b)))
	}
	slices.Sort(names)
	return list(slices.Compact(names))
}

func (v *view) nameOf(b plan.Blocker) string {
	switch p := v.podOf(b); {
	case p != nil:
		return fmt.Sprintf("pod %s/%s", p.Namespace, p.Name)
	case b.Holder != nil:
		return fmt.Sprintf("pod %s/%s", b.Holder.Namespace, b.Holder.Pod)
	case b.Process.PodUID != "":
		return fmt.Sprintf("process %d (%s) of a pod that is gone", b.Process.PID, b.Process.Name)
	}
	return fmt.Sprintf("process %d (%s), which runs outside pods and has to be ended there", b.Process.PID, b.Process.Name)
}

func (v *view) placeOf(b plan.Blocker) string {
	at := slices.IndexFunc(v.have, func(d gpu.Device) bool { return d.UUID == b.UUID })
	if at < 0 {
		if p := v.podOf(b); p != nil && p.Claim != "" {
			return "GPUs, by ResourceClaim " + p.Claim
		}
		return "a GPU, by an init container"
	}
	place := fmt.Sprintf("GPU %d", v.have[at].Index)
	for _, i := range v.have[at].State.Instances {
		if i.ID == b.Instance {
			return fmt.Sprintf("%s, instance %s at %s", place, i.Profile, i.Placement)
		}
	}
	return place
}

// refusals are why the API server does not evict pods in the way.
func (v *view) refusals() []string {
	var refused []string
	for _, b := range v.blockers {
		if p := v.podOf(b); p != nil && p.Refused != "" && !p.Terminating {
			refused = append(refused, p.Refused)
		}
	}
	slices.Sort(refused)
	return slices.Compact(refused)
}

// evictions asks for the eviction of the pods in the way, where the policy says so. Pods of daemon sets and of the
// kubelet itself would come back at once: they stay, and are named.
func (v *view) evictions() (evict []Action, stay []string) {
	if v.drainMode() != "Evict" {
		return nil, nil
	}
	seen := map[string]bool{}
	for _, b := range v.blockers {
		p := v.podOf(b)
		if p == nil || seen[p.UID] {
			continue
		}
		seen[p.UID] = true
		switch {
		case p.Terminating:
		case stays(p):
			stay = append(stay, fmt.Sprintf("pod %s/%s, which would come back at once", p.Namespace, p.Name))
		case b.UUID == "" && !v.freesAll():
			stay = append(stay, fmt.Sprintf("pod %s/%s, because nobody reports which GPU it holds, and the change does not need all of them",
				p.Namespace, p.Name))
		case v.returns(p):
			stay = append(stay, fmt.Sprintf("pod %s/%s, which came to the node in spite of the taint, as another would after it; "+
				"scale its workload down", p.Namespace, p.Name))
		default:
			evict = append(evict, Evict{
				Node: v.node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Policy: v.ref(),
				Why: "it holds " + v.placeOf(b),
			})
		}
	}
	slices.SortFunc(evict, func(a, b Action) int { return strings.Compare(a.String(), b.String()) })
	slices.Sort(stay)
	return evict, stay
}

// stays says whether eviction would not help: a DaemonSet, or the kubelet itself, brings the pod back at once.
func stays(p *Pod) bool { return p.Mirror || p.Controller == "DaemonSet" }

// freesAll reports whether the change needs every GPU and every MIG instance of the node idle, so that a pod is in its way whichever of
// them the pod holds.
func (v *view) freesAll() bool {
	steps, whole := v.steps, slices.Concat(v.leavesNVIDIA(), v.cleared())
	if v.managed() {
		steps = plan.WithoutMIG(steps)
	}
	for _, d := range v.have {
		frees := func(instance int) bool {
			return v.reboots() || slices.ContainsFunc(whole, func(o gpu.Device) bool { return o.UUID == d.UUID }) ||
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

// returns reports whether a pod came to the node in spite of the operator's taint: it tolerates every taint, or its author
// names the node. Another one would take its place at once, so to evict it frees nothing.
func (v *view) returns(p *Pod) bool {
	t := v.taint()
	if t == nil || t.TimeAdded == nil || p.Scheduled.IsZero() {
		return false
	}
	after := p.Scheduled.Sub(t.TimeAdded.Time)
	return after > raceTime || p.Tolerates && after > 0
}

// justBound is a pod that asks for a GPU and was bound to the node so recently that the agent may not have reported what
// it holds, and for how long it has been there.
func (v *view) justBound() (name string, age time.Duration) {
	for _, p := range v.node.Pods {
		age := v.world.Now.Sub(p.Scheduled)
		if p.GPU && !p.Terminating && !p.Scheduled.IsZero() && age < reportAfter && !v.reported(p) {
			return p.Namespace + "/" + p.Name, age
		}
	}
	return "", 0
}

// reported says whether the agent knows what a pod holds.
func (v *view) reported(p Pod) bool {
	for _, d := range v.have {
		holds := func(h gpu.Holder) bool { return h.Namespace == p.Namespace && h.Pod == p.Name }
		uses := func(u gpu.Process) bool { return u.PodUID != "" && u.PodUID == p.UID }
		if slices.ContainsFunc(d.Holders, holds) || slices.ContainsFunc(d.Processes, uses) {
			return true
		}
	}
	return false
}

// list joins names for a message, the first few of many.
func list(names []string) string {
	const most = 8
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}
