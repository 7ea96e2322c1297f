// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// noController is why no controller acts: empty if one does, or if who asks may not know. One Deployment with the controller's label that is active
// suffices, because a tenant may create a Deployment with that label in a namespace of his own, and must stop nothing by it. The lease of a
// controller is in the namespace of its Deployment, and one of its pods holds it, so that a tenant's lease is no controller, nor is his Deployment
// without pods. A tenant who runs a pod of such a Deployment that holds such a lease, or that needs none, passes for a controller. While none
// runs, status then lacks its warning and `restore` deletes the policies. The nodes stay as they are, the GPUNodes keep the records of how they
// were, and `restore` reports what is left when its timeout is over.
func noController(ctx context.Context, c client.Client, now time.Time) (string, error) {
	leases, deployments := &coordinationv1.LeaseList{}, &appsv1.DeploymentList{}
	named := client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", controllerName)}
	err := c.List(ctx, leases, named)
	switch {
	case apierrors.IsForbidden(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("reading the lease of the controller: %w", err)
	}
	err = c.List(ctx, deployments, client.MatchingLabels{nameLabel: controllerName})
	switch {
	case apierrors.IsForbidden(err):
		return noLease(leases.Items, now), nil
	case err != nil:
		return "", fmt.Errorf("reading the Deployment of the controller: %w", err)
	}
	if len(deployments.Items) == 0 {
		return cmp.Or(noLease(leases.Items, now), unavailable), nil
	}
	var inactiveOnes []string
	for i := range deployments.Items {
		d := &deployments.Items[i]
		isPod, err := podsOf(ctx, c, d)
		if err != nil {
			return "", err
		}
		why := inactive(d, leases.Items, isPod, now)
		if why == "" {
			return "", nil
		}
		inactiveOnes = append(inactiveOnes, why)
	}
	return strings.Join(inactiveOnes, ", and "), nil
}

// unavailable is why no controller acts where no Deployment runs one.
const unavailable = "no Deployment with the label " + nameLabel + "=" + controllerName + " is available"

// podsOf returns what reports whether a Deployment has a pod of a name: for each name if who asks may not know.
func podsOf(ctx context.Context, c client.Client, d *appsv1.Deployment) (func(string) bool, error) {
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return nil, fmt.Errorf("reading the selector of deployment %s/%s: %w", d.Namespace, d.Name, err)
	}
	pods := &corev1.PodList{}
	err = c.List(ctx, pods, client.InNamespace(d.Namespace), client.MatchingLabelsSelector{Selector: selector})
	switch {
	case apierrors.IsForbidden(err):
		return func(string) bool { return true }, nil
	case err != nil:
		return nil, fmt.Errorf("reading the pods of deployment %s/%s: %w", d.Namespace, d.Name, err)
	}
	return func(name string) bool {
		return slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Name == name })
	}, nil
}

// inactive is why the controller of a Deployment, whose pods isPod knows, does not act; empty if it does. It has no lease where it runs with
// --leader-elect=false.
func inactive(d *appsv1.Deployment, leases []coordinationv1.Lease, isPod func(string) bool, now time.Time) string {
	own := slices.IndexFunc(leases, func(l coordinationv1.Lease) bool { return l.Namespace == d.Namespace })
	if own < 0 {
		if d.Status.AvailableReplicas == 0 {
			return fmt.Sprintf("no pod of deployment %s/%s is available", d.Namespace, d.Name)
		}
		return ""
	}
	lease := &leases[own]
	if why := stale(lease, now); why != "" {
		return why
	}
	// The identity is the host name of the pod, which is its own name, and a UID:
	// https://github.com/kubernetes-sigs/controller-runtime/blob/v0.25.2/pkg/leaderelection/leader_election.go
	if pod, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_"); !isPod(pod) {
		return fmt.Sprintf("lease %s/%s is held by %s, which is no pod of deployment %s/%s",
			lease.Namespace, lease.Name, *lease.Spec.HolderIdentity, d.Namespace, d.Name)
	}
	return ""
}

// noLease is why nobody holds any of some leases; empty if one is held, or there is none.
func noLease(leases []coordinationv1.Lease, now time.Time) (why string) {
	for i := range leases {
		if why = stale(&leases[i], now); why == "" {
			return ""
		}
	}
	return why
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
