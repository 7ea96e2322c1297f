// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
)

const clientsFolder = "clients"

// Client is a program that has NVML open. It holds a lock that the kernel lets go of when the program ends, however it
// ends, and that is seen across PID namespaces.
type Client struct{ file *os.File }

// Connect notes that this process has NVML open.
func (d *Driver) Connect() (*Client, error) {
	folder := d.path(clientsFolder)
	if err := makeShared(folder); err != nil && !errors.Is(err, os.ErrPermission) { // another user has made it
		return nil, err
	}
	f, err := os.CreateTemp(folder, fmt.Sprintf("%d-", os.Getpid()))
	if err != nil {
		return nil, fmt.Errorf("noting an NVML client: %w", err)
	}
	if err := flock(f, unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("noting an NVML client: %w", err)
	}
	return &Client{f}, nil
}

// Disconnect notes that NVML is closed.
func (c *Client) Disconnect() error {
	return errors.Join(os.Remove(c.file.Name()), c.file.Close())
}

// Connected lists the programs that have NVML open, by PID; several times if a process has it open through several
// libraries. Files of programs that ended without closing are removed.
func (d *Driver) Connected() ([]sim.Client, error) {
	entries, err := os.ReadDir(d.path(clientsFolder))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing NVML clients: %w", err)
	}
	var clients []sim.Client
	for _, e := range entries {
		number, _, _ := strings.Cut(e.Name(), "-")
		pid, err := strconv.Atoi(number)
		path := filepath.Join(d.path(clientsFolder), e.Name())
		if err != nil || !locked(path) {
			_ = os.Remove(path)
			continue
		}
		clients = append(clients, sim.Client{PID: pid})
	}
	return clients, nil
}

func locked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // only read
	return errors.Is(flock(f, unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// WithClients is UpdateAlways with the programs that have NVML open as clients of the node.
func (d *Driver) WithClients(change func(*State) error) error {
	return d.UpdateAlways(func(s *State) error {
		connected, err := d.Connected()
		if err != nil {
			return err
		}
		injected := s.Node.Clients
		defer func() { s.Node.Clients = injected }()
		s.Node.Clients = slices.Concat(injected, connected)
		return change(s)
	})
}
