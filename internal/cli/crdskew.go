// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"k8s.io/client-go/openapi"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// skew is a kind of the operator of which the API server does not know all fields that this program knows.
type skew struct {
	kind string
	// lacks are the paths of the fields that the CRD lacks.
	lacks []string
}

// openAPISchema is what is needed of an OpenAPI v3 schema.
type openAPISchema struct {
	Properties map[string]openAPISchema `json:"properties"`
	Items      *openAPISchema           `json:"items"`
	Kinds      []struct {
		Group, Kind string
	} `json:"x-kubernetes-group-version-kind"`
}

// readSkews compares the fields of the operator's kinds with those that the API server publishes of their CRDs, which
// everybody who is logged in may read. Nil where it does not publish them.
func readSkews(published openapi.Client) ([]skew, error) {
	paths, err := published.Paths()
	if err != nil {
		return nil, fmt.Errorf("reading what the API server publishes of its kinds: %w", err)
	}
	version, found := paths["apis/"+v1alpha1.SchemeGroupVersion.String()]
	if !found {
		return nil, nil
	}
	data, err := version.Schema("application/json")
	if err != nil {
		return nil, fmt.Errorf("reading the schemas of %s: %w", v1alpha1.SchemeGroupVersion, err)
	}
	var document struct {
		Components struct {
			Schemas map[string]openAPISchema `json:"schemas"`
		} `json:"components"`
	}
	if err := json.Unmarshal(data, &document); err != nil {
		return nil, fmt.Errorf("decoding the schemas of %s: %w", v1alpha1.SchemeGroupVersion, err)
	}
	return skews(document.Components.Schemas), nil
}

// skews are the kinds whose schemas lack fields.
func skews(published map[string]openAPISchema) (found []skew) {
	for kind, of := range map[string]reflect.Type{
		"GPUNode": reflect.TypeFor[v1alpha1.GPUNode](), "GPUSharingPolicy": reflect.TypeFor[v1alpha1.GPUSharingPolicy](),
	} {
		for _, s := range published {
			if len(s.Kinds) == 0 || s.Kinds[0].Kind != kind {
				continue
			}
			if lacks := lacking(s, of, ""); len(lacks) > 0 {
				slices.Sort(lacks)
				found = append(found, skew{kind: kind, lacks: lacks})
			}
		}
	}
	slices.SortFunc(found, func(a, b skew) int { return strings.Compare(a.kind, b.kind) })
	return found
}

// lacking are the paths of the fields of a type that a schema lacks; of a structure that is missing, only its own.
func lacking(s openAPISchema, of reflect.Type, path string) (lacks []string) {
	switch {
	case of.Kind() == reflect.Pointer:
		return lacking(s, of.Elem(), path)
	case of.Kind() == reflect.Slice && s.Items != nil:
		return lacking(*s.Items, of.Elem(), path+"[]")
	case of.Kind() != reflect.Struct || of.PkgPath() != reflect.TypeFor[v1alpha1.GPUNode]().PkgPath():
		return nil // the types of others have a form of their own
	}
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous && name == "" && strings.HasPrefix(field.Type.PkgPath(), "k8s.io/"), name == "metadata", name == "-":
			continue
		case name == "":
			lacks = append(lacks, lacking(s, field.Type, path)...)
			continue
		}
		if part, known := s.Properties[name]; known {
			lacks = append(lacks, lacking(part, field.Type, path+"."+name)...)
		} else {
			lacks = append(lacks, strings.TrimPrefix(path+"."+name, "."))
		}
	}
	return lacks
}
