// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// configLabel is what NVIDIA's config-manager goes by.
const configLabel = "nvidia.com/device-plugin.config"

// What follows is done without us: it shows that the node, NVIDIA's programs and the stand-in for the GPU Operator
// behave as NVIDIA's documentation says, so that what is proved of us later means something.
func byHandSpecs() {
	Describe("NVIDIA's stack alone, by hand", Ordered, Offset(1), func() {
		const configMap = "time-slicing-config"

		BeforeAll(func(ctx SpecContext) { begin(ctx, sim.A100, sim.A100) })
		AfterAll(func(ctx SpecContext) {
			stopPods(ctx)
			label(ctx, configLabel, "")
			mergeClusterPolicy(ctx, `{"spec":{"devicePlugin":{"config":{"name":"","default":""}}}}`)
			Expect(client.IgnoreNotFound(kube.Delete(ctx, handMade(configMap, nil)))).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
		})

		It("gives a pod a whole GPU", func(ctx SpecContext) {
			startPod(ctx, "whole", "nvidia.com/gpu", 1)
			got := expectRunning(ctx, "whole")
			Expect(got).To(beExactly(got.uuid()))
		})

		It("time-slices as a ConfigMap says, once ClusterPolicy and node label name it", func(ctx SpecContext) {
			Expect(kube.Create(ctx, handMade(configMap, map[string]string{
				"four":  "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 4}\n",
				"eight": "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 8}\n",
				"mps":   "version: v1\nsharing:\n  mps:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 4}\n",
			}))).To(Succeed())
			mergeClusterPolicy(ctx, `{"spec":{"devicePlugin":{"config":{"name":"time-slicing-config"}}}}`)
			label(ctx, configLabel, "four")
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			Eventually(nodeLabels).WithContext(ctx).Should(And(
				HaveKeyWithValue("nvidia.com/gpu.replicas", "4"), HaveKeyWithValue("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-40GB-SHARED")))
		})

		It("follows the label to another key without a restart", func(ctx SpecContext) {
			before, err := restarts(ctx)
			Expect(err).NotTo(HaveOccurred())
			began := time.Now()
			label(ctx, configLabel, "eight")
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 16})
			AddReportEntry("label to allocatable", time.Since(began).Round(10*time.Millisecond).String())
			Expect(restarts(ctx)).To(Equal(before))
		})

		// config-manager's first look at the label comes too early, so that it takes the default configuration; and its
		// signal does not reach the daemon.
		It("does not share by MPS by a node's label: NVIDIA's MPS daemon runs and serves nothing", func(ctx SpecContext) {
			label(ctx, configLabel, "mps")
			Eventually(nodeLabels).WithContext(ctx).Should(HaveKeyWithValue(capableLabel, "true"))
			Eventually(func(g Gomega) {
				pods, err := mpsPods(ctx)
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(pods).To(HaveLen(1))
				log, err := machine.Client.CoreV1().Pods(gpuoperator.Namespace).
					GetLogs(pods[0].Name, &corev1.PodLogOptions{Container: "mps-control-daemon-ctr"}).DoRaw(ctx)
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(string(log)).To(ContainSubstring("No devices are configured for MPS sharing"))
			}).WithContext(ctx).Should(Succeed())
			Expect(offered(ctx)).To(BeEmpty())
		})
	})
}

func handMade(name string, data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: gpuoperator.Namespace, Name: name}, Data: data}
}

// label sets a label of the node, or removes it.
func label(ctx context.Context, key, value string) {
	GinkgoHelper()
	n := &corev1.Node{}
	Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)).To(Succeed())
	before := n.DeepCopy()
	n.Labels[key] = value
	if value == "" {
		delete(n.Labels, key)
	}
	Expect(kube.Patch(ctx, n, client.MergeFrom(before))).To(Succeed())
}

func mergeClusterPolicy(ctx context.Context, patch string) {
	GinkgoHelper()
	p := &unstructured.Unstructured{}
	p.SetGroupVersionKind(gpuoperator.PolicyKind())
	p.SetName(gpuoperator.PolicyName)
	Expect(kube.Patch(ctx, p, client.RawPatch("application/merge-patch+json", []byte(patch)))).To(Succeed())
}

func nodeLabels(ctx context.Context) (map[string]string, error) {
	n := &corev1.Node{}
	err := kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)
	return n.Labels, err
}

// expectAllocatable waits until the kubelet offers exactly this. Resources that it once had stay with none.
func expectAllocatable(ctx context.Context, want map[string]int64) {
	GinkgoHelper()
	Eventually(offered).WithContext(ctx).Should(Equal(want))
}
