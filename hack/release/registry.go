// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// published is what lies in a registry under a name: an image for several architectures, or an artifact.
type published struct {
	// Name with the registry, without the tag.
	Name string
	Tag  string
	// One of them: an image for several architectures, or one image or artifact.
	Index v1.ImageIndex
	Image v1.Image
}

func (p published) digest() (v1.Hash, error) {
	if p.Index != nil {
		return p.Index.Digest()
	}
	return p.Image.Digest()
}

// byDigest names it by its digest, which no push changes.
func (p published) byDigest() (string, error) {
	digest, err := p.digest()
	return p.Name + "@" + digest.String(), err
}

// named is its tag and its digest.
func (p published) named() (tag name.Tag, digest v1.Hash, err error) {
	if tag, err = name.NewTag(p.Name + ":" + p.Tag); err != nil {
		return tag, digest, fmt.Errorf("naming what is published: %w", err)
	}
	digest, err = p.digest()
	return tag, digest, err
}

// writeLayout writes all into a folder, as the OCI's image layout, which crane, skopeo and oras read.
func writeLayout(folder string, all []published) error {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range all {
		var add mutate.Appendable = p.Image
		if p.Index != nil {
			add = p.Index
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: add, Descriptor: v1.Descriptor{
			Annotations: map[string]string{"org.opencontainers.image.ref.name": p.Name + ":" + p.Tag},
		}})
	}
	if _, err := layout.Write(folder, index); err != nil {
		return fmt.Errorf("writing the image layout %s: %w", folder, err)
	}
	return nil
}

func options(ctx context.Context) []remote.Option {
	return []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
}

// push pushes to the registry, with the credentials of `docker login`. A tag that has another content is not replaced.
func push(ctx context.Context, p published) error {
	tag, digest, err := p.named()
	if err != nil {
		return err
	}
	has, err := remote.Head(tag, options(ctx)...)
	if failed, is := errors.AsType[*transport.Error](err); err != nil && (!is || failed.StatusCode != http.StatusNotFound) {
		return fmt.Errorf("looking whether %s is published already: %w", tag, err)
	}
	if err == nil && has.Digest != digest {
		return fmt.Errorf("%s exists with the digest %s, and this release has %s; a published version is never replaced: give the commit another tag",
			tag, has.Digest, digest)
	}
	if p.Index != nil {
		err = remote.WriteIndex(tag, p.Index, options(ctx)...)
	} else {
		err = remote.Write(tag, p.Image, options(ctx)...)
	}
	if err != nil {
		return fmt.Errorf("pushing %s: %w", tag, err)
	}
	return nil
}

// verifyPushed pulls by the tag and compares all with what was pushed: each manifest, configuration and layer with its
// digest.
func verifyPushed(ctx context.Context, p published) error {
	tag, want, err := p.named()
	if err != nil {
		return err
	}
	got, err := remote.Get(tag, options(ctx)...)
	if err != nil {
		return fmt.Errorf("pulling %s: %w", tag, err)
	}
	if got.Digest != want {
		return fmt.Errorf("%s has the digest %s, expected %s", tag, got.Digest, want)
	}
	if p.Index == nil {
		img, err := got.Image()
		if err != nil {
			return fmt.Errorf("pulling %s: %w", tag, err)
		}
		return verifyLayers(tag, img)
	}
	pulled, err := got.ImageIndex()
	if err != nil {
		return fmt.Errorf("pulling %s: %w", tag, err)
	}
	if err := validate.Index(pulled); err != nil {
		return fmt.Errorf("%s is damaged in the registry: %w", tag, err)
	}
	return nil
}

// verifyLayers reads all of an artifact: what is read from a registry fails if it does not have the digest by which it
// was asked for. validate.Image does not take an artifact, whose configuration is none of an image.
func verifyLayers(tag name.Tag, img v1.Image) error {
	layers, err := img.Layers()
	if err != nil {
		return fmt.Errorf("pulling %s: %w", tag, err)
	}
	if _, err := img.RawConfigFile(); err != nil {
		return fmt.Errorf("%s is damaged in the registry: %w", tag, err)
	}
	for _, l := range layers {
		content, err := l.Compressed()
		if err == nil {
			_, err = io.Copy(io.Discard, content)
			err = errors.Join(err, content.Close())
		}
		if err != nil {
			return fmt.Errorf("%s is damaged in the registry: %w", tag, err)
		}
	}
	return nil
}
