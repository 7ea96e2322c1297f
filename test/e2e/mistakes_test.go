// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// Each mistake that a published guide prints is impossible here, or said.
func mistakeSpecs() {
	Describe("Mistakes that published guides print are impossible, or said:", Ordered, Offset(1), func() {
		var nvidias types.UID

		BeforeAll(func(ctx SpecContext) {
			resume(ctx, sim.A100, sim.A100)
			nvidias = clusterPolicyUID(ctx)
		})

		It("10 replicas of two GPUs are 20, and not the 8 of the configuration before", func(ctx SpecContext) {
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 10}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 20})
			expectReady(ctx, "shared")
			Expect(resources(ctx, "shared")).To(ConsistOf(
				v1alpha1.ResourceCount{Name: "nvidia.com/gpu", Expected: 20, Advertised: 20, Oversubscription: 10}))
		})

		It("MPS keeps the name of the resource unless told otherwise, so that pods that ask for nvidia.com/gpu run", func(ctx SpecContext) {
			share(ctx, `{strategy: MPS, mps: {replicas: 4}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			expectReady(ctx, "shared")
			startPod(ctx, "old-name", "nvidia.com/gpu", 1)
			expectRunning(ctx, "old-name")
		})

		It("a change of MPS restarts no container and needs no maintenance window", func(ctx SpecContext) {
			startPod(ctx, "client", "nvidia.com/gpu", 1)
			expectRunning(ctx, "client")
			before := expectSettled(ctx)
			stopPod(ctx, "client")
			delete(before, users+"/client/main")
			share(ctx, `{strategy: MPS, mps: {replicas: 5}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 10})
			expectReady(ctx, "shared")
			Expect(restarts(ctx)).To(Equal(before))
		})

		It("MIG instances are replicated only where that is asked for, and then the status says how many share one", func(ctx SpecContext) {
			const profile = "nvidia.com/mig-3g.20gb"
			share(ctx, `{strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20gb, count: 2}]}]}}`)
			expectAllocatable(ctx, map[string]int64{profile: 4})
			expectReady(ctx, "shared")
			Expect(resources(ctx, "shared")).To(ConsistOf(v1alpha1.ResourceCount{Name: profile, Expected: 4, Advertised: 4}))
			share(ctx, `{strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20gb, count: 2, replicas: 2}]}]}}`)
			expectAllocatable(ctx, map[string]int64{profile: 8})
			expectReady(ctx, "shared")
			Expect(resources(ctx, "shared")).To(ConsistOf(
				v1alpha1.ResourceCount{Name: profile, Expected: 8, Advertised: 8, Oversubscription: 2}))
		})

		It("a strategy that is none, such as '$STRATEGY' in quotes, is refused", func(ctx SpecContext) {
			for _, wrong := range []string{"$STRATEGY", "Mixed", "time-slicing"} {
				p := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"nodeSelector": map[string]any{}, "sharing": map[string]any{
					"strategy": "MIG", "mig": map[string]any{"resourceNames": wrong, "layouts": []any{map[string]any{"fill": "1g"}}},
				}}}}
				p.SetGroupVersionKind(v1alpha1.SchemeGroupVersion.WithKind("GPUSharingPolicy"))
				p.SetName("wrong")
				Expect(kube.Create(ctx, p)).To(MatchError(ContainSubstring("supported values: \"PerProfile\", \"Uniform\"")))
			}
		})

		It("kubectl explain says which strategy isolates what", func(ctx SpecContext) {
			Expect(kubectl(ctx, "", "explain", "gpusharingpolicy.spec.sharing.strategy")).To(MatchRegexp(`without\s+any\s+isolation\s+of\s+memory\s+or\s+faults`))
		})

		It("workloads need no privileged account: here all run under the Pod Security Standard restricted", func(ctx SpecContext) {
			pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{
				Name: "main", Image: workloadImage, SecurityContext: &corev1.SecurityContext{Privileged: new(true)},
			}}}}
			pod.Namespace, pod.Name = users, "privileged"
			Expect(kube.Create(ctx, pod)).To(MatchError(ContainSubstring(`violates PodSecurity "restricted:latest"`)))
		})

		It("the way back is to delete the policy, and not the ClusterPolicy of the whole cluster", func(ctx SpecContext) {
			unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			Expect(clusterPolicyUID(ctx)).To(Equal(nvidias))
		})
	})
}

func clusterPolicyUID(ctx context.Context) types.UID {
	GinkgoHelper()
	p := &unstructured.Unstructured{}
	p.SetGroupVersionKind(gpuoperator.PolicyKind())
	Expect(kube.Get(ctx, client.ObjectKey{Name: gpuoperator.PolicyName}, p)).To(Succeed())
	return p.GetUID()
}

// resources are what the status of a policy says about each resource.
func resources(ctx context.Context, policy string) []v1alpha1.ResourceCount {
	GinkgoHelper()
	p := &v1alpha1.GPUSharingPolicy{}
	Expect(kube.Get(ctx, client.ObjectKey{Name: policy}, p)).To(Succeed())
	return p.Status.Resources
}
