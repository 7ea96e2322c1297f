// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	. "github.com/onsi/gomega"
)

// TestATrialIsInstalledFromTheRegistry: the chart of the checkout as it is, which names by digest the images that lie
// in archives.
func TestATrialIsInstalledFromTheRegistry(t *testing.T) {
	g := NewWithT(t)
	host := newRegistry(t).host
	helm, err := output(t.Context(), "../..", nil, "hack/helm/build.sh")
	g.Expect(err).NotTo(HaveOccurred())
	folder := t.TempDir()
	images := ""
	for _, named := range []string{controllerName, agentName} {
		content, err := archive(someSource(), []file{{Path: named, Content: []byte(named)}})
		g.Expect(err).NotTo(HaveOccurred())
		img, err := mutate.AppendLayers(empty.Image, static.NewLayer(content, types.DockerUncompressedLayer))
		g.Expect(err).NotTo(HaveOccurred())
		config, err := img.ConfigFile()
		g.Expect(err).NotTo(HaveOccurred())
		config = config.DeepCopy()
		config.OS, config.Architecture, config.Config.Entrypoint = "linux", "amd64", []string{named}
		img, err = mutate.ConfigFile(img, config)
		g.Expect(err).NotTo(HaveOccurred())
		tag, err := name.NewTag("example.com/" + named + ":1")
		g.Expect(err).NotTo(HaveOccurred())
		file := filepath.Join(folder, named+".tar")
		g.Expect(tarball.WriteToFile(file, tag, img)).To(Succeed())
		images += "," + named + "=" + file
	}
	set := settings{root: "../..", registry: host + "/gpu-sharing", trial: trialSettings{images: images[1:], version: "0.0.9", helm: helm}}
	g.Expect(trial(t.Context(), set)).To(Succeed())

	rendered, err := output(t.Context(), folder, []string{"HELM_CACHE_HOME=" + folder, "HELM_CONFIG_HOME=" + folder, "HELM_DATA_HOME=" + folder},
		helm, "template", "x", "oci://"+host+"/gpu-sharing/charts/"+chartName, "--plain-http")
	g.Expect(err).NotTo(HaveOccurred())
	for _, named := range []string{controllerName, agentName} {
		tag, err := name.NewTag(host + "/gpu-sharing/" + named + ":0.0.9")
		g.Expect(err).NotTo(HaveOccurred())
		all, err := remote.Index(tag)
		g.Expect(err).NotTo(HaveOccurred())
		digest, err := all.Digest()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(rendered).To(ContainSubstring("image: \"" + host + "/gpu-sharing/" + named + "@" + digest.String() + "\""))
		img, err := remote.Image(tag, remote.WithPlatform(v1.Platform{OS: "linux", Architecture: "amd64"}))
		g.Expect(err).NotTo(HaveOccurred())
		config, err := img.ConfigFile()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(config.Config.Entrypoint).To(Equal([]string{named}))
		layers, err := img.Layers()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(layers).To(HaveLen(1))
		diff, err := layers[0].DiffID()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(config.RootFS.DiffIDs).To(Equal([]v1.Hash{diff}))
	}
}
