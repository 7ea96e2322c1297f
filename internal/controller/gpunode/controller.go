// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpunode keeps a GPUNode for each node with GPUs, with the node's name. Its spec belongs to the rollout and
// its status to the node's agent; neither is touched here. A node that loses the label keeps its GPUNode, which records
// how to restore the node.
//
// A GPUNode has no owner: a Node that is deleted and registers again is the same machine, with the GPUs as the operator
// has left them, and the garbage collector would have removed their baseline meanwhile. So the GPUNode names the
// machine (annotation v1alpha1.AnnotationMachine), and the controller removes it
//
//	at once           if the node has nothing to restore, if another machine has taken its name, or if no policy exists
//	after a day       otherwise
package gpunode

import (
	"cmp"
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// fieldManager owns the metadata of GPUNodes. It is not the one that applies their spec: what an apply leaves out it
// deletes, and neither of the two knows the other's fields.
const fieldManager = "gpusharing-controller-gpunode"

// Controller keeps a GPUNode for each node with GPUs.
type Controller struct {
	client   client.Client
	reader   client.Reader // not cached
	selector labels.Selector
	clock    clock.PassiveClock
	taken    map[string]taken // annotations of GPUNodes, by name
}

// taken is that another controller has taken an annotation, and when it was last written again.
type taken struct {
	written time.Time
	times   int // in a row
}

// New returns a controller for the nodes that the selector matches. The reader is not cached.
func New(c client.Client, reader client.Reader, selector labels.Selector, now clock.PassiveClock) *Controller {
	return &Controller{client: c, reader: reader, selector: selector, clock: now, taken: map[string]taken{}}
}

// Name of the controller.
func (*Controller) Name() string { return "gpunode" }

// Register makes the controller run in a manager.
func (c *Controller) Register(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named(c.Name()).
		WithOptions(controller.Options{
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](minBackoff, maxBackoff),
		}).
		For(&corev1.Node{}, builder.WithPredicates(c.nodes())).
		Watches(&v1alpha1.GPUNode{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(gpuNodes())).
		Complete(c)
}

// +kubebuilder:rbac:groups="",resources=nodes,verbs=get;list;watch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies,verbs=get;list;watch

// Reconcile makes sure that the GPUNode of a selected node exists, and removes that of a node that is gone.
func (c *Controller) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	have := &v1alpha1.GPUNode{}
	if err := client.IgnoreNotFound(c.client.Get(ctx, request.NamespacedName, have)); err != nil {
		return reconcile.Result{}, fmt.Errorf("reading GPUNode %s: %w", request.Name, err)
	}
	node := &corev1.Node{}
	err := c.client.Get(ctx, request.NamespacedName, node)
	switch {
	case apierrors.IsNotFound(err) && have.UID != "":
		return c.orphaned(ctx, have)
	case err != nil:
		return reconcile.Result{}, client.IgnoreNotFound(err)
	case have.UID != "" && ofAnother(have, node):
		return c.replaced(ctx, have, node)
	case !c.selected(node) && !lost(have, node) && have.Annotations[v1alpha1.AnnotationOrphaned] == "":
		return reconcile.Result{}, nil
	}
	if after := c.waits(have, machineOf(node)); after > 0 {
		return reconcile.Result{RequeueAfter: after}, nil
	}
	if err := c.apply(ctx, have, want(node.Name, machineOf(node))); err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{}, c.found(ctx, have)
}

// replaced removes the GPUNode of a machine whose name another one has. A Node that was made by hand, as for kubelets with
// --register-node=false, tells no machine before its kubelet has reported, which may be the same one.
func (c *Controller) replaced(ctx context.Context, have *v1alpha1.GPUNode, node *corev1.Node) (reconcile.Result, error) {
	if node.Status.NodeInfo.SystemUUID == "" {
		if err := c.reader.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil { // the cache has no version of the kubelet
			return reconcile.Result{}, client.IgnoreNotFound(err)
		}
		if node.Status.NodeInfo.KubeletVersion == "" || !ofAnother(have, node) {
			return reconcile.Result{RequeueAfter: lookAgain}, nil
		}
	}
	return reconcile.Result{}, c.remove(ctx, have, "another machine has its name")
}

// found removes the note that the node is gone, also where a backup has brought it, so that another author owns it: a
// later absence begins anew.
func (c *Controller) found(ctx context.Context, have *v1alpha1.GPUNode) error {
	if _, noted := have.Annotations[v1alpha1.AnnotationOrphaned]; !noted {
		return nil
	}
	none := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, v1alpha1.AnnotationOrphaned))
	if err := c.client.Patch(ctx, have, none, client.FieldOwner(fieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("writing GPUNode %s: %w", have.Name, err)
	}
	return nil
}

// waits is how long an annotation that another controller has taken is not written again: nothing the first time, then a
// minute after the last time, then twice as long each time, an hour at most. Meanwhile only a replaced machine goes unseen.
func (c *Controller) waits(have *v1alpha1.GPUNode, machine string) time.Duration {
	if have.UID == "" || have.Annotations[v1alpha1.AnnotationMachine] == machine {
		return 0
	}
	return c.takenAgain(have.Name)
}

// takenAgain notes that an annotation of a GPUNode is written now, or returns how long that waits.
func (c *Controller) takenAgain(name string) time.Duration {
	last, now := c.taken[name], c.clock.Now()
	if until := last.written.Add(min(time.Minute<<max(last.times-1, 0), time.Hour)); last.times > 0 && now.Before(until) {
		return until.Sub(now)
	}
	if now.Sub(last.written) >= 2*time.Hour {
		last.times = 0
	}
	c.taken[name] = taken{written: now, times: min(last.times+1, 7)}
	return 0
}

func (c *Controller) apply(ctx context.Context, have *v1alpha1.GPUNode, want *applyv1alpha1.GPUNodeApplyConfiguration) error {
	wrote, err := ssa.Apply(ctx, ssa.Owner{Client: c.client, Name: fieldManager}, have, want, applyv1alpha1.ExtractGPUNode)
	if err != nil {
		return fmt.Errorf("writing GPUNode %s: %w", have.Name, err)
	}
	if wrote && have.UID == "" {
		log.FromContext(ctx).Info("Created GPUNode", "node", *want.Name)
	}
	return nil
}

// orphaned removes the GPUNode of a node that is gone, once nobody needs it any more.
func (c *Controller) orphaned(ctx context.Context, have *v1alpha1.GPUNode) (reconcile.Result, error) {
	since, err := time.Parse(time.RFC3339, have.Annotations[v1alpha1.AnnotationOrphaned])
	known := err == nil && !since.After(c.clock.Now().Add(time.Minute)) // one from the future tells that a clock was wrong
	if !known {
		since = c.clock.Now()
	}
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.client.List(ctx, policies); err != nil {
		return reconcile.Result{}, fmt.Errorf("reading policies: %w", err)
	}
	switch {
	case have.Spec.Baseline == nil:
		return reconcile.Result{}, c.remove(ctx, have, "its node is gone")
	case len(policies.Items) == 0:
		if err := pluginconfig.OwnKinds(ctx, c.reader); err != nil { // or the policies went with their kind
			return reconcile.Result{}, err
		}
		return reconcile.Result{}, c.remove(ctx, have, "its node is gone, and no policy exists")
	case c.clock.Since(since) >= remembered:
		return reconcile.Result{}, c.remove(ctx, have, "its node has been gone for "+remembered.String())
	case !known && c.takenAgain(have.Name) > 0: // another controller takes that note
	case !known:
		note := want(have.Name, have.Annotations[v1alpha1.AnnotationMachine])
		note.Annotations[v1alpha1.AnnotationOrphaned] = since.UTC().Format(time.RFC3339)
		return reconcile.Result{RequeueAfter: lookAgain}, c.apply(ctx, have, note)
	}
	return reconcile.Result{RequeueAfter: lookAgain}, nil
}

func (c *Controller) selected(node client.Object) bool {
	return node.GetDeletionTimestamp() == nil && c.selector.Matches(labels.Set(node.GetLabels()))
}

// remove deletes a GPUNode. Its deletion triggers the next reconcile, which creates a new one if there is a node for
// it.
func (c *Controller) remove(ctx context.Context, gpuNode *v1alpha1.GPUNode, why string) error {
	precondition := client.Preconditions{UID: &gpuNode.UID, ResourceVersion: &gpuNode.ResourceVersion}
	err := client.IgnoreNotFound(c.client.Delete(ctx, gpuNode, precondition))
	if err != nil {
		return fmt.Errorf("deleting GPUNode %s: %w", gpuNode.Name, err)
	}
	delete(c.taken, gpuNode.Name)
	log.FromContext(ctx).Info("Deleted GPUNode", "node", gpuNode.Name, "because", why)
	return nil
}

func want(node, machine string) *applyv1alpha1.GPUNodeApplyConfiguration {
	return applyv1alpha1.GPUNode(node).WithAnnotations(map[string]string{v1alpha1.AnnotationMachine: machine})
}

// machineOf names the machine of a node: the UUID of its firmware as the kubelet reports it or, where it reports none,
// the UID of the Node, which a Node that registers again does not keep.
func machineOf(node *corev1.Node) string {
	return cmp.Or(node.Status.NodeInfo.SystemUUID, string(node.UID))
}

// ofAnother reports whether a GPUNode was made for another machine than that of the node.
func ofAnother(gpuNode *v1alpha1.GPUNode, node *corev1.Node) bool {
	machine := gpuNode.Annotations[v1alpha1.AnnotationMachine]
	return machine != "" && machine != machineOf(node) && machine != string(node.UID)
}

// lost reports whether a node has no GPUNode though the operator has changed it: its baseline is on the Node.
func lost(have *v1alpha1.GPUNode, node *corev1.Node) bool {
	return have.UID == "" && node.Annotations[v1alpha1.AnnotationBaseline] != "" && node.DeletionTimestamp == nil
}

// The limits of the time between two attempts after an error: the kind may be gone for long, and come back.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 30 * time.Second
)

// remembered is how long the GPUNode of a node that is gone waits for the machine to come back. A node that is
// reinstalled, or repaired, is back by then.
const remembered = 24 * time.Hour

// lookAgain is how often an orphaned GPUNode is looked at: no policy may exist any more.
const lookAgain = time.Minute

// nodes lets through the first sight of a node, its end, and the changes that make it selected or tell its machine.
// Heartbeats do neither.
func (c *Controller) nodes() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return true },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return c.selected(e.ObjectNew) && (!c.selected(e.ObjectOld) || differ(e.ObjectOld, e.ObjectNew))
		},
		DeleteFunc:  func(event.DeleteEvent) bool { return true },
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}

func differ(a, b client.Object) bool {
	was, isNode := a.(*corev1.Node)
	is, areNodes := b.(*corev1.Node)
	return isNode && areNodes && machineOf(was) != machineOf(is)
}

// gpuNodes lets through a GPUNode at its first sight, since its node may be gone, one that is deleted, and one whose
// annotation with its machine another controller changed.
func gpuNodes() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return true },
		UpdateFunc: func(e event.UpdateEvent) bool {
			old, updated := e.ObjectOld.GetAnnotations(), e.ObjectNew.GetAnnotations()
			return old[v1alpha1.AnnotationMachine] != updated[v1alpha1.AnnotationMachine]
		},
		DeleteFunc:  func(event.DeleteEvent) bool { return true },
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}
