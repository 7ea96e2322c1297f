// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package autoscaling tells autoscalers what new nodes will advertise. Its one request goes over all node groups:
//
//	gather (reads, from caches) → autoscaling.Snapshot.Advise (pure) → write what policies in mode Manage ask for → report on the policies
//
// Of nodes it writes the startup taint of those that have no label of their GPUs yet, and no rollout waits for it. It writes nothing to autoscalers in
// mode Advise, which is the default, and may not without the rights of config/autoscaling.
package autoscaling

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// Request is the one request that the controller knows: look at everything.
type Request struct{}

// Options are what a controller needs beside a client.
type Options struct {
	// Cache holds the objects of autoscalers, with the options of CacheOptions.
	Cache cache.Cache
	// Reader reads infrastructure templates, of kinds that are not known before, without a watch.
	Reader       client.Reader
	PluginConfig *pluginconfig.Configurer
	Clock        clock.PassiveClock
	Events       events.EventRecorder
}

// Controller tells autoscalers what new nodes will advertise.
type Controller struct {
	client client.Client
	kinds  kinds
	reader client.Reader
	clock  clock.PassiveClock
	events events.EventRecorder
	// wrote is the resource version of each object before the last write to it, by Write.ObjectName: as long as the cache
	// shows that version, it does not show the write.
	wrote map[string]string
	// capacities are those of infrastructure templates, by template.
	capacities map[string]capacity
	// refused is why the API server refused the last write to an object.
	refused map[string]refusal
	// unread is since when the objects of autoscalers cannot be read; zero if they can.
	unread time.Time
}

type refusal struct {
	autoscaling.Refusal
	content autoscaling.Write
	at      time.Time
}

// New returns a controller.
func New(c client.Client, o Options) *Controller {
	return &Controller{
		client: c, reader: o.Reader, clock: o.Clock, events: o.Events, capacities: map[string]capacity{}, kinds: kinds{cache: o.Cache, pluginConfig: o.PluginConfig, wake: func() {}, watching: map[string]watched{}},
		wrote: map[string]string{}, refused: map[string]refusal{},
	}
}

// CacheOptions are those of the cache for the objects of autoscalers. A read starts no watch.
func CacheOptions() cache.Options {
	return cache.Options{ReaderFailOnMissingInformer: true, DefaultTransform: slim}
}

// Name of the controller.
func (*Controller) Name() string { return "autoscaling" }

const (
	reconcileTimeout = time.Minute
	minBackoff       = 500 * time.Millisecond
	maxBackoff       = time.Minute
	syncAgain        = 500 * time.Millisecond
	// kindsAgain is how soon a reconcile looks again that cannot tell whether policies are gone.
	kindsAgain = 2 * time.Second
	// unreadDeadline is how long the objects of autoscalers may be unreadable before the policies report that.
	unreadDeadline = time.Minute
)

// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies,verbs=get;list;watch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies/status,verbs=patch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=nodes,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups="",resources=pods,verbs=get;list;watch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconcile makes the objects of autoscalers what the policies ask for, and reports.
func (c *Controller) Reconcile(ctx context.Context, _ Request) (reconcile.Result, error) {
	s, err := c.gather(ctx)
	if errors.Is(err, pluginconfig.ErrNotSynced) {
		return reconcile.Result{RequeueAfter: syncAgain}, c.cannotRead(ctx, err)
	}
	if err != nil {
		return reconcile.Result{}, errors.Join(fmt.Errorf("gathering node groups: %w", err), c.cannotRead(ctx, err))
	}
	if c.stale(s) {
		return reconcile.Result{RequeueAfter: staleAgain}, nil
	}
	advice := s.Advise()
	if len(advice.Writes) > 0 { // what no policy asks for is undone, and the policies may have gone with their kind
		if _, err := c.kinds.pluginConfig.OwnPolicies(ctx, s.Policies); err != nil {
			return reconcile.Result{RequeueAfter: kindsAgain}, c.cannotRead(ctx, err)
		}
	}
	c.unread = time.Time{}
	after := c.write(ctx, s, advice.Writes)
	if advice.After > 0 && (after == 0 || advice.After < after) {
		after = advice.After
	}
	return reconcile.Result{RequeueAfter: after}, c.report(ctx, s, advice)
}

// gather reads the cluster. What it returns is shared with the caches and must not be changed.
func (c *Controller) gather(ctx context.Context) (*autoscaling.Snapshot, error) {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.client.List(ctx, policies); err != nil {
		return nil, fmt.Errorf("reading policies: %w", err)
	}
	s := &autoscaling.Snapshot{Now: c.clock.Now(), Policies: policies.Items, Refused: map[string]autoscaling.Refusal{}}
	for object, r := range c.refused {
		s.Refused[object] = r.Refusal
	}
	if err := c.gatherGroups(ctx, s); err != nil {
		return nil, err
	}
	return s, c.gatherNodes(ctx, s)
}

func (c *Controller) gatherNodes(ctx context.Context, s *autoscaling.Snapshot) error {
	nodes, gpuNodes := &corev1.NodeList{}, &v1alpha1.GPUNodeList{}
	if err := c.client.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading nodes: %w", err)
	}
	if !s.NeedsNodes(nodes.Items) {
		return nil
	}
	if err := c.client.List(ctx, gpuNodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading GPUNodes: %w", err)
	}
	of := cluster.ByName(gpuNodes.Items)
	for i := range nodes.Items {
		n := &nodes.Items[i]
		switch gpuNode := of[n.Name]; {
		case gpuNode != nil:
			s.Nodes = append(s.Nodes, cluster.NodeOf(n, gpuNode))
		case autoscaling.Starts(n, s.Now):
			s.Starting = append(s.Starting, cluster.NodeAlone(n))
		}
	}
	return c.gatherDiscovery(ctx, s)
}

// gatherDiscovery reads what the pods of Node Feature Discovery tolerate, where it matters.
func (c *Controller) gatherDiscovery(ctx context.Context, s *autoscaling.Snapshot) error {
	if !slices.ContainsFunc(s.Policies, func(p v1alpha1.GPUSharingPolicy) bool {
		return p.Spec.Rollout.StartupTaint == v1alpha1.StartupTaintUntilReady
	}) {
		return nil
	}
	pods := &corev1.PodList{}
	if err := c.client.List(ctx, pods, client.MatchingLabels{cluster.LabelName: cluster.FeatureDiscovery}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading the pods of Node Feature Discovery: %w", err)
	}
	for i := range pods.Items {
		if p := &pods.Items[i]; cluster.MountsHost(p.Spec.Volumes) && p.DeletionTimestamp == nil {
			s.Discovery = append(s.Discovery, p.Spec.Tolerations)
		}
	}
	return nil
}

func (c *Controller) gatherGroups(ctx context.Context, s *autoscaling.Snapshot) error {
	var errs []error
	for _, of := range []kind{nodePools, overlays, deployments, sets, openShifts, versionKinds} {
		all := &unstructured.UnstructuredList{}
		version, err := c.kinds.list(ctx, of, all)
		errs = append(errs, err)
		for i := range all.Items {
			s.Add(&all.Items[i])
		}
		if of == overlays {
			s.OverlayVersion = version.GroupVersion().String()
		}
	}
	made := &metav1.PartialObjectMetadataList{}
	_, err := c.kinds.list(ctx, machines, made)
	for i := range made.Items {
		s.AddMachine(&made.Items[i])
	}
	c.gatherCapacities(ctx, s)
	return errors.Join(append(errs, err)...)
}

// cannotRead reports on the policies that the objects of autoscalers cannot be read, once that lasts.
func (c *Controller) cannotRead(ctx context.Context, why error) error {
	now := c.clock.Now()
	if c.unread.IsZero() {
		c.unread = now
	}
	if now.Sub(c.unread) < unreadDeadline {
		return nil
	}
	log.FromContext(ctx).Error(why, "Objects of autoscalers cannot be read", "since", c.unread)
	return c.reportUnread(ctx, fmt.Sprintf("The controller has decided nothing about node groups since %s: %v", c.unread.UTC().Format(time.RFC3339), why))
}

// gathering is how long events are collected before a reconcile. A reconcile goes over all nodes, and autoscalers look
// every ten seconds.
const gathering = time.Second

// Register makes the controller, and the cache that it reads the objects of autoscalers from, run in a manager.
func (c *Controller) Register(mgr manager.Manager) error {
	if err := mgr.Add(c.kinds.cache); err != nil {
		return fmt.Errorf("adding the cache for the objects of autoscalers: %w", err)
	}
	return builder.TypedControllerManagedBy[Request](mgr).
		Named(c.Name()).
		WithOptions(controller.TypedOptions[Request]{
			MaxConcurrentReconciles: 1, ReconciliationTimeout: reconcileTimeout,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[Request](minBackoff, maxBackoff),
		}).
		Watches(&v1alpha1.GPUSharingPolicy{}, wake(), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.GPUNode{}, wake(), builder.WithPredicates(updates(sameGPUs))).
		Watches(&corev1.Node{}, wake(), builder.WithPredicates(updates(sameNode))).
		Watches(&corev1.Pod{}, wake(), builder.WithPredicates(discovers())).
		Watches(pluginconfig.Definitions(), wake(), builder.WithPredicates(predicate.ResourceVersionChangedPredicate{})).
		WatchesRawSource(source.TypedFunc[Request](func(_ context.Context, queue workqueue.TypedRateLimitingInterface[Request]) error {
			c.kinds.wake = func() { queue.AddAfter(Request{}, gathering) }
			return nil
		})).
		Complete(c)
}

// wake puts the one request into the queue, once for all that happens within a short time.
func wake() handler.TypedEventHandler[client.Object, Request] {
	type queue = workqueue.TypedRateLimitingInterface[Request]
	add := func(q queue) { q.AddAfter(Request{}, gathering) }
	return handler.TypedFuncs[client.Object, Request]{
		CreateFunc: func(_ context.Context, _ event.TypedCreateEvent[client.Object], q queue) { add(q) },
		UpdateFunc: func(_ context.Context, _ event.TypedUpdateEvent[client.Object], q queue) { add(q) },
		DeleteFunc: func(_ context.Context, _ event.TypedDeleteEvent[client.Object], q queue) { add(q) },
	}
}

// discovers lets pods of Node Feature Discovery pass that come or go.
func discovers() predicate.Predicate {
	is := func(o client.Object) bool { return o.GetLabels()[cluster.LabelName] == cluster.FeatureDiscovery }
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return is(e.Object) }, DeleteFunc: func(e event.DeleteEvent) bool { return is(e.Object) },
		UpdateFunc: func(event.UpdateEvent) bool { return false },
	}
}

// updates leaves out updates of objects that stay the same.
func updates(same func(a, b client.Object) bool) predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool { return !same(e.ObjectOld, e.ObjectNew) }}
}

// sameGPUs reports whether a GPUNode has as many GPUs as before. A GPU of another product comes with another machine,
// whose GPUNode is new.
func sameGPUs(a, b client.Object) bool {
	was, areNodes := a.(*v1alpha1.GPUNode)
	is, all := b.(*v1alpha1.GPUNode)
	if !areNodes || !all || len(was.Status.Devices) != len(is.Status.Devices) {
		return false
	}
	for i := range is.Status.Devices {
		if was.Status.Devices[i].Product != is.Status.Devices[i].Product || len(was.Status.Devices[i].Profiles) != len(is.Status.Devices[i].Profiles) {
			return false
		}
	}
	return true
}

// sameNode reports whether a Node has the labels, the group and the extended resources that it had.
func sameNode(a, b client.Object) bool {
	was, areNodes := a.(*corev1.Node)
	is, all := b.(*corev1.Node)
	return areNodes && all && maps.Equal(a.GetLabels(), b.GetLabels()) && maps.Equal(groupOf(a), groupOf(b)) &&
		maps.Equal(offers(was), offers(is))
}

func groupOf(node client.Object) map[string]string {
	of := map[string]string{}
	for key, value := range node.GetAnnotations() {
		if autoscaling.OfGroup(key) {
			of[key] = value
		}
	}
	return of
}

func offers(node *corev1.Node) map[corev1.ResourceName]int64 {
	counts := map[corev1.ResourceName]int64{}
	for name, quantity := range node.Status.Allocatable {
		if strings.HasPrefix(string(name), "nvidia.com/") {
			counts[name] = quantity.Value()
		}
	}
	return counts
}
