// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// layout is a policy that evicts what blocks a layout of one A100.
func layout(instances string) string {
	return fmt.Sprintf(`{rollout: {drain: {mode: Evict}}, sharing: {strategy: MIG, mig: {layouts: [{instances: [%s]}]}}}`, instances)
}

func safetySpecs() {
	const (
		first  = `{profile: 3g.20gb, count: 1}, {profile: 1g.5gb, count: 4}`
		second = `{profile: 3g.20gb, count: 1}, {profile: 2g.10gb, count: 2}`
	)
	advertisedFirst := map[string]int64{"nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb": 4}
	advertisedSecond := map[string]int64{"nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-2g.10gb": 2}

	Describe("A change of MIG while pods run", Ordered, Offset(1), func() {
		var before found

		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100)
			before = settled(ctx)
			apply(ctx, "layout", layout(first))
			expectAllocatable(ctx, advertisedFirst)
			expectReady(ctx, "layout")
		})

		It("keeps a pod on its instance, which the new layout has too, and evicts nobody", func(ctx SpecContext) {
			startPod(ctx, "bystander", "nvidia.com/mig-3g.20gb", 1)
			stays := expectUndisturbed(ctx, "bystander")
			apply(ctx, "layout", layout(second))
			expectAllocatable(ctx, advertisedSecond)
			expectReady(ctx, "layout")
			stays()
			startPod(ctx, "new", "nvidia.com/mig-2g.10gb", 1)
			Expect(expectRunning(ctx, "new").uuid()).To(HavePrefix("MIG-"))
		})

		It("evicts the pod that holds what must go, and nobody else", func(ctx SpecContext) {
			startPod(ctx, "bystander", "nvidia.com/mig-3g.20gb", 1)
			stays := expectUndisturbed(ctx, "bystander")
			startPod(ctx, "holder", "nvidia.com/mig-2g.10gb", 1)
			expectRunning(ctx, "holder")
			apply(ctx, "layout", layout(first))
			expectAllocatable(ctx, advertisedFirst)
			expectReady(ctx, "layout")
			expectGone(ctx, "holder")
			stays()
		})

		It("is stopped by a PodDisruptionBudget, says by which, and goes on when it allows the eviction", func(ctx SpecContext) {
			startPod(ctx, "guarded", "nvidia.com/mig-1g.5gb", 1)
			held := expectRunning(ctx, "guarded").uuid()
			budget := guard(ctx, "guarded")
			apply(ctx, "layout", layout(second))
			Eventually(func() error { return ready(ctx, "layout") }).WithContext(ctx).
				Should(MatchError(And(ContainSubstring("GPUInUse"), ContainSubstring("default/guarded"))))
			Eventually(func() (string, error) { return eventsOf(ctx, "layout") }).WithContext(ctx).
				Should(And(ContainSubstring("default/guarded is not evicted"), ContainSubstring(budget.Name)))
			Consistently(instances, "3s").Should(ContainElement(held))
			Expect(kube.Delete(ctx, budget)).To(Succeed())
			expectAllocatable(ctx, advertisedSecond)
			expectReady(ctx, "layout")
			expectGone(ctx, "guarded")
		})

		It("that the driver refuses half-way is taken back, its reason shown, and tried again", func(ctx SpecContext) {
			startPod(ctx, "bystander", "nvidia.com/mig-3g.20gb", 1)
			stays := expectUndisturbed(ctx, "bystander")
			// Once: what puts the old layout back calls the same.
			Expect(gpus.AddFault(simdriver.Fault{Call: "nvmlGpuInstanceCreateComputeInstance", Return: sim.Unknown, Times: 1})).To(Succeed())
			DeferCleanup(func() error { return gpus.ClearFaults() })
			said := watchAgent(ctx)
			apply(ctx, "layout", layout(first))
			expectAllocatable(ctx, advertisedFirst)
			expectReady(ctx, "layout")
			Expect(said()).To(ContainElement(And(
				ContainSubstring("nvmlGpuInstanceCreateComputeInstance: ERROR_UNKNOWN"), ContainSubstring("is as it was before; it is tried again"))))
			stays()
		})

		It("is previewed while it is paused, with the plan, whom it evicts and which workload can never start again", func(ctx SpecContext) {
			const profile = "nvidia.com/mig-1g.5gb"
			startPod(ctx, "bystander", "nvidia.com/mig-3g.20gb", 1)
			stays := expectUndisturbed(ctx, "bystander")
			stop := startDeployment(ctx, "train", profile)
			evicted := expectDeployed(ctx, "train")
			before, err := instances()
			Expect(err).NotTo(HaveOccurred())

			apply(ctx, "layout", paused(second))
			foretold := expectPreview(ctx, "layout", evicted, "is evicted")
			Expect(foretold.Resources).To(ConsistOf(
				v1alpha1.ResourceCount{Name: "nvidia.com/mig-3g.20gb", Advertised: 1, Expected: 1},
				v1alpha1.ResourceCount{Name: profile, Advertised: 4},
				v1alpha1.ResourceCount{Name: "nvidia.com/mig-2g.10gb", Expected: 2}))
			Eventually(affected).WithContext(ctx).WithArguments("layout").Should(And(
				ContainSubstring("Deployment default/train asks for "+profile+": 1, which no node will offer"), Not(ContainSubstring("bystander"))))
			said := kubectl(ctx, manifest("layout", layout(second)), "gpusharing", "plan", "-f", "-")
			for _, line := range []string{"destroy 4 × 1g.5gb", "create 2 × 2g.10gb", "pod " + users + "/" + evicted + " uses"} {
				Expect(said).To(ContainSubstring(line), "the plan that kubectl prints is the same, with equal steps in one line")
			}
			Consistently(offered, "2s").WithContext(ctx).Should(Equal(advertisedFirst))
			Expect(instances()).To(ConsistOf(before))

			apply(ctx, "layout", layout(second))
			expectAllocatable(ctx, advertisedSecond)
			expectReady(ctx, "layout")
			expectGone(ctx, evicted)
			stays()
			Eventually(deployed).WithContext(ctx).WithArguments("train").Should(ContainElement(ContainSubstring("Insufficient " + profile)))
			Eventually(affected).WithContext(ctx).WithArguments("layout").Should(ContainSubstring("Deployment default/train"))
			stop(ctx)
			Eventually(affected).WithContext(ctx).WithArguments("layout").Should(BeEmpty())
		})

		It("is undone with its policy: node, ConfigMaps and ClusterPolicy are as before, and so are the GPUs", func(ctx SpecContext) {
			unshare(ctx, map[string]int64{"nvidia.com/gpu": 1})
			Eventually(look).WithContext(ctx).Should(BeComparableTo(before))
		})
	})
}

// expectUndisturbed waits until a pod runs. What it returns checks later that the pod was not replaced, did not restart
// and still has its instance.
func expectUndisturbed(ctx context.Context, name string) (check func()) {
	GinkgoHelper()
	got := expectRunning(ctx, name)
	identity := func() (types.UID, string, int32) {
		pod := &corev1.Pod{}
		Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, pod)).To(Succeed())
		Expect(pod.Status.ContainerStatuses).To(HaveLen(1))
		c := pod.Status.ContainerStatuses[0]
		return pod.UID, c.ContainerID, c.RestartCount
	}
	uid, container, count := identity()
	return func() {
		GinkgoHelper()
		nowUID, nowContainer, nowCount := identity()
		Expect([]any{nowUID, nowContainer, nowCount}).To(Equal([]any{uid, container, count}), "pod %s is the same", name)
		if strings.HasPrefix(got.uuid(), "MIG-") {
			Expect(instances()).To(ContainElement(got.uuid()), "its instance is still there")
		}
	}
}

// watchAgent notes every message of the agent's condition Applied, however short it stands there, until the function
// that it returns is called.
func watchAgent(ctx context.Context) func() []string {
	GinkgoHelper()
	w, err := kube.Watch(ctx, &v1alpha1.GPUNodeList{}, client.MatchingFields{"metadata.name": nodeName})
	Expect(err).NotTo(HaveOccurred())
	ended := make(chan struct{})
	var seen []string
	go func() {
		defer close(ended)
		for event := range w.ResultChan() {
			n, ok := event.Object.(*v1alpha1.GPUNode)
			if !ok {
				continue
			}
			if c := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionApplied); c != nil {
				seen = append(seen, c.Message)
			}
		}
	}()
	return func() []string {
		w.Stop()
		<-ended
		return seen
	}
}

// eventsOf are the notes of all events about a policy.
func eventsOf(ctx context.Context, policy string) (string, error) {
	events := &eventsv1.EventList{}
	if err := kube.List(ctx, events); err != nil {
		return "", err
	}
	var all []string
	for i := range events.Items {
		if e := &events.Items[i]; e.Regarding.Kind == "GPUSharingPolicy" && e.Regarding.Name == policy {
			all = append(all, e.Note)
		}
	}
	return strings.Join(all, "\n"), nil
}

func expectGone(ctx context.Context, name string) {
	GinkgoHelper()
	Eventually(func() error { return kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, &corev1.Pod{}) }).WithContext(ctx).
		Should(MatchError(ContainSubstring("not found")), "pod %s was evicted", name)
}

// guard makes a PodDisruptionBudget that allows no eviction of a pod, and waits until it counts.
func guard(ctx context.Context, pod string) *policyv1.PodDisruptionBudget {
	GinkgoHelper()
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: "keep-" + pod},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: new(intstr.FromInt32(1)),
			Selector:     &metav1.LabelSelector{MatchLabels: map[string]string{"name": pod}},
		},
	}
	Expect(kube.Create(ctx, budget)).To(Succeed())
	DeferCleanup(func(ctx SpecContext) error { return client.IgnoreNotFound(kube.Delete(ctx, budget)) })
	Eventually(func() (int32, error) {
		err := kube.Get(ctx, client.ObjectKeyFromObject(budget), budget)
		return budget.Status.CurrentHealthy, err
	}).WithContext(ctx).Should(Equal(int32(1)))
	return budget
}
