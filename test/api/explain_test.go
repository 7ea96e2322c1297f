// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestExplained: `kubectl explain` says something of every field, and not only its name, and breaks the lines itself.
func TestExplained(t *testing.T) {
	g := NewWithT(t)
	root, err := env.Root()
	g.Expect(err).NotTo(HaveOccurred())
	files, err := filepath.Glob(filepath.Join(root, "config", "crd", "gpusharing.io_*.yaml"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(files).To(HaveLen(2))
	for _, file := range files {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		data, err := os.ReadFile(file)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(yaml.Unmarshal(data, crd)).To(Succeed())
		t.Run(crd.Spec.Names.Kind, func(t *testing.T) {
			explained(t, crd.Spec.Names.Kind, *crd.Spec.Versions[0].Schema.OpenAPIV3Schema)
		})
	}
}

// TestConditionsAreExplained: of each kind of condition one of the two objects tells in status.conditions.
func TestConditionsAreExplained(t *testing.T) {
	g := NewWithT(t)
	root, err := env.Root()
	g.Expect(err).NotTo(HaveOccurred())
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(root, name))
		g.Expect(err).NotTo(HaveOccurred())
		return string(data)
	}
	texts := ""
	for _, kind := range []string{"gpunodes", "gpusharingpolicies"} {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		g.Expect(yaml.Unmarshal([]byte(read("config/crd/gpusharing.io_"+kind+".yaml")), crd)).To(Succeed())
		texts += crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"].Properties["conditions"].Description
	}
	types := regexp.MustCompile(`\tCondition\w+ = "(\w+)"`).FindAllStringSubmatch(read("api/v1alpha1/conditions.go"), -1)
	g.Expect(len(types)).To(BeNumerically(">", 10))
	for _, is := range types {
		g.Expect(texts).To(ContainSubstring(is[1]))
	}
}

func explained(t *testing.T, path string, schema apiextensionsv1.JSONSchemaProps) {
	t.Helper()
	for name, property := range schema.Properties {
		here := path + "." + name
		if isKubernetesOwn(here) {
			continue
		}
		if len(strings.Fields(property.Description)) < 3 {
			t.Errorf("%s is not explained: %q", here, property.Description)
		}
		if strings.Contains(strings.ReplaceAll(property.Description, "\n\n", ""), "\n") {
			t.Errorf("%s is explained in lines of the source: %q", here, property.Description)
		}
		explained(t, here, property)
	}
	if schema.Items != nil && schema.Items.Schema != nil {
		explained(t, path+"[]", *schema.Items.Schema)
	}
}

// isKubernetesOwn: kubectl explains these by itself.
func isKubernetesOwn(path string) bool {
	return strings.HasSuffix(path, ".metadata") && strings.Count(path, ".") == 1
}
