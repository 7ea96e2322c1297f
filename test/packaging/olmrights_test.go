// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestUnderOLMAccountsWriteInTheirNamespaceAlone: a right in the operator's namespace is none in another one, where it
// could be a right to anything: a privileged pod with an account that makes administrators. And no account changes what
// refuses that.
func TestUnderOLMAccountsWriteInTheirNamespaceAlone(t *testing.T) {
	cluster := env.Start(t, env.WithNVIDIA())
	g := NewWithT(t)
	g.Expect(cluster.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: olmNamespace}})).To(Succeed())
	grantAsOLM(t, cluster)
	as := func(account string) client.Client {
		c, err := cluster.ClientAs(t.Context(), env.Identity{Namespace: olmNamespace, ServiceAccount: account})
		g.Expect(err).NotTo(HaveOccurred())
		return c
	}
	operands, controller := as("gpu-sharing-operands"), as("gpu-sharing-controller")
	daemonSet := func(name, namespace, account string) *unstructured.Unstructured {
		o := object("apps/v1", "DaemonSet", namespace, name)
		labels := map[string]any{"app": "x"}
		o.Object["spec"] = map[string]any{"selector": map[string]any{"matchLabels": labels}, "template": map[string]any{
			"metadata": map[string]any{"labels": labels}, "spec": map[string]any{"serviceAccountName": account, "containers": []any{
				map[string]any{"name": "x", "image": "x", "securityContext": map[string]any{"privileged": true}},
			}},
		}}
		return o
	}
	lease := func(namespace string) *unstructured.Unstructured {
		return object("coordination.k8s.io/v1", "Lease", namespace, "gpu-sharing-controller")
	}
	feature := func(namespace string) *unstructured.Unstructured {
		o := object("nfd.k8s-sigs.io/v1alpha1", "NodeFeature", namespace, "zz-gpu-sharing-n1")
		o.Object["spec"] = map[string]any{}
		return o
	}
	const mps, elsewhere = "gpu-sharing-mps", metav1.NamespaceSystem
	apply, create, remove := dryRunApply, dryRunCreate, dryRunDelete
	tests := map[string]struct {
		as      client.Client
		do      func(context.Context, client.Client, *unstructured.Unstructured) error
		to      *unstructured.Unstructured
		allowed bool
	}{
		"operands apply a DaemonSet of theirs":                      {operands, apply, daemonSet(mps, olmNamespace, mps), true},
		"operands apply one with an account that makes roles":       {operands, apply, daemonSet(mps, elsewhere, "clusterrole-aggregation-controller"), false},
		"operands apply one of another name":                        {operands, apply, daemonSet("other", olmNamespace, mps), false},
		"operands delete a DaemonSet in another namespace":          {operands, remove, daemonSet(mps, elsewhere, mps), false},
		"operands apply the account of the MPS pods":                {operands, apply, object("v1", "ServiceAccount", olmNamespace, mps), true},
		"operands apply it in another namespace":                    {operands, apply, object("v1", "ServiceAccount", elsewhere, mps), false},
		"operands change their Role":                                {operands, apply, object("rbac.authorization.k8s.io/v1", "Role", olmNamespace, "gpu-sharing-operands"), false},
		"operands bind their Role elsewhere":                        {operands, apply, roleBinding(elsewhere), false},
		"the controller creates its Lease":                          {controller, create, lease(olmNamespace), true},
		"the controller creates a Lease in another namespace":       {controller, create, lease(elsewhere), false},
		"the controller creates a NodeFeature":                      {controller, create, feature(olmNamespace), true},
		"the controller creates a NodeFeature in another namespace": {controller, create, feature(elsewhere), false},
		"the controller deletes a NodeFeature":                      {controller, remove, feature(olmNamespace), true},
		"the controller deletes a NodeFeature in another namespace": {controller, remove, feature(elsewhere), false},
	}
	// What is allowed comes first: then the rights have taken effect, and what is refused is not refused for want of
	// them.
	for _, allowed := range []bool{true, false} {
		for name, tc := range tests {
			if tc.allowed != allowed {
				continue
			}
			t.Run(name, func(t *testing.T) {
				try := func() error { return client.IgnoreNotFound(tc.do(t.Context(), tc.as, tc.to.DeepCopy())) }
				if allowed {
					NewWithT(t).Eventually(try, 20*time.Second).Should(Succeed())
					return
				}
				err := try()
				NewWithT(t).Expect(apierrors.IsForbidden(err)).To(BeTrue(), "not forbidden: %v", err)
			})
		}
	}
}

func roleBinding(namespace string) *unstructured.Unstructured {
	o := object("rbac.authorization.k8s.io/v1", "RoleBinding", namespace, "gpu-sharing-operands")
	o.Object["roleRef"] = map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
	return o
}

func dryRunApply(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("test"), client.ForceOwnership, client.DryRunAll)
}

func dryRunCreate(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	return c.Create(ctx, o, client.DryRunAll)
}

func dryRunDelete(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	return c.Delete(ctx, o, client.DryRunAll)
}
