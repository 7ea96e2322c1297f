// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"os"
	"testing"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"
)

// TestFieldsThatACRDLacks: none lacks a field as it is in this repository; each that is missing is found.
func TestFieldsThatACRDLacks(t *testing.T) {
	g := NewWithT(t)
	published := func(drop ...string) map[string]openAPISchema {
		schemas := map[string]openAPISchema{}
		for kind, file := range map[string]string{"GPUNode": "gpunodes", "GPUSharingPolicy": "gpusharingpolicies"} {
			data, err := os.ReadFile("../../config/crd/gpusharing.io_" + file + ".yaml")
			g.Expect(err).NotTo(HaveOccurred())
			var definition struct {
				Spec struct {
					Versions []struct {
						Schema struct {
							Root map[string]any `json:"openAPIV3Schema"`
						} `json:"schema"`
					} `json:"versions"`
				} `json:"spec"`
			}
			g.Expect(yaml.Unmarshal(data, &definition)).To(Succeed())
			root := definition.Spec.Versions[0].Schema.Root
			if kind == "GPUNode" && len(drop) > 0 {
				without(root, drop)
			}
			root["x-kubernetes-group-version-kind"] = []any{map[string]any{"group": "gpusharing.io", "kind": kind, "version": "v1alpha1"}}
			data, err = json.Marshal(root)
			g.Expect(err).NotTo(HaveOccurred())
			var s openAPISchema
			g.Expect(json.Unmarshal(data, &s)).To(Succeed())
			schemas[kind] = s
		}
		return schemas
	}
	g.Expect(skews(published())).To(BeEmpty())
	g.Expect(skews(published("status", "observedGeneration"))).To(ConsistOf(skew{"GPUNode", []string{"status.observedGeneration"}}))
	g.Expect(skews(published("spec"))).To(ConsistOf(skew{"GPUNode", []string{"spec"}}))
	g.Expect(skews(published("status", "devices", "[]", "uuid"))).To(ConsistOf(skew{"GPUNode", []string{"status.devices[].uuid"}}))
}

// without removes a property from a schema.
func without(s map[string]any, path []string) {
	if path[0] == "[]" {
		items, _ := s["items"].(map[string]any)
		without(items, path[1:])
		return
	}
	properties, _ := s["properties"].(map[string]any)
	if len(path) == 1 {
		delete(properties, path[0])
		return
	}
	part, _ := properties[path[0]].(map[string]any)
	without(part, path[1:])
}
