// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// remembering is a memory, and the nodes as it last saw them, so that it can be told when one has changed.
type remembering struct {
	rollout.Memory

	nodes map[string]cluster.Node
	specs map[string]v1alpha1.GPUSharingPolicySpec // by name and generation

	seldom, decisions int // if seldom is not 0, it decides without memory too only once in so many decisions
}

// mostlyRemembering is for histories, of which thousands are played.
func mostlyRemembering() remembering { return remembering{seldom: 32} }

// decide decides with the memory and without: whatever has happened, the decision is the same.
func (r *remembering) decide(s cluster.Snapshot) rollout.Decision {
	r.reads(&s)
	if r.decisions++; r.seldom > 0 && r.decisions%r.seldom > 0 {
		return r.Decide(s)
	}
	fresh, remembered := rollout.Decide(s), r.Decide(s)
	if !reflect.DeepEqual(fresh, remembered) {
		panic(fmt.Sprintf("with memory it is decided\n%+v\nand without\n%+v", remembered, fresh))
	}
	return fresh
}

// reads gives the nodes their versions.
func (r *remembering) reads(s *cluster.Snapshot) {
	if r.nodes == nil {
		r.nodes, r.specs = map[string]cluster.Node{}, map[string]v1alpha1.GPUSharingPolicySpec{}
	}
	for i := range s.Policies {
		p := &s.Policies[i]
		named := p.Name + strconv.FormatInt(p.Generation, 10)
		if spec, seen := r.specs[named]; seen && !reflect.DeepEqual(spec, p.Spec) {
			r.Memory = rollout.Memory{} // the test has changed it as the API server would not
		}
		r.specs[named] = p.Spec
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		last := r.nodes[n.Name]
		n.Version = last.Version
		if !reflect.DeepEqual(*n, last) {
			n.Version++
			r.nodes[n.Name] = *n
		}
	}
}

// TestMemoryHoldsUntilTheVersionChanges: a node is taken for what it was as long as its version says so, and no longer.
func TestMemoryHoldsUntilTheVersionChanges(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.add("n0", sim.A100)
	c.setPolicy("research", timeSlicing(4))
	c.run(60)
	var memory rollout.Memory
	s := c.world()
	s.Nodes[0].Version = 1
	g.Expect(memory.Decide(s).Nodes[0].State).To(Equal(node.UpToDate))
	s = c.world()
	s.Nodes[0].Version, s.Nodes[0].AgentReady = 1, false
	g.Expect(memory.Decide(s).Nodes[0].State).To(Equal(node.UpToDate), "nothing was looked at")
	s.Nodes[0].Version = 2
	g.Expect(memory.Decide(s).Nodes[0].State).To(Equal(node.Unknown))
	s.Nodes[0].Version = 0
	s.Nodes[0].AgentReady = true
	g.Expect(memory.Decide(s).Nodes[0].State).To(Equal(node.UpToDate), "without a version nothing is remembered")
}

// TestMemoryHoldsUntilAFutureTimeIsReached: a node is looked at without times in the future, and again once they are there, though nothing of
// it has changed.
func TestMemoryHoldsUntilAFutureTimeIsReached(t *testing.T) {
	c := fleet(1, timeSlicing(4))
	c.hosts["n0"].skew = 10 * time.Minute
	c.run(60)
	var states []node.State
	for range 15 {
		states = append(states, c.memory.decide(c.world()).Nodes[0].State)
		c.Now = c.Now.Add(time.Minute)
	}
	NewWithT(t).Expect(states).To(ContainElements(node.UpToDate, node.Verifying), "the plugin becomes Ready when it says so")
}

// TestMemoryNoticesEveryChangeOfTheDevicePlugin: whatever of it changes and changes back, the decision is that of a
// controller that remembers nothing.
func TestMemoryNoticesEveryChangeOfTheDevicePlugin(t *testing.T) {
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
	under := func(sharing v1alpha1.Sharing, reconciles int) *site {
		c := newSite()
		withManager(c, sim.A100)
		c.setPolicy("research", sharing)
		c.run(reconciles)
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
				g, s := NewWithT(t), c.world()
				s.Nodes[0].Version = 1
				before := s.Plugin
				var memory rollout.Memory
				memory.Decide(s)
				for _, value := range values[field] {
					reflect.ValueOf(&s.Plugin).Elem().Field(i).Set(reflect.ValueOf(value))
					g.Expect(memory.Decide(s)).To(Equal(rollout.Decide(s)), "%s, %v", name, value)
				}
				s.Plugin = before
				g.Expect(memory.Decide(s)).To(Equal(rollout.Decide(s)), "%s, as before", name)
			}
		})
	}
}

// TestPoliciesForOtherGPUsCostNothing: which policies select a node is found out once for each version of the node.
func TestPoliciesForOtherGPUsCostNothing(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.add("n0", sim.A100)
	c.setPolicy("research", timeSlicing(4))
	c.run(60)
	s := c.world()
	base := s.Nodes[0]
	s.Nodes = nil
	for i := range 100 {
		n := base
		n.Name, n.Version = fmt.Sprintf("n%03d", i), int64(i+1)
		s.Nodes = append(s.Nodes, n)
	}
	allocations := func() float64 {
		var memory rollout.Memory
		memory.Decide(s)
		return testing.AllocsPerRun(5, func() { memory.Decide(s) })
	}
	alone := allocations()
	for i := range 20 {
		s.Policies = append(s.Policies, policyOf(fmt.Sprintf("p%02d", i), timeSlicing(2), func(p *v1alpha1.GPUSharingPolicy) {
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"Tesla-T4"}}
		}))
	}
	g.Expect(allocations()).To(BeNumerically("<", alone+20*100), "less than one for each policy and node")
}

// TestANodeThatIsStillCostsNothing: an unchanged reconcile over more nodes allocates no more often, whether a policy
// governs them or not.
func TestANodeThatIsStillCostsNothing(t *testing.T) {
	for name, governed := range map[string]bool{"governed": true, "governed by nobody": false} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			c.add("n0", sim.A100)
			if governed {
				c.setPolicy("research", timeSlicing(4))
			}
			c.run(60)
			base := c.world().Nodes[0]
			allocations := func(nodes int) float64 {
				s := c.world()
				s.Nodes = nil
				for i := range nodes {
					n := base
					n.Name, n.Version = fmt.Sprintf("n%03d", i), int64(i+1)
					s.Nodes = append(s.Nodes, n)
				}
				var memory rollout.Memory
				g.Expect(memory.Decide(s).Actions).To(BeEmpty())
				return testing.AllocsPerRun(5, func() { memory.Decide(s) })
			}
			g.Expect(allocations(400)).To(BeNumerically("<", allocations(100)+30), "which is what lists grow by")
		})
	}
}

// TestANodeIsStillOnlyAsLongAsNothingThatConcernsItChanges: what is not part of the node, and so not of its version.
func TestANodeIsStillOnlyAsLongAsNothingThatConcernsItChanges(t *testing.T) {
	troubled := func(s *cluster.Snapshot) { // the status says whether the key is there
		s.Nodes[0].Pods[0].Troubles, s.Nodes[0].Pods[0].Scheduled = []cluster.Trouble{{Container: "config-manager", Why: "does not start"}}, time.Time{}
	}
	for name, test := range map[string]struct{ prepares, changes func(s *cluster.Snapshot) }{
		"the key that it selects": {prepares: troubled, changes: func(s *cluster.Snapshot) { s.Configs = nil }},
		"the key that it selects, in the same map": {prepares: troubled, changes: func(s *cluster.Snapshot) {
			delete(s.Configs, s.Nodes[0].Labels[v1alpha1.LabelConfig])
		}},
		"its policy": {changes: func(s *cluster.Snapshot) {
			s.Policies[0].Generation++
			s.Policies[0].Spec.Sharing = timeSlicing(8)
		}},
		"the policy that governs it": {changes: func(s *cluster.Snapshot) {
			s.Policies = append(s.Policies, policyOf("urgent", timeSlicing(2), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Priority = 1 }))
		}},
		"that a policy governs it": {changes: func(s *cluster.Snapshot) { s.Policies = nil }},
		"that another controller was seen there": {changes: func(s *cluster.Snapshot) {
			before := *s
			before.Nodes, before.OtherControllers = slices.Clone(s.Nodes), &cluster.OtherControllers{}
			before.Nodes[0].DRA = "DaemonSet nvidia-dra/kubelet-plugin"
			rollout.Decide(before)
			s.OtherControllers = before.OtherControllers
		}},
		"the time, where the agent's label may be set again later": {
			prepares: func(s *cluster.Snapshot) {
				delete(s.Nodes[0].Labels, v1alpha1.LabelRunsAgent)
				s.Nodes[0].Annotations[v1alpha1.AnnotationRunsAgent] = fmt.Sprintf("true@%d", s.Now.Unix())
			},
			changes: func(s *cluster.Snapshot) { s.Now = s.Now.Add(time.Hour) },
		},
		"what NVIDIA's device plugin on another node tolerates": {
			prepares: func(s *cluster.Snapshot) {
				s.Plugin.ClusterPolicy = false
				tainting(shared)(&s.Policies[0])
				for i := range s.Nodes {
					s.Nodes[i].Taints = []corev1.Taint{shared}
					s.Nodes[i].Annotations[v1alpha1.AnnotationTaints] = shared.Key + ":" + string(shared.Effect)
					for p := range s.Nodes[i].Pods {
						s.Nodes[i].Pods[p].NodeSelector, s.Nodes[i].Pods[p].Tolerations = nil, []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
					}
				}
			},
			changes: func(s *cluster.Snapshot) {
				s.Nodes[1].Version++
				s.Nodes[1].Pods = slices.Clone(s.Nodes[1].Pods)
				for p := range s.Nodes[1].Pods {
					s.Nodes[1].Pods[p].Tolerations = nil
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			c.add("n0", sim.A100)
			c.add("n1", sim.A100)
			c.setPolicy("research", timeSlicing(4))
			c.run(60)
			s := c.world()
			for i := range s.Nodes {
				s.Nodes[i].Version = int64(i + 1)
			}
			if test.prepares != nil {
				test.prepares(&s)
			}
			var memory rollout.Memory
			before := memory.Decide(s)
			g.Expect(memory.Decide(s)).To(Equal(before))
			test.changes(&s)
			g.Expect(memory.Decide(s)).NotTo(Equal(before), "that matters")
			g.Expect(memory.Decide(s)).To(Equal(rollout.Decide(s)))
		})
	}
}

// TestAReportThatIsNotTrueIsCorrected on a node of which nothing else is to be done.
func TestAReportThatIsNotTrueIsCorrected(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.add("n0", sim.A100)
	c.setPolicy("research", timeSlicing(4))
	c.run(60)
	h.GPU.Status.Rollout.State = string(node.Draining)
	s := c.world()
	s.Nodes[0].Version = 1
	var memory rollout.Memory
	for range 2 {
		g.Expect(memory.Decide(s).Actions).To(ConsistOf(HaveField("Why", "reporting Ready")))
	}
}

// TestAReleaseThatIsNotRecordedIsNotReportedAsObserved: users who set releasePolicy: Retain wait for
// observedGeneration, then delete the policy.
func TestAReleaseThatIsNotRecordedIsNotReportedAsObserved(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := withManager(c, sim.A100)
	c.setPolicy("research", byManager(count("3g", 1), count("1g", 3)))
	for range 100 {
		if h.GPU.Spec.MIGConfigName != "" {
			break
		}
		c.reconcile()
		c.tick(time.Second)
	}
	g.Expect(h.GPU.Spec.MIGConfigName).NotTo(BeEmpty())
	c.Plugin.Reason, c.Plugin.Message = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy; install the GPU Operator"
	c.Policies[0].Spec.ReleasePolicy, c.Policies[0].Generation = v1alpha1.ReleasePolicyRetain, 2
	for range 50 {
		c.reconcile()
		c.tick(time.Minute)
	}
	g.Expect(h.GPU.Spec.Release).NotTo(HaveField("ReleasePolicy", v1alpha1.ReleasePolicyRetain))
	g.Expect(rollout.Decide(c.world()).Policies["research"].ObservedGeneration).NotTo(BeEquivalentTo(2))
}

// schemas are those of our kinds, as the CRDs have them.
var schemas = sync.OnceValue(func() map[string]*apiextensionsv1.JSONSchemaProps {
	all := map[string]*apiextensionsv1.JSONSchemaProps{}
	for _, kind := range []string{"gpunodes", "gpusharingpolicies"} {
		text, err := os.ReadFile("../../../config/crd/gpusharing.io_" + kind + ".yaml")
		if err != nil {
			panic(err)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &crd); err != nil {
			panic(err)
		}
		all[crd.Spec.Names.Kind] = crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	}
	return all
})

// bounds are what a schema bounds.
type bounds struct {
	length, items, entries *int64
	fields                 map[string]*bounds
	each                   *bounds // of a list, or of the entries that have no name
}

func boundsOf(schema *apiextensionsv1.JSONSchemaProps) *bounds {
	b := &bounds{length: schema.MaxLength, items: schema.MaxItems, entries: schema.MaxProperties, fields: map[string]*bounds{}}
	for name, of := range schema.Properties {
		b.fields[name] = boundsOf(&of)
	}
	if schema.Items != nil {
		b.each = boundsOf(schema.Items.Schema)
	} else if a := schema.AdditionalProperties; a != nil && a.Schema != nil {
		b.each = boundsOf(a.Schema)
	}
	return b
}

// limits are what the schemas bound.
var limits = sync.OnceValue(func() map[string]*bounds {
	all := map[string]*bounds{}
	for kind, schema := range schemas() {
		all[kind] = boundsOf(schema)
	}
	return all
})

// refusal is why the API server refuses an object of ours: what its schema bounds; empty if it takes it.
func refusal(object any) string {
	schema := limits()["GPUNode"]
	if _, is := object.(v1alpha1.GPUSharingPolicy); is {
		schema = limits()["GPUSharingPolicy"]
	}
	return exceeds("", schema, reflect.ValueOf(object))
}

// exceeds is which bound a value exceeds, and where.
func exceeds(path string, schema *bounds, value reflect.Value) string {
	over := func(is int, most *int64, of string) string {
		if most == nil || int64(is) <= *most {
			return ""
		}
		return fmt.Sprintf("%s has %d %s, and %d are allowed", path, is, of, *most)
	}
	if schema == nil || value.IsZero() {
		return ""
	}
	switch value.Kind() { //nolint:exhaustive // nothing else has bounds
	case reflect.Pointer:
		return exceeds(path, schema, value.Elem())
	case reflect.String:
		return over(utf8.RuneCountInString(value.String()), schema.length, "characters")
	case reflect.Slice:
		why := over(value.Len(), schema.items, "items")
		for i := 0; i < value.Len() && why == ""; i++ {
			why = exceeds(path+"[]", schema.each, value.Index(i))
		}
		return why
	case reflect.Map:
		why := over(value.Len(), schema.entries, "entries")
		keys := value.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return cmp.Compare(a.String(), b.String()) })
		for i := 0; i < len(keys) && why == ""; i++ {
			why = exceeds(path+"."+keys[i].String(), cmp.Or(schema.fields[keys[i].String()], schema.each), value.MapIndex(keys[i]))
		}
		return why
	case reflect.Struct:
		return fieldExceeds(path, schema, value)
	}
	return ""
}

func fieldExceeds(path string, schema *bounds, value reflect.Value) string {
	if other, is := reflect.TypeAssert[json.Marshaler](value); is && schema.length != nil {
		return exceeds(path, schema, reflect.ValueOf(written(other)))
	} else if is {
		return "" // a time
	}
	for i := range value.NumField() {
		name, _, _ := strings.Cut(value.Type().Field(i).Tag.Get("json"), ",")
		of := schema
		if name != "" {
			of = schema.fields[name]
		}
		if why := exceeds(path+"."+name, of, value.Field(i)); why != "" {
			return why
		}
	}
	return ""
}

// written is what is written of a value that is no struct there; empty: a number.
func written(of json.Marshaler) (text string) {
	raw, err := of.MarshalJSON()
	if err != nil {
		panic(err)
	}
	_ = json.Unmarshal(raw, &text)
	return text
}
