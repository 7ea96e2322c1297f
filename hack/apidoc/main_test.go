// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	. "github.com/onsi/gomega"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

func TestThePageIsAsTheCRDsSay(t *testing.T) {
	g := NewWithT(t)
	t.Chdir("../..")
	want, err := page([]string{"config/crd/gpusharing.io_gpusharingpolicies.yaml", "config/crd/gpusharing.io_gpunodes.yaml"})
	g.Expect(err).NotTo(HaveOccurred())
	written, err := os.ReadFile("docs/api.md")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(written)).To(Equal(want), "make manifests writes it anew")
}

func TestAFieldHasItsTypeDefaultRangeAndDescription(t *testing.T) {
	g := NewWithT(t)
	schema := &apiextensionsv1.JSONSchemaProps{}
	g.Expect(yaml.UnmarshalStrict([]byte(`
type: object
required: [mode]
properties:
  mode: {type: string, enum: [Evict, Never], default: Never, description: "mode is\n how."}
  count: {type: integer, minimum: 2, maximum: 10000000}
  share: {x-kubernetes-int-or-string: true, x-kubernetes-validations: [{rule: a, message: must be few}, {rule: b, message: must be few}]}
  since: {type: string, format: date-time}
  labels: {type: object, additionalProperties: {type: string, maxLength: 63}}
  items:
    type: array
    minItems: 1
    items: {type: object, properties: {names: {type: array, maxItems: 4, items: {type: string, minLength: 1, pattern: "a|b"}}}}
`), schema)).To(Succeed())
	g.Expect(rows("spec", schema)).To(Equal([][5]string{
		{"`spec.count`", "integer", "", "2 to 10000000", ""},
		{"`spec.items`", "list of objects", "", "1 or more items", ""},
		{"`spec.items[].names`", "list of strings", "", "at most 4 items. each: 1 or more characters, `a\\|b`", ""},
		{"`spec.labels`", "map of string to string", "", "each value: at most 63 characters", ""},
		{"`spec.mode`", "string, required", "`Never`", "`Evict`, `Never`", "mode is how."},
		{"`spec.share`", "integer or string", "", "must be few", ""},
		{"`spec.since`", "time", "", "", ""},
	}))
}
