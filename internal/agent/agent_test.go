// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	mpsfake "github.com/gpusharing/gpu-sharing-operator/test/mps/fake"
)

const resync = time.Minute

// node is a node with its GPUs, its host and its agent. Tests call Reconcile themselves.
type node struct {
	*testing.T
	Gomega

	name        string
	cluster     *env.Cluster
	hardware    *sim.Hardware
	between     *between
	nodes       deviceNodes
	processes   *hostfake.Processes
	containers  containers
	inits       []host.HeldDevice // of init containers
	allocations *allocations
	runner      *hostfake.Runner
	rebooter    *hostfake.Rebooter
	daemons     *mpsfake.Daemons
	clock       *mpsfake.Clock
	mpsRoot     string
	mpsHost     *mps.Host
	view        *mps.View
	controller  *agent.Controller

	sharedMemoryReplaced bool // below the daemons, by another program

	afterGet func() // a read of the agent
	writes   int    // API requests that write
	status   *agent.StatusWriter
	refusal  error
}

// scenario is one test on the API server that all share.
type scenario struct {
	*testing.T

	cluster *env.Cluster
	name    string // of the node
}

// node makes a node whose GPUNode has an empty spec as yet.
func (s scenario) node(suffix string, models ...sim.Model) *node {
	s.Helper()
	n := &node{
		T: s.T, Gomega: NewWithT(s.T), name: s.name + suffix, cluster: s.cluster, hardware: sim.New(models...), mpsRoot: s.TempDir(),
		processes: hostfake.NewProcesses("boot-1"), allocations: &allocations{}, daemons: mpsfake.NewDaemons(),
		clock: mpsfake.NewClock(time.Unix(1_800_000_000, 0)), containers: containers{},
	}
	n.between = &between{Hardware: n.hardware}
	n.rebooter = &hostfake.Rebooter{Boot: func() {
		n.hardware.Reboot()
		n.processes.Reboot("boot-2")
	}}
	n.runner = hostfake.NewRunner().Add("nvidia-cuda-mps-control", n.daemons.Program)
	root, err := os.OpenRoot(n.mpsRoot)
	n.Expect(err).NotTo(HaveOccurred())
	s.Cleanup(func() { _ = root.Close() })
	control := mps.NewControl(n.runner, root, n.clock)
	n.mpsHost, n.view = mps.NewHost(control, mps.Node{
		Processes: n.daemons, DriverContainerReady: func() bool { return true }, DriverLeaves: func() bool { return false },
		DriverVersion: func() string { return "" },
		SharesMemory:  func() bool { return !n.sharedMemoryReplaced },
	}), mps.NewView(control)
	converges := false // the pod has one thread: what it waits for itself it does not do meanwhile
	n.clock.Meanwhile = func() {
		if converges {
			return
		}
		converges = true
		defer func() { converges = false }()
		_ = n.mpsHost.Converge(s.Context(), true)
	}
	n.restartAgent()
	n.specify()
	return n
}

// restartAgent starts the agent anew: all that it knew is gone.
func (n *node) restartAgent() {
	boot, err := n.processes.ID()
	n.Expect(err).NotTo(HaveOccurred())
	n.status = agent.NewStatusWriter(n.client())
	n.controller = agent.New(agent.Config{
		Node: n.name, BootID: boot, Client: n.client(), Reader: n.cluster.Client, Hardware: n.between, Nodes: &n.nodes, MPS: n.view,
		Processes: n.processes, Containers: n.containers, Rebooter: n.rebooter, Allocations: n.allocations, Clock: n.clock, Resync: resync,
		Status: n.status, InitContainers: func() ([]host.HeldDevice, error) { return n.inits, nil },
	})
}

// client counts writes, and refuses them on request.
func (n *node) client() client.Client {
	return interceptor.NewClient(n.cluster.Client, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			err := c.Get(ctx, key, o, opts...)
			if n.afterGet != nil {
				n.afterGet()
			}
			return err
		},
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			return errors.New("the agent applies nothing but the status")
		},
		SubResourceApply: func(
			ctx context.Context, c client.Client, sub string, o runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption,
		) error {
			n.writes++
			if n.refusal != nil {
				return n.refusal
			}
			return c.SubResource(sub).Apply(ctx, o, opts...)
		},
	})
}

// specify writes the spec as the controller does.
func (n *node) specify(devices ...v1alpha1.DeviceSpec) {
	n.Helper()
	n.setSpec(v1alpha1.GPUNodeSpec{PolicyName: "research", Devices: devices})
}

func (n *node) setSpec(wanted v1alpha1.GPUNodeSpec) {
	n.Helper()
	spec, err := ssa.Configuration[ac.GPUNodeSpecApplyConfiguration](wanted)
	n.Expect(err).NotTo(HaveOccurred())
	err = n.cluster.Client.Apply(n.Context(), ac.GPUNode(n.name).WithSpec(spec), client.FieldOwner("gpusharing-controller"), client.ForceOwnership)
	n.Expect(err).NotTo(HaveOccurred())
}

// reconcile reconciles once.
func (n *node) reconcile() (reconcile.Result, error) {
	n.Helper()
	result, err := n.controller.Reconcile(n.Context(), n.get())
	env.ExpectStatusSane(n.T, n.get())
	return result, err
}

// reconciled makes a reconcile that succeeds.
func (n *node) reconciled() reconcile.Result {
	n.Helper()
	result, err := n.reconcile()
	n.Expect(err).NotTo(HaveOccurred())
	return result
}

// settle makes a reconcile that succeeds, and another that changes nothing.
func (n *node) settle() {
	n.Helper()
	n.reconciled()
	n.expectIdle()
}

// expectIdle makes a reconcile that neither writes to the API nor to the hardware.
func (n *node) expectIdle() {
	n.Helper()
	api, hardware, version := n.writes, len(n.hardware.Writes()), n.get().ResourceVersion
	n.reconciled()
	n.Expect(n.writes-api).To(BeZero(), "API writes of a reconcile with nothing changed")
	n.Expect(n.hardware.Writes()[hardware:]).To(BeEmpty(), "hardware writes of a reconcile with nothing changed")
	n.Expect(n.get().ResourceVersion).To(Equal(version))
}

func (n *node) get() *v1alpha1.GPUNode {
	n.Helper()
	o := &v1alpha1.GPUNode{}
	n.Expect(n.cluster.Client.Get(n.Context(), client.ObjectKey{Name: n.name}, o)).To(Succeed())
	return o
}

func (n *node) uuid(index int) (uuid string) {
	n.hardware.Update(func(s *sim.Node) { uuid = s.GPUs[index].UUID })
	return uuid
}

// device is how the hardware is, not what the status says.
func (n *node) device(index int) (d gpu.Device) {
	n.hardware.Update(func(s *sim.Node) { d = s.Observe().Devices[index] })
	return d
}

func (n *node) profiles(index int) []string {
	var names []string
	for _, i := range n.device(index).State.Instances {
		names = append(names, i.Profile)
	}
	return names
}

func (n *node) pipe(resource string) string { return filepath.Join(n.mpsRoot, resource, "pipe") }

// expectCondition checks status and reason, and returns the message.
func (n *node) expectCondition(conditionType string, status metav1.ConditionStatus, reason string) string {
	n.Helper()
	o := n.get()
	c, found := condition.Find(o.Status.Conditions, conditionType)
	n.Expect(found).To(BeTrue(), "%s in %+v", conditionType, o.Status.Conditions)
	n.Expect(c.Status).To(Equal(status), "%+v", c)
	n.Expect(c.Reason).To(Equal(reason), "%+v", c)
	n.Expect(c.ObservedGeneration).To(Equal(o.Generation), "%+v", c)
	return c.Message
}

func (n *node) expectNoCondition(conditionType string) {
	n.Helper()
	_, found := condition.Find(n.get().Status.Conditions, conditionType)
	n.Expect(found).To(BeFalse(), "%s is there", conditionType)
}

func (n *node) expectReady() {
	n.Helper()
	reason := v1alpha1.ReasonApplied
	if len(n.get().Spec.Devices) == 0 {
		reason = v1alpha1.ReasonNoPolicy
	}
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionTrue, reason)
	n.expectNoCondition(v1alpha1.ConditionApplyStalled)
}

func mig(uuid string, instances ...v1alpha1.InstanceCount) v1alpha1.DeviceSpec {
	return v1alpha1.DeviceSpec{UUID: uuid, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: instances}}
}

func instances(profile string, count int32) v1alpha1.InstanceCount {
	return v1alpha1.InstanceCount{Profile: profile, Count: count}
}

func whole(uuid string) v1alpha1.DeviceSpec {
	return v1alpha1.DeviceSpec{UUID: uuid, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}}
}

func shared(uuid string, percentage int32, limit int64) v1alpha1.DeviceSpec {
	spec := whole(uuid)
	spec.Sharing.MPS = &v1alpha1.MPSDaemon{
		ResourceName: "nvidia.com/gpu", Owner: v1alpha1.MPSDaemonOwnerGPUSharing,
		ActiveThreadPercentage: percentage, PinnedMemoryLimit: new(resource.MustParse(fmt.Sprintf("%dMi", limit))),
	}
	return spec
}

// deviceNodes are those of the node's MIG instances.
type deviceNodes struct {
	ensured int
	err     error // why they cannot be made
}

func (d *deviceNodes) Ensure(context.Context) error {
	d.ensured++
	return d.err
}

// between lets something happen between two calls of the hardware.
type between struct {
	gpu.Hardware

	afterDestroy func()
	closed       int
}

func (b *between) DestroyInstance(ctx context.Context, uuid string, id int) error {
	err := b.Hardware.DestroyInstance(ctx, uuid, id)
	if b.afterDestroy != nil {
		b.afterDestroy()
	}
	return err
}

func (b *between) Close() error {
	b.closed++
	return b.Hardware.Close()
}

// containers are the containers of the node by ID.
type containers map[string]host.ContainerName

func (c containers) Names() (map[string]host.ContainerName, error) { return c, nil }

// allocations are what the kubelet says.
type allocations struct {
	mu         sync.Mutex
	list       []agent.Allocation
	advertised []string
	err        error
}

func (a *allocations) Advertised(context.Context) ([]string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.advertised), a.err
}

func (a *allocations) List(context.Context) ([]agent.Allocation, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.list), a.err
}

func (a *allocations) free() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = nil
}

func (a *allocations) hold(pod, device string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = append(a.list, agent.Allocation{Namespace: "ml", Pod: pod, Container: "main", Device: device})
}

func (a *allocations) claim(pod string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = append(a.list, agent.Allocation{Namespace: "ml", Pod: pod, Container: "main", Claim: "ml/claim"})
}

// startNVIDIAs starts a daemon as NVIDIA's MPS DaemonSet does.
func (n *node) startNVIDIAs() {
	n.Helper()
	dir := filepath.Dir(n.pipe("nvidia.com/gpu"))
	for _, sub := range []string{"pipe", "log"} {
		n.Expect(os.MkdirAll(filepath.Join(dir, sub), 0o755)).To(Succeed())
	}
	n.Expect(os.WriteFile(filepath.Join(dir, ".started"), nil, 0o600)).To(Succeed())
	n.Expect(n.daemons.Start(filepath.Join(dir, "pipe"), filepath.Join(dir, "log"))).To(Succeed())
}
