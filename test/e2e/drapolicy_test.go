// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// What the operator names its DeviceClasses and its DeviceTaintRule of the node.
const (
	ownClasses = "gpusharing-mig-"
	ownRule    = "gpusharing-" + nodeName
)

func draPolicySpecs() {
	Describe("A policy where NVIDIA's DRA driver serves the GPUs", Ordered, Offset(1), func() {
		var devices map[string]draDevice
		var classes []string
		BeforeAll(func(ctx SpecContext) {
			beginDRA(ctx, sim.A100, sim.A100)
			var err error
			devices, err = published(ctx)
			Expect(err).NotTo(HaveOccurred())
			classes, err = deviceClasses(ctx)
			Expect(err).NotTo(HaveOccurred())
			installOperator(ctx)
		})
		draMIGSpecs()

		It("makes an instance on demand for a pod that waits, beside a pod that goes on", func(ctx SpecContext) {
			stopPods(ctx)
			serveMetrics(ctx, "featureGates.OnDemandMIG=true")
			share(ctx, `{strategy: MIG, mig: {layouts: [{fill: 1g, onDemand: {mode: Apply, profiles: [1g, 3g], idleSeconds: 30}}]}}`)
			expectReady(ctx, "shared")
			startPod(ctx, "bystander", resourceOf("1g.5gb"), 1)
			has := expectRunning(ctx, "bystander")
			began := time.Now()
			startPod(ctx, "large", resourceOf("3g.20gb"), 1)
			Eventually(phase).WithContext(ctx).WithTimeout(3 * time.Minute).WithArguments("large").Should(Equal(corev1.PodRunning))
			AddReportEntry("a pod that waited ran after", time.Since(began).Round(time.Second).String())
			Expect(expectRunning(ctx, "large")).To(beExactly(allocatedUUID(ctx, "large")))
			Expect(expectRunning(ctx, "bystander")).To(Equal(has))
			Eventually(taintRules).WithContext(ctx).Should(BeEmpty())
			expectReady(ctx, "shared")
			Expect(published(ctx)).To(Equal(devicesOfDriver(0)))
			serveMetrics(ctx, "featureGates.OnDemandMIG=false")
			stopPods(ctx)
			Eventually(published).WithContext(ctx).WithTimeout(3*time.Minute).Should(HaveLen(14), "at rest without the feature gate")
		})

		It("leaves ResourceSlices and DeviceClasses as they were when it is deleted", func(ctx SpecContext) {
			stopPods(ctx)
			expectUndoneOnDRA(ctx, devices, classes)
			startPod(ctx, "whole-again", "nvidia.com/gpu", 2)
			Expect(expectRunning(ctx, "whole-again").uuids()).To(HaveLen(2))
		})

		It("shares GPUs once the driver has the number of shares that the policy names", func(ctx SpecContext) {
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			Eventually(statusOf).WithContext(ctx).WithArguments("shared").Should(And(
				ContainSubstring(v1alpha1.ReasonDRASharesDiffer), ContainSubstring("consumableShares=4")))
			shareDRA(ctx, 4)
			expectReady(ctx, "shared")
			for i := range 9 {
				startPod(ctx, holderName(i), "nvidia.com/gpu", 1)
			}
			expectSharing(ctx, map[string]int{"gpu-0": 4, "gpu-1": 4})
			serveMetrics(ctx, "metrics.enabled=true")
			expectTop(ctx, "NVIDIA's DRA driver", MatchRegexp(`GPU 0 .* TimeSlicing, 4 replicas`), MatchRegexp(`GPU 1 .* TimeSlicing, 4 replicas`),
				WithTransform(func(printed string) int { return strings.Count(printed, " "+users+"/") }, Equal(8)), MatchRegexp(`10\.0 GiB +- +`+users+`/`))
			serveMetrics(ctx, "metrics.enabled=false")
		})

		It("has the driver give GPUs the time slice that its class names", func(ctx SpecContext) {
			stopPods(ctx)
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4, interval: Medium}}`)
			Eventually(statusOf).WithContext(ctx).WithArguments("shared").Should(And(
				ContainSubstring(v1alpha1.ReasonDRAIntervalDiffers), ContainSubstring("featureGates.TimeSlicingSettings=true")))
			installDRA(ctx, "featureGates.ConsumableShares=true", "consumableShares=4", "featureGates.TimeSlicingSettings=true")
			Eventually(statusOf).WithContext(ctx).WithArguments("shared").Should(And(
				ContainSubstring(v1alpha1.ReasonDRAIntervalDiffers), ContainSubstring("gives GPUs no time slice")))
			configure := func(ctx context.Context, config string) {
				kubectl(ctx, "", "patch", "deviceclass", "gpu.nvidia.com", "--type=merge", "--patch", `{"spec": {"config": `+config+"}}")
			}
			configure(ctx, `[{"opaque": {"driver": "gpu.nvidia.com", "parameters": {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
				"sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Medium"}}}}}]`)
			DeferCleanup(configure, "null")
			expectReady(ctx, "shared")
			expectDRAReady(ctx, 4)
			startPod(ctx, "sliced", "nvidia.com/gpu", 1)
			uuid := expectRunning(ctx, "sliced").uuid()
			n, err := gpus.Node()
			Expect(err).NotTo(HaveOccurred())
			Expect(n.TimeSlice(uuid)).To(Equal(gpu.TimeSliceMedium))
		})
	})
}

// fillByDRA shares all GPUs as instances of one profile, and checks that an unchanged pod gets one.
func fillByDRA(ctx context.Context) {
	GinkgoHelper()
	timed("from idle to Ready in", func() {
		share(ctx, `{strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}`)
		expectReady(ctx, "shared")
	})
	Expect(published(ctx)).To(And(HaveLen(14), Equal(devicesOfDriver(0))))
	Expect(deviceClasses(ctx)).To(ContainElement(ownClasses + "1g.5gb"))
	startPod(ctx, "instance", resourceOf("1g.5gb"), 1)
	Expect(expectRunning(ctx, "instance")).To(beExactly(allocatedUUID(ctx, "instance")))
}

// expectUndoneOnDRA deletes the policies, and checks that the driver publishes these devices, and that these
// DeviceClasses alone are left.
func expectUndoneOnDRA(ctx context.Context, devices map[string]draDevice, classes []string) {
	GinkgoHelper()
	Expect(kube.DeleteAllOf(ctx, &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	Eventually(published).WithContext(ctx).Should(Equal(devices))
	Eventually(deviceClasses).WithContext(ctx).Should(ConsistOf(classes))
	Eventually(taintRules).WithContext(ctx).Should(BeEmpty())
}

func draMIGSpecs() {
	It("makes MIG instances, and an unchanged pod gets one", func(ctx SpecContext) {
		fillByDRA(ctx)
	})

	It("keeps the device of a pod that runs when the layout changes", func(ctx SpecContext) {
		startPod(ctx, "keeps", resourceOf("1g.5gb"), 1)
		keeps := expectRunning(ctx, "keeps").uuid()
		share(ctx, `{strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 1}, {profile: 3g.20gb, count: 1}]}]}}`)
		expectReady(ctx, "shared")
		Expect(published(ctx)).To(And(HaveLen(4), Equal(devicesOfDriver(0))))
		Expect(allocatedUUID(ctx, "keeps")).To(Equal(keeps))
		Expect(restarts(ctx)).To(HaveKeyWithValue(users+"/keeps/main", int32(0)))
	})

	It("keeps new pods off the devices while one blocks the change, and names the one that does", func(ctx SpecContext) {
		startClaiming(ctx, "holder", ownClasses+"3g.20gb")
		Eventually(phase).WithContext(ctx).WithArguments("holder").Should(Equal(corev1.PodRunning))
		share(ctx, `{strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 2}]}]}}`)
		Eventually(func() error { return ready(ctx, "shared") }).WithContext(ctx).
			Should(MatchError(And(ContainSubstring(v1alpha1.ReasonGPUInUse), ContainSubstring(users+"/holder"))))
		Expect(taintRules(ctx)).To(HaveKeyWithValue(ownRule, resourcev1.DeviceTaintSelector{Driver: new(draDriver), Pool: new(nodeName)}))
		startPod(ctx, "late", resourceOf("1g.5gb"), 1)
		expectPending(ctx, "late", noDevice)
		Expect(phase(ctx, "holder")).To(Equal(corev1.PodRunning))
		stopPod(ctx, "holder")
		expectReady(ctx, "shared")
		Expect(taintRules(ctx)).To(BeEmpty())
		Expect(expectRunning(ctx, "late")).To(beExactly(allocatedUUID(ctx, "late")))
	})

	It("makes the instances again where they were when the machine boots anew, so that the same pod runs on its claim", func(ctx SpecContext) {
		share(ctx, `{strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}`)
		expectReady(ctx, "shared")
		startPod(ctx, "stays", resourceOf("1g.5gb"), 1)
		expectRunning(ctx, "stays")
		share(ctx, `{strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 1}, {profile: 3g.20gb, count: 1}]}]}}`)
		expectReady(ctx, "shared")
		before, err := published(ctx)
		Expect(err).NotTo(HaveOccurred())
		claims, err := allocated(ctx)
		Expect(err).NotTo(HaveOccurred())
		pods, err := podsOnNode(ctx)
		Expect(err).NotTo(HaveOccurred())
		crash(ctx)
		Expect(gpus.Reboot()).To(Succeed())
		Expect(instances()).To(BeEmpty())
		boot(ctx)
		timed("from kubelet Ready to the pod's restart in", func() {
			Eventually(restarts).WithContext(ctx).Should(HaveKeyWithValue(users+"/stays/main", BeNumerically(">", 0)))
		})
		Expect(expectRunning(ctx, "stays")).To(beExactly(allocatedUUID(ctx, "stays")))
		Expect(allocated(ctx)).To(Equal(claims))
		Expect(podsOnNode(ctx)).To(Equal(pods))
		Expect(published(ctx)).To(And(HaveLen(len(before)), Equal(devicesOfDriver(0))))
		expectReady(ctx, "shared")
	})
}

// startClaiming starts a user's pod with a ResourceClaim of its own for one device of a class.
func startClaiming(ctx context.Context, name, class string) {
	GinkgoHelper()
	claim := &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
			{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class}},
		}}},
	}
	Expect(kube.Create(ctx, claim)).To(Succeed())
	DeferCleanup(func(ctx SpecContext) { Expect(client.IgnoreNotFound(kube.Delete(ctx, claim))).To(Succeed()) })
	startPod(ctx, name, "", 0, func(spec *corev1.PodSpec) {
		spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
		spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}
	})
}

// phase is that of a user's pod.
func phase(ctx context.Context, name string) (corev1.PodPhase, error) {
	pod := &corev1.Pod{}
	err := kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, pod)
	return pod.Status.Phase, err
}

// deviceClasses are the names of all DeviceClasses.
func deviceClasses(ctx context.Context) ([]string, error) {
	list := &resourcev1.DeviceClassList{}
	if err := kube.List(ctx, list); err != nil {
		return nil, fmt.Errorf("listing DeviceClasses: %w", err)
	}
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names, nil
}

// taintRules are what all DeviceTaintRules select, by name.
func taintRules(ctx context.Context) (map[string]resourcev1.DeviceTaintSelector, error) {
	list := &resourcev1.DeviceTaintRuleList{}
	if err := kube.List(ctx, list); err != nil {
		return nil, fmt.Errorf("listing DeviceTaintRules: %w", err)
	}
	found := map[string]resourcev1.DeviceTaintSelector{}
	for i := range list.Items {
		if s := list.Items[i].Spec.DeviceSelector; s != nil {
			found[list.Items[i].Name] = *s
		}
	}
	return found, nil
}
