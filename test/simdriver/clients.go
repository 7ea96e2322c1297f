// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const clientsFolder = "clients"

// Client is a program that has the driver open. It holds a lock that the kernel lets go of when the program ends,
// however it ends, and that is seen across PID namespaces.
type Client struct {
	driver *store
	name   string // of the file, in the folder of the state
	file   *os.File
	what   sim.Client
}

// clients are the programs that have the driver open.
type clients struct{ *store }

// Connect notes that this process has the driver open, and with it every GPU, as NVML and DCGM do.
func (d clients) Connect() (*Client, error) { return d.ConnectAs(sim.Client{}) }

// ConnectAs notes that this process has opened what a client says. Its PID is filled in.
func (d clients) ConnectAs(what sim.Client) (*Client, error) {
	if err := makeShared(d.state, clientsFolder); err != nil && !errors.Is(err, os.ErrPermission) { // another user has made it
		return nil, err
	}
	unlock, err := d.lock() // nobody takes the file for one that was left behind
	if err != nil {
		return nil, fmt.Errorf("noting a client: %w", err)
	}
	defer unlock()
	name := path.Join(clientsFolder, fmt.Sprintf("%d-%s", os.Getpid(), rand.Text()))
	f, err := d.state.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("noting a client: %w", err)
	}
	if err := errors.Join(f.Chmod(0o644), flock(f, unix.LOCK_EX)); err != nil {
		return nil, fmt.Errorf("noting a client: %w", err)
	}
	c := &Client{driver: d.store, name: name, file: f, what: what}
	if err := c.write(); err != nil {
		return nil, fmt.Errorf("noting a client: %w", err)
	}
	return c, nil
}

// OpenFor opens every GPU for a while, as a program does that looks at them once.
func (d clients) OpenFor(ctx context.Context, duration time.Duration) error {
	c, err := d.Connect()
	if err != nil {
		return err
	}
	select {
	case <-time.After(duration):
	case <-ctx.Done():
	}
	return c.Disconnect()
}

// HoldInstances takes a handle of each MIG device that exists now, as DCGM does when it starts. Until the client
// disconnects they cannot be destroyed, and it is no process on them (NVIDIA/DCGM issue 276).
func (c *Client) HoldInstances() error {
	s, err := c.driver.Read()
	if err != nil {
		return err
	}
	return c.Change(func(what *sim.Client) {
		for _, g := range s.Node.GPUs {
			for _, i := range g.Instances {
				for _, compute := range i.Compute {
					if !slices.Contains(what.Instances, compute.UUID) {
						what.Instances = append(what.Instances, compute.UUID)
					}
				}
			}
		}
	})
}

// Change changes what the client has open.
func (c *Client) Change(change func(what *sim.Client)) error {
	unlock, err := c.driver.lock()
	if err != nil {
		return err
	}
	defer unlock()
	change(&c.what)
	return c.write()
}

func (c *Client) write() error {
	raw, err := json.Marshal(c.what)
	if err != nil {
		return err
	}
	if err := c.file.Truncate(0); err != nil {
		return err
	}
	_, err = c.file.WriteAt(raw, 0)
	return err
}

// Disconnect notes that the driver is closed.
func (c *Client) Disconnect() error {
	return errors.Join(c.driver.state.Remove(c.name), c.file.Close())
}

// Connected lists the programs that have the driver open; a process several times if it has it open through several
// libraries. Files of programs that ended without closing are removed.
func (d clients) Connected() ([]sim.Client, error) {
	unlock, err := d.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	return d.connected()
}

// connected is Connected, under the lock.
func (d clients) connected() ([]sim.Client, error) {
	entries, err := fs.ReadDir(d.state.FS(), clientsFolder)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing clients: %w", err)
	}
	var clients []sim.Client
	for _, e := range entries {
		number, _, _ := strings.Cut(e.Name(), "-")
		pid, err := strconv.Atoi(number)
		name := path.Join(clientsFolder, e.Name())
		if err != nil || !d.locked(name) {
			_ = d.state.Remove(name)
			continue
		}
		client := sim.Client{}
		if raw, err := d.state.ReadFile(name); err == nil {
			_ = json.Unmarshal(raw, &client) // it has what it has written whole, under the lock
		}
		client.PID = pid
		clients = append(clients, client)
	}
	return clients, nil
}

// Marks are the files that programs keep open as long as they have the driver open.
func (d clients) Marks() ([]fs.FileInfo, error) {
	entries, err := fs.ReadDir(d.state.FS(), clientsFolder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listing clients: %w", err)
	}
	var marks []fs.FileInfo
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // else it is gone
			marks = append(marks, info)
		}
	}
	return marks, nil
}

func (d clients) locked(name string) bool {
	f, err := d.state.Open(name)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // only read
	return errors.Is(flock(f, unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// WithClients is UpdateAlways with the programs that have the driver open as clients of the node.
func (d clients) WithClients(change func(*State) error) error {
	return d.UpdateAlways(func(s *State) error {
		connected, err := d.connected()
		if err != nil {
			return err
		}
		injected := s.Node.Clients
		defer func() { s.Node.Clients = injected }()
		s.Node.Clients = slices.Concat(injected, connected)
		return change(s)
	})
}
