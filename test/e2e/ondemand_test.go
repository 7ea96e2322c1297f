// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func onDemandSpecs() {
	Describe("MIG on demand", Ordered, Offset(1), func() {
		var metrics *prometheus
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			serveMetrics(ctx, "featureGates.OnDemandMIG=true", "metrics.enabled=true")
			metrics = startPrometheus(ctx)
		})

		It("reports which pods wait, what would be changed for them and why not, and changes nothing", func(ctx SpecContext) {
			share(ctx, `{strategy: MIG, mig: {layouts: [{fill: 3g, onDemand: {profiles: [1g, 2g, 3g], idleSeconds: 30, namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: `+users+`}}}}]}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-3g.20gb": 4})
			expectReady(ctx, "shared")
			Eventually(demandReason).WithContext(ctx).Should(Equal(v1alpha1.ReasonNoDemand))
			startPod(ctx, "holder", "nvidia.com/mig-3g.20gb", 1)
			expectRunning(ctx, "holder")
			before, err := instances()
			Expect(err).NotTo(HaveOccurred())
			desired, err := gpuNode(ctx)
			Expect(err).NotTo(HaveOccurred())

			startPod(ctx, "small", "nvidia.com/mig-1g.5gb", 1)
			Eventually(demandReason).WithContext(ctx).Should(Equal(v1alpha1.ReasonRepartitionAdvised))
			startPod(ctx, "large", "nvidia.com/mig-7g.40gb", 1)
			Eventually(demandReason).WithContext(ctx).Should(Equal(v1alpha1.ReasonProfileNotAllowed))
			status := kubectl(ctx, "", "gpusharing", "status")
			Expect(status).To(ContainSubstring("1 pod for nvidia.com/mig-1g.5gb: 1, " + users + "/small first: 1 would start after the change below"))
			change := `would change GPU [01] of node ` + nodeName + `: destroy the idle 1 × 3g.20gb, create 1 × 1g.5gb`
			Expect(status).To(MatchRegexp(change))
			Expect(kubectl(ctx, "", "gpusharing", "why", "small", "-n", users)).To(MatchRegexp(change))
			Expect(kubectl(ctx, "", "gpusharing", "why", "large", "-n", users)).To(ContainSubstring(v1alpha1.ReasonProfileNotAllowed))
			for outcome, pods := range map[string]int{"ready": 0, "planned": 1, "unmet": 1} {
				Eventually(metrics.value).WithContext(ctx).WithArguments(`gpusharing_mig_on_demand_pods{policy="shared",outcome="`+outcome+`"}`).
					Should(HaveValue(BeEquivalentTo(pods)), outcome)
			}
			Consistently(instances, "5s").Should(ConsistOf(before))
			is, err := gpuNode(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(is.Spec).To(Equal(desired.Spec))
			expectReady(ctx, "shared")
		})

		It("makes an instance for a pod that waits of idle ones, beside a pod that goes on, and says so where it was for one that no node can start", func(ctx SpecContext) {
			stopPods(ctx)
			share(ctx, `{strategy: MIG, mig: {layouts: [{fill: 1g, onDemand: {mode: Apply, profiles: [1g, 3g], idleSeconds: 30}}]}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-1g.5gb": 14})
			expectReady(ctx, "shared")
			startPod(ctx, "bystander", "nvidia.com/mig-1g.5gb", 1)
			has := expectRunning(ctx, "bystander")
			began := time.Now()
			startPod(ctx, "large", "nvidia.com/mig-3g.20gb", 1)
			Eventually(func(g Gomega) {
				large := &corev1.Pod{}
				g.Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: "large"}, large)).To(Succeed())
				g.Expect(large.Status.Phase).To(Equal(corev1.PodRunning), "%s", state(large))
			}).WithContext(ctx).WithTimeout(3 * time.Minute).Should(Succeed())
			AddReportEntry("a pod that waited ran after", time.Since(began).Round(time.Second).String())
			Expect(expectRunning(ctx, "bystander")).To(Equal(has))
			expectReady(ctx, "shared")
			left, err := allocatable(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(left).To(HaveKeyWithValue("nvidia.com/mig-3g.20gb", BeEquivalentTo(1)))
			Expect(left["nvidia.com/mig-1g.5gb"]).To(BeNumerically(">=", 10), "only what the pod needs")
			n := &corev1.Node{}
			Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)).To(Succeed())
			Expect(n.Spec.Taints).To(BeEmpty())
			is, err := gpuNode(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(is.Status.Demand).To(HaveLen(1))
			Expect(is.Status.Demand[0].FirstPod).To(Equal(users + "/large"))
			Expect(is.Status.Rollout.Failed).To(BeNil())
			Expect(kubectl(ctx, "", "get", "events", "-n", users)).To(MatchRegexp(`Repartitioning +pod/large +Repartitioning GPU [01] of node ` + nodeName + ` for nvidia.com/mig-3g.20gb`))
			Expect(kubectl(ctx, "", "gpusharing", "status")).To(MatchRegexp(`on demand: GPU [01] of node .*1 × 3g.20gb, at rest 7 × 1g.5gb .* for ` + users + `/large`))

			stopPods(ctx)
			startPod(ctx, "lacking", "nvidia.com/mig-3g.20gb", 1, func(p *corev1.PodSpec) {
				p.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "none"}}}}
			})
			Eventually(demandReason).WithContext(ctx).WithTimeout(3 * time.Minute).Should(Equal(v1alpha1.ReasonAdvertisedNotScheduled))
		})

		It("returns a GPU to rest that no pod has used for a while, also under a controller that starts anew", func(ctx SpecContext) {
			stopPods(ctx)
			Eventually(demandReason).WithContext(ctx).Should(Equal(v1alpha1.ReasonNoDemand))
			left, err := allocatable(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(left["nvidia.com/mig-1g.5gb"]).To(BeNumerically("<", 14))
			// A change is held for five minutes, which nobody waits for here. While no controller runs, it was made five minutes ago.
			scaleController(ctx, 0)
			is, err := gpuNode(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(is.Status.Demand).To(HaveLen(1))
			as := rest.CopyConfig(machine.Config)
			as.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + operatorNamespace + ":gpu-sharing-controller"} // which alone may write it
			controller, err := client.New(as, client.Options{Scheme: kube.Scheme()})
			Expect(err).NotTo(HaveOccurred())
			Expect(controller.Status().Patch(ctx, is, client.RawPatch(types.JSONPatchType, fmt.Appendf(nil, `[{"op": "replace", "path": "/status/demand/0/sinceTime", "value": %q}]`,
				is.Status.Demand[0].SinceTime.Add(-5*time.Minute).UTC().Format(time.RFC3339))))).To(Succeed())
			scaleController(ctx, 1)
			began := time.Now()
			Eventually(allocatable).WithContext(ctx).WithTimeout(4 * time.Minute).Should(HaveKeyWithValue("nvidia.com/mig-1g.5gb", BeEquivalentTo(14)))
			AddReportEntry("the GPU rests again after", time.Since(began).Round(time.Second).String())
			expectReady(ctx, "shared")
		})

		It("forgets pods that are gone, and leaves nothing behind", func(ctx SpecContext) {
			stopPods(ctx)
			Eventually(demandReason).WithContext(ctx).Should(Equal(v1alpha1.ReasonNoDemand))
			serveMetrics(ctx, "metrics.enabled=false") // and without the feature gate
			Eventually(demandReason).WithContext(ctx).Should(BeEmpty())
			p := &v1alpha1.GPUSharingPolicy{}
			Expect(kube.Get(ctx, client.ObjectKey{Name: "shared"}, p)).To(Succeed())
			Expect(p.Status.OnDemand).To(BeNil())
			Eventually(func(g Gomega) {
				is, err := gpuNode(ctx)
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(is.Status.Demand).To(BeEmpty())
			}).WithContext(ctx).Should(Succeed())
			unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			Eventually(instances).WithContext(ctx).Should(BeEmpty())
		})
	})
}

// demandReason is the reason of the condition DemandMet of policy shared; empty: it has none.
func demandReason(ctx context.Context) (string, error) {
	p := &v1alpha1.GPUSharingPolicy{}
	if err := kube.Get(ctx, client.ObjectKey{Name: "shared"}, p); err != nil {
		return "", err
	}
	is, _ := condition.Find(p.Status.Conditions, v1alpha1.ConditionDemandMet)
	return is.Reason, nil
}

// scaleController has the controller run in so many pods, and waits until it does.
func scaleController(ctx context.Context, replicas int) {
	GinkgoHelper()
	kubectl(ctx, "", "scale", "-n", operatorNamespace, "deployment/gpu-sharing-controller", fmt.Sprintf("--replicas=%d", replicas))
	Eventually(func(g Gomega) {
		pods := &corev1.PodList{}
		g.Expect(kube.List(ctx, pods, client.InNamespace(operatorNamespace), client.MatchingLabels{"app.kubernetes.io/name": "gpu-sharing-controller"})).To(Succeed())
		g.Expect(pods.Items).To(HaveLen(replicas))
	}).WithContext(ctx).Should(Succeed())
}
