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
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
)

// mpsRoot is where daemons and clients meet on the node.
const mpsRoot = "/run/nvidia/mps"

func mpsSpecs() {
	Describe("MPS", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) { goOn(ctx, sim.A100, sim.A100) })

		It("passes the device plugin's own health check against our daemon", func(ctx SpecContext) {
			timed("to Ready in", func() {
				share(ctx, `{strategy: MPS, mps: {replicas: 10, activeThreadPercentage: 20, renameByDefault: true}}`)
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

		It("puts the GPUs in exclusive mode and, when the policy goes, back", func(ctx SpecContext) {
			Expect(computeModes()).To(HaveEach(gpu.ComputeExclusiveProcess))
			unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			Eventually(computeModes).WithContext(ctx).Should(HaveEach(gpu.ComputeDefault))
			Eventually(func() bool {
				_, err := os.Stat(filepath.Join(mpsRoot, "nvidia.com/gpu.shared", ".started"))
				return os.IsNotExist(err)
			}).WithContext(ctx).Should(BeTrue())
		})

		// NVIDIA's config-manager (v0.18.2 to v0.20.0) starts every program with the default key and then cannot signal the
		// MPS daemon, so that this waits for ever with a configuration without MPS. What has to be found is a way to keep the
		// daemon set off the nodes that we serve: its pods remount the shared memory of MPS when they start.
		PIt("works under NVIDIA's own MPS daemon set — pending: keeping it off the nodes that we serve", func(ctx SpecContext) {
			nvidiaMPS(ctx, true)
			DeferCleanup(func(ctx SpecContext) { nvidiaMPS(ctx, false) })
			share(ctx, `{strategy: MPS, mps: {replicas: 4}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			expectReady(ctx, "shared")
			expectPipes(ctx, "nvidia.com/gpu")
		})
	})
}

// expectPipes checks that a pod that asks for a resource gets its daemon's pipes.
func expectPipes(ctx context.Context, name string) {
	GinkgoHelper()
	startPod(ctx, "client", resourceName(name), 1)
	got := expectRunning(ctx, "client")
	Expect(got.PipeDirectory).To(Equal(fmt.Sprintf("/mps/%s/pipe", name)))
	Expect(got.Pipes).To(ContainElement(got.PipeDirectory + "/control"))
}

// nvidiaMPS says whether the GPU Operator runs its MPS daemon set.
func nvidiaMPS(ctx context.Context, runs bool) {
	GinkgoHelper()
	mergeClusterPolicy(ctx, fmt.Sprintf(`{"metadata":{"annotations":{%q:"%t"}}}`, gpuoperator.AnnotationMPS, runs))
	Eventually(func() (bool, error) {
		sets := &appsv1.DaemonSetList{}
		err := kube.List(ctx, sets, client.InNamespace(gpuoperator.Namespace), client.MatchingLabels{"app": "nvidia-device-plugin-mps-control-daemon"})
		return len(sets.Items) > 0, err
	}).WithContext(ctx).Should(Equal(runs))
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
