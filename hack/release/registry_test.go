// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/hack/release/internal/loopback"
)

// aRegistry is distribution's, on loopback, and the folder in which it keeps what is pushed.
type aRegistry struct{ host, folder string }

func newRegistry(t *testing.T) aRegistry {
	t.Helper()
	return newRegistryBehind(t, func(registry http.Handler) http.Handler { return registry })
}

// newRegistryBehind is a registry behind what stands between it and its users.
func newRegistryBehind(t *testing.T, between func(http.Handler) http.Handler) aRegistry {
	t.Helper()
	folder := t.TempDir()
	server := httptest.NewServer(between(loopback.Registry(t.Context(), folder)))
	t.Cleanup(server.Close)
	return aRegistry{host: strings.TrimPrefix(server.URL, "http://"), folder: folder}
}

// damage changes the last byte of a blob.
func (r aRegistry) damage(t *testing.T, digest string) {
	t.Helper()
	g := NewWithT(t)
	algorithm, hex, _ := strings.Cut(digest, ":")
	blob := filepath.Join(r.folder, "docker", "registry", "v2", "blobs", algorithm, hex[:2], hex, "data")
	content, err := os.ReadFile(blob)
	g.Expect(err).NotTo(HaveOccurred())
	content[len(content)-1] ^= 1
	g.Expect(os.WriteFile(blob, content, 0o600)).To(Succeed())
}
