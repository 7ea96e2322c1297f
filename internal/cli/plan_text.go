// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// plan writes what would happen after a change of the policies: of each node that one of them governs then, or now.
func (t *text) plan(s cluster.Snapshot, c change) {
	changed := c.of(s)
	before, after := rollout.Decide(s), rollout.Decide(changed)
	var moved []rollout.NodeState
	if hasTwoStacks(&changed) && len(c.applied) > 0 {
		moved = rollout.Decide(movedOver(changed)).Nodes
	}
	was := map[string]rollout.NodeState{}
	for _, n := range before.Nodes {
		was[n.Node] = n
	}
	for _, policy := range c.applied {
		t.paragraph()
		existed := slices.ContainsFunc(s.Policies, named(policy.Name))
		t.policy(policy.Name, existed, after.Policies[policy.Name], after.Unmet[policy.Name])
		t.rows("classes", classesOf(after))
		t.nodes(policy.Name, was, after, s.Nodes)
		t.stacks(policy.Name, &changed, after.Nodes, moved)
	}
	for _, name := range c.deleted {
		t.paragraph()
		t.deleted(name, c, s, before.Nodes, after.Nodes)
		t.nodes(name, was, after, s.Nodes)
	}
	if len(c.deleted) > 0 {
		t.clusterPolicy(changed, before, after)
	}
}

// planText is what plan prints of a change.
func planText(ctx context.Context, c client.Client, s cluster.Snapshot, asked change, width int) (string, error) {
	groups, err := readGroups(ctx, c, asked.of(s))
	if err != nil {
		return "", advise(err)
	}
	preview := text{width: width}
	preview.lacking(asked.lacks)
	preview.plan(s, asked)
	preview.nodeGroups(groups, asked.applied)
	return preview.String(), nil
}

// paragraph begins one, after others.
func (t *text) paragraph() {
	if t.Len() > 0 {
		t.WriteString("\n")
	}
}

// policy writes what the policy as a whole comes to.
func (t *text) policy(name string, existed bool, s v1alpha1.GPUSharingPolicyStatus, unmet []string) {
	what := "new"
	if existed {
		what = "changed"
	}
	t.row(0, "", fmt.Sprintf("POLICY %s (%s): selects %s", name, what, count(int(s.Nodes.Matched), "node")))
	if c, found := condition.Find(s.Conditions, v1alpha1.ConditionAccepted); found && c.Reason != v1alpha1.ReasonAccepted {
		label := "note"
		if c.Status == metav1.ConditionFalse {
			label = "not accepted"
		}
		t.row(2, label, fmt.Sprintf("%s: %s", c.Reason, c.Message))
	}
	now, then := map[string]int64{}, map[string]int64{}
	shared := []string{}
	for _, r := range s.Resources {
		put(now, r.Name, r.Advertised)
		put(then, r.Name, r.Expected)
		if r.Oversubscription > 0 {
			shared = append(shared, fmt.Sprintf("%d containers share each that advertises %s", r.Oversubscription, r.Name))
		}
	}
	if s.NextWindowTime != nil {
		t.row(2, "starts", fmt.Sprintf("at %s, when the next maintenance window opens (rollout.windows); what disrupts no pod starts at once",
			s.NextWindowTime.Format(time.RFC3339)))
	}
	if s.Nodes.Matched > s.Nodes.Conflicted {
		t.row(2, "advertised", resources(now))
		t.row(2, "afterwards", resources(then))
		t.rows("shared", shared)
	}
	if c, asked := condition.Find(s.Conditions, v1alpha1.ConditionTainted); asked {
		t.row(2, "taints", c.Message)
	}
	t.rows("affected", unmet)
}

func put(counts map[string]int64, name string, n int64) {
	if n != 0 {
		counts[name] = n
	}
}

// nodes writes what would be done to each node, and names those on which nothing is.
func (t *text) nodes(policy string, was map[string]rollout.NodeState, after rollout.Decision, objects []cluster.Node) {
	waits := func(n rollout.NodeState) bool {
		return n.Policy == policy && n.Reason == v1alpha1.ReasonMPSClientsRunning
	}
	if slices.ContainsFunc(after.Nodes, waits) {
		t.row(2, "at first", fmt.Sprintf("%s: %s", v1alpha1.ReasonMPSClientsRunning, after.PluginConfigHeld))
	}
	of := map[string]*cluster.Node{}
	for i := range objects {
		of[objects[i].Name] = &objects[i]
	}
	var same []string
	for _, n := range after.Nodes {
		switch before := was[n.Node].Policy; {
		case n.Policy != policy && before != policy:
		case n.Policy == policy && n.State == node.UpToDate:
			same = append(same, n.Node)
		default:
			t.node(n, before, of[n.Node], policy)
		}
	}
	if len(same) > 0 {
		t.WriteString("\n")
		t.row(0, "", fmt.Sprintf("Nothing changes on %s: %s", count(len(same), "node"), strings.Join(same, ", ")))
	}
}

// node writes what would be done to a node.
func (t *text) node(n rollout.NodeState, before string, object *cluster.Node, policy string) {
	t.WriteString("\n")
	t.row(0, "", "NODE "+n.Node+handover(n.Policy, before, policy))
	if n.State == node.Unsupported || n.State == node.Unknown {
		t.row(2, "cannot", fmt.Sprintf("%s: %s", n.Reason, n.Message))
		t.row(2, "advertised", resources(n.Advertised)+", as before")
		return
	}
	t.row(2, "advertised", resources(n.Advertised))
	switch {
	case n.Expected != nil:
		t.row(2, "afterwards", resources(n.Expected))
	case n.Retained:
		t.row(2, "afterwards", "what it does now: releasePolicy Retain leaves the node as it is")
		return
	case n.Policy == "":
		t.row(2, "afterwards", "what it did before the operator first changed it")
	}
	p := partsOf(n, plan.Devices(object.GPU.Status.Devices))
	t.rows("returns to", p.before.lines())
	t.rows("unused", p.unused.lines())
	t.rows("memory", p.memory.lines())
	t.rows("steps", steps(n, object.Labels[v1alpha1.LabelConfig]))
	users := make([]string, 0, len(n.Blockers))
	for _, u := range n.Blockers {
		users = append(users, u.String())
	}
	t.rows("blocked by", users)
	if n.Message != "" {
		t.row(2, "at first", fmt.Sprintf("%s: %s", n.Reason, n.Message))
	}
}

// handover says who governs the node, if that changes.
func handover(by, before, policy string) string {
	switch {
	case by == before:
		return ""
	case by == "":
		return fmt.Sprintf(": policy %s no longer governs it, and no other does", policy)
	case by != policy:
		return fmt.Sprintf(": policy %s governs it instead", by)
	case before != "":
		return fmt.Sprintf(": so far policy %s governs it", before)
	}
	return ""
}

// steps are those of the agent, word for word, and what NVIDIA's device plugin or DRA driver is told.
func steps(n rollout.NodeState, selected string) []string {
	all := slices.Clone(n.Plan)
	switch {
	case dra.IsConfig(n.ConfigName):
		if len(all) > 0 {
			all = append(all, "NVIDIA's DRA driver: restart its pod on the node, so that it publishes these GPUs; running pods keep theirs")
		}
	case n.ConfigName == selected:
	case n.ConfigName == "":
		all = append(all, fmt.Sprintf("device plugin: take back the label %s", v1alpha1.LabelConfig))
	default:
		all = append(all, "device plugin: select configuration "+n.ConfigName)
	}
	return all
}
