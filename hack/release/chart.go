// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"sigs.k8s.io/yaml"
)

// pin writes the version, the registry and the digests of the images into the chart of a source. Everything else that
// names images is made from the chart. The digests are no values of the chart: `helm upgrade --reuse-values` would keep
// those of the former version, and a tag that a user gives would count less.
func pin(s source, folder, registry string, digests map[string]v1.Hash) error {
	chart := filepath.Join(folder, "config", "helm", "Chart.yaml")
	data, err := os.ReadFile(chart)
	if err != nil {
		return fmt.Errorf("reading the chart: %w", err)
	}
	var was struct{ Version, AppVersion string }
	if err := yaml.Unmarshal(data, &was); err != nil {
		return fmt.Errorf("reading the chart: %w", err)
	}
	const annotations = "\nannotations:\n"
	pinned := annotations
	var images [][2]string
	for _, name := range sorted(digests) {
		pinned += fmt.Sprintf("  gpusharing.io/%s-image: %s/%s@%s\n", strings.TrimPrefix(name, "gpu-sharing-"), registry, name, digests[name])
		images = append(images, [2]string{"repository: " + defaultRegistry + "/" + name + "\n", "repository: " + registry + "/" + name + "\n"})
	}
	err = replace(chart, [][2]string{
		{"\nversion: " + was.Version + "\n", "\nversion: " + s.number() + "\n"},
		{"\nappVersion: " + was.AppVersion + "\n", "\nappVersion: " + s.number() + "\n"},
		{annotations, pinned},
	})
	if err != nil {
		return err
	}
	return replace(filepath.Join(folder, "config", "helm", "values.yaml"), images)
}

// replace replaces texts of a file, each of which must be there once.
func replace(path string, texts [][2]string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("pinning the release: %w", err)
	}
	content := string(data)
	for _, t := range texts {
		if strings.Count(content, t[0]) != 1 {
			return fmt.Errorf("pinning the release: %s has %q %d times, expected once", path, t[0], strings.Count(content, t[0]))
		}
		content = strings.Replace(content, t[0], t[1], 1)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil { //nolint:gosec // for everybody to read
		return fmt.Errorf("pinning the release: %w", err)
	}
	return nil
}

// packageChart is the chart of a source as Helm packages it, but the same for the same files: Helm writes the time.
func packageChart(ctx context.Context, s source, folder, to, helm string) ([]byte, error) {
	if _, err := output(ctx, folder, nil, helm, "package", "config/helm", "--destination", to); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(filepath.Join(to, chartName+"-"+s.number()+".tgz"))
	if err != nil {
		return nil, fmt.Errorf("packaging the chart: %w", err)
	}
	files, err := untar(data)
	if err != nil {
		return nil, fmt.Errorf("packaging the chart: %w", err)
	}
	plain, err := archive(s, files)
	if err != nil {
		return nil, err
	}
	return gzipped(plain)
}

// untar returns the files of a tar.gz.
func untar(data []byte) ([]file, error) {
	plain, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	var files []file
	for r := tar.NewReader(plain); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return nil, err
		}
		files = append(files, file{Path: header.Name, Content: content, Executable: header.Mode&0o100 != 0})
	}
}

// chartArtifact is a packaged chart as `helm push` stores it (https://helm.sh/docs/topics/registries).
func chartArtifact(s source, packaged []byte) (v1.Image, error) {
	files, err := untar(packaged)
	if err != nil {
		return nil, fmt.Errorf("reading the packaged chart: %w", err)
	}
	var metadata []byte
	for _, f := range files {
		if f.Path == chartName+"/Chart.yaml" {
			if metadata, err = yaml.YAMLToJSON(f.Content); err != nil {
				return nil, fmt.Errorf("reading Chart.yaml: %w", err)
			}
		}
	}
	return newArtifact(s, chartName, static.NewLayer(metadata, "application/vnd.cncf.helm.config.v1+json"),
		static.NewLayer(packaged, "application/vnd.cncf.helm.chart.content.v1.tar+gzip"))
}
