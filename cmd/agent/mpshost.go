// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
)

// runMPSHost keeps the MPS control daemons of the node until the context ends. If nobody uses MPS then, it takes away
// the shared memory that runMPSPrepare has mounted on the node; the next pod mounts it again. If the next pod is there
// already, which starts beside one that was deleted by force, the shared memory stays.
func runMPSHost(ctx context.Context, args []string) error {
	var f hostFlags
	set := flag.NewFlagSet("agent mps-host", flag.ContinueOnError)
	f.bind(set)
	if err := f.parse(set, args); err != nil {
		return err
	}
	proc, err := os.OpenRoot("/proc")
	if err != nil {
		return fmt.Errorf("opening /proc: %w", err)
	}
	defer proc.Close() //nolint:errcheck // only read
	control, err := newControl(f, proc)
	if err != nil {
		return err
	}
	drivers := f.drivers()
	mpsHost := mps.NewHost(control, mps.Node{
		Processes: host.NewProc(proc), SharesMemory: f.sharesMemory,
		DriverContainerReady: drivers.ContainerReady, DriverVersion: drivers.Version,
		// The validator's mark also goes when its pod starts again and nothing else does. Pods can start then.
		DriverLeaves: func() bool { return drivers.Leaving() && !drivers.ContainerReady() },
	})
	if err := mpsHost.Run(ctrl.LoggerInto(ctx, ctrl.Log.WithName("mps-host"))); err != nil {
		return err //nolint:wrapcheck // says what is to be done
	}
	if unused, err := mpsHost.Unused(); err != nil || !unused {
		return err //nolint:wrapcheck // names what it did
	}
	pod, err := podName()
	if err != nil {
		return err
	}
	return host.UnmountSharedMemory(f.sharedMemory(), pod)
}

// podName is the name of the pod, which all its containers have as their host name. A successor has another one.
func podName() (string, error) {
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("finding the name of the pod: %w", err)
	}
	return name, nil
}

// sharedMemory is where the shared memory of daemons and clients is mounted on the node.
func (f *hostFlags) sharedMemory() string { return filepath.Join(f.mpsRoot, mps.SharedMemory) }

// sharesMemory reports whether /dev/shm of this container is what the node has mounted below the MPS root, which this
// container sees as it changes. Outside of a container there is nothing to compare.
func (f *hostFlags) sharesMemory() bool {
	if f.containerRoot == "" {
		return true
	}
	own, ownErr := host.IDOf(filepath.Join(f.containerRoot, "dev/shm"))
	node, nodeErr := host.IDOf(f.sharedMemory())
	return ownErr == nil && nodeErr == nil && own == node
}

// newControl speaks with the daemons below the MPS root, those in this program's PID namespace.
func newControl(f hostFlags, proc *os.Root) (mps.Control, error) {
	if err := os.MkdirAll(f.mpsRoot, 0o755); err != nil { //nolint:gosec // clients of any user go through it
		return mps.Control{}, fmt.Errorf("making the MPS root: %w", err)
	}
	root, err := os.OpenRoot(f.mpsRoot)
	if err != nil {
		return mps.Control{}, fmt.Errorf("opening the MPS root: %w", err)
	}
	return mps.NewControl(driver.NewRunner(f.drivers(), host.Exec{}), root, clock.RealClock{}).By(host.NewProc(proc)), nil
}
