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
		object.Object = map[string]any{
			"apiVersion": "gpusharing.io/v1alpha1", "kind": "GPUSharingPolicy", "metadata": map[string]any{"name": "part"}, "spec": spec,
		}
	}
	if object.GetKind() == "Pod" || object.GetKind() == "Deployment" {
		object.SetNamespace(metav1.NamespaceDefault)
	}
	return object.GetKind() != ""
}
