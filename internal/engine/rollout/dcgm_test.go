// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const exporterLabel = "nvidia.com/gpu.deploy.dcgm-exporter"

// monitorLabels start DCGM and its exporter, of a ClusterPolicy and of a GPUCluster.
func monitorLabels() []string {
	return []string{dcgmLabel, exporterLabel, dcgmLabel + "-dra", exporterLabel + "-dra"}
}

func monitors(label string) bool { return slices.Contains(monitorLabels(), label) }

// monitored is a host on which the GPU Operator runs DCGM and its exporter. They keep handles of the instances that
// were there when they started, and notice no others.
func (h *host) monitored() *host {
	h.Labels[dcgmLabel], h.Labels[exporterLabel] = "true", "true"
	return h
}

// leaked reports whether a step fails because DCGM keeps a handle of an instance that nobody uses.
func (h *host) leaked(step plan.Step) bool {
	return strings.Contains(step.String(), "destroy") && slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool {
		return len(h.dcgm[p.UID]) > 0
	})
}

// TestDCGMSeesTheInstancesThatAreThere: whatever changes, DCGM is away while instances are destroyed, and what runs
// afterwards has seen those that are there. What only adds instances stops nothing.
func TestDCGMSeesTheInstancesThatAreThere(t *testing.T) {
	g := NewWithT(t)
	w := newSite()
	h := w.add("a", sim.A100).monitored()
	current := func(sharing v1alpha1.Sharing) map[node.State]bool {
		states := map[node.State]bool{}
		w.setPolicy("research", sharing, func(p *v1alpha1.GPUSharingPolicy) { p.Generation = w.generation() })
		d, seen := w.run(90)
		isUpToDate(g, one(d))
		for _, s := range seen["a"] {
			states[s] = true
		}
		for _, label := range []string{dcgmLabel, exporterLabel} {
			g.Expect(h.dcgm[h.of(label).UID]).To(ConsistOf(h.instances()), label)
		}
		return states
	}
	current(mig(count("1g", 3)))
	before := h.of(pluginLabel).UID
	added := current(mig(count("1g", 4)))
	g.Expect(added).NotTo(HaveKey(node.StoppingOperands), "an addition stops nothing")
	g.Expect(h.of(pluginLabel).UID).To(Equal(before), "and the plugin looks again by itself")
	g.Expect(current(mig(count("1g", 2)))).To(HaveKey(node.StoppingOperands))
	current(mig(count("3g", 2)))
	h.destroy(0)
	w.run(30)
	g.Expect(h.dcgm[h.of(dcgmLabel).UID]).To(ConsistOf(h.instances()))
	w.Policies = nil
	w.run(90)
	h.leftNothing(g)
	isForgotten(g, h)
}

// TestTheDevicePluginGoesOnWhileInstancesAreMadeForPodsThatWait: it holds none, unlike DCGM. Where the node is to offer as many of each as before, it
// stops: nothing would tell when it has looked again.
func TestTheDevicePluginGoesOnWhileInstancesAreMadeForPodsThatWait(t *testing.T) {
	g, c := NewWithT(t), largeOf(t, []sim.Model{sim.A100, sim.A100}, "n0")
	h := c.hosts["n0"].monitored()
	follow := func(indexes ...int) (plugin string) {
		h.GPU.Status.Demand = nil
		for _, index := range indexes {
			whole := []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}
			h.GPU.Status.Demand = append(h.GPU.Status.Demand, v1alpha1.GPUDemand{UUID: h.devices()[index].UUID, Instances: whole, SinceTime: metav1.NewTime(c.Now)})
		}
		c.version["n0"]++
		for range 320 {
			c.acts()
			c.passes(time.Second)
		}
		g.Expect(h.Taints).To(BeEmpty(), h.waits())
		for _, index := range indexes {
			g.Expect(h.devices()[index].State.Instances).To(ConsistOf(HaveField("Profile", "7g.40gb")))
		}
		g.Expect(h.dcgm[h.of(exporterLabel).UID]).To(ConsistOf(h.instances()))
		return h.of(pluginLabel).UID
	}
	before := h.of(pluginLabel).UID
	g.Expect(follow(0)).To(Equal(before))
	swapped := follow(1)
	g.Expect(swapped).NotTo(Equal(before), "another GPU is what this one was, and the other way round")
	h.Labels[cluster.LabelNodePool] = "pool"
	g.Expect(follow(0, 1)).NotTo(Equal(swapped), "a node that Karpenter has not initialized yet is not tainted")
	g.Expect(c.broken).To(BeEmpty())
}

// TestDCGMIsAwayWhereTheGPUOperatorRunsNoDevicePlugin: NVIDIA's DRA driver is installed beside a GPU Operator whose
// ClusterPolicy has devicePlugin.enabled false, or beside one that runs the device plugin on other nodes. DCGM and its
// exporter run by the same deploy labels, and keep handles of instances.
func TestDCGMIsAwayWhereTheGPUOperatorRunsNoDevicePlugin(t *testing.T) {
	for name, plugin := range map[string]cluster.DevicePlugin{
		"devicePlugin.enabled false":    {Reason: v1alpha1.ReasonNoDevicePlugin},
		"device plugin on other nodes":  {Ready: true, ClusterPolicy: true, NodeFeatures: true},
		"a GPU Operator of its own CRD": {Reason: v1alpha1.ReasonDRAStackActive},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := evictingOnDRA()
			c.Plugin = plugin
			h.monitored().Labels[v1alpha1.LabelMIGManager] = "true"
			d, _ := c.run(120)
			isUpToDate(g, one(d))
			g.Expect(h.dcgm[h.of(dcgmLabel).UID]).To(ConsistOf(h.instances()))
			g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "false"), "only one may drive MIG")
			c.reshare(mig(count("3g", 2)))
			d, states := c.run(240)
			isUpToDate(g, one(d))
			g.Expect(states["a"]).To(ContainElement(node.StoppingOperands))
			for _, label := range []string{dcgmLabel, exporterLabel} {
				g.Expect(h.dcgm[h.of(label).UID]).To(ConsistOf(h.instances()), label)
			}
			c.Policies = nil
			c.run(240)
			g.Expect(h.devices()[0].State.MIG).To(BeFalse())
			g.Expect(h.Labels).To(And(HaveKeyWithValue(dcgmLabel, "true"), HaveKeyWithValue(v1alpha1.LabelMIGManager, "true")))
			g.Expect(h.Annotations).To(BeEmpty())
		})
	}
}

// TestDCGMSeesTheInstancesOfANodeOfTheDRADriver: what only adds instances stops nothing, and restarts DCGM once with
// the driver.
func TestDCGMSeesTheInstancesOfANodeOfTheDRADriver(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 3)), evicting)
	h.monitored()
	c.run(120)
	clear(c.writes)
	c.reshare(mig(count("1g", 4)))
	d, states := c.run(120)
	isUpToDate(g, one(d))
	g.Expect(states["a"]).NotTo(ContainElement(node.StoppingOperands))
	for _, label := range []string{dcgmLabel, exporterLabel} {
		g.Expect(h.dcgm[h.of(label).UID]).To(ConsistOf(h.instances()), label)
	}
	g.Expect(c.writes["action.DeletePod"]).To(Equal(3), "the driver, DCGM and its exporter")
	clear(c.writes)
	c.reshare(mig(count("2g", 3)))
	c.run(240)
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1), "the driver: DCGM was away during the change")
	g.Expect(h.dcgm[h.of(dcgmLabel).UID]).To(ConsistOf(h.instances()))
}

func (c *site) generation() int64 {
	if len(c.Policies) == 0 {
		return 1
	}
	return c.Policies[0].Generation + 1
}

// TestDCGMIsLeftAloneOnANodeThatIsTakenOver: nothing about the instances changes.
func TestDCGMIsLeftAloneOnANodeThatIsTakenOver(t *testing.T) {
	g := NewWithT(t)
	w, h := toMIG()
	w.run(60)
	w.Policies = nil
	h.GPU.Spec, h.Annotations = v1alpha1.GPUNodeSpec{}, map[string]string{}
	h.monitored()
	w.steps(2)
	dcgm := h.of(dcgmLabel).UID
	w.setPolicy("theirs", mig(count("2g", 3)))
	w.run(60)
	g.Expect(h.of(dcgmLabel).UID).To(Equal(dcgm))
}

// TestValidatorsGoBeforeInstancesAreDestroyed: a test workload of the GPU Operator's validator is no user. It is
// deleted, also where the policy evicts nobody.
func TestValidatorsGoBeforeInstancesAreDestroyed(t *testing.T) {
	g := NewWithT(t)
	w, h := toMIG(neverEvicting)
	w.run(60)
	w.hold(h, "nvidia-device-plugin-validator", 0, h.devices()[0].State.Instances[0].ID)
	h.Pods[len(h.Pods)-1].Validator = true
	w.Policies[0].Spec.Sharing, w.Policies[0].Generation = mig(count("3g", 2)), 2
	w.tick(time.Minute)
	w.settles(g, 60)
	g.Expect(w.evicted).To(BeEmpty())
	g.Expect(w.writes).To(HaveKey("action.DeletePod"))
}

// TestReadyOutlastsThePluginsFirstMoment: NVIDIA's device plugin advertises its default config at each start, and then
// starts once more with the node's. The node is not Ready, and takes no pods, before that has passed.
func TestReadyOutlastsThePluginsFirstMoment(t *testing.T) {
	for name, sharing := range map[string]v1alpha1.Sharing{
		"the default is another":  mig(count("2g", 3)),
		"the default is the same": {Strategy: v1alpha1.StrategyExclusive},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w := newSite()
			h := w.add("a", sim.A100)
			h.flips = true
			h.plugin.running = false
			w.Plugin.Configs = map[string]string{"default": ""}
			w.setPolicy("research", sharing)
			check := func() {
				for _, n := range w.reconcile().Nodes {
					if n.State == node.UpToDate || n.State == node.Finishing {
						g.Expect(h.plugin.selected).To(Equal(h.Labels[v1alpha1.LabelConfig]), n.State)
					}
				}
			}
			for range 60 {
				check()
				w.tick(time.Second)
			}
			w.settles(g, 5)
			w.deletePod(h, h.of(pluginLabel).UID)
			w.settle(h)
			check()
			g.Expect(w.Policies[0].Status.Nodes.Ready).To(BeZero())
			w.steps(10)
			g.Expect(w.Policies[0].Status.Nodes.Ready).To(Equal(int32(1)))
		})
	}
}

// TestNoLabelOfMIGManagersLies: while the agent partitions a node, mig-manager's labels say that. The release restores
// them.
func TestNoLabelOfMIGManagersLies(t *testing.T) {
	g := NewWithT(t)
	w, h := toMIG()
	h.Labels[v1alpha1.LabelMIGManager] = "true"
	h.Labels[v1alpha1.LabelMIGConfig], h.Labels[v1alpha1.LabelMIGConfigState] = "all-disabled", "success"
	operator := func() { // fills in what is absent or empty
		if h.Labels[v1alpha1.LabelMIGConfig] == "" {
			h.Labels[v1alpha1.LabelMIGConfig] = "all-disabled"
		}
	}
	saw := false
	for range 60 {
		d := w.reconcile()
		runs := slices.ContainsFunc(h.Pods, playedBy(v1alpha1.LabelMIGManager))
		if runs && h.Labels[v1alpha1.LabelMIGConfig] == "gpu-sharing-operator" {
			h.Labels[v1alpha1.LabelMIGConfigState], saw = "failed", true // the value is no configuration, and its pod has not ended yet
		}
		w.tick(time.Second)
		operator()
		if len(h.devices()[0].State.Instances) > 0 {
			g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGConfig, "gpu-sharing-operator"))
		}
		if one(d).State == node.UpToDate {
			g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelMIGConfigState))
		}
	}
	g.Expect(saw).To(BeTrue())
	patches := w.writes["action.PatchNode"]
	w.steps(20)
	g.Expect(w.writes["action.PatchNode"]).To(Equal(patches), "nobody is fought")
	w.Policies = nil
	w.run(90)
	g.Expect(h.Labels).To(And(HaveKeyWithValue(v1alpha1.LabelMIGConfig, "all-disabled"),
		HaveKeyWithValue(v1alpha1.LabelMIGConfigState, "success"), HaveKeyWithValue(v1alpha1.LabelMIGManager, "true")))
	g.Expect(h.devices()).NotTo(ContainElement(HaveField("State.MIG", true)))
}
