// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
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
	if text := os.Getenv("CLUSTER_HISTORY"); text != "" {
		h, err := history.Parse(text, slices.Concat(kinds(), lateKinds()))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text, ":") {
			h = historyOf(h.Seed)
		}
		site := newSite(t)
		broken, told := play(t, site, h)
		if os.Getenv("CLUSTER_SHRINK") != "" {
			h = history.Shrink(h, broken, func(o history.History) string {
				broken, told = play(t, site, o)
				return broken
			})
		}
		t.Logf("%s\n%s", h, strings.Join(told, "\n"))
		if broken != "" {
			t.Error(broken)
		}
		return
	}
	t.Parallel()
	s := history.NewStudy(t, "CLUSTER_HISTORIES", usual, usual)
	cpu := processorTime()
	t.Run("beside each other", func(t *testing.T) { // each of them waits most of its time
		for i := range 2 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				playAll(t, s)
			})
		}
	})
	s.Report(t)
	t.Logf("%s of CPU without API server and etcd", (processorTime() - cpu).Round(time.Second))
}

// playAll plays the next histories on an API server of their own, until there are no more.
func playAll(t *testing.T, s *history.Study) {
	t.Helper()
	site := newSite(t)
	for seed, more := s.Next(); more; seed, more = s.Next() {
		h := historyOf(seed)
		broken, told := play(t, site, h)
		s.Note(seed, broken)
		switch {
		case broken != "" && s.Short:
			t.Errorf("%d %s", seed, broken)
		case broken != "":
			t.Errorf("seed %d breaks %s\n%s\n\nPlay it again: CLUSTER_HISTORY='%s' go test ./test/cluster -run '^TestHistories$' -v", seed, broken, strings.Join(told, "\n"), h)
		}
	}
	if denied, err := site.cluster.Denied(t.Context(), env.ControllerWrites); err != nil || denied > 0 {
		t.Errorf("%d writes that config/manager/admission.yaml does not list, %v", denied, err)
	}
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

// kinds are the names of all events that a history of any seed may have, sorted; lateKinds of those from history.Late
// up.
func kinds() []string     { return slices.Sorted(maps.Keys(happenings())) }
func lateKinds() []string { return slices.Sorted(maps.Keys(lateHappenings())) }

// play lets a history take place in a cluster of its own. Broken names the invariant that does not hold and says how.
func play(t *testing.T, site *fleet, h history.History) (broken string, told []string) {
	t.Helper()
	t.Run(fmt.Sprint(h.Seed), func(t *testing.T) {
		begun := time.Now()
		s := newRun(t, site, h.Seed)
		s.plays(h)
		broken, told = s.isBroken(), s.told
		t.Logf("%d events, %s", len(h.Events), time.Since(begun).Round(100*time.Millisecond))
	})
	return broken, told
}

func (s *run) plays(h history.History) {
	for _, e := range h.Events {
		if s.isBroken() != "" {
			return
		}
		random := e.Random()
		if event, late := lateHappenings()[e.Kind]; late {
			event(s, random)
		} else {
			happenings()[e.Kind](s, random)
		}
		s.rounds(e.Reconciles/3, random)
	}
	for _, end := range []func(){s.faultsEnd, s.settles, s.released} {
		if s.isBroken() == "" {
			end()
		}
	}
}

// faultsEnd ends every fault but the death of the machines that never return. Pods of users stay: what is reported at
// rest has a cause.
func (s *run) faultsEnd() {
	s.tell("the faults end")
	for _, p := range s.all() {
		p.hardware.Fail = nil
		p.deaf.Store(false)
		switch {
		case p.off && !p.lost:
			s.returns(p)
		case !p.off && p.down.Load():
			p.stop()
			s.startAgent(p)
		}
	}
	s.repair()
	s.comesToRest()
	s.truthful()
}

// settles ends the users, edits the policies so that what failed is tried again, and looks whether every node gets
// there.
func (s *run) settles() {
	s.tell("the users leave, and the policies are edited")
	s.record.begin()
	for _, p := range s.all() {
		p.hardware.Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].Processes = nil
			}
		})
		for _, pod := range s.podsOn(p.name) {
			if pod.Namespace == users {
				s.ended(pod.Name)
			}
		}
	}
	for _, p := range s.current() {
		s.edits(&p, func(p *v1alpha1.GPUSharingPolicy) {
			p.Spec.Rollout.Paused, p.Spec.Rollout.FailureThreshold, p.Spec.Rollout.Reboot = false, 10, v1alpha1.RebootModeIfRequired
			p.Spec.Rollout.Drain.TimeoutSeconds++
		})
	}
	s.comesToRest()
	s.truthful()
	s.progressed()
	s.inBudget()
}

// released deletes every policy, and looks whether everything is as it was before the operator.
func (s *run) released() {
	s.tell("every policy is deleted")
	s.record.begin()
	for _, p := range s.current() {
		s.deleted(&p)
	}
	s.comesToRest()
	s.restored()
	s.inBudget()
}

// comesToRest rests for eight hours, in which nothing may go on all the time.
func (s *run) comesToRest() {
	s.forget()
	if !s.rest(8*time.Hour, 400) {
		s.breaks("bounded", "400 rounds in 8h do not come to rest: %s; containers wait: %v", s.counted(), s.containersWaiting())
	}
	s.bounded("in 8h in which nobody else does anything", mostAtRest)
	s.tell("everything rests: %s", s.counted())
}

// containersWaiting are the containers of all nodes that do not run, and why not, with the first GPU of the node.
func (s *run) containersWaiting() (why []string) {
	for _, p := range s.all() {
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
