// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpusharingpolicy moves the cluster towards what the policies ask. There is one budget and so one place that
// decides: a single request wakes the controller for whatever changed, and each reconcile is
//
//	gather (reads, from the cache) → rollout.Decide (pure) → carry out the actions → apply the policies' status
//
// Before it writes, it makes sure past the cache that no policy is absent because the operator's own kinds are being
// deleted (confirm).
//
// It begins only once the cache shows what was written before (cacheBarrier).
//
// A reconcile is over all nodes, and what it costs is for those that have changed: see nodeStore and rollout.Memory.
//
// The package knows how to read and write, and nothing of what should be done when. A reconcile may end anywhere: the
// next one decides from what is there.
package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// fieldManager owns GPUNode.spec and the status of policies.
const fieldManager = "gpusharing-controller"

// Request is the one request that the controller knows: look at everything.
type Request struct{}

// Options are what a controller needs beside a client.
type Options struct {
	// Reader is not cached.
	Reader       client.Reader
	Clock        clock.PassiveClock
	Events       events.EventRecorder
	PluginConfig *pluginconfig.Configurer
	// Namespace is the controller's own, where the agents run too.
	Namespace string
	// Writers is to how many nodes a reconcile may write at the same time; 0: one after the other.
	Writers int
	// ReadinessTaint is cluster.Snapshot.ReadinessTaint.
	ReadinessTaint bool
}

// Controller moves the cluster towards what the policies ask.
type Controller struct {
	client            client.Client
	metrics           *metrics
	leadsSince        time.Time // when the first reconcile began
	barrier           *cacheBarrier
	changes           changes                  // since the last reconcile
	store             nodeStore                // of the nodes, from the last reconcile
	memory            rollout.Memory           // likewise
	repeats           action.Repeats           // what was written in the last hour
	otherControllers  cluster.OtherControllers // of other controllers that are not recorded on their Nodes
	slices            watchedKind              // sliceKind
	claims            watchedKind              // claimKind
	classes           watchedKind              // classKind
	rules             watchedKind              // taintRuleKind
	pools             map[string]knownPool     // what is published of each node, from the last reconcile
	nodePools         watchedKind              // nodePoolKind
	refusals          refusals
	publishers        publishers
	deleted           map[string]types.UID // NodeFeatures of ours that the cache may still show, by node
	deletedTaintRules map[types.UID]bool   // DeviceTaintRules of ours that the cache may still show
	// undecided is when the first of the reconciles began that could not decide; zero if the last one did.
	undecided time.Time
	gone      kindsGone
	Options
}

// New returns a controller.
func New(c client.Client, o Options) *Controller {
	return &Controller{
		client: c, metrics: newMetrics(), Options: o, deleted: map[string]types.UID{}, publishers: publishers{},
		slices: watchedKind{GroupKind: sliceKind}, claims: watchedKind{GroupKind: claimKind},
		classes: watchedKind{GroupKind: classKind}, rules: watchedKind{GroupKind: taintRuleKind}, deletedTaintRules: map[types.UID]bool{},
		nodePools: watchedKind{GroupKind: nodePoolKind},
		barrier:   &cacheBarrier{reader: o.Reader, expected: map[object]expectation{}},
	}
}

// Name of the controller.
func (*Controller) Name() string { return "rollout" }

// The limits of a reconcile and of the time between two reconciles after an error. An event ends the wait at once.
const (
	reconcileTimeout = 5 * time.Minute
	minBackoff       = 100 * time.Millisecond
	maxBackoff       = 30 * time.Second
	syncAgain        = 500 * time.Millisecond
)

func options() controller.TypedOptions[Request] {
	return controller.TypedOptions[Request]{
		MaxConcurrentReconciles: 1,
		ReconciliationTimeout:   reconcileTimeout,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[Request](minBackoff, maxBackoff),
	}
}

// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies,verbs=get;list;watch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies/status,verbs=patch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=nodes,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups="",resources=pods,verbs=get;list;watch;patch;delete
// +kubebuilder:rbac:groups="",resources=pods/eviction,verbs=create
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconcile moves the cluster one safe step towards what the policies ask.
func (c *Controller) Reconcile(ctx context.Context, _ Request) (reconcile.Result, error) {
	if err := pluginconfig.OwnKinds(ctx, c.client); err != nil { // the cache may lag behind: see confirm
		return c.vanished(ctx, err)
	}
	lacking, err := c.barrier.missing(ctx, c.client, c.Clock.Now(), c.rules.served.Load())
	if err != nil {
		return c.wait(ctx, err, 0)
	}
	if lacking != "" {
		return c.wait(ctx, fmt.Errorf("the cache does not show the last write of %s yet", lacking), lookAgain)
	}
	seen, err := c.gather(ctx)
	if errors.Is(err, pluginconfig.ErrNotSynced) {
		return c.wait(ctx, err, syncAgain)
	}
	if err != nil {
		return c.wait(ctx, fmt.Errorf("gathering the cluster: %w", err), 0)
	}
	seen.snapshot.Repeats, seen.snapshot.OtherControllers = &c.repeats, &c.otherControllers
	decision := c.memory.Decide(seen.snapshot)
	c.metrics.decided(decision)
	if debug := log.FromContext(ctx).V(1); debug.Enabled() {
		for _, n := range decision.Nodes {
			debug.Info("node", "node", n.Node, "policy", n.Policy, "state", n.State, "message", n.Message)
		}
	}
	r := newReconciliation(c, seen)
	if r.changes(decision) || c.Ready(nil) != nil {
		if err := r.confirm(ctx); err != nil {
			return c.vanished(ctx, err)
		}
		if c.gone.set(nil) {
			log.FromContext(ctx).Info("The definitions of the operator are back")
		}
	}
	c.undecided = time.Time{}
	err = errors.Join(r.execute(ctx, decision), r.writer.disown(ctx), r.report(ctx, decision))
	return reconcile.Result{RequeueAfter: r.again(decision.After)}, err
}
