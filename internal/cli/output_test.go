// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAFlagThatACommandDoesNotTakeIsAnError: left out in silence, `plan --watch` would look as if it watched.
func TestAFlagThatACommandDoesNotTakeIsAnError(t *testing.T) {
	for line, says := range map[string]string{
		"plan -f x --watch":         "plan does not take --watch, which is a flag of status, top",
		"import -o json":            "import does not take -o, which is a flag of doctor, must-gather, plan, status, top, why",
		"import --output json":      "import does not take --output, which is a flag of doctor, must-gather, plan, status, top, why",
		"doctor --policy research":  "doctor does not take --policy",
		"status --timeout 5s":       "status does not take --timeout, which is a flag of restore",
		"status -o name":            `--output "name" of status is not one of json, wide, yaml`,
		"top -o wide":               `--output "wide" of top is not one of json, yaml`,
		"plan -f x --output=custom": `--output "custom" of plan is not one of json, yaml`,
	} {
		err := (&Program{Out: io.Discard}).Run(t.Context(), strings.Split(line, " "))
		NewWithT(t).Expect(err).To(MatchError(ContainSubstring(says)), line)
	}
	for line, says := range map[string]string{
		"stauts":                        `unknown command "stauts"; did you mean status? ` + "`kubectl gpusharing help` lists commands",
		"apply":                         "unknown command \"apply\"; `kubectl gpusharing help` lists",
		"status --polcy x":              "unknown flag: --polcy; did you mean --policy?",
		"plan --delet research":         "did you mean --delete?",
		"status --request-timeout=soon": "Invalid timeout value",
	} {
		err := (&Program{Out: io.Discard}).Run(t.Context(), strings.Split(line, " "))
		NewWithT(t).Expect(err).To(MatchError(ContainSubstring(says)), line)
	}
}

// TestEachCommandHasItsOwnHelp: its flags and no other's, and one example that is a command line of it.
func TestEachCommandHasItsOwnHelp(t *testing.T) {
	p := &Program{}
	for _, v := range p.verbs() {
		name, _, _ := strings.Cut(v.use, " ")
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			var out strings.Builder
			g.Expect((&Program{Out: &out}).Run(t.Context(), []string{name, "--help"})).To(Succeed())
			g.Expect(out.String()).To(And(HavePrefix(cmp.Or(v.long, v.short)), ContainSubstring("\nUsage:\n  kubectl gpusharing "+v.use+"\n"),
				ContainSubstring("\nExample:\n  kubectl gpusharing "+name), ContainSubstring("`kubectl gpusharing options` lists")))
			g.Expect(strings.Contains(out.String(), "--filename")).To(Equal(name == "plan"))
			g.Expect(out.String()).NotTo(ContainSubstring("--as-group"))
			for line := range strings.Lines(out.String()) {
				g.Expect(len(line)).To(BeNumerically("<=", 160), line)
			}
			other := strings.Builder{}
			g.Expect((&Program{Out: &other}).Run(t.Context(), []string{"help", name})).To(Succeed())
			g.Expect(other.String()).To(Equal(out.String()))

			command, words := v.command(newFlags()), strings.Fields(v.example)
			if to := slices.Index(words, ">"); to >= 0 {
				words = words[:to]
			}
			g.Expect(command.ParseFlags(words[3:])).To(Succeed(), "the example")
			if !strings.Contains(v.use, " ") {
				g.Expect(command.Flags().Args()).To(BeEmpty(), "the example")
			}
		})
	}
	g := NewWithT(t)
	var out strings.Builder
	g.Expect((&Program{Out: &out}).Run(t.Context(), []string{"options"})).To(Succeed())
	g.Expect(out.String()).To(And(ContainSubstring("--as "), ContainSubstring("--request-timeout"), ContainSubstring("--context"), Not(ContainSubstring("--policy"))))
}

// TestTopForPrograms: JSON and YAML hold what the agents measured, and why a node is not measured.
func TestTopForPrograms(t *testing.T) {
	g := NewWithT(t)
	type container struct {
		Namespace, Pod          string
		MemoryBytes, ShareBytes int64
	}
	var shown struct {
		Nodes []struct {
			Node, Policy, NotMeasured string
			Units                     []struct {
				Product    string
				Containers []container
			}
		}
	}
	printed := func(output, of string, names ...string) string {
		f := newFlags()
		f.output, f.watch = output, true
		text, err := (&Program{Width: 80}).topAs(f, of, measuredFleet(), names)
		g.Expect(err).NotTo(HaveOccurred())
		return text
	}
	inJSON := printed(outputJSON, "node")
	g.Expect(yaml.YAMLToJSON([]byte(printed(outputYAML, "node")))).To(MatchJSON(inJSON))
	g.Expect(json.Unmarshal([]byte(inJSON), &shown)).To(Succeed())
	g.Expect(shown.Nodes).To(HaveLen(4))
	g.Expect(shown.Nodes[0].Policy).To(Equal("research"))
	g.Expect(shown.Nodes[0].Units[0].Containers).To(ContainElement(container{"team", "greedy-7c9d", 17 << 30, 10 << 30}))
	g.Expect(shown.Nodes[3].Node).To(Equal("d"))
	g.Expect(shown.Nodes[3].NotMeasured).To(ContainSubstring("503"))
	g.Expect(inJSON).NotTo(ContainSubstring("null"))

	g.Expect(json.Unmarshal([]byte(printed(outputJSON, "pod", "modest-0")), &shown)).To(Succeed())
	g.Expect(shown.Nodes[0].Units).To(HaveLen(1), "the others have no container of it")
	g.Expect(shown.Nodes[0].Units[0].Containers).To(ConsistOf(HaveField("Pod", "modest-0")))
	g.Expect(json.Unmarshal([]byte(printed(outputJSON, "policy", "notebooks")), &shown)).To(Succeed())
	g.Expect(shown.Nodes).To(HaveExactElements(HaveField("Node", "b"), HaveField("NotMeasured", Not(BeEmpty()))), "of the other it is not known")
}

// TestPlanForPrograms: JSON holds what becomes of policies and nodes.
func TestPlanForPrograms(t *testing.T) {
	g := NewWithT(t)
	s := snapshotOf(newNode(t, "a", sim.A100), newNode(t, "b", sim.T4))
	s.Policies = append(s.Policies, policy(t, "cheap", slicing))
	s.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "b"}}
	wanted := policy(t, "research", slicing)
	wanted.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "a"}}
	text, err := marshal(planOf(s, change{applied: []v1alpha1.GPUSharingPolicy{wanted}, deleted: []string{"cheap"}}), outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	var shown planReport
	g.Expect(json.Unmarshal([]byte(text), &shown)).To(Succeed())
	g.Expect(shown.Policies).To(HaveExactElements(
		And(HaveField("Name", "research"), HaveField("Change", changeCreate), HaveField("Status.Nodes.Matched", BeEquivalentTo(1))),
		plannedPolicy{Name: "cheap", Change: changeDelete},
	))
	at := map[string]plannedNode{}
	for _, n := range shown.Nodes {
		at[n.Name] = n
	}
	g.Expect(at["a"]).To(And(HaveField("Policy", "research"), HaveField("FormerPolicy", ""), HaveField("Advertised", map[string]int64{"nvidia.com/gpu": 1}),
		HaveField("Expected", Not(BeEmpty())), HaveField("State", Not(Equal(string(node.UpToDate)))), HaveField("Steps", ContainElement(HavePrefix("device plugin: select configuration")))))
	g.Expect(text).NotTo(ContainSubstring("null"))
	g.Expect(shown.Outcome).To(Equal("NonDisruptive"))
	edited := policy(t, "cheap", `{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}}}`)
	text, err = marshal(planOf(s, change{applied: []v1alpha1.GPUSharingPolicy{edited}}), outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(text).To(ContainSubstring(`"change": "Update"`))
	text, err = marshal(planOf(s, change{applied: s.Policies}), outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(text).To(And(ContainSubstring(`"change": "None"`), ContainSubstring(`"outcome": "NoChange"`)), "it is in the cluster as it is")
	g.Expect(text).NotTo(ContainSubstring("unread"))
}

// TestAnOverlapByPriorityIsNoConflict: a policy for all nodes below one for some of them is what priorities are for. Two
// of the same priority must be settled.
func TestAnOverlapByPriorityIsNoConflict(t *testing.T) {
	some := policy(t, "some", slicing)
	some.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "b"}}
	for title, tc := range map[string]struct {
		priority int32
		every    bool // the other selects all nodes too
		outcome  OutcomeError
	}{
		"of a higher priority, on some nodes": {10, false, NonDisruptive},
		"of the same priority":                {0, false, Unsatisfiable},
		"of a higher priority, on every node": {10, true, Unsatisfiable},
	} {
		t.Run(title, func(t *testing.T) {
			s := snapshotOf(newNode(t, "a", sim.T4), newNode(t, "b", sim.T4))
			other := *some.DeepCopy()
			if other.Spec.Priority = tc.priority; tc.every {
				other.Spec.NodeSelector = &v1alpha1.NodeSelector{}
			}
			s.Policies = []v1alpha1.GPUSharingPolicy{other}
			all := policy(t, "z-all", slicing)
			NewWithT(t).Expect(outcomeOf(s, change{applied: []v1alpha1.GPUSharingPolicy{all}})).To(Equal(tc.outcome))
		})
	}
}

// failure is an error unless it is what a plan has found.
func failure(err error) error {
	if outcome := NoChange; errors.As(err, &outcome) {
		return nil
	}
	return err
}

// TestPlanIsAGate: by its outcome a pipeline decides whether to go on.
func TestPlanIsAGate(t *testing.T) {
	const renamed = `{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}, advertise: {renameByDefault: true}}}`
	toMIG := fmt.Sprintf(toMIG, "WaitForIdle")
	for title, tc := range map[string]struct {
		present, applied string
		nodes            func(*testing.T) []cluster.Node
		deleted          bool
		outcome          OutcomeError
	}{
		"an identical policy":                     {slicing, slicing, nil, false, NoChange},
		"an identical one of which a node cannot": {toMIG, toMIG, func(t *testing.T) []cluster.Node { return []cluster.Node{newNode(t, "t", sim.T4)} }, false, NoChange},
		"a new one that shares by time-slicing":   {"", slicing, nil, false, NonDisruptive},
		"other replicas":                          {renamed, slicing, nil, false, NonDisruptive},
		"a MIG layout":                            {"", toMIG, nil, false, Disruptive},
		"a name that a workload does not ask for": {"", renamed, func(t *testing.T) []cluster.Node {
			a := newNode(t, "a", sim.T4)
			hold(&a, "web", 0, nil)
			a.Pods[0].Requests, a.Pods[0].Workload = map[string]int64{"nvidia.com/gpu": 1}, "Deployment team/web"
			return []cluster.Node{a}
		}, false, Disruptive},
		"a node that does not report": {"", slicing, func(t *testing.T) []cluster.Node {
			a := newNode(t, "a", sim.T4)
			a.AgentReady, a.GPU.Status = false, v1alpha1.GPUNodeStatus{}
			return []cluster.Node{a}
		}, false, Disruptive},
		"a layout that one of the nodes cannot have": {"", toMIG, func(t *testing.T) []cluster.Node {
			return []cluster.Node{newNode(t, "a", sim.A100), newNode(t, "t", sim.T4)}
		}, false, Unsatisfiable},
		"a deletion": {slicing, "", nil, true, NonDisruptive},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			s := snapshotOf(newNode(t, "a", sim.A100))
			if tc.nodes != nil {
				s = snapshotOf(tc.nodes(t)...)
			}
			if tc.present != "" {
				s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", tc.present)}
			}
			var asked change
			if tc.applied != "" {
				asked.applied = []v1alpha1.GPUSharingPolicy{policy(t, "research", tc.applied)}
			}
			if tc.deleted {
				asked.deleted = []string{"research"}
			}
			outcome := outcomeOf(s, asked)
			g.Expect(outcome).To(Equal(tc.outcome), outcome.Error())
			g.Expect(planOf(s, asked).Outcome).To(Equal(tc.outcome.name()))
		})
	}
}

// TestAPlanTakesFromNobodyWhatNoNodeOffers: one pod that asks for nonsense is no reason to stop every pipeline.
func TestAPlanTakesFromNobodyWhatNoNodeOffers(t *testing.T) {
	g := NewWithT(t)
	s := snapshotOf(newNode(t, "a", sim.T4))
	asks := func(resource string) {
		s.Unscheduled = []cluster.Pod{{Namespace: "team", Name: "b", Workload: "Pod team/b", Requests: map[string]int64{resource: 1}}}
	}
	asked := change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "research", `{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}, advertise: {renameByDefault: true}}}`)}}
	asks("nvidia.com/mig-4g.20gb")
	g.Expect(outcomeOf(s, asked)).To(Equal(NonDisruptive))
	asks("nvidia.com/gpu")
	g.Expect(outcomeOf(s, asked)).To(Equal(Disruptive))
}

// TestPlanAddsUpWhatNodesOfferThatCannotChange: what a node offers that cannot satisfy the policy is not lost.
func TestPlanAddsUpWhatNodesOfferThatCannotChange(t *testing.T) {
	g := NewWithT(t)
	asked := change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "research", fmt.Sprintf(toMIG, "Evict"))}}
	shown := text{}
	shown.plan(snapshotOf(newNode(t, "a", sim.A100), newNode(t, "t", sim.T4), newNode(t, "u", sim.T4)), asked)
	g.Expect(shown.String()).To(And(ContainSubstring("  afterwards   nvidia.com/gpu: 2, nvidia.com/mig-2g.10gb: 3\n"),
		ContainSubstring("  kinds        1 node with NVIDIA-A100-SXM4-40GB: nvidia.com/mig-2g.10gb: 3\n               2 nodes with Tesla-T4: nvidia.com/gpu: 1\n"),
		ContainSubstring("\n2 NODES alike, t, u\n  cannot       MIGNotSupported")))
	shown = text{}
	shown.plan(snapshotOf(newNode(t, "t", sim.T4)), asked)
	g.Expect(shown.String()).To(ContainSubstring("  afterwards   nvidia.com/gpu: 1\n"), "not nothing")
	report := planOf(snapshotOf(newNode(t, "t", sim.T4)), asked)
	g.Expect(report.Nodes).To(HaveExactElements(HaveField("Expected", map[string]int64{"nvidia.com/gpu": 1})))
}

// TestPlanTellsProgramsWhatItCouldNotRead: without it a plan on half of the cluster looks like one on all of it.
func TestPlanTellsProgramsWhatItCouldNotRead(t *testing.T) {
	g := NewWithT(t)
	const lacks = "You may not list ResourceSlices, so it is not known what NVIDIA's DRA driver publishes"
	text, err := marshal(planOf(snapshotOf(newNode(t, "a", sim.A100)), change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "research", slicing)}, lacks: []string{lacks}}), outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	var shown planReport
	g.Expect(json.Unmarshal([]byte(text), &shown)).To(Succeed())
	g.Expect(shown.Unread).To(HaveExactElements(lacks))
}

// TestDoctorForPrograms: the findings, the worst first.
func TestDoctorForPrograms(t *testing.T) {
	g := NewWithT(t)
	is := healthy(t, 3)
	is.nodes[1].agents = nil
	text, err := reportAs(diagnose(is), 80, outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	var shown struct {
		Findings []struct{ Level, Finding string }
	}
	g.Expect(json.Unmarshal([]byte(text), &shown)).To(Succeed())
	g.Expect(len(shown.Findings)).To(BeNumerically(">", 3))
	g.Expect(shown.Findings[0]).To(And(HaveField("Level", levelError), HaveField("Finding", ContainSubstring("node-1"))))
	g.Expect(shown.Findings[len(shown.Findings)-1]).To(HaveField("Level", levelOK))
}
