// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package action

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// mostRepeats is how often the same is written within an hour (timing.Patience) while no policy changes. A change and
// its way back write the same twice at most. What restores scheduling (RestoresScheduling) is written twice as often,
// so that a fight does not leave a node tainted.
const mostRepeats = 8

// mostReturns is how often within an hour a field gets one value again though the operator itself writes others between:
// once in a minute. What the operator decides by changes as often then, and each time it writes to the API server.
const mostReturns = 60

// Repeats counts what was written, so that no fight with another controller goes on without end: what was written
// mostRepeats times within an hour waits until that hour is over. Once the operator itself has written another value to
// a field, the count of that field begins anew, up to mostReturns, and so it does on another Node of the same name. It is kept by the program
// that carries decisions out, and is lost with it. The zero value has counted nothing. Note may be called by several
// goroutines.
type Repeats struct {
	mu       sync.Mutex
	policies string // the signature of the policies; others begin anew
	fields   map[string]written
	refused  map[string]refused
}

// RefusedAgain is how long the operator waits before it writes again what the API server has refused: nothing tells when
// an admission webhook, a policy or a right changes.
const RefusedAgain = time.Minute

// refused is the value of a field that the API server refused, and why.
type refused struct {
	value, why string
	at         time.Time
}

// written is the value that the operator wrote to a field last, and when: each time since it wrote another one.
type written struct {
	value   string
	at      []time.Time
	returns map[uint64]returned // by the hash of each value of the last hour
}

// returned is how often a field got a value since a time.
type returned struct {
	times int
	since time.Time
}

func hashOf(value string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(value))
	return h.Sum64()
}

// Note counts an action that was carried out.
func (r *Repeats) Note(a Action, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fields == nil {
		r.fields = map[string]written{}
	}
	for field, value := range valuesOf(a) {
		delete(r.refused, field)
		last := r.fields[field]
		if last.value != value {
			last.value, last.at = value, nil
		}
		last.at = append(last.at, now)
		if last.returns == nil {
			last.returns = map[uint64]returned{}
		}
		of := last.returns[hashOf(value)]
		if of.since.IsZero() {
			of.since = now
		}
		of.times++
		last.returns[hashOf(value)] = of
		r.fields[field] = last
	}
}

// Refuse notes that the API server refused an action, and why. It waits for RefusedAgain, so that a node whose writes are
// refused takes no turn of others. WriteConfigs does not wait, because other writes wait for it.
func (r *Repeats) Refuse(a Action, why string, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refused == nil {
		r.refused = map[string]refused{}
	}
	for field, value := range valuesOf(a) {
		r.refused[field] = refused{value: value, why: why, at: now}
	}
}

// Refusal is why the API server refused an action when it was last tried; empty: it did not.
func (r *Repeats) Refusal(a Action) string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for field, value := range valuesOf(a) {
		if last := r.refused[field]; last.value == value {
			return last.why
		}
	}
	return ""
}

// Unreported is why the API server refused the last report about a node; empty: it did not.
func (r *Repeats) Unreported(node string) string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused[reportField+" "+node].why
}

// Undid notes that the operator itself undoes what an action wrote, otherwise than by an action.
func (r *Repeats) Undid(a Action) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for field := range valuesOf(a) {
		delete(r.fields, field)
	}
}

// Begin forgets what is past, and everything if the policies have changed.
func (r *Repeats) Begin(policies string, now time.Time) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.policies != policies {
		r.policies, r.fields, r.refused = policies, nil, nil
	}
	maps.DeleteFunc(r.refused, func(_ string, last refused) bool { return now.Sub(last.at) >= timing.Patience })
	for field, last := range r.fields {
		last.at = slices.DeleteFunc(last.at, func(t time.Time) bool { return now.Sub(t) >= timing.Patience })
		maps.DeleteFunc(last.returns, func(_ uint64, of returned) bool { return now.Sub(of.since) >= timing.Patience })
		r.fields[field] = last
	}
	maps.DeleteFunc(r.fields, func(_ string, last written) bool { return len(last.at)+len(last.returns) == 0 })
}

// Remaining is how long an action still has to wait; 0: it may be carried out. It waits if any value that it writes was
// written too often since the node joined; zero: there is none.
func (r *Repeats) Remaining(a Action, joined, now time.Time) time.Duration {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	_, configs := a.(WriteConfigs) // whatever makes NVIDIA's programs read the ConfigMap waits for that write to succeed
	most := mostRepeats
	if RestoresScheduling(a) {
		most *= 2 // what was taken before the taking had to wait is restored
	}
	var remaining time.Duration
	for field, value := range valuesOf(a) {
		if no := r.refused[field]; no.value == value && !configs {
			remaining = max(remaining, no.at.Add(RefusedAgain).Sub(now))
		}
		last := r.fields[field]
		if of := last.returns[hashOf(value)]; of.times >= mostReturns && !of.since.Before(joined) {
			remaining = max(remaining, of.since.Add(timing.Patience).Sub(now), time.Second)
		}
		at := last.at[sort.Search(len(last.at), func(i int) bool { return !last.at[i].Before(joined) }):]
		if last.value == value && len(at) >= most {
			remaining = max(remaining, at[len(at)-most].Add(timing.Patience).Sub(now), time.Second)
		}
	}
	return remaining
}

// Returns reports whether an action waits because the operator itself writes that value and others in turn, rather than
// because another writer undoes it.
func (r *Repeats) Returns(a Action) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for field, value := range valuesOf(a) {
		if last := r.fields[field]; last.returns[hashOf(value)].times >= mostReturns && (last.value != value || len(last.at) < mostRepeats) {
			return true
		}
	}
	return false
}

// Stops reports whether an action stops NVIDIA's operands on a node.
func Stops(a Action) bool {
	patch, is := a.(PatchNode)
	return is && patch.Annotations[v1alpha1.AnnotationStopped] != nil
}

// RestoresScheduling reports whether an action lets a node take pods again, or starts NVIDIA's operands again.
func RestoresScheduling(a Action) bool {
	patch, patches := a.(PatchNode)
	record, is := patch.Annotations[v1alpha1.AnnotationStopped]
	return Frees(a) || patches && is && record == nil
}

// Admit adds an action unless it has to wait, and is when to decide again.
func (r *Repeats) Admit(actions []Action, a Action, now time.Time, after time.Duration) ([]Action, time.Duration) {
	if remaining := r.Remaining(a, time.Time{}, now); remaining > 0 {
		return actions, timing.Sooner(after, remaining)
	}
	return append(actions, a), after
}

// reportField is the field of reports about nodes.
const reportField = "status"

// valuesOf is what an action writes: the value of each field, without the time at which it is written. It is empty for
// actions that have limits of their own: evictions, and triggers for the kubelet.
func valuesOf(a Action) map[string]string {
	one := func(field string, value ...any) map[string]string {
		return map[string]string{field + " " + a.NodeName(): fmt.Sprint(value...)}
	}
	switch a := a.(type) {
	case Evict, TriggerSync:
		return nil
	case WriteConfigs:
		return one("configs", a.Data)
	case PatchNode:
		return entriesOf(a)
	case Taint, Untaint:
		_, taints := a.(Taint)
		return one("taint", taints)
	case KeepTaints:
		return one("taints of policies", Names(a.Want))
	case KeepMPSOff, AllowMPS:
		_, keepsOff := a.(KeepMPSOff)
		return one("NodeFeature", keepsOff)
	case TaintDevices:
		return one("rule", true)
	case UntaintDevices:
		return one(map[bool]string{false: "rule", true: "edited rule"}[a.Edited], false) // where it was edited the operator still wants one
	case WriteClass: // one that another controller edited is deleted and written again, which are two writes against it
		return one("class "+a.Class.Name, a.Class.Beside)
	case DeletePod: // one whose deletion is refused keeps no other from being deleted
		return one("no pod "+a.Why, a.Occasion)
	case DeleteClass:
		return one("no class " + a.Name)
	case SetSpec:
		return requestOf(a)
	case Report:
		return one(reportField, a.Why, contentOf(a.Status))
	}
	return one(fmt.Sprintf("%T", a))
}

// requestOf is what a spec asks for. A change and its record are two writes, of which none undoes the other.
func requestOf(a SetSpec) map[string]string {
	if a.again {
		return nil
	}
	return map[string]string{"spec for " + a.Why + " " + a.Node: fmt.Sprint(a.Spec.ConfigName, a.Spec.AdminClaims)}
}

// entriesOf is the value of each label and annotation that a patch writes; of one with a time that it has one.
func entriesOf(a PatchNode) map[string]string {
	values := map[string]string{}
	for _, of := range []map[string]*string{a.Labels, a.Annotations} {
		for name, value := range of {
			field := name + " " + a.Node
			if slices.Contains(a.stamps, name) {
				continue
			}
			if values[field] = "-"; value != nil {
				text, _, timed := strings.Cut(*value, "@")
				timed = timed && name != v1alpha1.AnnotationInstances // with or without pods that go first
				values[field] = fmt.Sprint("=", text, timed)
			}
		}
	}
	return values
}

// contentOf is a status without the times and generations of its conditions, and the time at which a change failed.
func contentOf(s v1alpha1.GPUNodeStatus) string {
	s = *s.DeepCopy()
	s.ObservedGeneration = 0
	if s.Rollout.Failed != nil {
		s.Rollout.Failed.Time = metav1.Time{}
	}
	for i := range s.Conditions {
		s.Conditions[i].ObservedGeneration, s.Conditions[i].LastTransitionTime = 0, metav1.Time{}
	}
	text, err := json.Marshal(s)
	if err != nil { // cannot be: the types hold strings and numbers only
		return ""
	}
	return string(text)
}

// Restamped is an action as it is counted that finds labels and annotations of a Node and the spec of its GPUNode so:
// what is there already but for the time was undone by nobody.
func Restamped(a Action, labels, annotations map[string]string, spec v1alpha1.GPUNodeSpec) Action {
	switch a := a.(type) {
	case PatchNode:
		for _, of := range []struct {
			want map[string]*string
			has  map[string]string
		}{{a.Labels, labels}, {a.Annotations, annotations}} {
			for name, value := range of.want {
				if is, has := of.has[name]; has && value != nil && untimed(is) == untimed(*value) {
					a.stamps = append(a.stamps, name)
				}
			}
		}
		slices.Sort(a.stamps)
		return a
	case SetSpec:
		spec.ChangeTime = a.Spec.ChangeTime
		a.again = equality.Semantic.DeepEqual(spec, a.Spec)
		return a
	}
	return a
}

func untimed(value string) string {
	value, _, _ = strings.Cut(value, "@")
	return value
}

// Unstamped is an action without the times in the values that it writes. Its text is the same in each reconcile, as a
// status must be that names it.
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
