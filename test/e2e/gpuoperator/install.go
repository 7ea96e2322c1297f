// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// entrypoint is the script that starts one of NVIDIA's programs once the driver is there.
func entrypoint(start string) string {
	return `#!/bin/sh
until [ -f /run/nvidia/validations/driver-ready ]; do
  echo "waiting for the driver"
  sleep 1
done
set -o allexport
. /run/nvidia/validations/driver-ready
` + start + "\n"
}

// installed are the objects that are there before any ClusterPolicy.
func installed() []client.Object {
	objects := []client.Object{
		&corev1.Namespace{TypeMeta: kind("v1", "Namespace"), ObjectMeta: metav1.ObjectMeta{Name: Namespace}},
		&corev1.ConfigMap{
			TypeMeta: kind("v1", "ConfigMap"), ObjectMeta: named(entrypointName),
			Data: map[string]string{"entrypoint.sh": entrypoint("exec nvidia-device-plugin")},
		},
	}
	for _, account := range []string{pluginAccount, featureAccount, validatorName} {
		objects = append(objects, readsNodes(account)...)
	}
	objects = append(objects, may(featureAccount,
		rbacv1.PolicyRule{APIGroups: []string{"nfd.k8s-sigs.io"}, Resources: []string{"nodefeatures"}, Verbs: []string{"get", "list", "watch", "create", "update"}},
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}},
		rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"daemonsets"}, Verbs: []string{"get"}},
	)...)
	objects = append(objects, may(validatorName,
		rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch", "create", "update", "patch", "delete"}},
		rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"daemonsets"}, Verbs: []string{"get", "list", "watch"}},
	)...)
	objects = append(objects, forManager()...)
	for _, account := range []string{dcgmName, exporterName, statusName} {
		objects = append(objects, &corev1.ServiceAccount{TypeMeta: kind("v1", "ServiceAccount"), ObjectMeta: named(account)})
	}
	return objects
}

// keepRuntimeClass keeps the runtime class of NVIDIA's pods. In NRI mode there is none.
func (o *Operator) keepRuntimeClass(ctx context.Context, p *clusterPolicy) error {
	class := &nodev1.RuntimeClass{
		TypeMeta: kind("node.k8s.io/v1", "RuntimeClass"), ObjectMeta: metav1.ObjectMeta{Name: RuntimeClass}, Handler: RuntimeClass,
	}
	err := o.client.Get(ctx, client.ObjectKeyFromObject(class), &nodev1.RuntimeClass{})
	switch {
	case p.CDI.NRI && err == nil:
		return client.IgnoreNotFound(o.client.Delete(ctx, class))
	case !p.CDI.NRI && apierrors.IsNotFound(err):
		return o.apply(ctx, class)
	}
	return client.IgnoreNotFound(err)
}

// may lets an account do something in NVIDIA's namespace.
func may(account string, rules ...rbacv1.PolicyRule) []client.Object {
	return []client.Object{
		&rbacv1.Role{TypeMeta: kind(rbacAPI, "Role"), ObjectMeta: named(account), Rules: rules},
		&rbacv1.RoleBinding{
			TypeMeta: kind(rbacAPI, "RoleBinding"), ObjectMeta: named(account),
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: account},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: Namespace, Name: account}},
		},
	}
}

const rbacAPI = "rbac.authorization.k8s.io/v1"

// readsNodes is a service account that reads nodes, as config-manager does.
func readsNodes(account string) []client.Object {
	return []client.Object{
		&corev1.ServiceAccount{TypeMeta: kind("v1", "ServiceAccount"), ObjectMeta: named(account)},
		&rbacv1.ClusterRole{
			TypeMeta: kind(rbacAPI, "ClusterRole"), ObjectMeta: metav1.ObjectMeta{Name: account},
			Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}}},
		},
		&rbacv1.ClusterRoleBinding{
			TypeMeta: kind(rbacAPI, "ClusterRoleBinding"), ObjectMeta: metav1.ObjectMeta{Name: account},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: account},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: Namespace, Name: account}},
		},
	}
}

func kind(apiVersion, kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: apiVersion, Kind: kind}
}

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: Namespace, Name: name} }
