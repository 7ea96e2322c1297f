// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/hack/release/internal/loopback"
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

func TestImagesRunAsTheDockerfileSays(t *testing.T) {
	g := NewWithT(t)
	content, err := os.ReadFile("../../Dockerfile")
	g.Expect(err).NotTo(HaveOccurred())
	stages := map[string]v1.Config{}
	stage := ""
	for line := range strings.Lines(string(content)) {
		instruction, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if instruction == "FROM" {
			g.Expect(strings.Fields(rest)).To(HaveLen(3), line)
			stage = strings.Fields(rest)[2]
			if strings.Fields(rest)[0] == "scratch" {
				stages[stage] = v1.Config{WorkingDir: "/"}
			}
		}
		config, isOurs := stages[stage]
		if !isOurs {
			continue
		}
		switch instruction {
		case "USER":
			config.User = rest
		case "ENV":
			config.Env = append(config.Env, rest)
		case "ENTRYPOINT":
			g.Expect(json.Unmarshal([]byte(rest), &config.Entrypoint)).To(Succeed())
		}
		stages[stage] = config
	}
	g.Expect(stages).To(Equal(map[string]v1.Config{
		"controller": controllerSpec("amd64", nil).Config, "agent": agentSpec("amd64", nil, nil).Config,
	}))
}
