// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/connection"
	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/serving"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/access"
)

// runAgent serves the node until the context ends.
func runAgent(ctx context.Context, args []string) error {
	f, err := parseAgentFlags(args)
	if err != nil {
		return err
	}
	mgr, err := newManager(f)
	if err != nil {
		return err
	}
	proc, err := os.OpenRoot("/proc")
	if err != nil {
		return fmt.Errorf("opening the proc file system: %w", err)
	}
	root, err := os.OpenRoot(f.hostRoot)
	if err != nil {
		return fmt.Errorf("opening the root of the node's file system: %w", err)
	}
	containers := host.NewContainerLogs(root)
	ctx, end := context.WithCancel(ctx)
	defer end()
	hardware := newHardware(f.drivers(), func() {
		ctrl.Log.Info("The NVIDIA driver was replaced, so this process ends: a new one loads the new driver's library")
		end()
	})
	status := agent.NewStatusWriter(mgr.GetClient())
	c, err := newController(f, mgr, status, proc, containers, hardware)
	if err != nil {
		return err
	}
	if err := c.Register(mgr); err != nil {
		return err
	}
	if err := serveUsage(ctx, f, mgr, c); err != nil {
		return err
	}
	processes := host.NewProc(proc)
	configs := agent.NewConfigReporter(f.node, mgr.GetClient(), status, processes, processes,
		f.kubelet(), clock.RealClock{})
	if err := configs.Register(mgr); err != nil {
		return err
	}
	if err := agent.NewMemoryGuard(f.node, mgr.GetClient(), c.Usage, clock.RealClock{}).Register(mgr); err != nil {
		return err
	}
	if err := newMemoryLimiter(f, c, processes, containers).Register(mgr); err != nil {
		return err
	}
	alive := map[string]healthz.Checker{"ping": healthz.Ping, "driver": hardware.Alive}
	if err := serving.Health(ctx, mgr, f.healthAddress, alive, map[string]healthz.Checker{"agent": c.Ready}); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

// newManager makes a manager that sees no GPUNode but the node's own.
func newManager(f agentFlags) (manager.Manager, error) {
	config, err := connection.Config(agent.FieldManager)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("registering the API: %w", err)
	}
	own := cache.ByObject{Field: fields.OneTermEqualSelector("metadata.name", f.node)}
	mgr, err := ctrl.NewManager(config, manager.Options{
		Scheme:  scheme,
		Cache:   cache.Options{ByObject: map[client.Object]cache.ByObject{&v1alpha1.GPUNode{}: own}},
		Metrics: server.Options{BindAddress: "0"},
	})
	if err != nil {
		return nil, fmt.Errorf("making the manager: %w", err)
	}
	return mgr, nil
}

// serveUsage measures who uses the GPUs whenever the metrics or the usage is read, and otherwise at the sampling
// interval, if there is one.
func serveUsage(ctx context.Context, f agentFlags, mgr manager.Manager, c *agent.Controller) error {
	collector := agent.NewUsageCollector(func() (usage.Report, error) {
		report, err := c.Usage(ctx)
		if err != nil {
			ctrl.Log.Info("Not all GPUs could be measured", "reason", err.Error())
		}
		return report, err
	})
	if err := registry.Registry.Register(collector); err != nil {
		return fmt.Errorf("registering the metrics of the GPUs: %w", err)
	}
	sampler := agent.NewSampler(f.node, f.samplingInterval, c.Usage, clock.RealClock{})
	if err := mgr.Add(sampler); err != nil {
		return fmt.Errorf("adding the sampler of the GPUs: %w", err)
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has(usage.HistoryQuery) {
			sampler.ServeHTTP(w, r)
			return
		}
		c.ServeUsage(w, r)
	})
	return serving.Metrics(ctx, mgr, f.metricsAddress, access.Guard(clock.RealClock{}, usage.TokenHeader), map[string]http.Handler{usage.Path: handler})
}

// newController connects the agent to the driver, the host and the kubelet.
func newController(
	f agentFlags, mgr manager.Manager, status *agent.StatusWriter, proc *os.Root, containers *host.ContainerLogs, hardware gpu.Hardware,
) (*agent.Controller, error) {
	processes := host.NewProc(proc)
	boot, err := processes.ID()
	if err != nil {
		return nil, err
	}
	control, err := newControl(f.hostFlags, proc)
	if err != nil {
		return nil, err
	}
	allocations, err := newAllocations(f.podResourcesSocket)
	if err != nil {
		return nil, err
	}
	return agent.New(agent.Config{
		Node: f.node, BootID: boot, Client: mgr.GetClient(), Reader: mgr.GetAPIReader(), Hardware: hardware,
		Nodes: driver.NewDeviceNodes(f.drivers(), host.Exec{}, f.cdiRoot), MPS: mps.NewView(control), Processes: processes,
		Containers: containers, Rebooter: newRebooter(f, proc), Allocations: allocations,
		Driver: f.drivers().Find, Status: status, Clock: clock.RealClock{}, Resync: f.resync,
		InitContainers: func() ([]host.HeldDevice, error) { return f.kubelet().Held(processes, containers) },
	}), nil
}

// kubelet is the node's.
func (f *agentFlags) kubelet() host.Kubelet {
	return host.Kubelet{Host: f.hostRoot, Folder: f.kubeletRoot}
}

// newMemoryLimiter connects the memory limits to the host. Their record goes with a reboot, as all control groups do.
func newMemoryLimiter(f agentFlags, c *agent.Controller, proc *host.Proc, containers *host.ContainerLogs) *agent.MemoryLimiter {
	return agent.NewMemoryLimiter(c, agent.LimitSources{
		Gate: f.memoryLimits, Cgroups: cgroups(), PodNames: containers.Pods,
		Devices: f.kubelet().Devices, MemacctMode: proc.MemacctMode,
		Record: host.RecordFile{Path: filepath.Join(f.mpsRoot, ".memory-limits", "record.json")}, PodLogs: host.PodLogFolder(f.hostRoot),
	})
}

// newRebooter reboots the node, where that is allowed.
func newRebooter(f agentFlags, proc *os.Root) host.Rebooter {
	if !f.allowReboot {
		return host.NoReboot("it was started without --allow-reboot (with Helm agent.allowReboot=true)")
	}
	return host.NewSystemd(proc)
}

// newHardware is NVML of the driver that the node has. Replaced ends this process.
func newHardware(node driver.Node, replaced func()) *agent.LazyHardware {
	return agent.NewLazyHardware(agent.Source{
		Find: node.Find,
		Open: func(found driver.Driver) gpu.Hardware {
			return nvml.New(nvml.Options{
				Library: found.Library, SMI: agent.SMI(host.Exec{}, node.Find), After: clock.RealClock{}.After,
				Now: clock.RealClock{}.Now,
			})
		},
		Prepare:  func(ctx context.Context, found driver.Driver) error { return found.Prepare(ctx, host.Exec{}) },
		Replaced: replaced,
	}, clock.RealClock{})
}

func newAllocations(socket string) (agent.Allocations, error) {
	if socket == "" {
		return agent.NoAllocations{}, nil
	}
	return agent.DialPodResources(socket)
}
