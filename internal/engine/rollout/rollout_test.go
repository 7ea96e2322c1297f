// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"regexp"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// policyOf is a policy with the defaults of the API.
// setPolicy makes a policy the only one.
func (c *site) setPolicy(name string, s v1alpha1.Sharing, with ...func(*v1alpha1.GPUSharingPolicy)) {
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf(name, s, with...)}
}

func policyOf(name string, s v1alpha1.Sharing, with ...func(*v1alpha1.GPUSharingPolicy)) v1alpha1.GPUSharingPolicy {
	p := v1alpha1.GPUSharingPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1},
		Spec: v1alpha1.GPUSharingPolicySpec{
			Sharing: s, ReleasePolicy: v1alpha1.ReleasePolicyRestore,
			Rollout: v1alpha1.Rollout{
				MaxUnavailable: new(intstr.FromInt32(1)), FailureThreshold: 1,
				Drain: v1alpha1.Drain{Mode: v1alpha1.DrainModeWaitForIdle, TimeoutSeconds: 600},
			},
		},
	}
	for _, change := range with {
		change(&p)
	}
	return p
}

func timeSlicing(replicas int32) v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: replicas}}
}

func mps(replicas int32) v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: replicas}}
}

func mig(instances ...v1alpha1.MIGInstances) v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{Instances: instances}},
	}}
}

func count(profile v1alpha1.MIGProfile, n int32) v1alpha1.MIGInstances {
	return v1alpha1.MIGInstances{Profile: profile, Count: n}
}

func TestEachStrategyIsReached(t *testing.T) {
	for name, c := range map[string]struct {
		sharing     v1alpha1.Sharing
		allocatable map[string]int64
		states      []node.State
	}{
		"time-slicing": {
			sharing: timeSlicing(4), allocatable: gpusOnly(8),
			states: []node.State{
				node.PendingNonDisruptive, node.Selecting, node.UpToDate,
			},
		},
		"MPS": {
			sharing: mps(10), allocatable: gpusOnly(20),
			states: []node.State{
				node.PendingDisruptive, node.Idle, node.Selecting, node.Finishing, node.UpToDate,
			},
		},
		"MIG": {
			sharing:     mig(count("3g.20gb", 1), count("1g", 3)),
			allocatable: map[string]int64{"nvidia.com/mig-3g.20gb": 2, "nvidia.com/mig-1g.5gb": 6},
			states: []node.State{
				node.PendingDisruptive, node.StoppingOperands, node.Idle, node.Selecting,
				node.Finishing, node.UpToDate,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := newSite()
			node := cl.add("a", sim.A100, sim.A100)
			cl.setPolicy("research", c.sharing)
			d, states := cl.run(60)
			g.Expect(d.Nodes).To(HaveLen(1))
			g.Expect(d.Nodes[0].Message).To(BeEmpty())
			g.Expect(states["a"]).To(Equal(c.states))
			isOffered(g, node, c.allocatable)
			g.Expect(node.Taints).To(BeEmpty())
			g.Expect(cl.crashes).To(BeEmpty())
			g.Expect(node.Labels[pluginLabel]).To(Equal("true"))
			g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(1)))
			g.Expect(rollout.Decide(cl.world()).Actions).To(BeEmpty())
		})
	}
}

func isForgotten(g Gomega, h *host) {
	g.ExpectWithOffset(1, h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
}

// hasMessage expects that the message of the first node contains a text.
func hasMessage(g Gomega, d rollout.Decision, text string) {
	g.ExpectWithOffset(1, d.Nodes[0].Message).To(ContainSubstring(text))
}

// hasReason expects the reason of the first node.
func hasReason(g Gomega, d rollout.Decision, reason string) {
	g.ExpectWithOffset(1, d.Nodes[0].Reason).To(Equal(reason), d.Nodes[0].Message)
}

// hasState expects the state of the first node.
func hasState(g Gomega, d rollout.Decision, state node.State) {
	g.ExpectWithOffset(1, d.Nodes[0].State).To(Equal(state), d.Nodes[0].Message)
}

// settles reconciles until nothing is left to do, and expects that the first node is as its policy asks.
func (c *site) settles(g Gomega, reconciles int) {
	d, _ := c.run(reconciles)
	g.ExpectWithOffset(1, d.Nodes[0].State).To(Equal(node.UpToDate), d.Nodes[0].Message)
}

func isFailed(g Gomega, d rollout.Decision) {
	g.ExpectWithOffset(1, d.Nodes[0].State).To(Equal(node.Failed), d.Nodes[0].Message)
}

// gpusOnly is what a node advertises that has no other resource.
func gpusOnly(n int64) map[string]int64 { return map[string]int64{"nvidia.com/gpu": n} }

func advertised(h *host) map[string]int64 {
	found := map[string]int64{}
	for name, n := range h.Allocatable {
		if n != 0 {
			found[name] = n
		}
	}
	return found
}

// isOffered expects what a node advertises.
func isOffered(g Gomega, h *host, resources map[string]int64) {
	g.ExpectWithOffset(1, advertised(h)).To(Equal(resources))
}

func TestUndoRestoresWhatWasFound(t *testing.T) {
	for name, sharing := range map[string]v1alpha1.Sharing{
		"time-slicing": timeSlicing(4), "MPS": mps(10), "MIG": mig(count("3g.20gb", 1), count("1g", 3)),
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := newSite()
			cl.Configs = map[string]string{"by-hand": "version: v1\n"}
			cl.Plugin.Configs = cl.Configs
			node := cl.add("a", sim.A100, sim.A100)
			node.Labels[v1alpha1.LabelConfig] = "by-hand"
			node.Labels[v1alpha1.LabelMIGManager] = "true"
			cl.tick(0)
			labels, annotations := maps.Clone(node.Labels), maps.Clone(node.Annotations)
			devices := node.GPU.Status.Devices

			cl.setPolicy("research", sharing)
			d, _ := cl.run(60)
			g.Expect(d.Nodes[0].Message).To(BeEmpty())
			g.Expect(node.GPU.Spec.Baseline.Labels).To(Equal(map[string]string{
				v1alpha1.LabelConfig: "by-hand", v1alpha1.LabelMIGManager: "true",
			}))
			g.Expect(d.ConfigurePlugin).To(BeTrue())

			cl.Policies = nil
			d, _ = cl.run(60)
			g.Expect(d.Nodes).To(BeEmpty())
			g.Expect(d.ConfigurePlugin).To(BeFalse())
			g.Expect(node.Labels).To(Equal(labels))
			g.Expect(node.Annotations).To(Equal(annotations))
			g.Expect(node.Taints).To(BeEmpty())
			g.Expect(node.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
			g.Expect(node.GPU.Status.Devices).To(Equal(devices))
			isOffered(g, node, gpusOnly(2))
			g.Expect(cl.crashes).To(BeEmpty())
		})
	}
}

// TestAPoolThatScalesToZeroRestartsNoPlugin: each change of the ClusterPolicy restarts NVIDIA's programs on all nodes,
// also on those of other pools. So it names the operator's ConfigMap as long as a policy exists.
func TestAPoolThatScalesToZeroRestartsNoPlugin(t *testing.T) {
	g := NewWithT(t)
	cl := newSite()
	cl.add("other", sim.T4)
	cl.add("a", sim.A100).Labels["pool"] = "shared"
	cl.setPolicy("research", timeSlicing(4), func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "shared"}}
	})
	d, _ := cl.run(60)
	g.Expect(d.ConfigurePlugin).To(BeTrue())

	delete(cl.hosts, "a")
	d, _ = cl.run(60)
	g.Expect(d.ConfigurePlugin).To(BeTrue(), "the pool has no node, but the next one is shared too")

	cl.Policies[0].Spec.Rollout.Paused, cl.Policies[0].Generation = true, 2
	d, _ = cl.run(60)
	g.Expect(d.ConfigurePlugin).To(BeFalse(), "a policy that is paused asks for nothing")

	cl.Policies[0].Spec.Rollout.Paused, cl.Policies[0].Generation = false, 3
	cl.Plugin.Ready = false
	d, _ = cl.run(60)
	g.Expect(d.ConfigurePlugin).To(BeFalse(), "nothing is restarted for a pool without nodes")
	cl.Plugin.Ready, cl.Policies = true, nil
	d, _ = cl.run(60)
	g.Expect(d.ConfigurePlugin).To(BeFalse())
}

func TestRetainLeavesTheNodeAsItIs(t *testing.T) {
	g := NewWithT(t)
	cl := newSite()
	node := cl.add("a", sim.A100)
	cl.setPolicy("research", mig(count("1g", 7)), retaining)
	cl.run(60)
	labels := maps.Clone(node.Labels)
	cl.Policies = nil
	d, _ := cl.run(60)
	g.Expect(node.Labels).To(Equal(labels))
	isOffered(g, node, map[string]int64{"nvidia.com/mig-1g.5gb": 7})
	g.Expect(node.GPU.Spec.PolicyName).To(BeEmpty())
	g.Expect(node.GPU.Spec.Baseline).NotTo(BeNil())
	g.Expect(d.ConfigurePlugin).To(BeTrue(), "the label still names a key of ours")
	g.Expect(cl.Configs).To(HaveKey(labels[v1alpha1.LabelConfig]))
}

// TestPairsOfStrategies goes from each sharing to each other, with and without a user who has to leave first.
func TestPairsOfStrategies(t *testing.T) {
	sharings := map[string]v1alpha1.Sharing{
		"exclusive": {Strategy: v1alpha1.StrategyExclusive}, "time-slicing": timeSlicing(4), "time-slicing 2": timeSlicing(2),
		"MPS": mps(10), "MPS 4": mps(4), "MIG": mig(count("3g.20gb", 1), count("1g", 3)), "MIG 7": mig(count("1g", 7)),
	}
	for from, first := range sharings {
		for to, second := range sharings {
			t.Run(from+" to "+to, func(t *testing.T) {
				g := NewWithT(t)
				cl := newSite()
				for _, name := range []string{"a", "b", "c"} {
					cl.add(name, sim.A100, sim.A100)
				}
				cl.setPolicy("research", first)
				d, _ := cl.run(200)
				g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(3)), "%v", d.Nodes)
				writes := cl.writes["action.WriteConfigs"]

				cl.Policies[0].Spec.Sharing, cl.Policies[0].Generation = second, 2
				d, _ = cl.run(200)
				g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(3)), "%v", d.Nodes)
				g.Expect(d.Actions).To(BeEmpty())
				g.Expect(cl.crashes).To(BeEmpty())
				g.Expect(cl.writes["action.WriteConfigs"] - writes).To(BeNumerically("<=", 1))
				for _, h := range cl.hosts {
					g.Expect(h.Taints).To(BeEmpty())
					g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
					g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
				}
			})
		}
	}
}

// matching is a text in which … stands for a hash, with or without a time.
func matching(text string) types.GomegaMatcher {
	return MatchRegexp("^" + strings.ReplaceAll(regexp.QuoteMeta(text), "…", `[0-9a-f@]+`) + "$")
}
