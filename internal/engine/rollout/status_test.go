// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestStatuses compares what people read with testdata/*.golden.
func TestStatuses(t *testing.T) {
	for name, situation := range map[string]func() *site{
		"ready": func() *site {
			c, _ := slicing()
			c.add("b", sim.T4)
			c.run(60)
			return c
		},
		"paused shows the plan": func() *site {
			c, h := toMIG(paused)
			c.hold(h, "train", 1, gpu.WholeGPU)
			return c
		},
		"draining": func() *site {
			c, h := toMIG(evicting)
			c.hold(h, "train", 1, gpu.WholeGPU)
			c.add("b", sim.A100)
			c.reconcile()
			return c
		},
		"unsupported on one node": func() *site {
			c := newSite()
			c.add("a", sim.A100)
			c.add("t", sim.T4)
			c.setPolicy("research", mig(count("1g", 7)))
			c.run(60)
			return c
		},
		"oversubscribed instances": func() *site {
			c, _ := toMIG(func(p *v1alpha1.GPUSharingPolicy) {
				p.Spec.Sharing.MIG.Layouts[0].Instances[0].Replicas = 4
			})
			c.run(60)
			return c
		},
		"rolled back and halted": func() *site {
			c := newSite()
			for _, node := range []string{"a", "b"} {
				c.add(node, sim.A100)
			}
			c.setPolicy("research", timeSlicing(4))
			c.run(60)
			c.hosts["a"].breaks(c.hosts["a"].GPU.Spec.ConfigName)
			c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
			c.run(400)
			return c
		},
		"no node matches": func() *site {
			c, _ := toMIG(func(p *v1alpha1.GPUSharingPolicy) {
				p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "none"}}
			})
			return c
		},
		"no device plugin": func() *site {
			c, _ := toMIG()
			c.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonNoDevicePlugin, Message: "there is no ClusterPolicy; install the GPU Operator"}
			return c
		},
		"two policies for one node": func() *site {
			c, _ := toMIG()
			c.add("b", sim.A100).Labels["pool"] = "b"
			c.Policies = append(c.Policies, policyOf("better", timeSlicing(2), func(p *v1alpha1.GPUSharingPolicy) {
				p.Spec.Priority = 1
				p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "b"}}
			}))
			c.run(60)
			return c
		},
		"agent not reporting": func() *site { c, h := toMIG(); h.AgentReady = false; return c },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := situation()
			d := rollout.Decide(c.world())
			text, err := yaml.Marshal(d.Policies)
			g.Expect(err).NotTo(HaveOccurred())
			golden(g, name, string(text))
			for policy, s := range d.Policies {
				sane(g, s, generationOf(c, policy))
			}
			for i := range c.Policies {
				c.Policies[i].Status = d.Policies[c.Policies[i].Name]
			}
			c.Now = c.Now.Add(time.Second)
			g.Expect(rollout.Decide(c.world()).Policies).To(Equal(d.Policies), "a second later nothing is new")
		})
	}
}

func golden(g Gomega, name, text string) {
	file := filepath.Join("testdata", strings.ReplaceAll(name, " ", "-")+".golden")
	if *update {
		g.Expect(os.WriteFile(file, []byte(text), 0o644)).To(Succeed())
	}
	want, err := os.ReadFile(file)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(text).To(Equal(string(want)), "go test -update writes the golden files anew")
}

func generationOf(c *site, policy string) int64 {
	for _, p := range c.Policies {
		if p.Name == policy {
			return p.Generation
		}
	}
	return 0
}

// sane is what holds for every status.
func sane(g Gomega, s v1alpha1.GPUSharingPolicyStatus, generation int64) {
	found := map[string]metav1.Condition{}
	for _, c := range s.Conditions {
		found[c.Type] = c
		g.Expect(c.ObservedGeneration).To(Equal(generation))
		g.Expect(c.Reason).NotTo(BeEmpty())
		g.Expect(c.Message).NotTo(BeEmpty())
	}
	g.Expect(found).To(And(HaveKey(v1alpha1.ConditionAccepted), HaveKey(v1alpha1.ConditionReady)))
	g.Expect(s.ObservedGeneration).To(Equal(generation))
	var is []string
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled} {
		if found[kind].Status == metav1.ConditionTrue {
			is = append(is, kind)
		}
	}
	g.Expect(is).To(HaveLen(1), "it is Ready, Reconciling or Stalled")
	n := s.Nodes
	g.Expect(n.Ready + n.Changing + n.Waiting + n.Failed + n.Conflicted).To(Equal(n.Matched))
	for _, p := range s.Pending {
		g.Expect(p.Reason).NotTo(BeEmpty())
		g.Expect(p.Message).NotTo(BeEmpty())
	}
}

func TestNodesOfAClusterWithoutDevicePluginAreReleased(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.steps(2) // drained and stopped
	g.Expect(h.Taints).NotTo(BeEmpty())
	c.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonDRAStackActive, Message: "a GPUCluster exists"}
	d, _ := c.run(20)
	g.Expect(d.Actions).To(BeEmpty())
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
}

func TestTheNextPolicyTakesOver(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.Policies = append(c.Policies, policyOf("second", timeSlicing(2), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Priority = -1 }))
	d, _ := c.run(60)
	g.Expect(one(d).Policy).To(Equal("research"))
	c.Policies = c.Policies[1:]
	d, _ = c.run(60)
	g.Expect(one(d).Policy).To(Equal("second"))
	isUpToDate(g, one(d))
	isOffered(g, h, gpusOnly(4))
	g.Expect(h.GPU.Spec.PolicyName).To(Equal("second"))
	g.Expect(h.GPU.Spec.Baseline.Devices[0].Sharing.MIGMode).To(Equal(v1alpha1.MIGModeDisabled))
}

func TestWithoutAClusterPolicyNothingIsStoppedAndNoMIGManagerDisabled(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.Plugin.ClusterPolicy = false
	h.Labels[v1alpha1.LabelMIGManager] = "true"
	for range 5 {
		d := c.reconcile()
		c.Now = c.Now.Add(time.Second)
		for _, a := range d.Actions {
			if patch, is := a.(action.PatchNode); is {
				g.Expect(patch.Labels).To(BeEmpty())
			}
		}
	}
	g.Expect(h.GPU.Spec.Devices).NotTo(BeEmpty())
}

// TestWhatAutoscalingReportsIsNotTheRollouts: another controller writes it, with a field manager of its own.
func TestWhatAutoscalingReportsIsNotTheRollouts(t *testing.T) {
	g := NewWithT(t)
	c := joining()
	p := &c.Policies[0]
	p.Status.Conditions = append(p.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionAutoscalingConfigured, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonConfigured})
	p.Status.NodeGroups = []v1alpha1.NodeGroupStatus{{Kind: v1alpha1.NodeGroupNodePool, Name: "gpu", Reason: v1alpha1.ReasonConfigured}}
	for _, status := range []v1alpha1.GPUSharingPolicyStatus{
		rollout.Decide(c.world()).Policies[p.Name], rollout.Undecided(c.Policies, "no", c.Now)[p.Name],
	} {
		_, found := condition.Find(status.Conditions, v1alpha1.ConditionAutoscalingConfigured)
		g.Expect(found).To(BeFalse())
		g.Expect(status.NodeGroups).To(BeEmpty())
		_, found = condition.Find(status.Conditions, v1alpha1.ConditionReady)
		g.Expect(found).To(BeTrue())
	}
}

// GPU Feature Discovery changes its labels later, by itself.
func TestANodeIsReadyByWhatItAdvertises(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, timeSlicing(4))
	c.hosts["n0"].Labels["nvidia.com/gpu.replicas"] = "1"
	c.run(60)
	d := c.reconcile()
	isUpToDate(g, one(d))
	g.Expect(c.hosts["n0"].Labels).To(HaveKeyWithValue("nvidia.com/gpu.replicas", "1"))
}
