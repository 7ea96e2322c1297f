// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

// User is a pod, or a process outside pods, that uses what a change needs to be idle.
type User struct {
	// Name says who: "pod team/train", "process 4711 (python)".
	Name string
	// Uses says what of the node: "GPU 1", "GPU 0, instance 2g.10gb at 2:2".
	Uses string
	// Fate says what becomes of it: "is evicted".
	Fate string
}

// users are those in the way of the plan, each with what becomes of it.
func (v *view) users() []User {
	users := make([]User, 0, len(v.blockers))
	for _, b := range v.blockers {
		users = append(users, User{Name: v.userOf(b), Uses: v.placeOf(b), Fate: v.fateOf(b)})
	}
	slices.SortFunc(users, func(a, b User) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Uses, b.Uses))
	})
	return slices.Compact(users)
}

// userOf is nameOf without what is to be done about a process.
func (v *view) userOf(b plan.Blocker) string {
	if v.podOf(b) == nil && b.Holder == nil {
		return fmt.Sprintf("process %d (%s)", b.Process.PID, b.Process.Name)
	}
	return v.nameOf(b)
}

// fateOf says what becomes of a blocker. It follows what evictions does.
func (v *view) fateOf(b plan.Blocker) string {
	p := v.podOf(b)
	switch {
	case p == nil && b.Holder == nil && b.Process.PodUID == "":
		return "is waited for; it runs outside pods, so end it on the node"
	case p != nil && p.Terminating:
		return "is ending already"
	}
	switch mode := v.drainMode(); {
	case mode == v1alpha1.DrainModeNever:
		return "is waited for, however long, while the node takes new pods (rollout.drain.mode Never)"
	case mode != v1alpha1.DrainModeEvict:
		return fmt.Sprintf("is waited for, up to %s (rollout.drain)", v.drainTimeout())
	case p == nil:
		return "is gone already and is waited for"
	case stays(p):
		return "is not evicted, since it would come back at once; end it yourself"
	case b.UUID == "" && !v.freesAll():
		return "is not evicted, because nobody reports which GPU it holds, and the change does not need all of them"
	case v.returns(p):
		return "is not evicted, since another would come in spite of the taint; scale its workload down"
	}
	return "is evicted, as far as PodDisruptionBudgets allow"
}

// String tells who uses what, and what becomes of it.
func (u User) String() string { return fmt.Sprintf("%s uses %s: %s", u.Name, u.Uses, u.Fate) }

// foretold are the users in the way, as the status of the policy lists them.
func (m *member) foretold() []string {
	const most, length = 16, 512 // of the schema
	var lines []string
	for _, u := range m.users() {
		if len(lines) < most {
			lines = append(lines, cut(u.String(), length))
		}
	}
	return lines
}
