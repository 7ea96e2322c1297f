// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// kept is what is so with the taints that a policy keeps on a node. They are no part of the change that the budget paces:
// a taint keeps new pods off and disturbs none.
type kept struct {
	reason, message string // why the node lacks a taint of its policy; empty: it does not
}

// keepTaints decides which taints a node has for its policy's sake.
func (m *member) keepTaints(g policy.Governed, awaited *v1alpha1.GPUSharingPolicy, t tolerance) {
	if g.By != nil && g.By.Spec.Rollout.Paused {
		m.kept.reason, m.kept.message = v1alpha1.ReasonPaused, "the rollout is paused (rollout.paused)"
		return
	}
	if g.By == nil && m.node.GPU.Spec.Baseline != nil && retained(m.node.GPU.Spec) {
		return // the last policy says that the node stays as it is
	}
	var want []corev1.Taint
	if g.By != nil {
		want = m.wantTaints(g.By, t)
	}
	if m.wantStartup(g, awaited, t) {
		want = append(want, m.startupTaint())
		m.saysStartup(g, t)
	}
	if len(want) == 0 && m.node.Annotations[v1alpha1.AnnotationTaints] == "" && m.startingUp() == nil {
		return
	}
	taints, record := Retaint(m.node.Taints, m.node.Annotations[v1alpha1.AnnotationTaints], want)
	if record == m.node.Annotations[v1alpha1.AnnotationTaints] && slices.Equal(taints, m.node.Taints) {
		return
	}
	keep := KeepTaints{Node: m.node.Name, Want: want}
	if g.By != nil {
		keep.Policy = PolicyRef{Name: g.By.Name, Generation: g.By.Generation}
	}
	m.actions = append(m.actions, keep)
}

// wantTaints are the taints of a policy that the node is to have now: those that NVIDIA's programs tolerate.
func (m *member) wantTaints(by *v1alpha1.GPUSharingPolicy, t tolerance) []corev1.Taint {
	var want []corev1.Taint
	record := m.node.Annotations[v1alpha1.AnnotationTaints]
	for _, taint := range taintsOf(by) {
		at := slices.IndexFunc(m.node.Taints, func(have corev1.Taint) bool { return have.MatchTaint(&taint) })
		there := at >= 0 && recordedIn(record, taint)
		reason, message := "", ""
		switch {
		case at >= 0 && !there: // it was there before us and stays
			if has := m.node.Taints[at]; has.Value != taint.Value {
				reason, message = v1alpha1.ReasonTaintConflict, fmt.Sprintf("somebody else has put the taint %s on the node, which "+
					"takes the place of %s; remove theirs, or this one from the policy", withValue(has), withValue(taint))
			}
		case !there && m.mustStayUntainted():
			reason, message = v1alpha1.ReasonNodeNotInitialized, "Karpenter has not initialized the node yet, and would start another one for a node with the taint "+
				withValue(taint)+". The taint follows"
		case m.world.Wiring.Reason == "":
			switch reason, message = t.refuses(taint); {
			case there && t.unknown(taint):
				reason = ""
			case reason == "" && !there:
				reason, message = t.refusesOn(m.node, taint)
			}
		case !there:
			reason, message = m.world.Wiring.Reason, m.world.Wiring.Message
		}
		if reason == "" {
			want = append(want, taint)
			continue
		}
		m.kept.reason, m.kept.message = reason, message
	}
	return want
}

// startupTaints are the startup taints that nodes of the policy have or may get; none if it asks for none.
func (g *group) startupTaints() []corev1.Taint {
	if !taintsNewNodes(g.by) {
		return nil
	}
	var taints []corev1.Taint
	for _, m := range g.members {
		taint := m.startupTaint()
		if m.startingUp() == nil && !m.karpenterIgnoresStartup() {
			continue // it gets none
		}
		if !slices.Contains(taints, taint) {
			taints = append(taints, taint)
		}
	}
	if len(taints) == 0 {
		taints = []corev1.Taint{{Key: v1alpha1.TaintStartup, Effect: corev1.TaintEffectNoSchedule}}
	}
	return taints
}

// tainted reports whether the taints of the policy are on its nodes; asked is false if it has none.
func (g *group) tainted(t tolerance) (c metav1.Condition, asked bool) {
	taints, starting := taintsOf(g.by), g.startupTaints()
	if len(taints)+len(starting) == 0 {
		return c, false
	}
	var has []string
	if len(taints) > 0 {
		has = append(has, "the nodes of the policy have its taints: "+strings.Join(names(taints), ", "))
	}
	if len(starting) > 0 {
		has = append(has, "new nodes have a startup taint until they are ready: "+strings.Join(names(starting), ", "))
	}
	c = metav1.Condition{
		Type: v1alpha1.ConditionTainted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonTaintsPresent, Message: strings.Join(has, "; "),
	}
	lacking := g.lacking(t, slices.Concat(taints, starting))
	if len(lacking) == 0 {
		return c, true
	}
	const most, length = 3, 2048
	var messages []string
	for _, k := range lacking[:min(len(lacking), most)] {
		messages = append(messages, k.message)
	}
	c.Status, c.Reason, c.Message = metav1.ConditionFalse, lacking[0].reason, cut(strings.Join(messages, "; "), length)
	if more := len(lacking) - most; more > 0 {
		c.Message += fmt.Sprintf("; and %d more nodes", more)
	}
	return c, true
}

// lacking is why nodes lack taints of the policy: for all of them, or otherwise for single ones.
func (g *group) lacking(t tolerance, taints []corev1.Taint) []kept {
	var all []kept
	add := func(reason, message string) {
		if k := (kept{reason: reason, message: message}); reason != "" && !slices.Contains(all, k) {
			all = append(all, k)
		}
	}
	add(t.world.Wiring.Reason, t.world.Wiring.Message)
	if g.invalid != nil {
		add(v1alpha1.ReasonInvalidWindow, g.invalidWindow())
	}
	if len(all) == 0 {
		for _, taint := range taints {
			add(t.refuses(taint))
		}
	}
	for _, message := range g.startupMissing(t.world) {
		add(v1alpha1.ReasonStartupTaintMissing, message)
	}
	if len(all) > 0 {
		return all
	}
	for _, m := range g.members {
		if m.kept.reason != "" {
			add(m.kept.reason, fmt.Sprintf("node %s: %s", m.node.Name, m.kept.message))
		}
	}
	return all
}

// Retaint is what the taints of a node and the record of ours become when these are to be ours. A taint that is there
// without being recorded is somebody else's and stays as it is, but for the startup taint: whoever put it there, it is
// taken off when it is not wanted any more.
func Retaint(have []corev1.Taint, record string, want []corev1.Taint) (taints []corev1.Taint, newRecord string) {
	var ours []string
	wanted := slices.Clone(want)
	for _, t := range have {
		mine := recordedIn(record, t)
		at := slices.IndexFunc(wanted, func(w corev1.Taint) bool { return stands(t, w) })
		switch {
		case at < 0 && (mine || isStartup(t)):
			continue
		case at >= 0 && mine:
			t.Value = wanted[at].Value
			ours = append(ours, nameOf(t))
		}
		taints = append(taints, t)
		if at >= 0 && !isStartup(t) {
			wanted = slices.Delete(wanted, at, at+1)
		}
	}
	for _, w := range wanted {
		if !slices.ContainsFunc(taints, func(t corev1.Taint) bool { return stands(t, w) }) {
			taints = append(taints, w)
			if !isStartup(w) {
				ours = append(ours, nameOf(w))
			}
		}
	}
	slices.Sort(ours)
	return taints, strings.Join(ours, ",")
}

// stands reports whether a taint takes the place of one that is wanted. A startup taint may have any key and effect.
func stands(have, want corev1.Taint) bool {
	return have.MatchTaint(&want) || isStartup(have) && isStartup(want)
}

// recordedIn says whether the record names a taint as ours.
func recordedIn(record string, t corev1.Taint) bool {
	return record != "" && slices.Contains(strings.Split(record, ","), nameOf(t))
}

// nameOf is what tells a taint from the others of a node: its key and effect.
func nameOf(t corev1.Taint) string { return t.Key + ":" + string(t.Effect) }

// withValue is a taint as kubectl writes it.
func withValue(t corev1.Taint) string {
	if t.Value == "" {
		return nameOf(t)
	}
	return fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect)
}

func names(taints []corev1.Taint) []string {
	var all []string
	for _, t := range taints {
		all = append(all, withValue(t))
	}
	return all
}
