// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// The machine has cgroup v1, and neither dmem nor misc. Its hierarchy of the controller pids stands for the tree of cgroup v2: the kubelet and
// runc make its directories, at their own moments. It has no cgroup.controllers and no files of dmem or misc, so the agent of these specs is
// built with what answers in their place, as runc would have made them (cmd/agent/cgroups_stand.go). The driver is simulated: it charges
// simulated CUDA programs by the cgroup in which the kernel says that they are.
const (
	standHierarchy = "pids"
	standRoot      = "/sys/fs/cgroup/" + standHierarchy
	standControl   = "pids.max"
	// driver615 has memory limits.
	driver615 = "615.71.09"
	// shareMiB is 96 % of the 40,960 MiB of an A100, by four.
	shareMiB = 9830
)

func memoryLimitSpecs() {
	for _, backend := range []sim.Backend{sim.Dmem, sim.Misc} {
		Describe(fmt.Sprintf("A memory limit of the driver (%s)", backend), Ordered, Offset(1), func() {
			BeforeAll(func(ctx SpecContext) { beginLimits(ctx, backend) })
			AfterAll(endLimits)
			limitSpecs(backend)
			limitOwnerSpecs()
		})
	}
}

func limitSpecs(backend sim.Backend) {
	neighbours := []string{"one", "two", "three"}
	pods := append([]string{"greedy"}, neighbours...)
	startAll := func(ctx context.Context) {
		GinkgoHelper()
		for _, name := range pods {
			startPod(ctx, name, "nvidia.com/gpu", 1, allocating("2048"))
		}
		for _, name := range pods {
			expectRunning(ctx, name)
		}
	}

	It("is only reported with Report: a pod takes more than its share", func(ctx SpecContext) {
		limit(ctx, v1alpha1.MemoryLimitReport)
		startAll(ctx)
		Eventually(limitedReason).WithContext(ctx).Should(Equal("Unknown NotVerified"))
		Eventually(limitsReported).WithContext(ctx).Should(And(HaveLen(4), HaveEach("9830 ")))
		Expect(allocateIn(ctx, "greedy", "20480")).To(Equal("total 40960\n20480 CUDA_SUCCESS"))
		Consistently(setLimits, "5s").Should(BeEmpty())
		Expect(kubectl(ctx, "", "gpusharing", "status")).To(ContainSubstring("Not hard: NotVerified"))
	})

	It("refuses a plain pod more than its share, while its neighbours go on, also after its container restarts", func(ctx SpecContext) {
		limit(ctx, v1alpha1.MemoryLimitReport)
		startAll(ctx)
		limit(ctx, v1alpha1.MemoryLimitEnforce)
		if backend == sim.Misc { // what was allocated before does not count, which is reported
			Eventually(limitsReported).WithContext(ctx).Should(And(HaveLen(4), HaveEach("9830 EarlierMemory")))
			stopPods(ctx)
			startAll(ctx)
		}
		Eventually(limitedReason).WithContext(ctx).Should(Equal("True Enforced"))
		Eventually(limitsReported).WithContext(ctx).Should(And(HaveLen(4), HaveEach("9830 ")))
		var same []func()
		for _, name := range neighbours {
			same = append(same, expectSameContainer(ctx, users, name))
		}
		refused := fmt.Sprintf("total %d\n4096 CUDA_SUCCESS\n4096 CUDA_ERROR_OUT_OF_MEMORY", shareMiB)
		Eventually(allocateIn).WithContext(ctx).WithArguments("greedy", "4096", "4096").Should(Equal(refused))
		for _, name := range neighbours {
			Expect(allocateIn(ctx, name, "7000")).To(ContainSubstring("7000 CUDA_SUCCESS"), name)
		}
		Expect(allocateIn(ctx, "greedy", "managed", "20480")).To(ContainSubstring("20480 CUDA_SUCCESS"), "managed memory escapes, as docs/monitoring.md says")
		Expect(kubectl(ctx, "", "gpusharing", "status")).To(ContainSubstring("hard: 4 pods are limited"))
		Expect(kubectl(ctx, "", "gpusharing", "why", "greedy", "-n", users)).To(ContainSubstring("the driver lets its pod have 9.6 GiB of the 40.0 GiB"))

		before := restartCount(ctx, "greedy")
		Expect(syscall.Kill(process(ctx, "greedy"), syscall.SIGKILL)).To(Succeed())
		Eventually(restartCount).WithContext(ctx).WithArguments("greedy").Should(BeNumerically(">", before))
		expectRunning(ctx, "greedy")
		Eventually(allocateIn).WithContext(ctx).WithArguments("greedy", "4096", "4096").Should(Equal(refused))
		for _, is := range same {
			is()
		}
	})

	It("leaves nothing once the policy asks for none", func(ctx SpecContext) {
		startAll(ctx)
		Eventually(limitedReason).WithContext(ctx).Should(Equal("True Enforced"))
		limit(ctx, v1alpha1.MemoryLimitNone)
		Eventually(setLimits).Should(BeEmpty())
		Eventually(limitedReason).WithContext(ctx).Should(BeEmpty())
		Expect(limitsReported(ctx)).To(BeEmpty())
		Expect(allocateIn(ctx, "greedy", "20480")).To(ContainSubstring("20480 CUDA_SUCCESS"))
		if backend == sim.Dmem { // on misc limits of pods that are gone stay in the driver, and so on record
			Expect(filepath.Glob("/run/nvidia/mps/.memory-limits/*")).To(BeEmpty())
		}
	})
}

func limitOwnerSpecs() {
	It("leaves alone a limit that another program has set on a pod, and limits the others", func(ctx SpecContext) {
		stopPods(ctx)
		limit(ctx, v1alpha1.MemoryLimitReport)
		for _, name := range []string{"owned", "ours"} {
			startPod(ctx, name, "nvidia.com/gpu", 1)
			expectRunning(ctx, name)
		}
		const foreign = 5 << 30
		Expect(gpus.Update(func(s *simdriver.State) error {
			return s.Node.SetMemoryLimit(s.Node.GPUs[0].UUID, podCgroup(ctx, "owned"), 0, foreign, true)
		})).To(Succeed())
		limit(ctx, v1alpha1.MemoryLimitEnforce)
		Eventually(limitsReported).WithContext(ctx).Should(HaveKeyWithValue("owned", "9830 ForeignLimit"))
		Eventually(setLimits).Should(HaveKeyWithValue(podCgroup(ctx, "ours"), uint64(shareMiB)<<20))
		Expect(setLimits()).To(HaveKeyWithValue(podCgroup(ctx, "owned"), uint64(foreign)))
		limit(ctx, v1alpha1.MemoryLimitNone)
		Eventually(setLimits).Should(And(HaveLen(1), HaveKeyWithValue(podCgroup(ctx, "owned"), uint64(foreign))))
		Eventually(limitedReason).WithContext(ctx).Should(BeEmpty())
		stopPods(ctx)
	})

	for _, owner := range []struct {
		name   string
		change func(ctx context.Context, there bool)
	}{
		{"HAMi, by its annotation", func(ctx context.Context, there bool) {
			patchNode(ctx, "", map[bool]string{
				true:  `{"metadata":{"annotations":{"hami.io/node-nvidia-register":"x"}}}`,
				false: `{"metadata":{"annotations":{"hami.io/node-nvidia-register":null}}}`,
			}[there])
		}},
		{"HAMi, by its resource", func(ctx context.Context, there bool) {
			patchNode(ctx, "status", map[bool]string{
				true:  `{"status":{"capacity":{"nvidia.com/gpumem":"1000"},"allocatable":{"nvidia.com/gpumem":"1000"}}}`,
				false: `{"status":{"capacity":{"nvidia.com/gpumem":"0"},"allocatable":{"nvidia.com/gpumem":"0"}}}`,
			}[there])
		}},
		{"gpu-fractioning", func(ctx context.Context, there bool) {
			patchNode(ctx, "status", fmt.Sprintf(`{"status":{"conditions":[{"type":"gpu-fractioning.nvidia.com/Ready","status":%q}]}}`,
				map[bool]string{true: "True", false: "False"}[there]))
		}},
	} {
		It("sets and removes nothing beside "+owner.name, func(ctx SpecContext) {
			limit(ctx, v1alpha1.MemoryLimitEnforce)
			startPod(ctx, "before", "nvidia.com/gpu", 1)
			expectRunning(ctx, "before")
			Eventually(limitedReason).WithContext(ctx).Should(Equal("True Enforced"))
			before, err := setLimits()
			Expect(err).NotTo(HaveOccurred())
			owner.change(ctx, true)
			DeferCleanup(func(ctx SpecContext) { owner.change(ctx, false) })
			Eventually(limitedReason).WithContext(ctx).Should(Equal("False FractioningActive"))
			startPod(ctx, "beside", "nvidia.com/gpu", 1)
			expectRunning(ctx, "beside")
			Eventually(limitsReported).WithContext(ctx).Should(HaveKeyWithValue("beside", "9830 FractioningActive"))
			Expect(setLimits()).To(Equal(before))
			owner.change(ctx, false)
			Eventually(setLimits).Should(HaveKey(podCgroup(ctx, "beside")))
			stopPods(ctx)
			limit(ctx, v1alpha1.MemoryLimitNone)
			Eventually(limitedReason).WithContext(ctx).Should(BeEmpty())
			Expect(setLimits()).To(BeEmpty())
		})
	}
}

// beginLimits gives the specs an A100 with a driver that has memory limits, and an agent that may set them.
func beginLimits(ctx context.Context, backend sim.Backend) {
	GinkgoHelper()
	begin(ctx, sim.A100)
	stopDriver()
	startDriverAs(ctx, driver.Options{Layout: driver.Container, Version: driver615})
	Expect(gpus.Update(func(s *simdriver.State) error {
		s.Node.Cgroups = sim.Cgroups{Backend: backend, Root: standRoot, File: standControl}
		return nil
	})).To(Succeed())
	stand, err := json.Marshal(map[string]string{"Root": standRoot, "Controller": string(backend), "File": standControl})
	Expect(err).NotTo(HaveOccurred())
	Expect(os.WriteFile(filepath.Join(driver.Hardware, "cgroups.json"), stand, 0o600)).To(Succeed())
	programs, stop := context.WithCancel(context.Background())
	DeferCleanup(stop)
	Expect(gpus.ServePrograms(programs, standHierarchy)).To(Succeed())
	restartClients(ctx)
	Expect(machine.Import(ctx, write(standImage(ctx)))).To(Succeed())
	serveMetrics(ctx, "featureGates.MemoryLimits=true", "images.agent.repository="+standRepository, "images.agent.tag="+standTag)
	expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 1})
}

// endLimits gives the node its former agent, and the next specs other GPUs with the first driver.
func endLimits(ctx SpecContext) {
	unshare(ctx, map[string]int64{"nvidia.com/gpu": 1})
	Expect(os.Remove(filepath.Join(driver.Hardware, "cgroups.json"))).To(Succeed())
	serveMetrics(ctx, "featureGates.MemoryLimits=false")
	fitted = nil
}

// limit has the policy ask for limits.
func limit(ctx context.Context, mode v1alpha1.MemoryLimitMode) {
	GinkgoHelper()
	share(ctx, fmt.Sprintf(`{strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {limit: %s}}}`, mode))
	expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
	expectReady(ctx, "shared")
}

// allocating has the program of a pod take so many MiB when it begins.
func allocating(mib ...string) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) {
		s.Containers[0].Env = append(s.Containers[0].Env, corev1.EnvVar{Name: "CUDA_ALLOCATE", Value: strings.Join(mib, " ")})
	}
}

// allocateIn is what a CUDA program prints that takes so many MiB in the container of a user's pod, and ends.
func allocateIn(ctx context.Context, name string, mib ...string) string {
	GinkgoHelper()
	return strings.TrimSpace(kubectl(ctx, "", append([]string{"exec", "-n", users, name, "--", "/workload", "allocate"}, mib...)...))
}

// limitedReason is status and reason of the condition MemoryLimited; empty: there is none.
func limitedReason(ctx context.Context) (string, error) {
	n, err := gpuNode(ctx)
	if err != nil {
		return "", err
	}
	is, _ := condition.Find(n.Status.Conditions, v1alpha1.ConditionMemoryLimited)
	return strings.TrimSpace(string(is.Status) + " " + is.Reason), nil
}

// limitsReported are the limits that the GPUNode reports, by pod: MiB, and why they do not hold.
func limitsReported(ctx context.Context) (map[string]string, error) {
	n, err := gpuNode(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for _, p := range n.Status.MemoryLimits.Pods {
		found[p.PodName] = fmt.Sprintf("%d %s", p.LimitBytes>>20, p.Reason)
	}
	return found, nil
}

// setLimits are the limits that the driver has for cgroups that are there, in bytes, by path.
func setLimits() (map[string]uint64, error) {
	n, err := gpus.Node()
	if err != nil {
		return nil, err
	}
	found := map[string]uint64{}
	for _, l := range n.GPUs[0].Limits {
		if _, err := os.Stat(l.Path); err == nil && l.Hard != sim.NoLimit {
			found[l.Path] = l.Hard
		}
	}
	return found, nil
}

// podCgroup is the cgroup of a user's pod, as the kubelet makes it.
func podCgroup(ctx context.Context, name string) string {
	GinkgoHelper()
	pod := &corev1.Pod{}
	Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, pod)).To(Succeed())
	path := filepath.Join(standRoot, "kubepods/besteffort/pod"+string(pod.UID))
	Expect(path).To(BeADirectory())
	return path
}

func patchNode(ctx context.Context, subresource, patch string) {
	GinkgoHelper()
	n := &corev1.Node{}
	n.Name = nodeName
	p := client.RawPatch(types.StrategicMergePatchType, []byte(patch))
	if subresource != "" {
		Expect(kube.SubResource(subresource).Patch(ctx, n, p)).To(Succeed())
		return
	}
	Expect(kube.Patch(ctx, n, p)).To(Succeed())
}

func restartCount(ctx context.Context, name string) int32 {
	GinkgoHelper()
	pod := &corev1.Pod{}
	Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, pod)).To(Succeed())
	return pod.Status.ContainerStatuses[0].RestartCount
}
