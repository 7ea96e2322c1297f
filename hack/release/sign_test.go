// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"

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

func TestWhatIsPushedMustBeSigned(t *testing.T) {
	err := run(t.Context(), settings{root: "../..", out: t.TempDir(), registry: "127.0.0.1:1/x"})
	NewWithT(t).Expect(err).To(MatchError(ContainSubstring("KEY=cosign.key")))
}
