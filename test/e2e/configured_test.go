// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// configuredForUs reports whether NVIDIA's programs run with our ConfigMap, all of them.
func configuredForUs(ctx context.Context) error {
	pods := &corev1.PodList{}
	if err := kube.List(ctx, pods, client.InNamespace(gpuoperator.Namespace)); err != nil {
		return err
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		if !gpuoperator.ReadsConfig(p.Labels["app"]) {
			continue
		}
		if !mountsOurs(&p.Spec) || !gpuoperator.PodReady(p) || p.DeletionTimestamp != nil {
			return fmt.Errorf("pod %s does not run with ConfigMap %s yet: %s", p.Name, ourConfigMap, state(p))
		}
	}
	return nil
}

// restoredFromUs reports whether NVIDIA's programs are to run without our ConfigMap, all of them. They may not do so
// yet.
func restoredFromUs(ctx context.Context) error {
	sets := &appsv1.DaemonSetList{}
	if err := kube.List(ctx, sets, client.InNamespace(gpuoperator.Namespace)); err != nil {
		return err
	}
	for i := range sets.Items {
		if s := &sets.Items[i]; mountsOurs(&s.Spec.Template.Spec) || s.Status.ObservedGeneration != s.Generation {
			return fmt.Errorf("DaemonSet %s mounts ConfigMap %s", s.Name, ourConfigMap)
		}
	}
	return nil
}

func mountsOurs(spec *corev1.PodSpec) bool {
	return slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == ourConfigMap })
}

// askLimits has a user's pod ask its MPS control daemon for its limits, with the program that the pod gets from the
// driver, and compares the answers with the GPUNode.
func askLimits(ctx context.Context, want guides.Limits) {
	GinkgoHelper()
	n := &v1alpha1.GPUNode{}
	Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)).To(Succeed())
	Expect(n.Status.Devices).NotTo(BeEmpty())
	for _, d := range n.Status.Devices {
		m := d.Sharing.MPS
		Expect(m).NotTo(BeNil())
		Expect(fmt.Sprintf("%d, %s", m.ActiveThreadPercentage, m.PinnedMemoryLimit)).To(Equal(want.Status))
	}
	startPod(ctx, "asking", resourceName(n.Status.Devices[0].Sharing.MPS.ResourceName), 1)
	expectRunning(ctx, "asking")
	Expect(ask(ctx, "asking", "get_default_active_thread_percentage")).To(Equal(want.Percentage))
	Expect(ask(ctx, "asking", "get_default_device_pinned_mem_limit 0")).To(Equal(want.Memory))
	stopPods(ctx)
}

// ask is the answer of the MPS control daemon to a command in a user's pod.
func ask(ctx context.Context, pod, command string) string {
	GinkgoHelper()
	return strings.TrimSpace(kubectl(ctx, command+"\n", "exec", "-i", "-n", users, pod, "--", "nvidia-cuda-mps-control"))
}

func beforeSpecs() {
	Describe("A policy that was there before the GPU Operator", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			p := &unstructured.Unstructured{}
			p.SetGroupVersionKind(gpuoperator.PolicyKind())
			p.SetName(gpuoperator.PolicyName)
			Expect(kube.Delete(ctx, p)).To(Succeed())
			DeferCleanup(func(ctx SpecContext) {
				if err := kube.Get(ctx, client.ObjectKeyFromObject(p), p); err != nil {
					Expect(kube.Create(ctx, clusterPolicy())).To(Succeed())
				}
				unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			})
			Eventually(offered).WithContext(ctx).Should(BeEmpty())
		})

		It("reports that no device plugin is there to configure", func(ctx SpecContext) {
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			Eventually(statusOf).WithContext(ctx).WithArguments("shared").Should(ContainSubstring("reason: " + v1alpha1.ReasonNoDevicePlugin))
		})

		It("takes effect once the GPU Operator is installed, and nobody labels or patches anything", func(ctx SpecContext) {
			Expect(kube.Create(ctx, clusterPolicy())).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			expectReady(ctx, "shared")
			startPod(ctx, "sliced", "nvidia.com/gpu", 1)
			expectRunning(ctx, "sliced")
		})
	})
}
