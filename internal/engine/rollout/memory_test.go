// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// remembering is a memory, and the nodes as it last met them, so that it can be told when one has changed.
type remembering struct {
	rollout.Memory

	met   map[string]cluster.Node
	specs map[string]v1alpha1.GPUSharingPolicySpec // by name and generation
}

// decide decides with the memory and without: whatever has happened, the decision is the same.
func (r *remembering) decide(w cluster.Snapshot) rollout.Decision {
	if r.met == nil {
		r.met, r.specs = map[string]cluster.Node{}, map[string]v1alpha1.GPUSharingPolicySpec{}
	}
	for i := range w.Policies {
		p := &w.Policies[i]
		named := fmt.Sprint(p.Name, p.Generation)
		if spec, met := r.specs[named]; met && !reflect.DeepEqual(spec, p.Spec) {
			r.Memory = rollout.Memory{} // the test has changed it as the API server would not
		}
		r.specs[named] = p.Spec
	}
	for i := range w.Nodes {
		n := &w.Nodes[i]
		last := r.met[n.Name]
		n.Version = last.Version
		if !reflect.DeepEqual(*n, last) {
			n.Version++
			r.met[n.Name] = *n
		}
	}
	fresh, remembered := rollout.Decide(w), r.Decide(w)
	if !reflect.DeepEqual(fresh, remembered) {
		panic(fmt.Sprintf("with memory it is decided\n%+v\nand without\n%+v", remembered, fresh))
	}
	return fresh
}

// TestMemoryHoldsUntilTheVersionChanges: a node is taken for what it was as long as its version says so, and no longer.
func TestMemoryHoldsUntilTheVersionChanges(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.add("n0", sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", timeSlicing(4))}
	c.run(60)
	var memory rollout.Memory
	w := c.world()
	w.Nodes[0].Version = 1
	g.Expect(memory.Decide(w).Nodes[0].State).To(Equal(node.UpToDate))
	w = c.world()
	w.Nodes[0].Version, w.Nodes[0].AgentReady = 1, false
	g.Expect(memory.Decide(w).Nodes[0].State).To(Equal(node.UpToDate), "nothing was looked at")
	w.Nodes[0].Version = 2
	g.Expect(memory.Decide(w).Nodes[0].State).To(Equal(node.Unknown))
	w.Nodes[0].Version = 0
	w.Nodes[0].AgentReady = true
	g.Expect(memory.Decide(w).Nodes[0].State).To(Equal(node.UpToDate), "without a version nothing is remembered")
}

// TestMemoryNoticesEveryChangeOfTheWiring: whatever of it changes and changes back, the decision is that of a
// controller that remembers nothing.
func TestMemoryNoticesEveryChangeOfTheWiring(t *testing.T) {
	operands := func(name string) *clusterpolicy.Operands { return &clusterpolicy.Operands{Name: name} }
	values := map[string][]any{ // of each field, one that it has not in any of the worlds
		"Reason":        {v1alpha1.ReasonDRAStackActive},
		"Message":       {"something else"},
		"Ready":         {true, false},
		"ClusterPolicy": {true, false},
		"Overruled":     {time.Unix(1_800_000_000, 0)},
		"NodeFeatures":  {true, false},
		"Operands":      {(*clusterpolicy.Operands)(nil), operands("a"), operands("b")},
		"NoMIGManager":  {"spec.migManager.enabled is false"},
		"MIGReady":      {true, false},
		"Configs":       {map[string]string{"default": "a"}, map[string]string{"default": "b"}},
	}
	under := func(sharing v1alpha1.Sharing, passes int) *site {
		c := newSite()
		withManager(c, sim.A100)
		c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", sharing)}
		c.run(passes)
		return c
	}
	layout := []v1alpha1.MIGInstances{count("3g", 1), count("1g", 3)}
	worlds := map[string]*site{
		"time-slicing":           under(timeSlicing(4), 60),
		"MPS":                    under(mps(4), 60),
		"MIG":                    under(mig(layout...), 60),
		"MIG, at work":           under(mig(layout...), 4),
		"mig-manager":            under(byManager(layout...), 100),
		"mig-manager, at work":   under(byManager(layout...), 8),
		"mig-manager, not begun": under(byManager(layout...), 0),
	}
	for i := range reflect.TypeFor[cluster.DevicePlugin]().NumField() {
		field := reflect.TypeFor[cluster.DevicePlugin]().Field(i).Name
		t.Run(field, func(t *testing.T) {
			NewWithT(t).Expect(values).To(HaveKey(field), "give values for a new field here")
			for name, c := range worlds {
				g, w := NewWithT(t), c.world()
				w.Nodes[0].Version = 1
				before := w.Plugin
				var memory rollout.Memory
				memory.Decide(w)
				for _, value := range values[field] {
					reflect.ValueOf(&w.Plugin).Elem().Field(i).Set(reflect.ValueOf(value))
					g.Expect(memory.Decide(w)).To(Equal(rollout.Decide(w)), "%s, %v", name, value)
				}
				w.Plugin = before
				g.Expect(memory.Decide(w)).To(Equal(rollout.Decide(w)), "%s, as before", name)
			}
		})
	}
}

// TestPoliciesForOtherGPUsCostNothing: which policies select a node is found out once for each version of the node.
func TestPoliciesForOtherGPUsCostNothing(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.add("n0", sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", timeSlicing(4))}
	c.run(60)
	w := c.world()
	base := w.Nodes[0]
	w.Nodes = nil
	for i := range 100 {
		n := base
		n.Name, n.Version = fmt.Sprintf("n%03d", i), int64(i+1)
		w.Nodes = append(w.Nodes, n)
	}
	allocations := func() float64 {
		var memory rollout.Memory
		memory.Decide(w)
		return testing.AllocsPerRun(5, func() { memory.Decide(w) })
	}
	alone := allocations()
	for i := range 20 {
		w.Policies = append(w.Policies, policyOf(fmt.Sprintf("p%02d", i), timeSlicing(2), func(p *v1alpha1.GPUSharingPolicy) {
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"Tesla-T4"}}
		}))
	}
	g.Expect(allocations()).To(BeNumerically("<", alone+20*100), "less than one for each policy and node")
}

// TestANodeThatIsStillCostsNothing: an unchanged pass over more nodes allocates no more often, whether a policy governs
// them or not.
func TestANodeThatIsStillCostsNothing(t *testing.T) {
	for name, governed := range map[string]bool{"governed": true, "governed by nobody": false} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			c.add("n0", sim.A100)
			if governed {
				c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", timeSlicing(4))}
			}
			c.run(60)
			base := c.world().Nodes[0]
			allocations := func(nodes int) float64 {
				w := c.world()
				w.Nodes = nil
				for i := range nodes {
					n := base
					n.Name, n.Version = fmt.Sprintf("n%03d", i), int64(i+1)
					w.Nodes = append(w.Nodes, n)
				}
				var memory rollout.Memory
				g.Expect(memory.Decide(w).Actions).To(BeEmpty())
				return testing.AllocsPerRun(5, func() { memory.Decide(w) })
			}
			g.Expect(allocations(400)).To(BeNumerically("<", allocations(100)+30), "which is what lists grow by")
		})
	}
}

// TestANodeIsStillOnlyAsLongAsNothingThatConcernsItChanges: what is not part of the node, and so not of its version.
func TestANodeIsStillOnlyAsLongAsNothingThatConcernsItChanges(t *testing.T) {
	troubled := func(w *cluster.Snapshot) { // the status says whether the key is there
		w.Nodes[0].Pods[0].Troubles, w.Nodes[0].Pods[0].Scheduled = []cluster.Trouble{{Container: "config-manager", Why: "does not start"}}, time.Time{}
	}
	for name, test := range map[string]struct{ prepares, changes func(w *cluster.Snapshot) }{
		"the key that it selects": {prepares: troubled, changes: func(w *cluster.Snapshot) { w.Configs = nil }},
		"the key that it selects, in the same map": {prepares: troubled, changes: func(w *cluster.Snapshot) {
			delete(w.Configs, w.Nodes[0].Labels[v1alpha1.LabelConfig])
		}},
		"its policy": {changes: func(w *cluster.Snapshot) {
			w.Policies[0].Generation++
			w.Policies[0].Spec.Sharing = timeSlicing(8)
		}},
		"the policy that governs it": {changes: func(w *cluster.Snapshot) {
			w.Policies = append(w.Policies, policyOf("urgent", timeSlicing(2), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Priority = 1 }))
		}},
		"that a policy governs it": {changes: func(w *cluster.Snapshot) { w.Policies = nil }},
		"that another controller was seen there": {changes: func(w *cluster.Snapshot) {
			before := *w
			before.Nodes, before.OtherControllers = slices.Clone(w.Nodes), &cluster.OtherControllers{}
			before.Nodes[0].DRA = "DaemonSet nvidia-dra/kubelet-plugin"
			rollout.Decide(before)
			w.OtherControllers = before.OtherControllers
		}},
		"the time, where the agent's label may be set again later": {
			prepares: func(w *cluster.Snapshot) {
				delete(w.Nodes[0].Labels, v1alpha1.LabelClient)
				w.Nodes[0].Annotations[v1alpha1.AnnotationClient] = fmt.Sprintf("true@%d", w.Now.Unix())
			},
			changes: func(w *cluster.Snapshot) { w.Now = w.Now.Add(time.Hour) },
		},
		"what NVIDIA's device plugin on another node tolerates": {
			prepares: func(w *cluster.Snapshot) {
				w.Plugin.ClusterPolicy = false
				tainting(shared)(&w.Policies[0])
				for i := range w.Nodes {
					w.Nodes[i].Taints = []corev1.Taint{shared}
					w.Nodes[i].Annotations[v1alpha1.AnnotationTaints] = shared.Key + ":" + string(shared.Effect)
					for p := range w.Nodes[i].Pods {
						w.Nodes[i].Pods[p].NodeSelector, w.Nodes[i].Pods[p].Tolerations = nil, []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
					}
				}
			},
			changes: func(w *cluster.Snapshot) {
				w.Nodes[1].Version++
				w.Nodes[1].Pods = slices.Clone(w.Nodes[1].Pods)
				for p := range w.Nodes[1].Pods {
					w.Nodes[1].Pods[p].Tolerations = nil
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			c.add("n0", sim.A100)
			c.add("n1", sim.A100)
			c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", timeSlicing(4))}
			c.run(60)
			w := c.world()
			for i := range w.Nodes {
				w.Nodes[i].Version = int64(i + 1)
			}
			if test.prepares != nil {
				test.prepares(&w)
			}
			var memory rollout.Memory
			before := memory.Decide(w)
			g.Expect(memory.Decide(w)).To(Equal(before))
			test.changes(&w)
			g.Expect(memory.Decide(w)).NotTo(Equal(before), "that matters")
			g.Expect(memory.Decide(w)).To(Equal(rollout.Decide(w)))
		})
	}
}

// TestAReportThatIsNotTrueIsCorrected on a node of which nothing else is to be done.
func TestAReportThatIsNotTrueIsCorrected(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("n0", sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", timeSlicing(4))}
	c.run(60)
	h.GPU.Status.Rollout.State = string(node.Draining)
	w := c.world()
	w.Nodes[0].Version = 1
	var memory rollout.Memory
	for range 2 {
		g.Expect(memory.Decide(w).Actions).To(ConsistOf(HaveField("Why", "reporting Ready")))
	}
}

// TestAReleaseThatIsNotRecordedIsNotReportedAsObserved: users who set releasePolicy: Retain wait for
// observedGeneration, then delete the policy.
func TestAReleaseThatIsNotRecordedIsNotReportedAsObserved(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := withManager(c, sim.A100)
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", byManager(count("3g", 1), count("1g", 3)))}
	for range 100 {
		if h.GPU.Spec.MIGConfigName != "" {
			break
		}
		c.pass()
		c.tick(time.Second)
	}
	g.Expect(h.GPU.Spec.MIGConfigName).NotTo(BeEmpty())
	c.Plugin.Reason, c.Plugin.Message = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy; install the GPU Operator"
	c.Policies[0].Spec.ReleasePolicy, c.Policies[0].Generation = v1alpha1.ReleasePolicyRetain, 2
	for range 50 {
		c.pass()
		c.tick(time.Minute)
	}
	g.Expect(h.GPU.Spec.Release).NotTo(HaveField("ReleasePolicy", v1alpha1.ReleasePolicyRetain))
	g.Expect(rollout.Decide(c.world()).Policies["research"].ObservedGeneration).NotTo(BeEquivalentTo(2))
}
