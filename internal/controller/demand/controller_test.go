// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// site is a cluster with a policy, a node with an A100 and the controller with the rights and the admission policy that
// it ships with.
type site struct {
	*WithT
	t          *testing.T
	cluster    *env.Cluster
	as         client.WithWatch
	controller *demand.Controller
	events     *events.FakeRecorder
	writes     int
	starting   bool // the cache holds nothing yet
}

func TestDemand(t *testing.T) {
	cluster := env.Start(t)
	NewWithT(t).Expect(cluster.Apply(t.Context(), "config/default/namespace.yaml", "config/rbac/role.yaml", "config/manager/rbac.yaml",
		"config/manager/admission.yaml")).To(Succeed())
	for name, test := range map[string]func(s *site){
		"a policy says what pods wait for, and what would be changed":         says,
		"what has not changed is not written":                                 writesOnce,
		"pods of other namespaces do not count":                               selects,
		"a layout that is static again leaves nothing":                        staticAgain,
		"the feature gate off: what was reported goes":                        withdraws,
		"a restarted controller reports the same, and writes nothing":         restarts,
		"a pod that grows old goes first, whatever else happens":              growsOld,
		"mode Apply: the GPUNode says what its GPUs are to have":              applies,
		"a policy that is gone: what GPUs have stays until they are released": outlives,
		"a request of which no node can have as many is no demand at all":     tooMany,
		"a pod that GPUs of two policies could serve is served once":          twoPolicies,
		"what a pod is nominated for is not destroyed for another":            nominated,
	} {
		t.Run(name, func(t *testing.T) { test(newSite(t, cluster)) })
	}
}

// longIdle says of the instances of reported GPUs that none was held for an hour.
func longIdle(devices []v1alpha1.DeviceStatus) []v1alpha1.DeviceStatus {
	for d := range devices {
		for i := range devices[d].Instances {
			devices[d].Instances[i].LastHeldTime = metav1.NewTime(time.Now().Add(-time.Hour))
		}
	}
	return devices
}

func newSite(t *testing.T, cluster *env.Cluster) *site {
	t.Helper()
	s := &site{WithT: NewWithT(t), t: t, cluster: cluster}
	as, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-controller"})
	s.Expect(err).NotTo(HaveOccurred())
	s.as, err = client.NewWithWatch(as, client.Options{Scheme: cluster.Scheme})
	s.Expect(err).NotTo(HaveOccurred())
	s.restart()
	d, _ := catalogue.Find("NVIDIA-A100-SXM4-40GB")
	d.UUID, d.MIGCapable, d.PendingMIG = "GPU-1", true, true
	d.State = gpu.State{MIG: true, Instances: []gpu.Instance{{Profile: "7g.40gb", UUID: "MIG-1", Placement: gpu.Placement{Size: 8}}}}
	s.node("n1", "research", v1alpha1.GPUNodeStatus{
		Devices:    longIdle(plan.Reported([]gpu.Device{d})),
		Conditions: condition.Set(nil, metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Ready"}, time.Now()),
	})
	t.Cleanup(func() {
		ctx := context.Background()
		for _, of := range []client.Object{&v1alpha1.GPUNode{}, &v1alpha1.GPUSharingPolicy{}, &corev1.Node{}} {
			s.Expect(cluster.Client.DeleteAllOf(ctx, of)).To(Succeed())
		}
		s.deletePods(ctx)
	})
	return s
}

// node is a node of a policy, with what its GPUNode reports.
func (s *site) node(name, policy string, reports v1alpha1.GPUNodeStatus) {
	s.t.Helper()
	node, c := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, s.cluster.Client
	s.Expect(c.Create(s.t.Context(), node)).To(Succeed())
	node.Spec.Taints = nil // the API server gives a new node that it is not ready
	s.Expect(c.Update(s.t.Context(), node)).To(Succeed())
	s.Expect(c.Create(s.t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.GPUNodeSpec{PolicyName: policy}})).To(Succeed())
	status, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](reports)
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(c.Status().Apply(s.t.Context(), ac.GPUNode(name).WithStatus(status), client.FieldOwner("test"), client.ForceOwnership)).To(Succeed())
}

// restart starts the controller anew: all that it knew is gone. Its client counts what it writes, and lets it apply
// statuses alone.
func (s *site) restart() {
	s.events = events.NewFakeRecorder(10)
	s.controller = demand.New(interceptor.NewClient(s.as, interceptor.Funcs{
		SubResourceApply: func(
			ctx context.Context, c client.Client, sub string, o runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption,
		) error {
			s.writes++
			return c.SubResource(sub).Apply(ctx, o, opts...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if s.starting {
				return errors.New("is not cached")
			}
			return c.List(ctx, list, opts...)
		},
		Patch: func(_ context.Context, _ client.WithWatch, o client.Object, _ client.Patch, _ ...client.PatchOption) error {
			s.t.Errorf("%T %s was patched", o, o.GetName())
			return nil
		},
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			s.t.Error("an object was applied")
			return nil
		},
	}), func(context.Context) (*cluster.DRARead, error) { return cluster.DRAObjects{}.Read(), nil }, clocktesting.NewFakePassiveClock(time.Now()), s.events)
}

func (s *site) policy(onDemand *v1alpha1.MIGOnDemand) {
	s.t.Helper()
	s.Expect(s.cluster.Client.Create(s.t.Context(), &v1alpha1.GPUSharingPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "research"},
		Spec: v1alpha1.GPUSharingPolicySpec{NodeSelector: &v1alpha1.NodeSelector{}, Sharing: v1alpha1.Sharing{
			Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{Layouts: []v1alpha1.MIGLayout{{Fill: "7g", OnDemand: onDemand}}},
		}},
	})).To(Succeed())
}

// waits creates a pod whose containers ask for instances of 2g and that the scheduler has found no node for.
func (s *site) waits(name string, counts ...string) {
	s.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	for n, count := range counts {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
			Name: fmt.Sprint("c", n), Image: "example.invalid/main",
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/mig-2g.10gb": resource.MustParse(count)}},
		})
	}
	s.Expect(s.cluster.Client.Create(s.t.Context(), pod)).To(Succeed())
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
	s.Expect(s.cluster.Client.Status().Update(s.t.Context(), pod)).To(Succeed())
}

func (s *site) deletePods(ctx context.Context) {
	s.t.Helper()
	s.Expect(s.cluster.Client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace("default"), client.GracePeriodSeconds(0))).To(Succeed())
}

func (s *site) get(name string, o client.Object) {
	s.t.Helper()
	s.Expect(s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Name: name}, o)).To(Succeed())
}

// reconcile reconciles and returns what the policy reports.
func (s *site) reconcile() (*v1alpha1.OnDemandStatus, metav1.Condition) {
	s.t.Helper()
	_, err := s.controller.Reconcile(s.t.Context(), demand.Request{})
	s.Expect(err).NotTo(HaveOccurred())
	return s.reported()
}

func (s *site) reported() (*v1alpha1.OnDemandStatus, metav1.Condition) {
	s.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	s.get("research", p)
	is, _ := condition.Find(p.Status.Conditions, v1alpha1.ConditionDemandMet)
	return p.Status.OnDemand, is
}

func small() *v1alpha1.MIGOnDemand {
	return &v1alpha1.MIGOnDemand{Profiles: []v1alpha1.MIGProfile{"1g", "2g"}}
}

func says(s *site) {
	s.policy(small())
	status, is := s.reconcile()
	s.Expect(is.Reason).To(Equal(v1alpha1.ReasonNoDemand))
	s.Expect(status.Pods).To(BeZero())
	s.waits("a", "1")
	s.waits("b", "3")
	s.waits("c", "1")
	status, is = s.reconcile()
	s.Expect(is.Status).To(Equal(metav1.ConditionFalse))
	s.Expect(is.Reason).To(Equal(v1alpha1.ReasonNoIdleRoom), is.Message)
	s.Expect([]int32{status.Pods, status.Ready, status.Planned, status.Unmet}).To(Equal([]int32{3, 0, 2, 1}))
	s.Expect(status.Requests).To(HaveLen(2))
	s.Expect(status.Changes).To(Equal([]v1alpha1.OnDemandChange{{
		NodeName: "n1", Destroy: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}, Create: []v1alpha1.InstanceCount{{Profile: "2g.10gb", Count: 2}},
	}}))
	s.deletePods(s.t.Context())
	_, is = s.reconcile()
	s.Expect(is.Reason).To(Equal(v1alpha1.ReasonNoDemand))
}

func writesOnce(s *site) {
	s.policy(small())
	s.waits("a", "1")
	for range 3 {
		s.reconcile()
		s.Expect(s.writes).To(Equal(1))
	}
}

func selects(s *site) {
	of := small()
	of.NamespaceSelector = &v1alpha1.NamespaceSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: "kube-system"}}
	s.policy(of)
	s.waits("a", "1")
	_, is := s.reconcile()
	s.Expect(is.Reason).To(Equal(v1alpha1.ReasonNoDemand))
	s.edit(func(of *v1alpha1.MIGOnDemand) { of.NamespaceSelector.MatchLabels[corev1.LabelMetadataName] = "default" })
	_, is = s.reconcile()
	s.Expect(is.Reason).To(Equal(v1alpha1.ReasonRepartitionAdvised))
}

// edit changes what the policy has on demand.
func (s *site) edit(change func(*v1alpha1.MIGOnDemand)) {
	s.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	s.get("research", p)
	layout := &p.Spec.Sharing.MIG.Layouts[0]
	if change == nil {
		layout.OnDemand = nil
	} else {
		change(layout.OnDemand)
	}
	s.Expect(s.cluster.Client.Update(s.t.Context(), p)).To(Succeed())
}

func staticAgain(s *site) {
	s.policy(small())
	s.reconcile()
	s.edit(nil)
	status, is := s.reconcile()
	s.Expect(status).To(BeNil())
	s.Expect(is).To(BeZero())
	writes := s.writes
	s.reconcile()
	s.Expect(s.writes).To(Equal(writes))
}

func withdraws(s *site) {
	s.policy(small())
	s.reconcile()
	s.starting = true
	s.Expect(s.controller.Withdraw(s.t.Context(), s.cluster.Client)).To(Succeed())
	status, is := s.reported()
	s.Expect(status).To(BeNil())
	s.Expect(is).To(BeZero())
}

func restarts(s *site) {
	s.policy(small())
	s.waits("a", "1")
	first, was := s.reconcile()
	s.restart()
	again, is := s.reconcile()
	s.Expect(again).To(Equal(first))
	s.Expect(is).To(Equal(was))
	s.Expect(s.writes).To(Equal(1))
}

// applies: until the mode is another one, or the feature gate is off.
func applies(s *site) {
	of := small()
	of.Mode = v1alpha1.OnDemandModeApply
	s.policy(of)
	s.waits("a", "1")
	_, is := s.reconcile()
	s.Expect(is.Reason).To(Equal(v1alpha1.ReasonRepartitioning))
	s.Expect(s.decided()).To(BeEmpty(), "the rollout has not seen the policy")
	p := s.observed("research")
	for name, resource := range map[string]string{"whole": "nvidia.com/gpu", "small": "nvidia.com/mig-2g.10gb"} {
		p.Status.NodeGroups = append(p.Status.NodeGroups, v1alpha1.NodeGroupStatus{
			Kind: v1alpha1.NodeGroupNodePool, Name: name, Reason: v1alpha1.ReasonConfigured, Resources: []v1alpha1.NodeResource{{Name: resource, Count: 1}},
		})
	}
	s.Expect(s.cluster.Client.Status().Update(s.t.Context(), p)).To(Succeed())
	s.reconcile()
	entries := s.decided()
	s.Expect(entries).To(HaveLen(1))
	s.Expect(entries[0].UUID).To(Equal("GPU-1"))
	s.Expect(entries[0].Instances).To(Equal([]v1alpha1.InstanceCount{{Profile: "2g.10gb", Count: 1}}))
	s.Expect(entries[0].FirstPod).To(Equal("default/a"))
	s.Expect(s.events.Events).To(Receive(Equal("Normal " + v1alpha1.ReasonRepartitioning + " Repartitioning GPU 0 of node n1 for nvidia.com/mig-2g.10gb")))
	s.Expect(s.events.Events).To(Receive(Equal("Warning " + v1alpha1.ReasonAutoscalerRaces + " GPU 0 of node n1 is repartitioned for pod default/a, and NodePool small may be scaled up for it too")))
	_, is = s.reconcile()
	s.Expect(is.Reason).To(Equal(v1alpha1.ReasonRepartitioning), "it is being made")
	writes := s.writes
	s.reconcile()
	s.Expect(s.writes).To(Equal(writes))
	s.Expect(s.events.Events).To(BeEmpty(), "the pod was told once")
	s.edit(func(of *v1alpha1.MIGOnDemand) { of.Mode = v1alpha1.OnDemandModeAdvise })
	s.reconcile()
	s.Expect(s.decided()).To(BeEmpty())
}

// observed says that the rollout has seen a policy as it is.
func (s *site) observed(policy string) *v1alpha1.GPUSharingPolicy {
	s.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	s.get(policy, p)
	p.Status.ObservedGeneration = p.Generation
	s.Expect(s.cluster.Client.Status().Update(s.t.Context(), p)).To(Succeed())
	return p
}

// outlives: what GPUs have on demand outlives their policy until they are released, or another policy says otherwise.
func outlives(s *site) {
	of := small()
	of.Mode = v1alpha1.OnDemandModeApply
	s.policy(of)
	s.waits("a", "1")
	p := s.observed("research")
	s.reconcile()
	s.Expect(s.cluster.Client.Delete(s.t.Context(), p)).To(Succeed())
	look := func() []v1alpha1.GPUDemand {
		_, err := s.controller.Reconcile(s.t.Context(), demand.Request{})
		s.Expect(err).NotTo(HaveOccurred())
		return s.decided()
	}
	s.Expect(look()).To(HaveLen(1))
	n := &v1alpha1.GPUNode{}
	s.get("n1", n)
	n.Spec.PolicyName = ""
	s.Expect(s.cluster.Client.Update(s.t.Context(), n)).To(Succeed())
	s.Expect(look()).To(BeEmpty())
}

func (s *site) decided() []v1alpha1.GPUDemand {
	s.t.Helper()
	n := &v1alpha1.GPUNode{}
	s.get("n1", n)
	return n.Status.Demand
}

func tooMany(s *site) {
	s.policy(small())
	s.waits("a", "1000000000000")
	s.waits("b", "9000000000000000000", "9000000000000000000") // more than an int64 can count
	_, is := s.reconcile()
	s.Expect(is.Reason).To(Equal(v1alpha1.ReasonNoDemand))
}

// growsOld: a pod goes before younger ones once it is old, so that what is reported changes though nothing else does.
func growsOld(s *site) {
	s.policy(small())
	s.waits("a", "3")
	result, err := s.controller.Reconcile(s.t.Context(), demand.Request{})
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(result.RequeueAfter).To(BeNumerically("~", pure.Aged, time.Minute))
	s.deletePods(s.t.Context())
	result, err = s.controller.Reconcile(s.t.Context(), demand.Request{})
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(result.RequeueAfter).To(BeZero())
}

// twoPolicies have GPUs on demand, and a pod waits that either could serve: one of them changes a GPU for it, first the one that can begin. Whose
// change is under way, or who has an idle instance, keeps the pod.
func twoPolicies(s *site) {
	of := small()
	of.Mode = v1alpha1.OnDemandModeApply
	s.policy(of)
	one, n := &v1alpha1.GPUSharingPolicy{}, &v1alpha1.GPUNode{}
	s.get("research", one)
	s.Expect(s.cluster.Client.Create(s.t.Context(), &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "teaching"}, Spec: one.Spec})).To(Succeed())
	s.get("n1", n)
	n.Status.Devices[0].UUID = "GPU-2"
	s.node("n2", "teaching", v1alpha1.GPUNodeStatus{Devices: n.Status.Devices, Conditions: n.Status.Conditions})
	s.waits("a", "1")
	for _, turn := range []struct {
		observes string
		decided  map[string]int
	}{
		{"", map[string]int{"n1": 0, "n2": 0}},
		{"teaching", map[string]int{"n1": 0, "n2": 1}},
		{"research", map[string]int{"n1": 0, "n2": 1}}, // it could begin now, and comes first
	} {
		if turn.observes != "" {
			s.observed(turn.observes)
		}
		for range 2 {
			s.reconcile()
		}
		for name, entries := range turn.decided {
			s.get(name, n)
			s.Expect(n.Status.Demand).To(HaveLen(entries), "%s of %v", name, turn)
		}
	}
	status, _ := s.reported()
	s.Expect(status.Pods).To(BeZero())
}

// nominated is a pod for which the scheduler has chosen the node and holds the instance, while a plugin of it permits or prepares the binding (a gang that is
// not complete, a volume: NominatedNodeNameForExpectation, on by default since Kubernetes 1.35). It binds whatever taint comes meanwhile.
func nominated(s *site) {
	of := small()
	of.Mode = v1alpha1.OnDemandModeApply
	s.policy(of)
	s.observed("research")
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "chosen"}}
	pod.Spec.Containers = []corev1.Container{{Name: "c", Image: "example.invalid/main", Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{"nvidia.com/mig-7g.40gb": resource.MustParse("1")},
	}}}
	s.Expect(s.cluster.Client.Create(s.t.Context(), pod)).To(Succeed())
	pod.Status.NominatedNodeName = "n1"
	s.Expect(s.cluster.Client.Status().Update(s.t.Context(), pod)).To(Succeed())
	s.waits("a", "1")
	_, is := s.reconcile()
	s.Expect(s.decided()).To(BeEmpty(), is.Message)
}
