// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// TestWaitingPodsAreComparedOnce: pods with the same request and node selector are compared with the nodes once, and
// only with the nodes that have a label which they select.
func TestWaitingPodsAreComparedOnce(t *testing.T) {
	g := NewWithT(t)
	i := unmetFinder{met: map[Demand]bool{}, waiting: map[uint64][]string{}, found: map[string]map[unmetKey]*unmet{}}
	for n := range 500 {
		i.offers = append(i.offers, &offer{
			Policy: fmt.Sprint("p", n%2), Labels: map[string]string{"pool": fmt.Sprint(n % 5), "host": fmt.Sprint(n)}, Resources: map[string]int64{"nvidia.com/gpu": 2},
		})
	}
	pod := func(n int, selector map[string]string, requests int64) *cluster.Pod {
		return &cluster.Pod{Workload: fmt.Sprint("Job batch/", n), NodeSelector: selector, Requests: map[string]int64{"nvidia.com/gpu": requests}}
	}
	for n := range 1000 {
		for _, p := range []*cluster.Pod{
			pod(n, map[string]string{"pool": "h100"}, 1), pod(n, map[string]string{"pool": "1", "nvidia.com/gpu.product": "any"}, 1),
			pod(n, map[string]string{"pool": "1", "host": "6"}, 4),
		} {
			d, requests := demandOf(p)
			g.Expect(requests).To(BeTrue())
			for _, name := range i.policiesFor(p, d) {
				i.weigh(name, p, d)
			}
		}
	}
	again := pod(0, map[string]string{"pool": "1", "host": "6"}, 4)
	d, _ := demandOf(again)
	g.Expect(testing.AllocsPerRun(10, func() {
		i.policiesFor(again, d)
		i.isMet(again, d)
	})).To(BeZero(), "nodes are not looked at again")
	g.Expect(i.waiting).To(HaveLen(3))
	g.Expect(i.met).To(HaveLen(2), "no policy has a node of the pool h100")
	g.Expect(i.admitting(pod(0, map[string]string{"pool": "h100"}, 1))).To(BeEmpty())
	g.Expect(i.admitting(pod(0, map[string]string{"pool": "1", "host": "6"}, 1))).To(HaveLen(1))
	g.Expect(i.admitting(pod(0, map[string]string{"pool": "2", "host": "6"}, 1))).To(BeEmpty())
	g.Expect(i.admitting(pod(0, map[string]string{"nvidia.com/gpu.product": "any"}, 1))).To(HaveLen(500))
	g.Expect(i.found).To(HaveKey("p0"))
	g.Expect(i.found).To(HaveLen(1))
	g.Expect(i.found["p0"]).To(HaveLen(1000), "each workload is named")
}

// TestPodsOfTheSameDemandWaitTogether, and are read again only where they have changed.
func TestPodsOfTheSameDemandWaitTogether(t *testing.T) {
	g := NewWithT(t)
	s, q := &cluster.Snapshot{UnscheduledVersion: 1}, podQueue{}
	for n := range 1000 {
		s.Unscheduled = append(s.Unscheduled, cluster.Pod{
			NodeSelector: map[string]string{"pool": fmt.Sprint(n % 2)}, Requests: map[string]int64{"nvidia.com/gpu": 1}, Terminating: n == 999,
		})
	}
	g.Expect(q.Of(s)).To(HaveExactElements(
		WithTransform(func(w waitingDemand) int { return len(w.pods) }, Equal(500)), WithTransform(func(w waitingDemand) int { return len(w.pods) }, Equal(499))))
	same := *s
	same.Unscheduled = nil
	g.Expect(q.Of(&same)).To(HaveLen(2))
	same.UnscheduledVersion++
	g.Expect(q.Of(&same)).To(BeEmpty())
}
