// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// BenchmarkDecide decides on 1000 nodes of 8 GPUs that are up to date.
func BenchmarkDecide(b *testing.B) {
	for name, sharing := range map[string]v1alpha1.Sharing{"TimeSlicing": timeSlicing(4), "MIG": mig(count("3g", 1), count("1g", 3))} {
		b.Run(name, func(b *testing.B) {
			c := newCluster()
			c.add("n0", slices.Repeat([]sim.Model{sim.A100}, 8)...)
			c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", sharing)}
			c.run(60)
			w := c.world()
			for i := 1; i < 1000; i++ {
				n := w.Nodes[0]
				n.Name = fmt.Sprintf("n%d", i)
				w.Nodes = append(w.Nodes, n)
			}
			if d := rollout.Decide(w); len(d.Actions) > 0 || d.Policies["research"].Nodes.Ready != 1000 {
				b.Fatal(d.Actions, d.Policies)
			}
			for b.Loop() {
				rollout.Decide(w)
			}
		})
	}
}
