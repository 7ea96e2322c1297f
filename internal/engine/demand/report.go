// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// idleTimeUnknown is what is known of how long instances have been idle.
const idleTimeUnknown = "Unknown"

// reasons are the words of the API.
var reasons = map[Reason]string{
	NotAllowed: v1alpha1.ReasonProfileNotAllowed, Reserve: v1alpha1.ReasonReserveKept, Changing: v1alpha1.ReasonGPUsChanging,
	NoIdleRoom: v1alpha1.ReasonNoIdleRoom,
}

// Status is the review as a policy reports it.
func (r *Review) Status() *v1alpha1.OnDemandStatus {
	s := &v1alpha1.OnDemandStatus{IdleTime: idleTimeUnknown, GPUs: number(len(r.decision.Changes))}
	for _, n := range r.order() {
		class, outcome := r.classes[n], r.decision.Outcomes[n]
		one := v1alpha1.DemandStatus{
			Instances: requested(class.Asks), Pods: number(class.Pods), FirstPod: r.first[n].Namespace + "/" + r.first[n].Name,
			SinceTime: metav1.NewTime(class.Oldest), Ready: number(outcome.Ready), Planned: number(outcome.Planned), Unmet: number(outcome.Unmet),
			Holders: outcome.Blockers,
		}
		if outcome.Unmet > 0 {
			one.Reason = cmp.Or(reasons[outcome.Reason], v1alpha1.ReasonGPUsChanging)
		}
		s.Pods, s.Ready, s.Planned, s.Unmet = s.Pods+one.Pods, s.Ready+one.Ready, s.Planned+one.Planned, s.Unmet+one.Unmet
		if len(s.Requests) < v1alpha1.MostDemands {
			s.Requests = append(s.Requests, one)
		}
	}
	for _, c := range r.decision.Changes {
		s.Changes = append(s.Changes, v1alpha1.OnDemandChange{
			NodeName: c.Node, Index: number(r.index[[2]string{c.Node, c.UUID}]), Destroy: counted(c.Destroy), Create: counted(c.Create),
		})
	}
	slices.SortFunc(s.Changes, func(a, b v1alpha1.OnDemandChange) int {
		return cmp.Or(strings.Compare(a.NodeName, b.NodeName), cmp.Compare(a.Index, b.Index))
	})
	s.Changes = s.Changes[:min(len(s.Changes), v1alpha1.MostDemands)]
	return s
}

// order are the classes as they are listed.
func (r *Review) order() []int {
	order := make([]int, len(r.classes))
	for n := range order {
		order[n] = n
	}
	slices.SortFunc(order, func(a, b int) int {
		x, y := &r.classes[a], &r.classes[b]
		return cmp.Or(cmp.Compare(y.Priority, x.Priority), x.Oldest.Compare(y.Oldest), cmp.Compare(text(*x), text(*y)),
			strings.Compare(r.first[a].Namespace, r.first[b].Namespace), strings.Compare(r.first[a].Name, r.first[b].Name))
	})
	return order
}

func requested(asks map[string]int) (list []v1alpha1.InstanceRequest) {
	for _, name := range slices.Sorted(maps.Keys(asks)) {
		list = append(list, v1alpha1.InstanceRequest{Profile: name, Count: number(asks[name])})
	}
	return list
}

func counted(instances []gpu.Instance) (list []v1alpha1.InstanceCount) {
	counts := map[string]int{}
	for _, i := range instances {
		counts[i.Profile]++
	}
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		list = append(list, v1alpha1.InstanceCount{Profile: name, Count: number(counts[name])})
	}
	return list
}

// number is a count of pods, GPUs or instances, none of which a cluster has more than 2 billion of.
func number(n int) int32 { return int32(n) } //nolint:gosec // see above

// Condition is the condition DemandMet that says what a status does.
func Condition(s *v1alpha1.OnDemandStatus) metav1.Condition {
	is := metav1.Condition{Type: v1alpha1.ConditionDemandMet, Status: metav1.ConditionFalse}
	would := fmt.Sprintf("%d pods wait for MIG instances: %d find idle ones, %d would start if %d GPUs had others (status.onDemand.changes), which mode "+
		"Advise leaves as they are", s.Pods, s.Ready, s.Planned, s.GPUs)
	switch {
	case s.Pods == 0:
		is.Status, is.Reason, is.Message = metav1.ConditionTrue, v1alpha1.ReasonNoDemand, "No pod waits for MIG instances of the policy's GPUs"
	case s.Unmet > 0:
		is.Reason, is.Message = v1alpha1.ReasonNoIdleRoom, fmt.Sprintf("%s, %d would not", would, s.Unmet)
		if at := slices.IndexFunc(s.Requests, func(d v1alpha1.DemandStatus) bool { return d.Unmet > 0 }); at >= 0 {
			is.Reason, is.Message = s.Requests[at].Reason, is.Message+": "+Describe(&s.Requests[at])
		}
	case s.Planned > 0:
		is.Reason, is.Message = v1alpha1.ReasonRepartitionAdvised, would
	default:
		is.Status, is.Reason = metav1.ConditionTrue, v1alpha1.ReasonInstancesIdle
		is.Message = fmt.Sprintf("%d pods wait, and the MIG instances that they ask for are idle", s.Pods)
	}
	return is
}

// Describe says in one line what some pods wait for, and what would become of them.
func Describe(d *v1alpha1.DemandStatus) string {
	var asks, then []string
	for _, i := range d.Instances {
		asks = append(asks, fmt.Sprintf("%d %s", i.Count, plan.ResourceOf(i.Profile)))
	}
	if d.Ready > 0 {
		then = append(then, fmt.Sprintf("%d find idle instances", d.Ready))
	}
	if d.Planned > 0 {
		then = append(then, fmt.Sprintf("%d would start after the change", d.Planned))
	}
	if d.Unmet > 0 {
		why := d.Reason
		if len(d.Holders) > 0 {
			why += ", held by " + strings.Join(d.Holders, ", ")
		}
		then = append(then, fmt.Sprintf("%d would not: %s", d.Unmet, why))
	}
	return fmt.Sprintf("%s (%d pods, first %s): %s", strings.Join(asks, ", "), d.Pods, d.FirstPod, strings.Join(then, "; "))
}
