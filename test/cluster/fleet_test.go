// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cluster_test runs a whole cluster in a process: a real API server, the controllers and agents that ship, with
// their caches, watches and queues, and 20 nodes whose GPUs, kubelets and NVIDIA programs are simulated.
package cluster_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpunode"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpusharingpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const (
	ownNamespace = "gpu-sharing-operator"
	nvidiaSpace  = "gpu-operator"
	users        = "default"
)

// TestMain silences what controller-runtime would say of not being told where to log to, and runs one test more at once
// than Go would: each waits most of its time.
func TestMain(m *testing.M) {
	silence()
	flag.Parse()
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == parallel.DefValue {
		if err := parallel.Value.Set(strconv.Itoa(1 + runtime.GOMAXPROCS(0))); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// fleet is a cluster with its nodes.
type fleet struct {
	*WithT
	t          *testing.T
	cluster    *env.Cluster
	client     client.WithWatch // an administrator's
	controller *rest.Config     // that of the account with which the controllers are installed, limited by its admission policy
	sim        client.Client    // that of what is simulated, an administrator's too
	agents     *rest.Config     // that of the agents
	clock      *skewed
	paces      clock.PassiveClock // the clock of the controller of rollouts
	stamps     clock.PassiveClock // the clock that is compared with the times which the API server writes
	dir        string
	machines   []*machine
	record     *record
	before     cluster.Snapshot // the cluster before a policy was there
	evicted    []string         // pods that had to go
	leader     func()           // ends the controllers

	demands func(*demand.Controller, manager.Manager) error // starts that of MIG on demand; nil: its feature gate is off
}

// skewed is a clock that is ahead.
type skewed struct {
	clock.RealClock

	mu    sync.Mutex
	ahead time.Duration
}

func (s *skewed) Now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.RealClock.Now().Add(s.ahead)
}

func (s *skewed) Since(t time.Time) time.Duration { return s.Now().Sub(t) }

// skipped is how far the clock is ahead.
func (s *skewed) skipped() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ahead
}

func (s *skewed) skip(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead += d
}

// newFleet starts a cluster of nodes with two A100 each, with NVIDIA's GPU Operator and our controllers.
func newFleet(t *testing.T, nodes int, options ...env.Option) *fleet {
	t.Helper()
	f := newSite(t, options...)
	f.apply(clusterPolicy)
	f.record = newRecord(f)
	f.runNVIDIA()
	for i := range nodes {
		m := newMachine(f, fmt.Sprintf("n%02d", i+1), nil, sim.A100, sim.A100)
		m.boot(f)
		f.background(func(ctx context.Context) { m.node.Run(ctx, 500*time.Millisecond) })
		f.machines = append(f.machines, m)
	}
	f.wakeNodes()
	f.runAgents()
	f.leader = f.lead()
	f.Eventually(f.discovered, patience, pollEvery).Should(BeTrue())
	f.before = f.world()
	return f
}

// clusterPolicy is that of NVIDIA's chart, as far as it matters. NVIDIA's definition requires daemonsets.
const clusterPolicy = `{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy},
  spec: {daemonsets: {updateStrategy: RollingUpdate}, devicePlugin: {enabled: true}, mig: {strategy: single}}}`

// newSite starts an API server with the namespaces, and the account of our controllers.
func newSite(t *testing.T, options ...env.Option) *fleet {
	t.Helper()
	dir := t.TempDir()
	f := &fleet{WithT: NewWithT(t), t: t, dir: dir, clock: &skewed{}}
	f.cluster = env.Start(t, append(options, env.WithNVIDIA())...)
	f.cluster.Config.QPS = -1
	var err error
	f.client, err = client.NewWithWatch(f.cluster.Config, client.Options{Scheme: f.cluster.Scheme})
	f.Expect(err).NotTo(HaveOccurred())
	for _, name := range []string{ownNamespace, nvidiaSpace} {
		f.Expect(f.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})).To(Succeed())
	}
	f.Expect(f.cluster.Apply(t.Context(), "config/rbac/role.yaml", "config/manager/rbac.yaml", "config/manager/admission.yaml")).To(Succeed())
	f.controller, err = f.cluster.ConfigAs(t.Context(), env.Identity{Namespace: ownNamespace, ServiceAccount: "gpu-sharing-controller"})
	f.Expect(err).NotTo(HaveOccurred())
	f.controller.QPS = -1
	f.sim, f.agents, f.paces, f.stamps = f.client, f.cluster.Config, f.clock, f.clock
	return f
}

// background runs something until the test ends, and waits for its end.
func (f *fleet) background(run func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		run(ctx)
	}()
	stop = func() {
		cancel()
		<-done
	}
	f.t.Cleanup(stop)
	return stop
}

// manager is one with the cache and the client that a program of ours has.
func (f *fleet) manager(as *rest.Config, change func(*manager.Options)) manager.Manager {
	f.t.Helper()
	o := manager.Options{
		Scheme: f.cluster.Scheme, HealthProbeBindAddress: "0", Metrics: server.Options{BindAddress: "0"}, Logger: logr.Discard(),
		Controller:              config.Controller{SkipNameValidation: new(true)},
		GracefulShutdownTimeout: new(time.Second),
	}
	change(&o)
	c := rest.CopyConfig(as)
	mgr, err := manager.New(c, o)
	f.Expect(err).NotTo(HaveOccurred())
	return mgr
}

// lead starts the controllers as they ship.
func (f *fleet) lead() (stop func()) {
	f.t.Helper()
	mgr := f.manager(f.controller, func(o *manager.Options) {
		o.Cache = gpusharingpolicy.CacheOptions(pluginconfig.StandAlone{})
		o.Client = client.Options{Cache: &client.CacheOptions{Unstructured: true}}
	})
	selector, err := labels.Parse(cluster.DefaultSelector)
	f.Expect(err).NotTo(HaveOccurred())
	f.Expect(gpunode.New(mgr.GetClient(), mgr.GetAPIReader(), selector, clock.RealClock{}).Register(mgr)).To(Succeed())
	policies := gpusharingpolicy.New(mgr.GetClient(), gpusharingpolicy.Options{
		Reader: mgr.GetAPIReader(), Clock: f.paces, Events: mgr.GetEventRecorder("controller"), Namespace: ownNamespace,
		PluginConfig: pluginconfig.New(mgr.GetClient(), mgr.GetAPIReader(), f.stamps, pluginconfig.StandAlone{}).CopyTo(ownNamespace),
	})
	f.Expect(policies.Register(f.t.Context(), mgr)).To(Succeed())
	if f.demands != nil {
		f.Expect(f.demands(demand.New(mgr.GetClient(), policies.DRAReader(), f.clock, mgr.GetEventRecorder("controller")), mgr)).To(Succeed())
	}
	return f.background(func(ctx context.Context) { _ = mgr.Start(ctx) })
}

// runAgents runs the agent of each node, as it ships, but all in one manager.
func (f *fleet) runAgents() {
	f.t.Helper()
	mgr := f.manager(f.agents, func(*manager.Options) {})
	for _, m := range f.machines {
		m.agent(f, mgr, 2*time.Second)
	}
	f.background(func(ctx context.Context) { _ = mgr.Start(ctx) })
}

// apply applies an object, as kubectl does.
func (f *fleet) apply(object string) {
	f.t.Helper()
	o := &unstructured.Unstructured{}
	f.Expect(yaml.Unmarshal([]byte(object), &o.Object)).To(Succeed())
	f.Expect(f.client.Apply(f.t.Context(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("kubectl"), client.ForceOwnership)).To(Succeed())
}

// policy applies the policy of the fleet with this spec.
func (f *fleet) policy(sharing, rollout string) {
	f.t.Helper()
	f.apply(fmt.Sprintf("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: research}, spec: {nodeSelector: {}, sharing: %s, rollout: %s}}",
		sharing, rollout))
}

// ready waits until the policy is Ready as it is now.
func (f *fleet) ready() {
	f.t.Helper()
	f.Eventually(func(g Gomega) {
		p := &v1alpha1.GPUSharingPolicy{}
		g.Expect(f.client.Get(f.t.Context(), types.NamespacedName{Name: "research"}, p)).To(Succeed())
		c, _ := condition.Find(p.Status.Conditions, v1alpha1.ConditionReady)
		g.Expect(condition.IsTrueAt(p.Status.Conditions, v1alpha1.ConditionReady, p.Generation)).To(BeTrue(), c.Message)
	}, patience, pollEvery).Should(Succeed())
}

// later moves the clock on, and lets the controller look at it.
func (f *fleet) later(d time.Duration) {
	f.t.Helper()
	f.clock.skip(d)
	f.label(f.machines[0].name, "test.example/clock", fmt.Sprint(f.clock.Now().UnixNano()))
}

// label sets a label of a node.
func (f *fleet) label(node, name, value string) {
	f.t.Helper()
	f.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, name, value))
}

func (f *fleet) patch(o client.Object, patch string) {
	f.t.Helper()
	f.Expect(f.client.Patch(f.t.Context(), o, client.RawPatch(types.MergePatchType, []byte(patch)))).To(Succeed())
}

const (
	pollEvery = 50 * time.Millisecond
	patience  = 5 * time.Minute // for what takes seconds where the machine does nothing else
)

func (f *fleet) discovered() bool {
	s := f.world()
	for _, n := range s.Nodes {
		if !n.AgentReady || len(n.GPU.Status.Devices) == 0 || n.Allocatable["nvidia.com/gpu"] == 0 || n.Labels["nvidia.com/gpu.product"] == "" {
			return false
		}
	}
	return len(s.Nodes) == len(f.machines)
}

// world is the cluster as the API server has it.
func (f *fleet) world() cluster.Snapshot {
	f.t.Helper()
	ctx := f.t.Context()
	nodes, gpuNodes, pods, policies := &corev1.NodeList{}, &v1alpha1.GPUNodeList{}, &corev1.PodList{}, &v1alpha1.GPUSharingPolicyList{}
	for _, list := range []client.ObjectList{nodes, gpuNodes, pods, policies} {
		f.Expect(f.client.List(ctx, list)).To(Succeed())
	}
	configMap := &corev1.ConfigMap{}
	key := types.NamespacedName{Namespace: nvidiaSpace, Name: pluginconfig.ConfigMapName}
	f.Expect(client.IgnoreNotFound(f.client.Get(ctx, key, configMap))).To(Succeed())
	s := cluster.Snapshot{
		Now: f.clock.Now(), Policies: policies.Items, Configs: configMap.Data, Plugin: cluster.DevicePlugin{Ready: true, ClusterPolicy: true, NodeFeatures: true},
	}
	s.AddNodes(nodes.Items, cluster.ByName(gpuNodes.Items))
	s.AddPods(pods.Items, s.NodesByName(), &cluster.Programs{ConfigMap: key, GPUOperators: []string{nvidiaSpace}})
	return s
}

// pod creates a pod of a user on a node; it asks for one of a resource, or for nothing.
func (f *fleet) pod(name, node, resource string, change ...func(*corev1.Pod)) {
	f.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
	}
	if resource != "" {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(resource): one}
	}
	for _, c := range change {
		c(pod)
	}
	f.Expect(f.client.Create(f.t.Context(), pod)).To(Succeed())
	if resource != "" {
		f.Eventually(func() bool { return f.holds(node, name) }, patience, pollEvery).Should(BeTrue(), "%s holds a GPU", name)
	}
}

// holds reports whether the agent of a node reports that a pod holds a GPU.
func (f *fleet) holds(node, pod string) bool {
	n := &v1alpha1.GPUNode{}
	f.Expect(f.client.Get(f.t.Context(), types.NamespacedName{Name: node}, n)).To(Succeed())
	for _, d := range n.Status.Devices {
		for _, h := range d.Holders {
			if h.PodName == pod {
				return true
			}
		}
	}
	return false
}

// pods are the pods of users, by name.
func (f *fleet) pods() []string {
	f.t.Helper()
	list := &corev1.PodList{}
	f.Expect(f.client.List(f.t.Context(), list, client.InNamespace(users))).To(Succeed())
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names
}
