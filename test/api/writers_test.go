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
