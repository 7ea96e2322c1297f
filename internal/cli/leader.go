// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
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

// noController is why no controller acts: empty if one does, or if who asks may not know.
func noController(ctx context.Context, c client.Client, now time.Time) (string, error) {
	leases := &coordinationv1.LeaseList{}
	named := client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", controllerName)}
	err := c.List(ctx, leases, named)
	switch {
	case apierrors.IsForbidden(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("reading the lease of the controller: %w", err)
	case len(leases.Items) == 0:
		return noDeployment(ctx, c)
	}
	why := ""
	for i := range leases.Items {
		if why = stale(&leases.Items[i], now); why == "" {
			return "", nil
		}
	}
	return why, nil
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

// noDeployment is why no controller acts in a cluster without its lease, as where it runs with --leader-elect=false.
func noDeployment(ctx context.Context, c client.Client) (string, error) {
	deployments := &appsv1.DeploymentList{}
	err := c.List(ctx, deployments, client.MatchingLabels{nameLabel: controllerName})
	switch {
	case apierrors.IsForbidden(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("reading the Deployment of the controller: %w", err)
	}
	for i := range deployments.Items {
		if deployments.Items[i].Status.AvailableReplicas > 0 {
			return "", nil
		}
	}
	return fmt.Sprintf("no Deployment with the label %s=%s is available", nameLabel, controllerName), nil
}
