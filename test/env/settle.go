// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// settle waits until the API server acts as if the tests had never been.
func (e *emptied) settle(ctx context.Context) error {
	if err := untilDone(ctx, e.cachesSettled); err != nil {
		return err
	}
	if e.changed("apiextensions.k8s.io/") {
		if err := e.served(ctx); err != nil {
			return err
		}
	}
	return errors.Join(untilDone(ctx, e.namespacesSettled), e.rightsSettled(ctx), e.policiesSettled(ctx))
}

// cachesSettled waits until the watch caches, with which informers begin, have heard of all changes in etcd.
func (e *emptied) cachesSettled(ctx context.Context) (bool, error) {
	d, err := discovery.NewDiscoveryClientForConfig(e.Config)
	if err != nil {
		return false, err
	}
	quiet := rest.CopyConfig(e.Config)
	quiet.WarningHandlerWithContext = rest.NoWarnings{} // that a kind is deprecated
	objects, err := metadata.NewForConfig(quiet)
	if err != nil {
		return false, err
	}
	lists, err := d.ServerPreferredResources()
	if err != nil {
		return false, err
	}
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return false, err
		}
		for _, r := range list.APIResources {
			revision := cmp.Or(e.revision(r.Name+"/"), e.revision(gv.Group+"/"+r.Name+"/"), e.revision(special[r.Name]))
			if revision == "" || !slices.Contains(r.Verbs, "list") {
				continue
			}
			_, err := objects.Resource(gv.WithResource(r.Name)).List(ctx, metav1.ListOptions{
				ResourceVersion: revision, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, Limit: 1,
			})
			if err != nil && !apierrors.IsNotFound(err) { // its CRD has just gone
				return false, fmt.Errorf("listing %s: %w", r.Name, err)
			}
		}
	}
	return true, nil
}

// special are resources whose keys in etcd have another name.
var special = map[string]string{"nodes": "minions/", "services": "services/specs/", "endpoints": "services/endpoints/", "ingresses": "ingress/"}

// namespacesSettled waits until a namespace of the same name would be a new one.
func (e *emptied) namespacesSettled(ctx context.Context) (bool, error) {
	for key := range e.revisions {
		name, is := strings.CutPrefix(key, registry+"namespaces/")
		if _, own := e.own[key]; !is || own {
			continue
		}
		probe := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "probe"}}
		if err := e.Client.Create(ctx, probe, client.DryRunAll); !apierrors.IsNotFound(err) {
			return false, err
		}
	}
	return true, nil
}

// rightsSettled waits until the API server grants nothing by bindings that are gone: it hears of their end before it
// hears of a newer one's beginning.
func (e *emptied) rightsSettled(ctx context.Context) error {
	if !e.changed("rolebindings/", "clusterrolebindings/") {
		return nil
	}
	name := e.probe()
	admin := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"}
	user := func(kind string) []rbacv1.Subject {
		return []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name + kind}}
	}
	in := metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name}
	for kind, binding := range map[string]client.Object{
		"cluster":   &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: admin, Subjects: user("cluster")},
		"namespace": &rbacv1.RoleBinding{ObjectMeta: in, RoleRef: admin, Subjects: user("namespace")},
	} {
		if err := e.Client.Create(ctx, binding); err != nil {
			return err
		}
		review := authorizationv1.SubjectAccessReviewSpec{User: name + kind, ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: metav1.NamespaceDefault, Verb: "get", Resource: "pods",
		}}
		err := untilDone(ctx, func(ctx context.Context) (bool, error) {
			r := &authorizationv1.SubjectAccessReview{Spec: review}
			err := e.Client.Create(ctx, r)
			return r.Status.Allowed, err
		})
		if err != nil {
			return err
		}
		if err := e.Client.Delete(ctx, binding); err != nil {
			return err
		}
	}
	return nil
}

// policiesSettled waits until the API server applies no admission policy that is gone. It takes up all changes of
// policies together, about once a second. Until then it counts denials for the tests that have been.
func (e *emptied) policiesSettled(ctx context.Context) error {
	if !e.changed("validatingadmissionpolicies/", "validatingadmissionpolicybindings/") {
		return nil
	}
	var err error
	if e.server.denied, err = denials(ctx, e.Config); err != nil {
		return err
	}
	name := e.probe()
	policy := &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			FailurePolicy: new(admissionv1.Fail),
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
				RuleWithOperations: admissionv1.RuleWithOperations{
					Operations: []admissionv1.OperationType{admissionv1.Create},
					Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
				},
			}}},
			Validations: []admissionv1.Validation{{Expression: fmt.Sprintf("object.metadata.name != %q", name)}},
		},
	}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		},
	}
	for _, o := range []client.Object{policy, binding} {
		if err := e.Client.Create(ctx, o); err != nil {
			return err
		}
	}
	err = untilDone(ctx, func(ctx context.Context) (bool, error) {
		denied := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name}}
		err := e.Client.Create(ctx, denied, client.DryRunAll)
		if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) {
			return true, nil
		}
		return false, err
	})
	if err != nil {
		return err
	}
	for _, o := range []client.Object{binding, policy} {
		if err := e.Client.Delete(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// probe is a name that no object had before.
func (e *emptied) probe() string {
	e.probes++
	return fmt.Sprintf("test-env-probe-%d", e.probes)
}
