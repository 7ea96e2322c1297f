// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// controllerName is the name of the controller's lease, and the value of nameLabel of its Deployment.
	controllerName = "gpu-sharing-controller"
	nameLabel      = "app.kubernetes.io/name"
	// clocksDiffer is by how much the clocks of this machine and of the controller's may differ.
	clocksDiffer = time.Minute
)

// leadership is whether a controller acts. Both are empty if that is not known, because the user may not read what would tell.
type leadership struct {
	proof  string // by which it is known that one does
	absent string // a sentence that says why none does, without its full stop
}

// leadershipOf reads whether a controller acts: one that renews its lease does, wherever it runs. A lease counts only in the namespace of the
// controller, or in those that namespacesOf names if that is empty: tenants can create leases and Deployments in their own namespaces.
// Without a lease there, as with --leader-elect=false, a Deployment of which a pod is available tells.
func leadershipOf(ctx context.Context, c client.Client, namespace string, now time.Time) (leadership, error) {
	namespaces := []string{namespace}
	if namespace == "" {
		var err error
		if namespaces, err = namespacesOf(ctx, c); err != nil {
			return leadership{}, unlessForbidden(err)
		}
	}
	leases := &coordinationv1.LeaseList{}
	named := client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", controllerName)}
	if err := c.List(ctx, leases, named); err != nil {
		return leadership{}, unlessForbidden(fmt.Errorf("reading the lease of the controller: %w", err))
	}
	var absent []string
	for _, own := range namespaces {
		at := slices.IndexFunc(leases.Items, func(l coordinationv1.Lease) bool { return l.Namespace == own })
		if at >= 0 {
			why := stale(&leases.Items[at], now)
			if why == "" {
				return leadership{proof: fmt.Sprintf("lease %s/%s is renewed", own, controllerName)}, nil
			}
			absent = append(absent, why)
			continue
		}
		deployment, err := availableIn(ctx, c, own)
		if err != nil {
			return leadership{}, unlessForbidden(err)
		}
		if deployment != "" {
			return leadership{proof: fmt.Sprintf("deployment %s/%s is available", own, deployment)}, nil
		}
		absent = append(absent, fmt.Sprintf("namespace %s has neither lease %s nor an available Deployment with the label %s=%s",
			own, controllerName, nameLabel, controllerName))
	}
	if len(absent) == 0 {
		return leadership{absent: notInstalled}, nil
	}
	return leadership{absent: "No controller runs: " + strings.Join(absent, ", and ")}, nil
}

// notInstalled is why no controller acts where namespacesOf names none.
const notInstalled = "No controller is installed: no ClusterRoleBinding names service account " + controllerName +
	". If one runs outside of the cluster, add --namespace with the namespace of its lease"

func unlessForbidden(err error) error {
	if apierrors.IsForbidden(err) {
		return nil
	}
	return err
}

// namespacesOf are those of the controller's service account by the ClusterRoleBindings, which no tenant can create. Their own names are
// generated where OLM installs the operator.
func namespacesOf(ctx context.Context, c client.Client) ([]string, error) {
	bindings := &rbacv1.ClusterRoleBindingList{}
	if err := c.List(ctx, bindings); err != nil {
		return nil, fmt.Errorf("reading the ClusterRoleBinding of the controller: %w", err)
	}
	var namespaces []string
	for i := range bindings.Items {
		for _, s := range bindings.Items[i].Subjects {
			if s.Kind == rbacv1.ServiceAccountKind && s.Name == controllerName {
				namespaces = append(namespaces, s.Namespace)
			}
		}
	}
	slices.Sort(namespaces)
	return slices.Compact(namespaces), nil
}

// availableIn names a Deployment of the controller in a namespace of which a pod is available; empty: there is none.
func availableIn(ctx context.Context, c client.Client, namespace string) (string, error) {
	deployments := &appsv1.DeploymentList{}
	if err := c.List(ctx, deployments, client.InNamespace(namespace), client.MatchingLabels{nameLabel: controllerName}); err != nil {
		return "", fmt.Errorf("reading the Deployment of the controller: %w", err)
	}
	for i := range deployments.Items {
		if deployments.Items[i].Status.AvailableReplicas > 0 {
			return deployments.Items[i].Name, nil
		}
	}
	return "", nil
}

// stale is why no process holds a lease; empty if one does.
func stale(lease *coordinationv1.Lease, now time.Time) string {
	help := fmt.Sprintf("look at deployment %s/%s and the log of its pods", lease.Namespace, controllerName)
	spec := lease.Spec
	if spec.HolderIdentity == nil || *spec.HolderIdentity == "" || spec.RenewTime == nil || spec.LeaseDurationSeconds == nil {
		return fmt.Sprintf("nobody holds lease %s/%s; %s", lease.Namespace, lease.Name, help)
	}
	if age := now.Sub(spec.RenewTime.Time); age > time.Duration(*spec.LeaseDurationSeconds)*time.Second+clocksDiffer {
		return fmt.Sprintf("lease %s/%s was last renewed at %s, by %s; %s",
			lease.Namespace, lease.Name, spec.RenewTime.UTC().Format(time.RFC3339), *spec.HolderIdentity, help)
	}
	return ""
}
