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
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

const (
	// controllerName is the name of the controller's lease, and the value of nameLabel of its Deployment.
	controllerName = "gpu-sharing-controller"
	nameLabel      = cluster.LabelName
	// clocksDiffer is by how much the clocks of this machine and of the controller's may differ.
	clocksDiffer = time.Minute
)

// leadership is whether a controller acts. proof and absent are both empty if that is not known, because the user may
// not read what would tell.
type leadership struct {
	proof  string // by which it is known that one does
	absent string // a sentence that says why none does, without its full stop
	// namespaces are those of ownNamespaces.
	namespaces []string
}

// leadershipOf reads whether a controller acts: one that renews its lease does, wherever it runs. A lease counts only
// in ownNamespaces. Without one there, as with --leader-elect=false, a Deployment of which a pod is available tells.
func leadershipOf(ctx context.Context, c client.Client, namespace string, now time.Time) (leadership, error) {
	namespaces, err := ownNamespaces(ctx, c, namespace)
	if err != nil || namespaces == nil {
		return leadership{}, err
	}
	l := leadership{namespaces: namespaces}
	l.proof, l.absent, err = actsIn(ctx, c, namespaces, now)
	return l, unlessForbidden(err)
}

// ownNamespaces are those in which the controller and its agents run: the one that the user names, or those of
// namespacesOf. Tenants can create leases, Deployments and pods in their own namespaces. nil: not known, because the
// user may not read what would tell.
func ownNamespaces(ctx context.Context, c client.Client, named string) ([]string, error) {
	if named != "" {
		return []string{named}, nil
	}
	namespaces, err := namespacesOf(ctx, c)
	return namespaces, unlessForbidden(err)
}

// actsIn is the proof that a controller of some namespaces acts, or why none does.
func actsIn(
	ctx context.Context, c client.Client, namespaces []string, now time.Time,
) (proof, absent string, err error) {
	leases := &coordinationv1.LeaseList{}
	named := client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", controllerName)}
	if err := c.List(ctx, leases, named); err != nil {
		return "", "", fmt.Errorf("reading the lease of the controller: %w", err)
	}
	var why []string
	for _, own := range namespaces {
		old := ""
		if at := slices.IndexFunc(leases.Items, func(l coordinationv1.Lease) bool { return l.Namespace == own }); at >= 0 {
			if old = stale(&leases.Items[at], now); old == "" {
				return fmt.Sprintf("lease %s/%s is renewed", own, controllerName), "", nil
			}
		}
		deployment, err := availableIn(ctx, c, own, old != "")
		if err != nil && (old == "" || !apierrors.IsForbidden(err)) { // without the right to know better, an old lease tells
			return "", "", err
		}
		switch {
		case deployment != "":
			return fmt.Sprintf("deployment %s/%s is available", own, deployment), "", nil
		case old != "":
			why = append(why, old)
		default:
			why = append(why, fmt.Sprintf("namespace %s has neither lease %s nor an available Deployment with the label %s=%s",
				own, controllerName, nameLabel, controllerName))
		}
	}
	if len(why) == 0 {
		return "", notInstalled, nil
	}
	return "", "No controller runs: " + strings.Join(why, ", and "), nil
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

// namespacesOf are those of the controller's service account by the ClusterRoleBindings, which no tenant can create.
// Their own names are generated where OLM installs the operator.
func namespacesOf(ctx context.Context, c client.Client) ([]string, error) {
	bindings := &rbacv1.ClusterRoleBindingList{}
	if err := c.List(ctx, bindings); err != nil {
		return nil, fmt.Errorf("reading the ClusterRoleBinding of the controller: %w", err)
	}
	namespaces := []string{}
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
// Beside an old lease, which stays after leader election was turned off, only one without leader election counts.
func availableIn(ctx context.Context, c client.Client, namespace string, besideLease bool) (string, error) {
	deployments, err := deploymentsIn(ctx, c, []string{namespace})
	if err != nil {
		return "", err
	}
	for i := range deployments {
		if d := &deployments[i]; d.Status.AvailableReplicas > 0 && (!besideLease || electsNobody(d)) {
			return d.Name, nil
		}
	}
	return "", nil
}

// deploymentsIn are the Deployments with the controller's label in some namespaces; nil: in all.
func deploymentsIn(ctx context.Context, c client.Client, namespaces []string) (found []appsv1.Deployment, err error) {
	if namespaces == nil {
		namespaces = []string{metav1.NamespaceAll}
	}
	for _, namespace := range namespaces {
		list := &appsv1.DeploymentList{}
		err := c.List(ctx, list, client.InNamespace(namespace), client.MatchingLabels{nameLabel: controllerName})
		if err != nil {
			return nil, fmt.Errorf("reading the Deployment of the controller: %w", err)
		}
		found = append(found, list.Items...)
	}
	return found, nil
}

// electsNobody reports whether the controller of a Deployment acts without a lease, by its flags.
func electsNobody(deployment *appsv1.Deployment) bool {
	return slices.ContainsFunc(deployment.Spec.Template.Spec.Containers, func(c corev1.Container) bool {
		return slices.Contains(c.Args, "--leader-elect=false")
	})
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
