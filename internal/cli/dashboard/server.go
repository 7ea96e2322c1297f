// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/utils/clock"
)

//go:embed static
var static embed.FS

const (
	// maxQuestion bounds what the page may ask.
	maxQuestion = 1 << 20
	// beat is how often a browser hears from a page on which nothing changes; one that hears nothing for longer knows
	// that it is not live.
	beat = 5 * time.Second
	// writeTimeout is how long a browser may take to accept an answer, or one update of the stream.
	writeTimeout = 30 * time.Second
	// readTimeout is how long a browser may take to send a question, and idleTimeout how long its connection stays open
	// without a request.
	readTimeout, idleTimeout = 30 * time.Second, 2 * time.Minute
	// previewTimeout is how long the API server may take for a preview.
	previewTimeout = time.Minute
	// ContentPolicy lets the browser load, and connect to, nothing but this server, and lets no text become markup or
	// script.
	ContentPolicy = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
		"require-trusted-types-for 'script'; trusted-types 'none'"
)

// Server serves the page.
type Server struct {
	Hub   *Hub
	Clock clock.Clock
	// Preview answers what a change of policies would do, and changes nothing. Its errors are shown to the user.
	Preview func(context.Context, Question) (Answer, error)

	token string
	hosts []string
}

// Listen listens on this machine alone, on a port or, if it is 0, on one that is free. The address that it returns has
// the token in its fragment, which a browser sends to no server.
func (s *Server) Listen(ctx context.Context, port uint16) (net.Listener, string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return nil, "", fmt.Errorf("listening on port %d of this machine: %w; choose another with --port", port, err)
	}
	_, number, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		return nil, "", errors.Join(err, listener.Close())
	}
	s.token, s.hosts = rand.Text(), []string{"127.0.0.1:" + number, "localhost:" + number}
	return listener, "http://" + s.hosts[0] + "/#" + s.token, nil
}

// Serve serves until the context ends.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: idleTimeout, MaxHeaderBytes: 16 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx }, // ends the streams
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(listener); ctx.Err() == nil {
		return fmt.Errorf("serving the page: %w", err)
	}
	return nil
}

// handler serves the files of the page to this machine, and the cluster to those who have the token.
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{file...}", s.file)
	mux.Handle("GET /api/stream", s.withToken(s.stream))
	mux.Handle("POST /api/preview", s.withToken(s.preview))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range map[string]string{
			"Content-Security-Policy": ContentPolicy, "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
			"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
			"Cache-Control": "no-store",
		} {
			w.Header().Set(name, value)
		}
		if why := s.foreign(r); why != "" {
			http.Error(w, why, http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// foreign is why a request does not come from the page itself; empty: it does, or from no page. The Host tells a name
// of another site that resolves to this machine, the others a page of another site.
func (s *Server) foreign(r *http.Request) string {
	switch origin, site := r.Header.Values("Origin"), r.Header.Get("Sec-Fetch-Site"); {
	case !slices.Contains(s.hosts, r.Host):
		return "the Host is not that of this page"
	case len(origin) > 1, len(origin) == 1 && origin[0] != "http://"+r.Host:
		return "the Origin is not that of this page"
	case site != "" && site != "same-origin" && site != "none":
		return "the request comes from another site"
	}
	return ""
}

// withToken answers 401 to requests without the token.
func (s *Server) withToken(next http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, is := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !is || s.token == "" || subtle.ConstantTimeCompare([]byte(token), []byte(s.token)) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "open the address that `kubectl gpusharing dashboard` prints", http.StatusUnauthorized)
			return
		}
		next(w, r)
	})
}

// contentType is that of a file of the page, by its extension. What the machine has registered for one may be something
// else.
var contentType = map[string]string{
	".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}

// file serves a file of the page.
func (s *Server) file(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("file")
	if name == "" {
		name = "index.html"
	}
	content, err := fs.ReadFile(static, path.Join("static", name))
	if err != nil {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", contentType[path.Ext(name)])
	s.write(w, content)
}

// write ends an answer, for which a browser is not waited for long.
func (s *Server) write(w http.ResponseWriter, content []byte) {
	if http.NewResponseController(w).SetWriteDeadline(s.Clock.Now().Add(writeTimeout)) == nil {
		_, _ = w.Write(content) // a browser that has gone needs none
	}
}

// stream sends the page, and then each change of it, as lines of JSON, or an empty line where nothing has changed for a
// while.
func (s *Server) stream(w http.ResponseWriter, r *http.Request) {
	defer s.Hub.enter()()
	w.Header().Set("Content-Type", "application/x-ndjson")
	control := http.NewResponseController(w)
	at := &cursor{}
	for {
		u, changed := s.Hub.next(at)
		lines := []byte("\n")
		if u != nil {
			var err error
			if lines, err = u.lines(); err != nil {
				return
			}
		}
		if err := control.SetWriteDeadline(s.Clock.Now().Add(writeTimeout)); err != nil {
			return
		}
		if _, err := w.Write(lines); err != nil || control.Flush() != nil {
			return
		}
		select {
		case <-changed:
		case <-s.Clock.After(beat):
		case <-r.Context().Done():
			return
		}
	}
}

// preview answers a Question.
func (s *Server) preview(w http.ResponseWriter, r *http.Request) {
	var asked Question
	control := http.NewResponseController(w)
	if control.SetReadDeadline(s.Clock.Now().Add(readTimeout)) != nil {
		return // the connection is gone
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxQuestion)).Decode(&asked); err != nil {
		http.Error(w, "reading the question: "+err.Error(), http.StatusBadRequest)
		return
	}
	if control.SetReadDeadline(time.Time{}) != nil { // a browser that waits for its answer sends nothing
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), previewTimeout)
	defer cancel()
	answer, err := s.Preview(ctx, asked)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("the API server did not answer within %s: %w", previewTimeout, err)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusUnprocessableEntity)
		return
	}
	content, err := json.Marshal(answer)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	s.write(w, content)
}
