// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// status prints policies and nodes, or some nodes only.
func (p *Program) status(ctx context.Context, f *flags, names []string) error {
	c, err := connect(f)
	if err != nil {
		return err
	}
	w, err := p.read(ctx, c)
	if err != nil {
		return advise(err)
	}
	for _, name := range names {
		if !slices.ContainsFunc(w.Nodes, func(n rollout.Node) bool { return n.Name == name }) {
			return fmt.Errorf("%q is no node with GPUs; `kubectl get gpunodes` lists those that are", name)
		}
	}
	shown := text{width: p.Width}
	why, err := noController(ctx, c, p.Clock.Now())
	if err != nil {
		return advise(err)
	}
	if why != "" {
		shown.row(0, "", fmt.Sprintf("No controller runs, so nothing changes and what follows may be out of date: %s.", why))
		shown.WriteString("\n")
	}
	shown.status(w, names)
	return p.write(shown.String())
}

// status writes what is so: all policies and nodes, or the named nodes only.
func (t *text) status(w rollout.World, only []string) {
	if len(only) == 0 {
		t.policies(w.Policies, w.Now)
	}
	pending := unready(w)
	slices.SortFunc(w.Nodes, func(a, b rollout.Node) int { return strings.Compare(a.Name, b.Name) })
	for i := range w.Nodes {
		n := &w.Nodes[i]
		if len(only) > 0 && !slices.Contains(only, n.Name) {
			continue
		}
		if t.Len() > 0 {
			t.WriteString("\n")
		}
		t.statusOf(n, pending[n.Name])
	}
	if len(w.Nodes) == 0 {
		t.row(0, "", "No node has a GPUNode. The controller makes one for each node that NVIDIA's GPU Feature Discovery labels "+
			"nvidia.com/gpu.present=true; look at those labels, and at the controller's log.")
	}
}

// policies writes a table of the policies, and why one is not ready.
func (t *text) policies(policies []v1alpha1.GPUSharingPolicy, now time.Time) {
	if len(policies) == 0 {
		t.row(0, "", "There is no GPUSharingPolicy: all GPUs are as they were found.")
		return
	}
	table := tabwriter.NewWriter(t, 0, 0, 3, ' ', 0)
	rows := []string{"POLICY\tSTRATEGY\tNODES\tREADY\tUPDATED\tBLOCKED\tSTATUS\tAGE"}
	var why text
	why.width = t.width
	for i := range policies {
		p, n := &policies[i], policies[i].Status.Nodes
		state, because := stateOf(p.Status.Conditions)
		if !observed(p) && p.Status.ObservedGeneration > 0 {
			because = fmt.Sprintf("the controller has not observed generation %d of the policy; its last report is on generation %d: %s",
				p.Generation, p.Status.ObservedGeneration, state)
			state = notObserved
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s", p.Name, p.Spec.Sharing.Strategy, n.Matched, n.Ready, n.Updated,
			n.Blocked, state, age(p.CreationTimestamp.Time, now)))
		if because != "" {
			why.row(0, "", fmt.Sprintf("why %s: %s", p.Name, because))
		}
		if more := unlisted(p); more > 0 {
			why.row(0, "", fmt.Sprintf("not listed by %s: %s not ready besides the worst in status.pending; their state below is decided from "+
				"their own objects", p.Name, count(more, "node")))
		}
		for _, c := range p.Status.Conditions {
			untainted := c.Type == v1alpha1.ConditionTainted && c.Status == metav1.ConditionFalse
			if untainted || c.Type == v1alpha1.ConditionWorkloadsAffected {
				why.row(0, "", fmt.Sprintf("%s of %s: %s", c.Type, p.Name, c.Message))
			}
		}
	}
	_, _ = fmt.Fprintln(table, strings.Join(rows, "\n")) // a strings.Builder takes everything
	_ = table.Flush()
	t.WriteString(why.String())
}

// age is how long ago a time was, as kubectl prints it.
func age(since, now time.Time) string {
	if since.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(now.Sub(since))
}

// notObserved is the state of a policy whose last report is on an earlier generation.
const notObserved = "NotObserved"

// stateOf is Ready, or the reason and the message why not. A policy that governs some of its nodes only says so too.
func stateOf(conditions []metav1.Condition) (state, why string) {
	ready, found := condition.Find(conditions, v1alpha1.ConditionReady)
	accepted, _ := condition.Find(conditions, v1alpha1.ConditionAccepted)
	switch {
	case !found:
		return v1alpha1.ReasonAwaitingReport, "nobody has reported yet; look at the pods with " +
			"app.kubernetes.io/name=gpu-sharing-controller and gpu-sharing-agent"
	case ready.Status != metav1.ConditionTrue:
		return ready.Reason, ready.Message
	case accepted.Status == metav1.ConditionFalse:
		return accepted.Reason, accepted.Message
	}
	return v1alpha1.ReasonReady, ""
}

// statusOf writes a node with its GPUs.
func (t *text) statusOf(n *rollout.Node, pending pendingNode) {
	by := "no policy"
	if policy := cmp.Or(pending.policy, n.GPU.Spec.PolicyName); policy != "" {
		by = "policy " + policy
	}
	state, why := stateOf(n.GPU.Status.Conditions)
	if pending.NodeName != "" {
		state, why = pending.Reason, pending.Message
		if pending.State != "" {
			state += " (" + pending.State + ")"
		}
	}
	if !n.AgentReady && pending.NodeName == "" {
		state, why = v1alpha1.ReasonAgentNotReporting,
			"the agent on the node is not Ready; look at the pods with app.kubernetes.io/name=gpu-sharing-agent there"
	}
	t.row(0, "", fmt.Sprintf("NODE %s   %s   %s", n.Name, by, state))
	if why != "" {
		t.row(2, "why", why)
	}
	t.row(2, "advertises", resources(offers(n)))
	t.rows("plan", pending.Plan)
	t.rows("blocked by", blockers(&n.GPU))
	t.picture(n)
}

// blockers are the pods and processes that block the change of a node, a line for each.
func blockers(n *v1alpha1.GPUNode) []string {
	lines := make([]string, 0, len(n.Status.Rollout.Blockers))
	for _, b := range n.Status.Rollout.Blockers {
		name := fmt.Sprintf("pod %s/%s", b.Namespace, b.Name)
		if b.Kind == v1alpha1.BlockerKindProcess {
			name = fmt.Sprintf("process %d (%s)", b.PID, b.Name)
		}
		uses := ""
		for _, d := range n.Status.Devices {
			if d.UUID == b.DeviceUUID {
				uses = fmt.Sprintf(" uses GPU %d", d.Index)
			}
		}
		if b.Instance != nil {
			uses += fmt.Sprintf(", instance %d", *b.Instance)
		}
		lines = append(lines, fmt.Sprintf("%s%s: %s", name, uses, b.Handling))
	}
	return slices.Compact(lines)
}

// offers are the resources that a node advertises.
func offers(n *rollout.Node) map[string]int64 {
	offers := map[string]int64{}
	for name, count := range n.Allocatable {
		put(offers, name, count)
	}
	return offers
}
