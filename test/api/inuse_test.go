// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// To uninstall the operator one of these is deleted first. The deletions are dry runs, which pass the same admission.
func TestWhatWouldDeleteLivePoliciesIsRefused(t *testing.T) {
	cluster := env.Start(t)
	g := NewWithT(t)
	ctx := t.Context()
	g.Expect(apiextensionsv1.AddToScheme(cluster.Scheme)).To(Succeed())
	g.Expect(cluster.Client.Create(ctx, definitionOfClusterExtensions())).To(Succeed())
	g.Expect(cluster.Apply(ctx, "config/default/namespace.yaml", "config/manager/admission.yaml")).To(Succeed())
	ours, second, others := clusterExtension("ours", "gpu-sharing-operator"), clusterExtension("second", "gpu-sharing-operator"), clusterExtension("others", "another-operator")
	half := clusterExtension("half", "gpu-sharing-operator") // owns the definitions already, and a quota refused what came after them
	for extension, is := range map[*unstructured.Unstructured][2]string{
		ours: {"Unknown", "OLM could not find out"}, half: {"False", "exceeded quota"},
		second: {"False", "CustomResourceDefinition 'gpunodes.gpusharing.io' already exists in namespace '' and cannot be managed by operator-controller"},
	} {
		extension.Object["status"] = map[string]any{"conditions": []any{
			map[string]any{"type": "Installed", "status": is[0]}, map[string]any{"type": "Progressing", "status": "True", "message": is[1]},
		}}
	}
	for _, extension := range []client.Object{ours, half, second, others} {
		g.Eventually(func() error { return cluster.Client.Create(ctx, extension) }).WithTimeout(20 * time.Second).Should(Succeed())
	}
	foreign := definitionOfClusterExtensions()
	kept := []client.Object{definition("gpusharingpolicies." + v1alpha1.Group), definition("gpunodes." + v1alpha1.Group), ours, half}
	deleted := func(ctx context.Context, o client.Object) error {
		return cluster.Client.Delete(ctx, o, client.DryRunAll)
	}

	for _, o := range kept {
		g.Expect(deleted(ctx, o)).To(Succeed(), "nothing is shared")
	}
	policy := &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}, Spec: v1alpha1.GPUSharingPolicySpec{
		NodeSelector: &v1alpha1.NodeSelector{}, Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive},
	}}
	g.Expect(cluster.Client.Create(ctx, policy)).To(Succeed())
	for _, o := range kept {
		g.Eventually(func() error { return deleted(ctx, o) }).WithTimeout(20*time.Second).Should(
			MatchError(And(ContainSubstring("GPUSharingPolicy research still shares GPUs"), ContainSubstring("kubectl gpusharing restore"))),
			"an admission policy takes effect a moment after it was applied")
	}
	g.Expect(deleted(ctx, others)).To(Succeed(), "another operator")
	g.Expect(deleted(ctx, second)).To(Succeed(), "nothing goes with it")
	g.Expect(deleted(ctx, foreign)).To(Succeed(), "another definition")
	g.Expect(cluster.Client.DeleteAllOf(ctx, ours, client.DryRunAll)).To(MatchError(ContainSubstring("kubectl gpusharing restore")))

	g.Expect(cluster.Client.Delete(ctx, policy)).To(Succeed())
	for _, o := range kept {
		g.Eventually(func() error { return deleted(ctx, o) }).WithTimeout(20 * time.Second).Should(Succeed())
	}

	// A policy is gone, and its node is not restored yet.
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{v1alpha1.AnnotationBaseline: "{}"}}}
	g.Expect(cluster.Client.Create(ctx, node)).To(Succeed())
	for _, o := range kept {
		g.Eventually(func() error { return deleted(ctx, o) }).WithTimeout(20 * time.Second).Should(
			MatchError(And(ContainSubstring("Node a is not restored yet"), ContainSubstring("kubectl gpusharing restore"))))
	}
	g.Expect(deleted(ctx, others)).To(Succeed(), "another operator")
	g.Expect(deleted(ctx, second)).To(Succeed(), "nothing goes with it")
	g.Expect(deleted(ctx, foreign)).To(Succeed(), "another definition")
	unshared := func() {
		t.Helper()
		node.Annotations, node.Spec.Taints = nil, nil
		g.Expect(cluster.Client.Update(ctx, node)).To(Succeed())
		for _, o := range kept {
			g.Eventually(func() error { return deleted(ctx, o) }).WithTimeout(20*time.Second).Should(Succeed(), "it is restored")
		}
	}
	unshared()

	// A node that was not changed has no baseline, and may have taints of the operator all the same.
	for _, taint := range []func(){
		func() { node.Annotations = map[string]string{v1alpha1.AnnotationTaints: "gpu:NoSchedule"} },
		func() { node.Spec.Taints = autoscaling.WithStartup(nil, true) },
	} {
		taint()
		g.Expect(cluster.Client.Update(ctx, node)).To(Succeed())
		for _, o := range kept {
			g.Eventually(func() error { return deleted(ctx, o) }).WithTimeout(10 * time.Second).Should(MatchError(ContainSubstring("Node a is not restored yet")))
		}
		unshared()
	}
	node.Spec.Taints = []corev1.Taint{{Key: v1alpha1.TaintStartupAutoscaler, Effect: corev1.TaintEffectNoSchedule}}
	g.Expect(cluster.Client.Update(ctx, node)).To(Succeed())
	for _, o := range kept {
		g.Consistently(func() error { return deleted(ctx, o) }).WithTimeout(time.Second).Should(Succeed(), "a user registers nodes so")
	}
}

func definition(name string) client.Object {
	return &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

func clusterExtension(name, packageName string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{
		"spec": map[string]any{"source": map[string]any{"sourceType": "Catalog", "catalog": map[string]any{"packageName": packageName}}},
	}}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: "olm.operatorframework.io", Version: "v1", Kind: "ClusterExtension"})
	o.SetName(name)
	return o
}

func definitionOfClusterExtensions() *apiextensionsv1.CustomResourceDefinition {
	anything := &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: new(true)}
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "clusterextensions.olm.operatorframework.io"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "olm.operatorframework.io", Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "clusterextensions", Kind: "ClusterExtension"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true, Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: anything},
			}},
		},
	}
}
