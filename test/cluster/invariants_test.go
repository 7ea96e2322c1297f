// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
	"github.com/gpusharing/gpu-sharing-operator/test/invariant"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

func equal(a, b any) bool { return equality.Semantic.DeepEqual(a, b) }

// forget begins to count anew.
func (s *run) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.count)
	clear(s.others)
}

func (s *run) counted() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("%v; others: %v", s.count, s.others)
}

func (s *run) Counted() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.count)
}

// evicts looks at an eviction that the controller has asked for.
func (s *run) evicts(name string, status int) {
	s.facts.RLock()
	kind, home := s.kinds[name], s.homes[name]
	s.facts.RUnlock()
	var at *place
	var held []string
	for _, p := range s.Machines() {
		if ids := p.node.Allocations()[users+"/"+name]; ids != nil {
			at, held = p, ids
		}
	}
	s.mu.Lock()
	what := "evict " + kind
	if status >= http.StatusMultipleChoices {
		what = "ask to evict " + kind
	}
	s.count[what]++
	if status < http.StatusMultipleChoices {
		s.written.Add(1)
		s.gone[name] = ""
		if at != nil {
			s.gone[name] = at.name
		}
	}
	s.mu.Unlock()
	if _, calm := s.isCalm(home); calm {
		s.Breaks("demand", "%s is evicted from %s", name, home)
	}
	if kind == "bystander" && (!s.mayEmpty() || !s.mustReboot(home)) {
		s.Breaks("harmless", "%s is evicted from %s, which has no GPU", name, home)
	}
	for _, id := range held {
		if uuid := at.gpuOf(id); uuid != "" && !s.mayChange(at, uuid) {
			s.Breaks("harmless", "%s is evicted, and no policy selects its GPU %s", name, uuid)
		}
	}
}

// mayEmpty reports whether a policy drains nodes of all their pods before a reboot, or one did that may still release
// nodes.
func (s *run) mayEmpty() bool {
	s.facts.RLock()
	defer s.facts.RUnlock()
	for _, versions := range s.policies {
		for i := range versions {
			if versions[i].Spec.Rollout.Drain.BeforeReboot == v1alpha1.BeforeRebootAllPods {
				return true
			}
		}
	}
	return false
}

// mustReboot reports whether a node must be rebooted, as the controller may know it: its cache is a little behind, and
// the record too.
func (s *run) mustReboot(node string) bool {
	n := &v1alpha1.GPUNode{}
	if err := s.client.Get(context.Background(), client.ObjectKey{Name: node}, n); client.IgnoreNotFound(err) != nil {
		return true // nobody can tell
	}
	return rebootRequired(n) || s.record.mustReboot(node)
}

func rebootRequired(n *v1alpha1.GPUNode) bool {
	return condition.IsTrue(n.Status.Conditions, v1alpha1.ConditionRebootRequired)
}

// gpuOf is the GPU that a device of the kubelet is a part of: a GPU, a MIG device, or a replica of one of them.
func (p *place) gpuOf(device string) string {
	uuid, _, _ := strings.Cut(device, "::")
	for _, d := range p.devices() {
		if d.UUID == uuid || slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return i.UUID == uuid }) {
			return d.UUID
		}
	}
	return ""
}

// mayChange reports whether a GPU is the operator's to change: a policy selects it or did, by where it is in the
// machine, or it is not as it came any more.
func (s *run) mayChange(p *place, uuid string) bool {
	s.facts.RLock()
	defer s.facts.RUnlock()
	for _, d := range p.devices() {
		if d.UUID != uuid {
			continue
		}
		if bornAs(d) != p.born[uuid] {
			return true
		}
		for _, index := range []int{d.Index, p.slots[uuid]} {
			d.Index = index
			for _, versions := range s.policies {
				if slices.ContainsFunc(versions, func(v v1alpha1.GPUSharingPolicy) bool { return plan.Matches(v.Spec.GPUSelector, d) }) {
					return true
				}
			}
		}
	}
	return false
}

// touches looks at what the agent is about to do to a GPU: a policy has to do with it, and what it takes away is not in use.
func (s *run) touches(p *place, op sim.Op, uuid string, instance int) error {
	if !s.mayChange(p, uuid) {
		s.Breaks("harmless", "GPU %s of %s is changed (%s), which no policy selects", uuid, p.name, op)
	}
	if _, calm := s.isCalm(p.name); calm && (op == sim.OpSetMIG || op == sim.OpReset) {
		s.Breaks("demand", "GPU %s of %s is changed (%s)", uuid, p.name, op)
	}
	return s.takes(p, op, uuid, instance)
}

// takes: what the agent is about to take away from a GPU must not be in use, as the kubelet allocated it or prepared it for a claim.
func (s *run) takes(p *place, op sim.Op, uuid string, instance int) error {
	if op == sim.OpCreateInstance || op == sim.OpReset {
		return nil
	}
	lost := map[string]bool{uuid: op == sim.OpSetMIG}
	for _, d := range p.devices() {
		lost[nvidia.DeviceName(d, gpu.Instance{ID: gpu.WholeGPU})] = lost[d.UUID]
		for _, i := range d.State.Instances {
			lost[i.UUID] = d.UUID == uuid && (op == sim.OpSetMIG || i.ID == instance)
			lost[nvidia.DeviceName(d, i)] = lost[i.UUID]
		}
	}
	for pod, ids := range p.node.Allocations() {
		for _, id := range ids {
			device, _, _ := strings.Cut(id, "::")
			if _, name, _ := strings.Cut(pod, "/"); lost[device] && !s.hasEnded(name) {
				s.Breaks("harmless", "%s of %s is taken from %s (%s)", device, p.name, pod, op)
			}
		}
	}
	return nil
}

func (s *run) hasEnded(pod string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, leaves := s.gone[pod]
	return s.ends[pod] || leaves
}

// nodeOf is the node of a machine when everything rested.
func (s *run) nodeOf(p *place) *cluster.Node {
	at := slices.IndexFunc(s.rested.Nodes, func(n cluster.Node) bool { return n.Name == p.name })
	return &s.rested.Nodes[at]
}

func (s *run) Desired(p *place) (by *v1alpha1.GPUSharingPolicy, want policy.Desired, err error) {
	return desired(s.nodeOf(p), s.rested.Policies)
}

func desired(n *cluster.Node, policies []v1alpha1.GPUSharingPolicy) (by *v1alpha1.GPUSharingPolicy, want policy.Desired, err error) {
	node := policy.Node{Name: n.Name, Labels: n.Labels, Devices: n.GPU.Status.Devices, Policy: n.GPU.Spec.PolicyName, Numbering: n.GPU.Spec.Numbering, Demand: n.GPU.Status.Demand}
	if by = policy.Rank(policies).Govern(node).By; by != nil {
		want, err = policy.DesiredState(by, node)
	}
	return by, want, err
}

// Differs says how a node differs from what is desired; empty: it does not. The GPUs are looked at, not what is
// reported of them.
func (s *run) Differs(p *place, want policy.Desired) string {
	n := s.nodeOf(p)
	has := maps.Clone(n.Allocatable)
	maps.DeleteFunc(has, func(_ string, count int64) bool { return count == 0 })
	if !maps.Equal(has, want.Config.Resources) {
		return fmt.Sprintf("it advertises %v and not %v", has, want.Config.Resources)
	}
	desired := map[string]v1alpha1.DeviceSharing{}
	for _, w := range want.Devices {
		desired[w.UUID] = w.Sharing
	}
	for _, d := range p.devices() {
		is, want := plan.Observed(d), desired[d.UUID]
		for _, reported := range n.GPU.Status.Devices {
			if reported.UUID == d.UUID {
				is.MPS = reported.Sharing.MPS
			}
		}
		if m := want.MPS; m != nil && m.Owner == v1alpha1.MPSDaemonOwnerGPUSharing && d.State.ComputeMode != gpu.ComputeExclusiveProcess {
			return fmt.Sprintf("GPU %d is used without the limits of MPS, in compute mode %s", d.Index, d.State.ComputeMode)
		}
		if _, selected := desired[d.UUID]; selected && !plan.Met(want, is) {
			return fmt.Sprintf("GPU %d is %+v and not %+v", d.Index, is, want)
		} else if !selected && bornAs(d) != p.born[d.UUID] {
			return fmt.Sprintf("GPU %d, which is not selected, is %+v and came as %+v", d.Index, bornAs(d), p.born[d.UUID])
		}
	}
	return ""
}

func (s *run) AgentRuns(p *place) bool                         { return !p.off && !p.down.Load() }
func (s *run) InMaintenance(*place) bool                       { return false }
func (s *run) Unknown(*place, *v1alpha1.GPUSharingPolicy) bool { return false }

func (s *run) OfferedByOthers(p *place, reason string) bool {
	return reason != v1alpha1.ReasonSlicerActive && s.shared(p.name)
}

func (s *run) NamesUser(p *place, message string) bool {
	return slices.ContainsFunc(s.podsOn(p.name), func(o corev1.Pod) bool { return strings.Contains(message, o.Namespace+"/"+o.Name) })
}

// shared reports whether NVIDIA's DRA driver offers the GPUs of a node, by any slice or a pod.
func (s *run) shared(node string) bool {
	published := &resourcev1.ResourceSliceList{}
	s.Expect(s.client.List(s.t.Context(), published, client.MatchingFields{resourcev1.ResourceSliceSelectorNodeName: node})).To(Succeed())
	return len(published.Items) > 0 ||
		slices.ContainsFunc(s.podsOn(node), func(p corev1.Pod) bool { return cluster.OffersGPUs(&p) })
}

// pending is what a policy says of a node that is not up to date.
func pending(p *place, by *v1alpha1.GPUSharingPolicy) (said v1alpha1.PendingNode, is bool) {
	at := slices.IndexFunc(by.Status.Pending, func(o v1alpha1.PendingNode) bool { return o.NodeName == p.name })
	if at >= 0 {
		said = by.Status.Pending[at]
	}
	return said, at >= 0
}

func (s *run) Excused(p *place, by *v1alpha1.GPUSharingPolicy) bool {
	o, _ := pending(p, by)
	return o.Reason == v1alpha1.ReasonGPUMissing
}

func (s *run) Unready(p *place, by *v1alpha1.GPUSharingPolicy) string {
	told := s.theirs[p.name+" "+v1alpha1.LabelMIGConfig] // who set it sets it back
	if o, is := pending(p, by); is && (o.Reason != v1alpha1.ReasonMIGConfigIgnored || !told) {
		return fmt.Sprintf("it is %s (%s): %s", o.State, o.Reason, o.Message)
	}
	if n := s.nodeOf(p); n.Annotations[v1alpha1.AnnotationStopped] != "" ||
		slices.ContainsFunc(n.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }) {
		return "it is left tainted or with NVIDIA's operands stopped"
	}
	return ""
}

// CheckBudget looks whether more nodes were disturbed at the same moment than the policies allow together, since the
// record began.
func (s *run) CheckBudget() {
	var off []string
	for _, p := range s.Machines() {
		if p.off {
			off = append(off, p.name)
		}
	}
	allowed := 0
	s.facts.RLock()
	for _, versions := range s.policies {
		most := 0
		for i := range versions {
			most = max(most, versions[i].Spec.Rollout.MaxUnavailable.IntValue())
		}
		allowed += most
	}
	s.facts.RUnlock()
	if most := s.record.account(off...).most; most > allowed {
		s.Breaks("harmless", "%d nodes are disturbed at the same moment, and all policies that ever were allow %d", most, allowed)
	}
}

// notReady reports whether the GPUNode reports why its node is not ready.
func notReady(n *v1alpha1.GPUNode) bool {
	c, found := condition.Find(n.Status.Conditions, v1alpha1.ConditionReady)
	return found && c.Status == metav1.ConditionFalse
}

// CheckRestored: without policies everything is as it was before the operator, or the GPUNode reports what is not.
func (s *run) CheckRestored() {
	snapshot := s.world()
	before := s.before
	before.Nodes = slices.Clone(before.Nodes)
	excused := false
	for i := range snapshot.Nodes {
		n := &snapshot.Nodes[i]
		p := s.places[n.Name]
		if notReady(&n.GPU) || p.off {
			before.Nodes = slices.DeleteFunc(before.Nodes, func(o cluster.Node) bool { return o.Name == n.Name })
			excused = true
			continue
		}
		if problem := s.unrestored(p, n); problem != "" {
			s.Breaks("restore", "node %s: %s; nothing says so", n.Name, problem)
		}
	}
	for i := range before.Nodes { // the GPUs of a machine may be others, and fewer
		for _, n := range snapshot.Nodes {
			if n.Name == before.Nodes[i].Name {
				before.Nodes[i].Allocatable = n.Allocatable
			}
		}
	}
	for _, problem := range invariant.Broken(before, snapshot, s.everEvicted()...) {
		if !s.writtenByOthers(problem) {
			s.Breaks("restore", "%s", problem)
		}
	}
	cluster := theClusterPolicy()
	s.Expect(s.client.Get(s.t.Context(), client.ObjectKeyFromObject(cluster), cluster)).To(Succeed())
	name, _, _ := unstructured.NestedString(cluster.Object, "spec", "devicePlugin", "config", "name")
	strategy, _, _ := unstructured.NestedString(cluster.Object, "spec", "mig", "strategy")
	if !excused && (name != "" || strategy != "single") {
		s.Breaks("restore", "the ClusterPolicy names the ConfigMap %q and the strategy %q, and named none and single", name, strategy)
	}
}

func (s *run) everEvicted() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name := range s.ends {
		names = append(names, users+"/"+name)
	}
	return names
}

// writtenByOthers reports whether a problem is about what another controller has written.
func (s *run) writtenByOthers(problem string) bool {
	node, what, _ := strings.Cut(problem, ": ")
	for written := range s.theirs {
		of, label, _ := strings.Cut(written, " ")
		if of == node && (strings.Contains(what, label) || label == v1alpha1.LabelConfig && strings.Contains(what, "the label selects")) {
			return true
		}
	}
	return false
}

// unrestored says how a node differs from what it was before the operator; empty: it does not.
func (s *run) unrestored(p *place, n *cluster.Node) string {
	theirs := func(name, value string) bool { // the others are NVIDIA's
		return s.theirs[n.Name+" "+name] || value == "true" && (name == v1alpha1.LabelMIGManager || strings.HasPrefix(name, "nvidia.com/gpu.deploy."))
	}
	if left := history.Left(cluster.Node{Labels: p.labels}, *n, theirs); left != "" {
		return left
	}
	for _, d := range p.devices() {
		if is, born := bornAs(d), p.born[d.UUID]; is != born {
			return fmt.Sprintf("GPU %d (%s) is %+v and came as %+v", d.Index, d.UUID, is, born)
		}
		if d.State.ComputeMode != gpu.ComputeDefault {
			return fmt.Sprintf("GPU %d is in compute mode %s", d.Index, d.State.ComputeMode)
		}
	}
	if feature := ourNodeFeature(n.Name); s.client.Get(s.t.Context(), client.ObjectKeyFromObject(feature), feature) == nil {
		return "our NodeFeature is left"
	}
	return ""
}

// repair ends what others have done to a node and would not leave so.
func (s *run) repair() {
	for _, p := range s.Machines() {
		s.ChangeNode(p.name, func(n *corev1.Node) {
			for _, label := range []string{"nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.gpu-feature-discovery", v1alpha1.LabelRunsAgent} {
				if n.Labels[label] == "false" || n.Labels[label] == "" { // NVIDIA's operator sets none again that was removed
					n.Labels[label] = "true"
				}
			}
			if n.Labels[v1alpha1.LabelConfig] == "theirs" { // there is no such config
				delete(n.Labels, v1alpha1.LabelConfig)
			}
			if n.Labels[v1alpha1.LabelMIGConfigState] == "pending" {
				delete(n.Labels, v1alpha1.LabelMIGConfigState)
			}
		})
	}
}
