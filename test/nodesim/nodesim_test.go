// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

const namespace = "gpu-operator"

// world is one simulated node in a cluster with NVIDIA's operator.
type world struct {
	*WithT
	ctx      context.Context //nolint:containedctx // of the test
	c        client.Client
	clock    *clocktesting.FakeClock
	hardware *sim.Hardware
	node     *nodesim.Node
	operator *nodesim.GPUOperator
	name     string
}

func newWorld(t *testing.T, cluster *env.Cluster, name string, models ...sim.Model) *world {
	t.Helper()
	w := &world{
		WithT: NewWithT(t), ctx: t.Context(), c: cluster.Client, name: name,
		clock: clocktesting.NewFakeClock(time.Now()), hardware: sim.New(models...),
	}
	w.node = nodesim.New(nodesim.Options{
		Name: name, Client: w.c, Clock: w.clock, Inventory: w.hardware.Observe, Tell: t.Logf, StatusPeriod: time.Second,
	})
	w.operator = &nodesim.GPUOperator{Client: w.c, Namespace: namespace, Clock: w.clock, Tell: t.Logf}
	w.reconcile()
	return w
}

// reconcile lets everybody do what is due, and what follows from it.
func (w *world) reconcile() {
	for range 4 {
		w.Expect(w.operator.Reconcile(w.ctx)).To(Succeed())
		w.Expect(w.node.Reconcile(w.ctx)).To(Succeed())
		w.clock.Step(time.Second)
	}
}

func (w *world) allocatable() map[string]int64 {
	node := &corev1.Node{}
	w.Expect(w.c.Get(w.ctx, client.ObjectKey{Name: w.name}, node)).To(Succeed())
	all := map[string]int64{}
	for name, q := range node.Status.Allocatable {
		if len(name) > 11 && name[:11] == "nvidia.com/" {
			all[string(name)] = q.Value()
		}
	}
	return all
}

// label sets a label of the node; an empty value removes it.
func (w *world) label(key, value string) {
	labels := map[string]*string{key: &value}
	if value == "" {
		labels[key] = nil
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	w.Expect(err).NotTo(HaveOccurred())
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.name}}
	w.Expect(w.c.Patch(w.ctx, node, client.RawPatch("application/merge-patch+json", body))).To(Succeed())
}

func (w *world) labels() map[string]string {
	node := &corev1.Node{}
	w.Expect(w.c.Get(w.ctx, client.ObjectKey{Name: w.name}, node)).To(Succeed())
	return node.Labels
}

// pod finds the pod of a DaemonSet on the node, if there is one.
func (w *world) pod(app string) *corev1.Pod {
	pods := &corev1.PodList{}
	w.Expect(w.c.List(w.ctx, pods, client.MatchingLabels{"app": app}, client.MatchingFields{"spec.nodeName": w.name})).To(Succeed())
	if len(pods.Items) == 0 {
		return nil
	}
	return &pods.Items[0]
}

func (w *world) configMap(data map[string]string) {
	configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "shared"}, Data: data}
	w.Expect(client.IgnoreAlreadyExists(w.c.Create(w.ctx, configMap))).To(Succeed())
	w.Expect(w.c.Update(w.ctx, configMap)).To(Succeed())
}

func clusterPolicy(spec map[string]any) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	u.SetAPIVersion("nvidia.com/v1")
	u.SetKind("ClusterPolicy")
	u.SetName("cluster-policy")
	return u
}

const plugin = "nvidia-device-plugin-daemonset"

func slicing(replicas int) string {
	return fmt.Sprintf("version: v1\nsharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: %d}]}}", replicas)
}

func TestNode(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t, env.WithNVIDIA())
	c := cluster.Client
	g.Expect(c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	policy := clusterPolicy(map[string]any{"mig": map[string]any{"strategy": "single"}})
	g.Expect(c.Create(t.Context(), policy)).To(Succeed())

	t.Run("reports a new ClusterPolicy again and again", func(t *testing.T) { reports(t, cluster, policy) })
	t.Run("follows one ClusterPolicy", func(t *testing.T) { followsOne(t, cluster, policy) })
	t.Run("has its labels set by events", func(t *testing.T) { labelsByEvents(t, newWorld(t, cluster, "events", sim.T4)) })
	t.Run("deletes the ResourceSlices of the node once, when its kubelet starts", func(t *testing.T) {
		publish := func(node string) *resourcev1.ResourceSlice {
			slice := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-slice"}, Spec: resourcev1.ResourceSliceSpec{
				Driver: "gpu.nvidia.com", NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, ResourceSliceCount: 1},
			}}
			g.Expect(c.Create(t.Context(), slice)).To(Succeed())
			return slice
		}
		publish("starts")
		others := publish("another")
		w := newWorld(t, cluster, "starts", sim.T4)
		later := publish("starts")
		w.reconcile()
		for _, kept := range []*resourcev1.ResourceSlice{others, later} {
			w.Expect(c.Get(t.Context(), client.ObjectKeyFromObject(kept), kept)).To(Succeed())
		}
	})
	t.Run("is as the GPU Operator leaves it", func(t *testing.T) {
		w := newWorld(t, cluster, "fresh", sim.T4, sim.T4)
		w.Expect(w.allocatable()).To(Equal(map[string]int64{"nvidia.com/gpu": 2}))
		w.Expect(w.pod("nvidia-mig-manager")).To(BeNil(), "its GPUs cannot be split")

		w.label("nvidia.com/gpu.deploy.device-plugin", "paused-for-mig-change")
		w.reconcile()
		w.Expect(w.pod(plugin)).To(BeNil(), "its label stops it")
		w.Expect(w.allocatable()).To(Equal(map[string]int64{"nvidia.com/gpu": 0}))

		w.label("nvidia.com/gpu.deploy.device-plugin", "true")
		w.reconcile()
		w.Expect(w.allocatable()).To(Equal(map[string]int64{"nvidia.com/gpu": 2}))
	})

	w := newWorld(t, cluster, "node", sim.A100)
	base := policy.DeepCopy()
	g.Expect(unstructured.SetNestedField(policy.Object, "shared", "spec", "devicePlugin", "config", "name")).To(Succeed())
	unstructured.RemoveNestedField(policy.Object, "spec", "mig", "strategy")
	g.Expect(c.Patch(t.Context(), policy, client.MergeFrom(base))).To(Succeed())
	w.reconcile()
	g.Expect(w.pod(plugin).Status.Phase).To(Equal(corev1.PodPending), "the ConfigMap that it mounts does not exist")
	w.configMap(map[string]string{"three": slicing(3)})
	w.reconcile()
	g.Expect(w.allocatable()).To(HaveKeyWithValue("nvidia.com/gpu", int64(1)), "no key is selected")

	t.Run("shows what its label selects", func(*testing.T) {
		w.label("nvidia.com/device-plugin.config", "three")
		w.reconcile()
		w.Expect(w.allocatable()).To(HaveKeyWithValue("nvidia.com/gpu", int64(3)))
	})
	t.Run("keeps what it had while the key is not visible, until a sync is triggered", func(*testing.T) {
		w.configMap(map[string]string{"three": slicing(3), "five": slicing(5)})
		w.label("nvidia.com/device-plugin.config", "five")
		w.reconcile()
		w.Expect(w.allocatable()).To(HaveKeyWithValue("nvidia.com/gpu", int64(3)))
		pod := w.pod(plugin)
		w.Expect(pod.Status.ContainerStatuses[0].RestartCount).To(BeNumerically(">", 0), "the config-manager crashes")

		base := pod.DeepCopy()
		pod.Annotations = map[string]string{"any": "change"}
		w.Expect(c.Patch(w.ctx, pod, client.MergeFrom(base))).To(Succeed())
		w.reconcile()
		w.Expect(w.allocatable()).To(HaveKeyWithValue("nvidia.com/gpu", int64(3)), "it has ended twice, and is not started again yet")
		w.clock.Step(10 * time.Second)
		w.reconcile()
		w.Expect(w.allocatable()).To(HaveKeyWithValue("nvidia.com/gpu", int64(5)))
	})
	t.Run("does not read the same key again", func(*testing.T) {
		w.configMap(map[string]string{"five": slicing(7)})
		w.clock.Step(time.Hour)
		w.reconcile()
		w.Expect(w.allocatable()).To(HaveKeyWithValue("nvidia.com/gpu", int64(5)))
	})
	t.Run("allocates replicas, tells who holds them, and refuses two at once", func(t *testing.T) { allocates(t, w) })
	t.Run("loses its GPUs to a configuration that the plugin refuses", func(*testing.T) {
		w.configMap(map[string]string{"bad": "version: v1\nflags: {migStrategy: double}"})
		w.clock.Step(time.Hour)
		w.reconcile()
		w.label("nvidia.com/device-plugin.config", "bad")
		w.clock.Step(5 * time.Minute) // its config-manager has ended, since the key that was selected is gone
		w.reconcile()
		w.Expect(w.allocatable()).To(HaveKeyWithValue("nvidia.com/gpu", int64(0)))
		w.Expect(w.pod(plugin).Status.ContainerStatuses[0].State.Waiting.Message).To(ContainSubstring("unknown MIG strategy: double"))
	})
	t.Run("starts a container that ends again and again after 0, 10, 20, 40, 80, 160 and then 300 seconds", func(*testing.T) {
		var starts []int
		w.Expect(c.Delete(w.ctx, w.pod(plugin))).To(Succeed(), "a new pod has no past")
		for known, at := int32(0), -10; at <= 920; at += 10 {
			w.Expect(w.node.Reconcile(w.ctx)).To(Succeed())
			w.Expect(w.node.Reconcile(w.ctx)).To(Succeed())
			if pod := w.pod(plugin); pod != nil && len(pod.Status.ContainerStatuses) > 0 && pod.Status.ContainerStatuses[0].RestartCount > known {
				known = pod.Status.ContainerStatuses[0].RestartCount
				starts = append(starts, at)
			}
			w.clock.Step(10 * time.Second)
		}
		w.Expect(starts).To(Equal([]int{0, 10, 30, 70, 150, 310, 610, 910}))
	})
}

// reports looks at what the GPU Operator writes of a new ClusterPolicy, and then deletes it and creates it again.
func reports(t *testing.T, cluster *env.Cluster, policy *unstructured.Unstructured) {
	t.Helper()
	w := &world{WithT: NewWithT(t), ctx: t.Context(), c: cluster.Client, clock: clocktesting.NewFakeClock(time.Now())}
	w.operator = &nodesim.GPUOperator{Client: w.c, Namespace: namespace, Clock: w.clock, Tell: t.Logf}
	reconcileOnce := func() (state, version string) {
		w.Expect(w.operator.Reconcile(w.ctx)).To(Succeed())
		w.Expect(w.c.Get(w.ctx, client.ObjectKeyFromObject(policy), policy)).To(Succeed())
		state, _, _ = unstructured.NestedString(policy.Object, "status", "state")
		return state, policy.GetResourceVersion()
	}
	for range 2 {
		state, first := reconcileOnce()
		w.Expect(state).To(Equal("notReady"))
		state, second := reconcileOnce()
		w.Expect(state).To(Equal("ready"))
		w.Expect(second).NotTo(Equal(first))
		_, third := reconcileOnce()
		w.Expect(third).To(Equal(second), "and then no more")

		w.Expect(w.c.Delete(w.ctx, policy)).To(Succeed())
		w.Expect(w.operator.Reconcile(w.ctx)).To(Succeed())
		set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: plugin}}
		w.Expect(client.IgnoreNotFound(w.c.Get(w.ctx, client.ObjectKeyFromObject(set), set))).To(Succeed())
		w.Expect(set.UID).To(BeEmpty(), "NVIDIA's DaemonSets go with it")
		policy.SetResourceVersion("")
		policy.SetUID("")
		w.Expect(w.c.Create(w.ctx, policy)).To(Succeed())
	}
}

// followsOne looks at which of several ClusterPolicies counts, and at what a GPUCluster beside them does.
func followsOne(t *testing.T, cluster *env.Cluster, policy *unstructured.Unstructured) {
	t.Helper()
	w := &world{WithT: NewWithT(t), ctx: t.Context(), c: cluster.Client, clock: clocktesting.NewFakeClock(time.Now())}
	w.operator = &nodesim.GPUOperator{Client: w.c, Namespace: namespace, Clock: w.clock, Tell: t.Logf}
	second := policy.DeepCopy()
	second.SetName("a-second")
	second.SetResourceVersion("")
	second.SetUID("")
	unstructured.RemoveNestedField(second.Object, "status")
	w.Eventually(func() time.Time { return time.Now().Truncate(time.Second) }, "10s", "50ms").
		Should(BeTemporally(">", policy.GetCreationTimestamp().Time), "creation times are in seconds")
	w.Expect(w.c.Create(w.ctx, second)).To(Succeed())
	defer func() { w.Expect(w.c.Delete(w.ctx, second)).To(Succeed()) }()
	state := func(o *unstructured.Unstructured) string {
		w.Expect(w.c.Get(w.ctx, client.ObjectKeyFromObject(o), o)).To(Succeed())
		says, _, _ := unstructured.NestedString(o.Object, "status", "state")
		return says
	}
	for first, follows := range map[string][]string{"": {"ready", "ignored"}, "a-second": {"ignored", "ready"}} {
		w.operator.First = first
		for range 3 {
			w.Expect(w.operator.Reconcile(w.ctx)).To(Succeed())
		}
		w.Expect([]string{state(policy), state(second)}).To(Equal(follows), first)
	}

	both := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"draDriver": map[string]any{"version": "v0.5.0"}}}}
	both.SetAPIVersion("nvidia.com/v1alpha1")
	both.SetKind("GPUCluster")
	both.SetName("gpu-cluster")
	w.Expect(w.c.Create(w.ctx, both)).To(Succeed())
	defer func() { w.Expect(w.c.Delete(w.ctx, both)).To(Succeed()) }()
	dra := &nodesim.GPUCluster{Client: w.c, Namespace: namespace}
	w.Expect(dra.Reconcile(w.ctx)).To(Succeed())
	w.Expect(state(both)).To(Equal("notReady"))
	w.Expect(both.Object["status"]).To(HaveKeyWithValue("conditions", ContainElement(HaveKeyWithValue("reason", "PrerequisiteNotMet"))))
	set := &appsv1.DaemonSet{}
	w.Expect(apierrors.IsNotFound(w.c.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: "nvidia-dra-driver-kubelet-plugin"}, set))).To(BeTrue())
	w.Expect(w.c.Get(w.ctx, client.ObjectKey{Namespace: namespace, Name: plugin}, set)).To(Succeed())
	before := set.ResourceVersion
	w.Expect(unstructured.SetNestedField(second.Object, "mixed", "spec", "mig", "strategy")).To(Succeed())
	w.Expect(w.c.Update(w.ctx, second)).To(Succeed())
	w.Expect(w.operator.Reconcile(w.ctx)).To(Succeed())
	w.Expect(w.c.Get(w.ctx, client.ObjectKeyFromObject(set), set)).To(Succeed())
	w.Expect(set.ResourceVersion).To(Equal(before), "no ClusterPolicy is followed any more")
}

// labelsByEvents: the GPU Operator sets a label again that a user has removed only when something else happens, and
// removes one at once that a user sets on a node which has opted out.
func labelsByEvents(t *testing.T, w *world) {
	t.Helper()
	const deploy = "nvidia.com/gpu.deploy.device-plugin"
	w.reconcile()
	w.Expect(w.labels()).To(HaveKeyWithValue(deploy, "true"))
	w.label(deploy, "")
	w.reconcile()
	w.Expect(w.labels()).NotTo(HaveKey(deploy))
	w.label("nvidia.com/gpu.deploy.operands", "false")
	w.label("nvidia.com/gpu.deploy.client", "true")
	w.reconcile()
	w.Expect(w.labels()).NotTo(HaveKey("nvidia.com/gpu.deploy.client"))
	w.label("nvidia.com/gpu.deploy.operands", "")
	w.reconcile()
	w.Expect(w.labels()).To(And(HaveKeyWithValue(deploy, "true"), HaveKeyWithValue("nvidia.com/gpu.deploy.client", "true")))
}

func allocates(t *testing.T, w *world) {
	t.Helper()
	workload := func(name string, count int64) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.PodSpec{NodeName: w.name, Containers: []corev1.Container{{
				Name: "cuda", Image: "example.invalid/cuda", Resources: corev1.ResourceRequirements{
					Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(count, resource.DecimalSI)},
				},
			}}},
		}
	}
	for _, p := range []*corev1.Pod{workload("one", 1), workload("two", 2)} {
		w.Expect(w.c.Create(w.ctx, p)).To(Succeed())
	}
	w.reconcile()
	refused := &corev1.Pod{}
	w.Expect(w.c.Get(w.ctx, client.ObjectKey{Namespace: "default", Name: "two"}, refused)).To(Succeed())
	w.Expect(refused.Status.Reason).To(Equal("UnexpectedAdmissionError"))
	w.Expect(refused.Status.Message).To(ContainSubstring("maximum request size for shared resources is 1; found 2"))

	socket := filepath.Join(t.TempDir(), "kubelet.sock")
	w.Expect(w.node.ServePodResources(w.ctx, socket)).To(Succeed())
	connection, err := grpc.NewClient("passthrough:///"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}))
	w.Expect(err).NotTo(HaveOccurred())
	defer connection.Close() //nolint:errcheck // the test is over
	list, err := podresourcesv1.NewPodResourcesListerClient(connection).List(w.ctx, &podresourcesv1.ListPodResourcesRequest{})
	w.Expect(err).NotTo(HaveOccurred())
	held := map[string]string{}
	for _, p := range list.PodResources {
		for _, container := range p.Containers {
			for _, d := range container.Devices {
				held[p.Name] = d.DeviceIds[0]
			}
		}
	}
	w.Expect(held).To(HaveLen(1))
	w.Expect(held["one"]).To(MatchRegexp(`^GPU-.*::[0-4]$`))

	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one"}}
	w.Expect(w.c.Delete(w.ctx, pod)).To(Succeed())
	w.reconcile()
	w.Expect(w.c.Get(w.ctx, client.ObjectKeyFromObject(pod), pod)).NotTo(Succeed(), "the kubelet lets go of a deleted pod")
}
