// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package agent brings the GPUs of one node to the spec of the node's GPUNode and reports in its status what it
// observed.
//
// It keeps nothing between two reconciles but what it reported: each one observes, plans, carries out the steps, observes again and reports.
// So a crash, a reboot that lost the MIG geometry and a change by another program are all the same case. It asks nobody
// for permission, since the controller changes the spec only when that is safe; all the same it looks before each step
// whether anything uses what the step needs idle. GPUs are changed side by side; one on which a step fails is rolled
// back to what it was before the reconcile and tried again later, and keeps no other from its steps. It writes nothing
// but the status, at most once in a reconcile and only if it changed, and holds no NVML handle between reconciles.
package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

const (
	// FieldManager owns the status of the GPUNodes.
	FieldManager = "gpusharing-agent"

	// reconcileTimeout bounds a reconcile: a MIG change of 16 GPUs takes minutes where each is reset.
	reconcileTimeout = 10 * time.Minute
	// observeTimeout bounds an observation. Opening the driver takes seconds for each GPU that nobody else has open.
	observeTimeout = time.Minute
	// stepTimeout bounds a step, the longest of which is a change of MIG mode with a reset.
	stepTimeout = 3 * time.Minute
	// reportTimeout bounds the report of a reconcile, which is made even if the reconcile ran out of time.
	reportTimeout = 15 * time.Second
	// waitPoll is how soon a reconcile looks again at what it waits for and gets no event of: a process that ends.
	waitPoll = 5 * time.Second
	// The first and the longest delay after a failure.
	backoff, maxBackoff = 500 * time.Millisecond, time.Minute
)

// Config is what a Controller works with.
type Config struct {
	Node        string // name of the node
	BootID      string // of the node's running kernel
	Client      client.Client
	Reader      client.Reader // past the cache
	Hardware    gpu.Hardware
	Nodes       DeviceNodes // nil: device nodes are none of the agent's business
	MPS         *mps.View
	Processes   host.Processes
	Containers  host.Containers // nil: the containers of processes are not known
	Rebooter    host.Rebooter   // nil: the agent must not reboot the node
	Allocations Allocations
	// InitContainers tells what those that run hold, which the kubelet lists for nobody; nil: nobody knows. It may tell what
	// other containers hold too.
	InitContainers func() ([]host.HeldDevice, error)
	Status         *StatusWriter                 // also of the ConfigReporter; nil: one of its own
	Driver         func() (driver.Driver, error) // finds the driver that the node has; nil: it does not change
	Clock          clock.Clock
	Resync         time.Duration // how often the GPUs are looked at without an event
}

// Controller reconciles the GPUNode of one node.
//
//	observer   what is on the node: observe.go
//	applier    plan after plan, side by side on different GPUs, and what failed rolled back: act.go, lanes.go
//	meter      who uses the GPUs, whenever that is asked: usage.go
type Controller struct {
	tools
	applier
	meter

	bootID string
	reader client.Reader
	writer *StatusWriter
	seen   struct { // when a spec was first seen
		generation int64
		at         time.Time
	}
	nodes    DeviceNodes
	rebooter host.Rebooter
	driver   func() (driver.Driver, error)
	resync   time.Duration
	health   health
}

// tools are what several parts of the agent work with.
type tools struct {
	node        string
	client      client.Client
	hardware    gpu.Hardware
	mps         *mps.View
	processes   host.Processes
	allocations Allocations
	clock       clock.Clock
	lock        hardwareLock
	metrics     *metrics

	initContainers func() ([]host.HeldDevice, error)
}

// New makes a controller.
func New(c Config) *Controller {
	if c.Rebooter == nil {
		c.Rebooter = host.NoReboot("nobody has allowed it")
	}
	if c.Containers == nil {
		c.Containers = host.NoContainers{}
	}
	if c.Status == nil {
		c.Status = NewStatusWriter(c.Client)
	}
	t := tools{
		node: c.Node, client: c.Client, hardware: c.Hardware, mps: c.MPS, processes: c.Processes, allocations: c.Allocations,
		clock: c.Clock, lock: make(hardwareLock, 1), metrics: newMetrics(), initContainers: c.InitContainers,
	}
	return &Controller{
		tools: t, applier: applier{observer{tools: t, before: map[string][]gpu.Instance{}}}, meter: meter{tools: t, containers: c.Containers},
		bootID: c.BootID, reader: c.Reader, writer: c.Status,
		nodes: c.Nodes, rebooter: c.Rebooter, driver: c.Driver, resync: c.Resync,
	}
}

// Name is the name in logs and metrics.
func (c *Controller) Name() string { return "agent" }

// onNode is a controller of the node's GPUNode. A new spec wakes it.
func onNode(mgr ctrl.Manager, name, node string, options controller.Options) *builder.Builder {
	mine := predicate.NewPredicateFuncs(func(o client.Object) bool { return o.GetName() == node })
	options.MaxConcurrentReconciles = 1
	options.RateLimiter = workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](backoff, maxBackoff)
	return ctrl.NewControllerManagedBy(mgr).Named(name).
		For(&v1alpha1.GPUNode{}, builder.WithPredicates(mine, predicate.GenerationChangedPredicate{})).
		WithOptions(options)
}

// Register adds the controller to a manager. The spec wakes it, and the kubelet's allocations and another driver do;
// its own writes to the status do not.
func (c *Controller) Register(mgr ctrl.Manager) error {
	if err := c.metrics.register(registry.Registry); err != nil {
		return err
	}
	changes := make(chan event.GenericEvent)
	err := onNode(mgr, c.Name(), c.node, controller.Options{
		ReconciliationTimeout: reconcileTimeout,
		RecoverPanic:          new(false), // a reconcile that panics may have left the hardware half-way: start anew
	}).
		WatchesRawSource(source.Channel(changes, &handler.EnqueueRequestForObject{})).
		Complete(reconcile.AsReconciler(c.client, c))
	if err != nil {
		return fmt.Errorf("registering the agent: %w", err)
	}
	watch := manager.RunnableFunc(func(ctx context.Context) error { return c.watchNode(ctx, changes) })
	if err := mgr.Add(watch); err != nil {
		return fmt.Errorf("registering the agent's watch of the node: %w", err)
	}
	return nil
}

// Reconcile brings the GPUs of this node to the spec and reports what it observed.
func (c *Controller) Reconcile(ctx context.Context, node *v1alpha1.GPUNode) (reconcile.Result, error) {
	if !node.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil
	}
	done, err := c.lock.take(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	defer done()
	return c.reconcile(ctx, node)
}

func (c *Controller) reconcile(ctx context.Context, node *v1alpha1.GPUNode) (reconcile.Result, error) {
	if node.Spec.MIGConfigName != "" {
		return c.finish(ctx, node, report{aside: true})
	}
	work := applier{c.of(node)}
	before, err := work.observe(ctx)
	if err != nil {
		return c.finish(ctx, node, report{failed: err})
	}
	rebuilds, leave := rebuild(node, c.bootID, before.devices, c.clock.Now())
	if leave != nil && node.Spec.MIGActuator != v1alpha1.MIGActuatorMIGManager {
		return c.finish(ctx, node, report{observed: before, outcome: outcome{problem: leave}, rebuilds: rebuilds})
	}
	after, result, err := work.converge(ctx, node.Spec, before)
	if err == nil {
		result.nodes = c.ensureDeviceNodes(ctx, node.Spec)
	}
	r := report{observed: after, outcome: result, failed: err, rebuilds: rebuilds}
	undecided := c.consider(ctx, node, &r)
	finished, err := c.finish(ctx, node, r)
	return finished, errors.Join(err, undecided)
}

// finish gives back the hardware, reports and says when to look again.
func (c *Controller) finish(ctx context.Context, node *v1alpha1.GPUNode, r report) (reconcile.Result, error) {
	closed := c.hardware.Close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
	defer cancel()
	later, reported := c.report(ctx, node, r)
	c.health.set(errors.Join(r.failed, closed, reported))
	if _, waits := errors.AsType[*driver.Missing](r.failed); waits && errors.Join(closed, reported) == nil {
		return reconcile.Result{RequeueAfter: min(waitPoll, c.resync)}, nil
	}
	if err := errors.Join(r.failed, r.outcome.retry(), closed, reported); err != nil {
		return reconcile.Result{}, err
	}
	if r.outcome.reboot.now {
		return reconcile.Result{RequeueAfter: c.resync}, c.restart(ctx, node, r)
	}
	if later {
		return reconcile.Result{RequeueAfter: min(ackDelay, c.resync)}, nil
	}
	if r.outcome.waiting() || lingers(r.observed.devices) {
		return reconcile.Result{RequeueAfter: min(waitPoll, c.resync)}, nil
	}
	return reconcile.Result{RequeueAfter: c.resync}, nil
}

func log(ctx context.Context) logr.Logger { return logr.FromContextOrDiscard(ctx) }
