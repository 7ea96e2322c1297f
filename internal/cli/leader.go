// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
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

// noController is why no controller acts: empty if one does, or if who asks may not know. The lease of a controller is in the namespace of its
// Deployment. Who may write in another namespace may create a lease of that name there, and a Deployment, so that each one must be alive.
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
	for i := range deployments.Items {
		if why := inactive(&deployments.Items[i], leases.Items, now); why != "" {
			return why, nil
		}
	}
	if len(deployments.Items) == 0 {
		return cmp.Or(noLease(leases.Items, now), unavailable), nil
	}
	return "", nil
}

// unavailable is why no controller acts where no Deployment runs one.
const unavailable = "no Deployment with the label " + nameLabel + "=" + controllerName + " is available"

// inactive is why the controller of a Deployment does not act; empty if it does. It has no lease where it runs with --leader-elect=false.
func inactive(d *appsv1.Deployment, leases []coordinationv1.Lease, now time.Time) string {
	own := slices.IndexFunc(leases, func(l coordinationv1.Lease) bool { return l.Namespace == d.Namespace })
	switch {
	case own >= 0:
		return stale(&leases[own], now)
	case d.Status.AvailableReplicas == 0:
		return unavailable
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
	const help = "look at deployment/" + controllerName + " and the log of its pods"
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
