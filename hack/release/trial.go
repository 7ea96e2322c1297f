// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"sigs.k8s.io/yaml"
)

// trialSettings are what a trial needs beside the settings of a release. The bundler is the program of hack/bundle; without it there is no
// bundle.
type trialSettings struct{ images, version, helm, bundler string }

// trial pushes the chart of a folder as it is, with images that were built elsewhere, as a release pushes its own: the
// chart names them by digest, and what was pushed is pulled and verified. It builds and signs nothing, so `make e2e`
// can install what it tests from a registry, and `make olm-test` with the bundle and the catalog.
func trial(ctx context.Context, set settings) error {
	if set.registry == "" || set.trial.helm == "" {
		return errors.New("a trial needs -registry and -helm")
	}
	s := source{Version: "v" + set.trial.version, Commit: "trial", Time: time.Unix(0, 0).UTC()}
	if set.trial.version == "" {
		version, err := chartVersion(set.root)
		if err != nil {
			return err
		}
		s.Version = "v" + version
	}
	work, err := os.MkdirTemp("", "release-")
	if err != nil {
		return fmt.Errorf("making a folder to work in: %w", err)
	}
	defer os.RemoveAll(work) //nolint:errcheck // what stays is in the system's folder for temporary files
	r := &release{
		source: s, tree: filepath.Join(work, "source"), out: filepath.Join(work, "dist"),
		registry: strings.TrimSuffix(set.registry, "/"), helm: set.trial.helm,
	}
	copied := filepath.Join("config", "helm")
	if set.trial.bundler != "" {
		copied, r.out = "config", set.out // the bundle is made of more, and who asks for it reads the files
	}
	if err := os.CopyFS(filepath.Join(r.tree, copied), os.DirFS(filepath.Join(set.root, copied))); err != nil {
		return fmt.Errorf("copying the chart: %w", err)
	}
	for one := range strings.SplitSeq(set.trial.images, ",") {
		name, archive, _ := strings.Cut(one, "=")
		img, arch, err := archived(archive)
		if err != nil {
			return fmt.Errorf("reading the image %s from %s: %w", name, archive, err)
		}
		all, err := index(map[string]v1.Image{arch: img})
		if err != nil {
			return err
		}
		r.published = append(r.published, r.publish(name, all, nil))
	}
	if err := r.pin(); err != nil {
		return err
	}
	if err := r.chart(ctx, work); err != nil {
		return err
	}
	if set.trial.bundler != "" {
		if _, err := output(ctx, r.tree, nil, set.trial.bundler, "-root", r.tree, "generate"); err != nil {
			return err
		}
		if err := r.pack(); err != nil {
			return err
		}
	}
	return publish(ctx, set, r)
}

// chartVersion is the version of the chart in a folder.
func chartVersion(root string) (string, error) {
	data, err := os.ReadFile(filepath.Join(root, "config", "helm", "Chart.yaml"))
	if err != nil {
		return "", fmt.Errorf("reading the chart: %w", err)
	}
	var chart struct{ Version string }
	if err := yaml.Unmarshal(data, &chart); err != nil {
		return "", fmt.Errorf("reading the chart: %w", err)
	}
	return chart.Version, nil
}

// archived is the image of a Docker archive, and its architecture. Its layers are not made smaller: they go no further
// than this machine.
func archived(archive string) (v1.Image, string, error) {
	img, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		return nil, "", err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, "", err
	}
	layers, err := img.Layers()
	if err != nil {
		return nil, "", err
	}
	plain := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, layer := range layers {
		stored, err := tarball.LayerFromOpener(layer.Uncompressed, tarball.WithCompressionLevel(gzip.NoCompression), tarball.WithMediaType(types.OCILayer))
		if err != nil {
			return nil, "", err
		}
		if plain, err = mutate.AppendLayers(plain, stored); err != nil {
			return nil, "", err
		}
	}
	made, err := plain.ConfigFile()
	if err != nil {
		return nil, "", err
	}
	made = made.DeepCopy()
	made.OS, made.Architecture, made.Config = config.OS, config.Architecture, config.Config
	plain, err = mutate.ConfigFile(plain, made)
	return plain, config.Architecture, err
}
