// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"container/heap"
	"maps"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// result is what a player reached with a trace.
type result struct {
	served    time.Duration   // of memory slices, while pods ran, within the span
	waits     []time.Duration // of the pods that started, from their arrival
	pods      int             // of the trace
	span      time.Duration   // of the trace
	changes   int             // of one GPU's layout
	destroyed int             // idle instances that others were made of
	tainted   time.Duration   // of nodes that took no GPU pod because of a change
}

// start counts a pod that runs from then on.
func (r *result) start(p pod, at, span time.Duration) {
	r.waits = append(r.waits, at-p.arrival)
	r.served += time.Duration(size(p.profile)) * max(0, min(p.duration, span-at))
}

func (r *result) add(o result) {
	r.served += o.served
	r.waits = append(r.waits, o.waits...)
	r.pods += o.pods
	r.span += o.span
	r.changes += o.changes
	r.destroyed += o.destroyed
	r.tainted += o.tainted
}

// times are a heap of points in time.
type times []time.Duration

func (h times) Len() int           { return len(h) }
func (h times) Less(i, j int) bool { return h[i] < h[j] }
func (h times) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *times) Push(x any)        { *h = append(*h, x.(time.Duration)) }
func (h *times) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// static serves a trace with instances that never change. Pods of a profile start in the order of their arrival.
func static(t trace, instances counts) result {
	r := result{pods: len(t.pods), span: t.span}
	for profile, n := range instances {
		r.add(queue(t, profile, n))
	}
	return r
}

func queue(t trace, profile, instances int) (r result) {
	if instances == 0 {
		return r
	}
	free := make(times, instances) // from when on
	for _, p := range t.pods {
		if p.profile != profile {
			continue
		}
		at := max(p.arrival, free[0])
		if at >= t.span {
			break // later ones start no earlier
		}
		r.start(p, at, t.span)
		free[0] = at + p.duration
		heap.Fix(&free, 0)
	}
	return r
}

// bestStatic are the instances that serve most of a trace if they never change: what nobody knows beforehand.
func bestStatic(t trace, gpus int) (best counts) {
	var served [kinds][]time.Duration // by number of instances
	for profile, limit := range []int{7 * gpus, 3 * gpus, 2 * gpus, gpus, gpus} {
		for n := range limit + 1 {
			served[profile] = append(served[profile], queue(t, profile, n).served)
		}
	}
	most := time.Duration(-1)
	for seven := range gpus + 1 {
		for four := range gpus - seven + 1 {
			for three := range 2*(gpus-seven) - four + 1 {
				for two := range 3*gpus + 1 {
					c := counts{0, two, three, four, seven}
					if !fits(c, gpus) {
						break
					}
					low, high, _ := halves(c, gpus)
					c[0] = 4*low + 3*high - 2*two
					sum := time.Duration(0)
					for profile, n := range c {
						sum += served[profile][n]
					}
					if sum > most {
						most, best = sum, c
					}
				}
			}
		}
	}
	return best
}

// everywhere is one layout on all GPUs.
func everywhere(layout counts, gpus int) (c counts) {
	for p, n := range layout {
		c[p] = n * gpus
	}
	return c
}

func TestTheBestStaticLayoutIsTheBest(t *testing.T) {
	g := NewWithT(t)
	for seed := range uint64(3) {
		made := generate(mixes()[1], 300, 2, 0.9, seed)
		best := static(made, bestStatic(made, 2)).served
		reached := false
		everySum(2, func(c counts) {
			if fits(c, 2) {
				served := static(made, c).served
				g.Expect(served).To(BeNumerically("<=", best))
				reached = reached || served == best
			}
		})
		g.Expect(reached).To(BeTrue())
	}
}

// migrating serves a trace as nothing real can: at each event it may move all that runs, at once and at no cost, so that
// what waits can start, and it starts pods of the most memory slices that fit. TestNobodyStartsMore proves that nobody
// can start more, with the same pods running, at any event. In the long run another system may still serve somewhat
// more, by luck; nobody serves more than limit.
func migrating(t trace, gpus int) result {
	r := result{pods: len(t.pods), span: t.span}
	var running counts
	var waiting [kinds][]pod
	ends := [kinds]times{}
	arrived := 0
	for {
		now := t.span
		if arrived < len(t.pods) {
			now = min(now, t.pods[arrived].arrival)
		}
		for _, h := range ends {
			if len(h) > 0 {
				now = min(now, h[0])
			}
		}
		if now >= t.span {
			return r
		}
		for ; arrived < len(t.pods) && t.pods[arrived].arrival == now; arrived++ {
			p := t.pods[arrived]
			waiting[p.profile] = append(waiting[p.profile], p)
		}
		for p := range ends {
			for len(ends[p]) > 0 && ends[p][0] == now {
				heap.Pop(&ends[p])
				running[p]--
			}
		}
		var lengths counts
		for p := range waiting {
			lengths[p] = len(waiting[p])
		}
		for p, n := range startable(running, lengths, gpus) {
			for _, started := range waiting[p][:n] {
				r.start(started, now, t.span)
				heap.Push(&ends[p], now+started.duration)
			}
			waiting[p] = waiting[p][n:]
			running[p] += n
		}
	}
}

// startable are the waiting pods of the most memory slices that fit beside the running ones, wherever those lie.
func startable(running, waiting counts, gpus int) (best counts) {
	if fits(running.plus(waiting), gpus) {
		return waiting
	}
	most := 0
	for seven := 0; seven <= min(waiting[4], gpus-running[4]); seven++ {
		for four := 0; four <= min(waiting[3], gpus-running[3]); four++ {
			for three := 0; three <= min(waiting[2], 2*gpus-running[2]); three++ {
				start := counts{0, 0, three, four, seven}
				if !fits(running.plus(start), gpus) {
					break
				}
				start = withSmall(running, start, waiting, gpus)
				if n := start.sizes(); n > most {
					most, best = n, start
				}
			}
		}
	}
	return best
}

// withSmall adds as many 2g as fit, then 1g: a 2g takes the room of two 1g and no more.
func withSmall(running, start, waiting counts, gpus int) counts {
	all := running.plus(start)
	low, high, _ := halves(all, gpus)
	start[1] = max(0, min(waiting[1], 2*low+high-running[1], (4*low+3*high-2*running[1]-running[0])/2))
	start[0] = max(0, min(waiting[0], 4*low+3*high-2*(running[1]+start[1])-running[0]))
	return start
}

// limit is what no system can pass: nobody serves more than pods ask for, or than the GPUs have.
func limit(t trace, gpus int) time.Duration {
	return min(t.asked(), time.Duration(gpus*slicesOfGPU)*t.span)
}

// TestNobodyStartsMore compares what migration starts with all other choices of waiting pods, on up to four GPUs: what
// fits is what some arrangement of full layouts holds (TestWhatFits), so the choices are all that there is.
func TestNobodyStartsMore(t *testing.T) {
	r := newRand(5)
	for range 3000 {
		gpus := 1 + r.IntN(4)
		var running, waiting counts
		for range r.IntN(5 * gpus) {
			more := running
			if more[r.IntN(kinds)]++; fits(more, gpus) {
				running = more
			}
		}
		for range 1 + r.IntN(8) {
			waiting[r.IntN(kinds)]++
		}
		most := 0
		everyPart(waiting, func(start counts) {
			if fits(running.plus(start), gpus) {
				most = max(most, start.sizes())
			}
		})
		got := startable(running, waiting, gpus)
		if got.sizes() != most || !waiting.covers(got) || !fits(running.plus(got), gpus) {
			t.Fatalf("%d GPUs, %v runs, %v waits: %v starts, %d slices could", gpus, running, waiting, got, most)
		}
	}
}

func everyPart(of counts, f func(counts)) {
	var part counts
	for part[0] = 0; part[0] <= of[0]; part[0]++ {
		for part[1] = 0; part[1] <= of[1]; part[1]++ {
			for part[2] = 0; part[2] <= of[2]; part[2]++ {
				for part[3] = 0; part[3] <= of[3]; part[3]++ {
					for part[4] = 0; part[4] <= of[4]; part[4]++ {
						f(part)
					}
				}
			}
		}
	}
}

// TestMigrationBesideTheBestSchedule compares migration with the best of all schedules of up to four pods on one GPU:
// of all hours at which each may start, wherever all lie. It is short of the best one by little, since it does not know
// when pods end, and no schedule passes the limit.
func TestMigrationBesideTheBestSchedule(t *testing.T) {
	g := NewWithT(t)
	r := newRand(6)
	reached, best := time.Duration(0), time.Duration(0)
	for range 100 {
		made := trace{span: 9 * time.Hour}
		for range 2 + r.IntN(3) {
			made.pods = append(made.pods, pod{
				arrival: time.Duration(r.IntN(5)) * time.Hour, duration: time.Duration(1+r.IntN(6)) * time.Hour, profile: r.IntN(kinds),
			})
		}
		slices.SortStableFunc(made.pods, func(a, b pod) int { return int(a.arrival - b.arrival) })
		most := exhaustive(made, 0, nil)
		g.Expect(most).To(BeNumerically("<=", limit(made, 1)))
		moved := migrating(made, 1).served
		g.Expect(moved).To(BeNumerically("<=", most))
		reached, best = reached+moved, best+most
	}
	t.Logf("migration serves %.4f of what is possible", float64(reached)/float64(best))
	g.Expect(float64(reached) / float64(best)).To(BeNumerically(">=", 0.95))
}

// exhaustive is the most that one GPU can serve from an hour on, with pods that were started at some hours before: of
// every choice of pods that start each hour, wherever all lie.
func exhaustive(t trace, hour time.Duration, started map[int]time.Duration) (most time.Duration) {
	if hour >= t.span {
		return 0
	}
	var running counts
	for i, at := range started {
		if at+t.pods[i].duration > hour {
			running[t.pods[i].profile]++
		}
	}
	var can []int
	for i, p := range t.pods {
		if _, is := started[i]; !is && p.arrival <= hour {
			can = append(can, i)
		}
	}
	for choice := range 1 << len(can) {
		next, all, gain := map[int]time.Duration{}, running, time.Duration(0)
		maps.Copy(next, started)
		for bit, i := range can {
			if choice>>bit&1 == 1 {
				next[i] = hour
				all[t.pods[i].profile]++
				gain += time.Duration(size(t.pods[i].profile)) * min(t.pods[i].duration, t.span-hour)
			}
		}
		if fits(all, 1) {
			most = max(most, gain+exhaustive(t, hour+time.Hour, next))
		}
	}
	return most
}
