// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package serving

import (
	"io"
	"net"
	"slices"
	"sync"
)

const (
	// maxConnections bounds how many connections a port has at once: more than pods of two nodes, each of which may keep one.
	maxConnections = 256
	// maxRequest bounds in bytes what a connection may send, with its handshake. It is below what net/http reads of
	// headers at most, after which that keeps the connection for half a second more.
	maxRequest = 16 << 10
)

// limit bounds the connections of a listener. A full one does not let new ones wait, as netutil.LimitListener does, or
// probes would wait for the timeouts of an attacker: the address that has most makes room for others, and gets no more
// itself. So a pod that connects without end keeps away its own connections, and none of a kubelet.
func limit(l net.Listener) net.Listener {
	limited := &limited{Listener: l}
	limited.released.L = &limited.mu
	return limited
}

type limited struct {
	net.Listener

	mu       sync.Mutex
	released sync.Cond
	open     []*conn // which the server has not released, the oldest first
}

// Accept refuses at once what it does not take: what waits to be accepted waits for what came before.
func (l *limited) Accept() (net.Conn, error) {
	for {
		accepted, err := l.Listener.Accept()
		if err != nil {
			return nil, err //nolint:wrapcheck // net/http knows its errors
		}
		host, _, _ := net.SplitHostPort(accepted.RemoteAddr().String())
		c := &conn{Conn: accepted, from: host, remaining: maxRequest, listener: l}
		if l.admit(c) {
			return c, nil
		}
		_ = accepted.Close()
	}
}

// admit reports whether there is room for a connection, and makes it if need be. It waits until the server has released
// what is closed for that, which takes no time: so the server never holds more than are counted.
func (l *limited) admit(c *conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.open) >= maxConnections {
		excess := excess(l.open, c.from)
		if excess == nil {
			return false
		}
		if !slices.ContainsFunc(l.open, func(o *conn) bool { return o.closed }) {
			excess.closed = true
			_ = excess.Conn.Close()
		}
		l.released.Wait()
	}
	l.open = append(l.open, c)
	return true
}

// excess is the oldest connection of the address that has most, or nil if none has more than the given one.
func excess(open []*conn, from string) (oldest *conn) {
	of := map[string]int{}
	for _, c := range open {
		of[c.from]++
	}
	most := of[from]
	for _, c := range open {
		if of[c.from] > most {
			oldest, most = c, of[c.from]
		}
	}
	return oldest
}

type conn struct {
	net.Conn

	from      string // the client's IP address
	remaining int    // bytes that it may send
	listener  *limited
	closed    bool // by the listener, whose lock guards it; the server has not released it
}

// Read ends when the client has sent as much as it may.
func (c *conn) Read(b []byte) (int, error) {
	if c.remaining == 0 {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(b[:min(len(b), c.remaining)])
	c.remaining -= n
	return n, err //nolint:wrapcheck // net/http knows its errors
}

// Close makes room for another one. It may be called again.
func (c *conn) Close() error {
	err := c.Conn.Close()
	c.listener.mu.Lock()
	defer c.listener.mu.Unlock()
	c.listener.open = slices.DeleteFunc(c.listener.open, func(o *conn) bool { return o == c })
	c.listener.released.Signal()
	return err //nolint:wrapcheck // net/http knows its errors
}
