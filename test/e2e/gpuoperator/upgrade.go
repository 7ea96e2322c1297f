// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
)

// States of a node in a driver upgrade, the values of LabelUpgrade, in their order (NVIDIA/k8s-operator-libs
// pkg/upgrade/consts.go). If only the driver's pod restarts, the node goes from CordonRequired to PodRestartRequired.
const (
	LabelUpgrade = "nvidia.com/gpu-driver-upgrade-state"

	UpgradeRequired     = "upgrade-required"
	CordonRequired      = "cordon-required"
	WaitForJobsRequired = "wait-for-jobs-required"
	PodDeletionRequired = "pod-deletion-required"
	PodRestartRequired  = "pod-restart-required"
	ValidationRequired  = "validation-required"
	UncordonRequired    = "uncordon-required"
	UpgradeDone         = "upgrade-done"
	UpgradeFailed       = "upgrade-failed"
)

const (
	// goneAfter is how long evicted pods and stopped operands may take to end, and validAfter the validator to be Ready.
	goneAfter, validAfter = 5 * time.Minute, 10 * time.Minute
	// unloads is how often the driver's pod may fail until the upgrade has, and backoff how long the kubelet waits
	// before it starts the pod's init container again; the kubelet doubles that each time.
	unloads, backoff = 4, 10 * time.Second
)

// Upgrade plays what happens on a node when the pod of NVIDIA's driver is replaced: the work of the GPU Operator's
// upgrade controller (v26.7), of k8s-driver-manager (v0.12.0), and of the driver container itself.
type Upgrade struct {
	Client client.Client
	Node   string
	// Driver is the driver of the node. Run replaces it.
	Driver *driver.Driver
	// Toolkit is installed anew for the new driver.
	Toolkit driver.Toolkit
	// Version is that of the new driver. Empty: only the driver's pod restarts, and module and workloads stay.
	Version string
	// Manual says that no upgrade controller takes part (driver.upgradePolicy.autoUpgrade: false): a user deletes the
	// driver's pod, and k8s-driver-manager evicts the pods that use GPUs, right before it unloads the module.
	Manual bool
	Log    io.Writer
	// Entered is called when the node enters a state.
	Entered func(state string)
	// Blocked has, for each attempt to unload the module that failed, what had the driver open: the program and its
	// pod.
	Blocked [][]string

	unloaded bool
}

// Run takes the node through the states of an upgrade. If one fails, the node stays in upgrade-failed.
func (u *Upgrade) Run(ctx context.Context) error {
	if u.Manual {
		if err := u.restartPod(ctx); err != nil {
			return err
		}
		return u.awaitValidator(ctx)
	}
	for _, step := range u.steps() {
		if err := u.enter(ctx, step.state); err != nil {
			return err
		}
		if step.do == nil {
			continue
		}
		if err := step.do(ctx); err != nil {
			return errors.Join(fmt.Errorf("upgrading the driver, %s: %w", step.state, err), u.enter(ctx, UpgradeFailed))
		}
	}
	return u.enter(ctx, UpgradeDone)
}

type upgradeStep struct {
	state string
	do    func(context.Context) error // nil: nothing that matters here
}

func (u *Upgrade) steps() []upgradeStep {
	begin := []upgradeStep{
		{UpgradeRequired, nil},
		{CordonRequired, func(ctx context.Context) error { return u.cordon(ctx, true) }},
	}
	if u.Version != "" {
		begin = append(begin, upgradeStep{WaitForJobsRequired, nil}, upgradeStep{PodDeletionRequired, u.deletePods})
	}
	return append(begin,
		upgradeStep{PodRestartRequired, u.restartPod},
		upgradeStep{ValidationRequired, u.awaitValidator},
		upgradeStep{UncordonRequired, func(ctx context.Context) error { return u.cordon(ctx, false) }},
	)
}

// enter writes a state to the node.
func (u *Upgrade) enter(ctx context.Context, state string) error {
	u.log("driver upgrade:", state)
	if err := u.label(ctx, map[string]string{LabelUpgrade: state}); err != nil {
		return err
	}
	if u.Entered != nil {
		u.Entered(state)
	}
	return nil
}

// restartPod deletes the driver's pod, and plays its successor: k8s-driver-manager as its init container, which the
// kubelet starts again if it fails, and then the driver container. The toolkit's pod starts after that.
func (u *Upgrade) restartPod(ctx context.Context) error {
	u.log("driver upgrade: the driver's pod is deleted")
	if err := u.Driver.PreStop(); err != nil {
		return err
	}
	unloaded, err := u.Driver.Shutdown()
	if err != nil {
		return err
	}
	u.unloaded = unloaded
	wait := backoff
	for err = u.manageDriver(ctx); err != nil; err = u.manageDriver(ctx) {
		inUse, is := errors.AsType[*driver.InUse](err)
		if !is {
			return err
		}
		names, nameErr := u.name(ctx, inUse)
		u.Blocked = append(u.Blocked, names)
		u.log("k8s-driver-manager: could not unload NVIDIA driver kernel modules, driver is in use by", names)
		if nameErr != nil || len(u.Blocked) == unloads {
			return errors.Join(err, nameErr)
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
		wait *= 2
	}
	next := u.Driver.Options
	if u.Version != "" {
		next.Version = u.Version
	}
	if u.Driver, err = driver.Start(next); err != nil {
		return err
	}
	return u.Toolkit.Install(ctx, u.Driver)
}

// manageDriver is k8s-driver-manager's command uninstall_driver. Where the module was unloaded already, it stops
// nothing.
func (u *Upgrade) manageDriver(ctx context.Context) (err error) {
	if u.unloaded {
		return u.Driver.Unmount()
	}
	found, err := u.deployLabels(ctx)
	if err != nil {
		return err
	}
	if err := u.label(ctx, each(found, stoppedForUpgrade)); err != nil {
		return err
	}
	u.log("k8s-driver-manager: stopped the operands")
	defer func() { err = errors.Join(err, u.label(ctx, each(found, restored))) }()
	if err := u.awaitOperands(ctx, found); err != nil {
		return err
	}
	u.log("k8s-driver-manager: the operands are gone")
	if u.Version != "" {
		if err := u.unload(ctx); err != nil {
			return err
		}
	}
	return u.Driver.Unmount()
}

// unload unloads the module, without an upgrade controller after the pods that use GPUs were evicted.
func (u *Upgrade) unload(ctx context.Context) (err error) {
	if !u.Manual {
		return u.Driver.Unload()
	}
	if err := u.cordon(ctx, true); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.cordon(ctx, false)) }()
	if err := u.deletePods(ctx); err != nil {
		return err
	}
	u.log("k8s-driver-manager: the pods that use GPUs are gone")
	return u.Driver.Unload()
}

// log writes what happens, with the time.
func (u *Upgrade) log(what ...any) {
	_, _ = fmt.Fprintln(u.Log, append([]any{"  ", time.Now().Format("15:04:05.000")}, what...)...)
}

func sleep(ctx context.Context, duration time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(duration):
		return nil
	}
}
