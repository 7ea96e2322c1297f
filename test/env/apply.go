// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fieldManager is ours when the environment itself applies something.
const fieldManager = "test-env"

// Apply applies every object in YAML files, server-side, as `kubectl apply --server-side -f` does. Paths are relative
// to the top of the repository.
func (c *Cluster) Apply(ctx context.Context, paths ...string) error {
	root, err := Root()
	if err != nil {
		return err
	}
	for _, path := range paths {
		objects, err := readObjects(filepath.Join(root, path))
		if err != nil {
			return err
		}
		for _, o := range objects {
			if err := c.ApplyObject(ctx, o); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
	}
	return nil
}

// ApplyObject applies one object server-side.
func (c *Cluster) ApplyObject(ctx context.Context, o *unstructured.Unstructured) error {
	err := c.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner(fieldManager), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("applying %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	return nil
}

// readObjects reads the objects of a YAML file with one or several documents.
func readObjects(path string) ([]*unstructured.Unstructured, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading objects: %w", err)
	}
	objects, err := Objects(data)
	if err != nil {
		return nil, fmt.Errorf("reading objects of %s: %w", path, err)
	}
	return objects, nil
}

// Objects are those of a YAML stream.
func Objects(data []byte) ([]*unstructured.Unstructured, error) {
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	var objects []*unstructured.Unstructured
	for {
		o := &unstructured.Unstructured{}
		err := decoder.Decode(&o.Object)
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, fmt.Errorf("decoding objects: %w", err)
		}
		if len(o.Object) > 0 {
			objects = append(objects, o)
		}
	}
}
