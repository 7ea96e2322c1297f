// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	. "github.com/onsi/gomega"
)

// newKey makes a key with the real cosign, as the docs say.
func newKey(t *testing.T) (cosign, key string) {
	t.Helper()
	g := NewWithT(t)
	cosign, err := output(t.Context(), "../..", nil, "hack/cosign/build.sh")
	g.Expect(err).NotTo(HaveOccurred())
	folder := t.TempDir()
	t.Setenv("COSIGN_PASSWORD", "secret")
	_, err = output(t.Context(), folder, nil, cosign, "generate-key-pair")
	g.Expect(err).NotTo(HaveOccurred())
	return cosign, filepath.Join(folder, "cosign.key")
}

func TestSignaturesAndAttestationsVerifyWithCosign(t *testing.T) {
	g := NewWithT(t)
	cosign, key := newKey(t)
	registry := newRegistry(t)
	r := small(t, registry.host+"/gpu-sharing")
	var err error
	r.tree, err = filepath.Abs("../..") // cosign is built from there
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(publish(t.Context(), settings{registry: r.registry, key: key}, r)).To(Succeed())

	ours, err := newSigner(cosign, key, false)
	g.Expect(err).NotTo(HaveOccurred())
	_, otherKey := newKey(t)
	other, err := newSigner(cosign, otherKey, false)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(r.sboms).To(HaveLen(4))
	for platform := range r.sboms {
		g.Expect(ours.verify(t.Context(), platform)).To(Succeed())
		g.Expect(ours.verifyAttestation(t.Context(), platform, "cyclonedx")).To(Succeed())
		g.Expect(ours.verifyAttestation(t.Context(), platform, "slsaprovenance1")).NotTo(Succeed(), "the provenance is that of the whole image")
	}
	var references []string
	for _, p := range r.published {
		reference, err := p.byDigest()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(ours.verify(t.Context(), reference)).To(Succeed())
		g.Expect(ours.verifyAttestation(t.Context(), reference, "slsaprovenance1")).To(Succeed())
		references = append(references, reference)
	}

	t.Run("what is signed of an image is its SBOM", func(t *testing.T) {
		g := NewWithT(t)
		for image, file := range r.sboms {
			statement := attested(t, image, "https://cyclonedx.org/bom")
			g.Expect(statement.Subject).To(ConsistOf(HaveField("Digest", HaveKeyWithValue("sha256", image[len(image)-64:]))))
			g.Expect(statement.Predicate).To(MatchJSON(read(t, r, file)))
		}
	})
	t.Run("not with another key", func(t *testing.T) {
		g := NewWithT(t)
		g.Expect(other.verify(t.Context(), references[1])).To(MatchError(ContainSubstring("invalid signature")))
		g.Expect(other.verifyAttestation(t.Context(), references[1], "slsaprovenance1")).NotTo(Succeed())
	})
	t.Run("not what nobody signed", func(t *testing.T) {
		g := NewWithT(t)
		unsigned := r.published[1]
		unsigned.Name += "-unsigned"
		g.Expect(push(t.Context(), unsigned)).To(Succeed())
		reference, err := unsigned.byDigest()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(ours.verify(t.Context(), reference)).To(MatchError(ContainSubstring("no signatures found")))
	})
	t.Run("not once a byte has changed", func(t *testing.T) {
		g := NewWithT(t)
		bySignature, byStatement, byContent := references[0], references[2], references[3]
		registry.damage(t, layerOf(t, stored(t, bySignature, "sig")))
		g.Expect(ours.verify(t.Context(), bySignature)).NotTo(Succeed(), "of the signature")
		registry.damage(t, layerOf(t, stored(t, byStatement, "att")))
		g.Expect(ours.verify(t.Context(), byStatement)).To(Succeed())
		g.Expect(ours.verifyAttestation(t.Context(), byStatement, "slsaprovenance1")).NotTo(Succeed(), "of the provenance")
		_, digest, _ := strings.Cut(byContent, "@")
		registry.damage(t, digest)
		g.Expect(verifyPushed(t.Context(), r.published[3])).To(MatchError(ContainSubstring("pulling")), "of what is signed: cosign verifies its digest and reads no more")
		for image := range r.sboms {
			if strings.HasPrefix(image, r.published[1].Name+"@") {
				registry.damage(t, layerOf(t, stored(t, image, "att")))
				g.Expect(ours.verify(t.Context(), image)).To(Succeed())
				g.Expect(ours.verifyAttestation(t.Context(), image, "cyclonedx")).NotTo(Succeed(), "of the SBOM")
			}
		}
	})
	t.Run("the checksums, until one changes", func(t *testing.T) {
		g := NewWithT(t)
		sums := filepath.Join(r.out, checksums)
		g.Expect(ours.verifyFile(t.Context(), sums)).To(Succeed())
		content := read(t, r, checksums)
		content[0] ^= 1
		g.Expect(os.WriteFile(sums, content, 0o600)).To(Succeed())
		g.Expect(ours.verifyFile(t.Context(), sums)).NotTo(Succeed())
	})
}

// TestCosignTakesTheFlagsOfTheWorkflow: keyless, too, cosign gets as far as looking for an identity. Here is none, and
// every address is that of a port on which nobody listens.
func TestCosignTakesTheFlagsOfTheWorkflow(t *testing.T) {
	g := NewWithT(t)
	cosign, err := output(t.Context(), "../..", nil, "hack/cosign/build.sh")
	g.Expect(err).NotTo(HaveOccurred())
	t.Setenv("KEYLESS_IDENTITY", "https://example.com/workflow")
	t.Setenv("HOME", t.TempDir())
	for _, proxy := range []string{"HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"} {
		t.Setenv(proxy, "http://127.0.0.1:1")
	}
	s, err := newSigner(cosign, "", true)
	g.Expect(err).NotTo(HaveOccurred())
	file := filepath.Join(t.TempDir(), checksums)
	g.Expect(os.WriteFile(file, []byte("sums"), 0o600)).To(Succeed())
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	const reference = "127.0.0.1:1/x@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	for title, err := range map[string]error{
		"sign-blob": s.signFile(ctx, file), "sign": s.sign(ctx, reference), "attest": s.attest(ctx, reference, "cyclonedx", file),
	} {
		t.Run(title, func(t *testing.T) {
			NewWithT(t).Expect(err).To(MatchError(ContainSubstring("dial tcp 127.0.0.1:1: connect: connection refused")), "it is refused no flag, and so comes to an address")
		})
	}
}

// TestNothingIsReleasedThatTheRegistryDamages: make release verifies what it pushed as a user would. A registry may
// accept and lose.
func TestNothingIsReleasedThatTheRegistryDamages(t *testing.T) {
	_, key := newKey(t)
	var spoil func(http.ResponseWriter, *http.Request) bool
	registry := newRegistryBehind(t, func(registry http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if spoil == nil || !spoil(w, r) {
				registry.ServeHTTP(w, r)
			}
		})
	})
	r := small(t, registry.host+"/gpu-sharing")
	var err error
	r.tree, err = filepath.Abs("../..") // cosign is built from there
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	loses := func(of, kind string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPut || !strings.Contains(r.URL.Path, of+"/manifests/") || !strings.HasSuffix(r.URL.Path, kind) {
				return false
			}
			w.WriteHeader(http.StatusCreated)
			return true
		}
	}
	for _, tc := range []struct {
		title, says string
		spoil       func(http.ResponseWriter, *http.Request) bool
	}{
		{"what is in an image", "is damaged in the registry", func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/sha256:") {
				return false
			}
			_, err := w.Write([]byte("another content"))
			return err == nil
		}},
		{"the signature of an image", "no signatures found", loses(agentName, ".sig")},
		{"the signature of the chart", "no signatures found", loses(chartName, ".sig")},
		{"a statement", "attestation", loses(bundleName, ".att")},
		{"nothing", "", nil},
	} {
		t.Run(tc.title, func(t *testing.T) {
			g := NewWithT(t)
			spoil = tc.spoil
			err := publish(t.Context(), settings{registry: r.registry, key: key}, r)
			if tc.says == "" {
				g.Expect(err).NotTo(HaveOccurred())
				return
			}
			g.Expect(err).To(MatchError(ContainSubstring(tc.says)))
		})
	}
}

func TestWhatIsPushedMustBeSigned(t *testing.T) {
	err := run(t.Context(), settings{root: "../..", out: t.TempDir(), registry: "127.0.0.1:1/x"})
	NewWithT(t).Expect(err).To(MatchError(ContainSubstring("KEY=cosign.key")))
}

// TestAKeyThatIsMissingIsNoticedBeforeAnythingIsBuilt: a build takes minutes, and what was in dist/ is deleted.
func TestAKeyThatIsMissingIsNoticedBeforeAnythingIsBuilt(t *testing.T) {
	g := NewWithT(t)
	folder := t.TempDir()
	key, public := filepath.Join(folder, "our.key"), filepath.Join(folder, "our.pub")
	// There is no source, so that nothing can be built.
	set := settings{root: filepath.Join(folder, "none"), out: filepath.Join(folder, "dist"), registry: "registry.example.com/x", key: key}
	for _, missing := range []string{key, public} {
		g.Expect(run(t.Context(), set)).To(MatchError(ContainSubstring("stat " + missing)))
		g.Expect(os.WriteFile(missing, nil, 0o600)).To(Succeed())
	}
	g.Expect(run(t.Context(), set)).To(MatchError(ContainSubstring("none")))
	set.keyless = true
	g.Expect(run(t.Context(), set)).To(MatchError(ContainSubstring("exclude each other")))
}

// stored is what cosign stores about an image in the registry: its signature (sig), or the statements about it (att).
func stored(t *testing.T, reference, kind string) v1.Image {
	t.Helper()
	g := NewWithT(t)
	repository, digest, _ := strings.Cut(reference, "@")
	tag, err := name.NewTag(repository + ":" + strings.Replace(digest, ":", "-", 1) + "." + kind)
	g.Expect(err).NotTo(HaveOccurred())
	img, err := remote.Image(tag)
	g.Expect(err).NotTo(HaveOccurred())
	return img
}

// layerOf is the digest of the last layer of what cosign stores.
func layerOf(t *testing.T, img v1.Image) string {
	t.Helper()
	g := NewWithT(t)
	manifest, err := img.Manifest()
	g.Expect(err).NotTo(HaveOccurred())
	return manifest.Layers[len(manifest.Layers)-1].Digest.String()
}

// statement is one of in-toto (https://github.com/in-toto/attestation).
type statement struct {
	PredicateType string
	Subject       []struct{ Digest map[string]string }
	Predicate     json.RawMessage
}

// attested is the statement of a kind that is stored about an image.
func attested(t *testing.T, reference, kind string) statement {
	t.Helper()
	g := NewWithT(t)
	layers, err := stored(t, reference, "att").Layers()
	g.Expect(err).NotTo(HaveOccurred())
	for _, layer := range layers {
		content, err := layer.Uncompressed()
		g.Expect(err).NotTo(HaveOccurred())
		var envelope struct{ Payload []byte }
		g.Expect(json.NewDecoder(content).Decode(&envelope)).To(Succeed())
		var s statement
		g.Expect(json.Unmarshal(envelope.Payload, &s)).To(Succeed())
		if s.PredicateType == kind {
			return s
		}
	}
	t.Fatalf("%s has no statement %s", reference, kind)
	return statement{}
}
