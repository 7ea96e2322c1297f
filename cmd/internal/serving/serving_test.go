// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package serving_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/serving"
)

const (
	kubelet  = "127.0.0.1"
	attacker = "127.0.0.2"
	address  = "127.0.0.1:0"
	// soon is sooner than the server ends a connection by its timeouts.
	soon = 4 * time.Second
)

// TestNoPodEndsAProgramByItsConnections: a thousand connections of 1 MB are kept open at once, some of them without a
// handshake, and a probe is answered all the same.
func TestNoPodEndsAProgramByItsConnections(t *testing.T) {
	for name, tc := range map[string]struct {
		serve  func(context.Context, manager.Manager) error
		path   string
		secure bool
	}{
		"health":  {serve: health, path: "/healthz"},
		"metrics": {serve: metrics, path: "/metrics", secure: true},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			s := start(t, tc.serve)
			question := append([]byte("GET "+tc.path+" HTTP/1.1\r\nHost: x\r\nX: "), bytes.Repeat([]byte("a"), 1000000)...)
			var sent sync.WaitGroup
			for i := range 1000 {
				sent.Go(func() {
					c, err := s.dial(t.Context(), attacker)
					if err != nil {
						return
					}
					t.Cleanup(func() { _ = c.Close() })
					_ = c.SetWriteDeadline(time.Now().Add(soon)) // what is not read fills the buffers of the kernel
					if tc.secure && i%2 == 0 {
						c = tls.Client(c, insecure)
					}
					_, _ = c.Write(question)
				})
			}
			sent.Wait()
			var is runtime.MemStats
			runtime.ReadMemStats(&is)
			g.Expect(is.HeapAlloc>>20).To(BeNumerically("<", 100), "MiB")
			began := time.Now()
			g.Expect(s.get(t, tc.path)).To(Equal(http.StatusOK))
			g.Expect(time.Since(began)).To(BeNumerically("<", soon))
			t.Logf("%d MiB; answered after %s", is.HeapAlloc>>20, time.Since(began))
		})
	}
}

// TestAPodKeepsAwayItsOwnConnections: it gets no more once the port is full, another one gets some in the place of its
// oldest, and what a kubelet has begun goes on.
func TestAPodKeepsAwayItsOwnConnections(t *testing.T) {
	g := NewWithT(t)
	s := start(t, health)
	connect := func(from string) net.Conn {
		c, err := s.dial(t.Context(), from)
		g.Expect(err).NotTo(HaveOccurred())
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	isClosed := func(c net.Conn) {
		g.Expect(c.SetReadDeadline(time.Now().Add(soon))).To(Succeed())
		_, err := c.Read(make([]byte, 1))
		g.Expect(err).To(HaveOccurred())
		g.Expect(os.IsTimeout(err)).To(BeFalse(), "closed at once")
	}
	probe := connect(kubelet)
	_, err := io.WriteString(probe, "GET /readyz HTTP/1.1\r\n")
	g.Expect(err).NotTo(HaveOccurred())
	first := connect(attacker)
	var last net.Conn
	for range 400 {
		last = connect(attacker)
	}
	isClosed(last)
	g.Expect(s.get(t, "/healthz")).To(Equal(http.StatusOK))
	isClosed(first)
	_, err = io.WriteString(probe, "Host: x\r\n\r\n")
	g.Expect(err).NotTo(HaveOccurred())
	answer, err := io.ReadAll(probe)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(answer)).To(And(HavePrefix("HTTP/1.1 200 OK"), HaveSuffix("ok")))
}

// TestManyPodsKeepAwayNoProbe: each of 200 pods keeps one connection, and begins another one when that is closed.
func TestManyPodsKeepAwayNoProbe(t *testing.T) {
	g := NewWithT(t)
	s := start(t, health)
	ctx, stop := context.WithCancel(t.Context())
	var pods sync.WaitGroup
	var begun atomic.Int32
	defer pods.Wait()
	defer stop()
	for i := range 200 {
		pods.Go(func() {
			for ctx.Err() == nil {
				c, err := s.dial(ctx, fmt.Sprint("127.0.1.", i))
				if err != nil {
					continue
				}
				ends := context.AfterFunc(ctx, func() { _ = c.Close() })
				_, _ = io.WriteString(c, "GET /healthz HTTP/1.1\r\n")
				begun.Add(1)
				_, _ = io.ReadAll(c)
				ends()
				_ = c.Close()
			}
		})
	}
	g.Eventually(begun.Load).WithTimeout(soon).Should(BeNumerically(">=", 200))
	for range 100 {
		g.Expect(s.get(t, "/healthz")).To(Equal(http.StatusOK))
	}
}

// TestWhatIsServed are the paths of controller-runtime's own servers.
func TestWhatIsServed(t *testing.T) {
	g := NewWithT(t)
	s := start(t, health)
	g.Expect(s.server.NeedLeaderElection()).To(BeFalse())
	for path, status := range map[string]int{
		"/healthz": http.StatusOK, "/healthz/ping": http.StatusOK, "/readyz": http.StatusOK, "/readyz/": http.StatusOK,
		"/healthz/other": http.StatusNotFound, "/": http.StatusNotFound, "/metrics": http.StatusNotFound,
	} {
		g.Expect(s.get(t, path)).To(Equal(status), path)
	}
	for _, body := range []string{"Content-Length: 1000000", "Content-Length: 2", "Transfer-Encoding: chunked"} {
		c, err := s.dial(t.Context(), kubelet)
		g.Expect(err).NotTo(HaveOccurred())
		t.Cleanup(func() { _ = c.Close() })
		_, err = io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n"+body+"\r\n\r\n1")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(c.SetReadDeadline(time.Now().Add(soon))).To(Succeed())
		answer, err := io.ReadAll(c)
		g.Expect(answer).To(BeEmpty(), body)
		g.Expect(os.IsTimeout(err)).To(BeFalse(), "closed at once, though not all of it has come: %s", body)
	}

	s = start(t, metrics)
	g.Expect(s.server.NeedLeaderElection()).To(BeFalse())
	for path, status := range map[string]int{
		"/metrics": http.StatusOK, "/usage": http.StatusTeapot, "/refused": http.StatusUnauthorized, "/healthz": http.StatusNotFound,
	} {
		g.Expect(s.get(t, path)).To(Equal(status), path)
	}
	for _, none := range []string{"", "0"} {
		g.Expect(serving.Health(t.Context(), nil, none, nil, nil)).To(Succeed())
		g.Expect(serving.Metrics(t.Context(), nil, none, nil, nil)).To(Succeed())
	}
}

func health(ctx context.Context, mgr manager.Manager) error {
	ping := map[string]healthz.Checker{"ping": healthz.Ping}
	return serving.Health(ctx, mgr, address, ping, ping)
}

// metrics are guarded by who asks for what.
func metrics(ctx context.Context, mgr manager.Manager) error {
	guard := func(*rest.Config, *http.Client) (server.Filter, error) {
		return func(_ logr.Logger, next http.Handler) (http.Handler, error) {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/refused" {
					w.WriteHeader(http.StatusUnauthorized)
					return
				}
				next.ServeHTTP(w, r)
			}), nil
		}, nil
	}
	more := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	return serving.Metrics(ctx, mgr, address, guard, map[string]http.Handler{"/usage": more, "/refused": more})
}

var insecure = &tls.Config{InsecureSkipVerify: true}

// served is the manager that serves what is added to it, and that.
type served struct {
	manager.Manager

	server *manager.Server
	scheme string
}

func (s *served) GetConfig() *rest.Config     { return nil }
func (s *served) GetHTTPClient() *http.Client { return nil }
func (s *served) GetLogger() logr.Logger      { return logr.Discard() }

func (s *served) Add(r manager.Runnable) error {
	s.server = r.(*manager.Server)
	return nil
}

// start serves until the test ends.
func start(t *testing.T, serve func(context.Context, manager.Manager) error) *served {
	t.Helper()
	g := NewWithT(t)
	s := &served{scheme: "http"}
	g.Expect(serve(t.Context(), s)).To(Succeed())
	if s.server.Name == "metrics" {
		s.scheme = "https"
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.server.Start(ctx) }()
	t.Cleanup(func() {
		stop()
		g.Expect(<-ended).To(Succeed())
	})
	return s
}

func (s *served) dial(ctx context.Context, from string) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	return d.DialContext(ctx, "tcp", s.server.Listener.Addr().String())
}

// get is the status of an answer to the kubelet.
func (s *served) get(t *testing.T, path string) int {
	t.Helper()
	g := NewWithT(t)
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: insecure}}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.scheme+"://"+s.server.Listener.Addr().String()+path, nil)
	g.Expect(err).NotTo(HaveOccurred())
	answer, err := c.Do(request)
	g.Expect(err).NotTo(HaveOccurred())
	defer answer.Body.Close()
	return answer.StatusCode
}
