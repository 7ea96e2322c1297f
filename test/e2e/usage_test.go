// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
)

// usageSpecs are about a Tesla T4 of 15 GiB that two pods share: one uses 13.5 GiB of it, and the other one 1 GiB.
func usageSpecs() {
	Describe("A pod that uses more than its share of a time-sliced GPU", Ordered, Offset(1), func() {
		const greedy, modest = "greedy", "modest"
		guarded := func(mode v1alpha1.MemoryGuardMode) string {
			return fmt.Sprintf("{strategy: TimeSlicing, timeSlicing: {replicas: 2, memoryGuard: {mode: %s, gracePeriodSeconds: 10}}}", mode)
		}
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.T4)
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 2}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
			expectReady(ctx, "shared")
			serveMetrics(ctx, true)
		})
		AfterAll(func(ctx SpecContext) { serveMetrics(ctx, false) })
		var endGreedy func()
		BeforeEach(func(ctx SpecContext) {
			startPod(ctx, greedy, "nvidia.com/gpu", 1)
			startPod(ctx, modest, "nvidia.com/gpu", 1)
			endGreedy = useMemory(ctx, greedy, 27<<29)
			useMemory(ctx, modest, 1<<30)
		})

		It("is marked by top, with its share and its neighbour", func(ctx SpecContext) {
			Eventually(func() string { return kubectl(ctx, "", "gpusharing", "top") }).WithContext(ctx).Should(And(
				MatchRegexp(`Tesla-T4 +TimeSlicing, 2 replicas`),
				ContainSubstring("14.5 GiB of 15.0 GiB"),
				MatchRegexp(`13\.5 GiB +7\.5 GiB +\S+ +! +`+users+"/"+greedy+" main"),
				MatchRegexp(`1\.0 GiB +7\.5 GiB +\S+ +`+users+"/"+modest+" main")))
		})

		It("is evicted by nobody without a guard, and reported by one that reports", func(ctx SpecContext) {
			stays, other := expectUndisturbed(ctx, greedy), expectUndisturbed(ctx, modest)
			Expect(pressure(ctx)).To(BeEmpty())
			share(ctx, guarded(v1alpha1.MemoryGuardReport))
			Eventually(pressure).WithContext(ctx).Should(And(ContainSubstring(users+"/"+greedy), ContainSubstring(users+"/"+modest)))
			stays()
			other()
		})

		It("is evicted by a guard that evicts, alone and once, and the reason says what it used", func(ctx SpecContext) {
			other := expectUndisturbed(ctx, modest)
			share(ctx, guarded(v1alpha1.MemoryGuardEvict))
			expectGone(ctx, greedy)
			endGreedy()
			Expect(kubectl(ctx, "", "events", "-n", users, "--for", "pod/"+greedy)).To(And(
				ContainSubstring("Evicting"), ContainSubstring("13.5 GiB"), ContainSubstring("7.5 GiB"), ContainSubstring(modest)))
			Eventually(pressure).WithContext(ctx).Should(BeEmpty())
			other()
		})
	})
}

// serveMetrics has the agents measure for those who may read them, as docs/monitoring.md says.
func serveMetrics(ctx context.Context, serve bool) {
	GinkgoHelper()
	upgradeOperator(ctx, fmt.Sprintf("metrics.enabled=%t", serve))
	Eventually(func() ([]string, error) { return notReady(ctx, operatorNamespace) }).WithContext(ctx).Should(BeEmpty())
}

// useMemory has the program of a user's pod use so many bytes of the memory of its GPU, until end is called or the spec ends.
func useMemory(ctx context.Context, name string, bytes int64) (end func()) {
	GinkgoHelper()
	uuid := expectRunning(ctx, name).uuid()
	pid := process(ctx, name)
	Expect(gpus.AddProcess(uuid, gpu.Process{PID: pid, Name: "workload", Instance: gpu.WholeGPU})).To(Succeed())
	Expect(gpus.SetUse(uuid, gpu.ProcessUse{PID: pid, Instance: gpu.WholeGPU, MemoryBytes: &bytes})).To(Succeed())
	end = func() { Expect(gpus.RemoveProcess(pid)).To(Succeed()) }
	DeferCleanup(end)
	return end
}

// process is the number of the program in the one container of a user's pod.
func process(ctx context.Context, name string) (pid int) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		pod := &corev1.Pod{}
		g.Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, pod)).To(Succeed())
		g.Expect(pod.Status.ContainerStatuses).To(HaveLen(1))
		_, container, _ := strings.Cut(pod.Status.ContainerStatuses[0].ContainerID, "://")
		g.Expect(container).NotTo(BeEmpty())
		found, err := filepath.Glob("/proc/[0-9]*/cgroup")
		g.Expect(err).NotTo(HaveOccurred())
		for _, path := range found {
			raw, _ := os.ReadFile(path) // it may have ended
			if bytes.Contains(raw, []byte(container)) {
				pid, err = strconv.Atoi(filepath.Base(filepath.Dir(path)))
				g.Expect(err).NotTo(HaveOccurred())
				return
			}
		}
		g.Expect(found).To(BeEmpty(), "no process is in the cgroup of container %s", container)
	}).WithContext(ctx).Should(Succeed())
	return pid
}

// pressure is what the policy says of memory; empty: nothing.
func pressure(ctx context.Context) (string, error) {
	p := &v1alpha1.GPUSharingPolicy{}
	if err := kube.Get(ctx, client.ObjectKey{Name: "shared"}, p); err != nil {
		return "", err
	}
	if c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionMemoryPressure); c != nil && c.Status == "True" {
		return c.Message, nil
	}
	return "", nil
}
