// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// drainAndStop brings a node to where its GPUs can be changed: tainted, drained, NVIDIA's operands stopped.
func drainAndStop(v *View, targetInSpec bool) Result {
	r := Result{State: PendingDisruptive, Reason: underwayReason(v), Next: withSlot(v)}
	blocked := len(v.Blockers) > 0
	tainted := keepsPodsOff(v, blocked)
	pod, age := justBoundPod(v)
	if r, waits := awaitDecision(v, r, targetInSpec); waits {
		return r
	}
	switch {
	case mustRemoveNVIDIAMPS(v) && v.TargetIsLastGood() && mpsLabelRemaining(v) > 0:
		return leaveToNVIDIAMPS(v)
	case blocked && v.DrainMode() == v1alpha1.DrainModeNever:
		r.Reason, r.Message = v1alpha1.ReasonGPUInUse, "waiting until nobody uses what must be changed: "+describeBlockers(v)
		r.Next = atOnce(append(RestoreScheduling(v, "the node is in use"), interruptedByUsers(v, targetInSpec)...)...)
		return r
	case blocked && !tainted && v.FallsBack: // its time is over: nobody is kept off or evicted any more
		r.Reason, r.Message = v1alpha1.ReasonGPUInUse, "waiting until nobody uses what must be changed: "+describeBlockers(v)
		return r
	case pod != "" && !tainted && v.DrainMode() == v1alpha1.DrainModeNever: // the taint would go again as soon as the agent reports the pod
		return justBound(r, pod, age)
	case !tainted:
		return tainting(v, r)
	case blocked:
		return draining(v, r)
	}
	return afterDrain(v, r, targetInSpec)
}

// awaitDecision lets an agent that is at work for pods that wait go on beside others that block, who came in spite of the taint and change nothing of what it does.
// Before it is asked, a change that would destroy what was used lately waits until something else is decided.
func awaitDecision(v *View, r Result, targetInSpec bool) (Result, bool) {
	switch blocked := len(v.Blockers) > 0; {
	case targetInSpec && blocked && v.Tainted() && v.ForDemand && BusyFor(v) > 0:
		r.Reason, r.Message, r.After = v1alpha1.ReasonGPUInUse, agentMessage(v, "waiting for the agent; in use now: "+describeBlockers(v)), BusyFor(v)
		return r, true
	case !targetInSpec && !blocked && usedLately(v):
		r.Reason, r.Message = v1alpha1.ReasonGPUInUse, "what would be destroyed was used too lately; what is made for the pods that wait is decided anew"
		r.Next, r.After = atOnce(RestoreScheduling(v, "its MIG instances were used just now")...), timing.ReportAfter
		return r, true
	}
	return r, false
}

// keepsPodsOff reports whether the node has the operator's taint, or must do without it and is not in use.
func keepsPodsOff(v *View, blocked bool) bool {
	return v.Tainted() || MustStayUntainted(v) && !blocked
}

// afterDrain goes on with a node that nobody uses any more: what was placed on it just now is looked at first.
func afterDrain(v *View, r Result, targetInSpec bool) Result {
	if r, waits := awaitBindingsSettled(v, r); waits {
		return r
	}
	if pod, age := justBoundPod(v); pod != "" {
		r.State = Draining
		return justBound(r, pod, age)
	}
	return changeIdleNode(v, r, targetInSpec)
}

// justBound waits for the agent to report what a pod holds that was bound to the node so long ago.
func justBound(r Result, pod string, age time.Duration) Result {
	r.Reason, r.After = v1alpha1.ReasonGPUInUse, timing.ReportAfter-age
	r.Message = fmt.Sprintf("pod %s was placed on the node just now; waiting for the agent to report what it holds", pod)
	return r
}

// tainting begins a change: nothing new may come to the node.
func tainting(v *View, r Result) Result {
	if r, pending := prepareForMPS(v, r.State); pending {
		return r
	}
	if problem := noTaintRule(v); problem != nil && v.ByClaims() {
		r.Reason, r.Message = problem.Reason, problem.Message // the node holds no slot meanwhile
		return r
	}
	r.Message = "the change needs GPUs or instances idle"
	if len(v.Blockers) > 0 {
		r.Message += "; in use now: " + describeBlockers(v)
	}
	r.Next = withSlot(v, v.taint(v)...)
	return r
}

// awaitBindingsSettled waits a moment after the devices of the node were tainted, or the node for pods that wait: the scheduler may have chosen
// one just before, and the claim or the binding that tells so follows.
func awaitBindingsSettled(v *View, r Result) (Result, bool) {
	since := v.Node.DevicesTaintedAt
	if v.ForDemand && since.IsZero() {
		since = DrainingSince(v)
	}
	if !v.ByClaims() && !v.ForDemand || since.IsZero() {
		return Result{}, false
	}
	remaining := since.Add(timing.ClaimsSettle).Sub(v.Snapshot.Now)
	if remaining <= 0 {
		return Result{}, false
	}
	r.State, r.Reason, r.After = Draining, v1alpha1.ReasonGPUInUse, remaining
	r.Message = "the devices of the node were tainted just now; waiting for the claims of pods that were allocated one before"
	if v.ForDemand {
		r.Message = "the node was tainted just now; waiting for pods that were bound to it before"
	}
	return r, true
}

// interruptedByUsers records that users of the GPUs interrupt a change, so that the time of the agent begins anew once
// they are gone.
func interruptedByUsers(v *View, targetInSpec bool) []action.Action {
	if !targetInSpec || WasInterrupted(v) {
		return nil
	}
	patch := v.Patch("recording that users of the GPUs interrupt the change")
	patch.Annotations[v1alpha1.AnnotationInterrupted] = new(timing.Stamp(stampInUse, v.Snapshot.Now))
	return []action.Action{patch}
}

// draining waits for the node to become idle, and evicts where the policy says so.
func draining(v *View, r Result) Result {
	r.State, r.Reason = Draining, v1alpha1.ReasonGPUInUse
	remaining := DrainRemaining(v)
	evictions, stay := chooseEvictions(v)
	if remaining <= 0 {
		message := waitsForBlockers(v, fmt.Sprintf("not idle within %s: ", v.DrainTimeout()), stay)
		if !v.FallsBack {
			record := recordFailure(v, v1alpha1.ReasonDrainTimedOut, message)
			r.Next = withSlot(v, append(RestoreScheduling(v, "it did not become idle in time"), record...)...)
			r.Message = message
			return r
		}
		r.Reason, r.Next = v1alpha1.ReasonDrainTimedOut, atOnce(RestoreScheduling(v, "it did not become idle in time")...)
		r.Message = message + "; the node takes pods again meanwhile, and goes back once nobody uses what must be changed"
		return r
	}
	r.Next, r.After = withSlot(v, evictions...), timing.Sooner(remaining, BusyFor(v)) // as in withSlot
	for _, b := range v.Blockers {
		if p := v.PodOf(b); len(stay) > 0 && p != nil && justCame(v, p) { // it may be evicted then
			r.After = min(r.After, timing.ReportAfter-sinceCame(v, p))
		}
	}
	r.Message = waitsForBlockers(v, "waiting "+untilDrained(v)+"for what must be freed: ", stay)
	return r
}

// waitsForBlockers says who blocks a change and, at the end, of one who is not evicted why, and what to do about it. It
// leaves that the room: who else blocks is in status.rollout.blockers.
func waitsForBlockers(v *View, waits string, stay []string) string {
	stay = append(stay, evictionRefusals(v)...)
	if len(stay) == 0 {
		return waits + describeBlockers(v)
	}
	why := "; " + stay[0]
	if len(stay) > 1 {
		why = fmt.Sprintf("; of %d that stay, %s", len(stay), stay[0])
	}
	who := blockersIn(v, format.MostMessage-utf8.RuneCountInString(waits+why))
	return waits + who + why
}

// untilDrained says until when a node is drained; empty if that is not recorded.
func untilDrained(v *View) string {
	if DrainingSince(v).IsZero() {
		return ""
	}
	return "until " + format.Clock(v.Snapshot.Now.Add(DrainRemaining(v))) + " "
}

// DrainRemaining is how much of the time for draining is left.
func DrainRemaining(v *View) time.Duration {
	since := DrainingSince(v)
	if since.IsZero() {
		return v.DrainTimeout()
	}
	if c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired); found && OnlyRebootLeft(v) && !fromFuture(v, c.LastTransitionTime.Time) {
		since = timing.Latest(since, c.LastTransitionTime.Time) // only then the other GPUs have to be idle too
	}
	return v.OrGrace(since.Add(v.DrainTimeout()).Sub(v.Snapshot.Now))
}

// DrainingSince is when the time for draining began; zero if it has not, or if that is not recorded.
func DrainingSince(v *View) time.Time {
	switch t := v.Taint(); {
	case t != nil && t.TimeAdded != nil:
		return t.TimeAdded.Time
	case t == nil && MustStayUntainted(v) && len(StoppedByOperator(v)) > 0:
		return v.Node.MarkedAtWorkSince
	}
	return time.Time{}
}
