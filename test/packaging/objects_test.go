// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// decode reads the objects of a YAML stream.
func decode(text string) ([]*unstructured.Unstructured, error) {
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
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

// read reads the objects of a file of the repository.
func read(tb testing.TB, file string) []*unstructured.Unstructured {
	tb.Helper()
	data, err := os.ReadFile(path(tb, file))
	if err != nil {
		tb.Fatal(err)
	}
	objects, err := decode(string(data))
	if err != nil {
		tb.Fatalf("%s: %v", file, err)
	}
	return objects
}

// name tells one object from another.
func name(o *unstructured.Unstructured) string { return o.GetKind() + " " + o.GetName() }

func names(objects []*unstructured.Unstructured) []string {
	all := make([]string, len(objects))
	for i, o := range objects {
		all[i] = name(o)
	}
	return all
}

func find(tb testing.TB, objects []*unstructured.Unstructured, wanted string) *unstructured.Unstructured {
	tb.Helper()
	for _, o := range objects {
		if name(o) == wanted {
			return o
		}
	}
	tb.Fatalf("there is no %s among %s", wanted, strings.Join(names(objects), ", "))
	return nil
}

// as converts an object to its Go type and refuses fields that the type does not have.
func as[T any](tb testing.TB, o *unstructured.Unstructured) T {
	tb.Helper()
	var typed T
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, &typed, true); err != nil {
		tb.Fatalf("%s: %v", name(o), err)
	}
	return typed
}

// contents are those of all files that match patterns, one after the other.
func contents(tb testing.TB, patterns ...string) string {
	tb.Helper()
	var all strings.Builder
	for _, pattern := range patterns {
		files, err := filepath.Glob(path(tb, pattern))
		if err != nil {
			tb.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				tb.Fatal(err)
			}
			all.Write(data)
		}
	}
	return all.String()
}
