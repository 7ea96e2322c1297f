// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sim holds the rules of an MPS control daemon in memory: the servers that it starts, the clients that they
// accept, and the limits that a client gets. It behaves as NVIDIA documents it
// (https://docs.nvidia.com/deploy/mps/index.html), and where the documentation leaves a choice, it takes the unfriendly
// one:
//
//   - A server starts when the first client connects, and runs as that client's user.
//   - One server at a time. A client of another user waits until the server has no clients. It gets no error.
//   - A server without clients stays. It ends when a client of another user connects, or by command.
//   - The default limits are copied when a server starts. Later defaults do not reach it.
//   - The limits of a server are copied when a client connects. Later limits do not reach that client.
//   - After a fatal fault a server accepts no clients until those that it had are gone.
//   - A server that is told to end while it has clients serves them, and those that come, until it has none.
//   - A daemon that is told to quit waits for the clients. It serves no other one meanwhile, and answers nobody.
//   - A refused command is text on stdout, or nothing at all. The program's exit status is 0 all the same.
//
// gputest.MPSContract holds it to NVIDIA's program.
package sim

import (
	"errors"
	"maps"
	"slices"
)

// MaxClients is the number of clients that one server accepts.
const MaxClients = 48

// ErrNotReady refuses a client of a server with a fault, as CUDA_ERROR_MPS_SERVER_NOT_READY does.
var ErrNotReady = errors.New("MPS server is not ready to accept new MPS client requests")

// ErrMaxClients refuses a client of a server that has MaxClients, as CUDA_ERROR_MPS_MAX_CLIENTS_REACHED does.
var ErrMaxClients = errors.New("the hardware resources required to create MPS client have been exhausted")

// ErrQuitting refuses a client of a daemon that was told to quit.
var ErrQuitting = errors.New("CUDA_ERROR_MPS_CONNECTION_FAILED")

// Limits are what one client may use.
type Limits struct {
	Percentage float64       // of the threads
	Memory     map[int]int64 // in MiB by index of the GPU; absent: no limit
}

func (l Limits) clone() Limits {
	return Limits{Percentage: l.Percentage, Memory: maps.Clone(l.Memory)}
}

// Client is a process that uses GPUs through MPS.
type Client struct {
	PID, UID int
	Limits   Limits // that it got when it connected
	Fault    bool   // it caused the fatal fault of its server, or was hit by it
}

// Server is the process that uses the GPUs on behalf of clients.
type Server struct {
	PID, UID int
	Limits   Limits // of clients to come
	Clients  []Client
	Ending   bool // it ends with its last client
}

// fault reports whether the server accepts no clients because of a fatal fault.
func (s *Server) fault() bool {
	return slices.ContainsFunc(s.Clients, func(c Client) bool { return c.Fault })
}

// Node is what a daemon needs of the machine.
type Node interface {
	// StartServer starts a server process as a user and returns its PID.
	StartServer(uid int) (pid int, err error)
	// EndServer ends a server process.
	EndServer(pid int)
	// EndClient fails a client whose server has ended.
	EndClient(pid int)
}

// Daemon is one control daemon. It is not safe for concurrent use.
type Daemon struct {
	MultiUser bool // started with -multiuser-server
	Defaults  Limits
	Servers   []*Server // one at most
	Waiting   []Client  // in the order in which they connected
	Commands  []string  // all that it was told since it started
	Quitting  bool      // it ends with its last client

	node Node
}

// New returns a daemon without servers and limits.
func New(node Node, multiUser bool) *Daemon {
	return &Daemon{MultiUser: multiUser, Defaults: Limits{Percentage: 100, Memory: map[int]int64{}}, node: node}
}

// Connect connects a client. The client waits while another user has the server: then served is false without an error.
func (d *Daemon) Connect(pid, uid int) (limits Limits, served bool, err error) {
	if d.Quitting {
		return Limits{}, false, ErrQuitting
	}
	d.Waiting = append(d.Waiting, Client{PID: pid, UID: uid})
	if err := d.serve(); err != nil {
		d.Disconnect(pid)
		return Limits{}, false, err
	}
	c, served := d.Client(pid)
	return c.Limits, served, nil
}

// Client is a client that is served.
func (d *Daemon) Client(pid int) (Client, bool) {
	for _, s := range d.Servers {
		for _, c := range s.Clients {
			if c.PID == pid {
				return c, true
			}
		}
	}
	return Client{}, false
}

// ServerOf is the PID of the server that serves a client; 0 if none does.
func (d *Daemon) ServerOf(client int) int {
	for _, s := range d.Servers {
		if slices.ContainsFunc(s.Clients, func(c Client) bool { return c.PID == client }) {
			return s.PID
		}
	}
	return 0
}

// Disconnect ends the connection of a client. The server stays for the next client of its user.
func (d *Daemon) Disconnect(pid int) {
	same := func(c Client) bool { return c.PID == pid }
	d.Waiting = slices.DeleteFunc(d.Waiting, same)
	for _, s := range d.Servers {
		s.Clients = slices.DeleteFunc(s.Clients, same)
	}
	d.endIdle(func(s *Server) bool { return s.Ending })
	_ = d.serve() // who waits is served or goes on waiting
}

// Fault is a fatal fault of a client: it hits all clients of the server.
func (d *Daemon) Fault(pid int) {
	for _, s := range d.Servers {
		if !slices.ContainsFunc(s.Clients, func(c Client) bool { return c.PID == pid }) {
			continue
		}
		for i := range s.Clients {
			s.Clients[i].Fault = true
		}
	}
}

// ServerDied removes a server whose process has ended, and fails its clients.
func (d *Daemon) ServerDied(pid int) {
	for _, s := range slices.Clone(d.Servers) {
		if s.PID == pid {
			d.end(s)
		}
	}
	_ = d.serve() // as in Disconnect
}

// Close ends all servers, and their clients with them.
func (d *Daemon) Close() {
	d.Waiting = nil
	for _, s := range slices.Clone(d.Servers) {
		d.end(s)
	}
}

// Clients is the number of clients that are served.
func (d *Daemon) Clients() int {
	n := 0
	for _, s := range d.Servers {
		n += len(s.Clients)
	}
	return n
}

// Clone is a copy for readers.
func (d *Daemon) Clone() *Daemon {
	c := &Daemon{MultiUser: d.MultiUser, Quitting: d.Quitting, Defaults: d.Defaults.clone(), Waiting: slices.Clone(d.Waiting), Commands: slices.Clone(d.Commands)}
	for _, s := range d.Servers {
		server := *s
		server.Limits, server.Clients = s.Limits.clone(), slices.Clone(s.Clients)
		c.Servers = append(c.Servers, &server)
	}
	return c
}

// serve accepts those that wait, in their order, until one has to go on waiting.
func (d *Daemon) serve() error {
	for len(d.Waiting) > 0 {
		c := d.Waiting[0]
		s, err := d.serverFor(c)
		if s == nil || err != nil {
			return err
		}
		switch {
		case s.fault():
			return ErrNotReady
		case len(s.Clients) >= MaxClients:
			return ErrMaxClients
		}
		c.Limits = s.Limits.clone()
		s.Clients, d.Waiting = append(s.Clients, c), d.Waiting[1:]
	}
	return nil
}

// serverFor is the server that accepts a client now; nil while the client has to wait.
func (d *Daemon) serverFor(c Client) (*Server, error) {
	uid := c.UID
	if d.MultiUser {
		uid = 0
	}
	d.endIdle(func(s *Server) bool { return s.UID != uid })
	if len(d.Servers) > 0 {
		if s := d.Servers[0]; s.UID == uid {
			return s, nil
		}
		return nil, nil //nolint:nilnil // no server and no error: the client waits
	}
	pid, err := d.node.StartServer(uid)
	if err != nil {
		return nil, err //nolint:wrapcheck // the machine's own words
	}
	s := &Server{PID: pid, UID: uid, Limits: d.Defaults.clone()}
	d.Servers = append(d.Servers, s)
	return s, nil
}

// endIdle ends servers without clients.
func (d *Daemon) endIdle(which func(*Server) bool) {
	for _, s := range slices.Clone(d.Servers) {
		if len(s.Clients) == 0 && which(s) {
			d.end(s)
		}
	}
}

func (d *Daemon) end(s *Server) {
	d.Servers = slices.DeleteFunc(d.Servers, func(o *Server) bool { return o == s })
	for _, c := range s.Clients {
		d.node.EndClient(c.PID)
	}
	d.node.EndServer(s.PID)
}
