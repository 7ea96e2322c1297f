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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestYAMLOfDocsIsAccepted: the API server takes each object that README.md and the pages for users show, and each part
// of a policy as part of one, with no field that it does not know.
func TestYAMLOfDocsIsAccepted(t *testing.T) {
	cluster := env.Start(t)
	root, err := env.Root()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	tried := map[string]int{}
	for _, page := range append(pages, filepath.Join(root, "README.md")) {
		text, err := os.ReadFile(page)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		for _, block := range regexp.MustCompile("(?s)\n```yaml\n(.*?\n)```").FindAllStringSubmatch(string(text), -1) {
			for document := range strings.SplitSeq(block[1], "\n---\n") {
				object := &unstructured.Unstructured{}
				NewWithT(t).Expect(yaml.Unmarshal([]byte(document), &object.Object)).To(Succeed(), "%s:\n%s", page, document)
				if !complete(object) {
					continue // values of a chart, or a part of another program's object
				}
				if object.GetNamespace() != "" {
					object.SetNamespace(metav1.NamespaceDefault)
				}
				err := cluster.Client.Create(t.Context(), object, client.DryRunAll, client.FieldValidation(metav1.FieldValidationStrict))
				NewWithT(t).Expect(err).NotTo(HaveOccurred(), "%s:\n%s", page, document)
				tried[object.GetKind()]++
			}
		}
	}
	NewWithT(t).Expect(tried).To(And(HaveKeyWithValue("GPUSharingPolicy", BeNumerically(">", 10)), HaveKey("ResourceQuota"), HaveKey("Deployment")))
}

// complete makes a part of a policy one, and reports whether an object is one that a cluster without NVIDIA's kinds has.
func complete(object *unstructured.Unstructured) bool {
	spec, _, _ := unstructured.NestedMap(object.Object, "spec")
	if object.GetKind() == "" && (spec["rollout"] != nil || spec["sharing"] != nil) {
		if spec["sharing"] == nil {
			spec["sharing"] = map[string]any{"strategy": "Exclusive"}
		}
		if spec["nodeSelector"] == nil {
			spec["nodeSelector"] = map[string]any{}
		}
		object.Object = map[string]any{
			"apiVersion": "gpusharing.io/v1alpha1", "kind": "GPUSharingPolicy", "metadata": map[string]any{"name": "part"}, "spec": spec,
		}
	}
	if object.GetKind() == "Pod" || object.GetKind() == "Deployment" {
		object.SetNamespace(metav1.NamespaceDefault)
	}
	return object.GetKind() != ""
}

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
