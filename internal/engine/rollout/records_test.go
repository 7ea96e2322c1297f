// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// What the operator keeps has bounds, and what is beyond them is cut or refused with a reason: docs/dev/contracts.md, "Records".

// inPool selects the nodes of a pool, and is as old as so many minutes.
func inPool(pool string, minutes int) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": pool}}
		p.CreationTimestamp = metav1.NewTime(time.Unix(1_700_000_000, 0).Add(-time.Duration(minutes) * time.Minute))
	}
}

// expectTaken fails if the API server would refuse a status of the decision.
func expectTaken(t *testing.T, d rollout.Decision) {
	t.Helper()
	for name, s := range d.Policies {
		NewWithT(t).Expect(refusal(v1alpha1.GPUSharingPolicy{Status: s})).To(BeEmpty(), name)
	}
	for _, a := range d.Actions {
		if report, is := a.(action.Report); is {
			NewWithT(t).Expect(refusal(v1alpha1.GPUNode{Status: report.Status})).To(BeEmpty(), report.Node)
		}
	}
}

func accepted(d rollout.Decision, policy string) metav1.Condition {
	c, _ := condition.Find(d.Policies[policy].Conditions, v1alpha1.ConditionAccepted)
	return c
}

// TestPoliciesBeyondTheirNumberChangeNothing: further policies, of whatever priority, take no node from those that are followed, and say why.
func TestPoliciesBeyondTheirNumberChangeNothing(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	old, young, other := c.add("old", sim.T4), c.add("young", sim.T4), c.add("other", sim.T4)
	for _, h := range []*host{old, young, other} {
		h.Labels["pool"] = h.Name
	}
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("old", timeSlicing(2), inPool("old", 9000)), policyOf("young", timeSlicing(3), inPool("young", 1))}
	c.run(90)
	was := old.Labels[v1alpha1.LabelConfig]
	g.Expect(young.Labels[v1alpha1.LabelConfig]).NotTo(BeEmpty())

	for i := range policy.MostPolicies {
		c.Policies = append(c.Policies, policyOf(fmt.Sprintf("more-%03d", i), timeSlicing(4), inPool(fmt.Sprint(i), 5000-i)))
	}
	c.Policies = append(c.Policies, policyOf("greedy", timeSlicing(8), inPool("old", 0), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Priority = 1000 }))
	d, _ := c.run(30)
	expectTaken(t, d)
	g.Expect(d.Policies).To(HaveLen(policy.MostPolicies + 3))
	g.Expect(old.Labels[v1alpha1.LabelConfig]).To(Equal(was), "the older one keeps its node")
	g.Expect(accepted(d, "young").Reason).To(Equal(v1alpha1.ReasonAccepted), "one that governs a node stays")
	for _, beyond := range []string{"greedy", "more-499", "more-498"} {
		is := accepted(d, beyond)
		g.Expect(is.Status).To(Equal(metav1.ConditionFalse), beyond)
		g.Expect(is.Reason).To(Equal(v1alpha1.ReasonTooManyPolicies))
		g.Expect(is.Message).To(ContainSubstring("The cluster has 503 policies, and the operator follows 500"))
		g.Expect(condition.IsTrue(d.Policies[beyond].Conditions, v1alpha1.ConditionStalled)).To(BeTrue())
	}
	g.Expect(accepted(d, "more-497").Reason).To(Equal(v1alpha1.ReasonNoMatchingNodes), "the last that is followed")

	c.Policies = slices.DeleteFunc(c.Policies, func(p v1alpha1.GPUSharingPolicy) bool { return strings.HasPrefix(p.Name, "more-") })
	d, _ = c.run(60)
	g.Expect(accepted(d, "greedy").Reason).To(Equal(v1alpha1.ReasonAccepted), "there is room again")
}

// TestTheConfigMapStaysWithinItsSize: a node whose config has no room in the ConfigMap does not begin, and says why. What nodes select stays.
func TestTheConfigMapStaysWithinItsSize(t *testing.T) {
	for name, c := range map[string]struct {
		others  string // what was copied
		sharing v1alpha1.Sharing
	}{
		"beside configs of others": {others: strings.Repeat("#", 1<<20-64<<10-400), sharing: mig(count("1g", 7))},
		"that nobody restarts for": {others: strings.Repeat("#", 1<<20-64<<10-600), sharing: timeSlicing(4)},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w := newSite()
			w.Plugin.Configs = map[string]string{"theirs": c.others}
			for i := range 9 {
				n := fmt.Sprintf("n%d", i)
				w.add(n, sim.A100).Labels["pool"] = n
				w.Policies = append(w.Policies, policyOf("p"+n, c.sharing, inPool(n, 100-i)))
			}
			d, _ := w.run(200)
			expectTaken(t, d)
			size := 0
			for key, data := range w.Configs {
				size += len(key) + len(data)
			}
			g.Expect(size).To(BeNumerically("<=", 1<<20-64<<10))
			full := 0
			for _, n := range d.Nodes {
				switch n.Reason {
				case v1alpha1.ReasonConfigMapFull:
					full++
					g.Expect(w.hosts[n.Node].Taints).To(BeEmpty(), "a node that cannot go on does not begin")
					g.Expect(n.Message).To(ContainSubstring("no room for config p" + n.Node))
				default:
					g.Expect(n.State).To(Equal(node.UpToDate), "%s: %s", n.Node, n.Message)
				}
			}
			g.Expect(full).To(And(BeNumerically(">", 0), BeNumerically("<", 9)))

			w.Policies = slices.DeleteFunc(w.Policies, func(p v1alpha1.GPUSharingPolicy) bool {
				return p.Name == "pn0" // whose node goes back to its baseline
			})
			d, _ = w.run(200)
			still := 0
			for _, n := range d.Nodes {
				if n.Reason == v1alpha1.ReasonConfigMapFull {
					still++
				}
			}
			g.Expect(still).To(Equal(full-1), "the next one has room")
		})
	}
}

// TestAPolicyThatLosesToManyIsReported: hundreds of policies with long names govern what this one selects.
func TestAPolicyThatLosesToManyIsReported(t *testing.T) {
	c := newSite()
	c.add("a", sim.T4)
	c.setPolicy("all", timeSlicing(2), inPool("", 0), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.NodeSelector = nil })
	s := c.world()
	one := s.Nodes[0]
	s.Nodes = nil
	for i := range 400 {
		n := one
		n.Name = fmt.Sprintf("%03d-%s", i, strings.Repeat("n", 240))
		n.Labels = map[string]string{"pool": fmt.Sprint(i)}
		s.Nodes = append(s.Nodes, n)
		s.Policies = append(s.Policies, policyOf(fmt.Sprintf("%03d-%s", i, strings.Repeat("p", 240)), timeSlicing(3), inPool(fmt.Sprint(i), i+1)))
	}
	d := rollout.Decide(s)
	expectTaken(t, d)
	NewWithT(t).Expect(accepted(d, "all").Message).To(And(ContainSubstring("399 more policies govern others"), HaveSuffix("select other nodes")))
}

// TestTolerationsHaveABound: the ClusterPolicy gets no more tolerations than that. Those that nodes need stay, and the others are reported.
func TestTolerationsHaveABound(t *testing.T) {
	g := NewWithT(t)
	taint := func(i int) corev1.Taint {
		return corev1.Taint{Key: fmt.Sprintf("example.com/%03d-%s", i, strings.Repeat("k", 40)), Effect: corev1.TaintEffectNoSchedule}
	}
	late := corev1.Taint{Key: "zzz.example.com/first", Effect: corev1.TaintEffectNoSchedule}
	c, h := tainted(late)
	c.run(60)
	g.Expect(h.Taints).To(ContainElement(late))
	for i := range 100 {
		c.Policies = append(c.Policies, policyOf(fmt.Sprintf("p%03d", i), timeSlicing(2), inPool(fmt.Sprint(i), i), tainting(taint(3*i), taint(3*i+1), taint(3*i+2))))
	}
	d, _ := c.run(60)
	expectTaken(t, d)
	g.Expect(d.Tolerations).To(HaveLen(128))
	g.Expect(c.Plugin.Operands.Ours).To(HaveLen(128))
	g.Expect(d.Tolerations).To(ContainElement(HaveField("Key", late.Key)), "a node has that taint")
	g.Expect(h.Taints).To(ContainElement(late))
	beyond, _ := condition.Find(d.Policies["p099"].Conditions, v1alpha1.ConditionTainted)
	g.Expect(beyond.Reason).To(Equal(v1alpha1.ReasonTolerationMissing))
	g.Expect(beyond.Message).To(HavePrefix("The operator adds 128 tolerations at most to ClusterPolicy "))
	g.Expect(c.condition("p000").Reason).To(Equal(v1alpha1.ReasonTaintsPresent))
}

// TestWhatOthersSayOfANodeKeepsNoStatusFromBeingWritten: an agent or a device plugin says more than fits.
func TestWhatOthersSayOfANodeKeepsNoStatusFromBeingWritten(t *testing.T) {
	for name, say := range map[string]func(h *host){
		"a reason of the agent": func(h *host) {
			h.GPU.Status.Conditions = append(h.GPU.Status.Conditions, metav1.Condition{
				Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionTrue, Reason: strings.Repeat("Stalled", 100), Message: strings.Repeat("x", 32768),
				ObservedGeneration: h.GPU.Generation, LastTransitionTime: metav1.Now(),
			}, metav1.Condition{
				Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, Reason: "StepFailed", Message: strings.Repeat("x", 32768),
				ObservedGeneration: h.GPU.Generation, LastTransitionTime: metav1.Now(),
			})
		},
		"names of resources": func(h *host) {
			for i := range 100 {
				h.Allocatable[fmt.Sprintf("nvidia.com/gpu-%02d-%s", i, strings.Repeat("r", 50))] = 1
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, h := withGPUs(sim.A100)
			c.setPolicy("research", timeSlicing(4))
			c.run(60)
			c.reshare(mig(count("1g", 7)))
			for range 12 {
				expectTaken(t, c.reconcile())
				say(h)
				expectTaken(t, rollout.Decide(c.world()))
				c.tick(time.Second)
			}
			NewWithT(t).Expect(c.refused).To(BeEmpty())
		})
	}
}

// TestTheStepsOfANodeWithALongNameAreTaken: the NodeFeature of a node is named after it.
func TestTheStepsOfANodeWithALongNameAreTaken(t *testing.T) {
	c := newSite()
	h := c.add(strings.Repeat("n", 253), sim.T4)
	c.setPolicy("research", mps(4), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Paused = true })
	c.run(60)
	NewWithT(t).Expect(c.refused).To(BeEmpty())
	NewWithT(t).Expect(h.GPU.Status.Rollout.Steps).To(ContainElement(ContainSubstring("NodeFeature")))
}

// TestANodeWithoutItsGPUNodeHoldsWhatItHas: it stays as it is and counts for its policy, and for what is restored once no node is changed.
func TestANodeWithoutItsGPUNodeHoldsWhatItHas(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.T4)
	c.add("b", sim.T4)
	c.setPolicy("research", timeSlicing(4))
	c.run(90)
	key := h.Labels[v1alpha1.LabelConfig]
	lost := func() cluster.Snapshot {
		s := c.world()
		for i := range s.Nodes {
			if n := &s.Nodes[i]; n.Name == "a" {
				*n = n.WithCopy(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
				n.NoGPUNode = true
			}
		}
		return s
	}
	c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = timeSlicing(2) })
	d := rollout.Decide(lost())
	expectTaken(t, d)
	hasReason(g, d, v1alpha1.ReasonGPUNodeMissing)
	g.Expect(d.Actions).NotTo(ContainElement(HaveField("NodeName()", "a")))
	g.Expect(d.Actions).To(ContainElement(HaveField("NodeName()", "b")), "the other node goes on")

	c.Policies = nil
	d = rollout.Decide(lost())
	g.Expect(d.ConfigurePlugin).To(BeTrue(), "it still selects a config")
	for _, a := range d.Actions {
		if write, is := a.(action.WriteConfigs); is {
			g.Expect(write.Data).To(HaveKey(key))
		}
		g.Expect(a.NodeName()).NotTo(Equal("a"))
	}
}

// TestTheRecordOfInstancesIsOneValue, with or without who restarts first: a fight over it would restart the plugin sixty times an hour (15206).
func TestTheRecordOfInstancesIsOneValue(t *testing.T) {
	g := NewWithT(t)
	var r action.Repeats
	patch := action.PatchNode{Node: "a"}
	for i := range 8 {
		g.Expect(r.Remaining(patch, time.Time{}, time.Unix(0, 0))).To(BeZero())
		patch.Annotations = map[string]*string{v1alpha1.AnnotationInstances: new([]string{"0123@pod", "0123"}[i%2])}
		r.Note(patch, time.Unix(0, 0))
	}
	g.Expect(r.Remaining(patch, time.Time{}, time.Unix(0, 0))).NotTo(BeZero())
}

// TestARefusedWriteTakesNoTurnOfOthers: what the API server refuses of one node is tried again each minute and reported, and other nodes have
// its place in the budget.
func TestARefusedWriteTakesNoTurnOfOthers(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.Repeats = &action.Repeats{}
	c.add("a", sim.A100)
	c.add("b", sim.A100)
	c.setPolicy("research", mig(count("1g", 7)))
	refused, tries := true, 0
	var d rollout.Decision
	run := func(seconds int) {
		for range seconds {
			d = c.memory.decide(c.world())
			for _, a := range d.Actions {
				if a.NodeName() == "a" && refused {
					c.Repeats.Refuse(a, "denied by webhook", c.Now)
					tries++
					continue
				}
				c.do(a)
				c.Repeats.Note(a, c.Now)
			}
			c.tick(time.Second)
		}
	}
	run(300)
	g.Expect(d.Nodes[1].State).To(Equal(node.UpToDate), "%s: %s", d.Nodes[1].Reason, d.Nodes[1].Message)
	hasReason(g, d, v1alpha1.ReasonWriteFailed)
	hasMessage(g, d, "denied by webhook")
	g.Expect(tries).To(BeNumerically("<", 30), "in five minutes")
	refused = false
	run(300)
	g.Expect(one(d).State).To(Equal(node.UpToDate), "%s: %s", one(d).Reason, one(d).Message)
}

// TestEveryRecordHasABound: each list, map and text of our kinds has one in its schema, and each annotation and action stands with its bound in
// docs/dev/contracts.md.
func TestEveryRecordHasABound(t *testing.T) {
	for kind, schema := range schemas() {
		for _, part := range []string{"spec", "status"} {
			of := schema.Properties[part]
			NewWithT(t).Expect(unbounded(kind+"."+part, &of)).To(BeEmpty())
		}
	}
	g := NewWithT(t)
	text, err := os.ReadFile("../../../docs/dev/contracts.md")
	g.Expect(err).NotTo(HaveOccurred())
	_, records, found := strings.Cut(string(text), "\n## Records\n")
	g.Expect(found).To(BeTrue())
	records, _, _ = strings.Cut(records, "\n## ")
	for file, of := range map[string]string{
		"../../../api/v1alpha1/conditions.go": `\tAnnotation\w+ += Group \+ "/([a-z-]+)"`,
		"../action/methods.go":                `\nfunc \((\w+)\) isAction\(\)`,
	} {
		source, err := os.ReadFile(file)
		g.Expect(err).NotTo(HaveOccurred())
		names := regexp.MustCompile(of).FindAllStringSubmatch(string(source), -1)
		g.Expect(len(names)).To(BeNumerically(">", 10), file)
		for _, name := range names {
			g.Expect(records).To(ContainSubstring("`"+name[1]+"`"), "give its bound, and what happens beyond it")
		}
	}
}

// unbounded are the lists, maps and texts below a schema without a bound.
func unbounded(path string, s *apiextensionsv1.JSONSchemaProps) (all []string) {
	text := s.Type == "string" || s.XIntOrString
	lacks := s.Type == "array" && s.MaxItems == nil || s.AdditionalProperties != nil && s.MaxProperties == nil ||
		text && s.MaxLength == nil && s.Enum == nil && s.Format != "date-time"
	if lacks {
		all = append(all, path)
	}
	if s.Items != nil && s.Items.Schema != nil {
		all = append(all, unbounded(path+"[]", s.Items.Schema)...)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		of := s.Properties[name]
		all = append(all, unbounded(path+"."+name, &of)...)
	}
	return all
}

// TestTheCopyOfTheBaselineFitsOnTheNode: the annotations of an object have 256 KiB together, and the largest of the operator's has half of it at
// most, whatever GPUs the node has had.
func TestTheCopyOfTheBaselineFitsOnTheNode(t *testing.T) {
	b := &v1alpha1.Baseline{Labels: map[string]string{}}
	for i := range 16 {
		b.Labels[fmt.Sprintf("%02d.%s/%s", i, strings.Repeat("d", 200), strings.Repeat("n", 63))] = strings.Repeat("v", 63)
	}
	for i := range cluster.MostGPUs {
		d := v1alpha1.DeviceSpec{
			UUID:    fmt.Sprintf("%02d-%s", i, strings.Repeat("u", 93)),
			Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, TimeSliceInterval: v1alpha1.TimeSliceIntervalDefault},
		}
		for range 16 {
			d.Sharing.Instances = append(d.Sharing.Instances, v1alpha1.InstanceCount{Profile: strings.Repeat("g", 32), Count: 16})
		}
		b.Devices = append(b.Devices, d)
	}
	numbering := &v1alpha1.Numbering{Indexes: slices.Repeat([]int32{math.MinInt32}, 512), UUIDs: slices.Repeat([]string{b.Devices[0].UUID}, cluster.MostGPUs)}
	spec := v1alpha1.GPUNodeSpec{Baseline: b, Numbering: numbering, Release: &v1alpha1.Release{PolicyName: strings.Repeat("p", 253)}}
	NewWithT(t).Expect(refusal(v1alpha1.GPUNode{Spec: spec})).To(BeEmpty())
	NewWithT(t).Expect(len(cluster.CopyOf(spec))).To(BeNumerically("<=", 128<<10))
}
