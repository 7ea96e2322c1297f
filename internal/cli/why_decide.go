// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresource "k8s.io/component-helpers/resource"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// inquiry is what is known of a pod, and of where it could run.
type inquiry struct {
	now       time.Time
	namespace string
	// pod is the one that is asked about or, if it is missing, as its workload would make it.
	pod     *corev1.Pod
	missing bool
	// workload is what makes the pod, such as "Deployment team/web", if that was asked about; wanted is how many pods it
	// is to have.
	workload  string
	wanted    int
	suspended bool   // a Job that is not to run
	done      bool   // a Job that has completed
	failed    string // why a Job has failed; empty: it has not
	refused   string // why no pod could be created, as the controller of the workload says
	quotas    []corev1.ResourceQuota
	nodes     []candidate // by name
	snapshot  cluster.Snapshot
	// blindNodes reports that labels, taints and memory of nodes are not known, blindPods that pods of other namespaces
	// are not.
	blindNodes, blindPods bool
	lacks                 []string
}

// candidate is a node with GPUs.
type candidate struct {
	*cluster.Node

	object *corev1.Node
	pods   []*corev1.Pod    // that have not ended
	offers map[string]int64 // of GPUs and instances, by resource
}

// cause is why a pod does not run, or that it does.
type cause string

// The causes. Those from causeNotOffered to causeNone are in the order in which a node is looked at, so that the last at
// which any node fails is the cause for the pod.
const (
	causeNoGPU         cause = "NoGPURequested"
	causeEnded         cause = "Ended"
	causeDeleted       cause = "BeingDeleted"
	causeSuspended     cause = "Suspended"
	causeQuota         cause = "QuotaExceeded"
	causeNotCreated    cause = "NotCreated"
	causeGated         cause = "SchedulingGated"
	causeRefused       cause = "RefusedByNode"
	causeStarting      cause = "Starting"
	causeRunning       cause = "Running"
	causeAwaitsServer  cause = "AwaitingMPSServer"
	causeUnknown       cause = "NotKnown"
	causeClaim         cause = "ResourceClaim"
	causeRenamed       cause = "Renamed"
	causeNoProfile     cause = "NoSuchProfile"
	causeNotYet        cause = "NotOfferedYet"
	causeUnhealthy     cause = "NotHealthy"
	causeTooMany       cause = "MoreThanANodeOffers"
	causeNotOffered    cause = "NotOffered"
	causeSelector      cause = "NodeSelector"
	causeTaint         cause = "Taint"
	causeUnschedulable cause = "Unschedulable"
	causeChange        cause = "ChangeUnderWay"
	causeInUse         cause = "InUse"
	causeOther         cause = "OtherResources"
	causeNone          cause = "NothingFound"
)

// answer is why a pod does not run, or what it has. Its JSON is what -o json prints.
type answer struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod,omitempty"`
	Workload  string `json:"workload,omitempty"`
	// Phase is that of the pod, or NotCreated.
	Phase string `json:"phase"`
	Cause cause  `json:"cause"`
	// Answer is one sentence, and what to do.
	Answer   string           `json:"answer"`
	Requests map[string]int64 `json:"requests,omitempty"`
	// Offers are the resources of GPUs that nodes offer.
	Offers []offer   `json:"offers,omitempty"`
	Nodes  []verdict `json:"nodes,omitempty"`
	// OnDemand is what policies with MIG layouts on demand report of pods that ask for the same.
	OnDemand []string `json:"onDemand,omitempty"`
	// Holders are who has shares on the nodes that would take the pod, by namespace.
	Holders []holding `json:"holders,omitempty"`
	Quotas  []quota   `json:"quotas,omitempty"`
	// Shares are those that a pod on a node has.
	Shares []share `json:"shares,omitempty"`
	// Limit is whether anything keeps pods of its node to their share of time-sliced memory.
	Limit     string   `json:"limit,omitempty"`
	Change    string   `json:"change,omitempty"`
	Scheduler string   `json:"scheduler,omitempty"`
	NotKnown  []string `json:"notKnown,omitempty"`
}

// offer is a resource with the nodes that offer it. Free is nil if that is not known.
type offer struct {
	Resource string `json:"resource"`
	Nodes    int    `json:"nodes"`
	Total    int64  `json:"total"`
	Free     *int64 `json:"free,omitempty"`
	most     int64  // on one node
}

// verdict is what keeps a pod off a node.
type verdict struct {
	Node    string     `json:"node"`
	Cause   cause      `json:"cause"`
	Message string     `json:"message"`
	Until   *time.Time `json:"until,omitempty"` // when the stage of a change must be over
}

// holding is how many shares the pods of a namespace have.
type holding struct {
	Namespace string   `json:"namespace"`
	Shares    int64    `json:"shares"`
	Pods      []string `json:"pods"`
}

// quota is what a ResourceQuota says of one of the resources.
type quota struct {
	Name     string `json:"name"`
	Resource string `json:"resource"`
	Used     int64  `json:"used"`
	Hard     int64  `json:"hard"`
}

func quantityOf(n int64) *resource.Quantity { return resource.NewQuantity(n, resource.DecimalSI) }

// whyOf decides why a pod does not run, or what it has.
func whyOf(q inquiry) answer {
	a := answer{Namespace: q.namespace, Workload: q.workload, Phase: "NotCreated", Requests: cluster.GPURequests(&q.pod.Spec), NotKnown: q.lacks}
	if !q.missing {
		a.Pod, a.Phase = q.pod.Name, cmp.Or(string(q.pod.Status.Phase), string(corev1.PodPending))
	}
	a.Quotas, a.Offers = q.quotasOf(a.Requests), q.offers()
	switch {
	case q.stopped(&a):
	case len(a.Requests) == 0 && len(q.pod.Spec.ResourceClaims) == 0:
		a.Cause, a.Answer = causeNoGPU, "It asks for no GPU: no container has a limit such as nvidia.com/gpu: 1."
	case q.missing:
		q.notCreated(&a)
	case q.pod.Spec.NodeName != "":
		q.placed(&a)
	default:
		q.pending(&a)
		for i := range q.snapshot.Policies {
			a.OnDemand = append(a.OnDemand, onDemandFor(&q.snapshot.Policies[i], q.namespace, a.Requests)...)
		}
	}
	return a
}

// stopped answers for what is not to run, or no more.
func (q *inquiry) stopped(a *answer) bool {
	switch phase := q.pod.Status.Phase; {
	case q.done:
		a.Cause, a.Answer = causeEnded, "The Job has completed."
	case q.missing && q.failed != "":
		a.Cause, a.Answer = causeEnded, fmt.Sprintf("The Job has failed, and makes no more pods: %s", q.failed)
	case q.suspended:
		a.Cause, a.Answer = causeSuspended, "The Job is suspended (spec.suspend), by you or by a queue such as Kueue, so it has no pods."
	case q.missing && q.wanted == 0:
		a.Cause, a.Answer = causeSuspended, "It is to have no pod: it is scaled to 0."
	case phase == corev1.PodFailed && strings.HasPrefix(q.pod.Status.Reason, "UnexpectedAdmissionError"):
		a.Cause = causeRefused
		a.Answer = fmt.Sprintf("The kubelet of node %s refused it: %s", q.pod.Spec.NodeName, q.pod.Status.Message)
		if p := q.policyOn(q.pod.Spec.NodeName); p != nil && p.Spec.Sharing.RefusesMoreThanOne() && asksForSeveral(a.Requests) {
			a.Answer = fmt.Sprintf("Node %s refused it, because a container may ask for one share of what policy %s shares. Ask for 1, or for GPUs that are not shared.",
				q.pod.Spec.NodeName, p.Name)
		}
	case cluster.Finished(q.pod):
		a.Cause, a.Answer = causeEnded, strings.TrimSpace(fmt.Sprintf("It has ended (%s) and holds no GPU any more. %s", phase, q.pod.Status.Message))
	case q.pod.DeletionTimestamp != nil && q.pod.Spec.NodeName == "":
		a.Cause, a.Answer = causeDeleted, "It is being deleted, and is on no node."
	default:
		return false
	}
	return true
}

func asksForSeveral(requests map[string]int64) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(requests)), func(n int64) bool { return n > 1 })
}

// quotasOf are what the quotas of the namespace say of some resources.
func (q *inquiry) quotasOf(requests map[string]int64) (all []quota) {
	for i := range q.quotas {
		for _, name := range slices.Sorted(maps.Keys(requests)) {
			key := corev1.ResourceName(corev1.DefaultResourceRequestsPrefix + name)
			if hard, limited := q.quotas[i].Status.Hard[key]; limited {
				used := q.quotas[i].Status.Used[key]
				all = append(all, quota{q.quotas[i].Name, name, used.Value(), hard.Value()})
			}
		}
	}
	return all
}

// notCreated answers for a pod that its workload has not made.
func (q *inquiry) notCreated(a *answer) {
	for _, quota := range a.Quotas {
		if asked := a.Requests[quota.Resource]; quota.Used+asked > quota.Hard {
			a.Cause = causeQuota
			a.Answer = fmt.Sprintf("ResourceQuota %s lets namespace %s have %d of %s, and %d are taken: a pod that asks for %d cannot be created. Delete pods that have "+
				"some, or ask an administrator for more.", quota.Name, q.namespace, quota.Hard, quota.Resource, quota.Used, asked)
			return
		}
	}
	a.Cause, a.Answer = causeNotCreated, fmt.Sprintf("%s has not created the pod yet.", q.workload)
	if q.refused != "" {
		a.Answer = fmt.Sprintf("%s cannot create the pod: %s", q.workload, q.refused)
	}
}

// pending answers for a pod that is on no node.
func (q *inquiry) pending(a *answer) {
	a.Scheduler = schedulerSays(q.pod)
	if gates := q.pod.Spec.SchedulingGates; len(gates) > 0 {
		var names []string
		for _, gate := range gates {
			names = append(names, gate.Name)
		}
		a.Cause = causeGated
		a.Answer = fmt.Sprintf("The scheduler does not look at it until scheduling gate %s is removed; ask who sets that, such as a queue.", format.List(names))
		return
	}
	if len(a.Requests) == 0 {
		a.Cause, a.Answer = causeClaim, "It asks for devices by ResourceClaims. The scheduler says: "+cmp.Or(a.Scheduler, "nothing yet")
		return
	}
	if len(q.nodes) == 0 && len(q.lacks) > 0 || q.unreported(a) {
		q.bySchedulerAlone(a)
		return
	}
	if missing := q.notOffered(a); missing {
		return
	}
	nearest := -1
	for i := range q.nodes {
		v := q.judge(&q.nodes[i], a)
		a.Nodes = append(a.Nodes, v)
		nearest = max(nearest, slices.Index(funnel, v.Cause))
	}
	a.Cause = funnel[nearest]
	q.sum(a)
}

// funnel are the causes in the order in which a node is looked at.
var funnel = []cause{causeNotOffered, causeSelector, causeTaint, causeUnschedulable, causeChange, causeInUse, causeOther, causeNone}

// schedulerSays is why the scheduler has found no node; empty: it has not looked, or has found one.
func schedulerSays(pod *corev1.Pod) string {
	if is := cluster.Scheduled(pod); is.Status == corev1.ConditionFalse {
		return is.Message
	}
	return ""
}

// bySchedulerAlone answers for a user who may read nothing of the nodes.
func (q *inquiry) bySchedulerAlone(a *answer) {
	names := slices.Sorted(maps.Keys(a.Requests))
	lacking := slices.ContainsFunc(names, func(name string) bool { return strings.Contains(a.Scheduler, "Insufficient "+name) })
	switch {
	case a.Scheduler == "":
		a.Cause, a.Answer = causeUnknown, "The scheduler has not looked at it yet."
	case strings.Contains(a.Scheduler, v1alpha1.TaintChanging):
		a.Cause, a.Answer = causeChange, "The GPU Sharing Operator changes a node that would take it. It starts once that is over, if a share is free then."
	case lacking:
		a.Cause, a.Answer = causeUnknown, fmt.Sprintf("No node has %s free: all are in use, or no node offers that. You may not read which.", resources(a.Requests))
	default:
		a.Cause, a.Answer = causeUnknown, "The scheduler found no node: "+a.Scheduler
	}
}

// unreported reports whether a node that the user may not read may offer what no other does: GPUNodes report what nodes
// offer that a policy governs.
func (q *inquiry) unreported(a *answer) bool {
	return q.blindNodes && slices.ContainsFunc(q.nodes, func(n candidate) bool { return n.GPU.Status.Rollout.PolicyName == "" }) &&
		slices.ContainsFunc(slices.Collect(maps.Keys(a.Requests)), func(name string) bool {
			return !slices.ContainsFunc(a.Offers, func(o offer) bool { return o.Resource == name && o.most >= a.Requests[name] })
		})
}

// offers sums up what nodes offer, and how much of that is free.
func (q *inquiry) offers() []offer {
	of := map[string]*offer{}
	for i := range q.nodes {
		n := &q.nodes[i]
		for name, total := range n.offers {
			o := of[name]
			if o == nil {
				o = &offer{Resource: name, Free: new(int64(0))}
				of[name] = o
			}
			o.Nodes, o.Total, o.most = o.Nodes+1, o.Total+total, max(o.most, total)
			*o.Free += max(total-q.used(n, name), 0)
		}
	}
	all := []offer{}
	for _, name := range slices.Sorted(maps.Keys(of)) {
		if q.blindPods {
			of[name].Free = nil
		}
		all = append(all, *of[name])
	}
	return all
}

// used is how many of a resource the pods on a node have asked for. Where not all pods may be read, it is what is known.
func (q *inquiry) used(n *candidate, name string) (used int64) {
	for _, pod := range n.pods {
		used += cluster.GPURequests(&pod.Spec)[name]
	}
	return used
}

// notOffered answers for a pod that asks for what no node offers, or for more than any does.
func (q *inquiry) notOffered(a *answer) bool {
	has := func(name string) *offer {
		if at := slices.IndexFunc(a.Offers, func(o offer) bool { return o.Resource == name }); at >= 0 {
			return &a.Offers[at]
		}
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(a.Requests)) {
		plain := strings.TrimSuffix(name, ".shared")
		renamed := plain
		if plain == name {
			renamed = name + ".shared"
		}
		switch offered, other := has(name), has(renamed); {
		case offered != nil && offered.most < a.Requests[name]:
			a.Cause = causeTooMany
			a.Answer = fmt.Sprintf("It asks for %d of %s, and no node offers more than %d. Ask for no more than that.", a.Requests[name], name, offered.most)
		case offered != nil:
			continue
		case q.broughtBy(a, name), q.unhealthy(a, name):
		case other != nil:
			a.Cause = causeRenamed
			a.Answer = fmt.Sprintf("No node offers %s: the shares are called %s, on %s. Ask for %s: %d instead.", name, renamed, count(other.Nodes, "node"), renamed,
				a.Requests[name])
		case strings.HasPrefix(name, "nvidia.com/mig-"):
			a.Cause = causeNoProfile
			a.Answer = fmt.Sprintf("No GPU has an instance of profile %s, because no MIG layout asks for one. %s", strings.TrimPrefix(plain, "nvidia.com/mig-"), instead(a.Offers))
		default:
			a.Cause, a.Answer = causeNotOffered, fmt.Sprintf("No node offers %s. %s", name, instead(a.Offers))
		}
		return true
	}
	return false
}

// instead says what can be asked for.
func instead(offers []offer) string {
	var names []string
	for _, o := range offers {
		names = append(names, o.Resource)
	}
	if len(names) == 0 {
		return "No node offers any GPU: ask an administrator to run `kubectl gpusharing doctor`."
	}
	one := ""
	if len(names) > 1 {
		one = "one of "
	}
	return fmt.Sprintf("Ask for %s%s, or ask an administrator for another policy.", one, format.List(names))
}

// broughtBy answers for a resource that a change brings which is under way, or which does not go on by itself.
func (q *inquiry) broughtBy(a *answer, name string) bool {
	var nodes, stuck []string
	says := ""
	for i := range q.nodes {
		n := &q.nodes[i]
		ready, _ := condition.Find(n.GPU.Status.Conditions, v1alpha1.ConditionReady)
		if n.Expected()[name] == 0 || ready.Status == metav1.ConditionTrue {
			continue
		}
		message, until := q.changeOn(n)
		a.Nodes = append(a.Nodes, verdict{Node: n.Name, Cause: causeNotYet, Message: message, Until: until})
		if stands(node.State(n.GPU.Status.Rollout.State), ready.Reason) {
			stuck, says = append(stuck, n.Name), message
			continue
		}
		nodes = append(nodes, n.Name)
	}
	switch {
	case len(nodes) > 0:
		a.Answer = fmt.Sprintf("No node offers %s yet: a change that is under way brings it to %s (%s). The pod starts by itself then.", name, count(len(nodes), "node"), format.List(nodes))
	case len(stuck) > 0:
		a.Answer = fmt.Sprintf("No node offers %s yet: a change is to bring it to %s (%s) and does not go on by itself: %s %s. Ask an administrator.", name, count(len(stuck), "node"),
			format.List(stuck), stuck[len(stuck)-1], says)
	default:
		return false
	}
	a.Cause = causeNotYet
	return true
}

// stands reports whether the change of a node does not go on by itself, or not for an hour.
func stands(state node.State, reason string) bool {
	return state == node.Failed || state == node.Unsupported || reason == v1alpha1.ReasonPaused || reason == v1alpha1.ReasonRolloutHalted
}

// unhealthy answers for a resource of which NVIDIA's device plugin offers nothing any more, though nodes have it.
func (q *inquiry) unhealthy(a *answer, name string) bool {
	var nodes []string
	for i := range q.nodes {
		if n := &q.nodes[i]; n.Unallocatable[name] > 0 && (n.Expected()[name] > 0 || n.GPU.Status.Rollout.PolicyName == "") {
			nodes = append(nodes, n.Name)
			a.Nodes = append(a.Nodes, verdict{Node: n.Name, Cause: causeUnhealthy, Message: fmt.Sprintf("has %d of %s, none of which NVIDIA's device plugin offers", n.Unallocatable[name], name)})
		}
	}
	if len(nodes) == 0 {
		return false
	}
	a.Cause = causeUnhealthy
	a.Answer = fmt.Sprintf("No node offers %s now: NVIDIA's device plugin on %s restarts, has stopped, or reports all as unhealthy. If this lasts, tell an administrator.", name,
		format.List(nodes))
	return true
}

// judge is the first thing that keeps a pod off a node.
func (q *inquiry) judge(n *candidate, a *answer) verdict {
	v := verdict{Node: n.Name}
	for _, check := range []struct {
		cause cause
		why   func() string
	}{
		{causeNotOffered, func() string { return offersLess(n, a.Requests) }},
		{causeSelector, func() string { return q.selectsOther(n) }},
		{causeTaint, func() string { return q.tainted(n) }},
		{causeUnschedulable, func() string { return q.unschedulable(n) }},
		{causeChange, func() string {
			if !q.changing(n) {
				return ""
			}
			message, until := q.changeOn(n)
			v.Until = until
			return message
		}},
		{causeInUse, func() string { return q.inUse(n, a) }},
		{causeOther, func() string { return q.lacksOther(n) }},
	} {
		if v.Message = check.why(); v.Message != "" {
			v.Cause = check.cause
			return v
		}
	}
	v.Cause, v.Message = causeNone, "would take it, as far as this can tell"
	return v
}

// offersLess says what a node offers that does not offer what is asked for.
func offersLess(n *candidate, requests map[string]int64) string {
	for name, asked := range requests {
		if n.offers[name] < asked {
			return "offers " + resources(n.offers)
		}
	}
	return ""
}

func (q *inquiry) selectsOther(n *candidate) string {
	if q.blindNodes {
		return ""
	}
	for _, name := range slices.Sorted(maps.Keys(q.pod.Spec.NodeSelector)) {
		if value := q.pod.Spec.NodeSelector[name]; n.object.Labels[name] != value {
			return fmt.Sprintf("does not have the label %s=%s of the pod's node selector", name, value)
		}
	}
	if matches, err := nodeaffinity.GetRequiredNodeAffinity(q.pod).Match(n.object); err != nil || !matches {
		return "does not match the pod's node affinity"
	}
	return ""
}

// keepsOff are the taints of a node that keep the pod off it.
func (q *inquiry) keepsOff(n *candidate) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(n.object.Spec.Taints), func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectPreferNoSchedule || clusterpolicy.Tolerates(q.pod.Spec.Tolerations, t)
	})
}

// ofNode begins the taints by which Kubernetes says what state a node is in.
const ofNode = "node.kubernetes.io/"

func isChange(t corev1.Taint) bool {
	return slices.Contains([]string{v1alpha1.TaintChanging, v1alpha1.TaintStartup, v1alpha1.TaintStartupAutoscaler, v1alpha1.TaintStartupReadiness}, t.Key)
}

func (q *inquiry) tainted(n *candidate) string {
	for _, t := range q.keepsOff(n) {
		if !isChange(t) && !strings.HasPrefix(t.Key, ofNode) {
			return fmt.Sprintf("has the taint %s, which the pod does not tolerate", t.ToString())
		}
	}
	return ""
}

func (q *inquiry) unschedulable(n *candidate) string {
	for _, t := range q.keepsOff(n) {
		if strings.HasPrefix(t.Key, ofNode) && t.Key != corev1.TaintNodeUnschedulable {
			return "is not ready (" + t.Key + ")"
		}
	}
	cordon := corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}
	if n.object.Spec.Unschedulable && !clusterpolicy.Tolerates(q.pod.Spec.Tolerations, cordon) {
		return "is cordoned"
	}
	return ""
}

// changing reports whether the operator keeps pods off a node.
func (q *inquiry) changing(n *candidate) bool {
	state := node.State(n.GPU.Status.Rollout.State)
	return slices.ContainsFunc(q.keepsOff(n), isChange) || !n.DevicesTaintedAt.IsZero() ||
		q.blindNodes && slices.Contains([]node.State{node.Draining, node.StoppingOperands, node.Idle, node.Applying}, state)
}

// changeOn says which change of a node is under way, and until when its stage must be over if that is known.
func (q *inquiry) changeOn(n *candidate) (message string, until *time.Time) {
	by := "is restored"
	ready, reported := condition.Find(n.GPU.Status.Conditions, v1alpha1.ConditionReady)
	if name := cmp.Or(n.GPU.Status.Rollout.PolicyName, n.GPU.Spec.PolicyName); name != "" {
		by = fmt.Sprintf("is changed by policy %s", name)
	}
	stage, end := q.stageOf(n, ready.Reason)
	if stage != "" {
		by, until = by+fmt.Sprintf(", and is %s until %s at the latest", stage, format.Clock(end)), &end
	}
	if reported && ready.Message != "" {
		by += fmt.Sprintf(" (%s: %s)", ready.Reason, ready.Message)
	}
	return by, until
}

// stageOf is the stage of a change, and when it must be over; empty if that is not known.
func (q *inquiry) stageOf(n *candidate, reason string) (stage string, until time.Time) {
	since := n.DevicesTaintedAt
	for _, t := range n.object.Spec.Taints {
		if t.Key == v1alpha1.TaintChanging && t.TimeAdded != nil {
			since = t.TimeAdded.Time
		}
	}
	asked := n.GPU.Spec.ChangeTime
	switch state := node.State(n.GPU.Status.Rollout.State); {
	case state == node.Draining && !since.IsZero():
		return "drained", since.Add(q.drainTimeout(n))
	case asked.IsZero():
		return "", time.Time{}
	case reason == v1alpha1.ReasonRebooting:
		return "rebooted", asked.Add(timing.RebootTimeout)
	case state == node.Applying && n.GPU.Spec.Reboot != nil:
		return "at work, or rebooted,", asked.Add(timing.RebootTimeout)
	case state == node.Applying:
		return "at work", asked.Add(timing.ApplyTimeout)
	}
	return "", time.Time{}
}

// drainTimeout is how long a node may be drained.
func (q *inquiry) drainTimeout(n *candidate) time.Duration {
	if p := q.policyOn(n.Name); p != nil {
		return node.DrainTimeout(p.Spec.Rollout.Drain)
	}
	return node.DrainTimeout(v1alpha1.Drain{})
}

// policyOn is the policy that governs a node; nil if none does, or it is not known.
func (q *inquiry) policyOn(name string) *v1alpha1.GPUSharingPolicy {
	at := slices.IndexFunc(q.nodes, func(n candidate) bool { return n.Name == name })
	if at < 0 {
		return nil
	}
	by := cmp.Or(q.nodes[at].GPU.Status.Rollout.PolicyName, q.nodes[at].GPU.Spec.PolicyName)
	if p := slices.IndexFunc(q.snapshot.Policies, named(by)); p >= 0 {
		return &q.snapshot.Policies[p]
	}
	return nil
}

// inUse says how much of what is asked for is free on a node, if that is not enough, and notes who has it.
func (q *inquiry) inUse(n *candidate, a *answer) string {
	for _, name := range slices.Sorted(maps.Keys(a.Requests)) {
		free := max(n.offers[name]-q.used(n, name), 0)
		if q.blindPods && strings.Contains(schedulerSays(q.pod), "Insufficient "+name) {
			free = 0
		}
		if free >= a.Requests[name] {
			continue
		}
		for _, pod := range n.pods {
			if has := cluster.GPURequests(&pod.Spec)[name]; has > 0 {
				a.hold(pod, has)
			}
		}
		return fmt.Sprintf("%d of %d %s free", free, n.offers[name], name)
	}
	return ""
}

// hold notes a pod that has shares.
func (a *answer) hold(pod *corev1.Pod, shares int64) {
	at := slices.IndexFunc(a.Holders, func(h holding) bool { return h.Namespace == pod.Namespace })
	if at < 0 {
		at = len(a.Holders)
		a.Holders = append(a.Holders, holding{Namespace: pod.Namespace})
	}
	a.Holders[at].Shares += shares
	a.Holders[at].Pods = append(a.Holders[at].Pods, pod.Name)
}

// lacksOther names what else the pod asks for that a node has too little of.
func (q *inquiry) lacksOther(n *candidate) string {
	if q.blindNodes {
		return ""
	}
	asked := podresource.PodRequests(q.pod, podresource.PodResourcesOptions{})
	var short []string
	for name, amount := range asked {
		if cluster.IsGPUResource(string(name)) {
			continue
		}
		free := n.object.Status.Allocatable[name].DeepCopy()
		for _, pod := range n.pods {
			free.Sub(podresource.PodRequests(pod, podresource.PodResourcesOptions{})[name])
		}
		if amount.Cmp(free) > 0 {
			short = append(short, fmt.Sprintf("%s: asks for %s, %s free", name, amount.String(), free.String()))
		}
	}
	slices.Sort(short)
	return strings.Join(short, "; ")
}

// sum answers from what keeps the pod off the nodes that come nearest.
func (q *inquiry) sum(a *answer) {
	var names []string
	last := verdict{}
	for _, v := range a.Nodes {
		if v.Cause == a.Cause {
			names, last = append(names, v.Node), v
		}
	}
	nodes, asked := count(len(names), "node"), resources(a.Requests)
	switch is := func(c cause) bool { return a.Cause == c }; {
	case is(causeSelector):
		a.Answer = fmt.Sprintf("None of the nodes that offer %s is one that the pod selects: %s %s. Change the node selector, or label a node.", asked, last.Node, last.Message)
	case is(causeTaint):
		a.Answer = fmt.Sprintf("Nodes that offer %s keep it off: %s %s. Add the toleration to the pod.", asked, last.Node, last.Message)
	case is(causeUnschedulable):
		a.Answer = fmt.Sprintf("%s would take it, but %s %s. Ask an administrator.", nodes, last.Node, last.Message)
	case is(causeChange):
		a.Answer = fmt.Sprintf("Node %s would take it, but %s. %s", last.Node, last.Message, q.afterwards(names, a.Requests))
	case is(causeInUse):
		a.Answer = fmt.Sprintf("All that the %s offer that would take it (%s) is in use%s. It starts by itself once that is free.", nodes, asked, byWhom(a.Holders))
		if len(names) == 1 {
			a.Answer = fmt.Sprintf("Node %s would take it, but has %s%s. It starts by itself once that is free.", last.Node, last.Message, byWhom(a.Holders))
		}
	case is(causeOther):
		a.Answer = fmt.Sprintf("%s would take it and has the GPUs free, but not the rest: %s: %s.", nodes, last.Node, last.Message)
	default:
		a.Answer = fmt.Sprintf("Node %s would take it, as far as GPUs go. The scheduler says: %s", format.List(names), cmp.Or(a.Scheduler, "nothing yet"))
	}
}

// afterwards says what becomes of a pod once the nodes have changed that would take it now.
func (q *inquiry) afterwards(nodes []string, requests map[string]int64) string {
	then, keeps := map[string]int64{}, false
	for i := range q.nodes {
		if !slices.Contains(nodes, q.nodes[i].Name) {
			continue
		}
		expected := q.nodes[i].Expected()
		keeps = keeps || !slices.ContainsFunc(slices.Collect(maps.Keys(requests)), func(name string) bool { return expected[name] < requests[name] })
		for name, count := range expected {
			put(then, name, max(then[name], count))
		}
	}
	if keeps || len(then) == 0 { // or it is not known
		return "The pod starts by itself after that, if a share is free."
	}
	return fmt.Sprintf("After that it does not: it will offer %s instead.", resources(then))
}

// mostFirst sorts who has shares: those that have most first.
func mostFirst(all []holding) []holding {
	return slices.SortedFunc(slices.Values(all), func(a, b holding) int {
		return cmp.Or(cmp.Compare(b.Shares, a.Shares), cmp.Compare(a.Namespace, b.Namespace))
	})
}

// byWhom says which namespaces have shares, those that have most first.
func byWhom(all []holding) string {
	var by []string
	for _, h := range mostFirst(all) {
		by = append(by, fmt.Sprintf("%s %d", h.Namespace, h.Shares))
	}
	if len(by) == 0 {
		return ""
	}
	return ": " + format.List(by)
}

// placed answers for a pod on a node.
func (q *inquiry) placed(a *answer) {
	on := q.pod.Spec.NodeName
	at := slices.IndexFunc(q.nodes, func(n candidate) bool { return n.Name == on })
	if at >= 0 {
		n := &q.nodes[at]
		a.Shares, a.Limit = sharesFor(n, q.pod), limitOf(&n.GPU)
		for _, b := range n.GPU.Status.Rollout.Blockers {
			if b.Kind == v1alpha1.BlockerKindPod && b.Namespace == q.namespace && b.Name == q.pod.Name {
				message, _ := q.changeOn(n)
				a.Change = fmt.Sprintf("Node %s %s. This pod blocks that: it %s", on, message, b.Handling)
				break
			}
		}
		for _, mps := range n.GPU.Status.MPS {
			for _, waiting := range mps.WaitingPods {
				if waiting.UID == string(q.pod.UID) && mps.User != nil {
					a.Cause = causeAwaitsServer
					a.Answer = fmt.Sprintf("Its CUDA programs wait: the MPS server of node %s serves user %d now, and they run as user %d. Run as the same user, or ask an "+
						"administrator for multiUser in the policy.", on, *mps.User, waiting.User)
					return
				}
			}
		}
	}
	if q.pod.Status.Phase != corev1.PodRunning {
		a.Cause, a.Answer = causeStarting, fmt.Sprintf("It has been placed on node %s and has not started: %s.", on, containersWait(q.pod))
		return
	}
	a.Cause = causeRunning
	switch len(a.Shares) {
	case 0:
		a.Answer = fmt.Sprintf("It runs on node %s with %s. Which GPU that is has not been reported.", on, resources(a.Requests))
	case 1:
		a.Answer = fmt.Sprintf("It runs on node %s with %s.", on, a.Shares[0].String())
	default:
		a.Answer = fmt.Sprintf("It runs on node %s and has %d GPUs or shares.", on, len(a.Shares))
	}
}

// containersWait is why containers of a pod do not run.
func containersWait(pod *corev1.Pod) string {
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if waits := s.State.Waiting; waits != nil && waits.Reason != "" {
			return format.Cut(strings.TrimSuffix(fmt.Sprintf("container %s: %s: %s", s.Name, waits.Reason, waits.Message), ": "), maxFromOthers)
		}
	}
	return "the kubelet has not reported why"
}

// maxFromOthers is how much of what other programs say is printed.
const maxFromOthers = 120

// share is a GPU, a MIG instance or a replica that a container has.
type share struct {
	Container string            `json:"container"`
	GPU       int               `json:"gpu"`
	UUID      string            `json:"uuid"`
	Product   string            `json:"product"`
	Sharing   v1alpha1.Strategy `json:"sharing,omitempty"` // empty: the container has the GPU alone
	Profile   string            `json:"profile,omitempty"` // of a MIG instance
	// MemoryMiB is what the container, with MPS each of its processes, or where the driver limits a time-sliced GPU its pod may take; 0: nothing
	// limits it, or it is not known. Threads are the
	// percentage of the GPU's that each process of a client of MPS may use.
	MemoryMiB int64 `json:"memoryMiB,omitempty"`
	Threads   int   `json:"threadsPercent,omitempty"`
	// Of is how many shares the GPU has; 0: not known.
	Of    int   `json:"of,omitempty"`
	Total int64 `json:"totalMemoryMiB,omitempty"`

	limited bool // the driver limits its pod
}

// sharesFor are what a pod has of the GPUs of its node.
func sharesFor(n *candidate, pod *corev1.Pod) (all []share) {
	devices := devicesOf(n.Node)
	replicas := replicasOn(n.Node, n.offers, devices)
	for _, d := range devices {
		for _, h := range d.Holders {
			if h.Namespace != pod.Namespace || h.Pod != pod.Name {
				continue
			}
			s := share{Container: h.Container, GPU: d.Index, UUID: d.UUID, Product: gpu.ProductLabel(d.Product), Total: d.MemoryMiB}
			at := slices.IndexFunc(d.State.Instances, func(i gpu.Instance) bool { return i.ID == h.Instance })
			switch often := replicas[d.UUID]; {
			case at >= 0:
				s.Sharing, s.Profile = v1alpha1.StrategyMIG, d.State.Instances[at].Profile
				profile, _ := d.Profile(s.Profile)
				s.MemoryMiB = profile.MemoryMiB
			case d.State.MPS != nil:
				s.Sharing, s.Of = v1alpha1.StrategyMPS, often
				s.MemoryMiB, s.Threads = d.State.MPS.PinnedMemoryLimitMiB, d.State.MPS.ActiveThreadPercentage
			case often > 1:
				s.Sharing, s.Of = v1alpha1.StrategyTimeSlicing, often
				if mib, limited := limitFor(&n.GPU, pod.Name, pod.Namespace, d.UUID); limited {
					s.MemoryMiB, s.limited = mib, true
				}
			default:
				s.MemoryMiB = d.MemoryMiB
			}
			all = append(all, s)
		}
	}
	return all
}

func (s *share) String() string {
	on := fmt.Sprintf("GPU %d (%s)", s.GPU, s.Product)
	one := "a share of " + on
	if s.Of > 0 {
		one = fmt.Sprintf("one of %d shares of %s", s.Of, on)
	}
	switch s.Sharing {
	case v1alpha1.StrategyMIG:
		return strings.TrimSuffix(fmt.Sprintf("MIG instance %s of %s, whose memory is its own: %s", s.Profile, on, gib(s.MemoryMiB)), ": ")
	case v1alpha1.StrategyMPS:
		limit := "nothing limits its memory"
		if s.MemoryMiB > 0 {
			limit = gib(s.MemoryMiB) + " of memory"
		}
		return fmt.Sprintf("%s by MPS: each of its processes gets up to %d%% of the threads, and %s", one, s.Threads, limit)
	case v1alpha1.StrategyTimeSlicing:
		return s.timeSliced(one)
	case v1alpha1.StrategyExclusive:
	}
	return strings.TrimSuffix(fmt.Sprintf("%s alone: %s", on, gib(s.MemoryMiB)), ": ")
}
