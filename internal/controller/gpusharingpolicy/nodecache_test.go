// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/workqueue"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// reading is a controller that gathers three nodes with a GPUNode each, and what it reads.
type reading struct {
	*WithT
	*Controller

	t *testing.T

	lists, gets int
	fail        error  // of the next list of pods
	meanwhile   func() // pods are listed

	publisher  string // the account that may publish ResourceSlices
	asked      int    // how often the API server was asked whether one may
	unanswered error  // its answer
}

func newReading(t *testing.T) *reading {
	t.Helper()
	r := &reading{WithT: NewWithT(t), t: t}
	scheme := clientgoscheme.Scheme
	r.Expect(v1alpha1.AddToScheme(scheme)).To(Succeed())
	builder := fake.NewClientBuilder().WithScheme(scheme).WithIndex(&corev1.Pod{}, nodeNameField, nodeName)
	for _, name := range []string{"a", "b", "c"} {
		builder.WithObjects(
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}},
		)
	}
	c := interceptor.NewClient(builder.Build(), interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			review, is := o.(*authorizationv1.SubjectAccessReview)
			if !is {
				return c.Create(ctx, o, opts...)
			}
			r.asked++
			asks := review.Spec.ResourceAttributes
			publishes := asks.Group == "resource.k8s.io" && asks.Resource == "resourceslices" && asks.Verb == "create"
			review.Status.Allowed = publishes && asks.Namespace == "" && r.publisher == review.Spec.User
			return r.unanswered
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			switch list.(type) {
			case *corev1.NodeList, *v1alpha1.GPUNodeList:
				r.lists++
			case *corev1.PodList:
				if r.meanwhile != nil {
					r.meanwhile()
				}
				if err := r.fail; err != nil {
					r.fail = nil
					return err
				}
			}
			return c.List(ctx, list, opts...)
		},
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			r.gets++
			return c.Get(ctx, key, o, opts...)
		},
	})
	r.Controller = New(c, Options{Clock: clocktesting.NewFakeClock(time.Unix(1_800_000_000, 0))})
	r.changes.watched = true
	r.nodes()
	return r
}

// nodes are the nodes as the next reconcile decides on them, by name.
func (r *reading) nodes() map[string]cluster.Node {
	s, err := r.try()
	r.Expect(err).NotTo(HaveOccurred())
	nodes := map[string]cluster.Node{}
	for _, n := range s.snapshot.Nodes {
		nodes[n.Name] = n
	}
	return nodes
}

func (r *reading) try() (*seen, error) {
	r.lists, r.gets = 0, 0
	s := &seen{plugin: &pluginconfig.Observed{}}
	return s, r.gatherNodes(context.Background(), s)
}

// change changes a node as another controller does, and returns it as it was and as it is.
func (r *reading) change(name string, change func(*corev1.Node)) (before, after *corev1.Node) {
	ctx := context.Background()
	before = &corev1.Node{}
	r.Expect(r.client.Get(ctx, types.NamespacedName{Name: name}, before)).To(Succeed())
	after = before.DeepCopy()
	change(after)
	r.Expect(r.client.Update(ctx, after)).To(Succeed())
	return before, after
}

// report lets the watch report a change.
func (r *reading) report(before, after client.Object) {
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[Request]())
	defer queue.ShutDown()
	r.changes.watch(differs(nodeView)).Update(context.Background(), event.TypedUpdateEvent[client.Object]{ObjectOld: before, ObjectNew: after}, queue)
}

// show makes the cache show an object of a kind that the API server may not serve, as the cache keeps it.
func (r *reading) show(o runtime.Object, kind schema.GroupVersionKind) {
	ctx := context.Background()
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	r.Expect(err).NotTo(HaveOccurred())
	object := &unstructured.Unstructured{Object: content}
	object.SetGroupVersionKind(kind)
	cached, err := slimOthers(object)
	r.Expect(err).NotTo(HaveOccurred())
	slim, is := cached.(*unstructured.Unstructured)
	r.Expect(is).To(BeTrue())
	r.Expect(client.IgnoreNotFound(r.client.Delete(ctx, slim.DeepCopy()))).To(Succeed())
	slim.SetResourceVersion("")
	r.Expect(r.client.Create(ctx, slim)).To(Succeed())
}

// served is by which object NVIDIA's DRA driver shows on each node.
func (r *reading) served() map[string]string {
	by := map[string]string{}
	for name, n := range r.nodes() {
		by[name] = n.DRA
	}
	return by
}

func label(n *corev1.Node) { n.Labels = map[string]string{"zone": "1"} }

func TestOnlyChangedNodesAreReadAgain(t *testing.T) {
	r := newReading(t)
	before := r.nodes()
	r.Expect(before).To(HaveLen(3))
	r.Expect(r.lists + r.gets).To(BeZero())

	r.report(r.change("b", label))
	after := r.nodes()
	r.Expect(r.lists).To(BeZero())
	r.Expect(r.gets).To(Equal(2), "the Node and the GPUNode")
	r.Expect(after["b"].Labels).To(HaveKeyWithValue("zone", "1"))
	r.Expect(after["b"].Version).NotTo(Equal(before["b"].Version))
	r.Expect(after["a"]).To(Equal(before["a"]))
}

// A heartbeat changes no decision, but a write names the resource version.
func TestAHeartbeatIsNoOtherVersionOfTheNode(t *testing.T) {
	r := newReading(t)
	before := r.nodes()
	old, is := r.change("b", func(n *corev1.Node) {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, LastHeartbeatTime: metav1.Unix(1_800_000_001, 0)}}
	})
	r.report(old, is)
	r.Expect(r.nodes()["b"]).To(Equal(before["b"]))
	r.Expect(r.store.nodes["b"].ResourceVersion).To(And(Equal(is.ResourceVersion), Not(Equal(old.ResourceVersion))))
}

// The cache may show a write of ours before the watch reports it, and then the next reconcile decides on what was
// written.
func TestAWriteIsReadBackBeforeTheWatchReportsIt(t *testing.T) {
	r := newReading(t)
	executing := newReconciliation(r.Controller, &seen{nodes: r.store.nodes})
	value := "config"
	wrote, err := executing.writer.patchNode(t.Context(), action.PatchNode{Node: "b", Labels: map[string]*string{v1alpha1.LabelConfig: &value}})
	r.Expect(err).NotTo(HaveOccurred())
	r.Expect(wrote).To(BeTrue())
	r.Expect(r.nodes()["b"].Labels).To(HaveKeyWithValue(v1alpha1.LabelConfig, "config"))
}

func TestNodesComeAndGo(t *testing.T) {
	r := newReading(t)
	ctx := t.Context()
	r.Expect(r.client.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}})).To(Succeed())
	r.changes.note(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}}, true)
	added := metav1.ObjectMeta{Name: "aa"}
	r.Expect(r.client.Create(ctx, &corev1.Node{ObjectMeta: added})).To(Succeed())
	r.changes.note(&corev1.Node{ObjectMeta: added}, true)
	r.Expect(r.nodes()).To(HaveLen(2), "the new one has no GPUNode yet")

	r.Expect(r.client.Create(ctx, &v1alpha1.GPUNode{ObjectMeta: added})).To(Succeed())
	r.changes.note(&v1alpha1.GPUNode{ObjectMeta: added}, true)
	s, err := r.try()
	r.Expect(err).NotTo(HaveOccurred())
	var names []string
	for _, n := range s.snapshot.Nodes {
		names = append(names, n.Name)
	}
	r.Expect(names).To(Equal([]string{"a", "aa", "c"}))
}

func TestAnErrorLosesNoChange(t *testing.T) {
	r := newReading(t)
	r.report(r.change("b", label))
	r.fail = errors.New("the cache is away")
	_, err := r.try()
	r.Expect(err).To(MatchError(ContainSubstring("the cache is away")))
	r.Expect(r.nodes()["b"].Labels).To(HaveKeyWithValue("zone", "1"))
}

// NVIDIA's DRA driver allocates a claim before the pod starts, and older kubelets do not report who has GPUs by claims.
func TestPodsWithAGPUByAClaimAreKnown(t *testing.T) {
	r := newReading(t)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "batch", Name: "job", UID: "job"}, Spec: corev1.PodSpec{NodeName: "b"}}
	r.Expect(r.client.Create(t.Context(), pod)).To(Succeed())
	r.changes.note(pod, true)
	held := func() string { return r.nodes()["b"].Pods[0].Claim }
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "batch", Name: "one-gpu"}}
	store := func(driver, user string) {
		claim.Status = resourcev1.ResourceClaimStatus{Allocation: &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
			Results: []resourcev1.DeviceRequestAllocationResult{{Request: "gpu", Driver: driver, Pool: "b", Device: "gpu-0"}},
		}}}
		if user != "" {
			claim.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: user, UID: types.UID(user)}}
		}
		r.show(claim, resourcev1.SchemeGroupVersion.WithKind("ResourceClaim"))
	}
	store(dra.DriverName, "job")
	r.Expect(held()).To(BeEmpty(), "the API server does not serve the kind yet")
	kind := resourcev1.SchemeGroupVersion.WithKind("ResourceClaim")
	r.claims.served.Store(&kind)
	before := r.nodes()
	r.Expect(before["b"].Pods[0].Claim).To(Equal("batch/one-gpu"))
	store("network.example.com", "job")
	r.Expect(held()).To(BeEmpty(), "of another driver")
	store(dra.DriverName, "job")
	r.Expect(held()).To(Equal("batch/one-gpu"))
	store(dra.DriverName, "another")
	after := r.nodes()
	r.Expect(after["b"].Pods[0].Claim).To(BeEmpty(), "for another pod")
	r.Expect(after["b"].Version).NotTo(Equal(before["b"].Version))
	r.Expect(after["a"].Version).To(Equal(before["a"].Version))

	member := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "batch", Name: "member", UID: "member"}, Spec: corev1.PodSpec{
		NodeName: "b", SchedulingGroup: &corev1.PodSchedulingGroup{PodGroupName: new("gang")}, ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu"}},
	}}
	r.Expect(r.client.Create(t.Context(), member)).To(Succeed())
	r.changes.note(member, true)
	r.Expect(r.nodes()["b"].Pods).NotTo(ContainElement(HaveField("Claim", "batch/one-gpu")))
	claim.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang", UID: "gang"}}
	r.show(claim, resourcev1.SchemeGroupVersion.WithKind("ResourceClaim"))
	r.Expect(r.nodes()["b"].Pods).To(ContainElement(And(HaveField("Name", "member"), HaveField("Claim", "batch/one-gpu"))), "reserved for its PodGroup")
}

// The cache keeps of the DaemonSet of NVIDIA's DRA driver what tells its nodes, and of others nothing.
func TestNodesOfTheDaemonSetOfNVIDIAsDRADriverAreKnown(t *testing.T) {
	r := newReading(t)
	r.publisher = "system:serviceaccount:nvidia:default"
	r.report(r.change("b", label))
	store := func(name, component string, change func(*corev1.PodSpec)) {
		set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: name}}
		set.Spec.Template.Labels = map[string]string{cluster.DRALabels()[0]: component}
		set.Spec.Template.Spec.Containers = []corev1.Container{{Name: "compute-domains", Image: "image"}, {Name: "gpus", Image: "image"}}
		change(&set.Spec.Template.Spec)
		cached, err := slimDaemonSet(set)
		r.Expect(err).NotTo(HaveOccurred())
		slim, is := cached.(*appsv1.DaemonSet)
		r.Expect(is).To(BeTrue())
		r.Expect(client.IgnoreNotFound(r.client.Delete(t.Context(), slim.DeepCopy()))).To(Succeed())
		slim.ResourceVersion = ""
		r.Expect(r.client.Create(t.Context(), slim)).To(Succeed())
	}
	inZone := func(pod *corev1.PodSpec) { pod.NodeSelector = map[string]string{"zone": "1"} }
	store("controller", "controller", inZone)
	r.Expect(r.served()).To(Equal(map[string]string{"a": "", "b": "", "c": ""}), "another one")
	store("plugin", "kubelet-plugin", inZone)
	r.Expect(r.served()).To(Equal(map[string]string{"a": "", "b": "DaemonSet nvidia/plugin", "c": ""}))
	store("plugin", "kubelet-plugin", func(pod *corev1.PodSpec) {
		pod.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: "zone", Operator: corev1.NodeSelectorOpDoesNotExist},
			}}},
		}}}
	})
	r.Expect(r.served()).To(Equal(map[string]string{"a": "DaemonSet nvidia/plugin", "b": "", "c": "DaemonSet nvidia/plugin"}))
	before := r.nodes()
	r.Expect(before["b"].DynamicMIG).To(BeFalse())
	gates := func(value string) func(*corev1.PodSpec) {
		return func(pod *corev1.PodSpec) {
			inZone(pod)
			pod.Containers[1].Env = []corev1.EnvVar{{Name: "FEATURE_GATES", Value: value}}
		}
	}
	store("plugin", "kubelet-plugin", gates("ContextualLogging=true, DynamicMIG=True"))
	after := r.nodes()
	r.Expect(after["b"].DynamicMIG).To(BeTrue(), "also while no pod tells")
	r.Expect(after["b"].Version).NotTo(Equal(before["b"].Version))
	r.Expect(after["a"].DynamicMIG).To(BeFalse())
	r.report(r.change("b", label))
	r.Expect(r.nodes()["b"].DynamicMIG).To(BeTrue())
	store("plugin", "kubelet-plugin", gates("DynamicMIG=false"))
	r.Expect(r.nodes()["b"].DynamicMIG).To(BeFalse())
	store("plugin", "kubelet-plugin", func(pod *corev1.PodSpec) { pod.Containers = pod.Containers[:1] })
	r.Expect(r.served()).To(Equal(map[string]string{"a": "", "b": "", "c": ""}), "its GPUs are turned off")
}

// NVIDIA's DRA driver publishes the GPUs of a node in ResourceSlices, which outlive a restart of its pod.
func TestNodesWithAResourceSliceOfNVIDIAsDRADriverAreKnown(t *testing.T) {
	r := newReading(t)
	kind := resourcev1.SchemeGroupVersion.WithKind("ResourceSlice")
	publish := func(name, driver string, node *string) {
		r.show(&resourcev1.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       resourcev1.ResourceSliceSpec{Driver: driver, NodeName: node, Pool: resourcev1.ResourcePool{Name: "pool"}},
		}, kind)
	}
	none := map[string]string{"a": "", "b": "", "c": ""}
	publish("b-gpus", dra.DriverName, new("b"))
	r.Expect(r.served()).To(Equal(none), "the API server does not serve the kind yet")
	r.slices.served.Store(&kind)
	before := r.nodes()
	r.Expect(r.served()).To(Equal(map[string]string{"a": "", "b": "ResourceSlice b-gpus", "c": ""}))
	publish("a-network", "network.example.com", new("a"))
	publish("shared", dra.DriverName, nil)
	r.Expect(r.served()).To(Equal(map[string]string{"a": "", "b": "ResourceSlice b-gpus", "c": ""}),
		"of another driver, and of GPUs that are on no node")
	publish("b-gpus", "network.example.com", new("b"))
	after := r.nodes()
	r.Expect(r.served()).To(Equal(none))
	r.Expect(after["b"].Version).NotTo(Equal(before["b"].Version))
	r.Expect(after["a"].Version).To(Equal(before["a"].Version))
}

// A kind may get known in the middle of a reading, after its objects were not read: a decision on it would take claims that are there for
// none.
func TestAReadingWithoutAKindThatGetsKnownMeanwhileIsNotDecidedOn(t *testing.T) {
	r := newReading(t)
	r.publisher = "system:serviceaccount:nvidia:default"
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: "plugin"}}
	set.Spec.Template.Labels = map[string]string{cluster.DRALabels()[0]: "kubelet-plugin"}
	set.Spec.Template.Spec.Containers = []corev1.Container{{Name: "compute-domains", Image: "image"}, {Name: "gpus", Image: "image"}}
	r.Expect(r.client.Create(t.Context(), set)).To(Succeed())
	kind := resourcev1.SchemeGroupVersion.WithKind("ResourceClaim")
	r.claims.awaited.Store(true)
	r.meanwhile = func() { r.claims.served.Store(&kind); r.claims.awaited.Store(false) }
	r.report(r.change("b", label))
	gather := func() error {
		return r.gatherNodes(t.Context(), &seen{plugin: &pluginconfig.Observed{}, snapshot: cluster.Snapshot{Now: r.Clock.Now()}})
	}
	r.Expect(gather()).To(MatchError(pluginconfig.ErrNotSynced))
	r.Expect(r.claims.awaited.Load()).To(BeFalse())
	r.Expect(gather()).To(Succeed())
}

// The cache keeps of a NodePool of Karpenter which startup taints it lists.
func TestTheStartupTaintsOfNodePoolsAreKnown(t *testing.T) {
	r := newReading(t)
	kind := schema.GroupVersionKind{Group: "karpenter.sh", Version: "v1", Kind: "NodePool"}
	store := func(name string, taints ...any) {
		pool := &unstructured.Unstructured{Object: map[string]any{
			"spec":   map[string]any{"template": map[string]any{"spec": map[string]any{"startupTaints": taints}}, "weight": int64(1)},
			"status": map[string]any{"resources": map[string]any{"cpu": "1"}},
		}}
		pool.SetName(name)
		r.show(pool, kind)
	}
	store("gpu", map[string]any{"key": v1alpha1.TaintStartup, "effect": "NoSchedule"}, map[string]any{"key": "example.com/other", "effect": "NoExecute"})
	store("plain")
	pools, err := r.gatherNodePools(t.Context())
	r.Expect(err).NotTo(HaveOccurred())
	r.Expect(pools).To(BeEmpty(), "the API server does not serve the kind yet")
	r.nodePools.served.Store(&kind)
	pools, err = r.gatherNodePools(t.Context())
	r.Expect(err).NotTo(HaveOccurred())
	r.Expect(pools).To(Equal(map[string]cluster.NodePool{
		"gpu": {StartupTaints: []string{v1alpha1.TaintStartup, "example.com/other"}}, "plain": {},
	}))
}

// The status names a refusal only as long as it counts, also if nothing else happens.
func TestARefusalIsForgottenInTime(t *testing.T) {
	r := newReading(t)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "batch", Name: "job", UID: "job"}, Spec: corev1.PodSpec{NodeName: "b"}}
	r.Expect(r.client.Create(t.Context(), pod)).To(Succeed())
	r.changes.note(pod, true)
	now := r.Clock.Now()
	r.Expect(r.refusals.note("job", "b", "a budget", now)).To(BeTrue())
	r.Expect(r.nodes()["b"].Pods[0].Refused).To(Equal("a budget"))
	executing := newReconciliation(r.Controller, &seen{snapshot: cluster.Snapshot{Now: now.Add(20 * time.Second)}, plugin: &pluginconfig.Observed{}})
	r.Expect(executing.again(0)).To(Equal(40 * time.Second))
	r.Clock = clocktesting.NewFakePassiveClock(now.Add(time.Minute))
	s := &seen{plugin: &pluginconfig.Observed{}, snapshot: cluster.Snapshot{Now: r.Clock.Now()}}
	r.Expect(r.gatherNodes(t.Context(), s)).To(Succeed())
	r.Expect(s.snapshot.Nodes[1].Pods[0].Refused).To(BeEmpty())
	executing.snapshot.Now = r.Clock.Now()
	r.Expect(executing.again(0)).To(BeZero())
}

func TestTheControllerLeadsSinceItsFirstReconcile(t *testing.T) {
	r := newReading(t)
	began, _ := r.times()
	r.Clock = clocktesting.NewFakePassiveClock(began.Add(time.Hour))
	now, since := r.times()
	r.Expect([]time.Time{now, since}).To(Equal([]time.Time{began.Add(time.Hour), began}))
	_, _ = r.wait(t.Context(), pluginconfig.ErrNotSynced, time.Second)
	for range 2 {
		now = now.Add(20 * time.Minute)
		r.Clock = clocktesting.NewFakePassiveClock(now)
		_, since = r.times()
		r.Expect(since).To(Equal(now), "it could not decide, so what ended meanwhile was not seen")
	}
}

// NVIDIA's chart turns the GPUs of its DRA driver off by leaving a container out.
func TestTheDRADriverWhoseGPUsAreTurnedOffWakesTheController(t *testing.T) {
	offers := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "dra", Generation: 1}}
	offers.Spec.Template.Labels = map[string]string{cluster.DRALabels()[0]: "kubelet-plugin"}
	offers.Spec.Template.Spec.Containers = []corev1.Container{{Name: "gpus"}}
	off := offers.DeepCopy()
	off.Generation, off.Spec.Template.Spec.Containers = 2, []corev1.Container{{Name: "compute-domains"}}
	matters := differs(draDaemonSetView)
	NewWithT(t).Expect(matters.Update(event.UpdateEvent{ObjectOld: offers, ObjectNew: off})).To(BeTrue())
	other := off.DeepCopy()
	other.Generation = 3
	NewWithT(t).Expect(matters.Update(event.UpdateEvent{ObjectOld: off, ObjectNew: other})).To(BeFalse())
}

func TestPendingPodsAreReadAgainWhenOneChanges(t *testing.T) {
	r := newReading(t)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "batch", Name: "job"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
		Name: "main", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{cluster.NvidiaDomain + "gpu": resource.MustParse("1")}},
	}}}}
	r.Expect(r.client.Create(t.Context(), pod)).To(Succeed())
	r.changes.note(pod, true)
	s, err := r.try()
	r.Expect(err).NotTo(HaveOccurred())
	r.Expect(s.snapshot.Unscheduled).To(HaveLen(1))
	version := s.snapshot.UnscheduledVersion

	bound := pod.DeepCopy()
	bound.Spec.NodeName = "c"
	r.Expect(r.client.Update(t.Context(), bound)).To(Succeed())
	r.report(pod, bound)
	s, err = r.try()
	r.Expect(err).NotTo(HaveOccurred())
	r.Expect(s.snapshot.Unscheduled).To(BeEmpty())
	r.Expect(s.snapshot.UnscheduledVersion).NotTo(Equal(version))
	r.Expect(s.snapshot.Nodes[2].Pods).To(HaveLen(1), "the pod is on its node")
}

// TestEachPodOfANodeThatIsDueToBeRebootedWakesTheController, because the reboot may wait for it. Elsewhere only those
// do that a decision depends on.
func TestEachPodOfANodeThatIsDueToBeRebootedWakesTheController(t *testing.T) {
	g, ctx := NewWithT(t), t.Context()
	c := New(nil, Options{PluginConfig: pluginconfig.New(nil, nil, nil, pluginconfig.StandAlone{})})
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[Request]())
	defer queue.ShutDown()
	wakes := 0
	counting := wakeCounter{TypedRateLimitingInterface: queue, wakes: &wakes}
	pods, nodes := c.changes.watch(differs(c.podView)), c.changes.watch(differs(gpuNodeView))
	pod := func(node string) *corev1.Pod { return &corev1.Pod{Spec: corev1.PodSpec{NodeName: node}} }
	ending, ready, daemon := pod("a"), pod("a"), pod("a")
	ending.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	ready.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	daemon.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Controller: new(true)}}
	woken := func(node string) int {
		wakes = 0
		pods.Create(ctx, event.TypedCreateEvent[client.Object]{Object: pod(node)}, counting)
		ending.Spec.NodeName, ready.Spec.NodeName, daemon.Spec.NodeName = node, node, node
		pods.Update(ctx, event.TypedUpdateEvent[client.Object]{ObjectOld: pod(node), ObjectNew: ending}, counting)
		before := wakes
		pods.Update(ctx, event.TypedUpdateEvent[client.Object]{ObjectOld: pod(node), ObjectNew: pod(node)}, counting)
		pods.Update(ctx, event.TypedUpdateEvent[client.Object]{ObjectOld: pod(node), ObjectNew: ready}, counting)
		pods.Create(ctx, event.TypedCreateEvent[client.Object]{Object: daemon}, counting)
		g.Expect(wakes).To(Equal(before), "no drain waits for what is the same, for a readiness, or for a pod of a DaemonSet")
		pods.Delete(ctx, event.TypedDeleteEvent[client.Object]{Object: pod(node)}, counting)
		return wakes
	}
	due, done := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	due.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionRebootRequired, Status: metav1.ConditionTrue}}
	g.Expect(woken("a")).To(BeZero())
	nodes.Update(ctx, event.TypedUpdateEvent[client.Object]{ObjectOld: done, ObjectNew: due}, counting)
	g.Expect(woken("a")).To(Equal(3))
	g.Expect(woken("b")).To(BeZero())
	nodes.Update(ctx, event.TypedUpdateEvent[client.Object]{ObjectOld: due, ObjectNew: done}, counting)
	g.Expect(woken("a")).To(BeZero(), "the node was rebooted")
	nodes.Create(ctx, event.TypedCreateEvent[client.Object]{Object: due}, counting)
	g.Expect(woken("a")).To(Equal(3), "a controller that starts anew")
	nodes.Delete(ctx, event.TypedDeleteEvent[client.Object]{Object: due}, counting)
	g.Expect(woken("a")).To(BeZero(), "the node is gone")
}

// wakeCounter counts how often the controller is woken.
type wakeCounter struct {
	workqueue.TypedRateLimitingInterface[Request]
	wakes *int
}

func (w wakeCounter) AddAfter(Request, time.Duration) { *w.wakes++ }

// A node whose agent reports nothing must not look as if it did: a pod of a tenant has whatever label it likes.
func TestAPodOfATenantThatLooksLikeAnAgentIsNone(t *testing.T) {
	r := newReading(t)
	r.Namespace = "own"
	for _, namespace := range []string{"tenant", "own"} {
		r.Expect(r.client.Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "agent", Labels: map[string]string{cluster.LabelName: cluster.AgentName}},
			Spec:       corev1.PodSpec{NodeName: "a"},
			Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		})).To(Succeed())
		r.store.complete = false // all is read again
		r.Expect(r.nodes()["a"].AgentReady).To(Equal(namespace == "own"))
	}
}
