// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
)

// observations counts how often the hardware is looked at.
type observations struct {
	gpu.Hardware

	count atomic.Int32
}

func (o *observations) Observe(ctx context.Context) (gpu.Inventory, error) {
	o.count.Add(1)
	return o.Hardware.Observe(ctx)
}

// TestManager runs the agent as it is shipped, but for the hardware, until its GPUNode appears, is changed and changed
// back by hand.
func TestManager(t *testing.T) {
	g, cluster := NewWithT(t), env.Start(t)
	hardware := sim.New(sim.A100)
	watched := &observations{Hardware: hardware}
	kubelet := &allocations{}
	var root atomic.Uint64 // the inode of the driver's root
	mpsRoot := startAgent(t, cluster, "node-a", watched, kubelet, func() (driver.Driver, error) {
		return driver.Driver{Identity: driver.Identity{Root: host.FileID{Inode: root.Load()}}}, nil
	})
	for _, name := range []string{"node-a", "node-b"} {
		g.Expect(cluster.Client.Apply(t.Context(), ac.GPUNode(name), client.FieldOwner("test"))).To(Succeed())
	}
	status := func(name string) v1alpha1.GPUNodeStatus {
		o := &v1alpha1.GPUNode{}
		g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: name}, o)).To(Succeed())
		return o.Status
	}
	ready := func() bool {
		s := status("node-a")
		return condition.IsTrue(s.Conditions, v1alpha1.ConditionApplied)
	}
	g.Eventually(ready, "20s").Should(BeTrue())
	uuid := status("node-a").Devices[0].UUID

	g.Expect(cluster.Client.Apply(t.Context(), ac.GPUNode("node-a").WithSpec(ac.GPUNodeSpec().WithDevices(
		ac.DeviceSpec().WithUUID(uuid).WithSharing(ac.DeviceSharing().WithMIGMode(v1alpha1.MIGModeEnabled).
			WithInstances(ac.InstanceCount().WithProfile("1g.5gb").WithCount(7))))), client.FieldOwner("test"))).To(Succeed())
	g.Eventually(func() []v1alpha1.InstanceStatus { return status("node-a").Devices[0].Instances }, "20s").Should(HaveLen(7))
	g.Eventually(ready, "20s").Should(BeTrue())
	g.Expect(status("node-b").ObservedGeneration).To(BeZero(), "another node's object is not this agent's")

	before := watched.count.Load()
	g.Consistently(watched.count.Load, "1s").Should(Equal(before), "its own report does not wake it")

	holders := func() []v1alpha1.HolderStatus { return status("node-a").Devices[0].Holders }
	kubelet.hold("train-0", status("node-a").Devices[0].Instances[2].UUID)
	g.Eventually(holders, "20s").Should(ConsistOf(HaveField("PodName", "train-0")), "an allocation wakes it")
	kubelet.free()
	g.Eventually(holders, "20s").Should(BeEmpty(), "and so does its end")

	before = watched.count.Load()
	root.Store(2)
	g.Eventually(watched.count.Load, "20s").Should(BeNumerically(">", before), "another driver wakes it")

	g.Expect(os.MkdirAll(filepath.Join(mpsRoot, "nvidia.com/gpu"), 0o755)).To(Succeed())
	for _, recorded := range []string{"", `, "error": "it does not answer"`, ""} {
		before = watched.count.Load()
		g.Expect(os.WriteFile(filepath.Join(mpsRoot, "nvidia.com/gpu", ".gpusharing.json"),
			[]byte(`{"daemon": {"Resource": "nvidia.com/gpu"}, "applied": true`+recorded+"}"), 0o600)).To(Succeed())
		g.Eventually(watched.count.Load, "20s").Should(BeNumerically(">", before), "and an MPS daemon that fails, or does no longer")
	}
}

func startAgent(
	t *testing.T, cluster *env.Cluster, name string, hardware gpu.Hardware, kubelet agent.Allocations, find func() (driver.Driver, error),
) (mpsRoot string) {
	t.Helper()
	g := NewWithT(t)
	mgr, err := manager.New(rest.CopyConfig(cluster.Config), manager.Options{
		Scheme: cluster.Scheme, HealthProbeBindAddress: "0", Metrics: server.Options{BindAddress: "0"},
	})
	g.Expect(err).NotTo(HaveOccurred())
	root, err := os.OpenRoot(t.TempDir())
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	processes := hostfake.NewProcesses("boot-1")
	c := agent.New(agent.Config{
		Node: name, BootID: "boot-1", Client: mgr.GetClient(), Hardware: hardware, Processes: processes,
		MPS:         mps.NewView(mps.NewControl(hostfake.NewRunner(), root, clock.RealClock{})),
		Allocations: kubelet, Driver: find, Clock: clock.RealClock{}, Resync: time.Hour,
	})
	g.Expect(c.Register(mgr)).To(Succeed())
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		stop()
		g.Expect(<-done).To(Succeed())
	})
	return root.Name()
}

// BenchmarkUnchangedReconcile is a reconcile with nothing changed on a node of eight GPUs: no API request, no write to
// the hardware.
func BenchmarkUnchangedReconcile(b *testing.B) {
	cluster := env.Start(b)
	models := make([]sim.Model, 8)
	for i := range models {
		models[i] = sim.A100
	}
	requests := 0
	c := interceptor.NewClient(cluster.Client, interceptor.Funcs{
		SubResourceApply: func(ctx context.Context, c client.Client, sub string, o runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption) error {
			requests++
			return c.SubResource(sub).Apply(ctx, o, opts...)
		},
	})
	root, err := os.OpenRoot(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	controller := agent.New(agent.Config{
		Node: "quiet", BootID: "boot-1", Client: c, Hardware: sim.New(models...), Processes: hostfake.NewProcesses("boot-1"),
		MPS:         mps.NewView(mps.NewControl(hostfake.NewRunner(), root, clock.RealClock{})),
		Allocations: agent.NoAllocations{}, Clock: clock.RealClock{}, Resync: time.Hour,
	})
	if err := cluster.Client.Apply(b.Context(), ac.GPUNode("quiet"), client.FieldOwner("test")); err != nil {
		b.Fatal(err)
	}
	node := &v1alpha1.GPUNode{}
	reconcile := func() {
		if err := cluster.Client.Get(b.Context(), client.ObjectKey{Name: "quiet"}, node); err != nil {
			b.Fatal(err)
		}
		if _, err := controller.Reconcile(b.Context(), node); err != nil {
			b.Fatal(err)
		}
	}
	reconcile()
	if err := cluster.Client.Get(b.Context(), client.ObjectKey{Name: "quiet"}, node); err != nil {
		b.Fatal(err)
	}
	requests = 0
	for b.Loop() {
		if _, err := controller.Reconcile(b.Context(), node); err != nil {
			b.Fatal(err)
		}
	}
	if requests != 0 {
		b.Fatalf("%d API writes with nothing changed", requests)
	}
}
