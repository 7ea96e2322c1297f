// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"encoding/json"
	"hash/fnv"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// A pod that waits keeps an instance for itself, and the scheduler may never bind it: for want of a volume, by affinity, or because a tenant
// wants it so. So an attempt is counted for those who ask, whatever pods they make and delete: for a namespace and the largest profile asked for.
// What fails is counted for pods that are alike to the scheduler, so that one such pod does not hold up the others of its namespace; beyond
// mostAlike kinds of them for all, since a tenant can make any number of kinds. Of each:
//
//	instances are offered ─ advertised later as many are still offered, and fewer were bound since: AdvertisedNotScheduled ─ after a back-off anew
//
// During the back-off nothing is made or kept for such pods; the scheduler may bind them all the same. A controller that starts anew knows it by former.

const (
	// advertised is how long idle instances are offered to the scheduler before pods that it leaves waiting count as ones that it cannot bind.
	advertised = time.Minute
	// forgotten is how long after a back-off without another attempt the former ones do not count any more. demand.Hold can delay the next.
	forgotten = time.Hour
	// mostAlike is how many kinds of pods of a namespace and profile back off each by themselves.
	mostAlike = 3
)

// Attempts are those for pods that wait for a policy's GPUs.
type Attempts map[asker]attempt

type asker struct {
	namespace, profile string
	alike              uint64 // 0: all but those of which attempts failed
}

// all are those whose pods back off together.
func (a asker) all() asker { return asker{namespace: a.namespace, profile: a.profile} }

// of is who asks by a pod.
func (a Attempts) of(pod *corev1.Pod, profile string) asker {
	all := asker{namespace: pod.Namespace, profile: profile}
	if a.kinds(all) == 0 {
		return all
	}
	of := asker{pod.Namespace, profile, alike(pod)}
	if _, failed := a[of]; failed {
		return of
	}
	return all
}

// kinds is how many kinds of pods of a namespace and profile have failed by themselves.
func (a Attempts) kinds(of asker) (many int) {
	for o := range a {
		if o.alike != 0 && o.all() == of {
			many++
		}
	}
	return many
}

// alike is a hash of what the scheduler looks at of a pod, but for its priority.
func alike(pod *corev1.Pod) uint64 {
	of := &pod.Spec
	is := []any{of.NodeSelector, of.Affinity, of.Tolerations, of.SchedulerName, of.TopologySpreadConstraints}
	for i := range of.Containers {
		is = append(is, of.Containers[i].Resources, of.Containers[i].Ports)
	}
	for i := range of.Volumes {
		if v := &of.Volumes[i]; v.PersistentVolumeClaim != nil || v.Ephemeral != nil {
			is = append(is, v)
		}
	}
	h := fnv.New64a()
	_ = json.NewEncoder(h).Encode(is) //nolint:errchkjson // of strings and numbers
	return max(h.Sum64(), 1)
}

// former are the attempts for pods that wait when a controller starts: those that the policy reports to have failed, and as many for each other pod as can
// have in the time that it has waited, which a former controller knew.
func (r *review) former(of Asked, now time.Time) Attempts {
	attempts, failed := Attempts{}, map[string]time.Time{}
	if of.Policy.Status.OnDemand == nil { // no controller has tried
		return attempts
	}
	for _, d := range of.Policy.Status.OnDemand.Requests {
		if d.Reason == v1alpha1.ReasonAdvertisedNotScheduled {
			failed[d.FirstPod] = d.UntilTime.Time
		}
	}
	for _, pod := range slices.SortedFunc(slices.Values(of.Pods), byTurn) {
		asks := r.asks(pod)
		if len(asks) == 0 {
			continue
		}
		who := asker{pod.Namespace, r.largest(asks), alike(pod)}
		if _, known := attempts[who]; !known && attempts.kinds(who.all()) == mostAlike {
			who = who.all()
		}
		a := attempts[who]
		a.until = timing.Latest(timing.Latest(a.until, now), failed[pod.Namespace+"/"+pod.Name])
		for a.failed < 7 && 2*doubled(a.failed+1) <= a.until.Sub(waitsSince(pod)) {
			a.failed++
		}
		if a.failed > 0 {
			attempts[who] = a
		}
	}
	return attempts
}

type attempt struct {
	since  time.Time // instances are offered; zero: none are
	seen   time.Time // and were lately: who deletes the pods for a moment begins no other attempt
	failed int       // attempts in succession
	until  time.Time // nothing is done for the pods
}

// doubled is how long nothing is tried again after failures: a minute, and twice as long each time up to 64.
func doubled(failures int) time.Duration { return time.Minute << min(failures, 7) / 2 }

// fail notes which attempts begin, end and fail by what is decided, and reports whether some fail, for whose pods nothing is to be done then.
func (r *review) fail(attempts Attempts, now time.Time) (some bool) {
	offered, ready := r.offers(attempts, now)
	was := maps.Clone(attempts)
	for of, a := range was {
		switch {
		case ready[of] == 0 && now.Sub(a.seen) >= advertised || a.since.After(now):
			a.since = time.Time{}
		case offered[of] == 0 || now.Before(a.since.Add(advertised)):
		case r.used(of, a.since) >= ready[of]:
			a.since = now
		default:
			for _, kind := range r.failing(was, of) {
				failed := attempts[kind].failed + 1
				attempts[kind] = attempt{failed: failed, until: now.Add(doubled(failed))}
			}
			if a, some = attempts[of], true; !a.until.After(now) {
				a.since = time.Time{}
			}
		}
		if !a.since.IsZero() {
			r.look(a.since.Add(advertised))
		}
		attempts[of] = a
		if a.since.IsZero() && (a.failed == 0 || now.Sub(a.until).Abs() > max(forgotten, doubled(a.failed))) { // also if the clock was set back
			delete(attempts, of)
		}
	}
	return some
}

// failing is whose attempts have failed where one of a namespace and profile has: those of each kind of pods that have waited since it began.
func (r *review) failing(attempts Attempts, of asker) (kinds []asker) {
	if of.alike != 0 {
		return []asker{of}
	}
	for n, pods := range r.pods {
		for _, pod := range pods {
			if r.kinds[n].asker != of || waitsSince(pod).After(attempts[of].since) {
				continue
			}
			if kind := (asker{of.namespace, of.profile, alike(pod)}); !slices.Contains(kinds, kind) {
				kinds = append(kinds, kind)
			}
		}
	}
	if len(kinds) == 0 || attempts.kinds(of)+len(kinds) > mostAlike {
		return []asker{of}
	}
	return kinds
}

// offers begins attempts, and is how many instances whose pods are offered, and how many of the pods they would do for.
func (r *review) offers(attempts Attempts, now time.Time) (offered, ready map[asker]int) {
	offered, ready = map[asker]int{}, map[asker]int{}
	for n, o := range r.decision.Outcomes {
		of := r.kinds[n].asker
		a, known := attempts[of]
		if ready[of] += o.Ready; o.Ready > 0 {
			a.seen = now
		}
		if offered[of] += o.Offered; o.Offered > 0 && a.since.IsZero() {
			a.since = now
		}
		if known || o.Offered > 0 {
			attempts[of] = a
		}
	}
	return offered, ready
}

// used is how many pods of a namespace have been given instances of a profile since a time, with those instances that any pod had since: a pod that
// has finished is not known any more.
func (r *review) used(of asker, since time.Time) (pods int) {
	for _, g := range r.pool.GPUs {
		for _, i := range g.Instances {
			if i.Profile == of.profile && i.Holder == "" && i.IdleSince.After(since) {
				pods++
			}
		}
	}
	for _, n := range r.nodes {
		if r.overbooked[[2]string{n.Name, plan.ResourceOf(of.profile)}] != "" {
			continue // who comes there has none
		}
		for i := range n.Pods {
			if p := &n.Pods[i]; p.Namespace == of.namespace && p.Requests[plan.ResourceOf(of.profile)] > 0 && !p.Scheduled.Before(since) {
				pods++
			}
		}
	}
	return pods
}

// decide decides, and anew where pods turn out to be ones that the scheduler cannot bind.
func (r *review) decide(pods []*corev1.Pod, attempts Attempts, now time.Time) {
	for again := true; again; again = r.fail(attempts, now) {
		r.classify(pods, attempts, now)
		for n := range r.classes {
			for _, of := range []asker{r.kinds[n].asker, r.kinds[n].all()} {
				if a := attempts[of]; a.until.Sub(now) <= doubled(a.failed) {
					r.classes[n].BackOff = timing.Latest(r.classes[n].BackOff, a.until)
				}
			}
		}
		r.decision = r.memory.Decide(now, r.pool, r.classes)
	}
}
