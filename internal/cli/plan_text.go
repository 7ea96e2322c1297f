// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// plan writes what would happen after a change of the policies: of each node that one of them governs then, or now.
func (t *text) plan(s cluster.Snapshot, c change) {
	changed := c.of(s)
	before, after := rollout.Decide(s), rollout.Decide(changed)
	var moved []rollout.NodeState
	c.otherStack = c.otherStack || hasTwoStacks(&changed)
	if c.otherStack && len(c.applied) > 0 {
		moved = rollout.Decide(movedOver(changed)).Nodes
	}
	was := map[string]rollout.NodeState{}
	for _, n := range before.Nodes {
		was[n.Node] = n
	}
	for _, policy := range c.applied {
		t.paragraph()
		t.policy(&policy, changeOf(s, &policy), after, s.Nodes)
		t.rows("classes", classesOf(after))
		t.nodes(policy.Name, was, after, s.Nodes)
		if c.otherStack {
			t.stacks(policy.Name, &changed, after.Nodes, moved)
		}
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
	preview.paragraph()
	preview.row(0, "", "OUTCOME "+outcomeOf(s, asked).Error())
	preview.nodeGroups(groups, asked.applied) // last, since it is pasted
	return preview.String(), nil
}

// paragraph begins one, after others.
func (t *text) paragraph() {
	if t.Len() > 0 {
		t.WriteString("\n")
	}
}

// words for what becomes of a policy.
var changeWords = map[string]string{changeCreate: "new", changeUpdate: "changed", changeNone: "unchanged"}

// policy writes what the policy as a whole comes to.
func (t *text) policy(policy *v1alpha1.GPUSharingPolicy, change string, after rollout.Decision, nodes []cluster.Node) {
	name, s := policy.Name, after.Policies[policy.Name]
	t.row(0, "", fmt.Sprintf("POLICY %s (%s): selects %s", name, changeWords[change], count(int(s.Nodes.Matched), "node")))
	if c, found := condition.Find(s.Conditions, v1alpha1.ConditionAccepted); found && c.Reason != v1alpha1.ReasonAccepted {
		label := "note"
		if c.Status == metav1.ConditionFalse {
			label = "not accepted"
		}
		t.row(2, label, fmt.Sprintf("%s: %s", c.Reason, c.Message))
	}
	shared := []string{}
	for _, r := range s.Resources {
		if r.Oversubscription > 0 {
			shared = append(shared, fmt.Sprintf("%d containers share each GPU or instance (%s)", r.Oversubscription, r.Name))
		}
	}
	now, then, kinds := offeredUnder(name, after.Nodes, nodes)
	if s.NextWindowTime != nil {
		t.row(2, "starts", fmt.Sprintf("at %s, when the next maintenance window opens (rollout.windows); what disrupts no pod starts at once",
			s.NextWindowTime.Format(time.RFC3339)))
	}
	if s.Nodes.Matched > s.Nodes.Conflicted {
		t.row(2, "advertised", resources(now))
		t.row(2, "afterwards", resources(then))
		if len(kinds) > 1 {
			t.rows("kinds", kinds)
		}
		t.rows("shared", shared)
	}
	if c, asked := condition.Find(s.Conditions, v1alpha1.ConditionTainted); asked {
		t.row(2, "taints", c.Message)
	}
	t.rows("affected", after.Unmet[name])
	if sliced := policy.Spec.Sharing.TimeSlicing; sliced != nil && sliced.Memory.Limited() == v1alpha1.MemoryLimitEnforce {
		t.row(2, "limit", "by the driver, of each pod, where the node can (MemoryLimited)"+aboveLimit(name, after.Nodes, nodes))
	}
}

// aboveLimit names the running pods that the driver would not limit at first, as far as the agents report them: where the policy that governs
// the node now has limit Report or Enforce.
func aboveLimit(policy string, states []rollout.NodeState, nodes []cluster.Node) string {
	var above []string
	for i := range nodes {
		governs := func(s rollout.NodeState) bool { return s.Node == nodes[i].Name && s.Policy == policy }
		for _, p := range nodes[i].GPU.Status.MemoryLimits.Pods {
			if p.Reason == v1alpha1.ReasonAboveLimit && slices.ContainsFunc(states, governs) {
				above = append(above, fmt.Sprintf("%s/%s on %s (%s)", p.Namespace, p.PodName, nodes[i].Name, gib(p.LimitBytes>>20)))
			}
		}
	}
	if len(above) == 0 {
		return ""
	}
	return "; not before they use less than their share: " + format.List(above)
}

// thenOffered is what a node offers once all policies are in force: what it does now, where it cannot satisfy its own.
func thenOffered(n *rollout.NodeState) map[string]int64 {
	if n.Expected == nil || n.State == node.Unsupported || n.State == node.Unknown {
		return n.Advertised
	}
	return n.Expected
}

// offeredUnder is what the nodes of a policy offer now, and then: all together, and a line for each kind of node.
func offeredUnder(policy string, states []rollout.NodeState, nodes []cluster.Node) (now, then map[string]int64, kinds []string) {
	now, then = map[string]int64{}, map[string]int64{}
	products, counts := map[string]string{}, map[string]int{}
	for i := range nodes {
		products[nodes[i].Name] = productsOf(gpuReports(&nodes[i], dra.DevicePlugin))
	}
	var order []string
	for i := range states {
		n := &states[i]
		if n.Policy != policy {
			continue
		}
		for name, count := range n.Advertised {
			now[name] += count
		}
		for name, count := range thenOffered(n) {
			then[name] += count
		}
		kind := products[n.Node] + ": " + resources(thenOffered(n))
		if counts[kind]++; counts[kind] == 1 {
			order = append(order, kind)
		}
	}
	for _, kind := range order {
		kinds = append(kinds, fmt.Sprintf("%s with %s", count(counts[kind], "node"), kind))
	}
	nonzero := func(counts map[string]int64) { maps.DeleteFunc(counts, func(_ string, n int64) bool { return n == 0 }) }
	nonzero(now)
	nonzero(then)
	return now, then, kinds
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
	var equal alike[string] // by what is written of them
	for _, n := range after.Nodes {
		switch before := was[n.Node].Policy; {
		case n.Policy != policy && before != policy:
		case n.Policy == policy && n.State == node.UpToDate:
			same = append(same, n.Node)
		default:
			body := text{width: t.width}
			body.node(n, of[n.Node])
			equal.add(handover(n.Policy, before, policy)+"\n"+body.String(), n.Node)
		}
	}
	for _, says := range equal.order {
		head, body, _ := strings.Cut(says, "\n")
		t.WriteString("\n")
		if names := equal.names[says]; len(names) == 1 {
			t.row(0, "", "NODE "+names[0]+head)
		} else {
			t.row(0, "", fmt.Sprintf("%d NODES alike, %s%s", len(names), format.List(names), head))
		}
		t.WriteString(body)
	}
	if len(same) > 0 {
		t.WriteString("\n")
		t.row(0, "", fmt.Sprintf("Nothing changes on %s: %s", count(len(same), "node"), strings.Join(same, ", ")))
	}
}

// node writes what would be done to a node.
func (t *text) node(n rollout.NodeState, object *cluster.Node) {
	if n.State == node.Unsupported || n.State == node.Unknown {
		t.row(2, "cannot", fmt.Sprintf("%s: %s", n.Reason, n.Message))
		t.row(2, "advertised", resources(n.Advertised))
		t.row(2, "afterwards", resources(n.Advertised)+", as before")
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
	t.rows("steps", brief(steps(n, object.Labels[v1alpha1.LabelConfig])))
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

// readGroups reads the objects of autoscalers, as far as the cluster has them and the user may read them.
func readGroups(ctx context.Context, c client.Client, s cluster.Snapshot) (autoscaling.Snapshot, error) {
	groups := autoscaling.Snapshot{Now: s.Now, Policies: s.Policies, Nodes: s.Nodes}
	for i := range s.Nodes {
		for _, p := range s.Nodes[i].Pods {
			if p.Discovers && !p.Terminating {
				groups.Discovery = append(groups.Discovery, p.Tolerations)
			}
		}
	}
	const overlay = "NodeOverlay"
	for _, kind := range []schema.GroupVersionKind{
		kindOf(autoscaling.GroupKarpenter, "v1", "NodePool"), kindOf(autoscaling.GroupKarpenter, "v1alpha1", overlay),
		kindOf(autoscaling.GroupOpenShift, "v1beta1", "MachineSet"), kindOf(autoscaling.GroupClusterAPI, "v1beta2", "MachineSet"),
		kindOf(autoscaling.GroupClusterAPI, "v1beta2", "MachineDeployment"), kindOf("config.openshift.io", "v1", "ClusterVersion"),
	} {
		version, err := eachOf(ctx, c, kind, groups.Add)
		if err != nil {
			return groups, err
		}
		if kind.Kind == overlay {
			groups.OverlayVersion = version
		}
	}
	_, err := eachOf(ctx, c, kindOf(autoscaling.GroupOpenShift, "v1beta1", "Machine"), func(o *unstructured.Unstructured) { groups.AddMachine(o) })
	return groups, err
}

func kindOf(group, version, kind string) schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: group, Version: version, Kind: kind}
}

// eachOf visits the objects of a kind that the cluster may not have, or that the user may not read, and returns its
// version.
func eachOf(ctx context.Context, c client.Client, of schema.GroupVersionKind, visit func(*unstructured.Unstructured)) (version string, err error) {
	kind, err := everyOf(ctx, c, of, func(items []unstructured.Unstructured) {
		for i := range items {
			visit(&items[i])
		}
	})
	return kind.GroupVersion().String(), unlessForbidden(unlessNotServed(err, "reading each "+of.Kind))
}

// nodeGroups writes what autoscalers must know of new nodes once these policies exist.
func (t *text) nodeGroups(s autoscaling.Snapshot, policies []v1alpha1.GPUSharingPolicy) {
	advice := s.Advise()
	for i := range policies {
		for _, g := range advice.Groups[policies[i].Name] {
			t.nodeGroup(policies[i].Name, g)
		}
	}
}

func (t *text) nodeGroup(policy string, g autoscaling.Group) {
	name := strings.TrimPrefix(g.Namespace+"/"+g.Name, "/")
	t.WriteString("\n")
	t.row(0, "", fmt.Sprintf("NODE GROUP %s %s of policy %s: %s, scaled by %s", g.Kind, name, policy, count(int(g.Nodes), "node"), g.Autoscaler))
	if g.GPUsPerNode > 0 {
		t.row(2, "GPUs", fmt.Sprintf("%d × %s", g.GPUsPerNode, g.Product))
	}
	offers := map[string]int64{}
	for _, r := range g.Resources {
		offers[r.Name] = r.Count
	}
	if len(offers) > 0 {
		t.row(2, "advertises", resources(offers))
	}
	t.row(2, "autoscaler", fmt.Sprintf("%s: %s", g.Reason, g.Message))
	for _, block := range g.Paste {
		t.WriteString("\n" + strings.TrimRight(block, "\n") + "\n")
	}
}
