// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"io"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAFlagThatACommandDoesNotTakeIsAnError: left out in silence, `plan --watch` would look as if it watched.
func TestAFlagThatACommandDoesNotTakeIsAnError(t *testing.T) {
	for line, says := range map[string]string{
		"plan -f x --watch":         "plan does not take --watch, which is a flag of status, top",
		"import -o json":            "import does not take --output, which is a flag of status, top, plan, doctor, must-gather",
		"doctor --policy research":  "doctor does not take --policy",
		"status --timeout 5s":       "status does not take --timeout, which is a flag of restore",
		"status -o name":            `--output "name" of status is not one of json, wide, yaml`,
		"top -o wide":               `--output "wide" of top is not one of json, yaml`,
		"plan -f x --output=custom": `--output "custom" of plan is not one of json, yaml`,
	} {
		err := (&Program{Out: io.Discard}).Run(t.Context(), strings.Split(line, " "))
		NewWithT(t).Expect(err).To(MatchError(ContainSubstring(says)), line)
	}
	g := NewWithT(t)
	for flag, takenBy := range takenBy {
		g.Expect(newFlags().set.Lookup(flag)).NotTo(BeNil(), flag)
		for _, command := range takenBy {
			g.Expect(commands).To(ContainElement(command))
		}
		g.Expect(newFlags().set.Lookup(flag).Usage).To(HavePrefix("of "+takenBy[0]), "the help says so too")
	}
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
	text, err = marshal(planOf(s, change{applied: s.Policies}), outputJSON)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(text).To(ContainSubstring(`"change": "Update"`))
	g.Expect(text).NotTo(ContainSubstring("unread"))
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
