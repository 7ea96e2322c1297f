// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	. "github.com/onsi/gomega"
)

// TestNothingIsPushedWhileItIsNotKnownWhatIsPublished: a registry that does not say whether it has the tag may have it.
func TestNothingIsPushedWhileItIsNotKnownWhatIsPublished(t *testing.T) {
	g := NewWithT(t)
	wrote := false
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		wrote = wrote || r.Method != http.MethodGet && r.Method != http.MethodHead
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.WriteHeader(http.StatusForbidden)
		}
	}))
	defer registry.Close()
	p := published{Name: strings.TrimPrefix(registry.URL, "http://") + "/controller", Tag: "v1.0.0", Image: empty.Image}
	g.Expect(push(t.Context(), p)).To(MatchError(ContainSubstring("looking whether")))
	g.Expect(wrote).To(BeFalse())
}
