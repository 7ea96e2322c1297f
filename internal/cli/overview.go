// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// What status says of many nodes: how many shares there are and who has them, equal nodes together, and why others are
// not ready, the same reason once.

// shares are how many GPUs, instances and replicas are offered, and how many of them a container holds.
type shares struct {
	Offered int64 `json:"offered"`
	InUse   int64 `json:"inUse"`
}

func (s *shares) add(o shares) { s.Offered, s.InUse = s.Offered+o.Offered, s.InUse+o.InUse }

// String is "8 of 58". While a node changes, more can be held than are offered.
func (s shares) String() string {
	if s.InUse > s.Offered {
		return fmt.Sprintf("%d, %d offered", s.InUse, s.Offered)
	}
	return fmt.Sprintf("%d of %d", s.InUse, s.Offered)
}

func (s shares) sentence() string {
	if s.InUse > s.Offered {
		return fmt.Sprintf("%s in use, %d offered", count(int(s.InUse), "share"), s.Offered)
	}
	return fmt.Sprintf("%d of %s in use", s.InUse, count(int(s.Offered), "share"))
}

// sharesOn are those of a node.
func sharesOn(n *cluster.Node, stack dra.Stack) (s shares) {
	for _, count := range n.OfferedGPUs(stack) {
		s.Offered += count
	}
	for _, held := range heldOn(n) {
		s.InUse += held
	}
	return s
}

// heldOn is how many shares of a node the pods of each namespace have. A GPUNode lists 64 holders of a GPU at most, and
// fewer where there are many, so it is at least what the pods there ask for.
func heldOn(n *cluster.Node) map[string]int64 {
	held, asked := listedOn(n), map[string]int64{}
	for _, p := range n.Pods {
		for _, count := range p.Requests {
			asked[p.Namespace] += count
		}
	}
	for namespace, count := range asked {
		held[namespace] = max(held[namespace], count)
	}
	return held
}

// listedOn is how many holders of each namespace the GPUNode lists.
func listedOn(n *cluster.Node) map[string]int64 {
	held := map[string]int64{}
	for _, d := range devicesOf(n) {
		for _, h := range d.Holders {
			held[h.Namespace]++
		}
	}
	return held
}

// unlistedHolders says how many shares are in use of which the GPUNode does not say by whom; empty: of none.
func unlistedHolders(r *report) string {
	more := r.Shares.InUse
	for _, listed := range listedOn(r.node) {
		more -= listed
	}
	if more <= 0 {
		return ""
	}
	return fmt.Sprintf("%s more in use, whose pods start or for which the GPUNode has no room", count(int(more), "share"))
}

// anyPolicy stands for all nodes, also those that no policy governs.
const anyPolicy = "*"

// sumOf are the shares of the nodes that a policy governs.
func sumOf(nodes []report, policy string) (sum shares) {
	for i := range nodes {
		if policy == anyPolicy || nodes[i].Policy == policy {
			sum.add(nodes[i].Shares)
		}
	}
	return sum
}

// namespaceUse is how many shares the pods of a namespace hold.
type namespaceUse struct {
	Namespace string `json:"namespace"`
	InUse     int64  `json:"inUse"`
}

// byNamespace is who has the shares of some nodes, those that have most first.
func byNamespace(nodes []report) (all []namespaceUse) {
	held := map[string]int64{}
	for i := range nodes {
		for namespace, n := range heldOn(nodes[i].node) {
			held[namespace] += n
		}
	}
	for namespace, n := range held {
		all = append(all, namespaceUse{namespace, n})
	}
	slices.SortFunc(all, func(a, b namespaceUse) int {
		return cmp.Or(cmp.Compare(b.InUse, a.InUse), cmp.Compare(a.Namespace, b.Namespace))
	})
	return all
}

// gpusOf is how many GPUs some nodes have.
func gpusOf(nodes []report) (n int) {
	for i := range nodes {
		n += len(nodes[i].GPUs)
	}
	return n
}

// cluster writes a line on all nodes, and who has their shares.
func (t *text) cluster(nodes []report) {
	ready := 0
	for i := range nodes {
		if nodes[i].Ready {
			ready++
		}
	}
	t.row(0, "", fmt.Sprintf("%s with %s: %d ready, %s", count(len(nodes), "node"), count(gpusOf(nodes), "GPU"), ready, sumOf(nodes, anyPolicy).sentence()))
	var by []string
	for _, use := range byNamespace(nodes) {
		by = append(by, fmt.Sprintf("%s %d", use.Namespace, use.InUse))
	}
	if len(by) > 0 {
		t.row(0, "", "In use by namespace: "+format.List(by))
	}
	t.WriteString("\n")
}

// group are nodes of which the same is so.
type group struct {
	policy, stands, gpus, offers string
	nodes                        []string
	shares                       shares
}

// overview writes equal nodes together, and the reasons why nodes are not ready, each once.
func (t *text) overview(nodes []report) {
	groups := groupsOf(nodes)
	t.paragraph()
	t.row(0, "", "NODES")
	for _, g := range groups {
		by := "no policy"
		if g.policy != "" {
			by = "policy " + g.policy
		}
		each := g.offers
		if len(g.nodes) > 1 {
			each = "each " + each
		}
		t.row(2, "", fmt.Sprintf("%*d × %s   %s   %s   %s   %s", len(fmt.Sprint(len(nodes))), len(g.nodes), parenthesized(g.gpus), by, g.stands, each, g.shares.sentence()))
	}
	t.notReady(nodes)
}

// parenthesized is a text in parentheses if it has a number of its own.
func parenthesized(s string) string {
	if strings.Contains(s, "×") {
		return "(" + s + ")"
	}
	return s
}

// groupsOf puts equal nodes together: of each policy those that are ready first, and the most.
func groupsOf(nodes []report) []*group {
	var groups []*group
	for i := range nodes {
		r := &nodes[i]
		g := &group{policy: r.Policy, stands: r.stands(), gpus: productsOf(r.GPUs), offers: resources(r.Advertised)}
		same := func(o *group) bool {
			return o.policy == g.policy && o.stands == g.stands && o.gpus == g.gpus && o.offers == g.offers
		}
		if at := slices.IndexFunc(groups, same); at >= 0 {
			g = groups[at]
		} else {
			groups = append(groups, g)
		}
		g.nodes = append(g.nodes, r.Name)
		g.shares.add(r.Shares)
	}
	slices.SortStableFunc(groups, func(a, b *group) int {
		unready := func(g *group) int {
			if g.stands == v1alpha1.ReasonReady {
				return 0
			}
			return 1
		}
		return cmp.Or(strings.Compare(a.policy, b.policy), unready(a)-unready(b), len(b.nodes)-len(a.nodes), strings.Compare(a.stands, b.stands))
	})
	return groups
}

// productsOf names GPUs of a node, such as "2 × Tesla-T4".
func productsOf(gpus []gpuReport) string {
	var products []string
	counts := map[string]int{}
	for _, d := range gpus {
		if counts[d.Product]++; counts[d.Product] == 1 {
			products = append(products, d.Product)
		}
	}
	if len(gpus) == len(products) {
		return cmp.Or(strings.Join(products, ", "), "unknown GPUs")
	}
	for i, product := range products {
		products[i] = fmt.Sprintf("%d × %s", counts[product], product)
	}
	return strings.Join(products, ", ")
}

// instanceStep is a step that destroys or creates a MIG instance: what it does to which GPU, and the profile.
var instanceStep = regexp.MustCompile(`^(.*: (?:destroy|create)) (\S+) at \S+$`)

// brief puts steps together that do the same to a GPU, such as "GPU 0 (NVIDIA-A30): create 4 × 1g.6gb".
func brief(steps []string) (lines []string) {
	var same alike[string]
	for _, step := range steps {
		same.add(instanceStep.ReplaceAllString(step, "$1 $2"), step)
	}
	for _, kind := range same.order {
		line := same.names[kind][0]
		if n := len(same.names[kind]); n > 1 {
			line = instanceStep.ReplaceAllString(line, fmt.Sprintf("$1 %d × $2", n))
		}
		lines = append(lines, line)
	}
	return lines
}

// mostReasons is how many reasons, and blockers, status writes.
const mostReasons = 8

// notReady writes why nodes are not ready, the same reason of several nodes once, and what blocks them.
func (t *text) notReady(nodes []report) {
	var blocked []string
	var with alike[string]
	for i := range nodes {
		r := &nodes[i]
		if r.Ready {
			continue
		}
		with.add(strings.TrimSuffix(r.stands()+": "+r.Message, ": "), r.Name)
		for _, b := range r.BlockedBy {
			blocked = append(blocked, r.Name+": "+b)
		}
	}
	reasons := with.order
	if len(reasons) == 0 {
		return
	}
	slices.SortStableFunc(reasons, func(a, b string) int { return len(with.names[b]) - len(with.names[a]) })
	t.WriteString("\n")
	t.row(0, "", "NOT READY")
	for _, why := range reasons[:min(len(reasons), mostReasons)] {
		t.row(2, count(len(with.names[why]), "node"), fmt.Sprintf("%s: %s", format.List(with.names[why]), why))
	}
	if more := len(reasons) - mostReasons; more > 0 {
		t.row(2, "", fmt.Sprintf("and %s: status --not-ready -o wide prints all", count(more, "other reason")))
	}
	if more := len(blocked) - mostReasons; more > 0 {
		blocked = append(blocked[:mostReasons], fmt.Sprintf("and %d more", more))
	}
	t.rows("blocked by", blocked)
}

// notListed is the state of a node that may be one of those which its policy counts as not ready and does not list.
const notListed = "NotListed"

// pendingNode is a node that is not ready.
type pendingNode struct {
	v1alpha1.PendingNode

	policy string
	steps  []string // as far as its GPUNode does not report them
}

// unready returns the nodes that are not ready, by name: as their policies list them, or as their GPUNodes report. The
// state of those that neither reports, as before the controller has observed a policy, is decided from their objects,
// as the controller decides it.
func unready(s cluster.Snapshot) map[string]pendingNode {
	found := map[string]pendingNode{}
	for i := range s.Nodes {
		addReported(found, &s.Nodes[i].GPU)
	}
	for i := range s.Policies {
		for _, n := range s.Policies[i].Status.Pending {
			if n.Reason != v1alpha1.ReasonConflicted {
				found[n.NodeName] = pendingNode{PendingNode: n, policy: s.Policies[i].Name}
			}
		}
	}
	var states []rollout.NodeState
	for i := range s.Policies {
		p := &s.Policies[i]
		more := unlisted(p)
		if more == 0 && observed(p) {
			continue
		}
		if states == nil {
			states = rollout.Decide(s).Nodes
		}
		addUnlisted(found, p.Name, more, states)
	}
	return found
}

// stepsLeft are the steps that nodes which are not ready have before them, by node: those that the controller has
// reported may be done.
func stepsLeft(s cluster.Snapshot, pending map[string]pendingNode) map[string][]string {
	waits := func(n cluster.Node) bool {
		_, is := pending[n.Name]
		return is && len(n.GPU.Status.Rollout.Steps) > 0
	}
	if !slices.ContainsFunc(s.Nodes, waits) {
		return nil
	}
	left := map[string][]string{}
	for _, n := range rollout.Decide(s).Nodes {
		left[n.Node] = n.Plan
	}
	for i := range s.Nodes {
		r := s.Nodes[i].GPU.Status.Rollout
		if !slices.ContainsFunc(s.Policies, named(r.PolicyName)) {
			left[s.Nodes[i].Name] = r.Steps // its policy is gone, or cannot be read
		}
	}
	return left
}

// addReported adds a node that the controller reports as not ready in its GPUNode.
func addReported(found map[string]pendingNode, n *v1alpha1.GPUNode) {
	r := n.Status.Rollout
	c, reported := condition.Find(n.Status.Conditions, v1alpha1.ConditionReady)
	if !reported || r.PolicyName == "" || r.State == "" || c.Status == metav1.ConditionTrue {
		return
	}
	found[n.Name] = pendingNode{policy: r.PolicyName, PendingNode: v1alpha1.PendingNode{
		NodeName: n.Name, State: r.State, Reason: c.Reason, Message: c.Message,
	}}
}

// addUnlisted adds the nodes of a policy that it does not list and that are not ready. More is how many these are at
// least.
func addUnlisted(found map[string]pendingNode, policy string, more int, states []rollout.NodeState) {
	var rest []string
	for _, s := range states {
		if _, listed := found[s.Node]; listed || s.Policy != policy {
			continue
		}
		if s.State == node.UpToDate {
			rest = append(rest, s.Node)
			continue
		}
		more--
		found[s.Node] = pendingNode{policy: policy, steps: s.Plan, PendingNode: v1alpha1.PendingNode{
			NodeName: s.Node, State: string(s.State), Reason: s.Reason, Message: s.Message,
		}}
	}
	if more <= 0 {
		return
	}
	for _, name := range rest {
		found[name] = pendingNode{policy: policy, PendingNode: v1alpha1.PendingNode{
			NodeName: name, Reason: notListed, Message: fmt.Sprintf("policy %s counts %s that it does not list as not ready, and this node "+
				"may be one of them; its own objects show no reason", policy, count(more, "node")),
		}}
	}
}

// unlisted is how many nodes that are not ready a policy counts and does not list.
func unlisted(p *v1alpha1.GPUSharingPolicy) int {
	n := p.Status.Nodes
	more := int(n.Matched - n.Conflicted - n.Ready)
	for _, listed := range p.Status.Pending {
		if listed.Reason != v1alpha1.ReasonConflicted && listed.State != string(node.UpToDate) {
			more--
		}
	}
	return more
}

// observed reports whether the status of a policy is about its generation.
func observed(p *v1alpha1.GPUSharingPolicy) bool { return p.Status.ObservedGeneration >= p.Generation }
