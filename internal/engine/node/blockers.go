// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Blocker is a pod, or a process outside pods, that uses what a change needs to be idle, or a pod that blocks the reboot of its node.
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
