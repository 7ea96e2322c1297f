// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// many is a cluster of nodes with a T4, or an A100 at each fifth. Policy cheap governs those with a T4. Each seventh is
// not ready.
func many(t *testing.T, nodes int) cluster.Snapshot {
	t.Helper()
	t4, a100 := newNode(t, "", sim.T4), newNode(t, "", sim.A100)
	s := cluster.Snapshot{Now: now}
	for i := range nodes {
		n, name := t4, fmt.Sprintf("node-%04d", i)
		if i%5 == 0 {
			n = a100
		} else {
			n.GPU.Spec.PolicyName = "cheap"
		}
		n.Name, n.GPU.Name = name, name
		if i%7 == 0 {
			n.GPU.Status.Conditions = []metav1.Condition{{
				Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonDrainTimedOut, Message: "not idle: pod team/train",
			}}
		}
		s.Nodes = append(s.Nodes, n)
	}
	s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "cheap", slicing)}
	s.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "t4"}}
	return s
}

// TestStatusOfManyNodes: a summary, and in detail only the first that are not ready.
func TestStatusOfManyNodes(t *testing.T) {
	g := NewWithT(t)
	compare(t, "status of 40 nodes", func(shown *text) { shown.status(many(t, 40), query{}) })
	printed := func(s cluster.Snapshot, q query) string {
		shown := text{}
		shown.status(s, q)
		return shown.String()
	}
	all := printed(many(t, 5000), query{})
	g.Expect(strings.Count(all, "\n")).To(BeNumerically("<", 24), "5,000 nodes on a screen")
	g.Expect(strings.Count(printed(many(t, 5000), query{policy: "cheap"}), "NODE node-")).To(Equal(mostInDetail), "of a policy those that are not ready")
	g.Expect(strings.Count(printed(many(t, 40), query{all: true}), "NODE node-")).To(Equal(40), "-o wide")
	g.Expect(strings.Count(printed(many(t, mostDrawn), query{}), "NODE node-")).To(Equal(mostDrawn), "so few GPUs are all drawn")
	g.Expect(printed(many(t, 3), query{notReady: true, product: "NVIDIA-A100-SXM4-40GB", policy: "cheap"})).To(HaveSuffix("\nNo node is as the flags ask for.\n"))
}

// TestStatusShowsNoStepThatIsDone: the controller's report may be older than that of the agent.
func TestStatusShowsNoStepThatIsDone(t *testing.T) {
	g := NewWithT(t)
	n := partitioned(t)
	n.GPU.Status.Rollout = v1alpha1.RolloutStatus{PolicyName: "research", State: string(node.Applying), Steps: []string{"GPU 0: enable MIG mode", "GPU 0: create 3g.20gb"}}
	n.GPU.Status.Conditions[0] = metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonProgressing}
	s := snapshotOf(n)
	s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", `{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20gb, count: 1}, {profile: 2g.10gb, count: 1}, {profile: 1g.5gb, count: 1}]}]}}}`)}
	all := reports(s)
	g.Expect(all).To(HaveLen(1))
	g.Expect(all[0]).To(And(HaveField("Ready", false), HaveField("Plan", BeEmpty())), "its instances are there")
}

// TestStatusFilters: each flag leaves nodes out, and what does not exist is named.
func TestStatusFilters(t *testing.T) {
	g := NewWithT(t)
	s := many(t, 35)
	names := func(q query) (all []string) {
		for _, r := range q.of(reports(s)) {
			all = append(all, strings.TrimPrefix(r.Name, "node-00"))
		}
		return all
	}
	g.Expect(names(query{})).To(HaveLen(35))
	g.Expect(names(query{notReady: true})).To(Equal([]string{"00", "07", "14", "21", "28"}))
	g.Expect(names(query{notReady: true, policy: "cheap"})).To(Equal([]string{"07", "14", "21", "28"}))
	g.Expect(names(query{product: "NVIDIA-A100-SXM4-40GB"})).To(Equal([]string{"00", "05", "10", "15", "20", "25", "30"}))
	g.Expect(names(query{names: []string{"node-0007", "node-0008"}, notReady: true})).To(Equal([]string{"07"}))
	g.Expect(query{names: []string{"node-0007"}, policy: "cheap", product: "Tesla-T4"}.check(s)).To(Succeed())
	g.Expect(query{names: []string{"x"}}.check(s)).To(MatchError(ContainSubstring(`"x" is no node with GPUs`)))
	g.Expect(query{names: []string{"cheap"}}.resolved(s)).To(Equal(query{policy: "cheap"}), "the name of a policy")
	g.Expect(query{policy: "cheep"}.check(s)).To(MatchError(ContainSubstring(`there is no policy "cheep"`)))
	g.Expect(query{product: "T4"}.check(s)).To(MatchError(ContainSubstring(`no node has GPUs of product "T4"`)))
}

// TestStatusForPrograms: JSON and YAML hold the same, of all nodes.
func TestStatusForPrograms(t *testing.T) {
	g := NewWithT(t)
	s := many(t, 12)
	inJSON, err := encoded(s, query{}, doubts{}, outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	inYAML, err := encoded(s, query{}, doubts{}, outputYAML)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(yaml.YAMLToJSON([]byte(inYAML))).To(MatchJSON(inJSON))
	var read struct {
		Policies []map[string]any
		Nodes    []report
	}
	g.Expect(json.Unmarshal([]byte(inJSON), &read)).To(Succeed())
	g.Expect(read.Policies).To(ConsistOf(And(HaveKeyWithValue("name", "cheap"), HaveKeyWithValue("strategy", "TimeSlicing"), HaveKeyWithValue("ready", false))))
	g.Expect(read.Nodes).To(HaveLen(12))
	g.Expect(read.Nodes[7]).To(And(HaveField("Name", "node-0007"), HaveField("Ready", false), HaveField("Reason", v1alpha1.ReasonDrainTimedOut),
		HaveField("Policy", "cheap"), HaveField("Products", []string{"Tesla-T4"}), HaveField("Advertised", map[string]int64{"nvidia.com/gpu": 1})))
	empty, err := encoded(cluster.Snapshot{}, query{}, doubts{}, outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(empty).To(MatchJSON(`{"shares": {"offered": 0, "inUse": 0}, "namespaces": [], "policies": [], "nodes": []}`), "lists, not null")
}

// TestAPolicyHasItsSharesAlsoWhereItsNodesAreNotShown: a flag that leaves nodes out takes no shares off their policy.
func TestAPolicyHasItsSharesAlsoWhereItsNodesAreNotShown(t *testing.T) {
	g, s := NewWithT(t), many(t, 12)
	var read struct {
		Shares   shares
		Policies []struct{ Shares shares }
	}
	inJSON, err := encoded(s, query{notReady: true}, doubts{}, outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(json.Unmarshal([]byte(inJSON), &read)).To(Succeed())
	governed := sumOf(reports(s), "cheap")
	g.Expect(governed.Offered).To(BeNumerically(">", read.Shares.Offered))
	g.Expect(read.Policies).To(ConsistOf(HaveField("Shares", governed)))
	shown := text{}
	shown.status(s, query{notReady: true})
	g.Expect(shown.String()).To(MatchRegexp(`(?m)^cheap .* %d of %d +`, governed.InUse, governed.Offered))
}

// TestProgramsReadHowGPUsAreShared: by status -o json, with who has which share.
func TestProgramsReadHowGPUsAreShared(t *testing.T) {
	g := NewWithT(t)
	a := newNode(t, "a", sim.T4, sim.T4)
	a.Allocatable = map[string]int64{"nvidia.com/gpu": 16}
	hold(&a, "notebook", 0, nil)
	hold(&a, "notebook", 0, nil)
	hold(&a, "train", 0, nil)
	b := newNode(t, "b", sim.H100)
	b.Allocatable = map[string]int64{"nvidia.com/gpu.shared": 10}
	b.GPU.Status.Devices[0].Sharing.MPS = &v1alpha1.MPSDaemon{ResourceName: "nvidia.com/gpu.shared", Owner: v1alpha1.MPSDaemonOwnerGPUSharing}
	hold(&b, "inference", 0, nil)
	c := partitioned(t)
	hold(&c, "web", 0, new(c.GPU.Status.Devices[0].Instances[0].ID))
	c.Name, c.GPU.Name = "c", "c"
	shown, err := encoded(snapshotOf(a, b, c, newNode(t, "d", sim.T4)), query{}, doubts{}, outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	var read struct{ Nodes []report }
	g.Expect(json.Unmarshal([]byte(shown), &read)).To(Succeed())
	uuid := func(n cluster.Node, i int) string { return n.GPU.Status.Devices[i].UUID }
	g.Expect(read.Nodes[0].GPUs).To(Equal([]gpuReport{
		{Index: 0, UUID: uuid(a, 0), Product: "Tesla-T4", Sharing: "TimeSlicing", Replicas: new(8), Used: new(3), Users: []string{"team/notebook", "team/train"}},
		{Index: 1, UUID: uuid(a, 1), Product: "Tesla-T4", Sharing: "TimeSlicing", Replicas: new(8), Used: new(0)},
	}))
	g.Expect(read.Nodes[1].GPUs).To(ConsistOf(And(HaveField("Sharing", v1alpha1.StrategyMPS), HaveField("Replicas", HaveValue(Equal(10))),
		HaveField("Used", HaveValue(Equal(1))), HaveField("Users", []string{"team/inference"}))))
	g.Expect(read.Nodes[2].GPUs).To(ConsistOf(And(HaveField("Sharing", v1alpha1.StrategyMIG), HaveField("Replicas", BeNil()),
		HaveField("Instances", HaveLen(3)), HaveField("Instances", ContainElement(HaveField("Users", []string{"team/web"}))))))
	g.Expect(read.Nodes[3].GPUs).To(ConsistOf(And(HaveField("Sharing", BeEmpty()), HaveField("Replicas", HaveValue(Equal(1))))))
}

// watched is a clock that lets a test act whenever the program waits, and ends the program when the test is done.
type watched struct {
	*clocktesting.FakeClock

	polls int
	then  func(polls int) bool
	end   context.CancelFunc
}

func (w *watched) After(d time.Duration) <-chan time.Time {
	w.Step(d)
	if w.polls++; !w.then(w.polls) {
		w.end()
		return nil
	}
	now := make(chan time.Time, 1)
	now <- w.Now()
	return now
}

// TestStatusWatchPrintsWhatChanges: that time passes is no change, neither for the age of a policy nor for a controller
// that is gone.
func TestStatusWatchPrintsWhatChanges(t *testing.T) {
	g := NewWithT(t)
	scheme, err := newScheme()
	g.Expect(err).NotTo(HaveOccurred())
	p := policy(t, "research", slicing)
	p.ResourceVersion, p.CreationTimestamp = "", metav1.NewTime(now.Add(-time.Minute))
	lease := leaseIn("gpu-sharing-operator", now.Add(-time.Hour))
	for output, first := range map[string]string{"": "POLICY", outputWide: "POLICY", outputYAML: "nodes:"} {
		c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(p.DeepCopy(), lease, bindingOf("gpu-sharing-operator")).
			WithIndex(lease, "metadata.name", func(o client.Object) []string { return []string{o.GetName()} }).Build()
		ctx, cancel := context.WithCancel(t.Context())
		var out strings.Builder
		clock := &watched{FakeClock: clocktesting.NewFakeClock(now), end: cancel, then: func(polls int) bool {
			if polls == 30 {
				g.Expect(strings.Count(out.String(), first)).To(Equal(1), out.String())
				another := p.DeepCopy()
				another.Name = "another"
				g.Expect(c.Create(ctx, another)).To(Succeed())
			}
			return polls < 60
		}}
		f := newFlags()
		f.watch, f.output = true, output
		g.Expect((&Program{Out: &out, Clock: clock}).statusBy(ctx, c, f, query{})).To(Succeed())
		g.Expect(clock.polls).To(Equal(60))
		g.Expect(strings.Count(out.String(), first)).To(Equal(2), out.String())
		if output == outputYAML {
			g.Expect(strings.Split(out.String(), "---\n")).To(HaveLen(2), "documents")
		}
	}
}

// TestStatusTellsProgramsThatNoControllerRuns: otherwise a program takes ready: true of days ago for what is so now.
func TestStatusTellsProgramsThatNoControllerRuns(t *testing.T) {
	scheme, err := newScheme()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	p := policy(t, "research", slicing)
	p.ResourceVersion = ""
	for _, output := range []string{"", outputJSON, outputYAML} {
		for says, renewed := range map[string]time.Time{"": now, "last renewed at 2027-01-12T08:00:00Z": now.Add(-72 * time.Hour)} {
			t.Run(output+says, func(t *testing.T) {
				g := NewWithT(t)
				lease, f := leaseIn("gpu-sharing-operator", renewed), newFlags()
				f.output = output
				c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(p.DeepCopy(), lease, bindingOf("gpu-sharing-operator")).
					WithIndex(lease, "metadata.name", byFieldName).Build()
				render, err := (&Program{Clock: clocktesting.NewFakeClock(now)}).statusNow(t.Context(), c, query{}, f)
				g.Expect(err).NotTo(HaveOccurred())
				shown, err := render(now)
				g.Expect(err).NotTo(HaveOccurred())
				shown = strings.Join(strings.Fields(shown), " ")
				g.Expect(shown).To(ContainSubstring(says))
				g.Expect(strings.Contains(strings.ToLower(shown), "no controller runs") || strings.Contains(shown, "noController")).To(Equal(says != ""), shown)
			})
		}
	}
}

// TestStatusTellsProgramsWhatIsNotKnown: as the text does.
func TestStatusTellsProgramsWhatIsNotKnown(t *testing.T) {
	g := NewWithT(t)
	shown, err := encoded(cluster.Snapshot{}, query{}, doubts{Unread: []string{"DeviceClasses are not known"}}, outputYAML)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(shown).To(ContainSubstring("unread:\n- DeviceClasses are not known\n"))
}

// TestHoldersThatAGPUNodeDoesNotListAreCounted: it lists 64 of a GPU at most.
func TestHoldersThatAGPUNodeDoesNotListAreCounted(t *testing.T) {
	g := NewWithT(t)
	n := newNode(t, "a", sim.T4)
	n.Allocatable = map[string]int64{plainGPU: 96}
	for i := range 80 {
		pod := fmt.Sprintf("train-%02d", i)
		n.Pods = append(n.Pods, cluster.Pod{Namespace: "team", Name: pod, UID: pod, GPU: true, Requests: map[string]int64{plainGPU: 1}})
		if i < 64 {
			n.GPU.Status.Devices[0].Holders = append(n.GPU.Status.Devices[0].Holders, v1alpha1.HolderStatus{Namespace: "team", PodName: pod, ContainerName: "main"})
		}
	}
	printed := func(q query) string {
		shown := text{width: 200}
		shown.status(snapshotOf(n), q)
		return shown.String()
	}
	g.Expect(printed(query{names: []string{"a"}})).To(And(ContainSubstring("80 of 96 shares in use"), ContainSubstring("not shown    16 shares more in use, whose pods start or for which the GPUNode has no room")))
	g.Expect(printed(query{})).To(ContainSubstring("In use by namespace: team 80"))
}
