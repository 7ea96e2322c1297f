// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/mps"
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
	c, err := newController(f, mgr, proc)
	if err != nil {
		return err
	}
	if err := c.Register(mgr); err != nil {
		return err
	}
	processes := host.NewProc(proc)
	configs := agent.NewConfigReporter(f.node, mgr.GetClient(), processes, processes, clock.RealClock{})
	if err := configs.Register(mgr); err != nil {
		return err
	}
	if err := mgr.AddReadyzCheck("agent", c.Ready); err != nil {
		return fmt.Errorf("adding the readiness check: %w", err)
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return fmt.Errorf("adding the liveness check: %w", err)
	}
	return mgr.Start(ctx)
}

// newManager makes a manager that sees no GPUNode but the node's own.
func newManager(f agentFlags) (manager.Manager, error) {
	config, err := ctrl.GetConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the API server: %w", err)
	}
	config.UserAgent = agent.FieldManager
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("registering the API: %w", err)
	}
	own := cache.ByObject{Field: fields.OneTermEqualSelector("metadata.name", f.node)}
	mgr, err := ctrl.NewManager(config, manager.Options{
		Scheme:                 scheme,
		Cache:                  cache.Options{ByObject: map[client.Object]cache.ByObject{&v1alpha1.GPUNode{}: own}},
		HealthProbeBindAddress: f.healthAddress,
		Metrics:                server.Options{BindAddress: f.metricsAddress},
	})
	if err != nil {
		return nil, fmt.Errorf("making the manager: %w", err)
	}
	return mgr, nil
}

// newController wires the agent to the driver, the host and the kubelet.
func newController(f agentFlags, mgr manager.Manager, proc *os.Root) (*agent.Controller, error) {
	processes := host.NewProc(proc)
	boot, err := processes.ID()
	if err != nil {
		return nil, err
	}
	control, err := newControl(f.hostFlags)
	if err != nil {
		return nil, err
	}
	allocations, err := newAllocations(f.podResourcesSocket)
	if err != nil {
		return nil, err
	}
	return agent.New(agent.Config{
		Node: f.node, BootID: boot, Client: mgr.GetClient(), Reader: mgr.GetAPIReader(), Hardware: newHardware(f.driverRoot),
		MPS: mps.NewView(control), Processes: processes, Rebooter: newRebooter(f, proc), Allocations: allocations,
		Clock: clock.RealClock{}, Resync: f.resync,
	}), nil
}

// newRebooter reboots the node, where that is allowed.
func newRebooter(f agentFlags, proc *os.Root) host.Rebooter {
	if !f.allowReboot {
		return host.NoReboot("it was started without --allow-reboot (with Helm agent.allowReboot=true)")
	}
	return host.NewSystemd(proc)
}

// newHardware is NVML below the driver root, as soon as it is there.
func newHardware(driverRoot string) gpu.Hardware {
	return agent.NewLate(func() (gpu.Hardware, error) {
		library, err := nvml.FindLibrary(driverRoot)
		if err != nil {
			return nil, err
		}
		return nvml.New(nvml.Options{
			Library: library, SMI: agent.SMI(host.Exec{}, host.DriverRoot(driverRoot)),
		}), nil
	})
}

func newAllocations(socket string) (agent.Allocations, error) {
	if socket == "" {
		return agent.NoAllocations{}, nil
	}
	return agent.DialPodResources(socket)
}
