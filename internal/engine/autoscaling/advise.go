// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Advice is what to write for autoscalers, and what to report.
type Advice struct {
	// Groups are the node groups of each policy, by its name.
	Groups map[string][]Group
	// Writes bring the objects of autoscalers to what the policies ask for. Each stands alone.
	Writes []Write
	// After is when to decide again though nothing changes; 0: not before something does.
	After time.Duration
}

// Group is a node group of a policy.
type Group struct {
	v1alpha1.NodeGroupStatus
	// Paste is what a user can paste: YAML for kubectl apply, commands, or tags.
	Paste []string
	// Worst is the worst of what Message says.
	Worst string
}

// entry is a group as one policy reports it: with one shape of its nodes.
type entry struct {
	s         *Snapshot
	g         *group
	by        *v1alpha1.GPUSharingPolicy
	shape     shape
	resources map[string]int64
	findings  []finding
	doubts    []string // what agents of its nodes report and nobody confirms
	written   []string
	paste     []string
	after     time.Duration
}

// finding is what a user should know about a group.
type finding struct{ reason, message string }

func (e *entry) find(reason, format string, args ...any) {
	e.findings = append(e.findings, finding{reason, fmt.Sprintf(format, args...)})
}

// Advise decides what autoscalers must be told.
func (s *Snapshot) Advise() Advice {
	s = s.followed()
	ranking, known := policy.Rank(s.Policies), hardwareOf(s.Nodes)
	advice := Advice{Groups: map[string][]Group{}}
	var wanted wants
	var entries []*entry
	groups := s.groups()
	of := make(map[*group][]*entry, len(groups))
	for _, g := range groups {
		of[g] = s.entries(g, ranking, known)
		entries = append(entries, of[g]...)
	}
	entries = append(entries, s.missing(groups, of)...)
	for _, e := range entries {
		if len(e.findings) == 0 {
			e.announce(&wanted)
			e.starting(&wanted)
			if e.after > 0 && (advice.After == 0 || e.after < advice.After) {
				advice.After = e.after
			}
		}
		for _, doubt := range e.doubts {
			e.find(v1alpha1.ReasonNodesDisagree, "%s", doubt)
		}
		advice.Groups[e.by.Name] = append(advice.Groups[e.by.Name], e.group())
	}
	advice.Writes = append(s.writes(wanted), s.startups(wanted)...)
	return advice
}

// followed is the snapshot without the policies that are too many, by what the rollout reports.
func (s *Snapshot) followed() *Snapshot {
	tooMany := func(p v1alpha1.GPUSharingPolicy) bool {
		return slices.ContainsFunc(p.Status.Conditions, func(c metav1.Condition) bool { return c.Reason == v1alpha1.ReasonTooManyPolicies })
	}
	followed := *s
	followed.Policies = slices.DeleteFunc(slices.Clone(s.Policies), tooMany)
	return &followed
}

// entries are what policies report of a group: one for each shape of its nodes.
func (s *Snapshot) entries(g *group, ranking policy.Ranking, known hardware) []*entry {
	shapes, ambiguous, doubts := s.shapes(g, known, ranking)
	if len(shapes) == 0 {
		by := selects(ranking, g, ambiguous != "" || len(doubts) > 0)
		if by == nil {
			return nil
		}
		e := &entry{s: s, g: g, by: by, shape: shape{nodes: len(g.nodes)}}
		switch {
		case ambiguous != "":
			e.find(v1alpha1.ReasonAmbiguousShape, "%s, and the autoscaler takes them for alike. Give each kind of node a group of its own", ambiguous)
		case len(doubts) > 0:
			e.find(v1alpha1.ReasonNodesDisagree, "%s", strings.Join(doubts, ". "))
		default:
			e.find(v1alpha1.ReasonUnknownShape, "No node of %s has reported its GPUs. Declare them in spec.autoscaling.nodeShapes: %s", g.Ref, example(g.Ref))
		}
		return []*entry{e}
	}
	var all []*entry
	for _, found := range shapes {
		e := &entry{s: s, g: g, shape: found, doubts: doubts}
		e.govern(ranking, known)
		if e.by != nil {
			all = append(all, e)
		}
	}
	return all
}

// example is an entry of nodeShapes for a group.
func example(r Ref) string {
	types, namespace := "", ""
	if r.Kind == v1alpha1.NodeGroupNodePool {
		types = "instanceTypes: [TYPE], "
	}
	if r.Namespace != "" {
		namespace = "namespace: " + r.Namespace + ", "
	}
	return fmt.Sprintf("{product: PRODUCT, gpusPerNode: N, %snodeGroups: [{kind: %s, %sname: %s}]}", types, r.Kind, namespace, r.Name)
}

// selects is the policy whose nodeSelector selects the nodes of a group whose GPUs are not known. A policy without a
// selector is for GPU nodes, and whether these are some is not known, unless hasGPUs.
func selects(ranking policy.Ranking, g *group, hasGPUs bool) *v1alpha1.GPUSharingPolicy {
	of := shape{nodes: len(g.nodes)}
	if len(g.nodes) > 0 {
		of.labels = shapeLabels(g.nodes)
	}
	labels := g.labels(&of)
	by := ranking.Awaits(policy.Node{Labels: labels})
	if by == nil || hasGPUs {
		return by
	}
	if s := by.Spec.NodeSelector; s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		return nil
	}
	return by
}

// shapeLabels are the labels that nodes have in common.
func shapeLabels(nodes []*cluster.Node) map[string]string {
	labels := nodes[0].Labels
	for _, n := range nodes[1:] {
		labels = common(labels, n.Labels)
	}
	return labels
}

func withAll(a, b map[string]string) map[string]string {
	all := map[string]string{}
	maps.Copy(all, a)
	maps.Copy(all, b)
	return all
}

// govern finds the policy that will govern a new node of the shape, and what the node will advertise.
func (e *entry) govern(ranking policy.Ranking, known hardware) {
	node := e.newNode()
	e.by = ranking.Govern(node).By
	if e.by == nil && e.shape.nodes == 0 && (!e.shape.declared || isCloud(e.g.Kind)) {
		if by := e.s.policy(e.shape.by); by != nil && mayGovern(by, node) {
			e.by = by // the labels of the nodes that it governed are not known any more, or never were
		}
	}
	if e.by == nil {
		return
	}
	if e.onDRA() {
		e.find(v1alpha1.ReasonResourceNotSupported, "NVIDIA's DRA driver offers the GPUs of %s, and no kubelet lists them then. So its autoscaler is told nothing: "+
			"set its smallest size to the nodes that you need", e.g.Ref)
		return
	}
	if e.shape.nodes == 0 && e.by.Spec.Sharing.Strategy == v1alpha1.StrategyMIG {
		if _, is := known.gpus(e.shape.product, 1); !is {
			e.find(v1alpha1.ReasonUnknownShape, "The MIG profiles of product %s are not known: no node has such a GPU, and the operator does not know it. "+
				"Check the name in spec.autoscaling.nodeShapes, or start one node of %s", e.shape.product, e.g.Ref)
			return
		}
	}
	want, err := policy.DesiredState(e.by, node)
	if err != nil {
		reason := v1alpha1.ReasonUnknownShape
		if problem, is := errors.AsType[*plan.Problem](err); is {
			reason = problem.Reason
		}
		e.find(reason, "A node of %s with %d × %s cannot have the policy: %v", e.g.Ref, e.shape.count, e.shape.product, err)
		return
	}
	e.resources = want.Config.Resources
}

// onDRA reports whether NVIDIA's DRA driver offers the GPUs of the group's nodes or, while it has none, did. An autoscaler looks at what the kubelet
// lists: it would start nodes for pods that then wait for what it does not see.
func (e *entry) onDRA() bool {
	if len(e.g.nodes) > 0 {
		return slices.ContainsFunc(e.g.nodes, (*cluster.Node).FoundOnDRA)
	}
	last := e.s.lastOf(e.g.Ref, &e.shape)
	return last != nil && last.Reason == v1alpha1.ReasonResourceNotSupported && e.g.Group != GroupOpenShift
}

// newNode is a node of the shape as policies see it once the GPU Operator has found its GPUs.
func (e *entry) newNode() policy.Node {
	labels := map[string]string{}
	maps.Copy(labels, e.g.labels(&e.shape))
	for label, value := range map[string]string{cluster.LabelPresent: "true", "kubernetes.io/os": "linux"} {
		if labels[label] == "" {
			labels[label] = value
		}
	}
	return policy.Node{Labels: labels, Devices: e.shape.devices}
}

// mayGovern reports whether a policy selects the GPUs of a node and, as far as they are known, its labels.
func mayGovern(p *v1alpha1.GPUSharingPolicy, n policy.Node) bool {
	n.Labels = maps.Clone(n.Labels)
	suppose := func(label, value string) {
		if _, known := n.Labels[label]; !known {
			n.Labels[label] = value
		}
	}
	if s := p.Spec.NodeSelector; s != nil {
		for label, value := range s.MatchLabels {
			suppose(label, value)
		}
		for _, r := range s.MatchExpressions {
			switch {
			case r.Operator == v1alpha1.NodeSelectorOperator(metav1.LabelSelectorOpIn) && len(r.Values) > 0:
				suppose(r.Key, r.Values[0])
			case r.Operator == v1alpha1.NodeSelectorOperator(metav1.LabelSelectorOpExists):
				suppose(r.Key, "")
			}
		}
	}
	return policy.Rank([]v1alpha1.GPUSharingPolicy{*p}).Govern(n).By != nil
}

func (s *Snapshot) policy(name string) *v1alpha1.GPUSharingPolicy {
	for i := range s.Policies {
		if p := &s.Policies[i]; p.Name == name && p.DeletionTimestamp.IsZero() {
			return p
		}
	}
	return nil
}

// missing are the groups that policies declare and that either do not exist, or whose nodes the policy will not govern.
// of are the entries of each group.
func (s *Snapshot) missing(groups []*group, of map[*group][]*entry) []*entry {
	var all []*entry
	for i := range s.Policies {
		p := &s.Policies[i]
		if !p.DeletionTimestamp.IsZero() {
			continue
		}
		for _, declared := range p.Spec.Autoscaling.NodeShapes {
			for _, r := range declared.NodeGroups {
				if e := s.declaredGroup(p, r, groups, of); e != nil {
					all = append(all, e)
				}
			}
		}
	}
	return all
}

// declaredGroup is what is wrong with the name of a group in nodeShapes; nil if nothing is.
func (s *Snapshot) declaredGroup(p *v1alpha1.GPUSharingPolicy, r v1alpha1.NodeGroupReference, groups []*group, of map[*group][]*entry) *entry {
	at := slices.IndexFunc(groups, func(g *group) bool { return g.is(r.Kind, r.Namespace, r.Name) })
	ref := Ref{Kind: r.Kind, Namespace: r.Namespace, Name: r.Name}
	if r.Kind == v1alpha1.NodeGroupNodePool {
		ref.Group = GroupKarpenter
	}
	e := &entry{s: s, g: &group{Ref: ref}, by: p}
	if at < 0 {
		if owned := slices.IndexFunc(s.Scalables, func(s Scalable) bool { return s.is(r.Kind, r.Namespace, r.Name) && s.Owner != nil }); owned >= 0 {
			e.find(v1alpha1.ReasonNodeGroupNotFound, "%s belongs to %s. Name that in spec.autoscaling.nodeShapes", ref, s.Scalables[owned].Owner)
			return e
		}
		e.find(v1alpha1.ReasonNodeGroupNotFound, "The cluster has no %s, which spec.autoscaling.nodeShapes names. Correct the name, or remove it", ref)
		return e
	}
	e.g = groups[at]
	entries := of[groups[at]]
	if len(entries) == 0 {
		help := ""
		if groups[at].Group == GroupClusterAPI {
			help = ". Cluster API gives nodes only labels of node-role.kubernetes.io, node-restriction.kubernetes.io and node.cluster.x-k8s.io; name others in the " +
				"annotation " + annotationLabels
		}
		e.find(v1alpha1.ReasonNodeGroupNotSelected, "nodeSelector of the policy does not select the labels that new nodes of %s get. Add the labels to the "+
			"node group, or correct nodeSelector%s", ref, help)
		return e
	}
	if slices.ContainsFunc(entries, func(e *entry) bool { return e.by == p }) {
		return nil
	}
	e.find(v1alpha1.ReasonNodeGroupNotSelected, "Policy %s will govern the nodes of %s. Give this policy a higher priority, or remove the node group "+
		"from its spec.autoscaling.nodeShapes", entries[0].by.Name, ref)
	return e
}

// whole reports whether a new node advertises its whole GPUs and nothing else, and the autoscaler of the group knows them: by the instance
// type or, on OpenShift, by what its controllers write. Cluster API has neither.
func (e *entry) whole() bool {
	told := func(key string) bool { return e.g.scalable != nil && e.g.scalable.theirs(key) != "" }
	return e.unshared() && e.g.Group != GroupClusterAPI && (e.g.Group != GroupOpenShift || e.g.scalable == nil || told(annotationGPUOpenShift) || told(AnnotationGPUCount))
}

// unshared reports whether a new node advertises its whole GPUs and nothing else.
func (e *entry) unshared() bool {
	return len(e.resources) == 1 && e.resources[plan.ResourceGPU] == int64(e.shape.count)
}

// managed reports whether the operator writes for the policy.
func (e *entry) managed() bool { return e.by.Spec.Autoscaling.Mode == v1alpha1.AutoscalingModeManage }

// announce finds out what the autoscaler of the group must be told.
func (e *entry) announce(wanted *wants) {
	if e.whole() {
		e.find(v1alpha1.ReasonConfigured, "New nodes advertise whole GPUs, which autoscalers know")
		return
	}
	if e.by.Spec.Rollout.Paused && !e.unshared() {
		e.find(v1alpha1.ReasonPaused, "The rollout is paused, so new nodes of %s keep whole GPUs, and the autoscaler is told of nothing else. Set rollout.paused: false", e.g.Ref)
		return
	}
	switch e.g.Group {
	case GroupKarpenter:
		e.karpenter(wanted)
	case GroupClusterAPI:
		e.clusterAPI(wanted)
		e.clusterAutoscaler()
	case GroupOpenShift:
		e.openShift(wanted)
		e.clusterAutoscaler()
	default:
		e.cloud()
		e.clusterAutoscaler()
	}
}

// severity lists the reasons of groups, what matters most first. Those that it does not list are why a node cannot have
// the policy.
var severity = []string{
	v1alpha1.ReasonNotPermitted, v1alpha1.ReasonWriteFailed, v1alpha1.ReasonInvalidValue, v1alpha1.ReasonOwnedByOther, v1alpha1.ReasonRemovedByOther,
	v1alpha1.ReasonNodeGroupNotFound, v1alpha1.ReasonNodeGroupNotSelected, v1alpha1.ReasonAmbiguousShape, v1alpha1.ReasonNodesDisagree, v1alpha1.ReasonUnknownShape, v1alpha1.ReasonPaused,
	v1alpha1.ReasonOverlayNotServed, v1alpha1.ReasonFeatureGateOff, v1alpha1.ReasonOverlayConflict, v1alpha1.ReasonAcceleratorLabel,
	v1alpha1.ReasonGPUCountRises, v1alpha1.ReasonResourceNotSupported, v1alpha1.ReasonStaleTemplate, v1alpha1.ReasonMultipleResources,
	v1alpha1.ReasonAdviceOnly, v1alpha1.ReasonConfiguring, v1alpha1.ReasonLimitsNotCounted, v1alpha1.ReasonScaleDownCandidate,
	v1alpha1.ReasonStartupGap, v1alpha1.ReasonConfigured,
}

// bySeverity orders reasons, the worst first.
func bySeverity(a, b string) int {
	return cmp.Compare(slices.Index(severity, a), slices.Index(severity, b)) // -1, the worst: a node cannot have the policy
}

// group is what is reported of the group.
func (e *entry) group() Group {
	const longest, longestProduct, mostTypes = 2048, 256, 32 // of the schema
	findings := slices.Clone(e.findings)
	slices.SortStableFunc(findings, func(a, b finding) int { return bySeverity(a.reason, b.reason) })
	worst, messages := findings[0].message, make([]string, 0, len(findings))
	for i, f := range findings {
		if i > 0 && f.reason == v1alpha1.ReasonConfigured {
			continue
		}
		if i > 0 && f.reason != findings[0].reason {
			f.message = f.reason + ": " + f.message
		}
		messages = append(messages, f.message)
	}
	types := e.shape.instanceTypes
	if len(types) > mostTypes {
		messages = append(messages, fmt.Sprintf("instanceTypes lists %d of %d", mostTypes, len(types)))
		types = types[:mostTypes]
	}
	uid := ""
	if e.g.scalable != nil {
		uid = e.g.scalable.UID
	}
	return Group{Paste: e.paste, Worst: worst, NodeGroupStatus: v1alpha1.NodeGroupStatus{
		Kind: e.g.Kind, Namespace: e.g.Namespace, Name: e.g.Name, UID: uid, Autoscaler: e.g.autoscaler(), Nodes: int32(e.shape.nodes),
		Product: format.Cut(e.shape.product, longestProduct), GPUsPerNode: int32(e.shape.count), InstanceTypes: types,
		Resources: listed(e.resources), Advertised: listed(e.shape.advertised), Written: e.written,
		Reason: findings[0].reason, Message: format.Cut(strings.Join(messages, ". "), longest),
	}}
}

func listed(counts map[string]int64) []v1alpha1.NodeResource {
	const most, longest = 16, 63 // of the schema
	var all []v1alpha1.NodeResource
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		if counts[name] > 0 && len(all) < most && len(name) <= longest {
			all = append(all, v1alpha1.NodeResource{Name: name, Count: counts[name]})
		}
	}
	return all
}

// Listed are the node groups as the status of a policy lists them. If they are too many, those to which the operator
// has written come first: it must know them again.
func Listed(groups []Group) []v1alpha1.NodeGroupStatus {
	var list []v1alpha1.NodeGroupStatus
	for i := range groups {
		list = append(list, groups[i].NodeGroupStatus)
	}
	if len(list) <= v1alpha1.MostNodeGroups {
		return list
	}
	slices.SortStableFunc(list, func(a, b v1alpha1.NodeGroupStatus) int {
		return cmp.Compare(min(len(b.Written), 1), min(len(a.Written), 1))
	})
	return list[:v1alpha1.MostNodeGroups]
}

// Condition sums up the node groups of a policy; requested is false if there are none.
func Condition(groups []Group) (c metav1.Condition, requested bool) {
	if len(groups) == 0 {
		return c, false
	}
	worst := slices.MinFunc(groups, func(a, b Group) int { return bySeverity(a.Reason, b.Reason) })
	c = metav1.Condition{Type: v1alpha1.ConditionAutoscalingConfigured, Status: metav1.ConditionFalse, Reason: worst.Reason}
	switch worst.Reason {
	case v1alpha1.ReasonConfigured, v1alpha1.ReasonStartupGap, v1alpha1.ReasonScaleDownCandidate, v1alpha1.ReasonLimitsNotCounted:
		c.Status = metav1.ConditionTrue
	case v1alpha1.ReasonConfiguring:
		c.Status = metav1.ConditionUnknown
	}
	same := 0
	for i := range groups {
		if groups[i].Reason == worst.Reason {
			same++
		}
	}
	about := fmt.Sprintf("%s %s: ", worst.Kind, strings.TrimPrefix(worst.Namespace+"/"+worst.Name, "/"))
	if c.Message = about + worst.Message; utf8.RuneCountInString(c.Message) > format.MostMessage {
		c.Message = format.Beside(about+worst.Worst, "more in status.nodeGroups")
	}
	if same > 1 {
		c.Message = format.Beside(c.Message, fmt.Sprintf("%d more node groups likewise, see status.nodeGroups", same-1))
	}
	if len(groups) > v1alpha1.MostNodeGroups {
		c.Message += fmt.Sprintf("; status.nodeGroups lists %d of %d node groups", v1alpha1.MostNodeGroups, len(groups))
	}
	return c, true
}
