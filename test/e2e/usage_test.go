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
	"github.com/onsi/gomega/types"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func usageSpecs() {
	Describe("Who uses the GPUs", Ordered, Offset(1), func() {
		var metrics *prometheus
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.T4)
			serveMetrics(ctx, "metrics.enabled=true", "metrics.sampling.interval=5s")
			metrics = startPrometheus(ctx)
		})
		AfterAll(func(ctx SpecContext) { serveMetrics(ctx, "metrics.enabled=false") })
		AfterEach(func(ctx SpecContext) {
			_, err := metrics.look(ctx)
			Expect(err).NotTo(HaveOccurred())
		})
		adviceSpecs(&metrics) // first: what the others use is seen from then on
		overShareSpecs(&metrics)
		attributionSpecs(&metrics)

		It("is what the dashboard shows: each of its queries has had data", func(ctx SpecContext) {
			Eventually(metrics.look).WithContext(ctx).Should(BeEmpty())
		})
	})
}

// adviceSpecs are about a Tesla T4 of 15 GiB that two pods of a namespace share: together they use 4 GiB of it.
func adviceSpecs(metrics **prometheus) {
	Context("when the containers would fit a better strategy", func() {
		const advised = "# Advised: MPS with 2 replicas."
		BeforeAll(func(ctx SpecContext) {
			kubectl(ctx, `{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: shared}, spec: {
				nodeSelector: {}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}}}`, "apply", "-f", "-")
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
			expectReady(ctx, "shared")
		})
		BeforeEach(func(ctx SpecContext) {
			for name, bytes := range map[string]int64{"large": 3 << 30, "small": 1 << 30} {
				startPod(ctx, name, "nvidia.com/gpu", 1, as(10001)) // MPS serves one user ID, and advice that rests on it must know it
				useWholeGPU(ctx, name, bytes)
			}
		})
		// expectAdvice waits until what was observed suffices, and applies what is printed in a dry run.
		expectAdvice := func(ctx context.Context, source string, args ...string) {
			GinkgoHelper()
			advise := append([]string{"gpusharing", "advise", "policy", "shared"}, args...)
			var said string
			Eventually(func(g Gomega) {
				var err error
				said, err = tryKubectl(ctx, "", advise...)
				g.Expect(err).NotTo(HaveOccurred(), said)
				g.Expect(strings.ReplaceAll(said, "\n#   ", " ")).To(And(
					ContainSubstring("2 containers, at most 2 at the same time"), ContainSubstring(source),
					ContainSubstring("3.0 GiB ("+users+"/large main) and 50 %"), ContainSubstring(advised), ContainSubstring("# What it would change")))
			}).WithContext(ctx).Should(Succeed())
			applied := kubectl(ctx, said, "apply", "--dry-run=server", "-f", "-", "-o", "yaml")
			Expect(applied).To(And(ContainSubstring("name: shared"), ContainSubstring("strategy: MPS"), ContainSubstring("replicas: 2")))
			AddReportEntry("kubectl "+strings.Join(advise, " "), said, ReportEntryVisibilityNever)
		}

		It("is what advise prints from the memory of the agents, as a policy that can be applied", func(ctx SpecContext) {
			expectAdvice(ctx, "by the memory of the agents", "--min-age=20s")
		})

		It("is what advise prints from Prometheus", func(ctx SpecContext) {
			Eventually((*metrics).value).WithContext(ctx).WithArguments(
				`gpusharing_container_gpu_memory_used_bytes{namespace="` + users + `",pod="large"}`).Should(HaveValue(BeEquivalentTo(3 << 30)))
			expectAdvice(ctx, "by Prometheus", "--prometheus=http://"+prometheusAddress, "--window=5m", "--min-age=30s")
		})

		It("is not advised from less than the time given by --min-age", func(ctx SpecContext) {
			for _, source := range []string{"--window=24h", "--prometheus=http://" + prometheusAddress} {
				said, err := tryKubectl(ctx, "", "gpusharing", "advise", source, "--min-age=24h")
				Expect(err).To(HaveOccurred())
				Expect(said).To(And(ContainSubstring("observed for less than --min-age 24 hours"), ContainSubstring(nodeName), Not(ContainSubstring("kind:"))))
			}
		})
	})
}

// overShareSpecs are about a Tesla T4 of 15 GiB that two pods share: one uses 13.5 GiB of it, and the other one 1 GiB.
func overShareSpecs(metrics **prometheus) {
	Context("when a pod uses more than its share of a time-sliced GPU", func() {
		const greedy, modest = "greedy", "modest"
		guarded := func(mode v1alpha1.MemoryGuardMode) string {
			return fmt.Sprintf("{strategy: TimeSlicing, timeSlicing: {replicas: 2, memory: {guard: {mode: %s, gracePeriodSeconds: 10}}}}", mode)
		}
		BeforeAll(func(ctx SpecContext) {
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 2}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
			expectReady(ctx, "shared")
		})
		var endGreedy func()
		BeforeEach(func(ctx SpecContext) {
			startPod(ctx, greedy, "nvidia.com/gpu", 1)
			startPod(ctx, modest, "nvidia.com/gpu", 1)
			endGreedy = useWholeGPU(ctx, greedy, 27<<29)
			useWholeGPU(ctx, modest, 1<<30)
		})

		It("is marked by top, with its share and its neighbour", func(ctx SpecContext) {
			expectTop(ctx, "a time-sliced GPU",
				MatchRegexp(`Tesla-T4 +TimeSlicing, 2 replicas`),
				ContainSubstring("14.5 GiB of 15.0 GiB"),
				MatchRegexp(`13\.5 GiB +7\.5 GiB +\S+ +\S+ +! +`+users+"/"+greedy+" main"),
				MatchRegexp(`1\.0 GiB +7\.5 GiB +.*`+users+"/"+modest+" main"))
		})

		It("is named by an alert of Prometheus, with its neighbour", func(ctx SpecContext) {
			Eventually((*metrics).value).WithContext(ctx).WithArguments(
				`gpusharing_container_gpu_memory_used_bytes{namespace="` + users + `",pod="` + greedy + `",container="main",strategy="TimeSlicing"}`).
				Should(HaveValue(BeEquivalentTo(27 << 29)))
			Eventually((*metrics).firing).WithContext(ctx).WithArguments("GPUSharingMemoryPressure").Should(And(
				HaveLen(1), HaveKeyWithValue(users+"/"+greedy, ContainSubstring(users+"/"+modest))))
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

// attributionSpecs are about containers whose use DCGM-Exporter cannot tell apart.
func attributionSpecs(metrics **prometheus) {
	It("is known of MPS clients, beside the limits of their server", func(ctx SpecContext) {
		begin(ctx, sim.A100)
		share(ctx, `{strategy: MPS, mps: {replicas: 4, activeThreadPercentage: 25, pinnedMemoryLimit: 8Gi, multiUser: true}}`)
		expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
		expectReady(ctx, "shared")
		uses := map[string]int64{"first": 3 << 30, "second": 6 << 30}
		for name := range uses {
			startPod(ctx, name, "nvidia.com/gpu", 1)
		}
		for name, bytes := range uses {
			useByMPS(ctx, name, bytes)
		}
		expectUse(ctx, *metrics, "MPS", 8<<30, uses)
		Eventually((*metrics).value).WithContext(ctx).WithArguments(`gpusharing_mps_server_limits_active_thread_ratio`).Should(HaveValue(Equal(0.25)))
		Eventually((*metrics).value).WithContext(ctx).WithArguments(`gpusharing_mps_clients`).Should(HaveValue(Equal(2.0)))
		expectTop(ctx, "clients of MPS", ContainSubstring("MPS, 4 replicas, each client at most 8.0 GiB and 25 % of the threads"),
			MatchRegexp(`3\.0 GiB +8\.0 GiB +.*`+users+"/first main"), MatchRegexp(`6\.0 GiB +8\.0 GiB +.*`+users+"/second main"))
	})

	It("is known of containers on MIG instances", func(ctx SpecContext) {
		const profile = "3g.40gb"
		begin(ctx, sim.H100) // of which NVML reports the utilization of instances
		share(ctx, `{strategy: MIG, mig: {layouts: [{instances: [{profile: `+profile+`, count: 2}]}]}}`)
		expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-" + profile: 2})
		expectReady(ctx, "shared")
		uses := map[string]int64{"first": 3 << 30, "second": 6 << 30}
		for name := range uses {
			startPod(ctx, name, resourceOf(profile), 1)
		}
		for name, bytes := range uses {
			useInstance(ctx, name, bytes)
		}
		n, err := gpus.Node()
		Expect(err).NotTo(HaveOccurred())
		share := n.GPUs[0].Memory(n.GPUs[0].Instances[0].ID).Total
		expectUse(ctx, *metrics, "MIG", share, uses)
		Eventually((*metrics).value).WithContext(ctx).WithArguments(`count(gpusharing_gpu_sm_utilization_ratio == 0.5)`).Should(HaveValue(Equal(2.0)))
		expectTop(ctx, "MIG instances", MatchRegexp(`instance \d+ +3g\.40gb +utilization 50 %`),
			MatchRegexp(`3\.0 GiB .*`+users+"/first main"), MatchRegexp(`6\.0 GiB .*`+users+"/second main"))
		Expect(kubectl(ctx, "", "gpusharing", "top", "pod")).To(And(
			MatchRegexp(`3\.0 GiB.* `+users+` +first +main .*3g\.40gb`), MatchRegexp(`6\.0 GiB.* `+users+` +second +main .*3g\.40gb`)))
	})
}

// expectTop waits until top prints what is expected, and adds that to the report: docs/monitoring.md shows it.
func expectTop(ctx context.Context, of string, expected ...types.GomegaMatcher) {
	GinkgoHelper()
	var printed string
	Eventually(func() string {
		printed = kubectl(ctx, "", "gpusharing", "top")
		return printed
	}).WithContext(ctx).Should(And(expected...))
	AddReportEntry("kubectl gpusharing top: "+of, printed, ReportEntryVisibilityNever)
}

// expectUse waits until Prometheus has what users' pods use of the memory, each beside the same share.
func expectUse(ctx context.Context, metrics *prometheus, strategy string, share int64, uses map[string]int64) {
	GinkgoHelper()
	for name, bytes := range uses {
		labels := fmt.Sprintf(`{namespace=%q,pod=%q,container="main",strategy=%q}`, users, name, strategy)
		Eventually(metrics.value).WithContext(ctx).WithArguments("gpusharing_container_gpu_memory_used_bytes"+labels).
			Should(HaveValue(BeEquivalentTo(bytes)), "of %s", name)
		Eventually(metrics.value).WithContext(ctx).WithArguments("gpusharing_container_gpu_memory_share_bytes"+labels).
			Should(HaveValue(BeEquivalentTo(share)), "of %s", name)
	}
}

// serveMetrics has the agents measure for those who may read them, as docs/monitoring.md says.
func serveMetrics(ctx context.Context, values ...string) {
	GinkgoHelper()
	upgradeOperator(ctx, values...)
	Eventually(func() ([]string, error) { return notReady(ctx, operatorNamespace) }).WithContext(ctx).Should(BeEmpty())
}

// useWholeGPU has the program of a user's pod use so many bytes of the memory of its GPU, and half of its
// multiprocessors, until end is called or the spec ends.
func useWholeGPU(ctx context.Context, name string, bytes int64) (end func()) {
	GinkgoHelper()
	uuid := expectRunning(ctx, name).uuid()
	return use(ctx, name, uuid, gpu.ProcessUse{
		Instance: gpu.WholeGPU, MemoryBytes: &bytes, Utilization: &gpu.Utilization{Compute: 0.5, Memory: 0.25},
	})
}

// useInstance has it use so many bytes of the memory of its MIG instance, and half of its multiprocessors.
func useInstance(ctx context.Context, name string, bytes int64) {
	GinkgoHelper()
	of := expectRunning(ctx, name).uuid()
	n, err := gpus.Node()
	Expect(err).NotTo(HaveOccurred())
	for _, g := range n.GPUs {
		for _, i := range g.Instances {
			for _, c := range i.Compute {
				if c.UUID == of {
					use(ctx, name, g.UUID, gpu.ProcessUse{
						Instance: i.ID, MemoryBytes: &bytes, Utilization: &gpu.Utilization{Compute: 0.5, Memory: 0.25},
					})
					return
				}
			}
		}
	}
	Fail("the driver has no instance " + of)
}

func use(ctx context.Context, name, uuid string, what gpu.ProcessUse) (end func()) {
	GinkgoHelper()
	what.PID = process(ctx, name)
	Expect(gpus.AddProcess(uuid, gpu.Process{PID: what.PID, Name: "workload", Instance: what.Instance})).To(Succeed())
	Expect(gpus.SetUse(uuid, what)).To(Succeed())
	end = func() { Expect(gpus.RemoveProcess(what.PID)).To(Succeed()) }
	DeferCleanup(end)
	return end
}

// useByMPS has a user's program, which MPS serves, use so many bytes of the memory of its GPU.
func useByMPS(ctx context.Context, name string, bytes int64) {
	GinkgoHelper()
	expectServed(ctx, name)
	what := gpu.ProcessUse{PID: process(ctx, name), Instance: gpu.WholeGPU, MPSClient: true, MemoryBytes: &bytes}
	n, err := gpus.Node()
	Expect(err).NotTo(HaveOccurred())
	Expect(gpus.SetUse(n.GPUs[0].UUID, what)).To(Succeed())
}

// process is the number of the program in the one container of a user's pod.
func process(ctx context.Context, name string) (pid int) {
	GinkgoHelper()
	return processOf(ctx, client.ObjectKey{Namespace: users, Name: name})
}

// processOf is the number of the program in the first container of a pod.
func processOf(ctx context.Context, key client.ObjectKey) (pid int) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		pod := &corev1.Pod{}
		g.Expect(kube.Get(ctx, key, pod)).To(Succeed())
		g.Expect(pod.Status.ContainerStatuses).NotTo(BeEmpty())
		_, container, _ := strings.Cut(statusOfContainer(pod, pod.Spec.Containers[0].Name).ContainerID, "://")
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

// statusOfContainer is the status of a container of a pod; empty if it has none yet.
func statusOfContainer(pod *corev1.Pod, name string) corev1.ContainerStatus {
	for _, c := range pod.Status.ContainerStatuses {
		if c.Name == name {
			return c
		}
	}
	return corev1.ContainerStatus{}
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
