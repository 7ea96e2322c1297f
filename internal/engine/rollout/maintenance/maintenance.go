// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package maintenance

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/clients"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// Maintained is the judgement of a node under maintenance. What has not reached the GPUs yet is given up. What has is
// interrupted, and its deadlines begin anew afterwards.
func Maintained(v *view.View, m view.Maintenance, j gate.Judgement) gate.Judgement {
	act, step := gate.Split(j.Next)
	actions := slices.DeleteFunc(slices.Concat(act, step.GiveUp), action.SetsSpec)
	if again, waits := AsksAgain(v); waits && m.Validates && j.State != state.Unknown {
		j = again
		actions, _ = gate.Split(again.Next)
	}
	if _, recorded := view.InterruptedAt(v); !recorded && (v.InFlight() || m.Unloads && view.MakesInstances(v)) {
		patch := v.Patch("recording that maintenance interrupts the node")
		patch.Annotations[v1alpha1.AnnotationInterrupted] = new(timing.Stamp(view.StampMaintenance, v.World.Now))
		actions = append(actions, patch)
	}
	if patch, pauses := protect(v, m); pauses {
		actions = append(actions, patch)
	}
	if m.Validates && v.Disturbed() {
		left := v.Node.HeldSince.Add(timing.PauseTimeout).Sub(v.World.Now)
		if left <= 0 {
			actions = gate.LetGo(v, "the driver upgrade waits for them")
		}
		j.After = timing.Sooner(j.After, left)
	}
	j.Next = gate.AtOnce(actions...)
	return explained(v, m, j)
}

// explained adds to a judgement that maintenance is the reason.
func explained(v *view.View, m view.Maintenance, j gate.Judgement) gate.Judgement {
	switch {
	case j.State == state.UpToDate && !v.Target.Final: // one that goes back is not forgotten meanwhile
		return j
	case j.State == state.Failed || j.State == state.Unsupported:
		j.Message += ". " + m.Message
		return j
	case j.State == state.Unknown && !v.Node.AgentReady:
		j.Message = gate.AgentAway(m.Message)
	default:
		j.Message = strings.TrimSuffix(m.Message+"; "+j.Message, "; ")
	}
	j.Reason = m.Reason
	if view.Overdue(v) {
		j.Message += fmt.Sprintf(". It takes no slot in the budget any more, because that lasts for more than %s", timing.MaintenanceTimeout)
	}
	return gate.UntilOverdue(v, j)
}

// protect keeps the device plugin away while the driver is replaced under MIG instances that our agent makes. They are gone
// with the module, and on Hopper and newer the MIG mode too. So the agent makes them again before anything is advertised,
// and before the node takes pods again. k8s-driver-manager restores our pause with its own taken off.
func protect(v *view.View, m view.Maintenance) (patch action.PatchNode, pauses bool) {
	if !m.Unloads {
		return action.PatchNode{}, false
	}
	return clients.KeepPluginAway(v)
}

// AsksAgain asks the agent anew after an interruption, and waits for its answer: the MIG instances of its last report may be
// gone with the driver's module, and an agent that has not left the node looks at the GPUs only once in a minute. Without an
// answer in time the deadlines of the change count again.
func AsksAgain(v *view.View) (j gate.Judgement, waits bool) {
	at, was := view.InterruptedAt(v)
	why := "continuing after the maintenance of the node"
	if lost, is := view.LostAt(v); is {
		at, was, why = lost, true, "continuing, because the agent is back"
	}
	if used, is := view.UsedAt(v); is && v.Asks() {
		at, was, why = used, true, "continuing, because nobody uses the GPUs any more"
	}
	if !was || !v.InFlight() && !view.MakesInstances(v) {
		return gate.Judgement{}, false
	}
	j = gate.Judgement{
		State: state.Applying, Reason: v1alpha1.ReasonApplying, Message: "Waiting for the agent to report what is on the node now",
	}
	spec := *v.Node.GPU.Spec.DeepCopy()
	if !spec.ChangeTime.After(at) {
		spec.ChangeTime = metav1.NewTime(v.World.Now)
		j.Next = gate.AtOnce(action.SetSpec{Node: v.Node.Name, Spec: spec, Policy: v.Ref(), Why: why})
		j.After = time.Second // an interruption of less than that
		return j, true
	}
	left := spec.ChangeTime.Add(timing.ApplyTimeout).Sub(v.World.Now)
	c, reported := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	j.After = left
	return j, left > 0 && (!reported || c.ObservedGeneration < v.Node.GPU.Generation)
}

// Continued goes on with a change that was interrupted, once the agent is back. All deadlines begin anew. After maintenance
// NVIDIA's clients stay away until then, also where only k8s-driver-manager had paused them: without an upgrade controller
// nothing tells of the upgrade before that. They are paused no more once the slot has expired, because the agent may never return.
func Continued(v *view.View, j gate.Judgement) gate.Judgement {
	if !view.WasInterrupted(v) {
		return j
	}
	if _, used := view.UsedAt(v); used && j.State == state.PendingDisruptive && len(v.Blockers) > 0 {
		return j
	}
	again, waits := AsksAgain(v)
	if j.State == state.Unknown {
		again, waits = j, true
	}
	_, maintained := view.InterruptedAt(v)
	if patch, pauses := clients.KeepPluginAway(v); waits && maintained && pauses && !view.Overdue(v) {
		actions, _ := gate.Split(again.Next)
		again.Next = gate.AtOnce(append(actions, patch)...)
	}
	if waits {
		return gate.UntilOverdue(v, again)
	}
	patch := v.Patch("continuing, because the agent has reported")
	patch.Annotations[v1alpha1.AnnotationInterrupted] = nil
	if _, has := v.Node.Annotations[v1alpha1.AnnotationSelected]; has && v.Target.Config != "" {
		patch.Annotations[v1alpha1.AnnotationSelected] = new(timing.Stamp(v.Target.Config, v.World.Now))
	}
	return gate.Judgement{State: j.State, Reason: j.Reason, Message: j.Message, Next: gate.AtOnce(patch)}
}
