// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"cmp"
	"context"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestWhoWritesGPUNodes: the controller and the agent of the node, whatever roles others have. Cluster administrators
// and Kubernetes' own accounts delete, label and annotate them.
func TestWhoWritesGPUNodes(t *testing.T) {
	cluster := env.Start(t)
	g := NewWithT(t)
	g.Expect(cluster.Apply(t.Context(), "config/default/namespace.yaml", "config/rbac/role.yaml", "config/rbac/users.yaml", "config/manager/rbac.yaml",
		"config/agent/rbac.yaml")).To(Succeed())
	migration := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "migration"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"list", "patch"}},
	}}
	for _, role := range append(rolesOfOLM(), migration) {
		g.Expect(cluster.Client.Create(t.Context(), role)).To(Succeed())
	}
	aggregate(t, cluster.Client)
	const onNode, own, tenant = "a program on the node", "gpu-sharing-operator", "tenant"
	g.Expect(cluster.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}})).To(Succeed())
	for role, subjects := range map[string][]rbacv1.Subject{
		"edit": user("edit"), "admin": user("admin"), "cluster-admin": user("an administrator"),
		"gpunodes.gpusharing.io-v1alpha1-admin": append(user("all rights on GPUNodes"), account(tenant, "gpu-sharing-controller")),
		"migration":                             {account("kube-system", "storage-version-migrator-controller")},
		"gpu-sharing-agent":                     {account(own, "another")},
	} {
		g.Expect(cluster.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "test-" + role}, RoleRef: roleRef(role), Subjects: subjects,
		})).To(Succeed())
	}
	g.Expect(cluster.Client.Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{
		Name: "a", Finalizers: []string{"example.com/a"}, Labels: map[string]string{"a": "a"},
	}})).To(Succeed())

	impersonate := func(name string, groups ...string) client.Client {
		config := rest.CopyConfig(cluster.Config)
		config.Impersonate = rest.ImpersonationConfig{UserName: name, Groups: groups}
		c, err := client.New(config, client.Options{Scheme: cluster.Scheme})
		g.Expect(err).NotTo(HaveOccurred())
		return c
	}
	as := func(id env.Identity) client.Client {
		id.Namespace = cmp.Or(id.Namespace, own)
		c, err := cluster.ClientAs(t.Context(), id)
		g.Expect(err).NotTo(HaveOccurred())
		return c
	}
	collector := impersonate("system:serviceaccount:kube-system:generic-garbage-collector")
	migrator := impersonate("system:serviceaccount:kube-system:storage-version-migrator-controller")
	object := []string{"create", "change the spec", "label", "remove a finalizer", "delete"}
	status := []string{"report", "observe"}
	all, upkeep := slices.Concat(object, status), []string{"label", "remove a finalizer", "delete"}
	tests := map[string]struct {
		client client.Client
		rights []string // by RBAC alone
		may    []string
	}{
		"edit":                   {impersonate("edit"), object, nil},
		"admin":                  {impersonate("admin"), object, nil},
		"all rights on GPUNodes": {impersonate("all rights on GPUNodes"), object, nil},
		"an administrator":       {impersonate("an administrator"), all, upkeep},
		"system:masters":         {cluster.Client, all, upkeep},
		"system:apiserver":       {impersonate("system:apiserver", "system:masters"), all, upkeep},
		"garbage collection":     {collector, all[1:], upkeep},
		"migration of storage":   {migrator, slices.Concat(all[1:4], status), upkeep[:2]},
		"the controller":         {as(env.Identity{ServiceAccount: "gpu-sharing-controller"}), all, append(object, "report")},
		"an account of a tenant": {as(env.Identity{Namespace: tenant, ServiceAccount: "gpu-sharing-controller"}), object, nil},
		"the agent":              {as(env.Identity{ServiceAccount: "gpu-sharing-agent", Pod: "agent", Node: "a"}), status, status[1:]},
		onNode:                   {as(env.Identity{ServiceAccount: "another", Pod: "another", Node: "a"}), status, nil},
	}
	allowed := func(ctx context.Context, g Gomega, c client.Client) (names []string) {
		for name, try := range writesOfGPUNodes() {
			if err := try(ctx, c); !apierrors.IsForbidden(err) {
				g.Expect(err).NotTo(HaveOccurred(), name)
				names = append(names, name)
			}
		}
		return names
	}
	for name, tc := range tests {
		g.Eventually(func(g Gomega) { g.Expect(allowed(t.Context(), g, tc.client)).To(ConsistOf(tc.rights)) }, 20*time.Second).
			Should(Succeed(), "rights of "+name)
	}
	g.Expect(cluster.Apply(t.Context(), "config/agent/admission.yaml")).To(Succeed())
	g.Eventually(func() error { return writesOfGPUNodes()["label"](t.Context(), impersonate("edit")) }, 20*time.Second).
		Should(MatchError(And(ContainSubstring("Only the controller writes GPUNode a"), ContainSubstring("This request is from edit"))))
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			g.Expect(allowed(t.Context(), g, tc.client)).To(ConsistOf(tc.may))
		})
	}
}

func account(namespace, name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}
}

// writesOfGPUNodes change nothing. Of the status the controller reports, and the agent observes.
func writesOfGPUNodes() map[string]func(context.Context, client.Client) error {
	node := func(name string) *v1alpha1.GPUNode {
		return &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	merge := func(body string) client.Patch { return client.RawPatch(types.MergePatchType, []byte(body)) }
	patch := func(body string) func(context.Context, client.Client) error {
		return func(ctx context.Context, c client.Client) error {
			return c.Patch(ctx, node("a"), merge(body), client.DryRunAll)
		}
	}
	status := func(body string) func(context.Context, client.Client) error {
		return func(ctx context.Context, c client.Client) error {
			return c.Status().Patch(ctx, node("a"), merge(body), client.DryRunAll)
		}
	}
	return map[string]func(context.Context, client.Client) error{
		"create": func(ctx context.Context, c client.Client) error {
			return c.Create(ctx, node("b"), client.DryRunAll)
		},
		"change the spec":    patch(`{"spec": {"policyName": "mine"}}`),
		"label":              patch(`{"metadata": {"labels": {"a": "b"}}}`),
		"remove a finalizer": patch(`{"metadata": {"finalizers": null}}`),
		"delete": func(ctx context.Context, c client.Client) error {
			return c.Delete(ctx, node("a"), client.DryRunAll)
		},
		"report":  status(`{"status": {"observedGeneration": 1}}`),
		"observe": status(`{"status": {"driverVersion": "1"}}`),
	}
}

// rolesOfOLM are those that OLM makes of the CRD of GPUNodes.
// https://github.com/operator-framework/operator-lifecycle-manager/blob/v0.45.0/pkg/controller/operators/olm/operatorgroup.go
func rolesOfOLM() []*rbacv1.ClusterRole {
	var roles []*rbacv1.ClusterRole
	for suffix, verbs := range map[string][]string{
		"view": {"get", "list", "watch"}, "edit": {"create", "update", "patch", "delete"}, "admin": {"*"},
	} {
		roles = append(roles, &rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{
				Name: "gpunodes.gpusharing.io-v1alpha1-" + suffix, Labels: map[string]string{"rbac.authorization.k8s.io/aggregate-to-" + suffix: "true"},
			},
			Rules: []rbacv1.PolicyRule{{APIGroups: []string{"gpusharing.io"}, Resources: []string{"gpunodes"}, Verbs: verbs}},
		})
	}
	return roles
}

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
