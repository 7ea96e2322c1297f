// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// mostRepeats is how often the same is written within an hour (patience) while no policy changes. A change and its way back write
// the same twice at most. What gives back (givesBack) is written twice as often, so that a fight does not leave a node tainted.
const mostRepeats = 8

// Repeats counts what was written, so that no fight with another controller goes on without end: what was written mostRepeats times
// within an hour waits until that hour is over. It is kept by the program that carries decisions out, and is lost with it. The zero
// value has counted nothing. Note may be called by several goroutines.
type Repeats struct {
	mu       sync.Mutex
	policies string // the signature of the policies; others begin anew
	writes   map[string][]time.Time
}

// Note counts an action that was carried out.
func (r *Repeats) Note(a Action, now time.Time) {
	what := sameness(a)
	if what == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.writes == nil {
		r.writes = map[string][]time.Time{}
	}
	r.writes[what] = append(r.writes[what], now)
}

// begin forgets what is past, and everything if the policies have changed.
func (r *Repeats) begin(policies string, now time.Time) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.policies != policies {
		r.policies, r.writes = policies, nil
	}
	for what, at := range r.writes {
		r.writes[what] = slices.DeleteFunc(at, func(t time.Time) bool { return now.Sub(t) >= patience })
	}
	maps.DeleteFunc(r.writes, func(_ string, at []time.Time) bool { return len(at) == 0 })
}

// left is how long an action still has to wait; 0: it may be carried out.
func (r *Repeats) left(a Action, now time.Time) time.Duration {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at, most := r.writes[sameness(a)], mostRepeats
	if givesBack(a) {
		most *= 2 // what was taken before the taking had to wait is given back
	}
	if _, reports := a.(Report); reports {
		most *= 8 // the pods that block a drain end one by one
	}
	if len(at) < most {
		return 0
	}
	return max(at[0].Add(patience).Sub(now), time.Second)
}

// givesBack reports whether an action lets a node take pods again, or resumes NVIDIA's clients.
func givesBack(a Action) bool {
	patch, patches := a.(PatchNode)
	record, is := patch.Annotations[v1alpha1.AnnotationPaused]
	return frees(a) || patches && is && record == nil
}

// admit adds an action unless it has to wait, and is when to decide again.
func (r *Repeats) admit(actions []Action, a Action, now time.Time, after time.Duration) ([]Action, time.Duration) {
	if left := r.left(a, now); left > 0 {
		return actions, Sooner(after, left)
	}
	return append(actions, a), after
}

// sameness is the same for actions that write the same to the same object, whenever they do. It is empty for those that have limits
// of their own: evictions, and triggers for the kubelet.
func sameness(a Action) string {
	switch a := a.(type) {
	case Evict, Nudge:
		return ""
	case WriteKeys:
		return "keys"
	case PatchNode:
		return "patch " + a.Node + entries(a.Labels) + entries(a.Annotations)
	case SetSpec:
		return fmt.Sprintf("spec %s %s %s", a.Node, a.Why, a.Spec.ConfigName)
	case Report:
		return fmt.Sprintf("report %s %s", a.Node, a.Why)
	}
	return fmt.Sprintf("%T %s", a, a.Target())
}

// entries lists labels or annotations without the times in their values.
func entries(of map[string]*string) string {
	var list strings.Builder
	for _, name := range slices.Sorted(maps.Keys(of)) {
		list.WriteString(" " + name)
		if of[name] != nil {
			list.WriteString("=" + untimed(*of[name]))
		}
	}
	return list.String()
}

func untimed(value string) string {
	value, _, _ = strings.Cut(value, "@")
	return value
}

// unstamped is an action without the times in the values that it writes. Its text is the same in each pass, as a status must be that
// names it.
func unstamped(a Action) Action {
	patch, patches := a.(PatchNode)
	if !patches {
		return a
	}
	of := patch.Annotations
	patch.Annotations = make(map[string]*string, len(of))
	for name, value := range of {
		if value != nil {
			value = new(untimed(*value))
		}
		patch.Annotations[name] = value
	}
	return patch
}

// withhold leaves out what was written too often, and reports that.
func (m *member) withhold(w *World) {
	var kept []Action
	var held Action
	policyTaints, startup := false, false // of a held action: changes taints for a policy, and takes the startup taint off
	for _, a := range m.actions {
		left := w.Repeats.left(a, w.Now)
		if left == 0 {
			kept = append(kept, a)
			continue
		}
		held, m.after = a, Sooner(m.after, left)
		keep, keeps := a.(KeepTaints)
		policyTaints = policyTaints || keeps
		startup = startup || keeps && !slices.ContainsFunc(keep.Want, isStartup)
	}
	if held == nil {
		return
	}
	m.actions, m.reason, m.settled = kept, v1alpha1.ReasonChangedByOthers, nil
	m.message = strings.TrimSuffix(fmt.Sprintf("Another controller undoes again and again what the operator writes (%s). The operator "+
		"waits until %s. Find the other controller: kubectl get node %s --show-managed-fields -o yaml; %s",
		unstamped(held), clock(w.Now.Add(m.after)), m.node.Name, m.message), "; ")
	if !policyTaints {
		return
	}
	m.kept.reason, m.kept.message = m.reason, m.message
	if machine, has := m.node.Annotations[AnnotationMachine], m.startingUp(); machine != "" && has != nil && startup {
		m.kept.reason = v1alpha1.ReasonStartupTaintInMachineSet
		m.kept.message = fmt.Sprintf("OpenShift puts the taint %s back again and again, so no pod starts there. Remove it from "+
			"spec.template.spec.taints of the MachineSet of Machine %s, and from spec.taints of that Machine. The operator itself adds a startup taint to new nodes",
			nameOf(*has), machine)
		m.message = m.kept.message
	}
}
