// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// TestGPUCluster: the GPU Operator runs NVIDIA's DRA driver for a GPUCluster. It removes the labels of a
// ClusterPolicy's programs again and again, and its class for whole GPUs serves no extended resource.
func TestGPUCluster(t *testing.T) {
	t.Parallel()
	f := newSite(t)
	f.apply("{apiVersion: nvidia.com/v1alpha1, kind: GPUCluster, metadata: {name: gpu-cluster}, spec: {draDriver: {version: v0.5.0}}}")
	f.record = newRecord(f)
	operator := &nodesim.GPUCluster{Client: f.sim, Namespace: nvidiaSpace}
	m := newMachine(f, "n01", map[string]string{cluster.LabelDRADriver: "true"}, sim.A100)
	m.boot(f)
	f.Expect(operator.Reconcile(t.Context())).To(Succeed())
	f.background(func(ctx context.Context) { m.node.Run(ctx, 300*time.Millisecond) })
	f.background(func(ctx context.Context) { operator.Run(ctx, 300*time.Millisecond) })
	f.machines = append(f.machines, m)
	f.runAgents()
	f.leader = f.lead()
	scheduler := nodesim.DRAScheduler{Client: f.client}
	f.background(func(ctx context.Context) { scheduler.Run(ctx, 200*time.Millisecond) })
	runs := func(name, resource string) {
		t.Helper()
		why, err := scheduler.Schedule(t.Context(), requesting(name, resource), "n01")
		f.Expect(err).NotTo(HaveOccurred())
		f.Expect(why).To(BeEmpty())
		f.Eventually(func() corev1.PodPhase { return f.phase(name) }, patience, pollEvery).Should(Equal(corev1.PodRunning))
		f.Expect(f.client.Delete(t.Context(), requesting(name, ""), client.GracePeriodSeconds(0))).To(Succeed())
		f.Eventually(func() corev1.PodPhase { return f.phase(name) }, patience, pollEvery).Should(BeEmpty())
	}
	f.Eventually(func() []string { return f.devices("n01") }, patience, pollEvery).Should(Equal([]string{"gpu-0"}))
	f.step("instances", func() {
		f.policy(sevenEach, "{drain: {mode: Evict}}")
		f.ready()
		f.Expect(f.devices("n01")).To(HaveLen(7))
		runs("small", "nvidia.com/mig-1g.5gb")
	})
	f.step("whole GPUs", func() {
		f.policy("{strategy: Exclusive}", "{drain: {mode: Evict}}")
		f.ready()
		f.Expect(f.classes()).To(Equal(map[string]string{"gpu.nvidia.com": "", "gpusharing-gpu": "nvidia.com/gpu"}))
		runs("whole", "nvidia.com/gpu")
	})
	f.step("undo leaves slices, classes and labels as before", func() {
		f.Expect(f.client.Delete(t.Context(), &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}})).To(Succeed())
		f.Eventually(f.classes, patience, pollEvery).Should(Equal(map[string]string{"gpu.nvidia.com": ""}))
		f.Eventually(func() map[string]string { return f.ours("n01") }, patience, pollEvery).Should(BeEmpty())
		f.Expect(f.devices("n01")).To(Equal([]string{"gpu-0"}))
		f.Expect(operator.Swept()).To(BeEmpty(), "the operator sets no label that the GPU Operator removes")
	})
	f.Expect(f.cluster.Denied(t.Context(), env.ControllerWrites)).To(BeZero(), "the admission policy lists every write")
}
