// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package history

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// mostOfAFight is how often the operator may write an object in two hours in which another controller sets back again and again what it writes: a
// change with its way back, and a few repetitions. MostAtRest is the same for eight hours in which no fault happens: a change, its way back, and
// another attempt. mostRestarts is how often it may evict a workload or restart a program in either.
const (
	mostOfAFight = 40
	MostAtRest   = 60
	mostRestarts = 12
)

// Bounded looks whether anything was done too often.
func Bounded[M Machine](w World[M], when string, most int) {
	count := w.Counted()
	for _, what := range slices.Sorted(maps.Keys(count)) {
		begins := func(with string) bool { return strings.HasPrefix(what, with) }
		limit := most
		switch {
		case begins("evict ") || begins("restart "):
			limit = mostRestarts
		case begins("pod ") || begins("ask ") || strings.Contains(what, "/pods/") || strings.HasSuffix(what, "/status"):
			limit = 4 * most // a trigger for the kubelet, a refused eviction or a report, which disturb nobody
		}
		if count[what] > limit {
			w.Breaks("bounded", "%s: %d times %s", what, count[what], when)
		}
	}
}

// faultsStop ends every fault. Pods of users stay: what is reported at rest has a cause.
func faultsStop[M Machine](w World[M]) {
	w.Tell("the faults end")
	w.EndFaults()
	w.Rest()
	truthful(w)
}

// usersLeave ends the users, edits the policies so that what failed is tried again, and looks whether every node gets there.
func usersLeave[M Machine](w World[M]) {
	w.Tell("the users leave, and the policies are edited")
	for _, m := range w.Machines() {
		for _, name := range w.UserPods(m) {
			w.EndPod(m, name)
		}
		m.Hardware().Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].Processes = nil
			}
		})
		w.Repair(m)
	}
	for _, p := range w.ListPolicies() {
		p.Spec.Rollout.Paused, p.Spec.Rollout.FailureThreshold, p.Spec.Rollout.Reboot = false, 10, v1alpha1.RebootModeIfRequired
		w.UpdatePolicy(&p)
	}
	w.Rest()
	truthful(w)
	progressed(w)
	w.CheckBudget()
}

// policiesGo deletes every policy, and looks whether everything is as it was before the operator.
func policiesGo[M Machine](w World[M]) {
	w.DeletePolicies()
	w.Tell("every policy is deleted")
	w.Rest()
	w.CheckRestored()
	w.CheckBudget()
}

// truthful looks whether what is said of each policy and each node at rest is so.
func truthful[M Machine](w World[M]) {
	for _, p := range w.ListPolicies() {
		c, _ := condition.Find(p.Status.Conditions, v1alpha1.ConditionReady)
		if c.ObservedGeneration != p.Generation {
			w.Breaks("truth", "policy %s is of generation %d, and its status of %d", p.Name, p.Generation, c.ObservedGeneration)
		}
		for _, m := range w.Machines() {
			by, want, err := w.Desired(m)
			if c.Status != "True" || by == nil || by.Name != p.Name || w.Unknown(m, by) {
				continue
			}
			if problem := w.Differs(m, want); err != nil || m.IsOff() || problem != "" {
				w.Breaks("truth", "policy %s is Ready, and node %s is not (off %v, %v): %s", p.Name, m.NodeName(), m.IsOff(), err, problem)
			}
		}
		for _, n := range p.Status.Pending {
			if problem := noCause(w, &p, n); problem != "" {
				w.Breaks("truth", "node %s under policy %s, %s (%s), at rest: %s: %s", n.NodeName, p.Name, n.State, n.Reason, problem, n.Message)
			}
		}
	}
}

// noCause says why the reason of a node that waits at rest is none; empty: it is one.
func noCause[M Machine](w World[M], by *v1alpha1.GPUSharingPolicy, n v1alpha1.PendingNode) string {
	all := w.Machines()
	at := slices.IndexFunc(all, func(m M) bool { return m.NodeName() == n.NodeName })
	if at < 0 {
		return "there is no such node"
	}
	m, r := all[at], by.Spec.Rollout
	failed := by.Status.Nodes.Failed
	for _, o := range by.Status.Pending {
		if o.Reason == v1alpha1.ReasonDrainTimedOut { // what users keep from changing tells nothing of the change
			failed--
		}
	}
	for _, cause := range []struct {
		reasons   []string
		is        bool
		otherwise string
	}{
		{[]string{v1alpha1.ReasonWaitingForBudget, v1alpha1.ReasonWaitingForFirst}, false, "nothing goes on that it could wait for"},
		{[]string{v1alpha1.ReasonPaused}, r.Paused, "it is not paused"},
		{[]string{v1alpha1.ReasonRolloutHalted}, failed >= r.FailureThreshold, "fewer nodes failed than may"},
		{[]string{v1alpha1.ReasonConfiguringDevicePlugin}, false, "all is configured"},
		{[]string{v1alpha1.ReasonAgentNotReporting}, !w.AgentRuns(m), "the agent is Ready"},
		{[]string{v1alpha1.ReasonDRADriverActive, v1alpha1.ReasonSlicerActive}, w.OfferedByOthers(m, n.Reason), "nobody else offers the GPUs"},
		{[]string{v1alpha1.ReasonDriverUpgrade, v1alpha1.ReasonNodeMaintenance}, w.InMaintenance(m), "there is no maintenance"},
		{
			[]string{v1alpha1.ReasonGPUInUse, v1alpha1.ReasonDrainTimedOut},
			strings.Contains(n.Message, "process ") || w.NamesUser(m, n.Message), "no pod or ResourceClaim that it names is there",
		},
	} {
		if slices.Contains(cause.reasons, n.Reason) && !cause.is {
			return cause.otherwise
		}
	}
	return ""
}

// progressed: every machine that runs is as its policy desires, whatever became of the others.
func progressed[M Machine](w World[M]) {
	for _, m := range w.Machines() {
		by, want, err := w.Desired(m)
		if m.IsOff() || by == nil || err != nil || w.OfferedByOthers(m, "") || w.Excused(m, by) {
			continue
		}
		if problem := cmp.Or(w.Unready(m, by), w.Differs(m, want)); problem != "" {
			w.Breaks("progress", "node %s under policy %s: %s", m.NodeName(), by.Name, problem)
		}
	}
}

// Left says what of the operator is left on a node, or which label is not as it was; empty: nothing. Theirs reports what another controller has
// set, which nobody restores.
func Left(was, is cluster.Node, theirs func(name, value string) bool) string {
	for _, label := range []string{
		v1alpha1.LabelConfig, v1alpha1.LabelMIGManager, v1alpha1.LabelMIGConfig, v1alpha1.LabelOverridden,
		"nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.gpu-feature-discovery",
	} {
		if value := is.Labels[label]; value != was.Labels[label] && !theirs(label, value) {
			return fmt.Sprintf("label %s is %q and was %q", label, value, was.Labels[label])
		}
	}
	for name, value := range is.Annotations {
		if strings.HasPrefix(name, v1alpha1.Group+"/") && name != v1alpha1.AnnotationRunsAgent && !theirs(name, value) {
			return fmt.Sprintf("annotation %s is left: %q", name, value)
		}
	}
	for _, t := range is.Taints {
		had := slices.ContainsFunc(was.Taints, func(o corev1.Taint) bool { return o.MatchTaint(&t) })
		if !had && t.Key != corev1.TaintNodeUnreachable && !theirs(v1alpha1.AnnotationTaints, "") {
			return fmt.Sprintf("taint %s is left", t.Key)
		}
	}
	if spec := is.GPU.Spec; spec.Baseline != nil || len(spec.Devices) > 0 {
		return fmt.Sprintf("GPUNode.spec is not empty: %+v", spec)
	}
	return ""
}
