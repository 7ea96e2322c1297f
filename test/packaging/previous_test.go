// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
)

// crdFiles are those of the operator's kinds.
var crdFiles = []string{"config/crd/gpusharing.io_gpunodes.yaml", "config/crd/gpusharing.io_gpusharingpolicies.yaml"}

// TestTodaysCRDsKeepAllThatThePreviousVersionStored: what the previous version stored is valid today and loses nothing,
// or an upgrade would forget what it does to a node. Its parent had fields that today's CRDs lack, so it is the first
// of which that is so.
func TestTodaysCRDsKeepAllThatThePreviousVersionStored(t *testing.T) {
	var before []string
	for _, file := range crdFiles {
		is := schemaOf(t, today, file)
		NewWithT(t).Expect(losses(schemaOf(t, previous.File, file), is, "")).To(BeEmpty(), file)
		before = append(before, losses(schemaOf(t, previous.FileBefore, file), is, "")...)
	}
	NewWithT(t).Expect(before).NotTo(BeEmpty(), "choose an earlier commit as the previous version")
}

// today reads a file of this checkout.
func today(_ context.Context, file string) ([]byte, error) {
	root, err := env.Root()
	if err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(root, file))
}

// schemaOf is the schema in the file of a CRD.
func schemaOf(t *testing.T, read func(context.Context, string) ([]byte, error), file string) apiextensionsv1.JSONSchemaProps {
	t.Helper()
	g := NewWithT(t)
	content, err := read(t.Context(), file)
	g.Expect(err).NotTo(HaveOccurred())
	crd := apiextensionsv1.CustomResourceDefinition{}
	g.Expect(yaml.UnmarshalStrict(content, &crd)).To(Succeed())
	g.Expect(crd.Spec.Versions).To(HaveLen(1))
	return *crd.Spec.Versions[0].Schema.OpenAPIV3Schema
}

// losses are what the values of a schema lose or are refused for under another.
func losses(was, is apiextensionsv1.JSONSchemaProps, path string) (lost []string) {
	if was.Type != is.Type || was.XIntOrString != is.XIntOrString {
		lost = append(lost, fmt.Sprintf("%s was %q and is %q", path, was.Type, is.Type))
	}
	lost = append(lost, narrowed(was, is, path)...)
	for name, property := range was.Properties {
		if today, kept := is.Properties[name]; kept {
			lost = append(lost, losses(property, today, path+"."+name)...)
		} else {
			lost = append(lost, path+"."+name+" is gone")
		}
	}
	if was.Items != nil && is.Items != nil {
		lost = append(lost, losses(*was.Items.Schema, *is.Items.Schema, path+"[]")...)
	}
	if was.AdditionalProperties != nil && is.AdditionalProperties != nil {
		lost = append(lost, losses(*was.AdditionalProperties.Schema, *is.AdditionalProperties.Schema, path+"{}")...)
	}
	return lost
}

// narrowed are the bounds that are tighter than they were.
func narrowed(was, is apiextensionsv1.JSONSchemaProps, path string) (tighter []string) {
	for name, bounds := range map[string][2]*int64{
		"maxLength": {was.MaxLength, is.MaxLength}, "maxItems": {was.MaxItems, is.MaxItems}, "maxProperties": {was.MaxProperties, is.MaxProperties},
	} {
		if bounds[1] != nil && (bounds[0] == nil || *bounds[1] < *bounds[0]) {
			tighter = append(tighter, path+" has a smaller "+name)
		}
	}
	if is.Pattern != "" && is.Pattern != was.Pattern {
		tighter = append(tighter, path+" has another pattern")
	}
	for _, value := range was.Enum {
		if is.Enum != nil && !slices.ContainsFunc(is.Enum, func(v apiextensionsv1.JSON) bool { return bytes.Equal(v.Raw, value.Raw) }) {
			tighter = append(tighter, fmt.Sprintf("%s may not be %s", path, value.Raw))
		}
	}
	for _, name := range is.Required {
		if _, existed := was.Properties[name]; existed && !slices.Contains(was.Required, name) && is.Properties[name].Default == nil {
			tighter = append(tighter, path+"."+name+" is required")
		}
	}
	return tighter
}

// TestAnUpgradeWithPoliciesOfTheFormerSchemaIsRefused before anything changes: it would lose what they say by fields that
// have other names today. Once they are gone, it goes on.
func TestAnUpgradeWithPoliciesOfTheFormerSchemaIsRefused(t *testing.T) {
	withEachHelm(t, func(t *testing.T, i installation) {
		t.Helper()
		g := NewWithT(t)
		i.do(t, "install", release, formerChart(t), "--create-namespace")
		policy := object("gpusharing.io/v1alpha1", "GPUSharingPolicy", "", "shared")
		policy.Object["spec"] = map[string]any{"sharing": map[string]any{
			"strategy": "TimeSlicing", "timeSlicing": map[string]any{"replicas": int64(4), "renameByDefault": true},
		}}
		g.Eventually(func() error { return i.Client.Create(t.Context(), policy) }, 30*time.Second).Should(Succeed())
		crd := object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "gpusharingpolicies.gpusharing.io")
		controller := object("apps/v1", "Deployment", namespace, "gpu-sharing-controller")
		versions := func() []string {
			g.Expect(i.exists(t, crd)).To(BeTrue())
			g.Expect(i.exists(t, controller)).To(BeTrue())
			return []string{crd.GetResourceVersion(), controller.GetResourceVersion()}
		}
		before := versions()

		_, err := i.try(t, "upgrade", release, i.chart)
		g.Expect(err).To(MatchError(And(
			ContainSubstring("1 GPUSharingPolicies of an earlier schema (shared)"), ContainSubstring("run kubectl gpusharing restore"),
		)))
		g.Expect(versions()).To(Equal(before), "nothing has changed")

		g.Expect(i.Client.Delete(t.Context(), policy)).To(Succeed())
		i.do(t, "upgrade", release, i.chart)
		g.Expect(i.Client.Create(t.Context(), &v1alpha1.GPUSharingPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: "shared"},
			Spec: v1alpha1.GPUSharingPolicySpec{NodeSelector: &v1alpha1.NodeSelector{}, Sharing: v1alpha1.Sharing{
				Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4},
				Advertise: &v1alpha1.Advertise{RenameByDefault: new(true)},
			}},
		})).To(Succeed())
		i.do(t, "upgrade", release, i.chart)
	})
}
