// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// member is a node in the group that paces it.
type member struct {
	*view
	judgement
	slot
	settled *NodeState // its state, if that stands until something changes
	still   bool       // nothing is done about it until something changes: all that is said here stays the same
	brief   brief
	kept    kept
	tally   tally
	// unserved reports that a policy selects the node, but no policy can be honoured in this cluster.
	unserved bool
}

// tally is what impact and status count on a node.
type tally struct {
	demands []podDemand // of the pods of the node
	counts  []v1alpha1.ResourceCount
	single  map[string]bool // the resources of which a container gets no more than one
}

// lost is a node that a policy selects and another one governs.
type lost struct{ node, to string }

// group is the nodes that share the budget of one policy: those that it governs, and those that it releases, also once it is
// deleted.
type group struct {
	by      *v1alpha1.GPUSharingPolicy // nil: it is deleted
	members []*member                  // that it governs, by name
	leaving []*member                  // that it releases and that go back to their baselines, by name
	lost    []lost                     // by name
	idle    []*member                  // that nothing happens to
	// counted are nodes of other groups that hold a slot here too: another policy governs them now, and they are still tainted on
	// behalf of this one; or it is not known on whose behalf they are.
	counted []*member
	// awaited are nodes that the policy may turn out to govern once their agents have reported their GPUs.
	awaited []string
	// unrecorded is the number of nodes whose GPUNode does not say yet how this policy releases them.
	unrecorded int

	windows    calendar     // in which disruptive changes start
	invalid    error        // why the policy has no valid windows
	nextWindow *metav1.Time // for which some node waits

	failures int
	halted   bool
}

// pace turns what each node would do next into what it may do now.
func (g *group) pace(w *World) {
	for _, m := range g.members {
		if m.State == StateFailed {
			g.failures++
		}
	}
	g.halted = g.by != nil && g.failures >= int(max(g.by.Spec.Rollout.MaxFailures, 1))
	b := g.budget()
	for _, m := range g.order() {
		if len(m.start) == 0 && len(m.giveUp) == 0 {
			continue
		}
		reason, message := g.gate(w, m)
		if reason == "" {
			reason, message = b.goOn(m)
		}
		if reason != "" {
			m.wait(reason, message)
			continue
		}
		m.actions = append(m.actions, m.start...)
	}
}

// budget is what is left of the places for nodes that change at the same time.
type budget struct {
	places, left int
	proven       map[string]bool // configurations that some node of the group has reached
	others       int             // nodes that the policy is changing, without those that failed
	disturbed    int             // nodes that are kept from their users
	alone        bool            // one of them goes first with a new configuration
}

func (g *group) budget() *budget {
	b := &budget{places: g.places(), left: g.places(), proven: map[string]bool{}}
	last := "" // of thousands of nodes, most have the same
	for _, m := range g.members {
		if good := m.brief.configs[2]; good != last {
			last = good
			b.proven[last] = true
		}
	}
	for _, members := range [][]*member{g.members, g.leaving, g.idle} {
		for _, m := range members {
			b.spend(m)
		}
	}
	for _, m := range g.counted {
		if m.disturbs() {
			b.disturbed++
		}
		if m.disturbed() && m.holds {
			b.left--
		}
	}
	return b
}

// spend counts a node that holds a place.
func (b *budget) spend(m *member) {
	if m.disturbs() {
		b.disturbed++
	}
	if !m.holds {
		return
	}
	if m.State == StateFailed {
		b.left--
	} else {
		b.count(m)
	}
}

// disturbs reports whether a node counts among those that are kept from their users. One whose slot has expired counts until it is
// given back: the write that does that may fail, or come after the taint of the node that gets the slot.
func (m *member) disturbs() bool {
	return m.disturbed() && (m.holds || m.expired && slices.ContainsFunc(m.actions, givesBack))
}

func (b *budget) count(m *member) {
	b.left--
	if m.by == nil {
		return // it goes back to what it was and tries no configuration
	}
	b.others++
	b.alone = b.alone || b.unproven(m)
}

// unproven says whether no node has reached yet what this one is to get.
func (b *budget) unproven(m *member) bool { return m.wish != nil && !b.proven[m.wish.Config.Key] }

// goOn says why a node may not go on, if it may not. One that holds a place may, unless that would disturb more nodes than
// there are places: one whose slot had expired may hold one on top of them.
func (b *budget) goOn(m *member) (reason, message string) {
	taints := slices.ContainsFunc(m.start, func(a Action) bool { _, is := a.(Taint); return is })
	disturbs := taints && !m.disturbed() || m.disturbed() && !m.holds
	switch {
	case disturbs && b.disturbed >= b.places, taints && b.disturbed > b.places: // pauses that protect a node wait for no slot
		return b.full()
	case !m.holds:
		reason, message = b.take(m)
	}
	if reason == "" && disturbs {
		b.disturbed++
	}
	return reason, message
}

func (b *budget) full() (reason, message string) {
	return v1alpha1.ReasonWaitingForBudget, fmt.Sprintf("Waiting: rollout.maxUnavailable (%d) reached", b.places)
}

// take gives a node a place, or says why there is none.
func (b *budget) take(m *member) (reason, message string) {
	switch {
	case b.left <= 0:
		return b.full()
	case m.by != nil && b.alone || b.unproven(m) && b.others > 0:
		return v1alpha1.ReasonWaitingForFirst, "waiting until the first node with a new configuration has verified it"
	}
	b.count(m)
	return "", ""
}

// wait holds a node back.
func (m *member) wait(reason, message string) {
	m.actions = append(m.actions, m.giveUp...)
	m.untilExpired()
	m.reason = reason
	if m.message != "" {
		message += "; " + m.message
	}
	m.message = message
}

// order is the one in which nodes are taken: those that hold a slot first, then those that are rolled back, then those that are
// released, then by name.
func (g *group) order() []*member {
	order := make([]*member, 0, len(g.members)+len(g.leaving))
	for _, turn := range []func(*member) bool{
		func(m *member) bool { return m.holds },
		func(m *member) bool { return !m.holds && m.State == StateFailed },
		func(m *member) bool { return !m.holds && m.State != StateFailed },
	} {
		for _, nodes := range [][]*member{g.leaving, g.members} {
			for _, m := range nodes {
				if turn(m) {
					order = append(order, m)
				}
			}
		}
	}
	return order
}

// places is how many nodes may be changing at the same time.
func (g *group) places() int {
	all := len(g.members) + len(g.leaving)
	if g.by != nil {
		return scaled(g.by.Spec.Rollout.MaxUnavailable, all)
	}
	least := all
	for _, m := range g.leaving {
		least = min(least, scaled(m.rules().MaxUnavailable, all))
	}
	return max(least, 1)
}

// scaled is a number of nodes, or a percentage of them rounded up; at least 1.
func scaled(n *intstr.IntOrString, of int) int {
	if n == nil {
		return 1
	}
	places, err := intstr.GetScaledValueFromIntOrPercent(n, of, true)
	if err != nil {
		return 1
	}
	return max(places, 1)
}

func (m *member) waitsForManager() (reason, message string) {
	return v1alpha1.ReasonMIGManagerBusy, m.managerChanges() + "; the change waits for it"
}

// gate says why no change may start or go on at all on a node, whatever the budget.
func (g *group) gate(w *World, m *member) (reason, message string) {
	switch {
	case m.by == nil && m.managerKeepsUsOff():
		return m.waitsForManager()
	case m.by == nil:
		return "", "" // nothing else holds up the way back
	case g.invalid != nil:
		return v1alpha1.ReasonInvalidWindow, g.invalidWindow()
	case g.by.Spec.Rollout.Paused:
		return v1alpha1.ReasonPaused, "the rollout is paused; set rollout.paused to false to let it go on"
	case !w.Wiring.Ready && w.held() != "":
		return v1alpha1.ReasonMPSClientsRunning, "Waiting: " + w.held()
	case !w.Wiring.Ready:
		return v1alpha1.ReasonConfiguringDevicePlugin, cmp.Or(w.Wiring.Message, "NVIDIA's device plugin is being pointed at the operator's ConfigMap")
	case m.managerKeepsUsOff():
		return m.waitsForManager()
	case g.halted && m.State != StateFailed:
		return v1alpha1.ReasonRolloutHalted, fmt.Sprintf("the rollout is halted: %d of at most %d nodes failed (maxFailures); "+
			"look at those, then change the policy", g.failures, max(g.by.Spec.Rollout.MaxFailures, 1))
	}
	return g.outsideWindow(w, m)
}
