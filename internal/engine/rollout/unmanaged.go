// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/baseline"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/budget"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/group"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/nvidiamps"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// ungoverned is a node that no policy governs, or can, and that stays as it is, if only for now. Released: how a policy releases it is on
// record, or nothing is.
func ungoverned(
	w *world.World, n *world.Node, selected, governed policy.Governed, unserved bool,
) (m group.Member, released, is bool) {
	if governed.By != nil {
		return m, false, false
	}
	v := &view.View{World: w, Node: n, Stack: w.StackOf(n)}
	if unserved || view.Retained(n.GPU.Spec) {
		return staying(v, selected), view.Releases(n, selected.By), true
	}
	until, may := policiesReturn(v)
	if may {
		m = awaiting(v, until)
	}
	return m, may, may
}

// staying is a node that no policy governs, or can, and that stays as it is.
func staying(v *view.View, selected policy.Governed) group.Member {
	m := group.Member{View: v}
	m.Judgement, m.Actions = gate.Judgement{State: state.UpToDate, Reason: v1alpha1.ReasonReady}, retain(&m)
	if selected.By == nil && !view.Retained(v.Node.GPU.Spec) { // no status of a policy reports why it is not restored
		m.State, m.Reason, m.Message = state.Unsupported, v.World.Plugin.Reason, v.World.Plugin.Message
	}
	m.Unserved = selected.By != nil && m.NoPlugin()
	m.Slot = budget.SlotOf(&m)
	return m
}

// policiesReturn reports whether a GPUNode was made anew or restored from a backup, and until when its policy may still follow: no policy
// has reached its aim under it, and it is younger than what was done to its node, or the agent was asked only under another one. A policy
// that is absent meanwhile was not deleted.
func policiesReturn(v *view.View) (until time.Time, may bool) {
	n, spec, created := v.Node, &v.Node.GPU.Spec, v.Node.GPU.CreationTimestamp.Time
	until = created.Add(timing.PoliciesReturn)
	if spec.Baseline == nil || n.GPU.Status.Rollout.LastGood != nil || !until.After(v.World.Now) {
		return until, false
	}
	_, selected, stamped := timing.Parse(n.Annotations[v1alpha1.AnnotationSelected])
	younger := stamped && selected.Add(timing.ClocksDiffer).Before(created)
	return until, younger || spec.ChangeTime.IsZero() && !baseline.NeverAsked(v)
}

// awaiting is a node that is left as it is until its policy is back, or until then.
func awaiting(v *view.View, until time.Time) group.Member {
	m := group.Member{View: v}
	m.Judgement = gate.Judgement{
		State: state.UpToDate, Reason: v1alpha1.ReasonNoPolicy, After: until.Sub(v.World.Now),
		Message: "The GPUNode was made anew, and no policy governs the node yet; without one the node is restored at " + format.Clock(until),
	}
	m.Actions = gate.LetGo(v, "no policy governs the node")
	m.Slot = budget.SlotOf(&m)
	return m
}

// retain leaves a node as it is, without holding it.
func retain(m *group.Member) []action.Action {
	actions := gate.LetGo(m.View, "no policy governs the node")
	if m.Node.GPU.Spec.Baseline == nil && view.Overridden(m.View) {
		actions = append(actions, nvidiamps.Allow(m.View, true)...)
	}
	actions = append(actions, forgetRecords(m)...)
	if spec := m.Node.GPU.Spec; !m.NoPlugin() && spec.PolicyName != "" {
		spec = *spec.DeepCopy()
		spec.PolicyName, spec.Strategy, spec.MemoryGuard = "", "", nil
		if spec.Baseline == nil {
			spec = v1alpha1.GPUNodeSpec{}
		}
		return append(actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Why: "leaving the node as it is"})
	}
	if !m.NoPlugin() {
		actions = append(actions, keepBaseline(m)...)
		if patch, stamped := nvidiamig.Forget(m.View); stamped && m.Node.GPU.Spec.Baseline == nil {
			actions = append(actions, patch)
		}
	}
	return actions
}

// forgetRecords removes what is recorded of a change that did not end in time, and of restarts that a release did not
// wait for.
func forgetRecords(m *group.Member) []action.Action {
	records := []string{v1alpha1.AnnotationTimedOut}
	if m.Node.GPU.Spec.Baseline == nil {
		records = append(records, v1alpha1.AnnotationInstances, v1alpha1.AnnotationRestarted)
	}
	patch := m.Patch("forgetting a change that did not end in time")
	for _, name := range records {
		if _, has := m.Node.Annotations[name]; has {
			patch.Annotations[name] = nil
		}
	}
	if len(patch.Annotations) == 0 {
		return nil
	}
	return []action.Action{patch}
}

// keepBaseline writes again what either object has lost of the baseline of a node that stays as it is.
func keepBaseline(m *group.Member) []action.Action {
	spec := m.Node.GPU.Spec
	if spec.Baseline == nil {
		return nil
	}
	var actions []action.Action
	if _, has := m.Node.Annotations[v1alpha1.AnnotationBaseline]; !has {
		patch := m.Patch("recording the baseline")
		patch.Annotations[v1alpha1.AnnotationBaseline] = new(world.CopyOf(spec))
		actions = append(actions, patch)
	}
	if m.Node.BaselineLost {
		actions = append(actions, action.SetSpec{Node: m.Node.Name, Spec: spec, Why: "recording the baseline"})
	}
	return actions
}
