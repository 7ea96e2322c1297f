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
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Which taints the nodes of a policy have, and what NVIDIA's programs must tolerate for that:
//
//	policy → tolerations in the ClusterPolicy → NVIDIA's pods tolerate them → taints on the nodes
//	new node → startup taint → up to date → taken off

// keepTaints decides which taints a node has for its policy's sake.
func keepTaints(m *member, g policy.Governed, awaited *v1alpha1.GPUSharingPolicy, t tolerance) {
	if g.By != nil && g.By.Spec.Rollout.Paused {
		m.TaintStatus = taintStatus{v1alpha1.ReasonPaused, "the rollout is paused (rollout.paused)"}
		return
	}
	if g.By == nil && m.Node.GPU.Spec.Baseline != nil && node.Retained(m.Node.GPU.Spec) {
		return // the last policy says that the node stays as it is
	}
	var want []corev1.Taint
	if g.By != nil {
		want = wantTaints(m, g.By, t)
	}
	if wantStartup(m, g, awaited, t) {
		want = append(want, toleratedStartup(m, t))
		explainStartup(m, g, t)
	}
	if len(want) == 0 && m.Node.Annotations[v1alpha1.AnnotationTaints] == "" && startupTaintOn(m.View) == nil {
		return
	}
	taints, record := Retaint(m.Node.Taints, m.Node.Annotations[v1alpha1.AnnotationTaints], want)
	if record == m.Node.Annotations[v1alpha1.AnnotationTaints] && slices.Equal(taints, m.Node.Taints) {
		return
	}
	keep := action.KeepTaints{Node: m.Node.Name, Want: want}
	if g.By != nil {
		keep.Policy = action.PolicyRef{Name: g.By.Name, Generation: g.By.Generation}
	}
	m.Actions = append(m.Actions, keep)
}

// toleratedStartup is the startup taint that a node is to have; as long as NVIDIA's programs do not tolerate it, the one that it has.
func toleratedStartup(m *member, t tolerance) corev1.Taint {
	startup := startupTaint(m.View)
	if has := startupTaintOn(m.View); has != nil && has.Key != startup.Key && !toleratesStartup(m, t) {
		return corev1.Taint{Key: has.Key, Effect: corev1.TaintEffectNoSchedule} // NVIDIA's programs would not come
	}
	return startup
}

// wantTaints are the taints of a policy that the node is to have now: those that NVIDIA's programs tolerate.
func wantTaints(m *member, by *v1alpha1.GPUSharingPolicy, t tolerance) []corev1.Taint {
	var want []corev1.Taint
	record := m.Node.Annotations[v1alpha1.AnnotationTaints]
	for _, taint := range taintsOf(by) {
		at := slices.IndexFunc(m.Node.Taints, func(have corev1.Taint) bool { return have.MatchTaint(&taint) })
		there := at >= 0 && recordedIn(record, taint)
		reason, message := "", ""
		switch {
		case at >= 0 && !there: // it was there before us and stays
			if has := m.Node.Taints[at]; has.Value != taint.Value {
				reason, message = v1alpha1.ReasonTaintConflict, fmt.Sprintf("a user or another controller has put the taint %s on the node, which "+
					"takes the place of %s; remove theirs, or this one from the policy", action.WithValue(has), action.WithValue(taint))
			}
		case !there && node.MustStayUntainted(m.View):
			reason, message = v1alpha1.ReasonNodeNotInitialized, "Karpenter has not initialized the node yet, and would start another one for a node with the taint "+
				action.WithValue(taint)+". The taint follows"
		case !m.NoPlugin():
			switch reason, message = t.refuses(taint, t.byDriver(m.View)); {
			case there && t.unknown(taint, t.byDriver(m.View)):
				reason = ""
			case reason == "" && !there:
				reason, message = t.refusesOn(m.Node, taint)
			}
		case !there:
			reason, message = m.Snapshot.Plugin.Reason, m.Snapshot.Plugin.Message
		}
		if reason == "" {
			want = append(want, taint)
			continue
		}
		m.TaintStatus = taintStatus{reason, message}
	}
	return want
}

// startupTaintsOf are the startup taints that nodes of the policy have or may get; none if it asks for none.
func startupTaintsOf(g *Group) []corev1.Taint {
	if !taintsNewNodes(g.By) {
		return nil
	}
	var taints []corev1.Taint
	for _, m := range g.Members {
		taint := startupTaint(m.View)
		if startupTaintOn(m.View) == nil && !karpenterIgnoresStartup(m.View) {
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

// taintsCondition reports whether the taints of the policy are on its nodes; asked is false if it has none.
func taintsCondition(g *Group, t tolerance) (c metav1.Condition, requested bool) {
	taints, starting := taintsOf(g.By), startupTaintsOf(g)
	if len(taints)+len(starting) == 0 {
		return c, false
	}
	const mostStarting = 140 // characters: the names of autoscalers are long
	var has []string
	if len(taints) > 0 {
		has = append(has, "The nodes of the policy have its taints: "+format.List(action.Names(taints)))
	}
	if len(starting) > 0 {
		has = append(has, "new nodes have a startup taint until they are ready: "+format.ListIn(action.Names(starting), mostStarting))
	}
	c = metav1.Condition{
		Type: v1alpha1.ConditionTainted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonTaintsPresent, Message: strings.Join(has, "; "),
	}
	lacking := taintsLacking(g, t, slices.Concat(taints, starting))
	if len(lacking) == 0 {
		return c, true
	}
	var messages []string
	for _, k := range lacking {
		messages = append(messages, k.Message)
	}
	c.Status, c.Reason = metav1.ConditionFalse, lacking[0].Reason
	c.Message = format.Fit(messages, format.MostMessage, func(i int) string { return fmt.Sprintf("and %d more reasons", len(messages)-i) })
	return c, true
}

// taintsLacking is why nodes lack taints of the policy: for all of them, or otherwise for single ones.
func taintsLacking(g *Group, t tolerance, taints []corev1.Taint) []taintStatus {
	var all []taintStatus
	add := func(reason, message string) {
		if k := (taintStatus{Reason: reason, Message: message}); reason != "" && !slices.Contains(all, k) {
			all = append(all, k)
		}
	}
	if len(g.Members) == 0 { // otherwise NVIDIA's DRA driver serves all of them
		add(t.snapshot.Plugin.Reason, t.snapshot.Plugin.Message)
	}
	if g.Invalid != nil {
		add(v1alpha1.ReasonInvalidWindow, g.InvalidWindow())
	}
	if len(all) == 0 {
		for _, taint := range taints {
			for _, byDriver := range t.programsOf(g) {
				add(t.refuses(taint, byDriver))
			}
		}
	}
	for _, message := range startupMissing(g, t.snapshot) {
		add(v1alpha1.ReasonStartupTaintMissing, message)
	}
	if len(all) > 0 {
		return all
	}
	for _, m := range g.Members {
		if m.TaintStatus.Reason != "" {
			add(m.TaintStatus.Reason, fmt.Sprintf("node %s: %s", m.Node.Name, m.TaintStatus.Message))
		}
	}
	return all
}

// Retaint is what the taints of a node and the record of ours become when these are to be ours. A taint that is there
// without being recorded is another controller's and stays as it is, but for the startup taint: no matter what put it
// there, it is taken off when it is not wanted any more.
func Retaint(have []corev1.Taint, record string, want []corev1.Taint) (taints []corev1.Taint, newRecord string) {
	var ours []string
	wanted := slices.Clone(want)
	for _, t := range have {
		mine := recordedIn(record, t)
		at := slices.IndexFunc(wanted, func(w corev1.Taint) bool { return takesPlaceOf(t, w) })
		switch {
		case at < 0 && (mine || isStartupTaint(t)):
			continue
		case at >= 0 && t.Key == v1alpha1.TaintStartup && wanted[at].Key == v1alpha1.TaintStartupAutoscaler:
			continue // the node has told its group later
		case at >= 0 && mine:
			t.Value = wanted[at].Value
			ours = append(ours, action.NameOf(t))
		}
		taints = append(taints, t)
		if at >= 0 && !isStartupTaint(t) {
			wanted = slices.Delete(wanted, at, at+1)
		}
	}
	for _, w := range wanted {
		if !slices.ContainsFunc(taints, func(t corev1.Taint) bool { return takesPlaceOf(t, w) }) {
			taints = append(taints, w)
			if !isStartupTaint(w) {
				ours = append(ours, action.NameOf(w))
			}
		}
	}
	slices.Sort(ours)
	return taints, strings.Join(ours, ",")
}

// takesPlaceOf reports whether a taint takes the place of one that is wanted. A startup taint may have any key and
// effect.
func takesPlaceOf(have, want corev1.Taint) bool {
	return have.MatchTaint(&want) || isStartupTaint(have) && isStartupTaint(want)
}

// recordedIn reports whether the record names a taint as ours.
func recordedIn(record string, t corev1.Taint) bool {
	return record != "" && slices.Contains(strings.Split(record, ","), action.NameOf(t))
}
