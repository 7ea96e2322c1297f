// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// What the replay of the past takes as given.
const (
	// patience is how long a pod waits at most that counts as one that did not.
	patience = time.Minute
	// making is how long it takes until a pod can have an instance that is made for it: the driver takes a second, and the kubelet publishes
	// every ten.
	making = 11 * time.Second
	// idle is how long an instance is idle before it is destroyed: the default of onDemand.idleSeconds.
	idle = 5 * time.Minute
	// usualRun is how long a pod runs of which nobody knows, if none like it ran.
	usualRun = time.Hour
	// mostPast is how many pods are replayed at most: those that were created last.
	mostPast = 2000
	// noNodeHas is a number of instances that no node has. A pod may ask for more.
	noNodeHas = 128
	// mostProfiles is how many onDemand.profiles can name.
	mostProfiles = 8
)

// PastPod is a pod of the observed time that asked for MIG instances.
type PastPod struct {
	Asks                    map[string]int // instances by resource, as kube-state-metrics spells it: nvidia_com_mig_1g_5gb
	Node                    string         // on which it ran; empty: none
	Created, Started, Ended time.Time      // zero: never; Ended is also when a pod was deleted

	seen time.Time // last
}

// pastPods are the pods of which Prometheus knows from kube-state-metrics, in the order in which they were created.
func pastPods(answers map[Query][]Sample, now time.Time) []PastPod {
	of := map[string]*PastPod{}
	for _, s := range answers[QueryAsks] {
		uid, n := s.Labels["uid"], int(min(s.Value, noNodeHas))
		if n < 1 {
			continue
		}
		if of[uid] == nil {
			of[uid] = &PastPod{Asks: map[string]int{}}
		}
		of[uid].Asks[s.Labels["resource"]] += n
	}
	each := func(query Query, set func(*PastPod, Sample, time.Time)) {
		for _, s := range answers[query] {
			if pod := of[s.Labels["uid"]]; pod != nil {
				set(pod, s, time.Unix(int64(s.Value), 0))
			}
		}
	}
	each(QueryCreated, func(p *PastPod, _ Sample, at time.Time) { p.Created = at })
	each(QueryScheduled, func(p *PastPod, _ Sample, at time.Time) { p.Started = at })
	for _, label := range []string{"node", "exported_node"} { // node alone may be that of kube-state-metrics
		each(QueryNode, func(p *PastPod, s Sample, _ time.Time) {
			if !p.Started.IsZero() {
				p.Node = cmp.Or(s.Labels[label], p.Node)
			}
		})
	}
	each(QueryLastSeen, func(p *PastPod, _ Sample, at time.Time) { p.seen = at })
	for _, p := range of {
		last := timing.Latest(p.seen, timing.Latest(p.Created, p.Started)) // what was short was seen at no step
		if now.Sub(last) > 10*time.Minute {                                // what is there may have been seen last five minutes ago
			p.Ended = last
		}
	}
	each(QueryCompleted, func(p *PastPod, _ Sample, at time.Time) { p.Ended = timing.Latest(at, p.Started) })
	var pods []PastPod
	for _, uid := range slices.Sorted(maps.Keys(of)) {
		if !of[uid].Created.IsZero() {
			pods = append(pods, *of[uid])
		}
	}
	slices.SortStableFunc(pods, func(a, b PastPod) int { return a.Created.Compare(b.Created) })
	return pods[max(0, len(pods)-mostPast):]
}

// onDemand says what had become of the pods of the past on the GPUs of a fleet whose MIG layouts follow demand; empty: there were none.
func (c Cluster) onDemand(f Fleet) string {
	r := newReplay(f, c.Seen.Past)
	if len(r.pool.GPUs) == 0 || len(r.pods) == 0 {
		return ""
	}
	r.run(c.Seen.Until)
	var waited, started, later int
	var waits []time.Duration
	for i, pod := range r.pods {
		wait, starts := r.waits[i]
		switch {
		case pod.Started.IsZero() || pod.Started.Sub(pod.Created) > patience:
			if waited++; starts {
				started, waits = started+1, append(waits, wait)
			}
		case !starts || wait > patience:
			later++
		}
	}
	says := fmt.Sprintf("MIG on demand, replayed with the %s that asked for MIG instances of these GPUs: ", counted(len(r.pods), "pod"))
	if waited == 0 {
		return says + "none waited longer than a minute, so the layout is right as it is."
	}
	says += fmt.Sprintf("%d waited longer than a minute or did not start, and %d of these would have started", waited, started)
	if started > 0 {
		slices.Sort(waits)
		says += fmt.Sprintf(", half of them within %s", waits[(len(waits)-1)/2].Round(time.Second))
	}
	if later > 0 {
		says += fmt.Sprintf("; %d that did not wait would have", later)
	}
	return says + ". A layout with onDemand reports what would be changed, and changes nothing."
}

// replay is the past of a fleet, played again with layouts that follow demand.
type replay struct {
	memory demand.Memory
	pool   demand.Pool
	pods   []PastPod
	asks   []map[string]int      // of each pod, by exact profile
	kinds  []string              // asks as text
	lasts  []time.Duration       // how long each runs
	waits  map[int]time.Duration // of those that started
	ready  map[string]time.Time  // when an instance that was made can be had, by UUID
	ends   map[int]time.Time     // of pods that run
	made   int
}

func newReplay(f Fleet, past []PastPod) *replay {
	r := &replay{waits: map[int]time.Duration{}, ready: map[string]time.Time{}, ends: map[int]time.Time{}, pool: demand.Pool{Idle: idle, Budget: -1}}
	nodes := map[string]bool{"": true}
	for _, n := range f.Nodes {
		nodes[n.Name] = true
		devices := plan.Devices(n.GPU.Status.Devices)
		for i := range devices {
			d := &devices[i]
			if !d.State.MIG || len(d.Profiles) == 0 {
				continue
			}
			g := demand.GPU{Node: n.Name, UUID: d.UUID, Model: r.memory.Model(d)}
			for _, instance := range d.State.Instances {
				g.Instances = append(g.Instances, demand.Instance{Instance: instance, IdleSince: time.Unix(0, 0)})
			}
			r.pool.GPUs = append(r.pool.GPUs, g)
		}
	}
	profiles, spelt := map[string]string{}, strings.NewReplacer(".", "_", "/", "_", "-", "_")
	for _, p := range f.Device.Profiles {
		profiles[spelt.Replace(plan.ResourceOf(p.Name))] = p.Name
	}
	asked := map[string]int{}
	for _, pod := range past {
		asks := map[string]int{}
		for resource, n := range pod.Asks {
			asks[profiles[resource]] += n
		}
		if _, other := asks[""]; other || !nodes[pod.Node] {
			continue
		}
		for name := range asks {
			asked[name]++
		}
		r.pods, r.asks, r.kinds = append(r.pods, pod), append(r.asks, asks), append(r.kinds, fmt.Sprint(asks))
	}
	names := slices.SortedFunc(maps.Keys(asked), func(a, b string) int { return cmp.Or(cmp.Compare(asked[b], asked[a]), strings.Compare(a, b)) })
	r.pool.Profiles = names[:min(len(names), mostProfiles)]
	r.setRuns()
	return r
}

// setRuns takes for a pod that never ran that it runs as long as half of those that asked for the same did.
func (r *replay) setRuns() {
	ran := map[string][]time.Duration{}
	for i, pod := range r.pods {
		if !pod.Started.IsZero() && !pod.Ended.IsZero() {
			ran[r.kinds[i]] = append(ran[r.kinds[i]], pod.Ended.Sub(pod.Started))
		}
	}
	for _, all := range ran {
		slices.Sort(all)
	}
	for i, pod := range r.pods {
		lasts := usualRun
		if all := ran[r.kinds[i]]; len(all) > 0 {
			lasts = all[len(all)/2]
		}
		switch {
		case !pod.Started.IsZero() && !pod.Ended.IsZero():
			lasts = pod.Ended.Sub(pod.Started)
		case !pod.Started.IsZero():
			lasts = forever
		}
		r.lasts = append(r.lasts, max(time.Second, lasts))
	}
}

// forever is how long a pod runs that runs still.
const forever = 10 * 365 * 24 * time.Hour

// run plays until a time.
func (r *replay) run(until time.Time) {
	var waiting []int
	next := 0
	for at := r.pods[0].Created; !at.After(until); {
		for pod, end := range r.ends {
			if !end.After(at) {
				r.end(pod, end)
			}
		}
		for ; next < len(r.pods) && !r.pods[next].Created.After(at); next++ {
			waiting = append(waiting, next)
		}
		waiting = slices.DeleteFunc(waiting, func(pod int) bool { // deleted before it ever ran
			return r.pods[pod].Started.IsZero() && !r.pods[pod].Ended.IsZero() && !r.pods[pod].Ended.After(at)
		})
		waiting = slices.DeleteFunc(waiting, func(pod int) bool { return r.start(pod, at) })
		var look time.Time
		if len(waiting) > 0 {
			d := r.memory.Decide(at, r.pool, r.classes(waiting))
			r.change(d, at)
			waiting, look = slices.DeleteFunc(waiting, func(pod int) bool { return r.start(pod, at) }), d.Next
		}
		soonest := until.Add(time.Second)
		for _, t := range append(slices.Collect(maps.Values(r.ends)), look) {
			if t.After(at) && t.Before(soonest) {
				soonest = t
			}
		}
		if next < len(r.pods) && r.pods[next].Created.Before(soonest) {
			soonest = r.pods[next].Created
		}
		at = soonest
	}
}

// end gives back what a pod had.
func (r *replay) end(pod int, at time.Time) {
	delete(r.ends, pod)
	for g := range r.pool.GPUs {
		for i := range r.pool.GPUs[g].Instances {
			if of := &r.pool.GPUs[g].Instances[i]; of.Holder == fmt.Sprint(pod) {
				of.Holder, of.IdleSince = "", at
			}
		}
	}
}

// start lets a pod have idle instances, all of one node.
func (r *replay) start(pod int, at time.Time) bool {
	lacks, took, node := map[string]int{}, []*demand.Instance{}, ""
	for g := range r.pool.GPUs {
		if r.pool.GPUs[g].Node != node {
			lacks, took, node = maps.Clone(r.asks[pod]), nil, r.pool.GPUs[g].Node
		}
		for i := range r.pool.GPUs[g].Instances {
			if of := &r.pool.GPUs[g].Instances[i]; of.Holder == "" && !of.Partial && lacks[of.Profile] > 0 {
				if lacks[of.Profile]--; lacks[of.Profile] == 0 {
					delete(lacks, of.Profile)
				}
				took = append(took, of)
			}
		}
		if len(lacks) > 0 {
			continue
		}
		begins := at
		for _, of := range took {
			of.Holder = fmt.Sprint(pod)
			if ready := r.ready[of.UUID]; ready.After(begins) {
				begins = ready
			}
		}
		r.waits[pod], r.ends[pod] = begins.Sub(r.pods[pod].Created), begins.Add(r.lasts[pod])
		return true
	}
	return false
}

// classes are the pods that wait, by what they ask for.
func (r *replay) classes(waiting []int) (all []demand.Class) {
	index := map[string]int{}
	for _, pod := range waiting {
		n, there := index[r.kinds[pod]]
		if !there {
			n, index[r.kinds[pod]] = len(all), len(all)
			all = append(all, demand.Class{Asks: r.asks[pod], Oldest: r.pods[pod].Created})
		}
		all[n].Pods++
	}
	return all
}

// change makes what was decided.
func (r *replay) change(d demand.Decision, at time.Time) {
	for _, c := range d.Changes {
		for n := range r.pool.GPUs {
			g := &r.pool.GPUs[n]
			if g.Node != c.Node || g.UUID != c.UUID {
				continue
			}
			for _, gone := range c.Destroy {
				g.Instances = slices.DeleteFunc(g.Instances, func(i demand.Instance) bool { return i.Placement == gone.Placement })
			}
			for _, made := range c.Create {
				r.made++
				made.UUID = fmt.Sprint("made-", r.made)
				r.ready[made.UUID] = at.Add(making)
				g.Instances = append(g.Instances, demand.Instance{Instance: made, IdleSince: at.Add(making)})
			}
			if c.Disruptive() {
				g.Changed = at
			}
		}
	}
}
