// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

func timeSlicing(replicas string) string {
	return "{strategy: TimeSlicing, timeSlicing: {replicas: " + replicas + "}}"
}

const sevenEach = "{strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}"

// TestTwentyNodes is the life of a policy on 20 nodes. How many of them change at the same moment is counted at every
// event of a Node or GPUNode.
func TestTwentyNodes(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 20)

	f.step("time-slicing, 40% at a time", func() {
		f.policy(timeSlicing("4"), `{maxUnavailable: "40%"}`)
		f.ready()
		a := f.record.account()
		f.Expect(a.most).To(And(BeNumerically("<=", 8), BeNumerically(">", 1)))
		f.Expect(a.order).To(HaveLen(20))
		f.Expect(a.order[0]).To(Equal("n01"))
		f.Expect(a.alone).To(BeTrue(), "the first node goes alone: %v", a.order)
		f.Expect(a.tainted).To(BeEmpty())
	})

	for _, m := range f.machines[:4] {
		f.pod("holder-"+m.name, m.name, "nvidia.com/gpu")
		f.pod("bystander-"+m.name, m.name, "")
	}
	everybody := f.pods()
	f.step("more replicas disturb nobody", func() {
		f.policy(timeSlicing("8"), `{maxUnavailable: "100%"}`)
		f.ready()
		f.Expect(f.record.account().tainted).To(BeEmpty())
		f.Expect(f.pods()).To(ConsistOf(everybody))
	})

	f.step("MIG evicts who holds a GPU and nobody else, 7 nodes at a time", func() {
		for _, m := range f.machines[:4] {
			f.evicted = append(f.evicted, users+"/holder-"+m.name)
		}
		f.policy(sevenEach, `{maxUnavailable: 7, drain: {mode: Evict}}`)
		f.ready()
		a := f.record.account()
		f.Expect(a.most).To(And(BeNumerically("<=", 7), BeNumerically(">", 1)))
		f.Expect(a.alone).To(BeTrue(), "the first node goes alone: %v", a.order)
		f.Expect(a.tainted).To(HaveLen(20))
		f.Expect(f.pods()).To(ConsistOf("bystander-n01", "bystander-n02", "bystander-n03", "bystander-n04"))
	})

	f.step("a node that fails halts the rollout and goes back", func() {
		f.machines[0].deaf.Store(true)
		f.policy("{strategy: MIG, mig: {layouts: [{fill: 2g.10gb}]}}", `{maxUnavailable: 7, failureThreshold: 1}`)
		f.Eventually(func() string { return f.key("n01") }, patience, pollEvery).ShouldNot(Equal(f.key("n02")))
		f.later(6 * time.Minute)
		f.Eventually(func() *v1alpha1.FailedChange { return f.gpuNode("n01").Status.Rollout.Failed }, patience, pollEvery).ShouldNot(BeNil())
		f.machines[0].deaf.Store(false)
		f.Eventually(func() string { return f.key("n01") }, patience, pollEvery).Should(Equal(f.key("n02")))
		f.settled()
		a := f.record.account()
		f.Expect(a.order).To(Equal([]string{"n01"}), "no other node was started")
		f.Expect(f.gpuNode("n01").Status.Rollout.Failed.Reason).To(Equal(v1alpha1.ReasonNotAdvertised))
	})

	f.step("without a policy every node is as it was", func() {
		f.Expect(f.client.DeleteAllOf(t.Context(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
		f.Eventually(func(g Gomega) {
			for _, n := range f.world().Nodes {
				g.Expect(n.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}), n.Name)
			}
		}, patience, 5*pollEvery).Should(Succeed())
		f.Expect(f.record.account().most).To(BeNumerically("<=", 7))
	})
}

// step is a part of a run, after which everything is intact.
func (f *fleet) step(name string, do func()) {
	f.t.Helper()
	begun := time.Now()
	f.record.begin()
	do()
	f.intact()
	f.t.Logf("%s: %s", name, time.Since(begun).Round(100*time.Millisecond))
}

// key is the key that a node selects.
func (f *fleet) key(node string) string {
	f.t.Helper()
	return f.keys()[node]
}

// keys are the keys that the nodes select at one moment, by node.
func (f *fleet) keys() map[string]string {
	f.t.Helper()
	keys := map[string]string{}
	for _, n := range f.world().Nodes {
		keys[n.Name] = n.Labels[v1alpha1.LabelConfig]
	}
	return keys
}

func (f *fleet) spec(node string) v1alpha1.GPUNodeSpec { return f.gpuNode(node).Spec }

func (f *fleet) gpuNode(node string) *v1alpha1.GPUNode {
	f.t.Helper()
	n := &v1alpha1.GPUNode{}
	f.Expect(client.IgnoreNotFound(f.client.Get(f.t.Context(), types.NamespacedName{Name: node}, n))).To(Succeed())
	return n
}
