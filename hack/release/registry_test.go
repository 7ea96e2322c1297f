// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem" // keeps what is pushed in a folder
	. "github.com/onsi/gomega"
	"github.com/sirupsen/logrus"
)

// aRegistry is distribution's, on loopback, and the folder in which it keeps what is pushed.
type aRegistry struct{ host, folder string }

func newRegistry(t *testing.T) aRegistry {
	t.Helper()
	logrus.SetOutput(io.Discard)
	folder := t.TempDir()
	config := &configuration.Configuration{
		Storage: configuration.Storage{
			"filesystem": {"rootdirectory": folder},
			"delete":     {"enabled": true},
		},
	}
	config.Log.AccessLog.Disabled = true
	server := httptest.NewServer(handlers.NewApp(t.Context(), config))
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
