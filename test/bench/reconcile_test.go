// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpusharingpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// reconcileSizes names the environment variable with the numbers of nodes whose reconciles are measured.
const reconcileSizes = "RECONCILE"

// What stands beside the nodes when a reconcile is measured, and how often it is measured.
const (
	idlePolicies     = 200
	pendingPods      = 10_000
	unchangedSamples = 20
	changeSamples    = 10
	rounds           = 3
)

// The aims. They are printed beside what was measured, and a miss fails nothing: CPU time hangs on the machine and its
// load.
const (
	unchangedAim = 20 * time.Millisecond // of CPU time for an unchanged reconcile
	oneOfManyAim = 3.0                   // one node's change, as a multiple of that at the fewest nodes
	writesAim    = 6.0                   // API writes for each node when all change
	floorAim     = 7.0                   // a change of all nodes, as a multiple of the hand procedure
	idleShareAim = 0.003                 // of a core, while nothing changes
)

// verdict is an aim, and whether a figure keeps it.
func verdict(figure, aim float64, text string) string {
	if figure <= aim {
		return "aim " + text + ": kept"
	}
	return "aim " + text + ": missed"
}

// TestReconcile measures the CPU time of one reconcile of the rollout controller when nothing has changed and when one
// node has, beside 200 policies that select no node and 10,000 pods that wait for other nodes. Policies, ConfigMaps and
// the ClusterPolicy come from a real API server. So does one node, which a controller has brought to its desired state.
// The cache gets copies of that node, its GPUNode and its pods from memory, because an API server needs many minutes
// for 5,000 nodes.
func TestReconcile(t *testing.T) {
	sizes := os.Getenv(reconcileSizes)
	if sizes == "" {
		t.Skip("set " + reconcileSizes + "=100,5000, or make bench")
	}
	log.SetLogger(logr.Discard())
	s := &scaled{WithT: NewWithT(t), t: t, cluster: env.Start(t, env.WithNVIDIA()), began: time.Now()}
	var err error
	s.http, err = rest.HTTPClientFor(s.cluster.Config)
	s.Expect(err).NotTo(HaveOccurred())
	config := s.prepare()
	s.startController(built(t, "controller"), config)
	s.startFleet(1)
	s.Eventually(s.reported, "1m", "100ms").Should(Equal(1))
	s.policy("fleet", 0, 4, "{}")
	for i := range idlePolicies {
		s.apply(fmt.Sprintf(`{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: idle-%03d}, spec: {
			nodeSelector: {}, gpuSelector: {products: ["Tesla-T4"]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}}}`, i))
	}
	s.untilReady("fleet")
	s.settle()
	s.stopController()

	var all []reconcileFigures
	for size := range strings.SplitSeq(sizes, ",") {
		n, err := strconv.Atoi(size)
		s.Expect(err).NotTo(HaveOccurred())
		all = append(all, s.measureReconcile(n))
	}
	printReconcile(all)
}

// reconcileFigures are the CPU times of one reconcile; medians.
type reconcileFigures struct {
	nodes          int
	unchanged, one time.Duration
}

func printReconcile(all []reconcileFigures) {
	fmt.Printf("\n%d policies without nodes, %d pending pods of other nodes; medians of %d rounds; load %s\n", idlePolicies, pendingPods, rounds, load())
	for _, f := range all {
		ratio := f.one.Seconds() / all[0].one.Seconds()
		fmt.Printf("%d nodes: unchanged reconcile %s of CPU (%s); one node's change %s, %.2f times that at %d nodes (%s)\n", f.nodes,
			f.unchanged, verdict(f.unchanged.Seconds(), unchangedAim.Seconds(), unchangedAim.String()),
			f.one, ratio, all[0].nodes, verdict(ratio, oneOfManyAim, "3"))
	}
}

// measureReconcile measures reconciles over so many copies of the one node.
func (s *scaled) measureReconcile(nodes int) reconcileFigures {
	ctx, cancel := context.WithCancel(s.t.Context())
	defer cancel()
	copies := s.copies(ctx, nodes)
	options := gpusharingpolicy.CacheOptions(pluginconfig.StandAlone{})
	options.NewInformer = copies.informer
	mgr, err := ctrl.NewManager(s.cluster.Config, manager.Options{
		Scheme: s.cluster.Scheme, Cache: options, Client: client.Options{Cache: &client.CacheOptions{Unstructured: true}},
		Metrics: server.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: new(true)},
	})
	s.Expect(err).NotTo(HaveOccurred())
	c := gpusharingpolicy.New(mgr.GetClient(), gpusharingpolicy.Options{
		Reader: mgr.GetAPIReader(), Clock: clock.RealClock{}, Events: mgr.GetEventRecorder("bench"), Namespace: ownNamespace, Writers: 8,
		PluginConfig: pluginconfig.New(mgr.GetClient(), mgr.GetAPIReader(), clock.RealClock{}, pluginconfig.StandAlone{}).CopyTo(ownNamespace),
	})
	s.Expect(c.Register(ctx, mgr)).To(Succeed())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = mgr.Start(ctx) }()
	s.Expect(mgr.GetCache().WaitForCacheSync(ctx)).To(BeTrue())
	s.say("%d nodes are in the cache", nodes)
	s.untilMatched(int32(nodes))
	s.say("all are ready")

	f := reconcileFigures{nodes: nodes}
	f.unchanged = medianOf(func() time.Duration {
		before := cpuTime()
		for range unchangedSamples {
			_, err := c.Reconcile(ctx, gpusharingpolicy.Request{})
			s.Expect(err).NotTo(HaveOccurred())
		}
		return (cpuTime() - before) / unchangedSamples
	})
	f.one = medianOf(func() time.Duration {
		before := cpuTime()
		for range changeSamples {
			done := reconciles(s)
			copies.touch()
			s.Eventually(func() int { return reconciles(s) }, "30s", "20ms").Should(BeNumerically(">", done))
		}
		return (cpuTime() - before) / changeSamples
	})
	cancel()
	<-ended
	return f
}

// untilMatched waits until the status of the policy counts all nodes as ready, and all that follows is done.
func (s *scaled) untilMatched(nodes int32) {
	s.Eventually(func() int32 {
		p := &v1alpha1.GPUSharingPolicy{}
		s.Expect(s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Name: "fleet"}, p)).To(Succeed())
		return p.Status.Nodes.Ready
	}, "10m", "500ms").Should(Equal(nodes))
	last := -1
	s.Eventually(func() bool { before := last; last = reconciles(s); return last == before }, "1m", "1s").Should(BeTrue())
}

func medianOf(measure func() time.Duration) time.Duration {
	var all []time.Duration
	for range rounds {
		all = append(all, measure())
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// cpuTime is how long this process has computed.
func cpuTime() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// reconciles is how often the rollout controllers of this process have reconciled.
func reconciles(s *scaled) int {
	families, err := registry.Registry.Gather()
	s.Expect(err).NotTo(HaveOccurred())
	n := 0
	for _, family := range families {
		if family.GetName() != "controller_runtime_reconcile_total" {
			continue
		}
		for _, m := range family.GetMetric() {
			n += int(m.GetCounter().GetValue())
		}
	}
	return n
}

// copied are the objects of many nodes, in memory.
type copied struct {
	lists   map[string]runtime.Object // by kind
	watches map[string]*watch.FakeWatcher
	node    *corev1.Node // that changes
	version int
}

// copies makes nodes from the first of the fleet.
func (s *scaled) copies(ctx context.Context, nodes int) *copied {
	first := s.fleet.names[0]
	node, gpuNode, pods := &corev1.Node{}, &v1alpha1.GPUNode{}, &corev1.PodList{}
	s.Expect(s.cluster.Client.Get(ctx, client.ObjectKey{Name: first}, node)).To(Succeed())
	s.Expect(s.cluster.Client.Get(ctx, client.ObjectKey{Name: first}, gpuNode)).To(Succeed())
	s.Expect(s.cluster.Client.List(ctx, pods, client.MatchingFields{"spec.nodeName": first})).To(Succeed())
	c := &copied{version: 1_000_000, watches: map[string]*watch.FakeWatcher{}}
	named := func(o client.Object, name string) {
		c.version++
		o.SetName(name)
		o.SetResourceVersion(strconv.Itoa(c.version))
	}
	allNodes, allGPUNodes, allPods := &corev1.NodeList{}, &v1alpha1.GPUNodeList{}, &corev1.PodList{}
	for i := range nodes {
		name := fmt.Sprintf("node-%04d", i)
		n, g := node.DeepCopy(), gpuNode.DeepCopy()
		named(n, name)
		named(g, name)
		n.Labels["kubernetes.io/hostname"] = name
		allNodes.Items, allGPUNodes.Items = append(allNodes.Items, *n), append(allGPUNodes.Items, *g)
		for p := range pods.Items {
			pod := pods.Items[p].DeepCopy()
			named(pod, strings.Replace(pod.Name, first, name, 1)) // and keeps its UID, which the agent has reported
			pod.Spec.NodeName = name
			allPods.Items = append(allPods.Items, *pod)
		}
	}
	for i := range pendingPods {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "batch", OwnerReferences: []metav1.OwnerReference{{
			APIVersion: "batch/v1", Kind: "Job", Name: fmt.Sprint("job-", i), Controller: new(true),
		}}}}
		named(pod, fmt.Sprint("job-", i))
		pod.UID = types.UID(pod.Name)
		pod.Spec.NodeSelector = map[string]string{"pool": "h100"}
		pod.Spec.Containers = []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{resourceGPU: resource.MustParse("1")},
		}}}
		pod.Status.Phase = corev1.PodPending
		allPods.Items = append(allPods.Items, *pod)
	}
	c.node = allNodes.Items[nodes/2].DeepCopy()
	c.lists = map[string]runtime.Object{"Node": allNodes, "GPUNode": allGPUNodes, "Pod": allPods}
	return c
}

// informer reads copied objects from memory and others from the API server. It is a cache.Options.NewInformer.
func (c *copied) informer(lw toolscache.ListerWatcher, kind runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
	switch kind.(type) {
	case *corev1.Node:
		lw = c.served("Node")
	case *v1alpha1.GPUNode:
		lw = c.served("GPUNode")
	case *corev1.Pod:
		lw = c.served("Pod")
	}
	return toolscache.NewSharedIndexInformer(lw, kind, resync, indexers)
}

// inMemory is a list of objects and a watch on them.
type inMemory struct {
	toolscache.ListWatch
}

// IsWatchListSemanticsUnSupported makes the informer list.
func (inMemory) IsWatchListSemanticsUnSupported() bool { return true }

func (c *copied) served(kind string) toolscache.ListerWatcher {
	w := watch.NewFakeWithChanSize(changeSamples, false)
	c.watches[kind] = w
	list := c.lists[kind]
	accessor, err := meta.ListAccessor(list)
	if err != nil {
		panic(err)
	}
	accessor.SetResourceVersion(strconv.Itoa(c.version))
	return &inMemory{toolscache.ListWatch{
		ListWithContextFunc:  func(context.Context, metav1.ListOptions) (runtime.Object, error) { return list, nil },
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return w, nil },
	}}
}

// touch changes a label of one node, which changes nothing that a policy wants.
func (c *copied) touch() {
	c.version++
	c.node = c.node.DeepCopy()
	c.node.ResourceVersion = strconv.Itoa(c.version)
	c.node.Labels["touched"] = c.node.ResourceVersion
	c.watches["Node"].Modify(c.node.DeepCopy())
}
