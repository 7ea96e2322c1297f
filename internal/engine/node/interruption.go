// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// What interrupts a change of a node as a whole is another controller that works on it, or a reboot.
//
//	driver upgrade | machine-config operator → underMaintenanceResult → over → continueInterrupted: the agent looks again, all deadlines
//	begin anew
//	reboot permitted → awaitNodeUp → agent Ready | not permitted: awaitReboot

// underMaintenanceResult is the result of a node under maintenance. What has not reached the GPUs yet is given up. What has is
// interrupted, and its deadlines begin anew afterwards.
func underMaintenanceResult(v *View, m maintenance, j Result) Result {
	act, step := SplitStep(j.Next)
	actions := slices.DeleteFunc(slices.Concat(act, step.OnDenied), action.SetsSpec)
	if again, waits := RequestAgain(v); waits && m.Validates && j.State != Unknown {
		j = again
		actions, _ = SplitStep(again.Next)
	}
	if _, recorded := InterruptedAt(v); !recorded && (v.InFlight() || m.Unloads && agentMakesInstances(v)) {
		patch := v.Patch("recording that maintenance interrupts the node")
		patch.Annotations[v1alpha1.AnnotationInterrupted] = new(timing.Stamp(stampMaintenance, v.Snapshot.Now))
		actions = append(actions, patch)
	}
	if patch, pauses := keepPluginAwayFromDriver(v, m); pauses {
		actions = append(actions, patch)
	}
	if m.Validates && v.Disturbed() {
		left := v.Node.HeldSince.Add(timing.PauseTimeout).Sub(v.Snapshot.Now)
		if left <= 0 {
			actions = RestoreScheduling(v, "the driver upgrade waits for them")
		}
		j.After = timing.Sooner(j.After, left)
	}
	j.Next = atOnce(actions...)
	return explainMaintenance(v, m, j)
}

// explainMaintenance adds to a result that maintenance is the reason.
func explainMaintenance(v *View, m maintenance, j Result) Result {
	switch {
	case j.State == UpToDate && !v.Target.Final: // one that goes back is not forgotten meanwhile
		return j
	case j.State == Failed || j.State == Unsupported:
		j.Message += ". " + m.Message
		return j
	case j.State == Unknown && !v.Node.AgentReady:
		j.Message = agentAwayMessage(m.Message)
	default:
		j.Message = strings.TrimSuffix(m.Message+"; "+j.Message, "; ")
	}
	j.Reason = m.Reason
	if interruptionOverdue(v) {
		j.Message += fmt.Sprintf(". It takes no slot in the budget any more, because that lasts for more than %s", timing.MaintenanceTimeout)
	}
	return untilOverdue(v, j)
}

// keepPluginAwayFromDriver keeps the device plugin away while the driver is replaced under MIG instances that our agent makes. They are gone
// with the module, and on Hopper and newer the MIG mode too. So the agent makes them again before anything is advertised,
// and before the node takes pods again. k8s-driver-manager restores our pause with its own taken off.
func keepPluginAwayFromDriver(v *View, m maintenance) (patch action.PatchNode, pauses bool) {
	if !m.Unloads {
		return action.PatchNode{}, false
	}
	return keepPluginAway(v)
}

// RequestAgain asks the agent anew after an interruption, and waits for its answer: the MIG instances of its last report may be
// gone with the driver's module, and an agent that has not left the node looks at the GPUs only once in a minute. Without an
// answer in time the deadlines of the change count again.
func RequestAgain(v *View) (j Result, waits bool) {
	at, was := InterruptedAt(v)
	why := "continuing after the maintenance of the node"
	if lost, is := AgentLostAt(v); is {
		at, was, why = lost, true, "continuing, because the agent is back"
	}
	if used, is := interruptedByUsersAt(v); is && v.SpecMatchesTarget() {
		at, was, why = used, true, "continuing, because nobody uses the GPUs any more"
	}
	if !was || !v.InFlight() && !agentMakesInstances(v) {
		return Result{}, false
	}
	j = Result{
		State: Applying, Reason: v1alpha1.ReasonApplying, Message: "Waiting for the agent to report what is on the node now",
	}
	spec := *v.Node.GPU.Spec.DeepCopy()
	if !spec.ChangeTime.After(at) {
		spec.ChangeTime = metav1.NewTime(v.Snapshot.Now)
		j.Next = atOnce(action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: why})
		j.After = time.Second // an interruption of less than that
		return j, true
	}
	left := spec.ChangeTime.Add(timing.ApplyTimeout).Sub(v.Snapshot.Now)
	c, reported := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	j.After = left
	return j, left > 0 && (!reported || c.ObservedGeneration < v.Node.GPU.Generation)
}

// continueInterrupted goes on with a change that was interrupted, once the agent is back. All deadlines begin anew. After maintenance
// NVIDIA's clients stay away until then, also where only k8s-driver-manager had paused them: without an upgrade controller
// nothing tells of the upgrade before that. They are paused no more once the slot has expired, because the agent may never return.
func continueInterrupted(v *View, j Result) Result {
	if !WasInterrupted(v) {
		return j
	}
	if _, used := interruptedByUsersAt(v); used && j.State == PendingDisruptive && len(v.Blockers) > 0 {
		return j
	}
	again, waits := RequestAgain(v)
	if j.State == Unknown {
		again, waits = j, true
	}
	_, maintained := InterruptedAt(v)
	if patch, pauses := keepPluginAway(v); waits && maintained && pauses && !interruptionOverdue(v) {
		actions, _ := SplitStep(again.Next)
		again.Next = atOnce(append(actions, patch)...)
	}
	if waits {
		return untilOverdue(v, again)
	}
	patch := v.Patch("continuing, because the agent has reported")
	patch.Annotations[v1alpha1.AnnotationInterrupted] = nil
	if _, has := v.Node.Annotations[v1alpha1.AnnotationSelected]; has && v.Target.Config != "" {
		patch.Annotations[v1alpha1.AnnotationSelected] = new(timing.Stamp(v.Target.Config, v.Snapshot.Now))
	}
	return Result{State: j.State, Reason: j.Reason, Message: j.Message, Next: atOnce(patch)}
}
