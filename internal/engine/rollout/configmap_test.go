// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// onPool selects nodes by their label pool.
func onPool(name string) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": name}}
	}
}

// TestADeletedConfigMapGetsBackWhatOnlyANodeNames: nothing renders the config of a node that was left as it is, nor
// that of a last good state.
func TestADeletedConfigMapGetsBackWhatOnlyANodeNames(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	a, b := c.add("a", sim.A100), c.add("b", sim.T4)
	a.Labels["pool"], b.Labels["pool"] = "a", "b"
	c.Policies = []v1alpha1.GPUSharingPolicy{
		policyOf("other", timeSlicing(2), onPool("b")), policyOf("research", timeSlicing(4), onPool("a"), retaining),
	}
	c.run(200)
	g.Expect(c.ready()).To(Equal(2))
	c.Policies = c.Policies[:1]
	c.run(60)
	good := b.Labels[v1alpha1.LabelConfig]
	b.breaks(good)
	c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = timeSlicing(8) })
	c.run(400)
	g.Expect(c.Configs).To(And(HaveKey(a.Labels[v1alpha1.LabelConfig]), HaveKey(good)))
	c.Configs = nil // kubectl delete configmap
	c.run(20)
	g.Expect(c.Configs).To(And(HaveKey(a.Labels[v1alpha1.LabelConfig]), HaveKey(good)))
	a.plugin.running, b.plugin.running = false, false
	c.run(20)
	g.Expect(c.crashes).To(BeEmpty())
}

// TestTheFirstPolicyWaitsForClientsOfNVIDIAsMPSDaemons, which would end with a changed ClusterPolicy on every node.
func TestTheFirstPolicyWaitsForClientsOfNVIDIAsMPSDaemons(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	byHand, other := c.add("by-hand", sim.T4), c.add("other", sim.T4)
	other.Labels["pool"] = "other"
	c.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy"}
	c.Plugin.Ready = false
	byHand.Pods = append(byHand.Pods, cluster.Pod{
		Namespace: "gpu-operator", Name: "mps", UID: "mps", Controller: "DaemonSet", NVIDIA: true,
		NodeSelector: map[string]string{mpsLabel: "true"},
	})
	c.hold(byHand, "client", 0, gpu.WholeGPU)
	c.setPolicy("research", timeSlicing(4), onPool("other"))
	d := c.reconcile()
	g.Expect(d.PluginConfigHeld).To(ContainSubstring("pod user/client"))
	hasReason(g, d, v1alpha1.ReasonMPSClientsRunning)
	ready, _ := condition.Find(d.Policies["research"].Conditions, v1alpha1.ConditionReady)
	g.Expect(ready.Reason).To(Equal(v1alpha1.ReasonMPSClientsRunning))
	g.Expect(ready.Message).To(ContainSubstring("restarts NVIDIA's MPS daemons, which ends their clients: pod user/client"))

	c.end(byHand, "client")
	d = c.reconcile()
	g.Expect(d.PluginConfigHeld).To(BeEmpty())
	hasReason(g, d, v1alpha1.ReasonConfiguringDevicePlugin)
}

// TestAChangeThatHasBegunWaitsForClientsOfNVIDIAsMPSDaemonsWithinItsTime: others set devicePlugin.config in the middle
// of it, and to set it again ends clients on another node.
func TestAChangeThatHasBegunWaitsForClientsOfNVIDIAsMPSDaemonsWithinItsTime(t *testing.T) {
	for name, begun := range map[string]func(*host) bool{
		"tainted": (*host).isTainted,
		"stopped": func(h *host) bool { return h.Labels[pluginLabel] == cluster.StoppedValue },
		"asked":   func(h *host) bool { return len(h.GPU.Spec.Devices) > 0 },
		"applied": func(h *host) bool { return len(h.devices()[0].State.Instances) > 0 },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(onPool("a"))
			h.Labels["pool"] = "a"
			byHand := c.add("by-hand", sim.T4)
			c.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy"}
			for range 300 {
				if begun(h) {
					break
				}
				c.steps(1)
			}
			c.Plugin.Ready = false
			c.hold(byHand, "client", 0, gpu.WholeGPU)
			shared := func() {
				byHand.Pods = append(byHand.Pods, cluster.Pod{UID: "mps", Controller: "DaemonSet", NVIDIA: true, NodeSelector: map[string]string{mpsLabel: "true"}})
			}
			g.Expect(c.keeps(h, 6, shared).longest).To(BeNumerically("<=", 31*time.Minute))
			g.Expect(h.isKept()).To(BeFalse())
			shared()
			ready, _ := condition.Find(c.reconcile().Policies["research"].Conditions, v1alpha1.ConditionReady)
			g.Expect(ready.Reason).To(Equal(v1alpha1.ReasonMPSClientsRunning))
			g.Expect(ready.Message).To(ContainSubstring("user/client"))
		})
	}
}

// TestTheDefaultConfigKeepsTheStrategyForNodesThatNoPolicyChanges, and for no others.
func TestTheDefaultConfigKeepsTheStrategyForNodesThatNoPolicyChanges(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*site, *host)
		keeps  bool
	}{
		"no policy governs it":    {change: func(*site, *host) {}, keeps: true},
		"it is without MIG":       {change: func(c *site, h *host) { h.hardware.Update(func(n *sim.Node) { n.GPUs[0].MIG = false }); c.tick(0) }},
		"it has a config already": {change: func(_ *site, h *host) { h.Labels[v1alpha1.LabelConfig] = "by-hand" }},
		"a policy governs it": {change: func(c *site, _ *host) {
			c.setPolicy("research", mig(count("1g", 7)))
		}},
		"its policy is paused": {keeps: true, change: func(c *site, _ *host) {
			c.setPolicy("research", mig(count("1g", 7)), paused)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := newSite()
			h := cl.add("a", sim.A100)
			h.hardware.Update(func(n *sim.Node) { n.GPUs[0].MIG, n.GPUs[0].PendingMIG = true, true })
			h.report()
			c.change(cl, h)
			g.Expect(rollout.Decide(cl.world()).KeepStrategy).To(Equal(c.keeps))
		})
	}
}

// TestAPluginThatTheCacheDoesNotShowYetIsWaitedFor: its pod runs, or just starts and advertises nothing yet, and need
// not see the config that the Node is to select. A plugin that is not on the node is not waited for any longer than
// that.
func TestAPluginThatTheCacheDoesNotShowYetIsWaitedFor(t *testing.T) {
	for name, of := range map[string]struct{ standAlone, starts bool }{
		"GPU Operator": {}, "GPU Operator, the plugin starts": {starts: true},
		"stand-alone plugin": {standAlone: true}, "stand-alone plugin, which starts": {standAlone: true, starts: true},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(1, timeSlicing(4))
			h := c.hosts["n0"]
			if of.standAlone {
				c.Plugin.ClusterPolicy = false
				h.Labels, h.Pods = map[string]string{v1alpha1.LabelRunsAgent: "true"}, []cluster.Pod{pluginAlone("plugin", c.Now)}
			}
			c.steps(1)
			late := func() rollout.Decision {
				s := c.world()
				s.Nodes[0].Pods = nil
				if of.starts {
					s.Nodes[0].Allocatable = gpusOnly(0)
				}
				return rollout.Decide(s)
			}
			selects := func(d rollout.Decision) bool {
				return slices.ContainsFunc(d.Actions, func(a action.Action) bool {
					patch, is := a.(action.PatchNode)
					return is && patch.Labels[v1alpha1.LabelConfig] != nil
				})
			}
			d := late()
			g.Expect(selects(d)).To(BeFalse(), "%v", d.Actions)
			hasState(g, d, node.Selecting)
			g.Expect(d.After).To(And(BeNumerically(">", 0), BeNumerically("<=", 30*time.Second)))
			c.tick(d.After)
			g.Expect(selects(late())).To(BeTrue())
		})
	}
}

// TestPodsElsewhereAreNoNewsOfANode: a client of NVIDIA's MPS daemon that begins or ends on one node is reported once,
// on the policy, and not on each of the nodes that wait for it.
func TestPodsElsewhereAreNoNewsOfANode(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	byHand := c.add("by-hand", sim.T4)
	for i := range 10 {
		c.add(fmt.Sprint("n", i), sim.T4).Labels["pool"] = "other"
	}
	c.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy"}
	c.Plugin.Ready = false
	byHand.Pods = append(byHand.Pods, cluster.Pod{
		Namespace: "gpu-operator", Name: "mps", UID: "mps", Controller: "DaemonSet", NVIDIA: true,
		NodeSelector: map[string]string{mpsLabel: "true"},
	})
	c.setPolicy("research", timeSlicing(4), onPool("other"))
	for i := range 30 {
		name := fmt.Sprint("client-", i)
		c.hold(byHand, name, 0, gpu.WholeGPU)
		d := c.reconcile()
		hasReason(g, d, v1alpha1.ReasonMPSClientsRunning)
		ready, _ := condition.Find(d.Policies["research"].Conditions, v1alpha1.ConditionReady)
		g.Expect(ready.Message).To(ContainSubstring("pod user/" + name))
		c.end(byHand, name)
		c.Now = c.Now.Add(time.Second)
	}
	g.Expect(c.writes["action.Report"]).To(BeNumerically("<=", 2*11))
}

// byHandUnder is a node with mig-manager that an administrator has partitioned by nvidia-smi, in another way than its
// label says.
func byHandUnder(g Gomega, c *site, label string, instances ...v1alpha1.MIGInstances) *host {
	h := withManager(c, sim.A100)
	h.Labels[v1alpha1.LabelMIGConfig] = label
	for range 20 {
		c.tick(time.Second)
	}
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGConfigState, "success"))
	h.repartition(instances...)
	c.tick(time.Second)
	return h
}

// repartition gives the first GPU these instances, as an administrator does by nvidia-smi.
func (h *host) repartition(instances ...v1alpha1.MIGInstances) {
	want := v1alpha1.DeviceSpec{UUID: h.devices()[0].UUID, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}}
	for _, i := range instances {
		want.Sharing.MIGMode = v1alpha1.MIGModeEnabled
		want.Sharing.Instances = append(want.Sharing.Instances, v1alpha1.InstanceCount{Profile: string(i.Profile), Count: i.Count})
	}
	for {
		steps, err := plan.Node([]v1alpha1.DeviceSpec{want}, h.devices())
		if err == nil && len(steps) == 0 {
			return
		}
		if err == nil {
			err = steps[0].Do(context.Background(), plan.Tools{Hardware: h.hardware, MPS: h})
		}
		if err != nil {
			panic(err)
		}
	}
}

// TestAReleaseEndsWhereTheFormerLabelRequestsAnotherLayout: mig-manager comes back when the agent has restored the
// layout in which the node was found, and applies its former label at once.
func TestAReleaseEndsWhereTheFormerLabelRequestsAnotherLayout(t *testing.T) {
	for _, found := range []struct {
		label  string
		layout []v1alpha1.MIGInstances
	}{
		{label: "all-1g.5gb", layout: []v1alpha1.MIGInstances{count("3g.20gb", 2)}},
		{label: "all-1g.5gb"},
		{label: "all-disabled", layout: []v1alpha1.MIGInstances{count("3g.20gb", 1), count("2g.10gb", 1)}},
	} {
		for _, every := range []time.Duration{time.Second, 12 * time.Second, 25 * time.Second} {
			t.Run(fmt.Sprintf("%s/%d/%s", found.label, len(found.layout), every), func(t *testing.T) {
				g := NewWithT(t)
				c := newSite()
				h := byHandUnder(g, c, found.label, found.layout...)
				c.setPolicy("research", mig(count("2g", 3)), evicting)
				d := c.during(10*time.Minute, every)
				isUpToDate(g, one(d))
				h.applied = nil
				c.Policies = nil
				clear(c.writes)
				d = c.during(2*time.Hour, every)
				g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
				isForgotten(g, h)
				g.Expect(h.applied).To(Equal([]string{found.label}), "what it makes of the GPUs is the administrator's")
				g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
				for kind, n := range c.writes {
					g.Expect(n).To(BeNumerically("<=", 4), kind)
				}
			})
		}
	}
}

// TestMIGManagerKeepsThePodThatComesBack: where mig-manager partitions another node, its ClusterPolicy is restored with
// the last of them.
func TestMIGManagerKeepsThePodThatComesBack(t *testing.T) {
	for later := 0; later <= 16; later += 4 { // the change of the ClusterPolicy falls into each moment of what mig-manager does on the other
		t.Run(fmt.Sprint(later), func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := byHandUnder(g, c, "all-1g.5gb", count("3g.20gb", 2))
			other := c.add("b", sim.A100)
			other.acts, other.Labels["pool"] = true, "other"
			other.Labels[v1alpha1.LabelMIGManager], other.Labels[v1alpha1.LabelMIGConfig] = "true", "all-disabled"
			in := func(pool string) func(*v1alpha1.GPUSharingPolicy) {
				return func(p *v1alpha1.GPUSharingPolicy) {
					p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": pool}}
				}
			}
			h.Labels["pool"], h.starts = "research", 5*time.Second
			c.Policies = []v1alpha1.GPUSharingPolicy{
				policyOf("research", mig(count("2g", 3)), evicting, in("research")), policyOf("other", byManager(count("2g", 3)), evicting, in("other")),
			}
			d := c.during(10*time.Minute, time.Second)
			g.Expect(d.ConfigureMIGManager).To(BeTrue())
			h.applied = nil
			c.Policies = c.Policies[:1]
			c.during(time.Duration(later)*time.Second, time.Second)
			c.Policies = nil
			d = c.during(10*time.Minute, time.Second)
			g.Expect(d.ConfigureMIGManager).To(BeFalse())
			g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
			g.Expect(h.mistakes).To(BeEmpty())
			g.Expect(h.applied).To(Equal([]string{"all-1g.5gb"}))
		})
	}
}

// TestAReleasedNodeThatComesBackFromABackup, in which its agent is asked for what the policy asked, goes back to its baseline before it is forgotten, though
// mig-manager has its label.
func TestAReleasedNodeThatComesBackFromABackup(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := withManager(c, sim.H100)
	c.setPolicy("research", mig(count("1g", 7)), evicting)
	c.during(10*time.Minute, time.Second)
	saved := h.GPU.DeepCopy()
	g.Expect(saved.Spec.Devices).NotTo(BeEmpty())
	c.Policies = nil
	for h.Annotations[v1alpha1.AnnotationMIGConfig] == "" {
		c.during(time.Second, time.Second)
	}
	saved.DeepCopyInto(&h.GPU)
	var spec *v1alpha1.GPUNodeSpec
	for n := 0; n < 100 && spec == nil; n++ {
		for _, a := range rollout.Decide(c.world()).Actions {
			if set, is := a.(action.SetSpec); is && spec == nil {
				spec = &set.Spec
			}
			c.do(a)
		}
		c.tick(time.Second)
	}
	g.Expect(spec).NotTo(BeNil())
	g.Expect(spec.Devices).To(Equal(saved.Spec.Baseline.Devices))
}
