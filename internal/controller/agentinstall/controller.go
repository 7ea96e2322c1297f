// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agentinstall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// FieldManager owns what is applied.
const FieldManager = "gpusharing-operands"

// again is how soon everything is applied again: another controller may have deleted or changed what is not watched.
const again = time.Minute

// Options are what a Controller works with.
type Options struct {
	// Owner is the Deployment that this runs in.
	Owner types.NamespacedName
	// Manifests hold the files with the objects.
	Manifests fs.FS
	// Images that the objects name, and what is put in their place.
	Images map[string]string
	// Agents is what the containers named agent get beside what the manifests say.
	Agents Agents
	// Events tell on the owner what could not be installed.
	Events events.EventRecorder
	// Reader reads what is in no cache. Nil: the client does.
	Reader client.Reader
}

// Agents is what the containers named agent get by settings, as by values of Helm's chart.
type Agents struct {
	// Args that they have in addition.
	Args []string
	// Port on which they serve metrics; 0: none.
	Port int
	// Cgroups: they see and may write the node's control groups, at the node's own path.
	Cgroups bool
}

// Controller applies the objects.
type Controller struct {
	client    client.Client
	owner     types.NamespacedName
	manifests fs.FS
	images    map[string]string
	agents    Agents
	events    events.EventRecorder
	reader    client.Reader

	mu      sync.Mutex
	lacking error // what the last reconcile could not install
	told    int   // how often that was news
}

// New returns a controller.
func New(c client.Client, o Options) *Controller {
	if o.Reader == nil {
		o.Reader = c
	}
	return &Controller{
		client: c, owner: o.Owner, manifests: o.Manifests, images: o.Images, agents: o.Agents, events: o.Events, reader: o.Reader,
		lacking: errors.New("nothing is installed yet"),
	}
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
	if another := errors.Join(Only(ctx, c.reader, c.owner.Namespace), c.beside(ctx, objects)); another != nil {
		objects, err = nil, another
	}
	errs := []error{err}
	for _, o := range objects {
		errs = append(errs, c.apply(ctx, o))
	}
	err = errors.Join(errs...)
	c.tell(owner, err)
	return reconcile.Result{RequeueAfter: again}, err
}

// Only returns an error if the operator is installed in another namespace than this one, or was and its MPS pods are
// still there: two operators would undo each other's work, and two MPS pods on a node each other's daemons. Which
// namespace that is, an object says that only administrators write.
func Only(ctx context.Context, r client.Reader, namespace string) error {
	binding, pods := &metav1.PartialObjectMetadata{}, &metav1.PartialObjectMetadata{}
	binding.SetGroupVersionKind(schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "ValidatingAdmissionPolicyBinding"})
	pods.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("DaemonSet"))
	err := r.Get(ctx, client.ObjectKey{Name: "gpu-sharing-mps-nodes"}, binding)
	other := binding.Annotations[v1alpha1.AnnotationNamespace]
	if err == nil && (other == "" || other == namespace) {
		return nil
	}
	at := client.ObjectKey{Namespace: other, Name: "gpu-sharing-mps"}
	if err == nil {
		err = r.Get(ctx, at, pods)
	}
	switch {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err): // a role of before says nothing
		return nil
	case err != nil:
		return fmt.Errorf("looking for the operator in other namespaces: %w", err)
	}
	return fmt.Errorf("the operator is installed in namespace %s already, or was: daemonset %s is there. Install it there; or end all MPS clients, "+
		"uninstall it there, and run kubectl delete daemonset -n %s %s", other, at, other, at.Name)
}

// beside returns an error if an object that goes with the operator is there and was never applied by this program: Helm,
// kubectl or kustomize installed it, and their next run would undo what OLM does.
func (c *Controller) beside(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, o := range objects {
		if len(o.GetOwnerReferences()) == 0 {
			continue
		}
		at, there := client.ObjectKeyFromObject(o), &metav1.PartialObjectMetadata{}
		there.SetGroupVersionKind(o.GroupVersionKind())
		err := c.reader.Get(ctx, at, there)
		if apierrors.IsNotFound(err) || slices.ContainsFunc(there.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Manager == FieldManager }) {
			continue
		}
		if err != nil {
			return fmt.Errorf("looking for an operator that OLM has not installed: %w", err)
		}
		how, remove := "kubectl or kustomize", fmt.Sprintf("kubectl delete daemonset -n %s %s, which changes no GPU", at.Namespace, at.Name)
		if release := there.Annotations["meta.helm.sh/release-name"]; release != "" {
			how, remove = "Helm", fmt.Sprintf("helm uninstall -n %s %s, which changes no GPU; under OLM v0 delete the Subscription and the "+
				"ClusterServiceVersion before, and create the Subscription again", at.Namespace, release)
		}
		return fmt.Errorf("%s %s was installed by %s, and not by OLM: one would undo the work of the other. Run %s", o.GetKind(), at, how, remove)
	}
	return nil
}

// Installed is a readiness check: an error until everything is installed, and while the last reconcile failed. So the
// ClusterServiceVersion does not succeed before the agents can run, and OLM deletes the one before only then.
func (c *Controller) Installed(*http.Request) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lacking
}

// tell keeps what could not be installed, and reports it if that is news. Kubernetes takes an Event of the same action for
// the one before, whatever it says, for some minutes: so the action of each has a number.
func (c *Controller) tell(owner *appsv1.Deployment, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	news := err != nil && (c.lacking == nil || c.lacking.Error() != err.Error())
	c.lacking = err
	if news {
		c.told++
		c.events.Eventf(owner, nil, corev1.EventTypeWarning, v1alpha1.EventOperandsNotInstalled, "Install"+strconv.Itoa(c.told), "%s", format.Message(err.Error()))
	}
}

// apply applies an object unless the cluster does not know its kind: SecurityContextConstraints outside OpenShift. What
// has no owner here has none at all: a ClusterServiceVersion that owned it before would take it along.
func (c *Controller) apply(ctx context.Context, o *unstructured.Unstructured) error {
	owned := len(o.GetOwnerReferences()) > 0
	err := c.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner(FieldManager), client.ForceOwnership)
	if meta.IsNoMatchError(err) {
		log.FromContext(ctx).V(1).Info("left out: the cluster does not know the kind", "kind", o.GetKind(), "name", o.GetName())
		return nil
	}
	if err != nil {
		return fmt.Errorf("installing %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	if owned || len(o.GetOwnerReferences()) == 0 {
		return nil
	}
	before := o.DeepCopy()
	o.SetOwnerReferences(nil)
	if err := c.client.Patch(ctx, o, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("taking the owner off %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	return nil
}
