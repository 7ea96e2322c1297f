// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestRolesForUsers: a user with Kubernetes' role view, edit or admin in the whole cluster, or with a role of ours, may
// do what docs/security.md says, and no more.
func TestRolesForUsers(t *testing.T) {
	cluster := env.Start(t)
	g := NewWithT(t)
	g.Expect(cluster.Apply(t.Context(), "config/rbac/users.yaml")).To(Succeed())
	aggregate(t, cluster.Client)
	for _, role := range []string{"view", "edit", "admin", "gpu-sharing-edit"} {
		g.Expect(cluster.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "users-" + role}, RoleRef: roleRef(role), Subjects: user(role),
		})).To(Succeed())
	}
	g.Expect(cluster.Client.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "users"}, RoleRef: roleRef("admin"), Subjects: user("admin of a namespace"),
	})).To(Succeed())
	existing := policy(t, "a", `{sharing: {strategy: Exclusive}}`)
	g.Expect(cluster.Client.Create(t.Context(), existing)).To(Succeed())
	g.Expect(cluster.Client.Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}})).To(Succeed())

	reads := []string{"read policies", "watch policies", "read GPUNodes"}
	writes := []string{"create a policy", "update a policy", "patch a policy", "delete a policy"}
	for name, may := range map[string][]string{
		"nobody": nil, "admin of a namespace": nil, "view": reads, "edit": reads, "admin": reads, "gpu-sharing-edit": writes,
	} {
		t.Run(name, func(t *testing.T) {
			config := rest.CopyConfig(cluster.Config)
			config.Impersonate = rest.ImpersonationConfig{UserName: name}
			c, err := client.NewWithWatch(config, client.Options{Scheme: cluster.Scheme})
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Eventually(func(g Gomega) {
				var allowed []string
				for action, try := range requests(t, c, existing) {
					err := try(t.Context())
					if !apierrors.IsForbidden(err) {
						g.Expect(err).NotTo(HaveOccurred(), action)
						allowed = append(allowed, action)
					}
				}
				g.Expect(allowed).To(ConsistOf(may))
			}, 20*time.Second).Should(Succeed(), "a binding takes effect a moment after it was made")
		})
	}
}

// requests are those on policies and GPUNodes. None changes anything.
func requests(t *testing.T, c client.WithWatch, existing client.Object) map[string]func(context.Context) error {
	t.Helper()
	copied := func() client.Object { return existing.DeepCopyObject().(client.Object) } //nolint:forcetypeassert // a copy has the type of its original
	node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"labels": {"a": "b"}}}`))
	status := client.RawPatch("application/merge-patch+json", []byte(`{"status": {"observedGeneration": 1}}`))
	return map[string]func(context.Context) error{
		"read policies": func(ctx context.Context) error { return c.List(ctx, &v1alpha1.GPUSharingPolicyList{}) },
		"read GPUNodes": func(ctx context.Context) error { return c.List(ctx, &v1alpha1.GPUNodeList{}) },
		"watch policies": func(ctx context.Context) error {
			w, err := c.Watch(ctx, &v1alpha1.GPUSharingPolicyList{})
			if err == nil {
				w.Stop()
			}
			return err
		},
		"create a policy": func(ctx context.Context) error {
			return c.Create(ctx, policy(t, "b", `{sharing: {strategy: Exclusive}}`), client.DryRunAll)
		},
		"update a policy":              func(ctx context.Context) error { return c.Update(ctx, copied(), client.DryRunAll) },
		"patch a policy":               func(ctx context.Context) error { return c.Patch(ctx, copied(), patch, client.DryRunAll) },
		"delete a policy":              func(ctx context.Context) error { return c.Delete(ctx, copied(), client.DryRunAll) },
		"write the status of a policy": func(ctx context.Context) error { return c.Status().Patch(ctx, copied(), status, client.DryRunAll) },
		"create a GPUNode": func(ctx context.Context) error {
			return c.Create(ctx, &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "b"}}, client.DryRunAll)
		},
		"patch a GPUNode": func(ctx context.Context) error { return c.Patch(ctx, node.DeepCopy(), patch, client.DryRunAll) },
		"write the status of a GPUNode": func(ctx context.Context) error {
			return c.Status().Patch(ctx, node.DeepCopy(), status, client.DryRunAll)
		},
		"delete a GPUNode": func(ctx context.Context) error { return c.Delete(ctx, node.DeepCopy(), client.DryRunAll) },
	}
}

// aggregate does as Kubernetes' controller of aggregated roles, which no test has: it adds the rules of the
// ClusterRoles that the API server's own roles select, in the order in which these select each other.
// https://github.com/kubernetes/kubernetes/blob/v1.37.1/pkg/controller/clusterroleaggregation/clusterroleaggregation_controller.go
func aggregate(t *testing.T, c client.Client) {
	t.Helper()
	g := NewWithT(t)
	for _, name := range []string{"view", "edit", "admin"} {
		role := &rbacv1.ClusterRole{}
		g.Eventually(func() error { return c.Get(t.Context(), client.ObjectKey{Name: name}, role) }, 20*time.Second).
			Should(Succeed(), "the API server makes its roles a moment after it has started")
		g.Expect(role.AggregationRule).NotTo(BeNil())
		for _, labels := range role.AggregationRule.ClusterRoleSelectors {
			selector, err := metav1.LabelSelectorAsSelector(&labels)
			g.Expect(err).NotTo(HaveOccurred())
			var selected rbacv1.ClusterRoleList
			g.Expect(c.List(t.Context(), &selected, client.MatchingLabelsSelector{Selector: selector})).To(Succeed())
			for _, other := range selected.Items {
				if other.Name != name {
					role.Rules = append(role.Rules, other.Rules...)
				}
			}
		}
		g.Expect(c.Update(t.Context(), role)).To(Succeed())
	}
}

func roleRef(role string) rbacv1.RoleRef {
	return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role}
}

func user(name string) []rbacv1.Subject {
	return []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}}
}
