// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package access guards a metrics endpoint: who gets it, the API server decides.
package access

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

const (
	// reviewTimeout bounds a question to the API server.
	reviewTimeout = 5 * time.Second
	// trusted is how long a permission is remembered: a scrape every few seconds is no request each to the API server.
	trusted = 2 * time.Minute
	// maxTrusted bounds how many are remembered.
	maxTrusted = 64
	// maxReview bounds an answer of the API server.
	maxReview = 1 << 20
	// maxReviews bounds how many questions are under way at once: anybody on the pod network can send tokens that are
	// none.
	maxReviews = 8
)

// Guard is the filter provider of a metrics server that answers only to clients whom the API server lets get the path:
// 401 without a valid token, 403 without the right, 500 if the API server cannot be asked, 503 if too many ask. It
// needs no right for it: it asks with the client's own token what that token may do (SelfSubjectAccessReview), which
// Kubernetes lets every authenticated user ask. (The filter of controller-runtime needs two rights on all of the cluster,
// and some 25 modules more.) A token may come in another header too; empty: in none.
func Guard(now clock.PassiveClock, header string) func(*rest.Config, *http.Client) (server.Filter, error) {
	return func(config *rest.Config, _ *http.Client) (server.Filter, error) {
		anonymous := rest.AnonymousClientConfig(config)
		httpClient, err := rest.HTTPClientFor(anonymous)
		if err != nil {
			return nil, fmt.Errorf("making a client for reviews: %w", err)
		}
		host, _, err := rest.DefaultServerUrlFor(anonymous)
		if err != nil {
			return nil, fmt.Errorf("making a client for reviews: %w", err)
		}
		return func(log logr.Logger, next http.Handler) (http.Handler, error) {
			return &guard{
				log: log, next: next, client: httpClient, clock: now, header: header, known: map[permission]time.Time{},
				asking:  make(chan struct{}, maxReviews),
				reviews: host.JoinPath("apis/authorization.k8s.io/v1/selfsubjectaccessreviews").String(),
			}, nil
		}, nil
	}
}

// permission is a token that may get a path.
type permission struct {
	token [sha256.Size]byte
	path  string
}

type guard struct {
	log     logr.Logger
	next    http.Handler
	client  *http.Client // without credentials of its own
	header  string       // in which a token may come too: the API server's proxy takes the usual one away
	reviews string       // URL
	clock   clock.PassiveClock
	asking  chan struct{} // holds one for each review under way

	mu    sync.Mutex
	known map[permission]time.Time // until when
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	status, err := g.authorize(r)
	if err != nil {
		g.log.Error(err, "Asking who may read the metrics")
	}
	if status != http.StatusOK {
		http.Error(w, http.StatusText(status), status)
		return
	}
	g.next.ServeHTTP(w, r)
}

// authorize is the status with which a request is refused, or 200.
func (g *guard) authorize(r *http.Request) (int, error) {
	token, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !bearer {
		token = r.Header.Get(g.header)
	}
	if token == "" {
		return http.StatusUnauthorized, nil
	}
	wanted := permission{sha256.Sum256([]byte(token)), r.URL.Path}
	if g.remembers(wanted) {
		return http.StatusOK, nil
	}
	status, err := g.review(r.Context(), token, r.URL.Path)
	if status == http.StatusOK {
		g.remember(wanted)
	}
	return status, err
}

func (g *guard) remembers(p permission) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.clock.Now().Before(g.known[p])
}

func (g *guard) remember(p permission) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.known) >= maxTrusted {
		clear(g.known)
	}
	g.known[p] = g.clock.Now().Add(trusted)
}

// review asks the API server, as the owner of a token, whether they may get a path.
func (g *guard) review(ctx context.Context, token, path string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	select {
	case g.asking <- struct{}{}:
		defer func() { <-g.asking }()
	case <-ctx.Done():
		return http.StatusServiceUnavailable, fmt.Errorf("waiting for other reviews: %w", ctx.Err())
	}
	body, err := json.Marshal(authorizationv1.SelfSubjectAccessReview{
		TypeMeta: metav1.TypeMeta{APIVersion: authorizationv1.SchemeGroupVersion.String(), Kind: "SelfSubjectAccessReview"},
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: path, Verb: "get"},
		},
	})
	if err != nil {
		return http.StatusInternalServerError, fmt.Errorf("writing a review: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, g.reviews, bytes.NewReader(body))
	if err != nil {
		return http.StatusInternalServerError, fmt.Errorf("writing a review: %w", err)
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Accept", "application/json")
	answer, err := g.client.Do(request)
	if err != nil {
		return http.StatusInternalServerError, fmt.Errorf("asking the API server for a review: %w", err)
	}
	defer answer.Body.Close()
	switch answer.StatusCode {
	case http.StatusCreated, http.StatusOK:
	case http.StatusUnauthorized, http.StatusForbidden:
		return answer.StatusCode, nil
	default:
		return http.StatusInternalServerError, fmt.Errorf("asking the API server for a review: %s", answer.Status)
	}
	var review authorizationv1.SelfSubjectAccessReview
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxReview)).Decode(&review); err != nil {
		return http.StatusInternalServerError, fmt.Errorf("reading a review: %w", err)
	}
	if !review.Status.Allowed {
		return http.StatusForbidden, nil
	}
	return http.StatusOK, nil
}
