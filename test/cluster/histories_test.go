// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// TestHistories plays random histories of clusters with the controllers and agents that ship, their caches, watches and
// queues, on a real API server. The invariants are those of TestHistories of internal/engine/rollout, which plays
// hundreds of such histories in the time that one takes here, and has what the nodes of this package have not: upgrades
// of the driver, unhealthy GPUs, ResourceClaims and init containers.
//
// Time passes as fast as something happens, so no result depends on the speed of the machine. The events of a seed are
// the same each time. At which moment an event meets a reconcile is up to the scheduler of this machine.
//
//	CLUSTER_HISTORIES=200        so many histories
//	CLUSTER_HISTORIES_FROM=7     the seed of the first
//	CLUSTER_HISTORIES_BREAKS=50  so many failures before the test ends, each in one line
//	CLUSTER_HISTORY=<history>    only this one, or the one of this seed
//	CLUSTER_SHRINK=1             and the shortest one that still breaks the same invariant
func TestHistories(t *testing.T) {
	const usual = 8
	stage := history.Stage{
		Prefix: "CLUSTER_", Test: "./test/cluster -run '^TestHistories$'", Kinds: slices.Concat(kinds(), lateKinds()), Of: historyOf,
		Whole: os.Getenv("CLUSTER_SHRINK") == "",
	}
	of := &tally{}
	if os.Getenv("CLUSTER_HISTORY") != "" {
		stage.Play = on(t, newSite(t), of)
		stage.Replay(t)
		return
	}
	t.Parallel()
	s := history.NewStudy(t, "CLUSTER_HISTORIES", usual, usual)
	cpu := processorTime()
	t.Run("beside each other", func(t *testing.T) { // each of them waits most of its time
		for i := range 2 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				site := newSite(t)
				stage := stage
				stage.Play = on(t, site, of)
				stage.PlayAll(t, s)
				if denied, err := site.cluster.Denied(t.Context(), env.ControllerWrites); err != nil || denied > 0 {
					t.Errorf("%d writes that config/manager/admission.yaml does not list, %v", denied, err)
				}
			})
		}
	})
	s.Report(t)
	t.Logf("%d of %d late histories have a repartition for a pod", of.repartitioned.Load(), of.late.Load())
	t.Logf("%s of CPU without API server and etcd", (processorTime() - cpu).Round(time.Second))
}

// processorTime is what this process has used so far.
func processorTime() time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// historyOf is the history of a seed.
func historyOf(seed uint64) history.History {
	h := history.Of(seed, kinds())
	if seed >= history.Late {
		h = h.WithLate(lateKinds())
	}
	return h
}

// kinds are the names of all events that a history of any seed may have; lateKinds of those from history.Late up.
func kinds() []string     { return happenings().Names(history.Events[*place]().Names()...) }
func lateKinds() []string { return lateHappenings().Names(history.LateEvents[*place]().Names()...) }

// tally counts histories of late seeds, and those in which a GPU is repartitioned for a pod.
type tally struct{ late, repartitioned atomic.Int64 }

// on plays histories, each in a cluster of its own.
func on(t *testing.T, site *fleet, of *tally) func(history.History, bool) (string, []string) {
	t.Helper()
	return func(h history.History, _ bool) (broken string, told []string) {
		t.Run(fmt.Sprint(h.Seed), func(t *testing.T) {
			begun := time.Now()
			s := newRun(t, site, h.Seed)
			broken, told = history.Play(s, h, happenings(), lateHappenings()), s.told
			t.Logf("%d events, %s", len(h.Events), time.Since(begun).Round(100*time.Millisecond))
			if h.Seed < history.Late {
				return
			}
			if of.late.Add(1); s.repartitioned() {
				of.repartitioned.Add(1)
				t.Log("with a repartition")
			}
		})
		return broken, told
	}
}

func (s *run) EndFaults() {
	for _, w := range s.waiting.pods {
		if w.kind == "never" {
			w.kind = "replica"
		}
	}
	for _, p := range s.Machines() {
		p.hardware.Fail = nil
		p.deaf.Store(false)
		switch {
		case p.off && !p.lost:
			s.Boot(p)
		case !p.off && p.down.Load():
			p.stop()
			s.startAgent(p)
		}
	}
	s.repair()
}

func (s *run) DeletePolicies() {
	for _, p := range s.ListPolicies() {
		s.deleted(&p)
	}
}

func (s *run) Rest() {
	s.forget()
	if !s.rest(8*time.Hour, 400) && (!s.repartitions() || !s.rest(8*time.Hour, 400)) {
		s.Breaks("bounded", "400 rounds in 8h do not come to rest: %s; containers wait: %v", s.counted(), s.containersWaiting())
	}
	history.Bounded(s, "in 8h in which nobody else does anything", history.MostAtRest)
	s.Tell("everything rests: %s", s.counted())
	s.rested = s.world()
	s.allServed()
}

// repartitions is a person who makes an instance where people left a GPU in MIG mode without one, so that NVIDIA's device plugin ends again
// and again, with or without a policy.
func (s *run) repartitions() (some bool) {
	for _, p := range s.Machines() {
		for _, d := range p.devices() {
			if s.spec(p.name).Baseline == nil && bornAs(d) == p.born[d.UUID] && d.State.MIG && len(d.State.Instances) == 0 {
				history.Partition(p, d)
				s.rebornUnmanaged(p)
				some = true
			}
		}
	}
	return some
}

// containersWaiting are the containers of all nodes that do not run, and why not, with the first GPU of the node.
func (s *run) containersWaiting() (why []string) {
	for _, p := range s.Machines() {
		for _, pod := range s.podsOn(p.name) {
			for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
				if w := c.State.Waiting; w != nil {
					why = append(why, fmt.Sprintf("%s of %s on %s: %s; GPU 0 is %+v", c.Name, pod.Name, p.name, w.Message, bornAs(p.devices()[0])))
				}
			}
		}
	}
	return why
}
