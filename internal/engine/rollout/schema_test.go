// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
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

// bounds are what a schema bounds.
type bounds struct {
	length, items, entries *int64
	fields                 map[string]*bounds
	each                   *bounds // of a list, or of the entries that have no name
}

func boundsOf(schema *apiextensionsv1.JSONSchemaProps) *bounds {
	b := &bounds{length: schema.MaxLength, items: schema.MaxItems, entries: schema.MaxProperties, fields: map[string]*bounds{}}
	for name, of := range schema.Properties {
		b.fields[name] = boundsOf(&of)
	}
	if schema.Items != nil {
		b.each = boundsOf(schema.Items.Schema)
	} else if a := schema.AdditionalProperties; a != nil && a.Schema != nil {
		b.each = boundsOf(a.Schema)
	}
	return b
}

// limits are what the schemas bound.
var limits = sync.OnceValue(func() map[string]*bounds {
	all := map[string]*bounds{}
	for kind, schema := range schemas() {
		all[kind] = boundsOf(schema)
	}
	return all
})

// refusal is why the API server refuses an object of ours: what its schema bounds; empty if it takes it.
func refusal(object any) string {
	schema := limits()["GPUNode"]
	if _, is := object.(v1alpha1.GPUSharingPolicy); is {
		schema = limits()["GPUSharingPolicy"]
	}
	return exceeds("", schema, reflect.ValueOf(object))
}

// exceeds is which bound a value exceeds, and where.
func exceeds(path string, schema *bounds, value reflect.Value) string {
	over := func(is int, most *int64, of string) string {
		if most == nil || int64(is) <= *most {
			return ""
		}
		return fmt.Sprintf("%s has %d %s, and %d are allowed", path, is, of, *most)
	}
	if schema == nil || value.IsZero() {
		return ""
	}
	switch value.Kind() { //nolint:exhaustive // nothing else has bounds
	case reflect.Pointer:
		return exceeds(path, schema, value.Elem())
	case reflect.String:
		return over(utf8.RuneCountInString(value.String()), schema.length, "characters")
	case reflect.Slice:
		why := over(value.Len(), schema.items, "items")
		for i := 0; i < value.Len() && why == ""; i++ {
			why = exceeds(path+"[]", schema.each, value.Index(i))
		}
		return why
	case reflect.Map:
		why := over(value.Len(), schema.entries, "entries")
		keys := value.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return cmp.Compare(a.String(), b.String()) })
		for i := 0; i < len(keys) && why == ""; i++ {
			why = exceeds(path+"."+keys[i].String(), cmp.Or(schema.fields[keys[i].String()], schema.each), value.MapIndex(keys[i]))
		}
		return why
	case reflect.Struct:
		return fieldExceeds(path, schema, value)
	}
	return ""
}

func fieldExceeds(path string, schema *bounds, value reflect.Value) string {
	if other, is := reflect.TypeAssert[json.Marshaler](value); is && schema.length != nil {
		return exceeds(path, schema, reflect.ValueOf(written(other)))
	} else if is {
		return "" // a time
	}
	for i := range value.NumField() {
		name, _, _ := strings.Cut(value.Type().Field(i).Tag.Get("json"), ",")
		of := schema
		if name != "" {
			of = schema.fields[name]
		}
		if why := exceeds(path+"."+name, of, value.Field(i)); why != "" {
			return why
		}
	}
	return ""
}

// written is what is written of a value that is no struct there; empty: a number.
func written(of json.Marshaler) (text string) {
	raw, err := of.MarshalJSON()
	if err != nil {
		panic(err)
	}
	_ = json.Unmarshal(raw, &text)
	return text
}
