// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agentinstall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// FieldManager owns what is applied.
const FieldManager = "gpusharing-operands"

// Options are what a Controller works with.
type Options struct {
	// Owner is the Deployment that this runs in.
	Owner types.NamespacedName
	// Manifests hold the files with the objects.
	Manifests fs.FS
	// Images that the objects name, and what is put in their place.
	Images map[string]string
	// Metrics is how the agents serve what they measure.
	Metrics Metrics
}

// Metrics is how the containers named agent serve what they measure. Helm's value metrics does the same.
type Metrics struct {
	// Args turn it on; none: it is off.
	Args []string
	// Port on which they serve.
	Port int
}

// Controller applies the objects.
type Controller struct {
	client    client.Client
	owner     types.NamespacedName
	manifests fs.FS
	images    map[string]string
	metrics   Metrics
}

// New returns a controller.
func New(c client.Client, o Options) *Controller {
	return &Controller{client: c, owner: o.Owner, manifests: o.Manifests, images: o.Images, metrics: o.Metrics}
}

// Name of the controller.
func (*Controller) Name() string { return "operand" }

// Register makes the controller run in a manager whose cache holds the owner and the DaemonSets beside it.
func (c *Controller) Register(mgr ctrl.Manager) error {
	isOwner := predicate.NewPredicateFuncs(func(o client.Object) bool { return client.ObjectKeyFromObject(o) == c.owner })
	toOwner := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: c.owner}}
	})
	err := ctrl.NewControllerManagedBy(mgr).Named(c.Name()).
		For(&appsv1.Deployment{}, builder.WithPredicates(isOwner, predicate.GenerationChangedPredicate{})).
		Watches(&appsv1.DaemonSet{}, toOwner, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Complete(reconcile.AsReconciler(c.client, c))
	if err != nil {
		return fmt.Errorf("registering the controller of operands: %w", err)
	}
	return nil
}

// Reconcile applies every object. One that fails does not hold up the others.
func (c *Controller) Reconcile(ctx context.Context, owner *appsv1.Deployment) (reconcile.Result, error) {
	if !owner.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil
	}
	objects, err := c.objects(owner)
	if err != nil {
		return reconcile.Result{}, err
	}
	var errs []error
	for _, o := range objects {
		errs = append(errs, c.apply(ctx, o))
	}
	return reconcile.Result{}, errors.Join(errs...)
}

// apply applies an object unless the cluster does not know its kind: SecurityContextConstraints outside OpenShift.
func (c *Controller) apply(ctx context.Context, o *unstructured.Unstructured) error {
	err := c.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner(FieldManager), client.ForceOwnership)
	if meta.IsNoMatchError(err) {
		log.FromContext(ctx).V(1).Info("left out: the cluster does not know the kind", "kind", o.GetKind(), "name", o.GetName())
		return nil
	}
	if err != nil {
		return fmt.Errorf("installing %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	return nil
}
