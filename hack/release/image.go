// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const repository = "https://github.com/gpusharing/gpu-sharing-operator"

// file is one in an archive: its path without a leading slash, and a folder, link or content.
type file struct {
	Path       string
	Folder     bool
	Executable bool
	Link       string
	Content    []byte
}

// readFolder returns all that is below a folder.
func readFolder(root string) ([]file, error) {
	var files []file
	err := filepath.WalkDir(root, func(at string, entry fs.DirEntry, err error) error {
		if err != nil || at == root {
			return err
		}
		f := file{Folder: entry.IsDir()}
		if f.Path, err = filepath.Rel(root, at); err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		switch {
		case entry.IsDir():
		case info.Mode()&fs.ModeSymlink != 0:
			f.Link, err = os.Readlink(at)
		default:
			f.Executable = info.Mode()&0o100 != 0
			f.Content, err = os.ReadFile(at)
		}
		files = append(files, f)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the folder %s: %w", root, err)
	}
	return files, nil
}

// archive is a tar of files and of the folders that lead to them, which is the same for the same files: sorted, all of
// root and with the time of the commit, whatever they have on this machine.
func archive(s source, files []file) ([]byte, error) {
	all := map[string]file{}
	for _, f := range files {
		f.Path = filepath.ToSlash(f.Path)
		all[f.Path] = f
		for dir := path.Dir(f.Path); dir != "."; dir = path.Dir(dir) {
			if _, known := all[dir]; !known {
				all[dir] = file{Path: dir, Folder: true}
			}
		}
	}
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, name := range sorted(all) {
		f := all[name]
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.Path, Mode: 0o644, Size: int64(len(f.Content)), ModTime: s.Time, Format: tar.FormatPAX}
		switch {
		case f.Path == "tmp":
			header.Typeflag, header.Name, header.Mode = tar.TypeDir, "tmp/", 0o1777
		case f.Folder:
			header.Typeflag, header.Name, header.Mode = tar.TypeDir, f.Path+"/", 0o755
		case f.Link != "":
			header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, f.Link, 0o777
		case f.Executable:
			header.Mode = 0o755
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("archiving %s: %w", f.Path, err)
		}
		if _, err := w.Write(f.Content); err != nil {
			return nil, fmt.Errorf("archiving %s: %w", f.Path, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("archiving: %w", err)
	}
	return buffer.Bytes(), nil
}

func sorted[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// spec is what an image consists of, for one architecture. Each set of files is a layer.
type spec struct {
	Title  string
	Arch   string
	Layers [][]file
	Config v1.Config
}

// image assembles an image.
func image(s source, i spec) (v1.Image, error) {
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, files := range i.Layers {
		content, err := archive(s, files)
		if err != nil {
			return nil, err
		}
		open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }
		layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
		if err != nil {
			return nil, fmt.Errorf("assembling a layer of %s: %w", i.Title, err)
		}
		history := v1.History{Created: v1.Time{Time: s.Time}, CreatedBy: "make release"}
		if img, err = mutate.Append(img, mutate.Addendum{Layer: layer, History: history}); err != nil {
			return nil, fmt.Errorf("assembling %s: %w", i.Title, err)
		}
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("assembling %s: %w", i.Title, err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", i.Arch, v1.Time{Time: s.Time}
	config.Config = *i.Config.DeepCopy()
	if config.Config.Labels == nil {
		config.Config.Labels = map[string]string{}
	}
	for key, value := range s.labels(i.Title) {
		config.Config.Labels[key] = value
	}
	return mutate.ConfigFile(img, config)
}

// labels say what an image is, in the words of the OCI (image-spec, annotations.md) and of the certified catalogue of Red Hat, which asks for a
// folder /licenses too (redhat-openshift-ecosystem/openshift-preflight, internal/policy/container).
func (s source) labels(title string) map[string]string {
	return map[string]string{
		"org.opencontainers.image.title": title, "org.opencontainers.image.version": s.number(),
		"org.opencontainers.image.revision": s.Commit, "org.opencontainers.image.source": repository,
		"org.opencontainers.image.licenses": "Apache-2.0",
		"name":                              title, "version": s.number(), "release": "1", "vendor": "The GPU Sharing Operator Authors",
		"maintainer": "The GPU Sharing Operator Authors", "summary": title + " of the GPU Sharing Operator",
		"description": "Shares NVIDIA GPUs of Kubernetes nodes by time-slicing, MPS and MIG",
	}
}

// index is one image for several architectures.
func index(images map[string]v1.Image) (v1.ImageIndex, error) {
	all := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range sorted(images) {
		all = mutate.AppendManifests(all, mutate.IndexAddendum{
			Add: images[arch], Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	return all, nil
}

// controllerSpec and agentSpec are the images of the Dockerfile.
func controllerSpec(arch string, program []byte) spec {
	return spec{
		Title: controllerName, Arch: arch, Layers: [][]file{{{Path: "controller", Executable: true, Content: program}}},
		Config: v1.Config{Entrypoint: []string{"/controller"}, User: "65532:65532", WorkingDir: "/"},
	}
}

func agentSpec(arch string, program []byte, root []file) spec {
	return spec{
		Title: agentName, Arch: arch, Layers: [][]file{root, {{Path: "usr/bin/gpu-sharing-agent", Executable: true, Content: program}}},
		Config: v1.Config{
			Entrypoint: []string{"/usr/bin/gpu-sharing-agent"}, User: "0:0", WorkingDir: "/", Env: []string{"PATH=/usr/bin:/bin"},
		},
	}
}
