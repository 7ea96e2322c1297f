// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	. "github.com/onsi/gomega"
)

// TestWhatIsPublishedFromACloneIsInstalled: images and chart of a commit, in which small programs stand for ours, pushed
// to a real registry and rendered by helm from there, without a compiler of another architecture.
func TestWhatIsPublishedFromACloneIsInstalled(t *testing.T) {
	g := NewWithT(t)
	clone := smallClone(t)
	t.Setenv("CC", "cc")
	to := newRegistry(t).host + "/gpu-sharing"
	set := settings{root: clone, registry: to, local: true}
	g.Expect(local(t.Context(), set)).To(Succeed())
	g.Expect(local(t.Context(), set)).To(Succeed(), "again, which pushes the same")

	s, err := readSource(t.Context(), clone, "")
	g.Expect(err).NotTo(HaveOccurred())
	helm, err := output(t.Context(), "../..", nil, "hack/helm/build.sh")
	g.Expect(err).NotTo(HaveOccurred())
	homes := t.TempDir()
	rendered, err := output(t.Context(), homes, []string{"HELM_CACHE_HOME=" + homes, "HELM_CONFIG_HOME=" + homes, "HELM_DATA_HOME=" + homes},
		helm, "template", "x", "oci://"+to+"/charts/"+chartName, "--devel", "--plain-http")
	g.Expect(err).NotTo(HaveOccurred())
	for image, layers := range map[string]int{controllerName: 1, agentName: 2} {
		tag, err := name.NewTag(to + "/" + image + ":" + s.number())
		g.Expect(err).NotTo(HaveOccurred())
		all, err := remote.Index(tag)
		g.Expect(err).NotTo(HaveOccurred())
		digest, err := all.Digest()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(rendered).To(ContainSubstring("image: \"" + to + "/" + image + "@" + digest.String() + "\""))
		manifest, err := all.IndexManifest()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(manifest.Manifests).To(HaveLen(1))
		g.Expect(manifest.Manifests[0].Platform.Architecture).To(Equal(runtime.GOARCH))
		img, err := all.Image(manifest.Manifests[0].Digest)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(img.Layers()).To(HaveLen(layers))
	}
}

// smallClone is a repository with this checkout's chart and scripts, and programs that are built in a second.
func smallClone(t *testing.T) string {
	t.Helper()
	g := NewWithT(t)
	folder := t.TempDir()
	_, err := output(t.Context(), "../..", nil, "bash", "-c", `git ls-files -z --cached --others --exclude-standard -- \
		config/helm hack/helm hack/kube hack/program.sh hack/release/debian.sh hack/release/debian.txt LICENSE | tar -c --null -T - | tar -x -C "$0"`, folder)
	g.Expect(err).NotTo(HaveOccurred())
	for path, content := range map[string]string{
		"go.mod":                 "module github.com/gpusharing/gpu-sharing-operator\n\ngo 1.26\n",
		"cmd/controller/main.go": "package main\n\nfunc main() {}\n",
		"cmd/agent/main.go":      "package main\n\n// #include <stdlib.h>\nimport \"C\"\n\nfunc main() { C.free(nil) }\n",
	} {
		g.Expect(os.MkdirAll(filepath.Dir(filepath.Join(folder, path)), 0o700)).To(Succeed())
		g.Expect(os.WriteFile(filepath.Join(folder, path), []byte(content), 0o600)).To(Succeed())
	}
	for _, args := range [][]string{{"init", "--quiet"}, {"add", "."}, {"-c", "user.name=test", "-c", "user.email=test@example.com", "commit", "--quiet", "--message=first"}} {
		_, err := output(t.Context(), folder, nil, "git", args...)
		g.Expect(err).NotTo(HaveOccurred())
	}
	return folder
}
