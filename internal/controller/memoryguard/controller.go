// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package memoryguard reports, for policies with a memory guard, the containers that agents find over their share on
// GPUs that are almost full, and evicts their pods where the policy says so. Its one request goes over all nodes:
//
//	GPUNode.status.memoryPressure → memoryguard.DecideAll (pure) → record, evict → Events, metrics, the condition MemoryPressure
//
// The record in GPUNode.status.memoryEvictions comes before the eviction, so that no restart and no lost answer makes
// the controller evict more than the rates allow. An eviction that a PodDisruptionBudget refuses leaves no record.
package memoryguard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/memoryguard"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/drain"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// FieldManager owns status.memoryEvictions of the GPUNodes and the condition MemoryPressure of the policies.
const FieldManager = "gpusharing-controller-memory-guard"

// refusedAgain is when an eviction is asked for again that a PodDisruptionBudget refused: nothing tells when it allows
// it.
const refusedAgain = 30 * time.Second

// pressureAgain is when a report is looked at again, since nothing tells that its pod has gone where the agent has gone
// too.
const pressureAgain = 2 * time.Minute

// silentFor is how long an agent may take to report that it measures: it reports a new spec within seconds.
const silentFor = 2 * time.Minute

// Request is the one request that the controller knows: look at everything.
type Request struct{}

// Options are what a controller needs beside a client.
type Options struct {
	Reader client.Reader // past the cache
	Clock  clock.PassiveClock
	Events events.EventRecorder
}

// Controller guards the memory of time-sliced GPUs.
type Controller struct {
	client  client.Client
	reader  client.Reader
	clock   clock.PassiveClock
	events  events.EventRecorder
	metrics *metrics
	// announced are the reports that Events were made of, as long as they last. A controller that begins to lead
	// announces them once more.
	announced map[key]bool
	// refused is why the API server refused to evict a pod, and when to ask again.
	refused map[key]memoryguard.Refusal
	// left is since when the pods of reports are known to be gone.
	left map[key]time.Time
	// silent is since when the agents of nodes have not reported that they measure.
	silent map[string]time.Time
}

// key is one stretch of pressure on a GPU by one container.
type key struct {
	node, gpu, namespace, pod, container string
	since                                int64
}

// New returns a controller.
func New(c client.Client, o Options) *Controller {
	return &Controller{
		client: c, reader: o.Reader, clock: o.Clock, events: o.Events, metrics: newMetrics(),
		announced: map[key]bool{}, refused: map[key]memoryguard.Refusal{}, left: map[key]time.Time{}, silent: map[string]time.Time{},
	}
}

// Name of the controller.
func (*Controller) Name() string { return "memoryguard" }

// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies,verbs=get;list;watch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies/status,verbs=patch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes,verbs=get;list;watch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=pods,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=pods/eviction,verbs=create
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// reconciliation is one look at everything.
type reconciliation struct {
	*Controller

	now   time.Time
	nodes []v1alpha1.GPUNode
	lasts map[key]bool
	quiet map[string]bool // the nodes that are in silent still
	after time.Duration
}

// finding is a report that counts, with what becomes of its pod.
type finding struct{ text, outcome string }

// Reconcile decides on what agents report, evicts, and reports on the policies.
func (c *Controller) Reconcile(ctx context.Context, _ Request) (reconcile.Result, error) {
	policies, nodes := &v1alpha1.GPUSharingPolicyList{}, &v1alpha1.GPUNodeList{}
	if err := c.client.List(ctx, policies); err != nil {
		return reconcile.Result{}, fmt.Errorf("reading policies: %w", err)
	}
	if err := c.client.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, fmt.Errorf("reading GPUNodes: %w", err)
	}
	slices.SortFunc(nodes.Items, func(a, b v1alpha1.GPUNode) int { return cmp.Compare(a.Name, b.Name) })
	r := &reconciliation{Controller: c, now: c.clock.Now(), nodes: nodes.Items, lasts: map[key]bool{}, quiet: map[string]bool{}}
	var errs []error
	found := map[string]int{}
	for i := range policies.Items {
		policy := &policies.Items[i]
		var findings []finding
		var unmeasured []string
		under := 0
		if guard := guardOf(policy); guard != nil {
			for j := range nodes.Items {
				if nodes.Items[j].Spec.PolicyName == policy.Name {
					more, gpus, err := r.node(ctx, policy, *guard, &nodes.Items[j])
					findings, errs = append(findings, more...), append(errs, err)
					under += gpus
					if r.unmeasured(&nodes.Items[j]) {
						unmeasured = append(unmeasured, nodes.Items[j].Name)
					}
				}
			}
			found[policy.Name] = under
		}
		errs = append(errs, r.report(ctx, policy, findings, unmeasured))
	}
	c.metrics.found(found)
	r.forget()
	return reconcile.Result{RequeueAfter: r.after}, errors.Join(errs...)
}

func guardOf(p *v1alpha1.GPUSharingPolicy) *v1alpha1.TimeSlicedMemory {
	if p.Spec.Sharing.TimeSlicing == nil || !p.Spec.Sharing.TimeSlicing.Memory.Guarded() || !p.DeletionTimestamp.IsZero() {
		return nil
	}
	return p.Spec.Sharing.TimeSlicing.Memory
}

// unmeasured reports whether the agent of a node has not reported for silentFor that it measures for the guard.
func (r *reconciliation) unmeasured(node *v1alpha1.GPUNode) bool {
	if measured(node) {
		return false
	}
	r.quiet[node.Name] = true
	since, known := r.silent[node.Name]
	if !known {
		since = r.now
		r.silent[node.Name] = since
	}
	left := since.Add(silentFor).Sub(r.now)
	r.lookAgain(left)
	return left <= 0
}

// node goes over what the agent of a node reports, and counts the GPUs of which it counts.
func (r *reconciliation) node(
	ctx context.Context, policy *v1alpha1.GPUSharingPolicy, guard v1alpha1.TimeSlicedMemory, node *v1alpha1.GPUNode,
) (findings []finding, gpus int, err error) {
	var errs []error
	for _, reports := range memoryguard.ByGPU(node.Status.MemoryPressure) {
		more, err := r.gpu(ctx, incident{policy: policy, guard: guard, node: node, key: key{gpu: reports[0].DeviceUUID}})
		findings, errs = append(findings, more...), append(errs, err)
		if len(more) > 0 {
			gpus++
		}
	}
	return findings, gpus, errors.Join(errs...)
}

// gpu announces reports of one GPU that are new, and evicts a pod if it is time: by what the API server has.
func (r *reconciliation) gpu(ctx context.Context, of incident) (findings []finding, err error) {
	incidents, err := r.incidents(ctx, r.client, of)
	decisions := memoryguard.DecideAll(r.cases(incidents))
	if slices.ContainsFunc(decisions, func(d memoryguard.Decision) bool { return d.Evict }) {
		decisions = make([]memoryguard.Decision, len(incidents))
		var live []incident
		if live, err = r.live(ctx, of); err == nil {
			incidents, decisions = live, memoryguard.DecideAll(r.cases(live))
		}
	}
	for i, of := range incidents {
		if of.pod == nil || of.pod.Spec.NodeName != of.node.Name {
			continue // it has gone, or the agent is not to be believed
		}
		r.lookAgain(pressureAgain)
		r.lookAgain(decisions[i].After)
		text, outcome := memoryguard.Describe(of.node.Name, of.pressure), decisions[i].Why
		if !r.announced[of.key] {
			r.announced[of.key] = true
			r.announce(of, corev1.EventTypeWarning, v1alpha1.EventMemoryPressure, "Report", text)
		}
		if decisions[i].Evict {
			outcome, err = r.evict(ctx, of)
			if i+1 < len(incidents) {
				r.lookAgain(time.Second) // where it is refused, it is the next one's turn
			}
		}
		outcome = strings.TrimPrefix(outcome, fmt.Sprintf("pod %s/%s is ", of.pod.Namespace, of.pod.Name)) // of which Describe tells
		findings = append(findings, finding{text, outcome})
	}
	return findings, err
}

// incident is a report of an agent with what it is about.
type incident struct {
	key

	policy   *v1alpha1.GPUSharingPolicy
	guard    v1alpha1.TimeSlicedMemory
	node     *v1alpha1.GPUNode
	pressure v1alpha1.MemoryPressure
	pod      *corev1.Pod // nil: it is gone
}

// incidents are all of the GPU of one.
func (r *reconciliation) incidents(ctx context.Context, from client.Reader, of incident) (all []incident, err error) {
	for _, p := range of.node.Status.MemoryPressure {
		if p.DeviceUUID != of.gpu || !memoryguard.Exceeds(of.guard, p) || !memoryguard.Meant(of.guard, of.policy.Spec.Sharing.TimeSlicing.Replicas, p) {
			continue // of a former guard: the agent reports anew
		}
		of.pressure, of.key = p, keyOf(of.node.Name, p)
		r.lasts[of.key] = true
		if of.pod, err = r.pod(ctx, from, p); err != nil {
			return nil, err
		}
		all = append(all, of)
	}
	return all, nil
}

func keyOf(node string, p v1alpha1.MemoryPressure) key {
	return key{node, p.DeviceUUID, p.Container.Namespace, p.Container.PodName, p.Container.ContainerName, p.SinceTime.Unix()}
}

// cases are what to decide on of incidents. Since when pods are gone is noted.
func (r *reconciliation) cases(incidents []incident) (all []memoryguard.Case) {
	for _, of := range incidents {
		c := memoryguard.Case{
			Memory: of.guard, Replicas: of.policy.Spec.Sharing.TimeSlicing.Replicas, Node: of.node.Name, Pressure: of.pressure, Pod: facts(of.pod),
			Evicted: of.node.Status.MemoryEvictions, Elsewhere: r.elsewhere(of), Refused: r.refused[of.key], Now: r.now,
		}
		if !c.Gone() {
			delete(r.left, of.key)
		} else if r.left[of.key].IsZero() {
			r.left[of.key] = r.now
		}
		c.Left = r.left[of.key]
		all = append(all, c)
	}
	return all
}

// elsewhere are the evictions of the pod from other nodes: one of a StatefulSet starts again with its name, on any
// node.
func (r *reconciliation) elsewhere(of incident) []v1alpha1.MemoryEviction {
	var found []v1alpha1.MemoryEviction
	for i := range r.nodes {
		for _, e := range r.nodes[i].Status.MemoryEvictions {
			if r.nodes[i].Name != of.node.Name && e.Namespace == of.namespace && e.PodName == of.key.pod {
				found = append(found, e)
			}
		}
	}
	return found
}

// evict records an eviction, and asks for it.
func (r *reconciliation) evict(ctx context.Context, live incident) (outcome string, err error) {
	before := memoryguard.Counting(live.node.Status.MemoryEvictions, r.now)
	err = r.record(ctx, live.node, memoryguard.Recorded(before, live.pressure, r.now), live.node.ResourceVersion)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		r.lookAgain(time.Second)
		return "the GPUNode has changed meanwhile", nil
	}
	if err != nil {
		return "", err
	}
	result, err := drain.Evict(ctx, r.client, client.ObjectKeyFromObject(live.pod), live.pod.UID)
	text := memoryguard.Describe(live.node.Name, live.pressure)
	switch {
	case apierrors.IsForbidden(err):
		result.Message = err.Error()
		r.refuse(live, result.Message)
	case err != nil:
		return "", err // it may have been carried out, so the record stays
	case result.Outcome == drain.Evicting:
		delete(r.refused, live.key)
		r.metrics.evicted(live.policy.Name)
		log.FromContext(ctx).Info("Evicting a pod for the memory guard", "node", live.node.Name, "policy", live.policy.Name,
			"namespace", live.pod.Namespace, "pod", live.pod.Name, "gpu", live.gpu)
		r.announce(live, corev1.EventTypeWarning, v1alpha1.EventEvicting, "Evict", "Evicting the pod. "+text)
		return "evicting the pod", nil
	case result.Outcome == drain.Blocked:
		r.refuse(live, result.Message)
	}
	return result.Message, client.IgnoreNotFound(r.record(ctx, live.node, before, ""))
}

// refuse notes an eviction that the API server refused for now, and announces it if it is news.
func (r *reconciliation) refuse(of incident, message string) {
	r.metrics.refused(of.policy.Name)
	if r.refused[of.key].Message != message {
		r.announce(of, corev1.EventTypeWarning, v1alpha1.EventEvictionBlocked, "Evict", message)
	}
	r.refused[of.key] = memoryguard.Refusal{Message: message, Until: r.now.Add(refusedAgain)}
	r.lookAgain(refusedAgain)
}

// live are the incidents of the GPU of one as the API server has them.
func (r *reconciliation) live(ctx context.Context, of incident) ([]incident, error) {
	node := &v1alpha1.GPUNode{}
	err := r.reader.Get(ctx, client.ObjectKey{Name: of.node.Name}, node)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading GPUNode %s: %w", of.node.Name, err)
	}
	if node.UID != of.node.UID || node.Spec.PolicyName != of.policy.Name {
		return nil, nil
	}
	of.node = node
	return r.incidents(ctx, r.reader, of)
}

// pod reads the pod of a report; nil if there is none.
func (r *reconciliation) pod(ctx context.Context, from client.Reader, of v1alpha1.MemoryPressure) (*corev1.Pod, error) {
	name := types.NamespacedName{Namespace: of.Container.Namespace, Name: of.Container.PodName}
	pod := &corev1.Pod{}
	switch err := from.Get(ctx, name, pod); {
	case apierrors.IsNotFound(err):
		return nil, nil //nolint:nilnil // a pod that is gone is no error
	case err != nil:
		return nil, fmt.Errorf("reading pod %s: %w", name, err)
	}
	return pod, nil
}

func facts(pod *corev1.Pod) memoryguard.Pod {
	if pod == nil {
		return memoryguard.Pod{}
	}
	protected, _ := drain.NeverEvicted(pod)
	is := memoryguard.Pod{
		Found: true, Node: pod.Spec.NodeName, Created: pod.CreationTimestamp.Time, RequestsGPU: cluster.RequestsGPU(&pod.Spec),
		Ends: pod.DeletionTimestamp != nil || cluster.Finished(pod), Protected: protected,
	}
	if pod.DeletionTimestamp != nil && !cluster.Finished(pod) {
		is.EndsBy = pod.DeletionTimestamp.Time
	}
	return is
}

// record writes the evictions that count. With a version it is refused if the GPUNode has changed since.
func (r *reconciliation) record(ctx context.Context, node *v1alpha1.GPUNode, evictions []v1alpha1.MemoryEviction, version string) error {
	want := ac.GPUNode(node.Name).WithUID(node.UID)
	if version != "" {
		want.WithResourceVersion(version)
	}
	if len(evictions) > 0 {
		status, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](v1alpha1.GPUNodeStatus{MemoryEvictions: evictions})
		if err != nil {
			return err
		}
		want.WithStatus(status)
	}
	err := r.client.Status().Apply(ctx, want, client.FieldOwner(FieldManager), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("recording evictions on GPUNode %s: %w", node.Name, err)
	}
	return nil
}

func (r *reconciliation) lookAgain(after time.Duration) {
	if after > 0 && (r.after == 0 || after < r.after) {
		r.after = after
	}
}

// forget drops what was remembered of reports that are no more.
func (r *reconciliation) forget() {
	ended := func(k key) bool { return !r.lasts[k] }
	maps.DeleteFunc(r.announced, func(k key, _ bool) bool { return ended(k) })
	maps.DeleteFunc(r.refused, func(k key, _ memoryguard.Refusal) bool { return ended(k) })
	maps.DeleteFunc(r.left, func(k key, _ time.Time) bool { return ended(k) })
	for node := range r.silent {
		if !r.quiet[node] {
			delete(r.silent, node)
		}
	}
}

const (
	// gathering is how long events are collected before a reconcile, which goes over all GPUNodes.
	gathering        = time.Second
	reconcileTimeout = time.Minute
	minBackoff       = 500 * time.Millisecond
	maxBackoff       = time.Minute
)

// Register makes the controller run in a manager.
func (c *Controller) Register(mgr manager.Manager) error {
	c.metrics = shared()
	return builder.TypedControllerManagedBy[Request](mgr).
		Named(c.Name()).
		WithOptions(controller.TypedOptions[Request]{
			MaxConcurrentReconciles: 1, ReconciliationTimeout: reconcileTimeout,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[Request](minBackoff, maxBackoff),
		}).
		Watches(&v1alpha1.GPUSharingPolicy{}, wake(), builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&v1alpha1.GPUNode{}, wake(), builder.WithPredicates(predicate.Funcs{UpdateFunc: differs})).
		Complete(c)
}

// differs reports whether what a reconcile reads of a GPUNode has changed.
func differs(e event.UpdateEvent) bool {
	was, areNodes := e.ObjectOld.(*v1alpha1.GPUNode)
	is, all := e.ObjectNew.(*v1alpha1.GPUNode)
	return !areNodes || !all || was.Spec.PolicyName != is.Spec.PolicyName || measured(was) != measured(is) ||
		!equality.Semantic.DeepEqual(was.Status.MemoryPressure, is.Status.MemoryPressure)
}

// measured reports whether a node has no guard, or its agent reports that it measures.
func measured(n *v1alpha1.GPUNode) bool {
	return !n.Spec.Memory.Guarded() || condition.IsTrueAt(n.Status.Conditions, v1alpha1.ConditionMemoryGuarded, n.Generation)
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
