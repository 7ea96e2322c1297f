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
	Describe("A memory limit of the driver", Ordered, Offset(1), func() {
		BeforeAll(beginLimits)
		AfterAll(endLimits)
		for _, backend := range []sim.Backend{sim.Dmem, sim.Misc} {
			limitSpecs(backend)
		}
	})
}

func limitSpecs(backend sim.Backend) {
	neighbours := []string{"one", "two", "three"}
	pods := append([]string{"greedy"}, neighbours...)

	It(fmt.Sprintf("is only reported with Report; with Enforce refuses a plain pod more than its share, while its neighbours go on; None leaves none (%s)", backend), func(ctx SpecContext) {
		standFor(backend)
		limit(ctx, v1alpha1.MemoryLimitReport)
		for _, name := range pods {
			startPod(ctx, name, "nvidia.com/gpu", 1, allocating("2048"))
		}
		for _, name := range pods {
			expectRunning(ctx, name)
		}
		Eventually(limitedReason).WithContext(ctx).Should(Equal("Unknown NotVerified"))
		Eventually(limitsReported).WithContext(ctx).Should(And(HaveLen(4), HaveEach("9830 ")))
		Expect(allocateIn(ctx, "greedy", []string{"20480"})).To(Equal("total 40960\n20480 CUDA_SUCCESS"))
		Expect(setLimits()).To(BeEmpty())
		Expect(kubectl(ctx, "", "gpusharing", "status")).To(ContainSubstring("Not hard: NotVerified"))

		var same []func()
		for _, name := range neighbours {
			same = append(same, expectSameContainer(ctx, users, name))
		}
		limit(ctx, v1alpha1.MemoryLimitEnforce)
		refused, share := fmt.Sprintf("total %d\n4096 CUDA_SUCCESS\n4096 CUDA_ERROR_OUT_OF_MEMORY", shareMiB), []string{"4096", "4096"}
		if backend == sim.Dmem {
			Eventually(limitedReason).WithContext(ctx).Should(Equal("True Enforced"))
			Eventually(limitsReported).WithContext(ctx).Should(And(HaveLen(4), HaveEach("9830 ")))
			Eventually(allocateIn).WithContext(ctx).WithArguments("greedy", share).Should(Equal(refused))
			Expect(kubectl(ctx, "", "gpusharing", "status")).To(ContainSubstring("hard: 4 pods are limited"))
			Expect(kubectl(ctx, "", "gpusharing", "why", "greedy", "-n", users)).To(ContainSubstring("the driver lets its pod have 9.6 GiB of the 40.0 GiB"))
		} else { // what was allocated before does not count, which is reported
			Eventually(limitsReported).WithContext(ctx).Should(And(HaveLen(4), HaveEach("9830 EarlierMemory")))
			Expect(allocateIn(ctx, "greedy", []string{"4096", "4096", "4096"})).To(HaveSuffix("\n4096 CUDA_SUCCESS\n4096 CUDA_ERROR_OUT_OF_MEMORY"))
		}
		for _, name := range neighbours {
			Expect(allocateIn(ctx, name, []string{"7000"})).To(ContainSubstring("7000 CUDA_SUCCESS"), name)
		}
		Expect(allocateIn(ctx, "greedy", []string{"managed", "20480"})).To(ContainSubstring("20480 CUDA_SUCCESS"), "managed memory escapes, as docs/monitoring.md says")

		before := restartCount(ctx, "greedy")
		Expect(syscall.Kill(process(ctx, "greedy"), syscall.SIGKILL)).To(Succeed())
		Eventually(restartCount).WithContext(ctx).WithArguments("greedy").Should(BeNumerically(">", before))
		expectRunning(ctx, "greedy")
		Eventually(allocateIn).WithContext(ctx).WithArguments("greedy", share).Should(Equal(refused), "of the container that began anew all counts")
		for _, is := range same {
			is()
		}

		limit(ctx, v1alpha1.MemoryLimitNone)
		Eventually(setLimits).Should(BeEmpty())
		Eventually(limitedReason).WithContext(ctx).Should(BeEmpty())
		Expect(limitsReported(ctx)).To(BeEmpty())
		Expect(allocateIn(ctx, "greedy", []string{"20480"})).To(ContainSubstring("20480 CUDA_SUCCESS"))
		if backend == sim.Dmem { // on misc limits of pods that are gone stay in the driver, and so on record
			Expect(filepath.Glob("/run/nvidia/mps/.memory-limits/*")).To(BeEmpty())
		}
	})

	It(fmt.Sprintf("leaves alone what another program limits, and limits the others (%s)", backend), func(ctx SpecContext) {
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
		startPod(ctx, "warm-up", "nvidia.com/gpu", 1, inInit)
		Eventually(limitsReported).WithContext(ctx).Should(HaveKey("warm-up"), "the kubelet lists no init container")
		Eventually(setLimits).Should(HaveKeyWithValue(podCgroup(ctx, "warm-up"), uint64(shareMiB)<<20))
		stopPod(ctx, "warm-up")
		if backend == sim.Dmem { // standing down does not depend on that
			for _, o := range otherOwners {
				expectStandDown(ctx, o)
			}
		}
		Expect(setLimits()).To(HaveKeyWithValue(podCgroup(ctx, "owned"), uint64(foreign)))
		limit(ctx, v1alpha1.MemoryLimitNone)
		Eventually(setLimits).Should(And(HaveLen(1), HaveKeyWithValue(podCgroup(ctx, "owned"), uint64(foreign))))
		Eventually(limitedReason).WithContext(ctx).Should(BeEmpty())
	})
}

// otherOwners limit memory on a whole node. What the patch says goes by null, or False.
var otherOwners = []struct{ name, subresource, there, gone string }{
	{"HAMi, by its annotation", "", `{"metadata":{"annotations":{"hami.io/node-nvidia-register":"x"}}}`, `{"metadata":{"annotations":{"hami.io/node-nvidia-register":null}}}`},
	{
		"HAMi, by its resource", "status", `{"status":{"capacity":{"nvidia.com/gpumem":"1000"},"allocatable":{"nvidia.com/gpumem":"1000"}}}`,
		`{"status":{"capacity":{"nvidia.com/gpumem":"0"},"allocatable":{"nvidia.com/gpumem":"0"}}}`,
	},
	{
		"gpu-fractioning", "status", `{"status":{"conditions":[{"type":"gpu-fractioning.nvidia.com/Ready","status":"True"}]}}`,
		`{"status":{"conditions":[{"type":"gpu-fractioning.nvidia.com/Ready","status":"False"}]}}`,
	},
}

// expectStandDown: nothing is set or removed beside another owner.
func expectStandDown(ctx context.Context, owner struct{ name, subresource, there, gone string }) {
	GinkgoHelper()
	By("standing down beside " + owner.name)
	before, err := setLimits()
	Expect(err).NotTo(HaveOccurred())
	patchNode(ctx, owner.subresource, owner.there)
	DeferCleanup(patchNode, owner.subresource, owner.gone)
	Eventually(limitedReason).WithContext(ctx).Should(Equal("False FractioningActive"))
	startPod(ctx, "beside", "nvidia.com/gpu", 1)
	expectRunning(ctx, "beside")
	Eventually(limitsReported).WithContext(ctx).Should(HaveKeyWithValue("beside", "9830 FractioningActive"))
	Expect(setLimits()).To(Equal(before))
	patchNode(ctx, owner.subresource, owner.gone)
	Eventually(setLimits).Should(HaveKey(podCgroup(ctx, "beside")))
	stopPod(ctx, "beside")
}

// beginLimits gives the specs an A100 with a driver that has memory limits, and an agent that may set them.
func beginLimits(ctx SpecContext) {
	GinkgoHelper()
	begin(ctx, sim.A100)
	stopDriver()
	startDriverAs(ctx, driver.Options{Layout: driver.Container, Version: driver615})
	standFor(sim.Dmem)
	programs, stop := context.WithCancel(context.Background())
	DeferCleanup(stop)
	Expect(gpus.ServePrograms(programs, standHierarchy)).To(Succeed())
	restartClients(ctx)
	Expect(machine.Import(ctx, write(standImage(ctx)))).To(Succeed())
	serveMetrics(ctx, "featureGates.MemoryLimits=true", "images.agent.repository="+standRepository, "images.agent.tag="+standTag)
	expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 1})
}

// standFor has the driver and the agent take the machine for one with a back end. The agent looks at its next policy.
func standFor(backend sim.Backend) {
	GinkgoHelper()
	Expect(gpus.Update(func(s *simdriver.State) error {
		s.Node.Cgroups.Backend, s.Node.Cgroups.Root, s.Node.Cgroups.File = backend, standRoot, standControl
		return nil
	})).To(Succeed())
	stand, err := json.Marshal(map[string]string{"Root": standRoot, "Controller": string(backend), "File": standControl})
	Expect(err).NotTo(HaveOccurred())
	Expect(os.WriteFile(filepath.Join(driver.Hardware, "cgroups.json"), stand, 0o600)).To(Succeed())
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

// inInit has an init container ask for what the pod's container does, and that for nothing.
func inInit(s *corev1.PodSpec) {
	first := s.Containers[0]
	first.Name = "first"
	s.InitContainers, s.Containers[0].Resources = []corev1.Container{first}, corev1.ResourceRequirements{}
}

// allocateIn is what a CUDA program prints that takes so many MiB in the container of a user's pod, and ends.
func allocateIn(ctx context.Context, name string, mib []string) string {
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
