// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"unicode/utf8"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// schemas are those of our kinds, as the CRDs have them.
var schemas = sync.OnceValue(func() map[string]*apiextensionsv1.JSONSchemaProps {
	all := map[string]*apiextensionsv1.JSONSchemaProps{}
	for _, kind := range []string{"gpunodes", "gpusharingpolicies"} {
		text, err := os.ReadFile("../../../config/crd/gpusharing.io_" + kind + ".yaml")
		if err != nil {
			panic(err)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &crd); err != nil {
			panic(err)
		}
		all[crd.Spec.Names.Kind] = crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	}
	return all
})

// refusal is why the API server refuses an object of ours: what its schema bounds; empty if it takes it.
func refusal(object any) string {
	text, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	var value any
	if err := json.Unmarshal(text, &value); err != nil {
		panic(err)
	}
	schema := schemas()["GPUNode"]
	if _, is := object.(v1alpha1.GPUSharingPolicy); is {
		schema = schemas()["GPUSharingPolicy"]
	}
	return exceeds("", schema, value)
}

// exceeds is which bound a value exceeds, and where.
func exceeds(path string, schema *apiextensionsv1.JSONSchemaProps, value any) string {
	over := func(is int, most *int64, of string) string {
		if most == nil || int64(is) <= *most {
			return ""
		}
		return fmt.Sprintf("%s has %d %s, and %d are allowed", path, is, of, *most)
	}
	switch value := value.(type) {
	case string:
		return over(utf8.RuneCountInString(value), schema.MaxLength, "characters")
	case []any:
		if why := over(len(value), schema.MaxItems, "items"); why != "" || schema.Items == nil {
			return why
		}
		for _, item := range value {
			if why := exceeds(path+"[]", schema.Items.Schema, item); why != "" {
				return why
			}
		}
	case map[string]any:
		if why := over(len(value), schema.MaxProperties, "entries"); why != "" {
			return why
		}
		return propertyExceeds(path, schema, value)
	}
	return ""
}

// propertyExceeds is which bound a property of an object exceeds, and where.
func propertyExceeds(path string, schema *apiextensionsv1.JSONSchemaProps, value map[string]any) string {
	for _, name := range slices.Sorted(maps.Keys(value)) {
		of, known := schema.Properties[name]
		if a := schema.AdditionalProperties; !known && a != nil && a.Schema != nil {
			of = *a.Schema
		}
		if why := exceeds(path+"."+name, &of, value[name]); why != "" {
			return why
		}
	}
	return ""
}
