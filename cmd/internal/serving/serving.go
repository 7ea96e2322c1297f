// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package serving serves probes and metrics on ports that every pod of the cluster can reach. The servers of
// controller-runtime take any number of connections with 1 MiB of headers each, by which one pod ends a program at its
// memory limit.
package serving

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

const (
	// headerTimeout bounds the handshake, and then the headers of a request.
	headerTimeout = 5 * time.Second
	// requestTimeout bounds a request with its answer. The plugin waits 15 s for a measurement.
	requestTimeout = 30 * time.Second
)

// Health serves /healthz and /readyz at an address, whether the manager leads or not; "0" or "": it serves nothing.
func Health(ctx context.Context, mgr manager.Manager, address string, alive, ready map[string]healthz.Checker) error {
	mux := http.NewServeMux()
	for path, checks := range map[string]map[string]healthz.Checker{"/healthz": alive, "/readyz": ready} {
		handler := http.StripPrefix(path, &healthz.Handler{Checks: checks})
		mux.Handle(path, handler)
		mux.Handle(path+"/", handler)
	}
	return add(ctx, mgr, "health probe", address, nil, mux)
}

// Metrics serves /metrics and more paths over TLS at an address, to whom the guard lets get them, whether the manager
// leads or not; "0" or "": it serves nothing.
func Metrics(
	ctx context.Context, mgr manager.Manager, address string, guard func(*rest.Config, *http.Client) (server.Filter, error), more map[string]http.Handler,
) error {
	if address == "" || address == "0" {
		return nil
	}
	filter, err := guard(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return err
	}
	handlers := map[string]http.Handler{"/metrics": promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError})}
	maps.Copy(handlers, more)
	mux := http.NewServeMux()
	for path, handler := range handlers {
		guarded, err := filter(mgr.GetLogger().WithName("metrics").WithValues("path", path), handler)
		if err != nil {
			return fmt.Errorf("guarding %s: %w", path, err)
		}
		mux.Handle(path, guarded)
	}
	// Clients have no means to verify it: it keeps tokens from those who only listen.
	certificate, key, err := cert.GenerateSelfSignedCertKey("localhost", []net.IP{{127, 0, 0, 1}}, nil)
	if err != nil {
		return fmt.Errorf("making a certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return fmt.Errorf("reading the certificate: %w", err)
	}
	// Without HTTP/2, which has many requests on a connection.
	return add(ctx, mgr, "metrics", address, &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, Certificates: []tls.Certificate{pair}}, mux)
}

// add has the manager serve at an address as long as it runs.
func add(ctx context.Context, mgr manager.Manager, name, address string, secure *tls.Config, handler http.Handler) error {
	if address == "" || address == "0" {
		return nil
	}
	tcp, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listening for %s: %w", name, err)
	}
	listener := limit(tcp)
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	s := &http.Server{
		Handler: withoutBody(handler), MaxHeaderBytes: maxRequest,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout, WriteTimeout: requestTimeout,
		ErrorLog: log.New(io.Discard, "", 0), // a line for each handshake that a client gives up
	}
	s.SetKeepAlivesEnabled(false) // maxRequest is of a connection
	if err := mgr.Add(&manager.Server{Name: name, Server: s, Listener: listener}); err != nil {
		return fmt.Errorf("adding the server of %s: %w", name, err)
	}
	return nil
}

// withoutBody closes the connection of a request that has a body: net/http waits for a short one, and for half a second
// where more comes than is read.
func withoutBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0)) // nothing is waited for
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
}
