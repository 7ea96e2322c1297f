// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// draSpace is the namespace of the chart of NVIDIA's DRA driver.
const draSpace = "nvidia-dra-driver-gpu"

// TestDRA: one policy for a node of NVIDIA's device plugin and one of its DRA driver, with the controllers and agents
// that ship, their rights, and the API server's own DeviceClasses, DeviceTaintRules, ResourceSlices and ResourceClaims.
func TestDRA(t *testing.T) {
	t.Parallel()
	f := newSite(t)
	f.apply(clusterPolicy)
	f.record = newRecord(f)
	f.runNVIDIA()
	served := f.installDRA()
	for name, labels := range map[string]map[string]string{"n01": nil, "n02": served} {
		m := newMachine(f, name, labels, sim.A100)
		m.boot(f)
		f.background(func(ctx context.Context) { m.node.Run(ctx, 300*time.Millisecond) })
		f.machines = append(f.machines, m)
	}
	f.runAgents()
	f.leader = f.lead()
	scheduler := &nodesim.DRAScheduler{Client: f.client}
	f.background(func(ctx context.Context) { scheduler.Run(ctx, 200*time.Millisecond) })
	schedule := func(name, resource string) string {
		t.Helper()
		why, err := scheduler.Schedule(t.Context(), requesting(name, resource), "n02")
		f.Expect(err).NotTo(HaveOccurred())
		return why
	}
	f.Eventually(func() []string { return f.devices("n02") }, patience, pollEvery).Should(Equal([]string{"gpu-0"}))

	byClaim := func(pod *corev1.Pod, claim *resourcev1.ResourceClaim) {
		t.Helper()
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "device", ResourceClaimName: &claim.Name}}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "device"}}
		why, err := scheduler.ScheduleByClaim(t.Context(), pod, "n02", claim)
		f.Expect(err).NotTo(HaveOccurred())
		f.Expect(why).To(BeEmpty())
	}
	f.step("a monitor, and pods that wait for devices of other drivers", func() {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: users}}
		admins := []byte(`{"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}`)
		f.Expect(f.client.Patch(t.Context(), namespace, client.RawPatch(types.MergePatchType, admins))).To(Succeed())
		byClaim(requesting("monitor", ""), f.claim("monitor", "gpu.nvidia.com", true))
		byClaim(requesting("network", ""), f.claim("network", "nic.example.com", false))
		byClaim(requesting("domain", ""), f.claim("domain", "compute-domain.nvidia.com", false))
		f.Eventually(func() corev1.PodPhase { return f.phase("monitor") }, patience, pollEvery).Should(Equal(corev1.PodRunning))
	})
	beside := func() []corev1.PodPhase {
		return []corev1.PodPhase{f.phase("monitor"), f.phase("network"), f.phase("domain")}
	}
	besides := []corev1.PodPhase{corev1.PodRunning, corev1.PodPending, corev1.PodPending}
	f.step("instances on both, under the same names", func() {
		f.Expect(schedule("whole", "nvidia.com/gpu")).To(BeEmpty())
		f.Eventually(func() corev1.PodPhase { return f.phase("whole") }, patience, pollEvery).Should(Equal(corev1.PodRunning))
		f.policy(sevenEach, "{maxUnavailable: 2, drain: {mode: Evict}}")
		f.Eventually(func() corev1.PodPhase { return f.phase("whole") }, patience, pollEvery).Should(BeEmpty(), "its claim tells that it holds the GPU")
		f.ready()
		f.Expect(f.devices("n02")).To(HaveLen(7))
		f.Expect(f.resources("n01")).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7}))
		f.Expect(f.rules()).To(BeEmpty())
		f.Expect(f.classes()).To(HaveKeyWithValue("gpusharing-mig-1g.5gb", "nvidia.com/mig-1g.5gb"))
		f.Expect(f.configOf("n02")).To(BeEmpty())
		f.Expect(beside()).To(Equal(besides), "nobody is evicted who holds nothing")
	})
	f.step("the driver is upgraded, and its image is pulled for longer than its slices live", func() {
		m := f.machine("n02")
		m.pulls.Store(true)
		plugins := client.HasLabels{cluster.DRALabels()[0]}
		f.Expect(f.client.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace(draSpace), plugins)).To(Succeed())
		f.Eventually(func() int { return f.driversStarting() }, patience, pollEvery).Should(Equal(1), f.drivers)
		f.Expect(schedule("late", "nvidia.com/mig-1g.5gb")).To(BeEmpty(), "the slices are still there")
		f.Eventually(func() corev1.PodPhase { return f.phase("late") }, patience, pollEvery).Should(Equal(corev1.PodPending))
		f.later(31 * time.Second)
		f.Eventually(func() []string { return f.devices("n02") }, patience, pollEvery).Should(BeEmpty())
		f.later(30 * time.Second)
		f.Consistently(func() corev1.PodPhase { return f.phase("late") }, 2*time.Second, pollEvery).Should(Equal(corev1.PodPending), "no driver prepares its claim")
		m.pulls.Store(false)
		f.Eventually(func() corev1.PodPhase { return f.phase("late") }, patience, pollEvery).Should(Equal(corev1.PodRunning))
		f.ready()
		f.Expect(f.devices("n02")).To(HaveLen(7))
		f.Expect(f.client.Delete(t.Context(), requesting("late", ""), client.GracePeriodSeconds(0))).To(Succeed())
	})
	f.step("unchanged pods get them, and one more than there are does not", func() {
		for _, name := range []string{"a", "b", "c", "d", "e", "f", "g"} {
			f.Expect(schedule(name, "nvidia.com/mig-1g.5gb")).To(BeEmpty())
			f.Eventually(func() corev1.PodPhase { return f.phase(name) }, patience, pollEvery).Should(Equal(corev1.PodRunning))
		}
		f.Expect(schedule("h", "nvidia.com/mig-1g.5gb")).To(Equal("cannot allocate all claims"))
	})
	f.step("the agent knows by the claims which container has which instance", func() {
		f.Eventually(func() map[string]int { return f.held("n02") }, patience, pollEvery).Should(Equal(
			map[string]int{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1, "g": 1}), "each one instance")
	})
	f.step("a repartition, with a pod on an instance", func() {
		for _, name := range []string{"b", "c", "d", "e", "f", "g"} {
			f.Expect(f.client.Delete(t.Context(), requesting(name, ""), client.GracePeriodSeconds(0))).To(Succeed())
		}
		f.policy("{strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 1}, {profile: 2g.10gb, count: 2}]}]}}", "{maxUnavailable: 2, drain: {mode: Evict}}")
		f.ready()
		f.Expect(f.devices("n02")).To(HaveLen(3))
		f.Expect(f.rules()).To(BeEmpty())
		f.Expect(client.IgnoreNotFound(f.client.Delete(t.Context(), requesting("a", ""), client.GracePeriodSeconds(0)))).To(Succeed())
	})
	f.step("undo leaves slices and classes as before", func() {
		f.Expect(f.client.Delete(t.Context(), &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}})).To(Succeed())
		f.Eventually(func() []string { return f.devices("n02") }, patience, pollEvery).Should(Equal([]string{"gpu-0"}))
		f.Eventually(f.classes, patience, pollEvery).Should(Equal(map[string]string{"gpu.nvidia.com": "nvidia.com/gpu"}))
		f.Eventually(f.rules, patience, pollEvery).Should(BeEmpty())
		f.Eventually(func() map[string]string { return f.ours("n02") }, patience, pollEvery).Should(BeEmpty())
	})
	f.step("pods that share a claim", func() {
		claim := f.claim("shared", "gpu.nvidia.com", false)
		for _, name := range []string{"first", "second"} {
			pod := requesting(name, "")
			pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "training", UID: "training", Controller: new(true)}}
			byClaim(pod, claim)
			f.Eventually(func() corev1.PodPhase { return f.phase(name) }, patience, pollEvery).Should(Equal(corev1.PodRunning))
		}
		f.policy(sevenEach, "{maxUnavailable: 2, drain: {mode: Evict}}")
		f.Eventually(func() string { return f.waits("n02") }, patience, pollEvery).Should(ContainSubstring("is not evicted, since ResourceClaim %s/shared, which pods can share, stays; scale its workload down", users))
		for _, name := range []string{"first", "second"} {
			f.Expect(f.phase(name)).To(Equal(corev1.PodRunning))
			f.Expect(f.client.Delete(t.Context(), requesting(name, ""), client.GracePeriodSeconds(0))).To(Succeed())
		}
		f.ready()
		f.Expect(f.devices("n02")).To(HaveLen(7))
		f.Expect(beside()).To(Equal(besides))
	})
	f.Expect(f.cluster.Denied(t.Context(), env.ControllerWrites)).To(BeZero(), "the admission policy lists every write")
}

// installDRA installs NVIDIA's DRA driver for the nodes that have the labels returned.
func (f *fleet) installDRA() map[string]string {
	set, class := nodesim.NewDRADriver(draSpace, map[string]string{"test.example/dra": "true"})
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: draSpace}}
	for _, o := range append(nodesim.NewDRAAccess(draSpace), space, set, class) {
		f.Expect(f.client.Create(f.t.Context(), o)).To(Succeed())
	}
	return map[string]string{"test.example/dra": "true", "nvidia.com/gpu.deploy.device-plugin": "false"}
}

// claim makes a ResourceClaim for one device of a class, or for administrators all that the class matches.
func (f *fleet) claim(name, class string, admin bool) *resourcev1.ResourceClaim {
	claim := &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
			Name: "device", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class},
		}}}},
	}
	if admin {
		claim.Spec.Devices.Requests[0].Exactly.AdminAccess = new(true)
		claim.Spec.Devices.Requests[0].Exactly.AllocationMode = resourcev1.DeviceAllocationModeAll
	}
	f.Expect(f.client.Create(f.t.Context(), claim)).To(Succeed())
	return claim
}

// driversStarting is how many pods of NVIDIA's DRA driver are not ready.
func (f *fleet) driversStarting() int {
	starting := 0
	for _, p := range f.driverPods() {
		for _, c := range p.Status.Conditions {
			if p.DeletionTimestamp.IsZero() && c.Type == corev1.PodReady && c.Status == corev1.ConditionFalse {
				starting++
			}
		}
	}
	return starting
}

func (f *fleet) driverPods() []corev1.Pod {
	list := &corev1.PodList{}
	f.Expect(f.client.List(f.t.Context(), list, client.InNamespace(draSpace), client.HasLabels{cluster.DRALabels()[0]})).To(Succeed())
	return list.Items
}

// drivers says how the pods of NVIDIA's DRA driver are.
func (f *fleet) drivers() string {
	says := "pods of the driver:"
	for _, p := range f.driverPods() {
		says += fmt.Sprintf("\n%s on %s, deleted %v: %+v", p.Name, p.Spec.NodeName, p.DeletionTimestamp, p.Status)
	}
	return says
}

// machine is the one of a name.
func (f *fleet) machine(name string) *machine {
	return f.machines[slices.IndexFunc(f.machines, func(m *machine) bool { return m.name == name })]
}

// held is how many GPUs and instances the containers of each pod hold, as the agent of a node measures it. Each is
// offered once.
func (f *fleet) held(node string) map[string]int {
	m := f.machine(node)
	report, err := m.usage(f.t.Context())
	f.Expect(err).NotTo(HaveOccurred())
	held := map[string]int{}
	for _, u := range report.Units {
		for _, c := range u.Containers {
			held[c.Pod] += u.Replicas
		}
	}
	return held
}

func requesting(name, resource string) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
	}
	if resource != "" {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(resource): one}
	}
	return pod
}

// phase of a pod of a user; empty if it is gone.
func (f *fleet) phase(name string) corev1.PodPhase {
	pod := &corev1.Pod{}
	f.Expect(client.IgnoreNotFound(f.client.Get(f.t.Context(), types.NamespacedName{Namespace: users, Name: name}, pod))).To(Succeed())
	return pod.Status.Phase
}

// devices are the names of those that the slices of a node show.
func (f *fleet) devices(node string) []string {
	list := &resourcev1.ResourceSliceList{}
	f.Expect(f.client.List(f.t.Context(), list)).To(Succeed())
	var names []string
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			if *s.Spec.NodeName == node {
				names = append(names, d.Name)
			}
		}
	}
	slices.Sort(names)
	return names
}

func (f *fleet) rules() []string {
	list := &resourcev1.DeviceTaintRuleList{}
	f.Expect(f.client.List(f.t.Context(), list)).To(Succeed())
	var names []string
	for _, r := range list.Items {
		names = append(names, r.Name)
	}
	return names
}

// classes are all DeviceClasses, with their resources.
func (f *fleet) classes() map[string]string {
	list := &resourcev1.DeviceClassList{}
	f.Expect(f.client.List(f.t.Context(), list)).To(Succeed())
	found := map[string]string{}
	for _, c := range list.Items {
		found[c.Name] = ptr.Deref(c.Spec.ExtendedResourceName, "")
	}
	return found
}

func (f *fleet) node(name string) *corev1.Node {
	node := &corev1.Node{}
	f.Expect(f.client.Get(f.t.Context(), types.NamespacedName{Name: name}, node)).To(Succeed())
	return node
}

// resources are those of NVIDIA's that a node lists as allocatable, above 0.
func (f *fleet) resources(node string) map[string]int64 {
	found := map[string]int64{}
	for name, quantity := range f.node(node).Status.Allocatable {
		if n := quantity.Value(); n > 0 && (name == "nvidia.com/gpu" || plan.ResourceOf("1g.5gb") == string(name)) {
			found[string(name)] = n
		}
	}
	return found
}

func (f *fleet) configOf(node string) string { return f.node(node).Labels[v1alpha1.LabelConfig] }

// ours are the annotations of the operator on a node, but for that of the label which lets agents run.
func (f *fleet) ours(node string) map[string]string {
	found := map[string]string{}
	for name, value := range f.node(node).Annotations {
		if len(name) > len(v1alpha1.Group) && name[:len(v1alpha1.Group)] == v1alpha1.Group && name != v1alpha1.AnnotationRunsAgent {
			found[name] = value
		}
	}
	return found
}

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
	scheduler := &nodesim.DRAScheduler{Client: f.client}
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
