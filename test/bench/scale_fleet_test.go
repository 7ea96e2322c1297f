// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// workers is how many of the nodes do something at the same time.
const workers = 16

// fleet is many nodes, in one process: the shipped agent of each, on simulated GPUs, and as much of kubelet and device
// plugin as the API server sees of them when the replicas of a GPU change. test/nodesim plays them better, and would
// take more of the machine than what is to be measured.
type fleet struct {
	client   client.Client
	cache    cache.Cache
	agents   map[string]*agent.Controller
	programs map[string]*nvidiaPrograms
	names    []string

	mu     sync.Mutex
	failed error
	wants  map[string]string // of nodes whose agents have told that all see their keys
}

func newFleet(t *testing.T, c client.Client, cached cache.Cache, nodes int) *fleet {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	view := mps.NewView(mps.NewControl(hostfake.NewRunner(), root, clock.RealClock{}))
	f := &fleet{client: c, cache: cached, agents: map[string]*agent.Controller{}, programs: map[string]*nvidiaPrograms{}, wants: map[string]string{}}
	for i := range nodes {
		name := fmt.Sprintf("node-%04d", i)
		models := make([]sim.Model, gpusPerNode)
		for g := range models {
			models[g] = sim.A100
		}
		f.names = append(f.names, name)
		status := agent.NewStatusWriter(c)
		f.programs[name] = &nvidiaPrograms{}
		f.programs[name].reporter = agent.NewConfigReporter(name, c, status, f.programs[name], f.programs[name], f.programs[name], clock.RealClock{})
		f.agents[name] = agent.New(agent.Config{
			Node: name, BootID: "boot", Client: c, Hardware: sim.New(models...), MPS: view, Clock: clock.RealClock{},
			Processes: hostfake.NewProcesses("boot"), Allocations: agent.NoAllocations{}, Resync: time.Hour, Status: status,
		})
	}
	return f
}

// join registers the nodes, with the pods that matter on each: the agent, NVIDIA's device plugin and GPU Feature
// Discovery, which read the configuration, and two that hold a GPU.
func (f *fleet) join(ctx context.Context) error {
	return f.each(ctx, func(ctx context.Context, name string) error {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			"nvidia.com/gpu.present": "true", "kubernetes.io/hostname": name,
			"nvidia.com/gpu.deploy.device-plugin": "true", "nvidia.com/gpu.deploy.gpu-feature-discovery": "true",
			"nvidia.com/gpu.deploy.dcgm-exporter": "true", "nvidia.com/gpu.deploy.mig-manager": "true",
			"nvidia.com/gpu.deploy.client": "true",
			"nvidia.com/gpu.product":       "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "40960",
		}}}
		node.Status.Allocatable = corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("96"), corev1.ResourceMemory: resource.MustParse("1Ti"), resourceGPU: resource.MustParse("8"),
		}
		node.Status.Capacity = node.Status.Allocatable
		for i := range 50 { // as many as a kubelet tells of
			node.Status.Images = append(node.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("registry.invalid/image-%d@sha256:%064d", i, i)}, SizeBytes: 1 << 30})
		}
		objects := []client.Object{node}
		objects = append(objects, podsOf(name)...)
		for _, o := range objects {
			if err := f.client.Create(ctx, o); err != nil {
				return err
			}
		}
		ready := []byte(`{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}`)
		return f.client.Status().Patch(ctx, objects[1], client.RawPatch(types.StrategicMergePatchType, ready))
	})
}

const resourceGPU = "nvidia.com/gpu"

func podsOf(node string) []client.Object {
	pod := func(namespace, name string, change func(*corev1.Pod)) client.Object {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name + "-" + node, Labels: map[string]string{"app": name}},
			Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
		}
		change(p)
		return p
	}
	operand := func(deploy string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{
				APIVersion: "apps/v1", Kind: "DaemonSet", Name: p.Labels["app"], UID: "set", Controller: new(true),
			}}
			p.Spec.NodeSelector = map[string]string{"nvidia.com/gpu.deploy." + deploy: "true"}
			p.Spec.Volumes = []corev1.Volume{{Name: pluginconfig.ConfigMapName, VolumeSource: corev1.VolumeSource{
				ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: pluginconfig.ConfigMapName}},
			}}}
		}
	}
	holds := func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{resourceGPU: resource.MustParse("1")}
	}
	return []client.Object{
		pod(ownNamespace, "agent", func(p *corev1.Pod) { p.Labels["app.kubernetes.io/name"] = "gpu-sharing-agent" }),
		pod(nvidiaSpace, appDevicePlugin, operand("device-plugin")),
		pod(nvidiaSpace, appFeatureDiscovery, operand("gpu-feature-discovery")),
		pod("default", "train", holds),
		pod("default", "serve", holds),
	}
}

// each does something with every node, some at the same time.
func (f *fleet) each(ctx context.Context, do func(ctx context.Context, node string) error) error {
	names := make(chan string)
	errs := make([]error, workers)
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() {
			for name := range names {
				errs[w] = errors.Join(errs[w], do(ctx, name))
			}
		})
	}
	for _, name := range f.names {
		names <- name
	}
	close(names)
	group.Wait()
	return errors.Join(errs...)
}

// run lets agents and kubelets do their part until the context ends.
func (f *fleet) run(ctx context.Context) error {
	err := f.watch(ctx, &v1alpha1.GPUNode{}, func(o client.Object) string { return fmt.Sprint(o.GetUID(), o.GetGeneration()) }, f.agent)
	if err != nil {
		return err
	}
	err = f.watch(ctx, &corev1.Pod{}, func(o client.Object) string { return o.GetAnnotations()[v1alpha1.AnnotationSync] }, f.project)
	if err != nil {
		return err
	}
	return f.watch(ctx, &corev1.Node{}, func(o client.Object) string { return o.GetLabels()[v1alpha1.LabelConfig] }, f.kubelet)
}

// nodeOf is the node that an object is of.
func nodeOf(o any) string {
	if pod, isPod := o.(*corev1.Pod); isPod {
		return pod.Spec.NodeName
	}
	return o.(client.Object).GetName()
}

// watch calls a program of a node when what it looks at has changed, and again later when it failed.
func (f *fleet) watch(ctx context.Context, kind client.Object, seen func(client.Object) string, program func(context.Context, string) error) error {
	informer, err := f.cache.GetInformer(ctx, kind)
	if err != nil {
		return err
	}
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedItemBasedRateLimiter[string]())
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { queue.Add(nodeOf(o)) },
		UpdateFunc: func(before, after any) {
			if seen(before.(client.Object)) != seen(after.(client.Object)) {
				queue.Add(nodeOf(after))
			}
		},
	})
	context.AfterFunc(ctx, queue.ShutDown)
	for range workers {
		go func() {
			for {
				name, ended := queue.Get()
				if ended {
					return
				}
				if err := program(ctx, name); err != nil && ctx.Err() == nil {
					if !apierrors.IsConflict(err) {
						f.fail(err)
					}
					queue.AddRateLimited(name)
				} else {
					queue.Forget(name)
				}
				queue.Done(name)
			}
		}()
	}
	return err
}

func (f *fleet) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = errors.Join(f.failed, err)
}

func (f *fleet) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failed
}

// agent is a reconcile of the agent of a node.
func (f *fleet) agent(ctx context.Context, name string) error {
	node := &v1alpha1.GPUNode{}
	if err := f.cache.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	_, err := f.agents[name].Reconcile(ctx, node)
	return err
}

// project is the kubelet, which shows the ConfigMap to pods whose volumes it was triggered to sync, and the agent,
// which reports when all that read it see the key.
func (f *fleet) project(ctx context.Context, name string) error {
	node := &v1alpha1.GPUNode{}
	if err := f.cache.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	pods := [...]string{"", ""}
	for i, app := range []string{appDevicePlugin, appFeatureDiscovery} {
		pod := &corev1.Pod{}
		if err := f.cache.Get(ctx, client.ObjectKey{Namespace: nvidiaSpace, Name: app + "-" + name}, pod); err != nil {
			return client.IgnoreNotFound(err)
		}
		if key, _, _ := strings.Cut(pod.Annotations[v1alpha1.AnnotationSync], "@"); key == "" || key != node.Spec.ConfigName {
			return nil
		}
		pods[i] = string(pod.UID)
	}
	want := node.Spec.ConfigName + node.Spec.ChangeTime.String()
	if f.told(name) == want { // which the cache may not show yet
		return nil
	}
	_, err := f.programs[name].report(ctx, node, pods)
	if err == nil {
		f.tell(name, want)
	}
	return err
}

// nvidiaPrograms is what the agent of a node finds of NVIDIA's programs: that each of two pods has a config-manager, which sees the desired key.
type nvidiaPrograms struct {
	mu       sync.Mutex
	pods     [2]string
	reporter *agent.ConfigReporter
}

func (s *nvidiaPrograms) report(ctx context.Context, node *v1alpha1.GPUNode, pods [2]string) (reconcile.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods = pods
	return s.reporter.Reconcile(ctx, node)
}

func (s *nvidiaPrograms) Running(string) ([]int, error)     { return []int{0, 1}, nil }
func (s *nvidiaPrograms) Environment(int) map[string]string { return nil }
func (s *nvidiaPrograms) Privileged(int) bool               { return true }
func (s *nvidiaPrograms) Projected(string, string) bool     { return true }
func (s *nvidiaPrograms) Describe(pid int) (p host.Process) { p.PodUID = s.pods[pid]; return p }

// told is the desired state of a node of which its agent has reported that all see its key.
func (f *fleet) told(node string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.wants[node]
}

func (f *fleet) tell(node, want string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wants[node] = want
}

// The names of NVIDIA's DaemonSets that read the configuration.
const (
	appDevicePlugin     = "nvidia-device-plugin-daemonset"
	appFeatureDiscovery = "gpu-feature-discovery"
)

// kubelet publishes what the device plugin makes of the configuration that the label of a node selects.
func (f *fleet) kubelet(ctx context.Context, name string) error {
	node := &corev1.Node{}
	if err := f.cache.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return err
	}
	key := node.Labels[v1alpha1.LabelConfig]
	if key == "" {
		return nil
	}
	replicas, err := f.replicas(ctx, key)
	if err != nil {
		return fmt.Errorf("node %s: %w", name, err)
	}
	advertised := resource.NewQuantity(gpusPerNode*replicas, resource.DecimalSI)
	if has := node.Status.Allocatable[resourceGPU]; has.Cmp(*advertised) == 0 {
		return nil
	}
	counts := map[string]any{resourceGPU: advertised}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"capacity": counts, "allocatable": counts}})
	if err != nil {
		return err
	}
	return f.client.Status().Patch(ctx, node, client.RawPatch(types.MergePatchType, patch))
}

// replicas are what the device plugin makes of a GPU by a key of the ConfigMap.
func (f *fleet) replicas(ctx context.Context, key string) (int64, error) {
	configMap := &corev1.ConfigMap{}
	if err := f.client.Get(ctx, client.ObjectKey{Namespace: nvidiaSpace, Name: pluginconfig.ConfigMapName}, configMap); err != nil {
		return 0, err
	}
	if _, err := nvidia.SelectConfig(key, "", configMap.Data); err != nil {
		return 0, err
	}
	config, err := nvidia.Parse(configMap.Data[key])
	if err != nil {
		return 0, err
	}
	advertised, err := nvidia.Advertise(config, nvidia.Environment{}, []gpu.Device{{UUID: "one"}})
	return int64(len(advertised[resourceGPU])), err
}

// heartbeats are the kubelets' full status every five minutes (nodeStatusReportFrequency), spread evenly, until the
// context ends.
func (f *fleet) heartbeats(ctx context.Context) {
	ticker := time.NewTicker(5 * time.Minute / time.Duration(len(f.names)))
	defer ticker.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		patch := fmt.Appendf(nil, `{"status":{"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":%q}]}}`, time.Now().UTC().Format(time.RFC3339))
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: f.names[i%len(f.names)]}}
		err := f.client.Status().Patch(ctx, node, client.RawPatch(types.StrategicMergePatchType, patch))
		if err != nil && ctx.Err() == nil && !strings.Contains(err.Error(), context.DeadlineExceeded.Error()) {
			f.fail(err)
		}
	}
}
