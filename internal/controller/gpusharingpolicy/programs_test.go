// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"errors"
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// driver makes a DaemonSet like the one of NVIDIA's DRA driver for all nodes, with a pod on node b.
func (r *reading) driver(namespace, account string) *appsv1.DaemonSet {
	labels := map[string]string{cluster.DRALabels()[0]: "kubelet-plugin"}
	spec := corev1.PodSpec{NodeName: "b", ServiceAccountName: account, Containers: []corev1.Container{{Name: "gpus"}}}
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "plugin", UID: "set"}}
	set.Spec.Template.Labels, set.Spec.Template.Spec = labels, spec
	cached, err := slimDaemonSet(set)
	r.Expect(err).NotTo(HaveOccurred())
	slim, is := cached.(*appsv1.DaemonSet)
	r.Expect(is).To(BeTrue())
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: "plugin", UID: "pod", Labels: labels,
	}, Spec: spec}
	owner := metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))
	pod.OwnerReferences = []metav1.OwnerReference{*owner}
	for _, o := range []client.Object{slim, pod} {
		r.Expect(r.client.Create(r.t.Context(), o)).To(Succeed())
	}
	r.changes.note(pod, true)
	return slim
}

// gatherAfter gathers after a time, and reports which nodes and how many pods NVIDIA's DRA driver has.
func (r *reading) gatherAfter(after time.Duration) (nodes, pods int) {
	r.Clock = clocktesting.NewFakePassiveClock(r.Clock.Now().Add(after))
	for _, n := range r.nodes() {
		if n.DRA != "" {
			nodes++
		}
		for _, p := range n.Pods {
			if p.DRA {
				pods++
			}
		}
	}
	return nodes, pods
}

// A DaemonSet of a tenant with the labels of NVIDIA's DRA driver would take every GPU node from the operator.
func TestADRADriverIsKnownByTheRightsOfItsAccount(t *testing.T) {
	r := newReading(t)
	r.publisher = "system:serviceaccount:nvidia:plugin"
	r.driver("tenant", "plugin")
	nodes, pods := r.gatherAfter(0)
	r.Expect([]int{nodes, pods}).To(Equal([]int{0, 0}))

	r.driver("nvidia", "plugin")
	nodes, pods = r.gatherAfter(0)
	r.Expect([]int{nodes, pods}).To(Equal([]int{3, 1}))
	r.Expect(r.asked).To(Equal(2))
	r.gatherAfter(mayNotPublish - time.Second)
	r.Expect(r.asked).To(Equal(2), "the API server is not asked in each reconcile")
	r.gatherAfter(time.Second)
	r.Expect(r.asked).To(Equal(3), "about the tenant's")
}

// Helm makes an account's rights before a DaemonSet; others may not.
func TestADRADriverCountsOnceItsAccountMayPublish(t *testing.T) {
	r := newReading(t)
	r.driver("nvidia", "")
	nodes, _ := r.gatherAfter(0)
	r.Expect(nodes).To(BeZero())
	r.publisher = "system:serviceaccount:nvidia:default"
	nodes, pods := r.gatherAfter(mayNotPublish)
	r.Expect([]int{nodes, pods}).To(Equal([]int{3, 1}), "its pods are read again")
}

// Nobody is taken for NVIDIA's, nor for another, because the API server does not answer.
func TestWithoutAnAnswerTheLastOneAboutADRADriverCounts(t *testing.T) {
	r := newReading(t)
	r.publisher = "system:serviceaccount:nvidia:plugin"
	r.driver("nvidia", "plugin")
	r.unanswered = errors.New("etcdserver: leader changed")
	_, err := r.try()
	r.Expect(err).To(MatchError(ContainSubstring("nvidia/plugin")), "nothing is decided")
	r.unanswered = nil
	nodes, _ := r.gatherAfter(0)
	r.Expect(nodes).To(Equal(3))
	r.unanswered = errors.New("etcdserver: leader changed")
	nodes, pods := r.gatherAfter(mayPublish)
	r.Expect([]int{nodes, pods}).To(Equal([]int{3, 1}))
}

// A tenant can make any number of DaemonSets that look like the driver's, each with an account of its own, which need
// not exist.
func TestATenantsDaemonSetsDelayNoReconcile(t *testing.T) {
	r := newReading(t)
	r.publisher = "system:serviceaccount:nvidia:plugin"
	first := r.driver("a-tenant", "first")
	sets := []*appsv1.DaemonSet{first}
	for i := range 5 * mostQuestions {
		set := first.DeepCopy()
		set.ResourceVersion, set.Name, set.UID = "", fmt.Sprint("x-", i), ""
		set.Spec.Template.Spec.ServiceAccountName = set.Name
		r.Expect(r.client.Create(t.Context(), set)).To(Succeed())
		sets = append(sets, set)
	}
	r.driver("nvidia", "plugin")
	nodes, _ := r.gatherAfter(0)
	r.Expect(r.asked).To(Equal(mostQuestions))
	r.Expect(nodes).To(Equal(3), "the tenant's accounts wait for one another, and the driver's for none of them")
	for range 5 {
		r.gatherAfter(0)
	}
	r.Expect(r.asked).To(Equal(len(sets) + 1))
	for range 24 * 60 {
		r.gatherAfter(time.Minute)
	}
	r.Expect(r.asked).To(BeNumerically("<", len(sets)*(24*6+8)), "about an account that may not at most every ten minutes")
	for _, set := range sets {
		r.Expect(r.client.Delete(t.Context(), set)).To(Succeed())
	}
	r.gatherAfter(0)
	r.Expect(r.publishers).To(HaveLen(1), "the accounts that no DaemonSet has are forgotten")
}

// The GPU Operator runs the DRA driver in its own namespace for a GPUCluster.
func TestTheDRADriverOfAGPUClusterNeedsNoQuestion(t *testing.T) {
	r := newReading(t)
	r.driver("gpu-operator", "plugin")
	s := &seen{plugin: &pluginconfig.Observed{GPUOperators: []string{"gpu-operator"}}}
	r.Expect(r.gatherNodes(t.Context(), s)).To(Succeed())
	r.Expect(s.snapshot.Nodes).To(HaveEach(HaveField("DRA", "DaemonSet gpu-operator/plugin")))
	r.Expect(r.asked).To(BeZero())
}

// NFD's worker writes a NodeFeature with the name of its node in its own namespace. GPU Feature Discovery and the
// operator write others.
func TestTheNamespacesOfNFDAreThoseOfItsWorkers(t *testing.T) {
	r, f := newReading(t), features{Features: cluster.NewFeatures()}
	named := map[string]string{"nfd": "a", "gpu-operator": "nvidia-features-for-a", "own": "zz-gpu-sharing-a"}
	for namespace, name := range named {
		feature := &unstructured.Unstructured{Object: map[string]any{}}
		feature.SetNamespace(namespace)
		feature.SetName(name)
		feature.SetLabels(map[string]string{cluster.LabelNodeName: "a"})
		f.AddAll([]unstructured.Unstructured{*feature}, r.Namespace)
	}
	programs, _, err := r.gatherPrograms(t.Context(), &seen{plugin: &pluginconfig.Observed{}, features: f})
	r.Expect(err).NotTo(HaveOccurred())
	r.Expect(programs.Discovery).To(Equal([]string{"nfd"}))
}
