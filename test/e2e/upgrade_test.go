// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// Versions of drivers to which the node is upgraded, one after the other.
const firstUpgrade, secondUpgrade, thirdUpgrade, fourthUpgrade = "595.50.01", "595.58.03", "600.10.02", "600.20.01"

// gpuShared is what whole GPUs that are shared are called if the policy renames them.
const gpuShared = "nvidia.com/gpu.shared"

func upgradeSpecs() {
	const (
		first = `{strategy: MIG, mig: {layouts: [
			{gpus: {indexes: [0]}, instances: [{profile: 3g.20gb, count: 1}, {profile: 1g.5gb, count: 4}]},
			{gpus: {indexes: [1]}, fill: 3g.40gb}]}}`
		second = `{strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 2g.10gb}, {gpus: {indexes: [1]}, fill: 2g.20gb}]}}`
		shared = `{strategy: MPS, mps: {replicas: 10, activeThreadPercentage: 20}, advertise: {renameByDefault: true}}`
	)
	advertisedFirst := map[string]int64{"nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb": 4, "nvidia.com/mig-3g.40gb": 2}
	advertisedSecond := map[string]int64{"nvidia.com/mig-2g.10gb": 3, "nvidia.com/mig-2g.20gb": 3}

	// An A100 keeps its MIG mode without a driver, an H100 does not; neither keeps instances.
	Describe("While NVIDIA's driver is replaced,", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) { begin(ctx, sim.A100, sim.H100) })

		It("an upgrade ends with the MIG instances of the policy, which are there before anything is advertised", func(ctx SpecContext) {
			share(ctx, first)
			expectAllocatable(ctx, advertisedFirst)
			expectReady(ctx, "shared")
			startDeployment(ctx, "train", resourceOf("3g.40gb"))
			expectRunning(ctx, expectDeployed(ctx, "train"))
			seen := watchOffered(ctx)

			upgradeDriver(ctx, &gpuoperator.Upgrade{Version: firstUpgrade})
			timed("from the end of the upgrade to Ready in", func() {
				expectAllocatable(ctx, advertisedFirst)
				expectReady(ctx, "shared")
			})
			expectOnlyOffered(seen(), advertisedFirst)
			expectNothingLeft(ctx)
			expectOnDriver(ctx, expectDeployed(ctx, "train"), firstUpgrade)
		})

		It("MIG instances and their pods go on when the driver's container restarts and nobody is told", func(ctx SpecContext) {
			share(ctx, first)
			expectAllocatable(ctx, advertisedFirst)
			expectReady(ctx, "shared")
			startPod(ctx, "before", resourceOf("3g.40gb"), 1)
			expectOnDriver(ctx, "before", firstUpgrade)
			goesOn := expectSameContainer(ctx, users, "before")
			plugin := expectSameContainer(ctx, gpuoperator.Namespace, podOf(ctx, gpuoperator.Namespace, "app", gpuoperator.PluginName))
			made, err := instances()
			Expect(err).NotTo(HaveOccurred())
			seen := watchOffered(ctx)

			restartDriverContainer(ctx)
			expectAllocatable(ctx, advertisedFirst)
			expectReady(ctx, "shared")
			Expect(instances()).To(ConsistOf(made))
			expectOnlyOffered(seen(), advertisedFirst)
			goesOn()
			plugin()
			startPod(ctx, "after", resourceOf("3g.20gb"), 1)
			expectOnDriver(ctx, "after", firstUpgrade)
			expectNothingLeft(ctx)
		})

		It("a change of MIG that the upgrade interrupts goes on afterwards", func(ctx SpecContext) {
			slowly := []string{"nvmlDeviceCreateGpuInstance", "nvmlDeviceCreateGpuInstanceWithPlacement"}
			for _, call := range slowly {
				Expect(gpus.SetLatency(call, 2*time.Second)).To(Succeed())
				DeferCleanup(func() error { return gpus.SetLatency(call, 0) })
			}
			before, err := instances()
			Expect(err).NotTo(HaveOccurred())
			share(ctx, second)
			Eventually(instances).WithContext(ctx).ShouldNot(ContainElements(before), "the agent is at work")
			Eventually(offered).WithContext(ctx).Should(BeEmpty(), "the kubelet publishes every two seconds that the device plugin is stopped")
			seen := watchOffered(ctx)
			var overlaid []string // our own value, by the one of the upgrade
			watch := notes(func() (map[string]string, error) { return nodeLabels(ctx) })

			upgradeDriver(ctx, &gpuoperator.Upgrade{Version: secondUpgrade})
			expectAllocatable(ctx, advertisedSecond)
			expectReady(ctx, "shared")
			expectOnlyOffered(seen(), advertisedSecond)
			for _, labels := range watch() {
				overlaid = append(overlaid, labels[gpuoperator.LabelDeploy+"device-plugin"])
			}
			Expect(overlaid).To(ContainElement("paused-for-mig-change_paused-for-driver-upgrade"))
			expectNothingLeft(ctx)
			startPod(ctx, "instance", resourceOf("2g.20gb"), 1)
			expectOnDriver(ctx, "instance", secondUpgrade)
		})

		It("MPS clients stay when only the driver's pod restarts", func(ctx SpecContext) {
			share(ctx, shared)
			expectAllocatable(ctx, map[string]int64{gpuShared: 20})
			expectReady(ctx, "shared")
			startPod(ctx, "client", gpuShared, 1)
			server := expectServed(ctx, "client").Server
			stays := expectSameContainer(ctx, users, "client")
			daemons := expectSameContainer(ctx, operatorNamespace, podNamed(ctx, "gpu-sharing-mps"))

			upgradeDriver(ctx, &gpuoperator.Upgrade{})
			expectAllocatable(ctx, map[string]int64{gpuShared: 20})
			expectReady(ctx, "shared")
			stays()
			daemons()
			expectNothingLeft(ctx)
			startPod(ctx, "late", gpuShared, 1)
			Expect(expectServed(ctx, "late").Server).To(Equal(server), "the server is the one from before")
		})

		It("an MPS daemon that no pod uses ends, so that the module can be unloaded, and serves again afterwards", func(ctx SpecContext) {
			share(ctx, shared)
			expectAllocatable(ctx, map[string]int64{gpuShared: 20})
			startDeployment(ctx, "serve", gpuShared)
			expectServed(ctx, expectDeployed(ctx, "serve"))
			expectUnloaded(ctx, &gpuoperator.Upgrade{Version: thirdUpgrade})
			expectAllocatable(ctx, map[string]int64{gpuShared: 20})
			expectReady(ctx, "shared")
			expectNothingLeft(ctx)
			again := expectDeployed(ctx, "serve")
			Expect(expectServed(ctx, again).Percentage).To(Equal(20.0))
			Expect(expectRunning(ctx, again).Drivers).To(ConsistOf(thirdUpgrade))
		})

		It("an MPS daemon ends at once when NVIDIA's driver manager evicts its last pod and unloads the module", func(ctx SpecContext) {
			share(ctx, shared)
			expectAllocatable(ctx, map[string]int64{gpuShared: 20})
			startDeployment(ctx, "serve", gpuShared)
			expectServed(ctx, expectDeployed(ctx, "serve"))
			expectUnloaded(ctx, &gpuoperator.Upgrade{Version: fourthUpgrade, Manual: true})
			expectAllocatable(ctx, map[string]int64{gpuShared: 20})
			expectReady(ctx, "shared")
			again := expectDeployed(ctx, "serve")
			Expect(expectServed(ctx, again).Percentage).To(Equal(20.0))
			Expect(expectRunning(ctx, again).Drivers).To(ConsistOf(fourthUpgrade))
		})
	})
}

// upgradeDriver upgrades the node's driver; to no version: its pod restarts. No program of ours keeps the module loaded at
// any time.
func upgradeDriver(ctx context.Context, u *gpuoperator.Upgrade) {
	GinkgoHelper()
	for _, names := range replaceDriver(ctx, u) {
		Expect(names).NotTo(ContainElement(Or(ContainSubstring("gpu-sharing"), ContainSubstring(simdriver.MPSServerName))))
	}
}

// expectUnloaded upgrades the node's driver. Nothing keeps the module loaded at any time but NVIDIA's node-status-exporter,
// which nobody stops, and which has the GPUs open for a moment each minute.
func expectUnloaded(ctx context.Context, u *gpuoperator.Upgrade) {
	GinkgoHelper()
	for _, names := range replaceDriver(ctx, u) {
		Expect(names).To(HaveEach(ContainSubstring(gpuoperator.Namespace + "/nvidia-node-status-exporter-")))
	}
}

// replaceDriver carries out an upgrade of the node's driver. It returns the programs that had the driver open, for each
// attempt to unload the module that failed.
func replaceDriver(ctx context.Context, u *gpuoperator.Upgrade) (blocked [][]string) {
	GinkgoHelper()
	u.Client, u.Node, u.Driver, u.Toolkit, u.Log = kube, nodeName, installed, driver.Toolkit{Bin: bin, CDI: true}, GinkgoWriter
	began := time.Now()
	err := u.Run(ctx)
	installed = u.Driver
	AddReportEntry("driver upgraded in", time.Since(began).Round(100*time.Millisecond).String())
	Expect(err).NotTo(HaveOccurred())
	return u.Blocked
}

// restartDriverContainer restarts the container of NVIDIA's driver in its pod, and waits until the agent has found the
// new root. The kernel module stays: NVIDIA's device plugin has it open.
func restartDriverContainer(ctx context.Context) {
	GinkgoHelper()
	agent := podNamed(ctx, "gpu-sharing-agent")
	before := restartsOf(ctx, agent)
	next, err := installed.Restart()
	Expect(err).NotTo(HaveOccurred())
	installed = next
	Eventually(func() int32 { return restartsOf(ctx, agent) }).WithContext(ctx).Should(BeNumerically(">", before),
		"the library that the agent has loaded is that of the old root")
	expectPodReady(ctx, operatorNamespace, agent)
}

// restartsOf is how often the containers of a pod of the operator have restarted.
func restartsOf(ctx context.Context, name string) (count int32) {
	GinkgoHelper()
	pod := &corev1.Pod{}
	Expect(kube.Get(ctx, client.ObjectKey{Namespace: operatorNamespace, Name: name}, pod)).To(Succeed())
	for _, c := range pod.Status.ContainerStatuses {
		count += c.RestartCount
	}
	return count
}

// expectPodReady waits until a pod is Ready.
func expectPodReady(ctx context.Context, namespace, name string) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		pod := &corev1.Pod{}
		g.Expect(kube.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, pod)).To(Succeed())
		g.Expect(pod.Status.Conditions).To(ContainElement(And(
			HaveField("Type", corev1.PodReady), HaveField("Status", corev1.ConditionTrue))))
	}).WithContext(ctx).Should(Succeed())
}

// expectOnlyOffered checks that each resource was offered as often as it is in the end, or not at all.
func expectOnlyOffered(seen []map[string]int64, want map[string]int64) {
	GinkgoHelper()
	for _, offers := range seen {
		for name, count := range offers {
			Expect(want).To(HaveKeyWithValue(name, count))
		}
	}
}

// expectNothingLeft checks that the node takes pods as before: no label that stops an operand, no cordon or taint is left, and no record of one.
func expectNothingLeft(ctx context.Context) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		n := &corev1.Node{}
		g.Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)).To(Succeed())
		g.Expect(n.Labels).NotTo(ContainElement(ContainSubstring("paused-for")))
		g.Expect(n.Labels).To(And(
			HaveKeyWithValue(nvidia.LabelUpgrade, nvidia.UpgradeDone), HaveKeyWithValue(v1alpha1.LabelRunsAgent, "true")))
		g.Expect(n.Spec.Unschedulable).To(BeFalse())
		g.Expect(n.Spec.Taints).To(BeEmpty())
		g.Expect(n.Annotations).NotTo(Or(HaveKey(v1alpha1.AnnotationStopped), HaveKey(v1alpha1.AnnotationInterrupted)))
	}).WithContext(ctx).Should(Succeed())
}

// expectOnDriver checks that a user's pod runs with a driver, on one MIG device that exists.
func expectOnDriver(ctx context.Context, name, version string) {
	GinkgoHelper()
	got := expectRunning(ctx, name)
	Expect(got.Drivers).To(ConsistOf(version))
	Expect(instances()).To(ContainElement(got.uuid()))
	Expect(got).To(beExactly(got.uuid()))
}

// expectSameContainer notes the containers of a pod. What it returns checks later that they are the same.
func expectSameContainer(ctx context.Context, namespace, name string) (check func()) {
	GinkgoHelper()
	containers := func() []string {
		pod := &corev1.Pod{}
		Expect(kube.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, pod)).To(Succeed())
		var ids []string
		for _, c := range pod.Status.ContainerStatuses {
			ids = append(ids, c.ContainerID)
		}
		return ids
	}
	before := containers()
	return func() {
		GinkgoHelper()
		Expect(containers()).To(Equal(before), "pod %s/%s goes on", namespace, name)
	}
}

// podNamed is the name of the operator's only pod of a kind.
func podNamed(ctx context.Context, app string) string {
	GinkgoHelper()
	return podOf(ctx, operatorNamespace, "app.kubernetes.io/name", app)
}

// podOf is the name of the only pod in a namespace with a label.
func podOf(ctx context.Context, namespace, label, value string) string {
	GinkgoHelper()
	pods := &corev1.PodList{}
	Expect(kube.List(ctx, pods, client.InNamespace(namespace), client.MatchingLabels{label: value})).To(Succeed())
	pods.Items = slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
	Expect(pods.Items).To(HaveLen(1))
	return pods.Items[0].Name
}
