// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// artifact is an OCI artifact that is no image: its configuration is of a kind of its own, and it has one layer.
type artifact struct {
	manifest []byte
	config   []byte
	layer    v1.Layer
}

var _ partial.CompressedImageCore = artifact{}

func newArtifact(s source, title string, config, layer v1.Layer) (v1.Image, error) {
	manifest := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Annotations: s.labels(title)}
	described, err := partial.Descriptor(config)
	if err != nil {
		return nil, fmt.Errorf("assembling %s: %w", title, err)
	}
	manifest.Config = *described
	if described, err = partial.Descriptor(layer); err != nil {
		return nil, fmt.Errorf("assembling %s: %w", title, err)
	}
	manifest.Layers = []v1.Descriptor{*described}
	a := artifact{layer: layer}
	if a.manifest, err = json.Marshal(manifest); err != nil {
		return nil, fmt.Errorf("assembling %s: %w", title, err)
	}
	content, err := config.Compressed()
	if err != nil {
		return nil, fmt.Errorf("assembling %s: %w", title, err)
	}
	if a.config, err = io.ReadAll(content); err != nil {
		return nil, fmt.Errorf("assembling %s: %w", title, err)
	}
	return partial.CompressedToImage(a)
}

// RawManifest implements partial.CompressedImageCore.
func (a artifact) RawManifest() ([]byte, error) { return a.manifest, nil }

// RawConfigFile implements partial.CompressedImageCore.
func (a artifact) RawConfigFile() ([]byte, error) { return a.config, nil }

// MediaType implements partial.CompressedImageCore.
func (a artifact) MediaType() (types.MediaType, error) { return types.OCIManifestSchema1, nil }

// LayerByDigest implements partial.CompressedImageCore.
func (a artifact) LayerByDigest(digest v1.Hash) (partial.CompressedLayer, error) {
	has, err := a.layer.Digest()
	if err != nil {
		return nil, err
	}
	if has != digest {
		return nil, fmt.Errorf("there is no layer %s", digest)
	}
	return a.layer, nil
}
