// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"sigs.k8s.io/yaml"
)

// checksums is the file with the SHA-256 of all other files that can be downloaded, those of no folder, as `sha256sum
// --check` reads it. What is in folders is in an image or artifact, whose digest is in digests.json.
const checksums = "SHA256SUMS"

// release is what is made of a commit.
type release struct {
	source   source
	tree     string // folder with the files of the commit
	out      string // folder that is made
	unsigned bool   // a trial, which nobody signs
	registry string
	programs []program
	packages []debianPackage
	roots    map[string]string // folders with Debian's packages, by architecture
	helm     string

	published []published
	sboms     map[string]string // files in out, by the images that they describe
}

// assemble makes everything of the programs, and writes it.
func (r *release) assemble(ctx context.Context, work string) error {
	if err := os.RemoveAll(r.out); err != nil {
		return fmt.Errorf("removing what was there: %w", err)
	}
	if err := r.images(); err != nil {
		return err
	}
	for _, step := range []func(context.Context, string) error{r.chart, r.bundle, r.plugins, r.texts} {
		if err := step(ctx, work); err != nil {
			return err
		}
	}
	if err := writeLayout(filepath.Join(r.out, "oci"), r.published); err != nil {
		return err
	}
	return r.checksums()
}

// images makes the images of the programs, and names them in the chart.
func (r *release) images() error {
	r.sboms = map[string]string{}
	for _, name := range []string{controllerName, agentName} {
		p, err := r.image(name)
		if err != nil {
			return err
		}
		r.published = append(r.published, p)
	}
	return r.pin()
}

// pin names the images that are to be published in the chart, by their digests.
func (r *release) pin() error {
	digests := map[string]v1.Hash{}
	for _, p := range r.published {
		var err error
		if digests[strings.TrimPrefix(p.Name, r.registry+"/")], err = p.digest(); err != nil {
			return err
		}
	}
	return pin(r.source, r.tree, r.registry, digests)
}

func (r *release) publish(name string, index v1.ImageIndex, img v1.Image) published {
	return published{Name: r.registry + "/" + name, Tag: r.source.number(), Index: index, Image: img}
}

// image is that of the controller or the agent, for all architectures.
func (r *release) image(name string) (published, error) {
	images := map[string]v1.Image{}
	for _, p := range r.programs {
		if "gpu-sharing-"+p.Name != name {
			continue
		}
		content, err := os.ReadFile(p.File)
		if err != nil {
			return published{}, fmt.Errorf("reading a program: %w", err)
		}
		i, packages := controllerSpec(p.Arch, content), []debianPackage(nil)
		if name == agentName {
			root, err := readFolder(r.roots[p.Arch])
			if err != nil {
				return published{}, err
			}
			i, packages = agentSpec(p.Arch, content, root), of(r.packages, p.Arch)
		}
		terms, err := os.ReadFile(filepath.Join(r.tree, license))
		if err != nil {
			return published{}, fmt.Errorf("reading the license: %w", err)
		}
		last := len(i.Layers) - 1
		i.Layers[last] = append(i.Layers[last], file{Path: "licenses/" + license, Content: terms})
		if images[p.Arch], err = image(r.source, i); err != nil {
			return published{}, err
		}
		bom, err := sbom(r.source, p, packages)
		if err != nil {
			return published{}, err
		}
		file := name + "_" + p.platform() + ".cdx.json"
		if err := r.write(file, bom); err != nil {
			return published{}, err
		}
		digest, err := images[p.Arch].Digest()
		if err != nil {
			return published{}, err
		}
		r.sboms[r.registry+"/"+name+"@"+digest.String()] = file
	}
	all, err := index(images)
	return r.publish(name, all, nil), err
}

func (r *release) chart(ctx context.Context, work string) error {
	packaged, err := packageChart(ctx, r.source, r.tree, work, r.helm)
	if err != nil {
		return err
	}
	img, err := chartArtifact(r.source, packaged)
	if err != nil {
		return err
	}
	r.published = append(r.published, r.publish("charts/"+chartName, nil, img))
	return r.write(chartName+"-"+r.source.number()+".tgz", packaged)
}

// bundle makes the OLM bundle of the pinned chart, checks it, and packs it.
func (r *release) bundle(ctx context.Context, _ string) error {
	for _, command := range []string{"generate", "validate"} {
		if _, err := output(ctx, filepath.Join(r.tree, "hack", "bundle"), []string{"GOFLAGS="}, "go", "run", ".", command); err != nil {
			return err
		}
	}
	return r.pack()
}

// community is the folder that a pull request adds a version to, at OperatorHub.io and at OpenShift's community catalogue:
// https://k8s-operatorhub.github.io/community-operators/contributing-where-to/
const community = "operators/" + chartName

// pack makes the image of the bundle, which has the labels that OLM looks for, and a catalog with it.
func (r *release) pack() error {
	folder := filepath.Join(r.tree, "config", "bundle")
	files, err := readFolder(folder)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(filepath.Join(folder, "metadata", "annotations.yaml"))
	if err != nil {
		return fmt.Errorf("reading the bundle: %w", err)
	}
	var metadata struct{ Annotations map[string]string }
	if err := yaml.Unmarshal(data, &metadata); err != nil {
		return fmt.Errorf("reading the bundle: %w", err)
	}
	var in []file
	written := map[string][]byte{community + "/ci.yaml": []byte("# Add who reviews changes: reviewers, a list of GitHub's users.\nupdateGraph: semver-mode\n")}
	for _, f := range files {
		inImage := f.Path != "bundle.Dockerfile" && f.Path != "installer.yaml"
		if inImage {
			in = append(in, f)
		}
		if inImage && !f.Folder {
			written[community+"/"+r.source.number()+"/"+f.Path] = f.Content
		}
		if !f.Folder {
			written["bundle/"+f.Path] = f.Content
		}
	}
	for path, content := range written {
		if err := r.write(path, content); err != nil {
			return err
		}
	}
	bundle, err := r.data(bundleName, in, metadata.Annotations)
	if err != nil {
		return err
	}
	reference, err := bundle.byDigest()
	if err != nil {
		return err
	}
	manifest, err := os.ReadFile(filepath.Join(folder, "manifests", "gpu-sharing-operator.clusterserviceversion.yaml"))
	if err != nil {
		return fmt.Errorf("reading the bundle: %w", err)
	}
	content, err := catalog(manifest, metadata.Annotations, reference)
	if err != nil {
		return err
	}
	catalogImage, err := r.data(catalogName, []file{{Path: "configs/" + chartName + "/catalog.yaml", Content: content}},
		map[string]string{"operators.operatorframework.io.index.configs.v1": "/configs"})
	if err != nil {
		return err
	}
	r.published = append(r.published, bundle, catalogImage)
	return r.write("catalog.yaml", content)
}

// data is an image that holds files and runs nothing, for all architectures.
func (r *release) data(name string, files []file, labels map[string]string) (published, error) {
	images := map[string]v1.Image{}
	for _, arch := range nodes() {
		var err error
		images[arch], err = image(r.source, spec{Title: name, Arch: arch, Layers: [][]file{files}, Config: v1.Config{Labels: labels}})
		if err != nil {
			return published{}, err
		}
	}
	all, err := index(images)
	return r.publish(name, all, nil), err
}

// plugins writes an archive and an SBOM of the kubectl plugin for each platform, and the manifest for krew.
func (r *release) plugins(context.Context, string) error {
	var downloads []download
	for _, p := range r.programs {
		if p.Name != plugin && p.Name != completion {
			continue
		}
		bom, err := sbom(r.source, p, nil)
		if err != nil {
			return err
		}
		if err := r.write(p.Name+"_"+p.platform()+".cdx.json", bom); err != nil {
			return err
		}
		if p.Name != plugin {
			continue
		}
		content, err := r.besidePlugin(p)
		if err != nil {
			return err
		}
		d := download{program: p}
		if d.name, d.content, err = pluginArchive(r.source, p, content); err != nil {
			return err
		}
		if err := r.write(d.name, d.content); err != nil {
			return err
		}
		downloads = append(downloads, d)
	}
	manifest, err := krew(r.source, downloads)
	if err != nil {
		return err
	}
	return r.write("gpusharing.yaml", manifest)
}

// besidePlugin reads the plugin of a platform and what lies beside it in its archive, by their names there.
func (r *release) besidePlugin(p program) (map[string][]byte, error) {
	files := map[string]string{
		license: filepath.Join(r.tree, license), p.named(plugin): p.File, p.named(completion): filepath.Join(r.tree, "internal", "cli", completion),
	}
	for _, other := range r.programs {
		if other.Name == completion && other.platform() == p.platform() {
			files[p.named(completion)] = other.File
		}
	}
	content := map[string][]byte{}
	for name, file := range files {
		var err error
		if content[name], err = os.ReadFile(file); err != nil {
			return nil, fmt.Errorf("reading what is in the plugin's archive: %w", err)
		}
	}
	return content, nil
}

// texts writes the release notes, the provenance, which digest each image and artifact has, and the script that the
// docs name.
func (r *release) texts(ctx context.Context, _ string) error {
	text, err := readNotes(r.tree, r.source.Version, r.unsigned)
	if err != nil {
		return err
	}
	statement, err := provenance(ctx, r.source, r.registry, r.packages)
	if err != nil {
		return err
	}
	digests := map[string]string{}
	for _, p := range r.published {
		digest, err := p.digest()
		if err != nil {
			return err
		}
		digests[p.Name+":"+p.Tag] = digest.String()
	}
	list, err := json.MarshalIndent(digests, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the digests: %w", err)
	}
	unlabel, err := os.ReadFile(filepath.Join(r.tree, "hack", "install", "unlabel.sh"))
	if err != nil {
		return fmt.Errorf("reading what removes a label after the operator: %w", err)
	}
	for name, content := range map[string][]byte{
		"release-notes.md": []byte(text), "provenance.json": statement, "digests.json": list, "unlabel.sh": unlabel,
	} {
		if err := r.write(name, content); err != nil {
			return err
		}
	}
	return nil
}

// checksums writes those of all files that can be downloaded.
func (r *release) checksums() error {
	files, err := readFolder(r.out)
	if err != nil {
		return err
	}
	var lines strings.Builder
	for _, f := range files {
		if !f.Folder && filepath.Base(f.Path) == f.Path {
			fmt.Fprintf(&lines, "%s  %s\n", sum(f.Content), f.Path)
		}
	}
	return r.write(checksums, []byte(lines.String()))
}

func (r *release) write(name string, content []byte) error {
	path := filepath.Join(r.out, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // for everybody to read
		return fmt.Errorf("writing the release: %w", err)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil { //nolint:gosec // for everybody to read
		return fmt.Errorf("writing the release: %w", err)
	}
	return nil
}
