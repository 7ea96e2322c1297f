// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package metrics guards the metrics endpoint: the API server says who a bearer token belongs to, and whether they may
// get the path. It asks anew for each request, which a scrape every few seconds does not notice. (controller-runtime
// has such a filter too, at the price of the API server's own libraries in the controller: some 25 modules more.)
package metrics

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// +kubebuilder:rbac:groups=authentication.k8s.io,resources=tokenreviews,verbs=create
// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// Access is the filter provider of a metrics server that answers only to whom the API server allows the verb get on the
// path: 401 without a valid token, 403 without the right, 500 if the API server cannot be asked.
func Access(config *rest.Config, httpClient *http.Client) (server.Filter, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{authenticationv1.AddToScheme, authorizationv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("registering reviews: %w", err)
		}
	}
	c, err := client.New(config, client.Options{Scheme: scheme, HTTPClient: httpClient})
	if err != nil {
		return nil, fmt.Errorf("making a client for reviews: %w", err)
	}
	return func(log logr.Logger, next http.Handler) (http.Handler, error) {
		return &guard{client: c, log: log, next: next}, nil
	}, nil
}

type guard struct {
	client client.Client
	log    logr.Logger
	next   http.Handler
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	status, err := g.authorize(r)
	if err != nil {
		g.log.Error(err, "deciding who may read the metrics")
	}
	if status != http.StatusOK {
		http.Error(w, http.StatusText(status), status)
		return
	}
	g.next.ServeHTTP(w, r)
}

// authorize is the status with which a request is refused, or 200.
func (g *guard) authorize(r *http.Request) (int, error) {
	token, isBearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !isBearer || token == "" {
		return http.StatusUnauthorized, nil
	}
	who, err := g.authenticate(r.Context(), token)
	if err != nil {
		return http.StatusInternalServerError, err
	}
	if !who.Authenticated {
		return http.StatusUnauthorized, nil
	}
	allowed, err := g.authorise(r.Context(), who.User, r.URL.Path)
	switch {
	case err != nil:
		return http.StatusInternalServerError, err
	case !allowed:
		return http.StatusForbidden, nil
	default:
		return http.StatusOK, nil
	}
}

func (g *guard) authenticate(ctx context.Context, token string) (authenticationv1.TokenReviewStatus, error) {
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if err := g.client.Create(ctx, review); err != nil {
		return review.Status, fmt.Errorf("reviewing a token: %w", err)
	}
	return review.Status, nil
}

func (g *guard) authorise(ctx context.Context, user authenticationv1.UserInfo, path string) (bool, error) {
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for name, values := range user.Extra {
		extra[name] = authorizationv1.ExtraValue(values)
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: path, Verb: "get"},
	}}
	if err := g.client.Create(ctx, review); err != nil {
		return false, fmt.Errorf("reviewing the access of %s: %w", user.Username, err)
	}
	return review.Status.Allowed, nil
}
