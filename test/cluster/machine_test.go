// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientcache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	mpsfake "github.com/gpusharing/gpu-sharing-operator/test/mps/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

var one = resource.MustParse("1")

func silence() { ctrllog.SetLogger(logr.Discard()) }

// machine is a node: its GPUs, its kubelet, its MPS pod and what makes its agent fail.
type machine struct {
	name     string
	labels   map[string]string // that it registers with
	dir      string
	socket   string // of the kubelet's pod resources
	hardware *sim.Hardware
	node     *nodesim.Node
	daemons  *mpsfake.Daemons
	mps      sync.Mutex // serialises what the MPS pod does
	mpsHost  *mps.Host
	view     *mps.View
	boots    int
	reboots  *hostfake.Rebooter
	down     atomic.Bool  // the agent is lost
	pulls    atomic.Bool  // the image of NVIDIA's DRA driver is being pulled
	deaf     atomic.Bool  // NVIDIA's device plugin cannot read the GPUs
	looks    atomic.Int64 // so often the agent has observed the GPUs
	wake     chan struct{}
	touches  func(op sim.Op, uuid string, instance int) error
	usage    func(context.Context) (usage.Report, error) // as its agent measures it

	restartDelay  time.Duration // of its kubelet; zero: the real one's
	statusPeriod  time.Duration
	reportsConfig bool // its agent tells which of NVIDIA's programs see the config, as it does where there are processes
}

var errDown = errors.New("the agent does not run")

// newMachine makes a node that is off.
func newMachine(f *fleet, name string, labels map[string]string, models ...sim.Model) *machine {
	f.t.Helper()
	hardware, err := sim.NewNode(name, models...)
	f.Expect(err).NotTo(HaveOccurred())
	m := &machine{
		name: name, labels: labels, dir: filepath.Join(f.dir, name), hardware: sim.On(hardware), reboots: &hostfake.Rebooter{Boot: func() {}},
		touches: func(sim.Op, string, int) error { return nil }, wake: make(chan struct{}, 1), restartDelay: 500 * time.Millisecond,
		statusPeriod: 100 * time.Millisecond,
	}
	m.socket = filepath.Join(m.dir, "kubelet.sock")
	f.Expect(os.RemoveAll(m.dir)).To(Succeed()) // of a machine that had the name
	f.Expect(os.MkdirAll(m.dir, 0o755)).To(Succeed())
	f.Expect(f.client.Create(f.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ownNamespace, Name: name + "-agent", Labels: map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"},
		},
		Spec: corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "agent", Image: "gpu-sharing-agent"}}},
	})).To(Succeed())
	return m
}

// boot starts the kubelet and the MPS pod, and all that runs on the node does so anew.
func (m *machine) boot(f *fleet) (halt func()) {
	f.t.Helper()
	m.boots++
	m.node = nodesim.New(nodesim.Options{
		Name: m.name, Labels: m.labels, Client: f.sim, Clock: f.clock, Inventory: m.inventory, MPSAnswers: m.answers, Start: m.start,
		Wake: m.wake, StatusPeriod: m.statusPeriod, RestartDelay: m.restartDelay, RetryDelay: 500 * time.Millisecond,
		Pulls:        func(pod *corev1.Pod) bool { return m.pulls.Load() && cluster.OffersGPUs(pod) },
		OtherDrivers: map[string]func() error{"compute-domain.nvidia.com": func() error { return errors.New("the domain is not ready") }},
	})
	root, err := os.OpenRoot(m.dir)
	f.Expect(err).NotTo(HaveOccurred())
	m.daemons = mpsfake.NewDaemons()
	waits := mpsfake.NewClock(f.clock.Now())
	control := mps.NewControl(hostfake.NewRunner().Add("nvidia-cuda-mps-control", m.daemons.Program), root, waits)
	m.mpsHost = mps.NewHost(control, mps.Node{
		Processes: m.daemons, DriverContainerReady: func() bool { return true }, DriverLeaves: func() bool { return false },
		DriverVersion: func() string { return "" }, SharesMemory: func() bool { return true },
	})
	m.view = mps.NewView(control)
	waits.Meanwhile = func() { m.serveMPS(f.t.Context()) }
	node := m.node
	stop := f.background(func(ctx context.Context) {
		if err := node.ServePodResources(ctx, m.socket); err != nil {
			f.t.Errorf("%s: %v", m.name, err)
		}
		<-ctx.Done()
		_ = root.Close()
	})
	return stop
}

// wakeNodes wakes kubelets by watches: one when its node, its GPUNode or a pod on it changes, all of them when something
// else does that they read. Where each of twenty asked three times a second, three of four requests were theirs.
func (f *fleet) wakeNodes() {
	f.t.Helper()
	watched, err := cache.New(f.cluster.Config, cache.Options{Scheme: f.cluster.Scheme})
	f.Expect(err).NotTo(HaveOccurred())
	wake := func(changed any) {
		node := ""
		switch o := changed.(type) {
		case *corev1.Node:
			node = o.Name
		case *v1alpha1.GPUNode: // the agent has done something
			node = o.Name
		case *corev1.Pod:
			node = cmp.Or(o.Spec.NodeName, "none")
		}
		for _, m := range f.machines {
			if node != "" && node != m.name {
				continue
			}
			select {
			case m.wake <- struct{}{}:
			default: // it has not looked yet
			}
		}
	}
	for _, o := range []client.Object{&corev1.Node{}, &corev1.Pod{}, &corev1.ConfigMap{}, &appsv1.DaemonSet{}, &v1alpha1.GPUNode{}} {
		informer, err := watched.GetInformer(f.t.Context(), o)
		f.Expect(err).NotTo(HaveOccurred())
		_, err = informer.AddEventHandler(clientcache.ResourceEventHandlerFuncs{AddFunc: wake, UpdateFunc: func(_, o any) { wake(o) }, DeleteFunc: wake})
		f.Expect(err).NotTo(HaveOccurred())
	}
	f.background(func(ctx context.Context) { _ = watched.Start(ctx) })
}

// serveMPS is one turn of the MPS pod.
func (m *machine) serveMPS(ctx context.Context) {
	m.mps.Lock()
	defer m.mps.Unlock()
	_ = m.mpsHost.Converge(ctx, true) // it is tried again
}

// answers reports whether the MPS daemon of a resource answers.
func (m *machine) answers(_ context.Context, resource string) bool {
	return m.daemons.Get(filepath.Join(m.dir, resource, "pipe")) != nil
}

// agent registers the agent of the node.
func (m *machine) agent(f *fleet, mgr manager.Manager, resync time.Duration) {
	f.t.Helper()
	allocations, err := agent.DialPodResources(m.socket)
	f.Expect(err).NotTo(HaveOccurred())
	f.t.Cleanup(func() { _ = allocations.Close() })
	boot := fmt.Sprintf("boot-%d", m.boots)
	status := agent.NewStatusWriter(mgr.GetClient())
	if m.reportsConfig {
		reads := &configManagers{machine: m}
		f.Expect(agent.NewConfigReporter(m.name, mgr.GetClient(), status, reads, reads, reads, f.clock).Register(mgr)).To(Succeed())
	}
	controller := agent.New(agent.Config{
		Node: m.name, Status: status, BootID: boot, Client: mgr.GetClient(), Reader: mgr.GetAPIReader(), Hardware: m.gated(), Clock: f.clock, MPS: m.view,
		Processes: hostfake.NewProcesses(boot), Containers: noContainers{}, Rebooter: m.reboots, Allocations: allocations, Resync: resync,
	})
	m.usage = controller.Usage
	f.Expect(controller.Register(mgr)).To(Succeed())
}

// configManagers are NVIDIA's config-managers on a node, a process for each pod that reads its configuration.
type configManagers struct {
	*machine

	pods []string
}

func (c *configManagers) Running(string) ([]int, error) {
	c.pods = c.node.ReadConfigs()
	pids := make([]int, len(c.pods))
	for i := range pids {
		pids[i] = i
	}
	return pids, nil
}
func (*configManagers) Environment(int) map[string]string { return nil }
func (*configManagers) Privileged(int) bool               { return true }
func (c *configManagers) Projected(pod, key string) bool  { return c.node.SeesConfig(pod, key) }
func (c *configManagers) Describe(pid int) host.Process   { return host.Process{PodUID: c.pods[pid]} }

// noContainers: no process uses the GPUs.
type noContainers struct{}

func (noContainers) Names() (map[string]host.ContainerName, error) { return nil, nil }

// inventory is what NVIDIA's programs read.
func (m *machine) inventory(ctx context.Context) (gpu.Inventory, error) {
	if m.deaf.Load() {
		return gpu.Inventory{}, errors.New("nvml: GPU is lost")
	}
	return m.hardware.Observe(ctx)
}

// start is the process of a pod: the agent's pod is ready while the agent is not lost.
func (m *machine) start(_ context.Context, pod *corev1.Pod) (nodesim.Program, error) {
	if pod.Labels["app.kubernetes.io/name"] != "gpu-sharing-agent" {
		return nil, nil
	}
	return agentProcess{m}, nil
}

type agentProcess struct{ *machine }

func (agentProcess) Alive() bool                  { return true }
func (p agentProcess) Ready(context.Context) bool { return !p.down.Load() }
func (agentProcess) Stop()                        {}

// gated is the hardware of the agent, which does and sees nothing while it is lost.
func (m *machine) gated() gpu.Hardware { return gate{m.hardware, m} }

type gate struct {
	gpu.Hardware
	m *machine
}

func (g gate) open() error {
	if g.m.down.Load() {
		return errDown
	}
	return nil
}

func (g gate) Observe(ctx context.Context) (gpu.Inventory, error) {
	if err := g.open(); err != nil {
		return gpu.Inventory{}, err
	}
	g.m.looks.Add(1)
	return g.Hardware.Observe(ctx)
}

// touch asks whether the agent may do something to a GPU.
func (g gate) touch(op sim.Op, uuid string, instance int) error {
	return errors.Join(g.open(), g.m.touches(op, uuid, instance))
}

func (g gate) CreateInstance(ctx context.Context, uuid, profile string, at gpu.Placement) error {
	if err := g.touch(sim.OpCreateInstance, uuid, 0); err != nil {
		return err
	}
	return g.Hardware.CreateInstance(ctx, uuid, profile, at)
}

func (g gate) DestroyInstance(ctx context.Context, uuid string, id int) error {
	if err := g.touch(sim.OpDestroyInstance, uuid, id); err != nil {
		return err
	}
	return g.Hardware.DestroyInstance(ctx, uuid, id)
}

func (g gate) SetMIG(ctx context.Context, uuid string, enabled bool) error {
	if err := g.touch(sim.OpSetMIG, uuid, 0); err != nil {
		return err
	}
	return g.Hardware.SetMIG(ctx, uuid, enabled)
}

func (g gate) Reset(ctx context.Context, uuids ...string) error {
	for _, uuid := range uuids {
		if err := g.touch(sim.OpReset, uuid, 0); err != nil {
			return err
		}
	}
	return g.Hardware.Reset(ctx, uuids...)
}

// runNVIDIA runs NVIDIA's GPU Operator.
func (f *fleet) runNVIDIA() {
	operator := f.operator()
	f.background(func(ctx context.Context) { operator.Run(ctx, 500*time.Millisecond) })
}

func (f *fleet) operator() *nodesim.GPUOperator {
	return &nodesim.GPUOperator{Client: f.sim, Namespace: nvidiaSpace, Clock: f.clock, Tell: func(string, ...any) {}}
}
