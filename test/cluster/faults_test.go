// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestFaults strikes rollouts where only a real API server, real caches and real agents show what becomes of it. What
// is decided under each fault in each state is shown by TestEveryFaultInEveryState of internal/engine/rollout.
func TestFaults(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, env.WithInterruptions())
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
	f.step("NVIDIA's DRA driver offers the GPUs of a node, and shows by its ResourceSlice alone", func() {
		slice := draSlice("n02")
		f.Expect(f.client.Create(t.Context(), slice)).To(Succeed())
		f.Eventually(func() string { return f.waits("n02") }, patience, pollEvery).Should(And(HavePrefix(v1alpha1.ReasonDRADriverActive), ContainSubstring("ResourceSlice "+slice.Name)))
		f.policy(timeSlicing("3"), "{maxUnavailable: 1}")
		f.Eventually(f.keys, patience, pollEvery).Should(Satisfy(func(keys map[string]string) bool {
			return keys["n01"] == keys["n03"] && keys["n01"] != keys["n02"]
		}))
		f.Eventually(func() bool { return f.verified("n01") && f.verified("n03") }, patience, pollEvery).Should(BeTrue(),
			"the time that is skipped below is none of their deadlines")
		f.Expect(f.client.Delete(t.Context(), slice)).To(Succeed())
		f.Eventually(func() string { return f.waits("n02") }, patience, pollEvery).Should(ContainSubstring("takes the node over at"))
		f.later(6 * time.Minute)
		f.ready()
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

// draSlice is the ResourceSlice in which NVIDIA's DRA driver offers a GPU of a node.
func draSlice(node string) *resourcev1.ResourceSlice {
	return &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "dra-" + node},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: dra.DriverName, NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, ResourceSliceCount: 1}, Devices: []resourcev1.Device{{Name: "gpu-0"}},
		},
	}
}

// verified reports whether a node has advertised what it is configured for.
func (f *fleet) verified(node string) bool {
	f.t.Helper()
	for _, n := range f.world().Nodes {
		if good := n.GPU.Status.Rollout.LastGood; n.Name == node && good != nil {
			return good.ConfigName == n.Labels[v1alpha1.LabelConfig]
		}
	}
	return false
}

// waits is the reason and the message of a node that the policy lists as pending; empty: it does not.
func (f *fleet) waits(node string) string {
	f.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	f.Expect(f.client.Get(f.t.Context(), types.NamespacedName{Name: "research"}, p)).To(Succeed())
	for _, n := range p.Status.Pending {
		if n.NodeName == node {
			return n.Reason + ": " + n.Message
		}
	}
	return ""
}

// tainted waits until some node is, and is content if the rollout is over.
func (f *fleet) tainted() {
	f.t.Helper()
	f.Eventually(func() bool {
		s := f.world()
		done := true
		for _, n := range s.Nodes {
			if len(n.Taints) > 0 {
				return true
			}
			done = done && !underway(&n.GPU) && n.GPU.Status.Rollout.LastGood != nil
		}
		return done
	}, patience, pollEvery).Should(BeTrue())
}
