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
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// reasons are the words of the API.
var reasons = map[demand.Reason]string{
	demand.NotAllowed: v1alpha1.ReasonProfileNotAllowed, demand.Reserve: v1alpha1.ReasonReserveKept,
	demand.Changing: v1alpha1.ReasonGPUsChanging, demand.NoIdleRoom: v1alpha1.ReasonNoIdleRoom, demand.Held: v1alpha1.ReasonIdleTooShort,
	demand.BackOff: v1alpha1.ReasonAdvertisedNotScheduled,
}

// status is the review as a policy reports it.
func (r *review) status() *v1alpha1.OnDemandStatus {
	s := &v1alpha1.OnDemandStatus{GPUs: number(len(r.decision.Changes))}
	for _, n := range r.order() {
		class, outcome := r.classes[n], r.decision.Outcomes[n]
		one := v1alpha1.DemandStatus{
			Instances: requested(class.Asks), Pods: number(class.Pods), FirstPod: r.pods[n][0].Namespace + "/" + r.pods[n][0].Name,
			SinceTime: metav1.NewTime(class.Oldest), Ready: number(outcome.Ready), Planned: number(outcome.Planned), Unmet: number(outcome.Unmet),
			Holders: outcome.Blockers,
		}
		if outcome.Unmet > 0 {
			one.Reason = cmp.Or(reasons[outcome.Reason], v1alpha1.ReasonGPUsChanging)
			one.UntilTime = metav1.NewTime(outcome.Until)
		}
		by := r.overbookedBy(class.Asks)
		booked := outcome.Unmet > 0 && outcome.Reason == demand.NotAllowed && len(by) > 0
		if booked {
			one.Reason, one.Holders = v1alpha1.ReasonNoIdleRoom, by
		}
		s.Pods, s.Ready, s.Planned, s.Unmet = s.Pods+one.Pods, s.Ready+one.Ready, s.Planned+one.Planned, s.Unmet+one.Unmet
		if one.Unmet > 0 && r.unmet == nil {
			r.unmet, r.booked = &one, booked
		}
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
func (r *review) order() []int {
	order := make([]int, len(r.classes))
	for n := range order {
		order[n] = n
	}
	slices.SortFunc(order, func(a, b int) int {
		x, y := &r.classes[a], &r.classes[b]
		return cmp.Or(cmp.Compare(y.Priority, x.Priority), x.Oldest.Compare(y.Oldest), strings.Compare(r.kinds[a].asks, r.kinds[b].asks),
			strings.Compare(r.pods[a][0].Namespace, r.pods[b][0].Namespace), strings.Compare(r.pods[a][0].Name, r.pods[b][0].Name))
	})
	return order
}

func requested(asks map[string]int) (list []v1alpha1.InstanceRequest) {
	for _, name := range slices.Sorted(maps.Keys(asks)) {
		list = append(list, v1alpha1.InstanceRequest{Profile: name, Count: number(asks[name])})
	}
	return list
}

func counted(instances []gpu.Instance) []v1alpha1.InstanceCount {
	return plan.Observed(gpu.Device{State: gpu.State{MIG: true, Instances: instances}}).Instances
}

// number is a count of pods, GPUs or instances, none of which a cluster has more than 2 billion of.
func number(n int) int32 { return int32(n) }

// condition is the condition DemandMet that says what a status does, of which not all requests are listed.
func (r *review) condition(s *v1alpha1.OnDemandStatus) metav1.Condition {
	is := metav1.Condition{Type: v1alpha1.ConditionDemandMet, Status: metav1.ConditionFalse}
	planned, reason := "which mode Advise leaves as they are", v1alpha1.ReasonRepartitionAdvised
	switch {
	case r.applies && r.paused:
		planned, reason = "which are made once the rollout goes on", v1alpha1.ReasonPaused
	case r.applies:
		planned, reason = "which are being made", v1alpha1.ReasonRepartitioning
	}
	would := fmt.Sprintf("%d pods wait for MIG instances: %d find idle ones, %d would start if %d GPUs had others (status.onDemand.changes), %s",
		s.Pods, s.Ready, s.Planned, s.GPUs, planned)
	switch {
	case s.Pods == 0:
		is.Status, is.Reason, is.Message = metav1.ConditionTrue, v1alpha1.ReasonNoDemand, "No pod waits for MIG instances of the policy's GPUs"
	case s.Unmet > 0:
		is.Reason = r.unmet.Reason
		is.Message = fmt.Sprintf("%s, %d would not, such as %s%s", would, s.Unmet, r.unmet.FirstPod, r.why())
	case s.Planned > 0:
		is.Reason, is.Message = reason, would
	case r.making:
		is.Reason = v1alpha1.ReasonRepartitioning
		is.Message = fmt.Sprintf("%d pods wait, and the MIG instances that they ask for are idle or being made", s.Pods)
	default:
		is.Status, is.Reason = metav1.ConditionTrue, v1alpha1.ReasonInstancesIdle
		is.Message = fmt.Sprintf("%d pods wait, and the MIG instances that they ask for are idle", s.Pods)
	}
	if r.beyond > 0 {
		is.Message += fmt.Sprintf("; %d pods more do not count: they are of kinds beyond the first %d of their namespace or %d of all, or with more than "+
			"%d or %d different selectors", r.beyond, mostOfOne.kinds, most.kinds, mostOfOne.placements, most.placements)
	}
	return is
}

// why is why nothing can be done for the first pods for which that is so.
func (r *review) why() string {
	d := r.unmet
	switch {
	case r.booked:
		return ": before them are pods that ask for more than their nodes have: " + strings.Join(d.Holders, ", ")
	case len(d.Holders) > 0:
		return ": what would have to be destroyed is held by " + strings.Join(d.Holders, ", ")
	case d.Reason == v1alpha1.ReasonAdvertisedNotScheduled:
		return ": the scheduler left instances idle that were made for such pods; next attempt at " + format.Clock(d.UntilTime.Time)
	case !d.UntilTime.IsZero():
		return ": what would have to be destroyed is idle for long enough at " + format.Clock(d.UntilTime.Time)
	}
	return ""
}
