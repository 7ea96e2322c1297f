// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const (
	// tenant is a namespace that Pod Security holds to baseline, and the user who has the role edit in it.
	tenant, tenantUser = "tenant", "mallory"
	// tenantUpgrade is the version of the driver to which the node is upgraded beside a tenant.
	tenantUpgrade = "600.20.09"
)

// tenantSpecs are what docs/security.md says of a tenant, with pods on the real kubelet. All that the tenant does, the
// API server lets a user with the role edit do.
func tenantSpecs() {
	Describe("A tenant with the role edit in one namespace", Ordered, Offset(1), func() {
		var mallory client.Client

		BeforeAll(func(ctx SpecContext) {
			resume(ctx, sim.A100, sim.A100)
			mallory = letIn(ctx)
			DeferCleanup(expel)
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 2, memory: {guard: {mode: Evict, gracePeriodSeconds: 10}}}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
			expectReady(ctx, "shared")
			for _, pod := range greedy() { // first: the guard evicts none that was made less than half a minute before the report
				Expect(mallory.Create(ctx, pod)).To(Succeed())
				givenTo(ctx, client.ObjectKeyFromObject(pod))
			}
			disguise(ctx, mallory)
		})
		AfterAll(func(ctx SpecContext) { unshare(ctx, map[string]int64{"nvidia.com/gpu": 2}) })
		tenantOnSlicedGPUs()
		tenantThatHangs(&mallory)
		tenantBesideMPS(&mallory)
		tenantOfMPS(&mallory)

		It("holds up no change of MIG by pods and DaemonSets that look like NVIDIA's, NFD's or ours, and all of them stay", func(ctx SpecContext) {
			stay := expectSpared(ctx)
			share(ctx, `{strategy: MIG, mig: {layouts: [{fill: 3g.20gb}]}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-3g.20gb": 4})
			expectReady(ctx, "shared")
			stay()
		})
	})
}

// greedy are two pods of the tenant that use more than their share of a GPU: one whose program has the name of NVIDIA's MPS
// server, with a name too long for the link of its log and a container that cannot start, and one in a control group of
// its own.
func greedy() []*corev1.Pod {
	byName := tenantPod("mps-"+strings.Repeat("long-", 36)+"name", "stay", requesting("nvidia.com/gpu", 1))
	byName.Spec.Containers[0].Command = []string{mpsServerProgram}
	byName.Spec.Containers = append(byName.Spec.Containers, corev1.Container{Name: "fails", Image: workloadImage, Command: []string{"/nothing"}})
	return []*corev1.Pod{byName, tenantPod(nested, "stay", requesting("nvidia.com/gpu", 1))}
}

const nested = "in-a-cgroup-of-its-own"

// tenantOnSlicedGPUs are about two A100 of 40 GiB, on each of which a pod of the tenant uses 33 GiB beside a neighbour
// that uses 6 GiB, where the share of each is 20 GiB.
func tenantOnSlicedGPUs() {
	It("hides from the memory guard by no name, no length of one, no failing container and no cgroup, and no neighbour is evicted", func(ctx SpecContext) {
		neighbours := map[string]string{} // by GPU
		var undisturbed []func()
		for _, name := range []string{"first", "second"} { // the device plugin hands out the GPU that is used the least
			startPod(ctx, name, "nvidia.com/gpu", 1)
			undisturbed = append(undisturbed, expectUndisturbed(ctx, name))
			neighbours[expectRunning(ctx, name).uuid()] = name
		}
		Expect(neighbours).To(HaveLen(2))
		stay := expectSpared(ctx, greedy()[0].Name, greedy()[1].Name)
		for _, pod := range greedy() {
			uuid := givenTo(ctx, client.ObjectKeyFromObject(pod)).uuid()
			Expect(neighbours).To(HaveKey(uuid))
			useOf(ctx, client.ObjectKey{Namespace: users, Name: neighbours[uuid]}, uuid, 6<<30)
			if pod.Name == nested { // from then on its program is in a group with the name of the neighbour's
				nest(ctx, pod, neighbours[uuid])
			}
			useOf(ctx, client.ObjectKeyFromObject(pod), uuid, 33<<30)
			delete(neighbours, uuid)
		}
		for _, pod := range greedy() {
			expectTenantGone(ctx, pod.Name)
		}
		for _, check := range undisturbed {
			check()
		}
		stay()
	})
}

// tenantThatHangs is about what answers to nobody in a container of the tenant.
func tenantThatHangs(mallory *client.Client) {
	It("keeps the agent from no report and no change by a file system in its container that answers to nobody", func(ctx SpecContext) {
		pod := tenantPod("hangs", "stay", withoutGPU())
		pod.Spec.Containers[0].Command = []string{configManagerProgram}
		pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, corev1.EnvVar{Name: "CONFIG_FILE_SRCDIR", Value: hangsAt})
		Expect((*mallory).Create(ctx, pod)).To(Succeed())
		givenTo(ctx, client.ObjectKeyFromObject(pod))
		hang(processOf(ctx, client.ObjectKeyFromObject(pod)))
		stay := expectSpared(ctx)
		apply(ctx, "shared", `{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 3}}}`)
		expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 6})
		expectReady(ctx, "shared")
		stay()
	})
}

// hangsAt is where a file system that answers to nobody is mounted in a container.
const hangsAt = "/dev/shm"

// hang mounts a FUSE without a server in the container of a process. A tenant has a volume of NFS for it, which Pod
// Security baseline allows, and stops the server; the machines of these specs have no NFS.
func hang(pid int) {
	GinkgoHelper()
	device := filepath.Join("/dev", "fuse-"+tenant)
	Expect(unix.Mknod(device, unix.S_IFCHR|0o600, int(unix.Mkdev(10, 229)))).To(Succeed())
	fuse, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() error { return errors.Join(unix.Close(fuse), os.Remove(device)) }) // who waits goes on
	mounted := make(chan error)
	go func() {
		runtime.LockOSThread() // it ends with this goroutine, since it is in another mount namespace
		mounted <- mountIn(pid, fuse)
	}()
	Expect(<-mounted).To(Succeed())
}

// mountIn goes into the mount namespace of a process, with the thread that calls it, and mounts a FUSE there.
func mountIn(pid, fuse int) error {
	container, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return err
	}
	defer container.Close() //nolint:errcheck // only read
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(int(container.Fd()), unix.CLONE_NEWNS); err != nil {
		return err
	}
	return unix.Mount("hangs", hangsAt, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse))
}

// tenantBesideMPS are about pods that only name the pipe directory of a daemon.
func tenantBesideMPS(mallory *client.Client) {
	const shared = `{strategy: MPS, mps: {replicas: 10, activeThreadPercentage: 20}, advertise: {renameByDefault: true}}`
	It("keeps no MPS daemon that hangs from being started again by pods that name its pipe directory", func(ctx SpecContext) {
		share(ctx, shared)
		expectAllocatable(ctx, map[string]int64{gpuShared: 20})
		expectReady(ctx, "shared")
		pipe := filepath.Join(mpsRoot, gpuShared, "pipe")
		pod := tenantPod("names-the-pipe", "stay", withoutGPU())
		pod.Spec.Containers[0].Command, pod.Spec.Containers[0].Args = []string{mpsControlProgram}, []string{"-d"}
		pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, corev1.EnvVar{Name: "CUDA_MPS_PIPE_DIRECTORY", Value: pipe})
		Expect((*mallory).Create(ctx, pod)).To(Succeed())
		givenTo(ctx, client.ObjectKeyFromObject(pod))
		stay := expectSpared(ctx)
		hangs := mpsDaemon()
		Expect(syscall.Kill(hangs, syscall.SIGSTOP)).To(Succeed())
		DeferCleanup(func() { _ = syscall.Kill(hangs, syscall.SIGCONT) }) // it is gone if all is well
		Eventually(func(g Gomega) { g.Expect(mpsDaemons(g)).To(And(HaveLen(1), Not(ContainElement(hangs)))) }).WithContext(ctx).Should(Succeed())
		expectReady(ctx, "shared")
		startPod(ctx, "client", gpuShared, 1)
		expectServed(ctx, "client")
		stay()
	})

	It("keeps the module of NVIDIA's driver from no upgrade by them", func(ctx SpecContext) {
		stay := expectSpared(ctx)
		expectUnloaded(ctx, &gpuoperator.Upgrade{Version: tenantUpgrade})
		expectAllocatable(ctx, map[string]int64{gpuShared: 20})
		expectReady(ctx, "shared")
		expectNothingLeft(ctx)
		stay()
	})
}

// tenantOfMPS are about a tenant's pod that is a client of the MPS daemon, as root in its container, beside a client of
// another user.
func tenantOfMPS(mallory *client.Client) {
	It("as root in an MPS client fills /run of the node by no pipe directory, and nobody else notices", func(ctx SpecContext) {
		startPod(ctx, "client", gpuShared, 1)
		expectServed(ctx, "client")
		goesOn := expectUndisturbed(ctx, "client")
		pipe := filepath.Join(mpsRoot, gpuShared, "pipe")
		held := notes(func() (int64, error) { return bytesIn(pipe) })
		pod := tenantPod("fills", "fill", requesting(gpuShared, 1))
		Expect((*mallory).Create(ctx, pod)).To(Succeed())
		Eventually(mpsLog).WithContext(ctx).Should(And(
			ContainSubstring("which lie in the node's memory, and was emptied"), ContainSubstring(string(pod.UID))))
		Eventually(func() (string, error) { return tenantLog(ctx, pod.Name) }).WithContext(ctx).Should(ContainSubstring(`"filled"`))
		Eventually(func() (int64, error) { return bytesIn(pipe) }).WithContext(ctx).Should(BeNumerically("<=", 1<<20))
		Expect(held()).NotTo(ContainElement(BeNumerically(">", 128<<20)), "half of what it has written")
		goesOn()
		expectReady(ctx, "shared")
	})

	It("as root in an MPS client takes the place of the daemon: that is reported, and no change of the policy waits for it", func(ctx SpecContext) {
		pod := tenantPod("listens", "listen", requesting(gpuShared, 1))
		Expect((*mallory).Create(ctx, pod)).To(Succeed())
		Eventually(statusOf).WithContext(ctx).WithArguments("shared").Should(And(
			ContainSubstring(v1alpha1.ReasonMPSDaemonFailed), ContainSubstring(string(pod.UID))))
		stay := expectSpared(ctx, "fills", "listens")
		apply(ctx, "shared", `{rollout: {drain: {mode: Evict}}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}}`)
		expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
		expectReady(ctx, "shared")
		Expect(mpsDaemons(Default)).To(BeEmpty())
		Expect(computeModes()).To(HaveEach(gpu.ComputeDefault))
		stay()
	})
}

// letIn makes the tenant's namespace and gives the tenant the role edit there. What it returns is the tenant's client.
func letIn(ctx context.Context) client.Client {
	GinkgoHelper()
	Expect(kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: tenant, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "baseline"},
	}})).To(Succeed())
	Expect(kube.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "edit"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: tenantUser}},
	})).To(Succeed())
	config := rest.CopyConfig(machine.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: tenantUser, Groups: []string{"system:authenticated"}}
	mallory, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	Expect(err).NotTo(HaveOccurred())
	Eventually(func() error { return mallory.List(ctx, &corev1.PodList{}, client.InNamespace(tenant)) }).WithContext(ctx).Should(Succeed())
	Expect(mallory.List(ctx, &corev1.PodList{})).To(Satisfy(apierrors.IsForbidden))
	Expect(mallory.Create(ctx, tenantPod("on-the-host", "stay", withoutGPU(), func(p *corev1.PodSpec) { p.HostPID = true }))).
		To(Satisfy(apierrors.IsForbidden))
	return mallory
}

// expel removes the tenant's namespace. Its programs end only when they are killed.
func expel(ctx SpecContext) {
	GinkgoHelper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}}
	Expect(client.IgnoreNotFound(kube.Delete(ctx, namespace))).To(Succeed())
	Eventually(func(g Gomega) {
		_, err := kill("/workload", mpsControlProgram)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(kube.Get(ctx, client.ObjectKeyFromObject(namespace), namespace)).To(Satisfy(apierrors.IsNotFound))
	}).WithContext(ctx).Should(Succeed())
}

// tenantPod is a pod of the tenant that runs as root, does some mischief (test/e2e/programs/workload), and ends for nobody.
func tenantPod(name, mischief string, spec corev1.PodSpec, with ...func(*corev1.PodSpec)) *corev1.Pod {
	asRoot(&spec)
	spec.TerminationGracePeriodSeconds = ptr.To[int64](1)
	spec.Containers[0].Env = []corev1.EnvVar{{Name: "MISCHIEF", Value: mischief}}
	for _, change := range with {
		change(&spec)
	}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: name, Labels: map[string]string{}}, Spec: spec}
}

// withoutGPU is a user's program that asks for no GPU.
func withoutGPU() corev1.PodSpec {
	spec := requesting(gpuShared, 0)
	spec.Containers[0].Resources = corev1.ResourceRequirements{}
	return spec
}

// asRoot has the programs of a pod run as root, with the capabilities that container runtimes give.
func asRoot(s *corev1.PodSpec) {
	s.SecurityContext = &corev1.PodSecurityContext{RunAsUser: ptr.To[int64](0)}
	for i := range s.Containers {
		s.Containers[i].SecurityContext = nil
	}
}

// disguise lets the tenant create accounts, pods and DaemonSets that look like the programs of NVIDIA, of Node Feature
// Discovery and ours, which run for as long as nobody kills them.
func disguise(ctx context.Context, mallory client.Client) {
	GinkgoHelper()
	cluster := clusterPolicy()
	Expect(kube.Get(ctx, client.ObjectKeyFromObject(cluster), cluster)).To(Succeed()) // the tenant cannot, but may know its UID
	looks := map[string]func(*corev1.Pod){
		"validator": func(p *corev1.Pod) {
			p.Labels["app"] = "nvidia-cuda-validator"
			p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(cluster, gpuoperator.PolicyKind())}
			p.OwnerReferences[0].BlockOwnerDeletion = nil
		},
		"agent":        func(p *corev1.Pod) { p.Labels["app.kubernetes.io/name"] = "gpu-sharing-agent" },
		"mig-manager":  func(p *corev1.Pod) { p.Labels["app"] = "nvidia-mig-manager" },
		"mps-selector": func(p *corev1.Pod) { p.Labels["app"] = gpuoperator.MPSName },
	}
	for _, account := range []string{"gpu-sharing-controller", "gpu-sharing-agent", "nvidia-device-plugin"} {
		Expect(mallory.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: account}})).To(Succeed())
	}
	for name, look := range looks {
		pod := tenantPod(name, "stay", withoutGPU(), everywhere)
		pod.Spec.ServiceAccountName = "gpu-sharing-agent"
		look(pod)
		Expect(mallory.Create(ctx, pod)).To(Succeed())
	}
	for name, set := range map[string]*appsv1.DaemonSet{
		gpuoperator.PluginName: tenantSet(gpuoperator.PluginName, map[string]string{"app": gpuoperator.PluginName}, "device-plugin"),
		"dcgm":                 tenantSet("dcgm", map[string]string{"app": "nvidia-dcgm"}, "dcgm"),
		"nfd-worker":           tenantSet("nfd-worker", map[string]string{"app.kubernetes.io/name": "node-feature-discovery"}, ""),
	} {
		Expect(mallory.Create(ctx, set)).To(Succeed(), name)
	}
	Eventually(func() ([]string, error) {
		all, err := notReady(ctx, tenant)
		return slices.DeleteFunc(all, func(why string) bool { return strings.HasPrefix(why, greedy()[0].Name) }), err
	}).WithContext(ctx).Should(BeEmpty())
}

// tenantSet is a DaemonSet of the tenant whose pods have labels, and the node selector of an operand of NVIDIA's.
func tenantSet(name string, labels map[string]string, operand string) *appsv1.DaemonSet {
	pod := tenantPod(name, "stay", withoutGPU())
	pod.Spec.Containers[0].Name, pod.Spec.ServiceAccountName = name, "nvidia-device-plugin"
	pod.Spec.TerminationGracePeriodSeconds = ptr.To[int64](600) // once the node has not what they select any more
	if operand != "" {
		pod.Spec.NodeSelector = map[string]string{gpuoperator.LabelDeploy + operand: "true"}
	}
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: name, Labels: labels},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod.Spec},
		},
	}
}

// everywhere lets a pod come to every node, whatever taints it has.
func everywhere(s *corev1.PodSpec) {
	s.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
}

// expectSpared notes the pods of the tenant, and what is asked of them. What it returns checks later that all but some
// are there, and that nobody has asked them to end. Those of the tenant's DaemonSets count for the DaemonSet controller.
func expectSpared(ctx context.Context, but ...string) (check func()) {
	GinkgoHelper()
	look := func() map[string]types.UID {
		pods := &corev1.PodList{}
		Expect(kube.List(ctx, pods, client.InNamespace(tenant))).To(Succeed())
		found := map[string]types.UID{}
		for i := range pods.Items {
			p := &pods.Items[i]
			owner := metav1.GetControllerOf(p)
			if p.DeletionTimestamp == nil && (owner == nil || owner.Kind != "DaemonSet") {
				found[p.Name] = p.UID
			}
		}
		for _, name := range but {
			delete(found, name)
		}
		return found
	}
	before := look()
	Expect(before).NotTo(BeEmpty())
	return func() {
		GinkgoHelper()
		Expect(look()).To(Equal(before), "the pods of the tenant that use no GPU")
	}
}

// expectTenantGone waits until a pod of the tenant was evicted, by the memory guard.
func expectTenantGone(ctx context.Context, name string) {
	GinkgoHelper()
	key := client.ObjectKey{Namespace: tenant, Name: name}
	Eventually(func() error { return kube.Get(ctx, key, &corev1.Pod{}) }).WithContext(ctx).Should(Satisfy(apierrors.IsNotFound))
	Expect(kubectl(ctx, "", "events", "-n", tenant, "--for", "pod/"+name)).To(And(ContainSubstring("Evicting"), ContainSubstring("33.0 GiB")))
}

func tenantLog(ctx context.Context, pod string) (string, error) {
	log, err := machine.Client.CoreV1().Pods(tenant).GetLogs(pod, &corev1.PodLogOptions{}).DoRaw(ctx)
	return string(log), err
}

// useOf has the program of a pod use so many bytes of the memory of a GPU, until the spec ends.
func useOf(ctx context.Context, key client.ObjectKey, uuid string, bytes int64) {
	GinkgoHelper()
	pid := processOf(ctx, key)
	Expect(gpus.AddProcess(uuid, gpu.Process{PID: pid, Name: "python3", Instance: gpu.WholeGPU})).To(Succeed())
	Expect(gpus.SetUse(uuid, gpu.ProcessUse{PID: pid, Instance: gpu.WholeGPU, MemoryBytes: &bytes})).To(Succeed())
	DeferCleanup(func() error { return gpus.RemoveProcess(pid) })
}

// nest moves the program of a pod of the tenant to control groups below its own that have the names of those of
// another user's pod. Pod Security baseline does not let a container do that by itself: its control groups are mounted
// read-only, unless the container runtime was told otherwise.
func nest(ctx context.Context, pod *corev1.Pod, like string) {
	GinkgoHelper()
	victim := &corev1.Pod{}
	Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: like}, victim)).To(Succeed())
	_, container, _ := strings.Cut(victim.Status.ContainerStatuses[0].ContainerID, "://")
	pid := processOf(ctx, client.ObjectKeyFromObject(pod))
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	Expect(err).NotTo(HaveOccurred())
	moved := 0
	for line := range strings.Lines(string(groups)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		_, below, is := strings.Cut(fields[2], "/kubepods/")
		if !is {
			continue
		}
		group := filepath.Join("/sys/fs/cgroup", strings.TrimPrefix(fields[1], "name="), "kubepods", below)
		for _, name := range []string{"pod" + string(victim.UID), container} {
			cpus, cpusErr := os.ReadFile(filepath.Join(group, "cpuset.cpus"))
			mems, _ := os.ReadFile(filepath.Join(group, "cpuset.mems")) // there where the other is
			group = filepath.Join(group, name)
			Expect(os.MkdirAll(group, 0o755)).To(Succeed())
			if cpusErr == nil {
				Expect(os.WriteFile(filepath.Join(group, "cpuset.cpus"), cpus, 0o644)).To(Succeed())
				Expect(os.WriteFile(filepath.Join(group, "cpuset.mems"), mems, 0o644)).To(Succeed())
			}
		}
		Expect(os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644)).To(Succeed())
		moved++
	}
	Expect(moved).To(BeNumerically(">", 0), "%s", groups)
}

// mpsDaemon is the number of the one MPS control daemon of the node.
func mpsDaemon() int {
	GinkgoHelper()
	found := mpsDaemons(Default)
	Expect(found).To(HaveLen(1))
	return found[0]
}

// mpsDaemons are the numbers of the MPS control daemons of the node: processes of its PID namespace.
func mpsDaemons(g Gomega) (found []int) {
	own, err := os.Readlink("/proc/self/ns/pid")
	g.Expect(err).NotTo(HaveOccurred())
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	g.Expect(err).NotTo(HaveOccurred())
	for _, file := range files {
		command, _ := os.ReadFile(file) // it may have ended
		namespace, _ := os.Readlink(filepath.Join(filepath.Dir(file), "ns/pid"))
		arguments := strings.Split(string(command), "\x00")
		if namespace == own && filepath.Base(arguments[0]) == filepath.Base(mpsControlProgram) && strings.Contains(string(command), "\x00-f\x00") {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			g.Expect(err).NotTo(HaveOccurred())
			found = append(found, pid)
		}
	}
	return found
}

// bytesIn is what the files of a folder and below hold.
func bytesIn(folder string) (sum int64, err error) {
	err = filepath.WalkDir(folder, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it is emptied meanwhile
		}
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			sum += info.Size()
		}
		return nil
	})
	return sum, err
}
