// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// labelDriver is the deploy label of NVIDIA's driver.
const labelDriver = cluster.DeployPrefix + "driver"

// tolerance is what NVIDIA's programs tolerate, and what they are to. A taint is put on a node only when they tolerate
// it, and taken off again when they no longer do: a pod of theirs that ends could not come back otherwise, and the node
// would lose its GPUs. So tolerations come before taints, and go after them.
type tolerance struct {
	snapshot *cluster.Snapshot
	// Ours are the tolerations that the operator must have in the ClusterPolicy.
	Ours []corev1.Toleration
	// coming says that they are not there yet, and are being added.
	coming bool
	// unsafe is why the ClusterPolicy is left as it is though it lacks some; empty: it does not.
	unsafe string
	// full says that policies ask for more tolerations than mostTolerations.
	full  bool
	known map[wantedTaint]taintRefusal // what refuses has found out
}

// wantedTaint is a taint, and whether NVIDIA's DRA driver has to tolerate it rather than the device plugin.
type wantedTaint struct {
	corev1.Taint
	byDriver bool
}

// taintRefusal is why NVIDIA's programs do not tolerate a taint, or are not known to.
type taintRefusal struct {
	reason, message string
	unknown         bool // nothing tells now what they tolerate: a taint that is there stays
}

// mostTolerations is how many tolerations the operator adds to the ClusterPolicy. Each is in the pods of all of NVIDIA's
// DaemonSets, and in an annotation of the ClusterPolicy, of which the API server takes 256 KiB together.
const mostTolerations = 128

// toleranceOf finds what the ClusterPolicy has to tolerate. It is changed only when that cannot hurt what runs, since
// it replaces the pods of all of NVIDIA's DaemonSets; what is there too much meanwhile hurts nobody.
func toleranceOf(s *cluster.Snapshot) tolerance {
	t := tolerance{snapshot: s, known: map[wantedTaint]taintRefusal{}}
	o := s.Plugin.Operands
	if o == nil {
		return t
	}
	t.Ours = o.Ours
	users := slices.DeleteFunc(slices.Clone(o.Tolerations), func(have corev1.Toleration) bool { return clusterpolicy.Among(o.Ours, have) })
	var want []corev1.Toleration
	for _, taint := range taintsToTolerate(s) {
		if !clusterpolicy.Tolerates(slices.Concat(users, want), taint) {
			want = append(want, tolerationOf(taint))
		}
	}
	if t.full = len(want) > mostTolerations; t.full { // those that are there stay
		stay := slices.DeleteFunc(slices.Clone(o.Ours), func(have corev1.Toleration) bool { return !clusterpolicy.Among(want, have) })
		want = slices.DeleteFunc(want, func(x corev1.Toleration) bool { return clusterpolicy.Among(stay, x) })
		want = append(stay, want...)[:mostTolerations]
	}
	if len(want) == len(o.Ours) && !slices.ContainsFunc(want, func(x corev1.Toleration) bool { return !clusterpolicy.Among(o.Ours, x) }) {
		return t
	}
	if t.unsafe = tolerationsUnsafe(s); t.unsafe == "" {
		t.Ours, t.coming = want, true
	}
	return t
}

// taintsToTolerate are the taints that NVIDIA's programs have to tolerate: those that policies ask for, and those of
// ours that are still on nodes. Every taint that NVIDIA's programs tolerate only because the operator added the
// toleration counts too, no matter what put it there: without the toleration the node would lose its device plugin. So
// the loss of the record of our taints costs no node its GPUs, also once the node is released. PreferNoSchedule keeps
// no pod of a DaemonSet off.
func taintsToTolerate(s *cluster.Snapshot) []corev1.Taint {
	var taints []corev1.Taint
	for i := range s.Policies {
		if p := &s.Policies[i]; p.DeletionTimestamp.IsZero() && !p.Spec.Rollout.Paused {
			taints = append(taints, taintsOf(p)...)
			if taintsNewNodes(p) {
				taints = append(taints, startupTaints(s)...)
			}
		}
	}
	for i := range s.Nodes {
		for _, t := range s.Nodes[i].Taints {
			if clusterpolicy.Among(s.Plugin.Operands.Ours, tolerationOf(t)) || recordedIn(s.Nodes[i].Annotations[v1alpha1.AnnotationTaints], t) {
				taints = append(taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: t.Effect})
			}
		}
	}
	taints = slices.DeleteFunc(taints, func(t corev1.Taint) bool { return t.Effect == corev1.TaintEffectPreferNoSchedule })
	slices.SortFunc(taints, func(a, b corev1.Taint) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Value, b.Value))
	})
	return slices.Compact(taints)
}

// taintsOf are the taints that a policy asks for itself, beside the startup taint.
func taintsOf(p *v1alpha1.GPUSharingPolicy) []corev1.Taint {
	var taints []corev1.Taint // most policies have none
	for _, t := range p.Spec.Taints {
		taints = append(taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)})
	}
	return taints
}

// tolerationOf is for the key, so that another value changes no DaemonSet. Who registers nodes with the startup taint
// may choose its effect.
func tolerationOf(taint corev1.Taint) corev1.Toleration {
	t := corev1.Toleration{Key: taint.Key, Operator: corev1.TolerationOpExists, Effect: taint.Effect}
	if isStartupTaint(taint) {
		t.Effect = ""
	}
	return t
}

// tolerationsUnsafe says why a change of the tolerations could hurt what runs; see clusterpolicy.Operands for where
// each is from.
func tolerationsUnsafe(s *cluster.Snapshot) string {
	const mostUsers = 20 // characters, and one of them at least
	o := s.Plugin.Operands
	users := s.Users()
	switch {
	case o.Taken != "":
		return fmt.Sprintf("field manager %q wrote that list since", o.Taken)
	case o.Upgrades:
		return "it would upgrade NVIDIA's driver on every node" // before v26.7 it deletes the pods that use GPUs for that
	case o.Toolkit && len(users) > 0:
		return "it could fail GPU pods, now " + format.ListIn(users, mostUsers)
	case len(s.MpsUsers) > 0:
		return "it would end clients of NVIDIA's MPS, now " + format.ListIn(s.MpsUsers, mostUsers)
	case len(o.Ours) == 0 && s.Now.Before(o.NotBefore): // they may be taken off
		return "until " + format.Clock(o.NotBefore) + ", for another client keeps reverting that"
	}
	return ""
}

// pluginConfigHeld returns why devicePlugin.config of the ClusterPolicy must not change now: NVIDIA's MPS DaemonSet
// mounts that ConfigMap too, so its daemons restart on every node, and their clients end with them. Empty if it may.
func pluginConfigHeld(s *cluster.Snapshot) string {
	if s.Plugin.Operands == nil || len(s.MpsUsers) == 0 {
		return ""
	}
	return fmt.Sprintf("%s: %s; it is changed once these have ended", pluginConfigChange(s), format.List(s.MpsUsers))
}

// pluginConfigChange says what a change of devicePlugin.config does, without the pods that pluginConfigHeld names:
// nodes report it, and no node has news when a pod elsewhere begins or ends.
func pluginConfigChange(s *cluster.Snapshot) string {
	return fmt.Sprintf("a change of ClusterPolicy %s restarts NVIDIA's MPS daemons, which ends their clients", s.Plugin.Operands.Name)
}

// byDriver reports whether the pods of NVIDIA's DRA driver tell what is tolerated on a node: where the GPU Operator
// runs no device plugin, and the driver alone serves the node.
func (t tolerance) byDriver(v *node.View) bool {
	return !v.ReadsConfigs() && t.snapshot.Plugin.Operands == nil && !t.snapshot.Plugin.ClusterPolicy
}

// programsOf are the values of byDriver of the nodes of a group; that of a node of the device plugin if it has none.
func (t tolerance) programsOf(g *Group) []bool {
	var all []bool
	for _, m := range g.Members {
		if is := t.byDriver(m.View); !slices.Contains(all, is) {
			all = append(all, is)
		}
	}
	if len(all) == 0 {
		return []bool{false}
	}
	return all
}

// refuses says why NVIDIA's programs do not tolerate a taint anywhere, with the reason for it; empty: they do.
func (t tolerance) refuses(taint corev1.Taint, byDriver bool) (reason, message string) {
	taint.TimeAdded = nil
	r, known := t.known[wantedTaint{taint, byDriver}]
	if !known {
		r.reason, r.message = t.refusal(taint, byDriver)
		r.unknown = r.reason != "" && t.snapshot.Plugin.Operands == nil && (t.snapshot.Plugin.ClusterPolicy || len(t.pods(byDriver)) == 0)
		t.known[wantedTaint{taint, byDriver}] = r
	}
	return r.reason, r.message
}

// unknown reports whether nothing tells what NVIDIA's programs tolerate: a stand-alone plugin, and the DRA
// driver, have no pod while their DaemonSet replaces it.
func (t tolerance) unknown(taint corev1.Taint, byDriver bool) bool {
	taint.TimeAdded = nil
	return t.known[wantedTaint{taint, byDriver}].unknown
}

// barredFrom reports whether a startup taint keeps NVIDIA's programs off a node, and nothing changes that now.
func (t tolerance) barredFrom(v *node.View) bool {
	return slices.ContainsFunc(v.Node.Taints, func(taint corev1.Taint) bool {
		if !isStartupTaint(taint) {
			return false
		}
		reason, _ := t.refuses(taint, t.byDriver(v))
		return reason != "" && reason != v1alpha1.ReasonTolerationsChanging && !t.unknown(taint, t.byDriver(v))
	})
}

// pods are those of a stand-alone device plugin, or of NVIDIA's DRA driver, that do not end.
func (t tolerance) pods(byDriver bool) []*cluster.Pod {
	var pods []*cluster.Pod
	for i := range t.snapshot.Nodes {
		for p := range t.snapshot.Nodes[i].Pods {
			pod := &t.snapshot.Nodes[i].Pods[p]
			if is := byDriver && pod.DRA || !byDriver && pod.MountsConfig; is && !pod.Terminating {
				pods = append(pods, pod)
			}
		}
	}
	return pods
}

const replacesPods = ", which replaces the pods of NVIDIA's programs node by node"

func (t tolerance) refusal(taint corev1.Taint, byDriver bool) (reason, message string) {
	o, s := t.snapshot.Plugin.Operands, t.snapshot
	switch {
	case taint.Effect == corev1.TaintEffectPreferNoSchedule:
		return "", ""
	case o == nil && s.Plugin.ClusterPolicy:
		return v1alpha1.ReasonTolerationMissing, "the ClusterPolicy could not be read, so it is not known what NVIDIA's programs tolerate"
	case o == nil:
		return t.podsRefuse(taint, byDriver)
	case clusterpolicy.Tolerates(o.Tolerations, taint):
		return "", ""
	case t.full && !clusterpolicy.Among(t.Ours, tolerationOf(taint)):
		return v1alpha1.ReasonTolerationMissing, fmt.Sprintf("The operator adds %d tolerations at most to ClusterPolicy %s. "+
			"Use one taint for several policies, or add %s there", mostTolerations, o.Name, writtenToleration(tolerationOf(taint)))
	case t.coming && clusterpolicy.Among(t.Ours, tolerationOf(taint)):
		return v1alpha1.ReasonTolerationsChanging, fmt.Sprintf("the toleration of %s is being added to ClusterPolicy %s"+
			replacesPods, action.NameOf(taint), o.Name)
	}
	unsafe := cmp.Or(t.unsafe, tolerationsUnsafe(s))
	if unsafe == "" {
		return v1alpha1.ReasonPaused, fmt.Sprintf("the toleration of %s is to be added to ClusterPolicy %s first"+
			replacesPods, action.NameOf(taint), o.Name)
	}
	return v1alpha1.ReasonTolerationMissing, fmt.Sprintf("Toleration not added: %s; add %s to daemonsets.tolerations of the ClusterPolicy",
		unsafe, writtenToleration(tolerationOf(taint)))
}

// podsRefuse is refusal where the DaemonSet is a stand-alone device plugin's or the DRA driver's.
func (t tolerance) podsRefuse(taint corev1.Taint, byDriver bool) (reason, message string) {
	program, value := "NVIDIA's device plugin", "tolerations"
	if byDriver {
		program, value = "NVIDIA's DRA driver", "kubeletPlugin.tolerations"
	}
	pods := t.pods(byDriver)
	for _, p := range pods {
		if !clusterpolicy.Tolerates(p.Tolerations, taint) {
			return v1alpha1.ReasonTolerationMissing, fmt.Sprintf("%s lacks a toleration; add %s to the DaemonSet of pod %s/%s (Helm: %s)",
				program, writtenToleration(tolerationOf(taint)), p.Namespace, p.Name, value)
		}
	}
	if len(pods) == 0 {
		return v1alpha1.ReasonTolerationsChanging, fmt.Sprintf("no pod of %s is there yet that would tell what it tolerates", program)
	}
	return "", ""
}

// refusesOn says which pods on a node do not tolerate a taint yet; empty: all do. The driver's pods take the toleration
// over when they are next restarted, and it is their DaemonSet that counts.
func (t tolerance) refusesOn(n *cluster.Node, taint corev1.Taint) (reason, message string) {
	if taint.Effect == corev1.TaintEffectPreferNoSchedule {
		return "", ""
	}
	o := t.snapshot.Plugin.Operands
	var pods []string
	for _, p := range n.Pods {
		driver := o != nil && o.Driver && p.KeptBy(labelDriver)
		if p.Serves && p.Controller == "DaemonSet" && !p.Terminating && !driver && !clusterpolicy.Tolerates(p.Tolerations, taint) {
			pods = append(pods, p.Namespace+"/"+p.Name)
		}
	}
	if len(pods) == 0 {
		return "", ""
	}
	slices.Sort(pods)
	return v1alpha1.ReasonTolerationsChanging, fmt.Sprintf("Waiting for %s to tolerate %s; if not NVIDIA's, add %s "+
		"(Helm: node-feature-discovery.worker.tolerations)", format.List(pods), action.NameOf(taint), writtenToleration(tolerationOf(taint)))
}

// writtenToleration is a toleration as YAML on one line.
func writtenToleration(t corev1.Toleration) string {
	effect := ""
	if t.Effect != "" {
		effect = ", effect: " + string(t.Effect)
	}
	return fmt.Sprintf("{key: %s, operator: %s%s}", t.Key, t.Operator, effect)
}
