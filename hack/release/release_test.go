// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	. "github.com/onsi/gomega"
	"github.com/operator-framework/api/pkg/operators/v1alpha1"
	"github.com/operator-framework/operator-registry/alpha/declcfg"
	"github.com/operator-framework/operator-registry/alpha/property"
	"sigs.k8s.io/yaml"
)

func someSource() source {
	return source{Version: "v1.2.3-rc.1", Commit: strings.Repeat("0123456789", 4), Time: time.Date(2026, 11, 22, 9, 0, 0, 0, time.UTC)}
}

// small makes a release of this checkout's chart, bundle and texts, in which a small program stands for ours and a file
// for Debian's packages.
func small(t *testing.T, registry string) *release {
	t.Helper()
	g := NewWithT(t)
	work := t.TempDir()
	r := &release{
		source: someSource(), tree: filepath.Join(work, "source"), out: filepath.Join(work, "dist"), registry: registry,
		roots: map[string]string{},
	}
	g.Expect(os.Mkdir(r.tree, 0o700)).To(Succeed())
	_, err := output(t.Context(), "../..", nil, "bash", "-c", `git ls-files -z --cached --others --exclude-standard -- \
		config hack/bundle hack/helm hack/install hack/release/debian.txt internal/cli/kubectl_complete-gpusharing CHANGELOG.md LICENSE | tar -c --null -T - | tar -x -C "$0"`, r.tree)
	g.Expect(err).NotTo(HaveOccurred())
	r.packages, err = readDebian(r.tree)
	g.Expect(err).NotTo(HaveOccurred())
	r.helm, err = output(t.Context(), "../..", nil, "hack/helm/build.sh")
	g.Expect(err).NotTo(HaveOccurred())

	program := filepath.Join(work, "small")
	_, err = output(t.Context(), ".", []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-buildvcs=false", "-o", program, "./testdata/small")
	g.Expect(err).NotTo(HaveOccurred())
	for _, p := range programs() {
		p.File = program
		r.programs = append(r.programs, p)
	}
	for _, arch := range nodes() {
		r.roots[arch] = filepath.Join(work, arch)
		g.Expect(os.MkdirAll(filepath.Join(r.roots[arch], "lib"), 0o700)).To(Succeed())
		g.Expect(os.WriteFile(filepath.Join(r.roots[arch], "lib", "libc.so.6"), []byte(arch), 0o600)).To(Succeed())
	}
	g.Expect(r.assemble(t.Context(), work)).To(Succeed())
	return r
}

func read(t *testing.T, r *release, file string) []byte {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(r.out, file))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return content
}

func TestTheSameSourceMakesTheSameRelease(t *testing.T) {
	g := NewWithT(t)
	const registry = "registry.example.com/gpu-sharing"
	one, other := small(t, registry), small(t, registry)
	g.Expect(one.out).NotTo(Equal(other.out))
	g.Expect(string(read(t, one, checksums))).To(Equal(string(read(t, other, checksums))))
	_, err := output(t.Context(), one.out, nil, "sha256sum", "--check", "--strict", "--quiet", checksums)
	g.Expect(err).NotTo(HaveOccurred())
}

func TestWhatIsPushedIsWhatIsPulled(t *testing.T) {
	g := NewWithT(t)
	registry := newRegistry(t)
	r := small(t, registry.host+"/gpu-sharing")
	g.Expect(r.published).To(HaveLen(5))
	for _, p := range r.published {
		g.Expect(push(t.Context(), p)).To(Succeed())
		g.Expect(verifyPushed(t.Context(), p)).To(Succeed(), p.Name)
		g.Expect(push(t.Context(), p)).To(Succeed(), "the same again")
	}

	t.Run("images run the program of their architecture", func(t *testing.T) {
		g := NewWithT(t)
		tag, err := name.NewTag(r.registry + "/" + agentName + ":1.2.3-rc.1")
		g.Expect(err).NotTo(HaveOccurred())
		img, err := remote.Image(tag, remote.WithPlatform(v1.Platform{OS: "linux", Architecture: "arm64"}))
		g.Expect(err).NotTo(HaveOccurred())
		config, err := img.ConfigFile()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(config.Architecture).To(Equal("arm64"))
		g.Expect(config.Config.Entrypoint).To(Equal([]string{"/usr/bin/gpu-sharing-agent"}))
		g.Expect(config.Config.Labels).To(HaveKeyWithValue("org.opencontainers.image.revision", r.source.Commit))
		layers, err := img.Layers()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(layers).To(HaveLen(2))
		root, err := layers[0].Compressed()
		g.Expect(err).NotTo(HaveOccurred())
		var content bytes.Buffer
		_, err = content.ReadFrom(root)
		g.Expect(err).NotTo(HaveOccurred())
		files, err := untar(content.Bytes())
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(files).To(Equal([]file{{Path: "lib/libc.so.6", Content: []byte("arm64")}}))
	})
	t.Run("images have their license and labels as a certified catalogue asks", func(t *testing.T) {
		g := NewWithT(t)
		for _, of := range []string{agentName, controllerName} {
			tag, err := name.NewTag(r.registry + "/" + of + ":1.2.3-rc.1")
			g.Expect(err).NotTo(HaveOccurred())
			img, err := remote.Image(tag, remote.WithPlatform(v1.Platform{OS: "linux", Architecture: "amd64"}))
			g.Expect(err).NotTo(HaveOccurred())
			files := mutate.Extract(img)
			defer func() { _ = files.Close() }()
			var paths []string
			for all := tar.NewReader(files); ; {
				header, err := all.Next()
				if err != nil {
					break
				}
				paths = append(paths, header.Name)
			}
			g.Expect(paths).To(ContainElement("licenses/LICENSE"))
			config, err := img.ConfigFile()
			g.Expect(err).NotTo(HaveOccurred())
			for _, label := range []string{"name", "vendor", "version", "release", "summary", "description", "maintainer"} {
				g.Expect(config.Config.Labels[label]).NotTo(BeEmpty(), label)
			}
		}
	})
	t.Run("Helm installs the images by their digests", func(t *testing.T) {
		g := NewWithT(t)
		home := t.TempDir()
		rendered, err := output(t.Context(), home, []string{"HELM_CACHE_HOME=" + home, "HELM_CONFIG_HOME=" + home, "HELM_DATA_HOME=" + home},
			r.helm, "template", "x", "oci://"+r.registry+"/charts/"+chartName, "--version", "1.2.3-rc.1", "--plain-http")
		g.Expect(err).NotTo(HaveOccurred())
		expectPinned(t, r, rendered)
		g.Expect(rendered).To(ContainSubstring("app.kubernetes.io/version: \"1.2.3-rc.1\""))
	})
	t.Run("OLM's bundle names the images by their digests", func(t *testing.T) {
		expectPinned(t, r, string(read(t, r, "bundle/manifests/gpu-sharing-operator.clusterserviceversion.yaml")))
		NewWithT(t).Expect(string(read(t, r, "bundle/installer.yaml"))).To(ContainSubstring("name: gpu-sharing-installer"), "beside the bundle, as docs/install.md says")
	})
	t.Run("what a community catalogue takes has images for the architectures that it names", func(t *testing.T) {
		g := NewWithT(t)
		g.Expect(string(read(t, r, community+"/ci.yaml"))).To(ContainSubstring("updateGraph: semver-mode"))
		tools := t.TempDir()
		for _, p := range r.published[:2] {
			reference, err := p.byDigest()
			g.Expect(err).NotTo(HaveOccurred())
			manifest, err := p.Index.RawManifest()
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(os.WriteFile(filepath.Join(tools, filepath.Base(reference)), manifest, 0o600)).To(Succeed())
		}
		inspect := "#!/bin/sh\n[ $1 = pull ] || exec cat \"" + tools + "/${3##*/}\"\n" // docker manifest inspect IMAGE
		g.Expect(os.WriteFile(filepath.Join(tools, "docker"), []byte(inspect), 0o700)).To(Succeed())
		_, err := output(t.Context(), filepath.Join(r.tree, "hack", "bundle"), []string{"GOFLAGS=", "PATH=" + tools + ":" + os.Getenv("PATH")},
			"go", "run", ".", "-released", "-bundle="+filepath.Join(r.out, community, "1.2.3-rc.1"), "validate")
		g.Expect(err).NotTo(HaveOccurred())
	})
	t.Run("the catalog has the bundle and the images by their digests", func(t *testing.T) {
		g := NewWithT(t)
		content := read(t, r, "catalog.yaml")
		expectPinned(t, r, string(content))
		config, err := declcfg.LoadReader(bytes.NewReader(content))
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(config.Bundles).To(HaveLen(1))
		bundle, err := r.published[3].byDigest()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(bundle).To(HavePrefix(r.registry + "/" + bundleName + "@"))
		g.Expect(config.Bundles[0].Image).To(Equal(bundle))
		properties, err := property.Parse(config.Bundles[0].Properties)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(properties.Packages).To(ConsistOf(property.Package{PackageName: chartName, Version: "1.2.3-rc.1"}))
		g.Expect(properties.GVKs).To(ConsistOf(
			property.GVK{Group: "gpusharing.io", Version: "v1alpha1", Kind: "GPUSharingPolicy"},
			property.GVK{Group: "gpusharing.io", Version: "v1alpha1", Kind: "GPUNode"}))
	})
	t.Run("another content is not pushed under a version that is there", func(t *testing.T) {
		changed := r.published[0]
		changed.Index, changed.Image = nil, r.published[2].Image
		NewWithT(t).Expect(push(t.Context(), changed)).To(MatchError(ContainSubstring("a published version is never replaced")))
	})
	t.Run("a changed byte is noticed", func(t *testing.T) {
		for _, p := range []published{r.published[1], r.published[2]} {
			img := p.Image
			if p.Index != nil {
				manifest, err := p.Index.IndexManifest()
				NewWithT(t).Expect(err).NotTo(HaveOccurred())
				img, err = p.Index.Image(manifest.Manifests[1].Digest)
				NewWithT(t).Expect(err).NotTo(HaveOccurred())
			}
			layers, err := img.Layers()
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			digest, err := layers[0].Digest()
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			registry.damage(t, digest.String())
			NewWithT(t).Expect(verifyPushed(t.Context(), p)).To(MatchError(ContainSubstring("is damaged in the registry")), p.Name)
		}
	})
}

// expectPinned expects that manifests name both of our images, in the registry, by the digest that they have there, and
// in no other way.
func expectPinned(t *testing.T, r *release, manifests string) {
	t.Helper()
	g := NewWithT(t)
	for _, p := range r.published[:2] {
		reference, err := p.byDigest()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(manifests).To(ContainSubstring(reference))
		for _, named := range regexp.MustCompile(`\S*/`+filepath.Base(p.Name)+`[:@]\S*`).FindAllString(manifests, -1) {
			g.Expect(strings.Trim(named, `"',`)).To(HaveSuffix(reference))
		}
	}
}

// TestTheDocsSayWhereTheCatalogIs: its image has no program that serves it, so that OLM needs a CatalogSource that
// extracts it.
func TestTheDocsSayWhereTheCatalogIs(t *testing.T) {
	g := NewWithT(t)
	docs, err := os.ReadFile("../../docs/install.md")
	g.Expect(err).NotTo(HaveOccurred())
	line := regexp.MustCompile(`(?m)^  grpcPodConfig: (.*)$`).FindSubmatch(docs)
	g.Expect(line).To(HaveLen(2))
	var documented v1alpha1.GrpcPodConfig
	g.Expect(yaml.UnmarshalStrict(line[1], &documented)).To(Succeed())
	r := small(t, "registry.example.com/gpu-sharing")
	p := r.published[4]
	g.Expect(p.Name).To(HaveSuffix("/" + catalogName))
	manifest, err := p.Index.IndexManifest()
	g.Expect(err).NotTo(HaveOccurred())
	img, err := p.Index.Image(manifest.Manifests[0].Digest)
	g.Expect(err).NotTo(HaveOccurred())
	layers, err := img.Layers()
	g.Expect(err).NotTo(HaveOccurred())
	content, err := layers[0].Compressed()
	g.Expect(err).NotTo(HaveOccurred())
	var packed bytes.Buffer
	_, err = packed.ReadFrom(content)
	g.Expect(err).NotTo(HaveOccurred())
	files, err := untar(packed.Bytes())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(files).To(HaveLen(1))
	g.Expect("/" + files[0].Path).To(HavePrefix(documented.ExtractContent.CatalogDir + "/"))
	g.Expect(documented.ExtractContent.CacheDir).To(BeEmpty(), "it has no cache")
}

func TestPluginArchivesAreWhatKrewExpects(t *testing.T) {
	g := NewWithT(t)
	r := small(t, "registry.example.com/gpu-sharing")
	program, err := os.ReadFile(r.programs[0].File)
	g.Expect(err).NotTo(HaveOccurred())
	script, err := os.ReadFile(filepath.Join("..", "..", "internal", "cli", completion))
	g.Expect(err).NotTo(HaveOccurred())
	for i := range r.programs {
		if p := &r.programs[i]; p.Name == completion {
			g.Expect(p.OS).To(Equal(windows), "elsewhere it is a script")
			p.File += "-of-" + p.Arch
			// What is appended changes no program, and its SBOM is read from it.
			g.Expect(os.WriteFile(p.File, slices.Concat(program, []byte(p.Arch)), 0o600)).To(Succeed())
		}
	}
	g.Expect(r.plugins(t.Context(), "")).To(Succeed())
	var manifest struct {
		Metadata struct{ Name string }
		Spec     struct {
			Version, Caveats string
			Platforms        []struct {
				Selector         struct{ MatchLabels map[string]string }
				URI, SHA256, Bin string
				Files            []struct{ From, To string }
			}
		}
	}
	g.Expect(yaml.Unmarshal(read(t, r, "gpusharing.yaml"), &manifest)).To(Succeed())
	g.Expect(manifest.Metadata.Name).To(Equal("gpusharing"))
	g.Expect(manifest.Spec.Version).To(Equal("v1.2.3-rc.1"))
	g.Expect(manifest.Spec.Platforms).To(HaveLen(6))
	for _, p := range manifest.Spec.Platforms {
		content := read(t, r, filepath.Base(p.URI))
		g.Expect(p.URI).To(HavePrefix("https://github.com/gpusharing/gpu-sharing-operator/releases/download/v1.2.3-rc.1/"))
		g.Expect(p.SHA256).To(Equal(sum(content)))
		var files []file
		if p.Selector.MatchLabels["os"] == "windows" {
			files = unzip(t, content)
		} else {
			files, err = untar(content)
			g.Expect(err).NotTo(HaveOccurred())
		}
		completing := file{Path: completion, Executable: true, Content: script}
		if p.Selector.MatchLabels["os"] == "windows" { // where kubectl calls the plugin gpusharing.exe, and runs no script
			completing = file{Path: "kubectl_complete-gpusharing.exe", Executable: true, Content: slices.Concat(program, []byte(p.Selector.MatchLabels["arch"]))}
			g.Expect(p.Bin).To(Equal("kubectl-gpusharing.exe"))
			g.Expect(manifest.Spec.Caveats).To(ContainSubstring(`\store\gpusharing\v1.2.3-rc.1\kubectl_complete-gpusharing.exe" `))
		} else {
			completes(t, manifest.Spec.Caveats, files)
		}
		g.Expect(files).To(ConsistOf(HaveField("Path", "LICENSE"), file{Path: p.Bin, Executable: true, Content: program}, completing), p.URI)
		for _, f := range p.Files {
			g.Expect(files).To(ContainElement(HaveField("Path", f.From)), p.URI)
			g.Expect(f.To).To(Equal("."))
		}
		g.Expect(p.Files).To(HaveLen(len(files)), "krew copies nothing else into its store")
	}
}

// completes checks that the command that krew prints puts the script for completion into krew's folder of the PATH.
func completes(t *testing.T, caveats string, files []file) {
	t.Helper()
	g := NewWithT(t)
	home := t.TempDir()
	store, path := filepath.Join(home, ".krew", "store", "gpusharing", "v1.2.3-rc.1"), filepath.Join(home, ".krew", "bin")
	for _, folder := range []string{store, path} {
		g.Expect(os.MkdirAll(folder, 0o700)).To(Succeed())
	}
	for _, f := range files {
		mode := os.FileMode(0o600)
		if f.Executable {
			mode = 0o700
		}
		g.Expect(os.WriteFile(filepath.Join(store, f.Path), f.Content, mode)).To(Succeed())
	}
	command := regexp.MustCompile(`(?m)^  cp .*$`).FindString(caveats)
	_, err := output(t.Context(), home, []string{"HOME=" + home, "KREW_ROOT="}, "sh", "-c", command)
	g.Expect(err).NotTo(HaveOccurred())
	installed, err := os.Stat(filepath.Join(path, completion))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(installed.Mode()&0o100).NotTo(BeZero(), "it is a program")
}

func unzip(t *testing.T, content []byte) []file {
	t.Helper()
	g := NewWithT(t)
	r, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
	g.Expect(err).NotTo(HaveOccurred())
	var files []file
	for _, f := range r.File {
		opened, err := f.Open()
		g.Expect(err).NotTo(HaveOccurred())
		var b bytes.Buffer
		_, err = b.ReadFrom(opened)
		g.Expect(err).NotTo(HaveOccurred())
		files = append(files, file{Path: f.Name, Executable: f.Mode()&0o100 != 0, Content: b.Bytes()})
	}
	return files
}

func TestSBOMHasTheModulesThatAreLinked(t *testing.T) {
	g := NewWithT(t)
	r := small(t, "registry.example.com/gpu-sharing")
	packages := func(file string) []string {
		var bom cyclonedx.BOM
		g.Expect(cyclonedx.NewBOMDecoder(bytes.NewReader(read(t, r, file)), cyclonedx.BOMFileFormatJSON).Decode(&bom)).To(Succeed())
		g.Expect(bom.Metadata.Component.Version).To(Equal("v1.2.3-rc.1"))
		var urls []string
		for _, c := range *bom.Components {
			urls = append(urls, c.PackageURL)
		}
		return urls
	}
	goVersion, err := exec.CommandContext(t.Context(), "go", "env", "GOVERSION").Output()
	g.Expect(err).NotTo(HaveOccurred())
	stdlib := "pkg:golang/stdlib@" + strings.TrimPrefix(strings.TrimSpace(string(goVersion)), "go")
	g.Expect(packages("gpu-sharing-controller_linux_arm64.cdx.json")).To(ConsistOf(stdlib, HavePrefix("pkg:golang/golang.org/x/mod@v")))
	g.Expect(packages("gpu-sharing-agent_linux_arm64.cdx.json")).To(ConsistOf(stdlib, HavePrefix("pkg:golang/golang.org/x/mod@v"),
		HavePrefix("pkg:deb/debian/libc6@2.36-"), HavePrefix("pkg:deb/debian/libgcc-s1@"), HavePrefix("pkg:deb/debian/gcc-12-base@")))
}

func TestProvenanceNamesTheCommit(t *testing.T) {
	g := NewWithT(t)
	r := small(t, "registry.example.com/gpu-sharing")
	var statement struct {
		BuildDefinition struct {
			ResolvedDependencies []struct {
				URI    string
				Digest map[string]string
			}
		}
	}
	g.Expect(json.Unmarshal(read(t, r, "provenance.json"), &statement)).To(Succeed())
	g.Expect(statement.BuildDefinition.ResolvedDependencies).To(HaveLen(7))
	g.Expect(statement.BuildDefinition.ResolvedDependencies[0].Digest).To(Equal(map[string]string{"gitCommit": r.source.Commit}))
}
