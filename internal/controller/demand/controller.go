// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package demand reports, for policies with MIG layouts on demand, which pods wait for instances and what would be
// changed for them. Its one request goes over all nodes:
//
//	gather (reads, from caches) → Review (pure)        → status.onDemand and the condition DemandMet of the policies, a metric
//	                                                  → mode Apply: status.demand of GPUNodes, which the rollout follows
//
// It changes nothing else, and remembers nothing from which a report follows. It runs only with the feature gate
// OnDemandMIG.
package demand

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

const (
	// FieldManager owns status.onDemand and the condition DemandMet of the policies, and status.demand of the GPUNodes.
	FieldManager = "gpusharing-controller-on-demand"
	// nodeNameField is the index of pods by their node, which the controller of policies makes.
	nodeNameField = "spec.nodeName"
)

// Request is the one request that the controller knows: look at everything.
type Request struct{}

// Controller reports what pods wait for.
type Controller struct {
	client  client.Client
	dra     DRAReader
	clock   clock.PassiveClock
	events  events.EventRecorder
	metrics *metrics
	memory  demand.Memory // of layouts that GPUs can have; it changes no decision

	attempts map[string]Attempts // by policy
}

// DRAReader reads what the objects of resource.k8s.io tell.
type DRAReader = func(context.Context) (*cluster.DRARead, error)

// New returns a controller.
func New(c client.Client, dra DRAReader, clk clock.PassiveClock, recorder events.EventRecorder) *Controller {
	return &Controller{client: c, dra: dra, clock: clk, events: recorder, metrics: newMetrics(), attempts: map[string]Attempts{}}
}

// Name of the controller.
func (*Controller) Name() string { return "demand" }

// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies,verbs=get;list;watch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpusharingpolicies/status,verbs=patch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes,verbs=get;list;watch
// +kubebuilder:rbac:groups=gpusharing.io,resources=gpunodes/status,verbs=patch
// +kubebuilder:rbac:groups="",resources=nodes;pods;namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconcile decides for each policy with GPUs on demand, and reports.
func (c *Controller) Reconcile(ctx context.Context, _ Request) (reconcile.Result, error) {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.client.List(ctx, policies); err != nil {
		return reconcile.Result{}, fmt.Errorf("reading policies: %w", err)
	}
	onDemand, known := map[string]bool{}, map[string]bool{"": true}
	for i := range policies.Items {
		known[policies.Items[i].Name] = true
		if Of(&policies.Items[i]) != nil {
			onDemand[policies.Items[i].Name] = true
		}
	}
	maps.DeleteFunc(c.attempts, func(name string, _ Attempts) bool { return !onDemand[name] })
	gpuNodes := &v1alpha1.GPUNodeList{}
	if err := c.client.List(ctx, gpuNodes, client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, fmt.Errorf("reading GPUNodes: %w", err)
	}
	s, waiting, err := c.gather(ctx, onDemand, gpuNodes)
	if err != nil {
		return reconcile.Result{}, err
	}
	reported, decided := map[string]*v1alpha1.OnDemandStatus{}, map[string][]v1alpha1.GPUDemand{}
	reviewed, errs := c.review(ctx, inTurn(policies.Items, onDemand), s, waiting)
	failed := len(errs) > 0
	after := nextOld(s.Now, waiting)
	for i := range policies.Items {
		p := &policies.Items[i]
		of, is := reviewed[p.Name]
		if onDemand[p.Name] && !is {
			continue
		}
		maps.Copy(decided, of.Decided)
		if in := of.Next.Sub(s.Now); in > 0 && (after == 0 || in < after) {
			after = in
		}
		reported[p.Name] = of.Status
		errs = append(errs, c.report(ctx, p, of.Status, of.Condition))
	}
	for i := range gpuNodes.Items {
		if n := &gpuNodes.Items[i]; !known[n.Spec.PolicyName] {
			decided[n.Name] = n.Status.Demand // until the node is released, or has another policy, which may let it have the same
		}
	}
	if !failed {
		errs = append(errs, c.record(ctx, gpuNodes, decided, waiting, policies.Items))
	}
	c.metrics.set(reported)
	return reconcile.Result{RequeueAfter: after}, errors.Join(errs...)
}

// nextOld is when the next of some pods goes before younger ones, whatever else happens; 0: never.
func nextOld(now time.Time, pods []*corev1.Pod) (in time.Duration) {
	for _, pod := range pods {
		if d := waitsSince(pod).Add(demand.Aged).Sub(now); d > 0 && (in == 0 || d < in) {
			in = d
		}
	}
	return in
}

// record writes what was decided for GPUs into the status of their GPUNodes, and removes it where nothing was. The pods for which it was decided are
// told, and the policies for which an autoscaler may act at the same time.
func (c *Controller) record(
	ctx context.Context, nodes *v1alpha1.GPUNodeList, decided map[string][]v1alpha1.GPUDemand, waiting []*corev1.Pod, policies []v1alpha1.GPUSharingPolicy,
) error {
	var errs []error
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if equality.Semantic.DeepEqual(n.Status.Demand, decided[n.Name]) {
			continue
		}
		want := ac.GPUNode(n.Name).WithUID(n.UID)
		if entries := decided[n.Name]; len(entries) > 0 {
			status, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](v1alpha1.GPUNodeStatus{Demand: entries})
			if err != nil {
				return err
			}
			want.WithStatus(status)
		}
		switch err := c.client.Status().Apply(ctx, want, client.FieldOwner(FieldManager), client.ForceOwnership); {
		case err == nil:
			c.announce(n, decided[n.Name], waiting, policies)
		case !apierrors.IsNotFound(err) && !apierrors.IsConflict(err):
			errs = append(errs, fmt.Errorf("recording MIG instances on demand of GPUNode %s: %w", n.Name, err))
		}
	}
	return errors.Join(errs...)
}

// announce tells pods which GPUs of a node are to change for them, and the policy which node group may be scaled up for the same pod.
func (c *Controller) announce(n *v1alpha1.GPUNode, decided []v1alpha1.GPUDemand, waiting []*corev1.Pod, policies []v1alpha1.GPUSharingPolicy) {
	for _, e := range decided {
		if slices.ContainsFunc(n.Status.Demand, func(o v1alpha1.GPUDemand) bool {
			return o.UUID == e.UUID && o.FirstPod == e.FirstPod && o.SinceTime.Equal(&e.SinceTime)
		}) {
			continue
		}
		pod := slices.IndexFunc(waiting, func(p *corev1.Pod) bool { return p.Namespace+"/"+p.Name == e.FirstPod })
		gpu := slices.IndexFunc(n.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return d.UUID == e.UUID })
		if pod < 0 || gpu < 0 {
			continue
		}
		note := fmt.Sprintf("Repartitioning GPU %d of node %s for %s", n.Status.Devices[gpu].Index, n.Name,
			strings.Join(slices.Sorted(maps.Keys(instancesOf(waiting[pod]))), ", "))
		c.events.Eventf(waiting[pod], n, corev1.EventTypeNormal, v1alpha1.ReasonRepartitioning, "Repartition", "%s", format.Message(note))
		by := slices.IndexFunc(policies, func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == n.Spec.PolicyName })
		if by < 0 {
			continue
		}
		if group := racing(&policies[by], waiting[pod]); group != "" {
			note = fmt.Sprintf("GPU %d of node %s is repartitioned for pod %s, and %s may be scaled up for it too", n.Status.Devices[gpu].Index, n.Name, e.FirstPod, group)
			c.events.Eventf(&policies[by], waiting[pod], corev1.EventTypeWarning, v1alpha1.ReasonAutoscalerRaces, "Repartition", "%s", format.Message(note))
		}
	}
}

// racing is a node group of a policy of which a new node would have what a pod asks for; empty: there is none. Cluster Autoscaler takes a node of the group
// as it is now for what a new one will be.
func racing(p *v1alpha1.GPUSharingPolicy, pod *corev1.Pod) string {
	for _, g := range p.Status.NodeGroups {
		has := func(resources []v1alpha1.NodeResource) bool {
			for name, count := range instancesOf(pod) {
				if !slices.ContainsFunc(resources, func(r v1alpha1.NodeResource) bool { return r.Name == name && r.Count >= count }) {
					return false
				}
			}
			return true
		}
		if has(g.Resources) || g.Kind != v1alpha1.NodeGroupNodePool && has(g.Advertised) {
			return fmt.Sprintf("%s %s", g.Kind, g.Name)
		}
	}
	return ""
}

// Withdraw removes from the policies and GPUNodes, which it reads from a reader, what the controller has reported.
func (c *Controller) Withdraw(ctx context.Context, from client.Reader) error {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := from.List(ctx, policies); err != nil {
		return fmt.Errorf("reading policies: %w", err)
	}
	var errs []error
	for i := range policies.Items {
		errs = append(errs, c.report(ctx, &policies.Items[i], nil, metav1.Condition{}))
	}
	nodes := &v1alpha1.GPUNodeList{}
	if err := from.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading GPUNodes: %w", err)
	}
	return errors.Join(append(errs, c.record(ctx, nodes, nil, nil, nil))...)
}

// gather reads the nodes that policies with GPUs on demand govern, with their pods, and the pods that wait. What it
// returns is shared with the cache and must not be changed.
func (c *Controller) gather(ctx context.Context, onDemand map[string]bool, gpuNodes *v1alpha1.GPUNodeList) (*cluster.Snapshot, []*corev1.Pod, error) {
	s := &cluster.Snapshot{Now: c.clock.Now()}
	if len(onDemand) == 0 {
		return s, nil, nil
	}
	nodes := &corev1.NodeList{}
	if err := c.client.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, nil, fmt.Errorf("reading nodes: %w", err)
	}
	governed := map[string]*v1alpha1.GPUNode{}
	for i := range gpuNodes.Items {
		if n := &gpuNodes.Items[i]; onDemand[n.Spec.PolicyName] {
			governed[n.Name] = n
		}
	}
	s.AddNodes(nodes.Items, governed)
	programs := &cluster.Programs{}
	for i := range s.Nodes {
		pods, err := c.podsOn(ctx, s.Nodes[i].Name)
		if err != nil {
			return nil, nil, err
		}
		for j := range pods {
			s.Nodes[i].AddPod(&pods[j], programs)
		}
	}
	pods, err := c.podsOn(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	read, err := c.dra(ctx)
	if err != nil {
		return nil, nil, err
	}
	read.AddTo(s)
	var waiting []*corev1.Pod
	chosen := s.NodesByName()
	for i := range pods {
		n := chosen[pods[i].Status.NominatedNodeName]
		switch {
		case Waits(&pods[i]):
			waiting = append(waiting, &pods[i])
		case n != nil && cluster.Waits(&pods[i]):
			n.AddPod(&pods[i], programs) // it will be bound whatever taint comes (NominatedNodeNameForExpectation), or when those are gone that it preempts
		}
	}
	return s, waiting, nil
}

func (c *Controller) podsOn(ctx context.Context, node string) ([]corev1.Pod, error) {
	pods := &corev1.PodList{}
	if err := c.client.List(ctx, pods, client.MatchingFields{nodeNameField: node}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading the pods on node %q: %w", node, err)
	}
	return pods.Items, nil
}

// inTurn are the policies with GPUs on demand as pods are given to them: those that make instances before those that advise, by name.
func inTurn(policies []v1alpha1.GPUSharingPolicy, onDemand map[string]bool) (list []*v1alpha1.GPUSharingPolicy) {
	for i := range policies {
		if onDemand[policies[i].Name] {
			list = append(list, &policies[i])
		}
	}
	advises := func(p *v1alpha1.GPUSharingPolicy) string { return strconv.FormatBool(!policy.Applies(p)) + p.Name }
	slices.SortFunc(list, func(a, b *v1alpha1.GPUSharingPolicy) int { return strings.Compare(advises(a), advises(b)) })
	return list
}

// review decides for policies, for each about the pods of the namespaces that it selects.
func (c *Controller) review(
	ctx context.Context, policies []*v1alpha1.GPUSharingPolicy, s *cluster.Snapshot, waiting []*corev1.Pod,
) (reviewed map[string]Reviewed, errs []error) {
	var asked []Asked
	for _, p := range policies {
		pods, err := c.in(ctx, Of(p).NamespaceSelector, waiting)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		asked = append(asked, Asked{p, pods, c.attempts[p.Name]})
	}
	reviewed = Review(&c.memory, s, asked...)
	for name, of := range reviewed {
		c.attempts[name] = of.Attempts
	}
	return reviewed, errs
}

// in are the pods of the namespaces that a policy selects; nil: of all.
func (c *Controller) in(ctx context.Context, of *v1alpha1.NamespaceSelector, pods []*corev1.Pod) ([]*corev1.Pod, error) {
	if of == nil || len(pods) == 0 {
		return pods, nil
	}
	namespaces := namespaceList()
	if err := c.client.List(ctx, namespaces, client.MatchingLabelsSelector{Selector: policy.SelectorOf((*v1alpha1.NodeSelector)(of))}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading namespaces: %w", err)
	}
	selected := map[string]bool{}
	for i := range namespaces.Items {
		selected[namespaces.Items[i].Name] = true
	}
	return slices.DeleteFunc(slices.Clone(pods), func(pod *corev1.Pod) bool { return !selected[pod.Namespace] }), nil
}

// report applies status.onDemand and the condition DemandMet of a policy, and nothing else of its status; no status and
// no condition: it removes them.
func (c *Controller) report(ctx context.Context, p *v1alpha1.GPUSharingPolicy, status *v1alpha1.OnDemandStatus, is metav1.Condition) error {
	var was, own []metav1.Condition
	if reported, found := condition.Find(p.Status.Conditions, v1alpha1.ConditionDemandMet); found {
		was = append(was, reported)
	}
	if is.Type != "" {
		is.ObservedGeneration = p.Generation
		own = condition.Set(was, is, c.clock.Now())
	}
	if equality.Semantic.DeepEqual(was, own) && equality.Semantic.DeepEqual(p.Status.OnDemand, status) {
		return nil
	}
	want := ac.GPUSharingPolicy(p.Name)
	if status != nil || len(own) > 0 {
		of, err := ssa.Configuration[ac.GPUSharingPolicyStatusApplyConfiguration](v1alpha1.GPUSharingPolicyStatus{OnDemand: status, Conditions: own})
		if err != nil {
			return err
		}
		want.WithStatus(of)
	}
	_, err := ssa.ApplyStatus(ctx, ssa.Owner{Client: c.client, Name: FieldManager}, p, want, ac.ExtractGPUSharingPolicyStatus)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("reporting on policy %s: %w", p.Name, err)
	}
	return nil
}
