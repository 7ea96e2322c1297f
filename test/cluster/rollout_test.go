// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
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

// TestADefaultBesideAPolicyForSomeNodes: on two nodes a cluster-wide default and a policy for one of them stand side by
// side, and the default governs both when that policy goes.
func TestADefaultBesideAPolicyForSomeNodes(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	f.policy(timeSlicing("2"), "{maxUnavailable: 2}")
	f.ready()
	f.step("each node has the policy with the highest priority that selects it", func() {
		f.apply("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: some}, spec: {priority: 10, " +
			"nodeSelector: {matchLabels: {kubernetes.io/hostname: n02}}, sharing: " + timeSlicing("4") + "}}")
		f.advertise(map[string]int64{"n01": 4, "n02": 8})
		f.Expect(f.spec("n01").PolicyName).To(Equal("research"))
		f.Expect(f.spec("n02").PolicyName).To(Equal("some"))
		f.ready()
	})
	f.step("the default governs the node of a policy that goes", func() {
		gone := &v1alpha1.GPUSharingPolicy{}
		gone.Name = "some"
		f.Expect(f.client.Delete(t.Context(), gone)).To(Succeed())
		f.advertise(map[string]int64{"n01": 4, "n02": 4})
		f.Eventually(func() string { return f.spec("n02").PolicyName }, patience, pollEvery).Should(Equal("research"))
	})
}

// advertise waits until the nodes advertise so many GPUs.
func (f *fleet) advertise(want map[string]int64) {
	f.t.Helper()
	f.Eventually(func() map[string]int64 {
		have := map[string]int64{}
		for _, n := range f.world().Nodes {
			have[n.Name] = n.Allocatable["nvidia.com/gpu"]
		}
		return have
	}, patience, pollEvery).Should(Equal(want))
}

// tenant is a namespace in which a user with the role edit creates what they like.
const tenant = "tenant"

// tenantEvent lets a pod of a tenant come to a node that uses no GPU, and looks like one of NVIDIA's or of Node Feature
// Discovery's. It stays until the history ends.
func (s *run) tenantEvent(random *rand.Rand) {
	p := history.Some(s, random)
	if p.off {
		return
	}
	looks := map[string]func(*corev1.Pod){
		"a workload of the validator": func(p *corev1.Pod) { p.Labels[cluster.LabelApp] = "nvidia-cuda-validator" },
		"Node Feature Discovery":      func(p *corev1.Pod) { p.Labels["app.kubernetes.io/name"] = "node-feature-discovery" },
	}
	for _, label := range cluster.DeployLabels() {
		looks[label] = func(p *corev1.Pod) { p.Spec.NodeSelector[label] = "true" }
	}
	names := slices.Sorted(maps.Keys(looks))
	look := names[random.IntN(len(names))]
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenant, GenerateName: "tenant-", Labels: map[string]string{}},
		Spec: corev1.PodSpec{
			NodeName: p.name, NodeSelector: map[string]string{}, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/none"}},
		},
	}
	looks[look](pod)
	owned := random.IntN(2) == 0
	if owned {
		pod.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: "apps/v1", Kind: "DaemonSet", Name: "nvidia-device-plugin-daemonset", UID: "theirs", Controller: new(true),
		}}
	}
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}
	s.Eventually(func() error { return s.client.Create(s.t.Context(), space) }, patience, pollEvery).
		Should(Or(Succeed(), Satisfy(apierrors.IsAlreadyExists)))
	s.Eventually(func() error { return s.client.Create(s.t.Context(), pod) }, patience, pollEvery).Should(Succeed())
	s.Tell("pod %s of a tenant comes to %s, and looks like %s; with a controller: %v", pod.Name, p.name, look, owned)
}
