// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpunode"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpusharingpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	mpsfake "github.com/gpusharing/gpu-sharing-operator/test/mps/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

const (
	ownNamespace = "gpu-sharing-operator"
	nvidiaSpace  = "gpu-operator"
	clusterName  = "cluster-policy"
)

// scenario is a cluster in miniature: the API server is real, and so are controller and agents; kubelet, NVIDIA's
// programs and GPUs are simulated. Everything happens in steps that the test makes, on one clock.
type scenario struct {
	*WithT
	t        *testing.T
	client   client.WithWatch // an administrator's
	acts     client.WithWatch // whose rights the controller has
	clock    *clocktesting.FakeClock
	operator *nodesim.GPUOperator
	nodes    []*machine
	events   *events.FakeRecorder
	uncached client.Reader

	writes []string
	fail   func(write string) error
	agent  func(node string) client.Client // whose rights an agent has; nil: an administrator's
	noMPS  bool                            // no MPS pod runs, so agents that are to share by MPS fail
	boots  host.Rebooter                   // of the agents; nil: they must not reboot their nodes
	doubt  bool                            // writes are carried out, and their answers are lost
}

// machine is a node with its agent.
type machine struct {
	name     string
	hardware *sim.Hardware
	node     *nodesim.Node
	agent    *agent.Controller
}

// newScenario is a scenario in which the controller has the rights that it is installed with, and the limits of its
// admission policy.
func newScenario(t *testing.T, cluster *env.Cluster) *scenario {
	t.Helper()
	s := newOpenScenario(t, cluster)
	s.acts = s.limited(cluster)
	t.Cleanup(func() { s.Expect(cluster.Denied(context.Background(), env.ControllerWrites)).To(BeZero()) })
	return s
}

// newOpenScenario starts with an empty cluster and a ClusterPolicy as NVIDIA's chart installs it. The controller has
// every right.
func newOpenScenario(t *testing.T, cluster *env.Cluster) *scenario {
	t.Helper()
	s := &scenario{
		WithT: NewWithT(t), t: t, client: cluster.Client, acts: cluster.Client, uncached: cluster.Client,
		clock: clocktesting.NewFakeClock(time.Now()), events: events.NewFakeRecorder(1000),
	}
	s.operator = &nodesim.GPUOperator{Client: s.client, Namespace: nvidiaSpace, Clock: s.clock, Tell: t.Logf}
	for _, name := range []string{ownNamespace, nvidiaSpace} {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		s.Expect(client.IgnoreAlreadyExists(s.client.Create(s.ctx(), namespace))).To(Succeed())
	}
	s.apply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy}, spec: {devicePlugin: {enabled: true}, mig: {strategy: single}}}")
	t.Cleanup(s.clean)
	return s
}

// limited is a client with the rights that the controller is installed with, limited by its admission policy.
func (s *scenario) limited(cluster *env.Cluster) client.WithWatch {
	s.Expect(cluster.Apply(s.ctx(), "config/rbac/role.yaml", "config/manager/rbac.yaml", "config/manager/admission.yaml")).To(Succeed())
	const account = "gpu-sharing-controller"
	reads := metav1.ObjectMeta{Name: account + "-without-a-cache"} // which lists with a field selector
	for _, o := range []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: reads, Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"get", "list", "watch"},
		}}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: reads, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: reads.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: ownNamespace, Name: account}},
		},
	} {
		s.Expect(client.IgnoreAlreadyExists(s.client.Create(s.ctx(), o))).To(Succeed())
	}
	config, err := cluster.ConfigAs(s.ctx(), env.Identity{Namespace: ownNamespace, ServiceAccount: account})
	s.Expect(err).NotTo(HaveOccurred())
	config.QPS = -1
	c, err := client.NewWithWatch(config, client.Options{Scheme: cluster.Scheme})
	s.Expect(err).NotTo(HaveOccurred())
	return c
}

func (s *scenario) ctx() context.Context { return s.t.Context() }

// clean empties the cluster for the next scenario.
func (s *scenario) clean() {
	ctx := context.Background()
	clusterPolicy := &unstructured.Unstructured{}
	clusterPolicy.SetAPIVersion("nvidia.com/v1")
	clusterPolicy.SetKind("ClusterPolicy")
	for _, o := range []client.Object{&v1alpha1.GPUSharingPolicy{}, &v1alpha1.GPUNode{}, &corev1.Node{}, clusterPolicy} {
		s.Expect(s.client.DeleteAllOf(ctx, o)).To(Succeed())
	}
	for _, namespace := range []string{ownNamespace, nvidiaSpace} { // as nfd-gc does
		s.Expect(s.client.DeleteAllOf(ctx, newNodeFeature(), client.InNamespace(namespace))).To(Succeed())
	}
	for _, namespace := range []string{ownNamespace, nvidiaSpace, "default"} {
		for _, o := range []client.Object{&corev1.Pod{}, &corev1.ConfigMap{}} {
			s.Expect(s.client.DeleteAllOf(ctx, o, client.InNamespace(namespace), client.GracePeriodSeconds(0))).To(Succeed())
		}
	}
}

// machine adds a node with its GPUs and its agent, and lets them come up.
func (s *scenario) machine(name string, models ...sim.Model) *machine {
	s.t.Helper()
	m := &machine{name: name, hardware: sim.New(models...)}
	m.node = nodesim.New(nodesim.Options{
		Name: name, Client: s.client, Clock: s.clock, Inventory: m.hardware.Observe, Tell: s.t.Logf,
		StatusPeriod: time.Second, RestartDelay: time.Second, RetryDelay: time.Second,
	})
	s.nodes = append(s.nodes, m)
	s.Expect(m.node.Reconcile(s.ctx())).To(Succeed())
	s.pod(ownNamespace, name+"-agent", name, func(p *corev1.Pod) {
		p.Labels, p.Spec.ServiceAccountName = map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"}, "gpu-sharing-agent"
	})
	root, err := os.OpenRoot(s.t.TempDir())
	s.Expect(err).NotTo(HaveOccurred())
	s.t.Cleanup(func() { _ = root.Close() })
	runner := hostfake.NewRunner().Add("nvidia-cuda-mps-control", mpsfake.NewDaemons().Program)
	view := mps.NewView(mps.NewControl(runner, root, mpsfake.NewClock(s.clock.Now())))
	m.agent = agent.New(agent.Config{
		Node: name, BootID: "boot", Client: s.agentClient(name), Hardware: m.hardware, MPS: view, Clock: s.clock,
		Processes: hostfake.NewProcesses("boot"), Allocations: agent.NoAllocations{}, Resync: time.Minute,
		Rebooter: s.boots, Reader: s.client,
	})
	for range 3 { // until its labels have come the way through GFD and NFD
		s.others()
	}
	return m
}

func (s *scenario) agentClient(node string) client.Client {
	if s.agent == nil {
		return s.client
	}
	return s.agent(node)
}

// pod creates a pod that runs on a node.
func (s *scenario) pod(namespace, name, node string, change func(*corev1.Pod)) *corev1.Pod {
	s.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
	}
	if change != nil {
		change(pod)
	}
	s.Expect(s.client.Create(s.ctx(), pod)).To(Succeed())
	return pod
}

// others lets everybody but the rollout do what is due: the GPU Operator, the nodes, their agents.
func (s *scenario) others() {
	s.t.Helper()
	selector, err := labels.Parse(gpunode.DefaultSelector)
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(s.operator.Reconcile(s.ctx())).To(Succeed())
	for _, m := range s.nodes {
		_, err := gpunode.New(s.acts, s.client, selector, s.clock).Reconcile(s.ctx(), reconcile.Request{NamespacedName: types.NamespacedName{Name: m.name}})
		s.Expect(err).NotTo(HaveOccurred())
		s.Expect(m.node.Reconcile(s.ctx())).To(Succeed())
		gpuNode := s.gpuNode(m.name)
		_, err = m.agent.Reconcile(s.ctx(), gpuNode)
		s.Expect(err == nil || s.noMPS).To(BeTrue(), "%v", err)
	}
	s.clock.Step(time.Second)
}

// stepFrom lets a duration pass, counted from a time that the API server wrote if that is later than it is here: on a
// slow machine its clock is ahead of the scenario's.
func (s *scenario) stepFrom(written time.Time, d time.Duration) {
	s.clock.Step(max(0, written.Sub(s.clock.Now())) + d)
}

// reconcile is one of the rollout, by a controller that was started just now. It returns what was written.
func (s *scenario) reconcile() ([]string, error) {
	s.writes = nil
	_, err := s.controller().Reconcile(log.IntoContext(s.ctx(), logr.Discard()), gpusharingpolicy.Request{})
	return s.writes, err
}

func (s *scenario) controller() *gpusharingpolicy.Controller {
	c := interceptor.NewClient(s.acts, s.recording())
	return gpusharingpolicy.New(c, gpusharingpolicy.Options{
		Reader: s.uncached, Clock: s.clock, Events: s.events, Namespace: ownNamespace,
		PluginConfig: pluginconfig.New(c, s.uncached, s.clock, pluginconfig.StandAlone{}),
	})
}

// settle reconciles until nothing is written and nothing changes any more, and returns all that was written.
func (s *scenario) settle() []string {
	s.t.Helper()
	var all []string
	for quiet := 0; quiet < 4; {
		if len(all) > 200 {
			s.t.Fatalf("does not settle; the last writes were %v", all[len(all)-20:])
		}
		written, err := s.reconcile()
		s.Expect(err).NotTo(HaveOccurred())
		all = append(all, written...)
		if quiet++; len(written) > 0 {
			quiet = 0
		}
		s.others()
	}
	return all
}

func (s *scenario) recording() interceptor.Funcs {
	return interceptor.Funcs{
		Apply: func(ctx context.Context, c client.WithWatch, o runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
			return s.write("apply "+nameOfConfiguration(o), func() error { return c.Apply(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return s.write("patch "+nameOf(c, o), func() error { return c.Patch(ctx, o, p, opts...) })
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return s.write("delete "+nameOf(c, o), func() error { return c.Delete(ctx, o, opts...) })
		},
		SubResourceCreate: func(ctx context.Context, c client.Client, sub string, o, body client.Object, opts ...client.SubResourceCreateOption) error {
			return s.write(sub+" "+nameOf(c, o), func() error { return c.SubResource(sub).Create(ctx, o, body, opts...) })
		},
		SubResourceApply: func(ctx context.Context, c client.Client, sub string, o runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption) error {
			return s.write(sub+" "+nameOfConfiguration(o), func() error { return c.SubResource(sub).Apply(ctx, o, opts...) })
		},
	}
}

func (s *scenario) write(what string, do func() error) error {
	if s.fail != nil {
		if err := s.fail(what); err != nil {
			return err
		}
	}
	s.writes = append(s.writes, what)
	err := do()
	if err == nil && s.doubt {
		return context.DeadlineExceeded
	}
	return err
}

func nameOf(c client.Client, o client.Object) string {
	gvk, err := apiutil.GVKForObject(o, c.Scheme())
	if err != nil {
		return err.Error()
	}
	return gvk.Kind + " " + o.GetName()
}

func nameOfConfiguration(o runtime.ApplyConfiguration) string {
	var meta metav1.PartialObjectMetadata
	data, err := json.Marshal(o)
	if err == nil {
		err = json.Unmarshal(data, &meta)
	}
	if err != nil {
		return err.Error()
	}
	return meta.Kind + " " + meta.Name
}

// without leaves out writes of a kind, such as those of status, which follow every step.
func without(writes []string, prefix string) []string {
	return slices.DeleteFunc(slices.Clone(writes), func(w string) bool { return strings.HasPrefix(w, prefix) })
}

func count(writes []string, prefix string) int { return len(writes) - len(without(writes, prefix)) }

// apply applies an object, as kubectl does.
func (s *scenario) apply(object string) {
	s.t.Helper()
	o := &unstructured.Unstructured{}
	s.Expect(yaml.Unmarshal([]byte(object), &o.Object)).To(Succeed())
	s.Expect(s.client.Apply(s.ctx(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("kubectl"), client.ForceOwnership)).To(Succeed())
}

// policy applies a policy with this spec.
func (s *scenario) policy(name, spec string) {
	s.t.Helper()
	s.apply(fmt.Sprintf("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: %s}, spec: %s}", name, spec))
}

func timeSlicing(replicas int) string {
	return fmt.Sprintf("{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: %d}}}", replicas)
}

func (s *scenario) getPolicy(name string) *v1alpha1.GPUSharingPolicy {
	s.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	s.Expect(s.client.Get(s.ctx(), types.NamespacedName{Name: name}, p)).To(Succeed())
	env.ExpectStatusSane(s.t, p)
	return p
}

func (s *scenario) expectCondition(policy, conditionType string, status metav1.ConditionStatus, reason string) string {
	s.t.Helper()
	c, found := condition.Find(s.getPolicy(policy).Status.Conditions, conditionType)
	s.Expect(found).To(BeTrue(), "%s of %s", conditionType, policy)
	s.Expect(c.Status).To(Equal(status), "%+v", c)
	s.Expect(c.Reason).To(Equal(reason), "%+v", c)
	return c.Message
}

func (s *scenario) expectReady(policy string) {
	s.t.Helper()
	s.expectCondition(policy, v1alpha1.ConditionReady, metav1.ConditionTrue, v1alpha1.ReasonReady)
}

func (s *scenario) gpuNode(name string) *v1alpha1.GPUNode {
	s.t.Helper()
	n := &v1alpha1.GPUNode{}
	s.Expect(s.client.Get(s.ctx(), types.NamespacedName{Name: name}, n)).To(Succeed())
	return n
}

func (s *scenario) node(name string) *corev1.Node {
	s.t.Helper()
	n := &corev1.Node{}
	s.Expect(s.client.Get(s.ctx(), types.NamespacedName{Name: name}, n)).To(Succeed())
	return n
}

// allocatable is what a node advertises of NVIDIA's.
func (s *scenario) allocatable(name string) map[string]int64 {
	s.t.Helper()
	found := map[string]int64{}
	for resource, quantity := range s.node(name).Status.Allocatable {
		if strings.HasPrefix(string(resource), "nvidia.com/") && !quantity.IsZero() {
			found[string(resource)] = quantity.Value()
		}
	}
	return found
}

func (s *scenario) configMap() *corev1.ConfigMap {
	s.t.Helper()
	found := &corev1.ConfigMap{}
	err := s.client.Get(s.ctx(), types.NamespacedName{Namespace: nvidiaSpace, Name: pluginconfig.ConfigMapName}, found)
	if apierrors.IsNotFound(err) {
		return nil
	}
	s.Expect(err).NotTo(HaveOccurred())
	return found
}

// clusterSpec is the spec of the ClusterPolicy.
func (s *scenario) clusterSpec() string {
	s.t.Helper()
	o := &unstructured.Unstructured{}
	o.SetAPIVersion("nvidia.com/v1")
	o.SetKind("ClusterPolicy")
	s.Expect(s.client.Get(s.ctx(), types.NamespacedName{Name: clusterName}, o)).To(Succeed())
	data, err := yaml.Marshal(o.Object["spec"])
	s.Expect(err).NotTo(HaveOccurred())
	return string(data)
}

// announced are the events since the last call.
func (s *scenario) announced() []string {
	var all []string
	for {
		select {
		case e := <-s.events.Events:
			all = append(all, e)
		default:
			return all
		}
	}
}

func (s *scenario) delete(object string) {
	s.t.Helper()
	o := &unstructured.Unstructured{}
	s.Expect(yaml.Unmarshal([]byte(object), &o.Object)).To(Succeed())
	s.Expect(s.client.Delete(s.ctx(), o)).To(Succeed())
}

func reconciliation() gpusharingpolicy.Request { return gpusharingpolicy.Request{} }
