// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// TestFaults strikes rollouts where only a real API server, real caches and real agents show what becomes of it. What is
// decided under each fault in each state is shown by TestEveryFaultInEveryState of internal/rollout.
func TestFaults(t *testing.T) {
	f := newFleet(t, 3)
	f.step("the leader is replaced again and again", func() {
		f.policy(sevenEach, "{maxUnavailable: 1}")
		for range 6 {
			f.tainted()
			f.leader()
			f.leader = f.lead()
		}
		f.ready()
		f.Expect(f.record.account().most).To(Equal(1))
	})
	f.step("an agent is lost in the middle of its steps", func() {
		f.policy("{strategy: MIG, mig: {layouts: [{fill: 2g.10gb}]}}", "{maxUnavailable: 1}")
		f.tainted()
		f.machines[0].down.Store(true)
		f.settled()
		f.machines[0].down.Store(false)
		f.ready()
		f.Expect(f.record.account().most).To(Equal(1))
	})
	f.step("the API server is away for a minute", func() {
		f.policy(timeSlicing("4"), "{maxUnavailable: 1}")
		f.tainted()
		f.Expect(f.cluster.Interrupt()).To(Succeed())
		f.clock.skip(time.Minute)
		f.Expect(f.cluster.Resume()).To(Succeed())
		f.record.resume()
		f.ready()
	})
}

// tainted waits until some node is, and is content if the rollout is over.
func (f *fleet) tainted() {
	f.t.Helper()
	f.Eventually(func() bool {
		w := f.world()
		done := true
		for _, n := range w.Nodes {
			if len(n.Taints) > 0 {
				return true
			}
			done = done && !underway(n.GPU.Spec) && n.GPU.Spec.LastGood != nil
		}
		return done
	}, time.Minute, pollEvery).Should(BeTrue())
}
