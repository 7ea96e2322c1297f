// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/mps/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver/mpsclient"
)

// connection is a process that wants to use GPUs, or does.
type connection struct {
	net.Conn

	pid     int
	devices []string // the minor numbers of its GPUs; none: all
	served  bool
}

// peer is the process at the other end of a connection, as the kernel tells it: its PID here and its user.
func peer(c net.Conn) (pid, uid int, err error) {
	raw, err := c.(*net.UnixConn).SyscallConn() //nolint:forcetypeassert // the listener is one for Unix sockets
	if err != nil {
		return 0, 0, err
	}
	var who *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) { who, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, 0, err
	}
	if failed != nil {
		return 0, 0, failed
	}
	return int(who.Pid), int(who.Uid), nil
}

// connect makes the process at the other end a client, for as long as it keeps the connection.
func (d *daemon) connect(c net.Conn, hello []string) {
	pid, uid, err := peer(c)
	if err != nil {
		return
	}
	d.mu.Lock()
	conn := &connection{Conn: c, pid: pid, devices: hello[1:]}
	d.connections[pid] = conn
	d.log("User %d: client %d connects", uid, pid)
	if _, _, err := d.model.Connect(pid, uid); err != nil {
		_ = mpsclient.Answer{Error: err.Error()}.Write(c)
		delete(d.connections, pid)
		d.mu.Unlock()
		return
	}
	d.wake()
	d.mu.Unlock()

	_, _ = c.Read(make([]byte, 1)) // until the client or its server ends
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log("User %d: client %d is gone", uid, pid)
	d.model.Disconnect(pid)
	delete(d.connections, pid)
	_ = d.driver.EndMPSClient(pid)
	d.wake()
}

// wake tells those that waited what they get, once they are served.
func (d *daemon) wake() {
	for pid, c := range d.connections {
		client, served := d.model.Client(pid)
		if !served || c.served {
			continue
		}
		c.served = true
		server := d.model.ServerOf(pid)
		if err := d.driver.UseMPS(d.pipe, server, pid, c.devices); err != nil {
			d.log("Client %d: %v", pid, err)
		}
		answer := mpsclient.Answer{
			Server: server, User: client.UID, Percentage: client.Limits.Percentage, MemoryMiB: client.Limits.Memory,
		}
		_ = answer.Write(c) // a client that is gone is heard of elsewhere
	}
}

// The daemon is the node of its model.
var _ sim.Node = (*daemon)(nil)

// StartServer implements sim.Node.
func (d *daemon) StartServer(uid int) (int, error) {
	d.log("Starting new server for user %d", uid)
	server, err := startServer(d.self, d.logs, uid)
	if err != nil {
		return 0, err
	}
	pid := server.command.Process.Pid
	d.servers[pid] = server
	go func() {
		_ = server.command.Wait()
		d.mu.Lock()
		defer d.mu.Unlock()
		d.log("Server %d exited", pid)
		delete(d.servers, pid)
		d.model.ServerDied(pid)
		_ = d.driver.EndMPSServer(pid)
		d.wake()
	}()
	return pid, nil
}

// EndServer implements sim.Node.
func (d *daemon) EndServer(pid int) {
	if server, runs := d.servers[pid]; runs {
		_ = server.command.Process.Kill()
	}
	_ = d.driver.EndMPSServer(pid)
}

// EndClient implements sim.Node.
func (d *daemon) EndClient(pid int) {
	if c, connected := d.connections[pid]; connected {
		_ = c.Close()
	}
}

func isHello(line string) ([]string, bool) {
	words := strings.Fields(line)
	return words, len(words) > 0 && words[0] == mpsclient.Hello
}

// logTo appends a line to a log.
func logTo(path, format string, args ...any) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o666)
	if err != nil {
		return
	}
	defer f.Close() //nolint:errcheck // only a log
	_, _ = fmt.Fprintf(f, format+"\n", args...)
}
