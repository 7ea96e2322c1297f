// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// decisionBound is the processor's time that a decision for 1,000 nodes with 8 GPUs and 1,000 pods may take once the
// layouts of its GPUs are known. The aim is 10 ms.
const decisionBound = 40 * time.Millisecond

// TestDecisionBound decides for a large pool whose GPUs have 1,500 different states; most of it is in use.
func TestDecisionBound(t *testing.T) {
	g := NewWithT(t)
	r := rand.New(rand.NewPCG(8, 8))
	pool := demand.Pool{Profiles: []string{"1g", "2g", "3g", "4g", "7g"}, Idle: time.Minute, Budget: -1}
	d := device(t, sim.A100)
	profiles := []string{"1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"}
	var layouts []gpu.Device
	for _, set := range profileSets(d) {
		layouts = append(layouts, occupied(d, set))
	}
	epoch := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	now := epoch.Add(time.Hour)
	for n := range 8000 {
		of := demand.GPU{Node: fmt.Sprintf("%04d", n/8), UUID: fmt.Sprintf("%05d", n), Model: &d}
		instances := layouts[r.IntN(len(layouts))].State.Instances
		slices.SortFunc(instances, func(a, b gpu.Instance) int { return a.Placement.Start - b.Placement.Start }) // as agents report
		for _, i := range instances {
			one := demand.Instance{Instance: i, IdleSince: epoch}
			switch draw := r.IntN(10); {
			case draw < 8:
				one.Holder = "a/b"
			case draw == 8:
				continue
			}
			of.Instances = append(of.Instances, one)
		}
		pool.GPUs = append(pool.GPUs, of)
	}
	var classes []demand.Class
	for n := range 10 {
		classes = append(classes, demand.Class{
			Asks: map[string]int{profiles[n%5]: 1}, Pods: 100, Priority: int32(n / 5), Oldest: now.Add(-time.Minute),
		})
	}
	memory, served := &demand.Memory{}, 0
	decide := func() time.Duration {
		before := cpuTime()
		served = len(memory.Decide(now, pool, classes).Changes)
		return cpuTime() - before
	}
	first, least := decide(), time.Hour
	for range 9 {
		least = min(least, decide())
	}
	t.Logf("the first decision took %s, the next %s; %d GPUs changed", first, least, served)
	g.Expect(served).To(BeNumerically(">", 100))
	g.Expect(least).To(BeNumerically("<=", slowdown*decisionBound))
}
