// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// ownWholeClass is the operator's DeviceClass of whole GPUs, where no other class has their resource.
const ownWholeClass = "gpusharing-gpu"

func gpuClusterSpecs() {
	Describe("A policy where the GPU Operator's GPUCluster runs NVIDIA's DRA driver", Ordered, Offset(1), func() {
		const name = "gpu-sharing-agent"
		var devices map[string]draDevice
		var classes []string
		BeforeAll(func(ctx SpecContext) {
			wipe()
			buildGPUCluster(ctx, sim.A100, sim.A100)
			var err error
			devices, err = published(ctx)
			Expect(err).NotTo(HaveOccurred())
			classes, err = deviceClasses(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(classes).To(ConsistOf("gpu.nvidia.com", "mig.nvidia.com"))
			installOperator(ctx)
			Eventually(gpuNode).WithContext(ctx).Should(HaveField("Status.Devices", HaveLen(2)))
		})

		It("keeps its agent while the GPU Operator removes the label of GPU clients, and sets none", func(ctx SpecContext) {
			agent := agentPod(ctx)
			Expect(agent.OwnerReferences).To(ConsistOf(HaveField("Name", name+"-dra")))
			for range 3 {
				label(ctx, gpuoperator.LabelDeploy+"client", "true")
				Eventually(nodeLabels).WithContext(ctx).ShouldNot(HaveKey(gpuoperator.LabelDeploy + "client"))
			}
			Consistently(nodeLabels, 2*time.Second).WithContext(ctx).ShouldNot(HaveKey(gpuoperator.LabelDeploy + "client"))
			expectSameAgent(ctx, agent)
		})

		It("makes MIG instances, and an unchanged pod gets one", func(ctx SpecContext) {
			agent := agentPod(ctx)
			fillByDRA(ctx)
			expectSameAgent(ctx, agent)
		})

		It("takes its agent away at the first step of a driver upgrade, and brings it back", func(ctx SpecContext) {
			const validator = gpuoperator.LabelDeploy + "dra-validator"
			before, err := published(ctx)
			Expect(err).NotTo(HaveOccurred())
			startPod(ctx, "keeps", resourceOf("1g.5gb"), 1)
			expectRunning(ctx, "keeps")
			label(ctx, validator, "paused-for-driver-upgrade")
			Eventually(podUIDs).WithContext(ctx).WithArguments(name).Should(BeEmpty())
			label(ctx, validator, "true")
			Eventually(podUIDs).WithContext(ctx).WithArguments(name).Should(HaveLen(1))
			Eventually(func() ([]string, error) { return notReady(ctx, operatorNamespace) }).WithContext(ctx).Should(BeEmpty())
			expectReady(ctx, "shared")
			Expect(published(ctx)).To(Equal(before))
			Expect(restarts(ctx)).To(HaveKeyWithValue(users+"/keeps/main", int32(0)))
		})

		It("offers whole GPUs to unchanged pods by a class of its own", func(ctx SpecContext) {
			stopPods(ctx)
			share(ctx, `{strategy: Exclusive}`)
			expectReady(ctx, "shared")
			Expect(deviceClasses(ctx)).To(ContainElement(ownWholeClass))
			startPod(ctx, "whole", "nvidia.com/gpu", 1)
			Expect(expectRunning(ctx, "whole")).To(beExactly(allocatedUUID(ctx, "whole")))
		})

		It("leaves ResourceSlices and DeviceClasses as they were when it is deleted", func(ctx SpecContext) {
			stopPods(ctx)
			expectUndoneOnDRA(ctx, devices, classes)
			startClaiming(ctx, "whole-again", "gpu.nvidia.com")
			Eventually(phase).WithContext(ctx).WithArguments("whole-again").Should(Equal(corev1.PodRunning))
		})
	})
}

// buildGPUCluster makes a cluster of nothing: a node with these GPUs, and NVIDIA's DRA driver on it as the GPU Operator
// runs it for a GPUCluster. The operator is not there.
func buildGPUCluster(ctx context.Context, models ...sim.Model) {
	GinkgoHelper()
	onDRA, onGPUCluster = true, true
	say := sinceNow()
	startNode(ctx)
	Expect(machine.Import(ctx, write(draImage(ctx)))).To(Succeed())
	say("images imported")
	installCRDs()
	fit(ctx, models...)
	installGPUOperator(ctx, gpuCluster())
	Eventually(published).WithContext(ctx).Should(And(Not(BeEmpty()), Equal(devicesOfDriver(0))))
	Eventually(func() ([]string, error) { return notReady(ctx, gpuoperator.Namespace) }).WithContext(ctx).Should(BeEmpty())
	say("NVIDIA's DRA driver publishes")
}

// gpuCluster is the GPUCluster, as far as it matters here. The real one names an image by repository, name and version.
func gpuCluster() *unstructured.Unstructured {
	c := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"draDriver": map[string]any{"image": draRepository + ":" + draTag}}}}
	c.SetGroupVersionKind(gpuoperator.ClusterKind())
	c.SetName(gpuoperator.ClusterName)
	return c
}

// agentPod is the only pod of an agent.
func agentPod(ctx context.Context) *corev1.Pod {
	GinkgoHelper()
	pod := &corev1.Pod{}
	Expect(kube.Get(ctx, client.ObjectKey{Namespace: operatorNamespace, Name: podNamed(ctx, "gpu-sharing-agent")}, pod)).To(Succeed())
	return pod
}

// expectSameAgent checks that no agent but this one runs, that it is Ready, and that it has not restarted.
func expectSameAgent(ctx context.Context, agent *corev1.Pod) {
	GinkgoHelper()
	Expect(podUIDs(ctx, "gpu-sharing-agent")).To(ConsistOf(string(agent.UID)))
	Expect(notReady(ctx, operatorNamespace)).To(BeEmpty())
	Expect(agentPod(ctx).Status.ContainerStatuses).To(HaveEach(HaveField("RestartCount", agent.Status.ContainerStatuses[0].RestartCount)))
}
