// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpunode keeps a GPUNode for each node with GPUs: it has the node's name and is owned by the node, so that the
// garbage collector removes it with the node. Its spec belongs to the rollout and its status to the node's agent; neither
// is touched here. A node that loses the label keeps its GPUNode, which records how to put the node back.
package gpunode

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/labels"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/ssa"
)

// fieldManager owns the metadata of GPUNodes. It is not the one that applies their spec: what an apply leaves out it
// deletes, and neither of the two knows the other's fields.
const fieldManager = "gpusharing-controller-gpunode"

// DefaultSelector selects the nodes with GPUs: the label that NVIDIA's GPU Operator and its GPU Feature Discovery set.
const DefaultSelector = "nvidia.com/gpu.present=true"

// Controller keeps a GPUNode for each node with GPUs.
type Controller struct {
	client   client.Client
	selector labels.Selector
}

// New returns a controller for the nodes that the selector matches.
func New(c client.Client, selector labels.Selector) *Controller {
	return &Controller{client: c, selector: selector}
}

// Name of the controller.
func (*Controller) Name() string { return "gpunode" }

// Register makes the controller run in a manager.
func (c *Controller) Register(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named(c.Name()).
		For(&corev1.Node{}, builder.WithPredicates(c.becomesSelected())).
		Watches(&v1alpha1.GPUNode{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(ownersChanged())).
		Complete(c)
}

// +kubebuilder:rbac:groups="",resources=nodes,verbs=get;list;watch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes,verbs=get;list;watch;create;patch;delete

// Reconcile makes sure that the GPUNode of a selected node exists and is owned by it. The GPUNode of an earlier node of
// that name, which the garbage collector has not removed yet, says nothing about this one and is deleted.
func (c *Controller) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	node := &corev1.Node{}
	if err := c.client.Get(ctx, request.NamespacedName, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !c.selected(node) {
		return reconcile.Result{}, nil
	}
	have := &v1alpha1.GPUNode{}
	err := client.IgnoreNotFound(c.client.Get(ctx, request.NamespacedName, have))
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("reading GPUNode %s: %w", request.Name, err)
	}
	if ownedByAnother(have, node) {
		return reconcile.Result{}, c.remove(ctx, have)
	}
	wrote, err := ssa.Apply(ctx, ssa.Owner{Client: c.client, Name: fieldManager}, have, want(node), applyv1alpha1.ExtractGPUNode)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("creating GPUNode %s: %w", node.Name, err)
	}
	if wrote {
		log.FromContext(ctx).Info("created GPUNode", "node", node.Name)
	}
	return reconcile.Result{}, nil
}

func (c *Controller) selected(node client.Object) bool {
	return node.GetDeletionTimestamp() == nil && c.selector.Matches(labels.Set(node.GetLabels()))
}

// remove deletes the GPUNode of a node that is gone; its deletion triggers the next pass, which creates a new one.
func (c *Controller) remove(ctx context.Context, gpuNode *v1alpha1.GPUNode) error {
	precondition := client.Preconditions{UID: &gpuNode.UID}
	err := client.IgnoreNotFound(c.client.Delete(ctx, gpuNode, precondition))
	if err != nil {
		return fmt.Errorf("deleting GPUNode %s of an earlier node of that name: %w", gpuNode.Name, err)
	}
	log.FromContext(ctx).Info("deleted GPUNode of an earlier node of that name", "node", gpuNode.Name)
	return nil
}

func want(node *corev1.Node) *applyv1alpha1.GPUNodeApplyConfiguration {
	// No controller and no blockOwnerDeletion: the latter would need rights on nodes/finalizers.
	owner := metav1ac.OwnerReference().
		WithAPIVersion("v1").WithKind("Node").WithName(node.Name).WithUID(node.UID)
	return applyv1alpha1.GPUNode(node.Name).WithOwnerReferences(owner)
}

func ownedByAnother(gpuNode *v1alpha1.GPUNode, node *corev1.Node) bool {
	for _, owner := range gpuNode.OwnerReferences {
		if owner.APIVersion == "v1" && owner.Kind == "Node" && owner.UID != node.UID {
			return true
		}
	}
	return false
}

// becomesSelected lets through the first sight of a node and the change that makes it selected. Heartbeats change
// neither.
func (c *Controller) becomesSelected() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return c.selected(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return c.selected(e.ObjectNew) && (!c.selected(e.ObjectOld) || e.ObjectOld.GetUID() != e.ObjectNew.GetUID())
		},
		DeleteFunc:  func(event.DeleteEvent) bool { return false },
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}

// ownersChanged lets through a GPUNode that is deleted, or whose owner somebody changed.
func ownersChanged() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return !equality.Semantic.DeepEqual(e.ObjectOld.GetOwnerReferences(), e.ObjectNew.GetOwnerReferences())
		},
		DeleteFunc:  func(event.DeleteEvent) bool { return true },
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}
