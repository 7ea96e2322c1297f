// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// mpsRoot is where daemons and clients meet on the node.
const mpsRoot = "/run/nvidia/mps"

func mpsSpecs() {
	Describe("MPS", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) { resume(ctx, sim.A100, sim.A100) })

		It("passes the device plugin's own health check against our daemon", func(ctx SpecContext) {
			timed("to Ready in", func() {
				share(ctx, `{strategy: MPS, mps: {replicas: 10, activeThreadPercentage: 20}, advertise: {renameByDefault: true}}`)
				expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu.shared": 20})
				expectReady(ctx, "shared")
			})
			Expect(filepath.Join(mpsRoot, "nvidia.com/gpu.shared", ".started")).To(BeAnExistingFile())
		})

		It("has shared memory of its own on the node, which the MPS pod has mounted there", func(ctx SpecContext) {
			mounts, err := os.ReadFile("/proc/self/mounts")
			Expect(err).NotTo(HaveOccurred())
			Expect(string(mounts)).To(MatchRegexp(`(?m)^\S+ ` + mpsRoot + `/shm tmpfs `))
			pods := &corev1.PodList{}
			Expect(kube.List(ctx, pods, client.InNamespace(operatorNamespace), client.MatchingLabels{"app.kubernetes.io/name": "gpu-sharing-mps"})).To(Succeed())
			Expect(pods.Items).To(HaveLen(1))
			prepared := pods.Items[0].Status.InitContainerStatuses
			Expect(prepared).To(HaveLen(1))
			Expect(prepared[0].Name).To(Equal("prepare"))
			Expect(prepared[0].State.Terminated).To(HaveValue(HaveField("ExitCode", BeZero())))
		})

		It("gives a pod the pipe directory of the daemon", func(ctx SpecContext) { expectPipes(ctx, "nvidia.com/gpu.shared") })

		It("keeps NVIDIA's MPS DaemonSet off the node", func(ctx SpecContext) { expectKeptOff(ctx) })

		It("puts the GPUs in exclusive mode and, when the policy goes, back", func(ctx SpecContext) {
			Expect(computeModes()).To(HaveEach(gpu.ComputeExclusiveProcess))
			unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			Eventually(computeModes).WithContext(ctx).Should(HaveEach(gpu.ComputeDefault))
			Eventually(func() bool {
				_, err := os.Stat(filepath.Join(mpsRoot, "nvidia.com/gpu.shared", ".started"))
				return os.IsNotExist(err)
			}).WithContext(ctx).Should(BeTrue())
		})

		It("leaves to GPU Feature Discovery what it took from it", func(ctx SpecContext) { expectLeft(ctx) })
	})
}

// Where Node Feature Discovery is installed apart from the GPU Operator, GPU Feature Discovery's objects are as foreign
// to it as ours, and their names decide which of two labels counts.
func mpsApartSpecs() {
	Describe("MPS where Node Feature Discovery has a namespace of its own", Ordered, Offset(1), func() {
		const apart = "node-feature-discovery"

		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			moveNFD(ctx, gpuoperator.Namespace, apart)
		})
		AfterAll(func(ctx SpecContext) { moveNFD(ctx, apart, gpuoperator.Namespace) })

		It("serves without NVIDIA's MPS DaemonSet", func(ctx SpecContext) {
			share(ctx, `{strategy: MPS, mps: {replicas: 4}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			expectReady(ctx, "shared")
			expectKeptOff(ctx)
			expectPipes(ctx, "nvidia.com/gpu")
		})

		It("leaves to GPU Feature Discovery what it took from it", func(ctx SpecContext) {
			unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			expectLeft(ctx)
		})
	})
}

// With restrictions.denyNodeFeatureLabels Node Feature Discovery drops the labels of every object but its own workers'.
// Those of GPU Feature Discovery are among them, so that the node has no label nvidia.com/mps.capable. They go once the
// nfd-master that has the option has taken over from its predecessor.
func mpsDeniedSpecs() {
	Describe("MPS where Node Feature Discovery takes labels from its own workers only", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			installNFD(ctx, gpuoperator.Namespace, "master.config.restrictions.denyNodeFeatureLabels=true")
			expectOperandsReady(ctx)
			Eventually(nodeLabels).WithContext(ctx).ShouldNot(HaveKey("nvidia.com/gpu.product"))
			Consistently(nodeLabels, "3s").WithContext(ctx).ShouldNot(HaveKey("nvidia.com/gpu.product"))
		})
		AfterAll(func(ctx SpecContext) {
			installNFD(ctx, gpuoperator.Namespace)
			Eventually(nodeLabels).WithContext(ctx).Should(HaveKey("nvidia.com/gpu.product"))
		})

		It("is refused with a reason that names the option, and the node stays as it was", func(ctx SpecContext) {
			before, err := nodeLabels(ctx)
			Expect(err).NotTo(HaveOccurred())
			share(ctx, `{strategy: MPS, mps: {replicas: 4}}`)
			Eventually(statusOf).WithContext(ctx).WithArguments("shared").Should(And(
				ContainSubstring("reason: "+v1alpha1.ReasonNodeFeatureIgnored), ContainSubstring("restrictions.denyNodeFeatureLabels")))
			Eventually(offered).WithContext(ctx).Should(Equal(map[string]int64{"nvidia.com/gpu": 2}))
			after, err := nodeLabels(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(after[configLabel]).To(Equal(before[configLabel]))
			Expect(computeModes()).To(HaveEach(gpu.ComputeDefault))
			Expect(after).NotTo(HaveKey(capableLabel))
			Expect(mpsPods(ctx)).To(BeEmpty())
		})

		It("leaves nothing when the policy goes", func(ctx SpecContext) {
			unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			Eventually(overrides).WithContext(ctx).Should(BeEmpty())
		})
	})
}

// statusOf is the status of a policy as YAML.
func statusOf(ctx context.Context, policy string) (string, error) {
	p := &v1alpha1.GPUSharingPolicy{}
	if err := kube.Get(ctx, client.ObjectKey{Name: policy}, p); err != nil {
		return "", err
	}
	status, err := yaml.Marshal(p.Status)
	return string(status), err
}

// capableLabel makes a node one for NVIDIA's MPS DaemonSet.
const capableLabel = "nvidia.com/mps.capable"

// expectKeptOff checks that NVIDIA's MPS DaemonSet is rendered and has no pod on the node, though GPU Feature Discovery
// asks for one.
func expectKeptOff(ctx context.Context) {
	GinkgoHelper()
	Expect(kube.Get(ctx, client.ObjectKey{Namespace: gpuoperator.Namespace, Name: gpuoperator.MPSName}, &appsv1.DaemonSet{})).To(Succeed())
	Eventually(discovered).WithContext(ctx).Should(HaveKeyWithValue(capableLabel, "true"))
	Expect(overrides(ctx)).To(HaveLen(1))
	Consistently(nodeLabels, "2s").WithContext(ctx).Should(HaveKeyWithValue(capableLabel, "false"))
	Expect(mpsPods(ctx)).To(BeEmpty())
}

// expectLeft checks that nothing of ours is left that overrides GPU Feature Discovery, and that the node has the label
// for which that asks.
func expectLeft(ctx context.Context) {
	GinkgoHelper()
	Eventually(overrides).WithContext(ctx).Should(BeEmpty())
	Eventually(discovered).WithContext(ctx).Should(HaveKeyWithValue(capableLabel, "false"))
	Consistently(nodeLabels, "2s").WithContext(ctx).Should(HaveKeyWithValue(capableLabel, "false"))
	Expect(mpsPods(ctx)).To(BeEmpty())
}

// overrides are the names of the NodeFeatures in the operator's namespace.
func overrides(ctx context.Context) ([]string, error) {
	found := &unstructured.UnstructuredList{}
	found.SetGroupVersionKind(nodeFeatures)
	err := kube.List(ctx, found, client.InNamespace(operatorNamespace))
	var names []string
	for i := range found.Items {
		names = append(names, found.Items[i].GetName())
	}
	return names, err
}

// discovered are the labels for which GPU Feature Discovery asks.
func discovered(ctx context.Context) (map[string]string, error) {
	found := &unstructured.Unstructured{}
	found.SetGroupVersionKind(nodeFeatures.GroupVersion().WithKind("NodeFeature"))
	err := kube.Get(ctx, client.ObjectKey{Namespace: gpuoperator.Namespace, Name: "nvidia-features-for-" + nodeName}, found)
	if err != nil {
		return nil, err
	}
	labels, _, err := unstructured.NestedStringMap(found.Object, "spec", "labels")
	return labels, err
}

// mpsPods are the pods of NVIDIA's MPS DaemonSet.
func mpsPods(ctx context.Context) ([]corev1.Pod, error) {
	pods := &corev1.PodList{}
	err := kube.List(ctx, pods, client.InNamespace(gpuoperator.Namespace), client.MatchingLabels{"app": gpuoperator.MPSName})
	return pods.Items, err
}

// expectPipes checks that a pod that asks for a resource gets its daemon's pipes.
func expectPipes(ctx context.Context, name string) {
	GinkgoHelper()
	startPod(ctx, "client", resourceName(name), 1)
	got := expectRunning(ctx, "client")
	Expect(got.PipeDirectory).To(Equal(fmt.Sprintf("/mps/%s/pipe", name)))
	Expect(got.Pipes).To(ContainElement(got.PipeDirectory + "/control"))
}

func computeModes() ([]gpu.ComputeMode, error) {
	n, err := gpus.Node()
	if err != nil {
		return nil, err
	}
	var found []gpu.ComputeMode
	for _, g := range n.GPUs {
		found = append(found, g.ComputeMode)
	}
	return found, nil
}
