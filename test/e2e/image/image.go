// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package image assembles container images from files, without Docker, as archives that containerd imports.
package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Image is what an image consists of.
type Image struct {
	// Name with registry and tag. Nothing is pulled from there.
	Name string
	// Files maps paths in the image to files of this machine.
	Files map[string]string
	// Links maps paths in the image to what they point at.
	Links map[string]string
	// Entrypoint of its containers.
	Entrypoint []string
	// User of its containers, as uid:gid. Empty: root.
	User string
	// Env of its containers.
	Env []string
}

// Write writes the image as an archive.
func Write(i Image, archive string) error {
	tag, err := name.NewTag(i.Name)
	if err != nil {
		return fmt.Errorf("naming an image: %w", err)
	}
	built, err := build(i)
	if err != nil {
		return fmt.Errorf("assembling the image %s: %w", i.Name, err)
	}
	if err := tarball.WriteToFile(archive, tag, built); err != nil {
		return fmt.Errorf("writing the image %s: %w", i.Name, err)
	}
	return nil
}

func build(i Image) (v1.Image, error) {
	content, err := layer(i)
	if err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }
	opened, err := tarball.LayerFromOpener(open, tarball.WithCompression(compression.None))
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(empty.Image, opened)
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{Entrypoint: i.Entrypoint, User: i.User, Env: i.Env, WorkingDir: "/"}
	return mutate.ConfigFile(img, config)
}

// layer is the one layer of the image, sorted by path, with the folders that lead to its files.
func layer(i Image) ([]byte, error) {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	made := map[string]bool{"/": true, ".": true}
	for _, to := range sortedPaths(i) {
		if err := folders(w, path.Dir(to), made); err != nil {
			return nil, err
		}
		if err := entry(w, i, to); err != nil {
			return nil, err
		}
	}
	// Programs expect a /tmp.
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777}); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buffer.Bytes(), nil
}

func sortedPaths(i Image) []string {
	var paths []string
	for to := range i.Files {
		paths = append(paths, to)
	}
	for to := range i.Links {
		paths = append(paths, to)
	}
	slices.Sort(paths)
	return paths
}

func folders(w *tar.Writer, dir string, made map[string]bool) error {
	if made[dir] {
		return nil
	}
	if err := folders(w, path.Dir(dir), made); err != nil {
		return err
	}
	made[dir] = true
	return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: inTar(dir) + "/", Mode: 0o755})
}

func entry(w *tar.Writer, i Image, to string) error {
	if target, ok := i.Links[to]; ok {
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: inTar(to), Linkname: target, Mode: 0o777})
	}
	from, err := filepath.EvalSymlinks(i.Files[to])
	if err != nil {
		return err
	}
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: inTar(to), Mode: 0o755, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err = w.Write(content)
	return err
}

func inTar(path string) string { return path[1:] }
