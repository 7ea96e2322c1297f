// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package action

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/timing"
)

// mostRepeats is how often the same is written within an hour (patience) while no policy changes. A change and its way back write
// the same twice at most. What gives back (GivesBack) is written twice as often, so that a fight does not leave a node tainted.
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

// Begin forgets what is past, and everything if the policies have changed.
func (r *Repeats) Begin(policies string, now time.Time) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.policies != policies {
		r.policies, r.writes = policies, nil
	}
	for what, at := range r.writes {
		r.writes[what] = slices.DeleteFunc(at, func(t time.Time) bool { return now.Sub(t) >= timing.Patience })
	}
	maps.DeleteFunc(r.writes, func(_ string, at []time.Time) bool { return len(at) == 0 })
}

// Left is how long an action still has to wait; 0: it may be carried out.
func (r *Repeats) Left(a Action, now time.Time) time.Duration {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at, most := r.writes[sameness(a)], mostRepeats
	if GivesBack(a) {
		most *= 2 // what was taken before the taking had to wait is given back
	}
	if _, reports := a.(Report); reports {
		most *= 8 // the pods that block a drain end one by one
	}
	if len(at) < most {
		return 0
	}
	return max(at[0].Add(timing.Patience).Sub(now), time.Second)
}

// GivesBack reports whether an action lets a node take pods again, or resumes NVIDIA's clients.
func GivesBack(a Action) bool {
	patch, patches := a.(PatchNode)
	record, is := patch.Annotations[v1alpha1.AnnotationPaused]
	return Frees(a) || patches && is && record == nil
}

// Admit adds an action unless it has to wait, and is when to decide again.
func (r *Repeats) Admit(actions []Action, a Action, now time.Time, after time.Duration) ([]Action, time.Duration) {
	if left := r.Left(a, now); left > 0 {
		return actions, timing.Sooner(after, left)
	}
	return append(actions, a), after
}

// sameness is the same for actions that write the same to the same object, whenever they do. It is empty for those that have limits
// of their own: evictions, and triggers for the kubelet.
func sameness(a Action) string {
	switch a := a.(type) {
	case Evict, TriggerSync:
		return ""
	case WriteConfigs:
		return "keys"
	case PatchNode:
		return "patch " + a.Node + entries(a.Labels) + entries(a.Annotations)
	case SetSpec:
		return fmt.Sprintf("spec %s %s %s", a.Node, a.Why, a.Spec.ConfigName)
	case DeletePod: // one whose deletion is refused keeps no other from being deleted
		return fmt.Sprintf("delete pod %s %s", a.Node, a.Why)
	case Report:
		return fmt.Sprintf("report %s %s", a.Node, a.Why)
	case WriteClass:
		return "class " + a.Class.Name + " " + a.Class.Beside
	case DeleteClass:
		return "no class " + a.Name
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

// Unstamped is an action without the times in the values that it writes. Its text is the same in each pass, as a status must be that
// names it.
func Unstamped(a Action) Action {
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

// Frees reports whether an action makes the node schedulable again.
func Frees(a Action) bool {
	switch a.(type) {
	case Untaint, UntaintDevices:
		return true
	}
	return false
}
