// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// startedAfter is how long a daemon may take until its socket is there, and stoppedAfter until it has ended.
const startedAfter, stoppedAfter = 30 * time.Second, 10 * time.Second

const fabricManager = "nv-fabricmanager"

// startDaemons starts nvidia-persistenced, as every driver container does, with its socket in the driver's own /run,
// and the fabric manager, whose socket is in a folder of the node.
func (d *Driver) startDaemons() error {
	if err := d.startDaemon("nvidia-persistenced", simdriver.PersistencedSocket, "--persistence-mode"); err != nil || !d.FabricManager {
		return err
	}
	folder := filepath.Dir(simdriver.FabricManagerSocket)
	if d.own != "" {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return fmt.Errorf("making the folder of the fabric manager's socket: %w", err)
		}
		if err := bind(folder, filepath.Join(d.own, "run", filepath.Base(folder)), unix.MS_BIND); err != nil {
			return err
		}
	}
	return d.startDaemon(fabricManager, simdriver.FabricManagerSocket)
}

// startDaemon starts a daemon in the driver's root and waits for its socket.
func (d *Driver) startDaemon(name, socket string, args ...string) error {
	c := d.command("/usr/bin/"+name, append(args, "--foreground")...)
	if err := c.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", name, err)
	}
	one := &daemon{cmd: c, ended: make(chan struct{})}
	go func() {
		_ = c.Wait() // how it ended does not matter
		close(one.ended)
	}()
	d.daemons = append(d.daemons, one)
	return one.wait(filepath.Join("/", d.own, strings.TrimPrefix(socket, "/var")))
}

// daemon is a process of the driver.
type daemon struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// wait waits for a daemon's socket.
func (d *daemon) wait(socket string) error {
	deadline := time.After(startedAfter)
	for {
		if _, err := os.Stat(socket); err == nil {
			return nil
		}
		select {
		case <-d.ended:
			return fmt.Errorf("%s has ended at once: %s", d.cmd.Path, d.cmd.ProcessState)
		case <-deadline:
			return fmt.Errorf("%s has made no socket %s", d.cmd.Path, socket)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// stopDaemons ends the daemons of the driver.
func (d *Driver) stopDaemons() error {
	var errs []error
	for _, one := range d.daemons {
		errs = append(errs, one.stop())
	}
	d.daemons = nil
	return errors.Join(errs...)
}

// stop ends a daemon, or finds that it has ended.
func (d *daemon) stop() error {
	err := d.cmd.Process.Signal(syscall.SIGTERM)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	select {
	case <-d.ended:
		return nil
	case <-time.After(stoppedAfter):
		return fmt.Errorf("%s does not end", d.cmd.Path)
	}
}
