// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// BenchmarkDecide decides on 1000 nodes of 8 GPUs that are up to date: when nothing is known of them, when nothing has
// changed since the last reconcile, and when one node has.
func BenchmarkDecide(b *testing.B) {
	for name, sharing := range map[string]v1alpha1.Sharing{"TimeSlicing": timeSlicing(4), "MIG": mig(count("3g", 1), count("1g", 3))} {
		s := upToDate(b, sharing, 1000)
		b.Run(name+"/Anew", func(b *testing.B) {
			for b.Loop() {
				rollout.Decide(s)
			}
		})
		var memory rollout.Memory
		memory.Decide(s)
		b.Run(name+"/Unchanged", func(b *testing.B) {
			for b.Loop() {
				memory.Decide(s)
			}
		})
		b.Run(name+"/One", func(b *testing.B) {
			for b.Loop() {
				s.Nodes[500].Version++
				memory.Decide(s)
			}
		})
	}
}

// BenchmarkWaiting decides on 1000 nodes of which one at a time may change: all others wait.
func BenchmarkWaiting(b *testing.B) {
	s := upToDate(b, timeSlicing(4), 1000)
	s.Policies[0].Spec.Sharing = mig(count("3g", 1), count("1g", 3))
	s.Policies[0].Generation++
	var memory rollout.Memory
	memory.Decide(s)
	for b.Loop() {
		memory.Decide(s)
	}
}

// upToDate is a snapshot of nodes that match the desired state of their policy.
func upToDate(b *testing.B, sharing v1alpha1.Sharing, nodes int) cluster.Snapshot {
	b.Helper()
	c := newSite()
	c.add("n0", slices.Repeat([]sim.Model{sim.A100}, 8)...)
	c.setPolicy("research", sharing)
	c.run(60)
	s := c.world()
	s.Nodes[0].Version = 1
	for i := 1; i < nodes; i++ {
		n := s.Nodes[0]
		n.Name = fmt.Sprintf("n%04d", i)
		s.Nodes = append(s.Nodes, n)
	}
	if d := rollout.Decide(s); len(d.Actions) > 0 || d.Policies["research"].Nodes.Ready != int32(nodes) {
		b.Fatal(d.Actions, d.Policies)
	}
	return s
}

// BenchmarkFleet decides on 5,000 nodes of 8 GPUs that are up to date, while 10,000 pods wait for another pool: when
// nothing has changed since the last reconcile, and when one node has. Of one hundred nodes too, since what one node's
// change costs must not grow with the others. 200 policies stand beside the one that governs all nodes: they select GPUs
// of another product, or the same nodes.
func BenchmarkFleet(b *testing.B) {
	const policies = 200
	besides := map[string]func(*v1alpha1.GPUSharingPolicy){
		"Others": func(p *v1alpha1.GPUSharingPolicy) {
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"Tesla-T4"}}
		},
		"Conflicts": func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Priority = -1 },
	}
	for name, of := range besides {
		for _, nodes := range []int{100, 5000} {
			s := upToDate(b, timeSlicing(4), nodes)
			for i := range s.Nodes {
				s.Nodes[i].Version = int64(i + 1)
			}
			for i := range policies {
				s.Policies = append(s.Policies, policyOf(fmt.Sprintf("p%03d", i), timeSlicing(2), of))
			}
			for i := range 10_000 {
				s.Unscheduled = append(s.Unscheduled, cluster.Pod{
					Namespace: "batch", Name: fmt.Sprint(i), UID: fmt.Sprint(i), GPU: true, Requests: gpusOnly(1),
					Workload: fmt.Sprint("Job batch/", i), NodeSelector: map[string]string{"pool": "h100"},
				})
			}
			s.UnscheduledVersion = 1
			var memory rollout.Memory
			memory.Decide(s)
			b.Run(fmt.Sprintf("%s/%d/Unchanged", name, nodes), func(b *testing.B) {
				for b.Loop() {
					memory.Decide(s)
				}
			})
			b.Run(fmt.Sprintf("%s/%d/One", name, nodes), func(b *testing.B) {
				for b.Loop() {
					s.Nodes[nodes/2].Version += 10_000
					memory.Decide(s)
				}
			})
		}
	}
}
