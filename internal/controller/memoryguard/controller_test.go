// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/memoryguard"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const gib = int64(1 << 30)

// site is a cluster with one policy, one node and the controller with the rights and the admission policy that it ships
// with.
type site struct {
	*WithT
	t          *testing.T
	cluster    *env.Cluster
	as         client.WithWatch // the controller
	controller *memoryguard.Controller
	clock      *clocktesting.FakePassiveClock
	events     *events.FakeRecorder
	writes     int
	evictions  int  // asked for
	lost       bool // the answer to an eviction is
	denied     bool // evictions are, as by an admission webhook
}

func TestMemoryGuard(t *testing.T) {
	cluster := env.Start(t)
	NewWithT(t).Expect(cluster.Apply(t.Context(), "config/default/namespace.yaml", "config/rbac/role.yaml", "config/manager/rbac.yaml",
		"config/manager/admission.yaml")).To(Succeed())
	for name, test := range map[string]func(s *site){
		"a policy that reports evicts nothing":                    reports,
		"the pod is evicted, and no other":                        evicts,
		"one pod for a GPU in a minute":                           onceAMinute,
		"a pod of that name not twice in ten minutes":             notTwice,
		"nor on another node, where it was started again":         notTwiceElsewhere,
		"a PodDisruptionBudget holds, and counts as no eviction":  budgetHolds,
		"a pod that takes a day to end shields no other":          aDayShieldsNone,
		"a pod that ends soon is waited for":                      endsSoon,
		"a pod that has just gone is waited for":                  goneIsWaitedFor,
		"a PodDisruptionBudget shields no other pod":              budgetShieldsNone,
		"a pod of a DaemonSet stays, and shields no other":        daemonSetShieldsNone,
		"a pod of a DaemonSet stays":                              daemonSetStays,
		"a pod that requests no GPU stays":                        noGPUStays,
		"a pod of another node stays":                             anotherNodeStays,
		"no Event on a pod of another node":                       noEventElsewhere,
		"a pod that is gone is no pressure":                       goneIsNoPressure,
		"a webhook that denies it counts as no eviction":          denied,
		"a lost answer counts as an eviction":                     lostAnswer,
		"a report that ended after the cache was read is ignored": endedMeanwhile,
		"without its GPUNode an eviction has no record":           goneMeanwhile,
		"an agent that does not know the guard is named":          olderAgent,
	} {
		t.Run(name, func(t *testing.T) { test(newSite(t, cluster)) })
	}
}

func newSite(t *testing.T, cluster *env.Cluster) *site {
	t.Helper()
	s := &site{
		WithT: NewWithT(t), t: t, cluster: cluster, events: events.NewFakeRecorder(1000),
		clock: clocktesting.NewFakePassiveClock(time.Now().Add(time.Hour)), // pods are created before
	}
	as, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-controller"})
	s.Expect(err).NotTo(HaveOccurred())
	s.as, err = client.NewWithWatch(as, client.Options{Scheme: cluster.Scheme})
	s.Expect(err).NotTo(HaveOccurred())
	s.restart()
	s.Expect(cluster.Client.Create(t.Context(), &v1alpha1.GPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: v1alpha1.GPUNodeSpec{PolicyName: "research"},
	})).To(Succeed())
	t.Cleanup(func() {
		ctx := context.Background()
		s.Expect(cluster.Client.DeleteAllOf(ctx, &v1alpha1.GPUNode{})).To(Succeed())
		s.Expect(cluster.Client.DeleteAllOf(ctx, &v1alpha1.GPUSharingPolicy{})).To(Succeed())
		s.Expect(cluster.Client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace("default"), client.GracePeriodSeconds(0))).To(Succeed())
		s.Expect(cluster.Client.DeleteAllOf(ctx, &policyv1.PodDisruptionBudget{}, client.InNamespace("default"))).To(Succeed())
	})
	return s
}

// restart starts the controller anew: all that it knew is gone.
func (s *site) restart() { s.restartReading(s.cluster.Client) }

func (s *site) restartReading(reader client.Reader) {
	s.controller = memoryguard.New(s.client(), memoryguard.Options{Reader: reader, Clock: s.clock, Events: s.events})
}

// client counts what the controller writes and asks for.
func (s *site) client() client.Client {
	return interceptor.NewClient(s.as, interceptor.Funcs{
		SubResourceApply: func(
			ctx context.Context, c client.Client, sub string, o runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption,
		) error {
			s.writes++
			return c.SubResource(sub).Apply(ctx, o, opts...)
		},
		SubResourceCreate: func(
			ctx context.Context, c client.Client, sub string, o, body client.Object, opts ...client.SubResourceCreateOption,
		) error {
			s.evictions++
			if s.denied {
				return apierrors.NewForbidden(corev1.Resource("pods"), o.GetName(), errors.New("admission webhook denied the request"))
			}
			if s.lost {
				return errors.New("the connection was lost")
			}
			return c.SubResource(sub).Create(ctx, o, body, opts...)
		},
	})
}

func (s *site) policy(mode v1alpha1.MemoryGuardMode) {
	s.t.Helper()
	s.Expect(s.cluster.Client.Create(s.t.Context(), &v1alpha1.GPUSharingPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "research"},
		Spec: v1alpha1.GPUSharingPolicySpec{NodeSelector: &v1alpha1.NodeSelector{}, Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{
			Replicas: 4, Memory: &v1alpha1.TimeSlicedMemory{Guard: v1alpha1.MemoryGuard{Mode: mode}},
		}}},
	})).To(Succeed())
}

// pod creates a pod that runs on the node and requests a GPU.
func (s *site) pod(name string, change func(*corev1.Pod)) {
	s.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{
			Name: "main", Image: "example.invalid/main",
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}},
		}}},
	}
	if change != nil {
		change(pod)
	}
	s.Expect(s.cluster.Client.Create(s.t.Context(), pod)).To(Succeed())
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	s.Expect(s.cluster.Client.Status().Update(s.t.Context(), pod)).To(Succeed())
}

// stays reports whether a pod is there and was not evicted.
func (s *site) stays(name string) bool {
	s.t.Helper()
	pod := &corev1.Pod{}
	err := s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Namespace: "default", Name: name}, pod)
	s.Expect(client.IgnoreNotFound(err)).To(Succeed())
	return err == nil && pod.DeletionTimestamp == nil
}

// over reports, as the agent does, that pods use more than their shares: each on a GPU of its own.
func (s *site) over(pods ...string) {
	s.t.Helper()
	s.overOn("n1", pods...)
}

func (s *site) overOn(node string, pods ...string) {
	s.t.Helper()
	now := s.clock.Now()
	var pressure []v1alpha1.MemoryPressure
	for _, name := range pods {
		gpu, pod, _ := strings.Cut(name, "/")
		pressure = append(pressure, v1alpha1.MemoryPressure{
			DeviceUUID: gpu, SinceTime: metav1.NewTime(now.Add(-2 * time.Minute)), ObservedTime: metav1.NewTime(now),
			TotalBytes: 40 * gib, FreeBytes: gib, Neighbours: []string{"default/modest"},
			Container: v1alpha1.MemoryUser{Namespace: "default", PodName: pod, ContainerName: "main", UsedBytes: 30 * gib, ShareBytes: 10 * gib},
		})
	}
	s.report(node, pressure)
}

// renew reports the same again.
func (s *site) renew() {
	s.t.Helper()
	n := &v1alpha1.GPUNode{}
	s.Expect(s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Name: "n1"}, n)).To(Succeed())
	for i := range n.Status.MemoryPressure {
		n.Status.MemoryPressure[i].ObservedTime = metav1.NewTime(s.clock.Now())
	}
	s.report("n1", n.Status.MemoryPressure)
}

func (s *site) report(node string, pressure []v1alpha1.MemoryPressure) {
	s.t.Helper()
	want := ac.GPUNode(node)
	if len(pressure) > 0 {
		status, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](v1alpha1.GPUNodeStatus{MemoryPressure: pressure})
		s.Expect(err).NotTo(HaveOccurred())
		want.WithStatus(status)
	}
	s.Expect(s.cluster.Client.Status().Apply(s.t.Context(), want, client.FieldOwner("gpusharing-agent-guard"), client.ForceOwnership)).To(Succeed())
}

func (s *site) reconcile() reconcile.Result {
	s.t.Helper()
	result, err := s.controller.Reconcile(s.t.Context(), memoryguard.Request{})
	s.Expect(err).NotTo(HaveOccurred())
	return result
}

// advance lets time pass.
func (s *site) advance(d time.Duration) { s.clock.SetTime(s.clock.Now().Add(d)) }

// condition is the message of the policy's condition; empty: it is not true.
func (s *site) condition() string {
	s.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	s.Expect(s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Name: "research"}, p)).To(Succeed())
	c, _ := condition.Find(p.Status.Conditions, v1alpha1.ConditionMemoryPressure)
	if c.Status != "" {
		reason := map[metav1.ConditionStatus]string{metav1.ConditionTrue: v1alpha1.ReasonContainerOverShare, metav1.ConditionUnknown: v1alpha1.ReasonNotMeasured}
		s.Expect(c.Reason).To(Equal(reason[c.Status]))
		s.Expect(c.ObservedGeneration).To(Equal(p.Generation))
	}
	return c.Message
}

func (s *site) records() []string {
	s.t.Helper()
	n := &v1alpha1.GPUNode{}
	s.Expect(s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Name: "n1"}, n)).To(Succeed())
	names := []string{}
	for _, e := range n.Status.MemoryEvictions {
		names = append(names, e.DeviceUUID+"/"+e.PodName)
	}
	return names
}

func (s *site) announced() (all []string) {
	for {
		select {
		case e := <-s.events.Events:
			all = append(all, e)
		default:
			return all
		}
	}
}

const greedy = greedyUses + " 1.0 GiB of 40.0 GiB are free; neighbours: default/modest"

const greedyUses = "Container main of pod default/greedy uses 30.0 GiB of GPU GPU-1 on node n1, its share is 10.0 GiB;"

func reports(s *site) {
	s.policy(v1alpha1.MemoryGuardReport)
	s.pod("greedy", nil)
	s.reconcile()
	s.Expect(s.writes).To(BeZero(), "nothing to report")
	s.over("GPU-1/greedy")
	s.reconcile()
	s.Expect(s.condition()).To(Equal(greedy))
	s.Expect(s.announced()).To(Equal([]string{"Warning MemoryPressure " + greedy, "Warning MemoryPressure " + greedy}), "on the pod and on the policy")
	writes := s.writes
	s.advance(time.Hour)
	s.reconcile()
	s.Expect(s.writes).To(Equal(writes))
	s.Expect(s.announced()).To(BeEmpty())
	s.Expect(s.evictions).To(BeZero())
	s.Expect(s.stays("greedy")).To(BeTrue())

	s.report("n1", nil)
	s.reconcile()
	s.Expect(s.condition()).To(BeEmpty())
}

func evicts(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", nil)
	s.pod("modest", nil)
	s.over("GPU-1/greedy")
	s.reconcile()
	s.Expect(s.stays("greedy")).To(BeFalse())
	s.Expect(s.stays("modest")).To(BeTrue())
	s.Expect(s.records()).To(Equal([]string{"GPU-1/greedy"}))
	s.Expect(s.condition()).To(Equal(greedy + "; evicting the pod"))
	s.Expect(s.announced()).To(ContainElement("Warning Evicting " + "Evicting the pod. " + greedy))
	s.restart()
	s.reconcile()
	s.Expect(s.evictions).To(Equal(1))
}

func onceAMinute(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	for _, name := range []string{"greedy", "second", "elsewhere"} {
		s.pod(name, nil)
	}
	s.over("GPU-1/greedy")
	s.reconcile()
	s.restart()
	s.advance(10 * time.Second)
	s.over("GPU-1/second", "GPU-2/elsewhere")
	again := s.reconcile().RequeueAfter
	s.Expect(s.stays("second")).To(BeTrue())
	s.Expect(s.stays("elsewhere")).To(BeFalse(), "on another GPU")
	s.Expect(s.condition()).To(And(HavePrefix("Container main of pod default/second uses 30.0 GiB of GPU GPU-1 on node n1, "),
		HaveSuffix(" another pod was evicted from this GPU less than a minute ago; 1 more in status.memoryPressure of GPUNodes")))
	s.Expect(again).To(BeNumerically("~", 50*time.Second, time.Second))
	s.advance(again)
	s.reconcile()
	s.Expect(s.stays("second")).To(BeFalse())
}

func notTwice(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", nil)
	s.over("GPU-1/greedy")
	s.reconcile()
	s.Expect(s.cluster.Client.DeleteAllOf(s.t.Context(), &corev1.Pod{}, client.InNamespace("default"), client.GracePeriodSeconds(0))).To(Succeed())
	s.pod("greedy", nil) // of a StatefulSet, which gives the name again
	s.restart()
	s.advance(9 * time.Minute)
	s.over("GPU-2/greedy")
	again := s.reconcile().RequeueAfter
	s.Expect(s.stays("greedy")).To(BeTrue())
	s.Expect(again).To(BeNumerically("~", time.Minute, time.Second))
	s.advance(again)
	s.reconcile()
	s.Expect(s.stays("greedy")).To(BeFalse())
}

func notTwiceElsewhere(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", nil)
	s.over("GPU-1/greedy")
	s.reconcile()
	s.over()
	s.Expect(s.cluster.Client.DeleteAllOf(s.t.Context(), &corev1.Pod{}, client.InNamespace("default"), client.GracePeriodSeconds(0))).To(Succeed())
	s.Expect(s.cluster.Client.Create(s.t.Context(), &v1alpha1.GPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Spec: v1alpha1.GPUNodeSpec{PolicyName: "research"},
	})).To(Succeed())
	s.pod("greedy", func(p *corev1.Pod) { p.Spec.NodeName = "n2" })
	s.restart()
	s.advance(9 * time.Minute)
	s.overOn("n2", "GPU-2/greedy")
	again := s.reconcile().RequeueAfter
	s.Expect(s.stays("greedy")).To(BeTrue())
	s.Expect(again).To(BeNumerically("~", time.Minute, time.Second))
	s.advance(again)
	s.reconcile()
	s.Expect(s.stays("greedy")).To(BeFalse())
}

// budget lets no pod of an app be evicted.
func (s *site) budget(app string) *policyv1.PodDisruptionBudget {
	s.t.Helper()
	all := intstr.FromString("100%")
	b := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
		},
	}
	s.Expect(s.cluster.Client.Create(s.t.Context(), b)).To(Succeed())
	b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, ExpectedPods: 1, DesiredHealthy: 1, CurrentHealthy: 1}
	s.Expect(s.cluster.Client.Status().Update(s.t.Context(), b)).To(Succeed())
	return b
}

func budgetHolds(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", nil)
	b := s.budget("greedy")
	s.over("GPU-1/greedy")
	s.Expect(s.reconcile().RequeueAfter).To(Equal(30 * time.Second))
	s.Expect(s.stays("greedy")).To(BeTrue())
	s.Expect(s.condition()).To(And(HavePrefix(greedyUses+" 1.0 GiB of "), HaveSuffix(" … not evicted: The disruption budget b needs 1 healthy pods and has 1 currently")))
	s.Expect(s.announced()).To(ContainElement(ContainSubstring("EvictionBlocked")))
	s.Expect(s.records()).To(BeEmpty(), "it was not evicted")
	s.advance(10 * time.Second)
	s.Expect(s.reconcile().RequeueAfter).To(Equal(20 * time.Second))
	s.Expect(s.evictions).To(Equal(1), "it is not asked for again so soon")

	s.Expect(s.cluster.Client.Delete(s.t.Context(), b)).To(Succeed())
	s.advance(20 * time.Second)
	s.reconcile()
	s.Expect(s.stays("greedy")).To(BeFalse())
	s.Expect(s.records()).To(Equal([]string{"GPU-1/greedy"}))
}

func daemonSetStays(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", ofDaemonSet("apps/v1"))
	s.kept("belongs to DaemonSet owner")
}

func ofDaemonSet(version string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: version, Kind: "DaemonSet", Name: "owner", UID: "1", Controller: new(true)}}
	}
}

// shielding has the GPU reported with two pods, of which the first, which exceeds its share more, is changed.
func (s *site) shielding(change func(*corev1.Pod)) {
	s.t.Helper()
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", change)
	s.pod("second", nil)
	s.over("GPU-1/greedy", "GPU-1/second")
}

// endsIn deletes the first pod, which is killed so much later by the clock of the controller.
func (s *site) endsIn(d time.Duration) {
	s.t.Helper()
	s.shielding(nil)
	seconds := client.GracePeriodSeconds((time.Until(s.clock.Now()) + d).Seconds())
	s.Expect(s.cluster.Client.Delete(s.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "greedy"}}, seconds)).To(Succeed())
}

func aDayShieldsNone(s *site) {
	s.endsIn(24 * time.Hour)
	s.reconcile()
	s.Expect(s.stays("second")).To(BeFalse())
	s.Expect(s.condition()).To(ContainSubstring("the pod is ending; 1 more in status.memoryPressure"))
	s.Expect(s.announced()).To(ContainElements(
		ContainSubstring("MemoryPressure Container main of pod default/greedy"), ContainSubstring("Evicting the pod. Container main of pod default/second")))
}

func endsSoon(s *site) {
	s.endsIn(time.Minute)
	s.reconcile()
	s.Expect(s.stays("second")).To(BeTrue())
	s.advance(70 * time.Second)
	s.reconcile()
	s.Expect(s.stays("second")).To(BeTrue(), "the report may be from before it ended")
	s.advance(5 * time.Second)
	s.renew()
	s.reconcile()
	s.Expect(s.stays("second")).To(BeFalse(), "its memory is not free")
}

func goneIsWaitedFor(s *site) {
	s.shielding(nil)
	s.Expect(s.cluster.Client.Delete(s.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "greedy"}}, client.GracePeriodSeconds(0))).To(Succeed())
	s.reconcile()
	s.Expect(s.stays("second")).To(BeTrue())
	s.Expect(s.condition()).To(ContainSubstring("another pod of this GPU is ending"))
	s.advance(15 * time.Second)
	s.reconcile()
	s.Expect(s.stays("second")).To(BeTrue())
	s.renew()
	s.reconcile()
	s.Expect(s.stays("second")).To(BeFalse(), "the agent measures it still")
}

func budgetShieldsNone(s *site) {
	s.shielding(nil)
	s.budget("greedy")
	s.Expect(s.reconcile().RequeueAfter).To(Equal(time.Second))
	s.Expect(s.stays("second")).To(BeTrue(), "one request for a GPU at a time")
	s.advance(time.Second)
	s.reconcile()
	s.Expect(s.stays("greedy")).To(BeTrue())
	s.Expect(s.stays("second")).To(BeFalse())
	s.Expect(s.condition()).To(ContainSubstring("not evicted: The disruption budget"))
	s.Expect(s.evictions).To(Equal(2))
	s.Expect(s.records()).To(Equal([]string{"GPU-1/second"}))
}

func daemonSetShieldsNone(s *site) {
	s.shielding(ofDaemonSet("apps/v1"))
	s.reconcile()
	s.Expect(s.stays("greedy")).To(BeTrue())
	s.Expect(s.stays("second")).To(BeFalse())
	s.Expect(s.evictions).To(Equal(1))
}

func noGPUStays(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} })
	s.kept("requests no GPU")
}

func anotherNodeStays(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", func(p *corev1.Pod) { p.Spec.NodeName = "n2" })
	s.kept("")
	s.Expect(s.condition()).To(BeEmpty(), "an agent is not believed about pods of other nodes")
}

// noEventElsewhere: an agent that was taken over names pods of other nodes.
func noEventElsewhere(s *site) {
	s.policy(v1alpha1.MemoryGuardReport)
	s.pod("greedy", func(p *corev1.Pod) { p.Spec.NodeName = "n2" })
	s.over("GPU-1/greedy")
	told := &told{EventRecorder: s.events}
	s.controller = memoryguard.New(s.client(), memoryguard.Options{Reader: s.cluster.Client, Clock: s.clock, Events: told})
	s.reconcile()
	s.Expect(told.pods).To(BeEmpty())
}

// told remembers the pods that have Events.
type told struct {
	events.EventRecorder

	pods []string
}

func (r *told) Eventf(regarding, _ runtime.Object, _, _, _, _ string, _ ...any) {
	if pod, is := regarding.(*corev1.Pod); is {
		r.pods = append(r.pods, pod.Name)
	}
}

// goneIsNoPressure: the agent of a node that was lost does not take its report back.
func goneIsNoPressure(s *site) {
	s.policy(v1alpha1.MemoryGuardReport)
	s.pod("greedy", nil)
	s.over("GPU-1/greedy")
	again := s.reconcile().RequeueAfter
	s.Expect(again).To(Equal(2*time.Minute), "nothing else makes it look again")
	s.Expect(s.condition()).NotTo(BeEmpty())
	s.Expect(s.cluster.Client.DeleteAllOf(s.t.Context(), &corev1.Pod{}, client.InNamespace("default"), client.GracePeriodSeconds(0))).To(Succeed())
	s.advance(again)
	s.reconcile()
	s.Expect(s.condition()).To(BeEmpty())
}

// kept checks that a pod that an agent reports is not evicted, and that the policy says why.
func (s *site) kept(why string) {
	s.t.Helper()
	s.over("GPU-1/greedy")
	s.reconcile()
	s.Expect(s.stays("greedy")).To(BeTrue())
	s.Expect(s.evictions).To(BeZero())
	s.Expect(s.records()).To(BeEmpty())
	s.Expect(s.condition()).To(ContainSubstring(why))
}

func denied(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", nil)
	s.over("GPU-1/greedy")
	s.denied = true
	result, err := s.controller.Reconcile(s.t.Context(), memoryguard.Request{})
	s.Expect(s.records()).To(BeEmpty(), "it was not carried out")
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(result.RequeueAfter).To(Equal(30 * time.Second))
	s.Expect(s.condition()).To(ContainSubstring("admission webhook denied the request"))
}

func lostAnswer(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", nil)
	s.over("GPU-1/greedy")
	s.lost = true
	_, err := s.controller.Reconcile(s.t.Context(), memoryguard.Request{})
	s.Expect(err).To(MatchError(ContainSubstring("the connection was lost")))
	s.Expect(s.records()).To(Equal([]string{"GPU-1/greedy"}), "it may have been carried out")
	s.lost = false
	s.restart()
	s.reconcile()
	s.Expect(s.evictions).To(Equal(1))
}

func endedMeanwhile(s *site) { s.evictsNone(ended{s.cluster.Client}) }

// evictsNone of those over their share, by what a reader tells.
func (s *site) evictsNone(by client.Reader) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.pod("greedy", nil)
	s.over("GPU-1/greedy")
	s.restartReading(by)
	s.reconcile()
	s.Expect(s.evictions).To(BeZero())
	s.Expect(s.stays("greedy")).To(BeTrue())
}

// ended is an API server in which the pressure has ended.
type ended struct{ client.Reader }

func (e ended) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	err := e.Reader.Get(ctx, key, o, opts...)
	if n, is := o.(*v1alpha1.GPUNode); is {
		n.Status.MemoryPressure = nil
	}
	return err
}

// goneMeanwhile: what cannot be recorded is not evicted, since it would not count.
func goneMeanwhile(s *site) { s.evictsNone(vanishing{s.cluster.Client}) }

// vanishing is an API server in which a GPUNode is deleted once it was read.
type vanishing struct{ client.Client }

func (v vanishing) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	err := v.Client.Get(ctx, key, o, opts...)
	if n, is := o.(*v1alpha1.GPUNode); is && err == nil {
		err = v.Delete(ctx, n.DeepCopy())
	}
	return err
}

// olderAgent reports as an agent of a release before the memory guard does, which carries on the conditions that it
// does not know.
func olderAgent(s *site) {
	s.policy(v1alpha1.MemoryGuardEvict)
	s.guard(30)
	s.measures()
	s.reconcile()
	s.Expect(s.condition()).To(BeEmpty())
	s.guard(60)
	s.Expect(s.reconcile().RequeueAfter).To(BeNumerically("~", 2*time.Minute, time.Second), "an agent takes a moment")
	s.Expect(s.condition()).To(BeEmpty())
	s.advance(2 * time.Minute)
	s.reconcile()
	s.Expect(s.condition()).To(SatisfyAll(ContainSubstring("The agents of 1 nodes (n1) have not reported"), ContainSubstring("Wait for an update of their DaemonSet")))
	writes := s.writes
	s.advance(time.Hour)
	s.reconcile()
	s.Expect(s.writes).To(Equal(writes), "it is said once")
	s.measures()
	s.reconcile()
	s.Expect(s.condition()).To(BeEmpty(), "the agent is updated")
	s.Expect(s.evictions).To(BeZero())
}

// guard gives the node a memory guard, as the controller of rollouts does.
func (s *site) guard(grace int32) {
	s.t.Helper()
	n := &v1alpha1.GPUNode{}
	s.Expect(s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Name: "n1"}, n)).To(Succeed())
	n.Spec.Memory = &v1alpha1.TimeSlicedMemory{Guard: v1alpha1.MemoryGuard{
		Mode: v1alpha1.MemoryGuardEvict, GracePeriodSeconds: grace, FreeBelowPercent: 5,
	}}
	s.Expect(s.cluster.Client.Update(s.t.Context(), n)).To(Succeed())
}

// measures reports, as the agent does of each generation, that it measures.
func (s *site) measures() {
	s.t.Helper()
	n := &v1alpha1.GPUNode{}
	s.Expect(s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Name: "n1"}, n)).To(Succeed())
	status := v1alpha1.GPUNodeStatus{Conditions: condition.Set(nil, metav1.Condition{
		Type: v1alpha1.ConditionMemoryGuarded, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonMeasuring, ObservedGeneration: n.Generation,
	}, s.clock.Now())}
	configuration, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](status)
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(s.cluster.Client.Status().Apply(s.t.Context(), ac.GPUNode("n1").WithStatus(configuration), client.FieldOwner("gpusharing-agent"),
		client.ForceOwnership)).To(Succeed())
}
