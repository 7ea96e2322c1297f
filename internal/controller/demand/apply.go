// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// In mode Apply, what is decided of a GPU is written into status.demand of its GPUNode, which the rollout's desired state follows. Of each entry:
//
//	decided ─ begun (in spec.devices, or the node is tainted) ─ reached ─ rests again: removed after demand.Hold
//	   └ not begun within beginsIn, or blocked, or failed: what the node had last is decided anew; after a failure a back-off follows,
//	     which is twice as long each time until there was none for as long as forgotten

const (
	// beginsIn is how long a change that was decided may take to begin: the rollout of the policy, or its budget, may come before it.
	beginsIn = 20 * time.Second
)

// follow gives a GPU what was decided of it before, and notes what of that still holds. A GPU of which a change is under way counts as what it will
// have, so that nothing is made twice for the pods that wait for it.
func (r *review) follow(p *v1alpha1.GPUSharingPolicy, n *cluster.Node, d *gpu.Device, g *demand.GPU, now time.Time) {
	r.holdsBudget(n)
	e, found := decidedOf(p, n, d, now)
	if !found {
		return
	}
	g.Changed = changed(n, e)
	is := plan.ByProfile(plan.Observed(*d).Instances)
	switch reached := maps.Equal(is, plan.ByProfile(e.Instances)) && !g.Frozen; {
	case reached && e.FirstPod != "" && e.Failures > 0:
		e.Failures = 0
	case reached && now.Before(backOff(e)):
		g.Frozen = true
		r.look(backOff(e))
	case reached && maps.Equal(is, g.Resting):
		rests := timing.Latest(e.SinceTime.Add(demand.Hold), backOff(e).Add(forgotten))
		if !now.Before(rests) {
			return
		}
		r.look(rests)
	case reached:
	default:
		r.making = r.making || !maps.Equal(is, plan.ByProfile(e.Instances))
		e = r.underWay(n, d, g, e, now)
	}
	r.decided[n.Name] = append(r.decided[n.Name], e)
}

// holdsBudget leaves no other node a turn while one changes, unless that is lost.
func (r *review) holdsBudget(n *cluster.Node) {
	if n.TakesNoNewPods() && !n.IsLost() {
		r.pool.Budget = 0
	}
}

// changed is when a GPU was changed last for pods that wait: what was decided and never begun changed nothing.
func changed(n *cluster.Node, e v1alpha1.GPUDemand) time.Time {
	if n.GPU.Spec.ChangeTime.Before(&e.SinceTime) {
		return n.GPU.Spec.ChangeTime.Time
	}
	return e.SinceTime.Time
}

// decidedOf is what was decided of a GPU before, if the policy still lets it have that.
func decidedOf(p *v1alpha1.GPUSharingPolicy, n *cluster.Node, d *gpu.Device, now time.Time) (e v1alpha1.GPUDemand, found bool) {
	for _, e := range n.GPU.Status.Demand {
		if e.UUID == d.UUID {
			if e.SinceTime.After(now) { // the clock was set back
				e.SinceTime = metav1.NewTime(now.Truncate(time.Second))
			}
			return e, policy.Admits(p, *d, e.Instances)
		}
	}
	return e, false
}

// backOff is until when a GPU is left as it is because its last change failed.
func backOff(e v1alpha1.GPUDemand) time.Time {
	if e.Failures == 0 {
		return time.Time{}
	}
	return e.SinceTime.Add(doubled(int(e.Failures)))
}

// underWay is what becomes of a change that is not done yet.
func (r *review) underWay(n *cluster.Node, d *gpu.Device, g *demand.GPU, e v1alpha1.GPUDemand, now time.Time) v1alpha1.GPUDemand {
	g.Frozen, g.Withheld = true, true
	last := lastOf(n, d.UUID)
	will, err := plan.Want(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: e.Instances}, *d)
	asked := slices.ContainsFunc(n.GPU.Spec.Devices, func(s v1alpha1.DeviceSpec) bool {
		return s.UUID == d.UUID && maps.Equal(plan.ByProfile(s.Sharing.Instances), plan.ByProfile(e.Instances))
	})
	blocked := r.takesUsed(n, d, will, asked)
	failed := failedSince(n, e)
	late := !asked && !n.TakesNoNewPods() && !now.Before(e.SinceTime.Add(beginsIn))
	drops := last != nil && !maps.Equal(plan.ByProfile(last), plan.ByProfile(e.Instances))
	switch {
	case drops && (err != nil || failed || late || blocked):
		e.Instances, e.FirstPod = last, ""
		if failed || late { // what holds it up, such as a window, does so for longer
			e.Failures, e.SinceTime = e.Failures+1, metav1.NewTime(now.Truncate(time.Second))
		}
	case err == nil:
		g.Instances = nil
		for _, i := range will.Instances {
			g.Instances = append(g.Instances, demand.Instance{Instance: i, Holder: holderAt(d, i)})
		}
	}
	if !asked {
		r.look(now.Add(beginsIn))
	}
	return e
}

// failedSince reports whether a change of a node has failed since one of its GPUs was decided to change.
func failedSince(n *cluster.Node, e v1alpha1.GPUDemand) bool {
	f := n.GPU.Status.Rollout.Failed
	return f != nil && !f.Time.Before(&e.SinceTime)
}

// takesUsed reports whether a GPU that is to have other instances would lose one in use or, while the agent has not been asked for them, more than have been
// idle for long enough: a pod may have been given one that was to go.
func (r *review) takesUsed(n *cluster.Node, d *gpu.Device, will gpu.State, asked bool) bool {
	goes := func(i gpu.Instance) bool {
		return !slices.ContainsFunc(will.Instances, func(w gpu.Instance) bool { return w.Placement == i.Placement && w.Profile == i.Profile })
	}
	used := func(i gpu.Instance) bool { return d.InUse(i.ID) && goes(i) }
	return slices.ContainsFunc(d.State.Instances, used) || !asked && plan.UsedLately(d, goes, n.IdleSince(), r.pool.Idle, r.now)
}

// holderAt names who has the instance of a GPU at the place of one that it is to have; empty: nobody.
func holderAt(d *gpu.Device, at gpu.Instance) string {
	for _, i := range d.State.Instances {
		if i.Placement == at.Placement {
			return holderOf(d, i.ID)
		}
	}
	return ""
}

// lastOf are the instances of a GPU in the last good state of its node; nil: there is none.
func lastOf(n *cluster.Node, uuid string) []v1alpha1.InstanceCount {
	if good := n.GPU.Status.Rollout.LastGood; good != nil {
		for _, d := range good.Devices {
			if d.UUID == uuid {
				return d.Sharing.Instances
			}
		}
	}
	return nil
}

// record notes what is decided now. While the rollout is paused, or has not seen the policy as it is, nothing is begun.
func (r *review) record(p *v1alpha1.GPUSharingPolicy, now time.Time) (begins bool) {
	if !r.applies || r.paused {
		return false
	}
	if p.Status.ObservedGeneration != p.Generation {
		r.look(now.Add(beginsIn)) // that the rollout has seen it wakes nobody
		return false
	}
	for _, change := range r.decision.Changes {
		at := slices.IndexFunc(r.pool.GPUs, func(g demand.GPU) bool { return g.Node == change.Node && g.UUID == change.UUID })
		var instances []gpu.Instance
		for _, i := range r.pool.GPUs[at].Instances {
			if !slices.ContainsFunc(change.Destroy, func(o gpu.Instance) bool { return o.Placement == i.Placement }) {
				instances = append(instances, i.Instance)
			}
		}
		e := v1alpha1.GPUDemand{UUID: change.UUID, Instances: counted(append(instances, change.Create...)), SinceTime: metav1.NewTime(now.Truncate(time.Second))}
		if len(change.Classes) > 0 {
			pod := r.pods[change.Classes[0]][0]
			e.FirstPod = pod.Namespace + "/" + pod.Name
		}
		entries := r.decided[change.Node]
		if was := slices.IndexFunc(entries, func(o v1alpha1.GPUDemand) bool { return o.UUID == e.UUID }); was >= 0 {
			e.Failures = entries[was].Failures
			entries[was] = e
		} else {
			entries = append(entries, e)
		}
		r.decided[change.Node] = entries
		r.look(now.Add(beginsIn))
	}
	return true
}
