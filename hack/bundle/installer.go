// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	sigsyaml "sigs.k8s.io/yaml"
)

const installerFile = "installer.yaml"

const aboutInstaller = generated + `# The account with which OLM v1 before v1.11 installs the operator: kubectl apply -f installer.yaml. It has what OLM makes of the bundle, and
# no more; from v1.11 on OLM needs none. Kubernetes lets nobody grant what he does not hold, so it holds all that it grants to the accounts of
# the operator and in the roles for users. Names of ClusterRoles and their bindings end with a hash of their rules, so it may write all of
# them, but only with rules that it holds; it may delete all. make olm-test installs and upgrades with it.
`

// installer is the account with which OLM v1 installs the bundle, with its rights.
func (s *sources) installer() ([]byte, error) {
	granted, err := s.grantedClusterWide()
	if err != nil {
		return nil, err
	}
	role := &rbacv1.ClusterRole{TypeMeta: typeMeta("ClusterRole"), Rules: append(s.madeClusterWide(), granted...)}
	roles := &rbacv1.Role{TypeMeta: typeMeta("Role"), Rules: append(s.madeInNamespace(), s.grantedInNamespace()...)}
	account := &corev1.ServiceAccount{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceAccount"}}
	subjects := []rbacv1.Subject{{Kind: "ServiceAccount", Name: installerName, Namespace: s.base.Name}}
	reference := func(kind string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: installerName}
	}
	content := bytes.NewBufferString(aboutInstaller)
	for i, o := range []metav1.Object{
		account, role, &rbacv1.ClusterRoleBinding{TypeMeta: typeMeta("ClusterRoleBinding"), RoleRef: reference("ClusterRole"), Subjects: subjects},
		roles, &rbacv1.RoleBinding{TypeMeta: typeMeta("RoleBinding"), RoleRef: reference("Role"), Subjects: subjects},
	} {
		o.SetName(installerName)
		if i != 1 && i != 2 {
			o.SetNamespace(s.base.Name)
		}
		document, err := marshal(o)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			content.WriteString("---\n")
		}
		content.Write(document)
	}
	return content.Bytes(), nil
}

const installerName = "gpu-sharing-installer"

func typeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: kind}
}

// madeClusterWide are the rights to make what has no namespace, and to watch all that is made. Where
// OwnerReferencesPermissionEnforcement is on, as on OpenShift, who names an owner must be allowed to change its
// finalizers, and to delete what was there without it.
func (s *sources) madeClusterWide() []rbacv1.PolicyRule {
	var crds []string
	for _, crd := range s.crds {
		crds = append(crds, crd.Name)
	}
	const extensions, olm = "apiextensions.k8s.io", "olm.operatorframework.io"
	return []rbacv1.PolicyRule{
		rule(extensions, "customresourcedefinitions", nil, "create", "list", "watch"),
		rule(extensions, "customresourcedefinitions", crds, "get", "patch", "delete"), // the last for those that OLM v0 left
		rule(rbacv1.GroupName, "clusterroles,clusterrolebindings", nil, "create", "get", "list", "watch", "patch", "delete"),
		rule(rbacv1.GroupName, "roles,rolebindings", nil, "list", "watch"),
		rule("", "serviceaccounts,configmaps", nil, "list", "watch"),
		rule("apps", "deployments", nil, "list", "watch"),
		rule(olm, "clusterextensions/finalizers", []string{s.base.Name}, "update"),
	}
}

// madeInNamespace are the rights to make what is in the operator's namespace.
func (s *sources) madeInNamespace() []rbacv1.PolicyRule {
	var accounts, deployments, roles, bindings []string
	for _, p := range s.rbac.permissions() {
		accounts = append(accounts, p.ServiceAccountName)
	}
	for _, d := range s.deployments {
		deployments = append(deployments, d.Name)
	}
	for _, r := range s.rbac.roles {
		if r.Kind == "Role" {
			roles = append(roles, r.Name)
		}
	}
	for _, b := range s.rbac.bindings {
		if b.Kind == "RoleBinding" {
			bindings = append(bindings, b.Name)
		}
	}
	var rules []rbacv1.PolicyRule
	for _, made := range []struct {
		group, resource string
		names           []string
	}{
		{"", "serviceaccounts", accounts}, {"", "configmaps", []string{operandsName}}, {"apps", "deployments", deployments},
		{rbacv1.GroupName, "roles", roles}, {rbacv1.GroupName, "rolebindings", bindings},
	} {
		rules = append(rules, rule(made.group, made.resource, nil, "create"), rule(made.group, made.resource, made.names, "get", "patch"))
	}
	return rules
}

// grantedClusterWide is all that the bundle grants to accounts, and in roles that administrators bind.
func (s *sources) grantedClusterWide() ([]rbacv1.PolicyRule, error) {
	var rules []rbacv1.PolicyRule
	for _, p := range s.rbac.permissions() {
		rules = append(rules, p.Rules...)
	}
	for _, file := range []string{"config/rbac/users.yaml", "config/autoscaling/rbac.yaml"} {
		err := s.each(file, func(document []byte, kind string) error {
			var role rbacv1.ClusterRole
			if kind != "ClusterRole" {
				return nil
			}
			err := sigsyaml.UnmarshalStrict(document, &role)
			rules = append(rules, role.Rules...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return merged(rules), nil
}

// grantedInNamespace is all that the Roles of the bundle grant.
func (s *sources) grantedInNamespace() []rbacv1.PolicyRule {
	var rules []rbacv1.PolicyRule
	for _, r := range s.rbac.roles {
		if r.Kind == "Role" {
			rules = append(rules, r.Rules...)
		}
	}
	return merged(rules)
}

// merged are rules with the verbs of those for the same objects in one.
func merged(rules []rbacv1.PolicyRule) []rbacv1.PolicyRule {
	verbs, first := map[string][]string{}, map[string]rbacv1.PolicyRule{}
	for _, r := range rules {
		key := strings.Join([]string{
			strings.Join(r.APIGroups, ","), strings.Join(r.Resources, ","), strings.Join(r.ResourceNames, ","), strings.Join(r.NonResourceURLs, ","),
		}, " ")
		verbs[key], first[key] = append(verbs[key], r.Verbs...), r
	}
	var all []rbacv1.PolicyRule
	for _, key := range slices.Sorted(maps.Keys(first)) {
		r := first[key]
		slices.Sort(verbs[key])
		r.Verbs = slices.Compact(verbs[key])
		all = append(all, r)
	}
	return all
}

func rule(group, resources string, names []string, verbs ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: strings.Split(resources, ","), ResourceNames: names, Verbs: verbs}
}
