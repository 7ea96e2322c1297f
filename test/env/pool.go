// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// idle are the servers of this process that no test uses. They end with the process: see keeper.
var idle struct {
	sync.Mutex

	servers []*server
}

// server is an API server with its etcd that tests of a process use one after the other.
type server struct {
	*Cluster

	dir     string
	flags   map[string]string
	own     map[string]record // in etcd, when its tests began
	defined map[string]string // CRDs by name, as JSON
	crds    []*apiextensionsv1.CustomResourceDefinition
	denied  map[string]int // requests that admission policies have denied for former tests, by policy
	probes  int
}

// emptyingTime is what emptying a server may take.
const emptyingTime = time.Minute

// Start gives a test an API server that has the CRDs of the options, and nothing else, until the test ends. A start
// takes 3.6 seconds of CPU, so the tests of a process get the same server one after the other: when a test ends, its
// clients are cut off and everything that it left on the server is deleted. Tests that run at the same time have a
// server each, as have those that need other flags, interruptions or a folder of their own.
func Start(tb testing.TB, opts ...Option) *Cluster {
	tb.Helper()
	o, err := newOptions(opts)
	if err != nil {
		tb.Fatal(err)
	}
	if o.brief || o.dir != "" {
		return startAlone(tb, o)
	}
	s, err := take(tb.Context(), o)
	if err != nil {
		tb.Fatal(err)
	}
	lent := &gate{}
	c, err := s.lend(lent)
	if err != nil {
		tb.Fatal(errors.Join(err, s.stop()))
	}
	tb.Cleanup(func() {
		lent.close()
		if err := s.release(tb.Failed()); err != nil {
			tb.Logf("the API server of this test is not one for others: %v", err)
		}
	})
	return c
}

func startAlone(tb testing.TB, o options) *Cluster {
	tb.Helper()
	if o.dir == "" {
		o.dir = tb.TempDir()
	}
	c, err := startUntilEnd(tb.Context(), o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := c.Stop(); err != nil {
			tb.Errorf("stopping the API server: %v", err)
		}
	})
	return c
}

// take returns a server that no test uses, with these flags and CRDs.
func take(ctx context.Context, o options) (*server, error) {
	s := takeIdle(o.flags)
	if s == nil {
		var err error
		if s, err = newServer(ctx, o.flags); err != nil {
			return nil, err
		}
	}
	if err := s.define(ctx, o.crds); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

// takeIdle returns nil if no idle server has these flags.
func takeIdle(flags map[string]string) *server {
	idle.Lock()
	defer idle.Unlock()
	at := slices.IndexFunc(idle.servers, func(s *server) bool { return maps.Equal(s.flags, flags) })
	if at < 0 {
		return nil
	}
	s := idle.servers[at]
	idle.servers = slices.Delete(idle.servers, at, at+1)
	return s
}

func newServer(ctx context.Context, flags map[string]string) (*server, error) {
	dir, err := os.MkdirTemp("", "gpusharing-test-")
	if err != nil {
		return nil, fmt.Errorf("making the folder of the control plane: %w", err)
	}
	c, err := startUntilEnd(ctx, options{dir: dir, flags: flags})
	if err != nil {
		return nil, err
	}
	return &server{Cluster: c, dir: dir, flags: flags}, nil
}

// startUntilEnd starts a cluster that ends with this process at the latest.
func startUntilEnd(ctx context.Context, o options) (*Cluster, error) {
	assets, err := Assets(ctx)
	if err != nil {
		return nil, err
	}
	if err := endWithProcess(o.dir); err != nil {
		return nil, err
	}
	c, err := start(o, assets)
	if err != nil {
		return nil, err
	}
	if made := c.environment.WebhookInstallOptions.LocalServingCertDir; made != "" { // by envtest, though it has no webhooks
		err = endWithProcess(made)
	}
	return c, err
}

// lend makes the clients of one test.
func (s *server) lend(lent *gate) (*Cluster, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	c := &Cluster{Config: rest.CopyConfig(s.Config), Scheme: scheme, environment: s.environment, denied: maps.Clone(s.denied)}
	c.Config.Dial = lent.dial
	if c.Client, err = client.NewWithWatch(c.Config, client.Options{Scheme: c.Scheme}); err != nil {
		return nil, fmt.Errorf("making a client: %w", err)
	}
	return c, nil
}

// release empties a server for the next test. It stops one that cannot be emptied, or whose test has failed, and says
// why.
func (s *server) release(failed bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), emptyingTime)
	defer cancel()
	err := errors.New("the test has failed")
	if !failed {
		err = s.empty(ctx)
	}
	if err != nil {
		return errors.Join(err, s.stop())
	}
	idle.Lock()
	defer idle.Unlock()
	idle.servers = append(idle.servers, s)
	return nil
}

func (s *server) stop() error { return errors.Join(s.Stop(), os.RemoveAll(s.dir)) }

// gate holds the connections of a test's clients to the API server, so that no goroutine which outlives the test
// writes into the next one.
type gate struct {
	mu          sync.Mutex
	closed      bool
	connections map[*connection]struct{}
}

type connection struct {
	net.Conn

	gate *gate
}

func (g *gate) dial(ctx context.Context, network, address string) (net.Conn, error) {
	dialed, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &connection{Conn: dialed, gate: g}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, errors.Join(errors.New("the test of this client has ended"), dialed.Close())
	}
	if g.connections == nil {
		g.connections = map[*connection]struct{}{}
	}
	g.connections[c] = struct{}{}
	return c, nil
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for c := range g.connections {
		_ = c.Conn.Close()
	}
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.gate.mu.Lock()
	defer c.gate.mu.Unlock()
	delete(c.gate.connections, c)
	return c.Conn.Close()
}
