// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// gpuCluster is the GPU Operator v26.7.0 on a host where a GPUCluster has it run NVIDIA's DRA driver. It counts the
// labels that it removes, and the reasons of the node that it sees.
type gpuCluster struct{ swept, reasons map[string]int }

// newGPUCluster has labelled a host once.
func newGPUCluster(h *host) gpuCluster {
	g := gpuCluster{swept: map[string]int{}, reasons: map[string]int{}}
	h.Labels["nvidia.com/gpu.present"] = "true"
	g.label(h.Labels)
	clear(g.swept)
	return g
}

func (g gpuCluster) label(labels map[string]string) {
	for _, name := range nvidia.LabelForGPUCluster(labels) {
		g.swept[name]++
	}
}

// onGPUCluster is a cluster of one node where the GPU Operator runs NVIDIA's DRA driver for a GPUCluster. Its class for
// whole GPUs serves no extended resource.
func onGPUCluster(s v1alpha1.Sharing) (*site, *host, gpuCluster) {
	c, h := onDRA(s, evicting)
	c.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonDRAStackActive, Message: "a GPUCluster exists"}
	c.setClass(dra.Class{Name: "gpu.nvidia.com"})
	labeller := newGPUCluster(h)
	c.settle(h)
	return c, h, labeller
}

// until reconciles for a while beside the GPU Operator, which labels the nodes again and again.
func (g gpuCluster) until(c *site, h *host, reconciles int) (last node.State) {
	for range reconciles {
		if d := c.reconcile(); len(d.Nodes) > 0 {
			last = one(d).State
			g.reasons[one(d).Reason]++
		}
		g.label(h.Labels)
		c.tick(time.Second)
	}
	return last
}

// TestAGPUClusterIsNotFought: the operator sets no label that the GPU Operator removes there, DCGM is away while
// instances are destroyed and has seen those that are there, and undo leaves what was.
func TestAGPUClusterIsNotFought(t *testing.T) {
	g := NewWithT(t)
	c, h, labeller := onGPUCluster(mig(count("1g", 7)))
	before, published := maps.Clone(h.Labels), h.Published
	for _, layout := range []v1alpha1.Sharing{mig(count("1g", 7)), mig(count("3g", 2))} {
		c.reshare(layout)
		g.Expect(labeller.until(c, h, 120)).To(Equal(node.UpToDate), one(c.reconcile()).Message)
		for _, label := range monitorLabels()[2:] {
			g.Expect(h.dcgm[h.of(label).UID]).To(ConsistOf(h.instances()), label)
		}
	}
	g.Expect(c.classes()).To(HaveKeyWithValue("gpusharing-mig-3g.20gb", "nvidia.com/mig-3g.20gb"))
	g.Expect(c.classes()).NotTo(HaveKey("gpusharing-gpu"), "there is no whole GPU")
	c.Policies = nil
	labeller.until(c, h, 120)
	g.Expect(labeller.swept).To(BeEmpty(), "the operator wrote none of them")
	g.Expect(h.Labels).To(Equal(before))
	g.Expect(h.Published.Devices).To(Equal(published.Devices))
	g.Expect(c.classes()).To(Equal(map[string]string{"gpu.nvidia.com": ""}))
}

// TestWholeGPUsOfAGPUCluster: no class of the GPU Operator serves nvidia.com/gpu, so the operator's does, while a
// policy or pod names it.
func TestWholeGPUsOfAGPUCluster(t *testing.T) {
	g := NewWithT(t)
	c, h, labeller := onGPUCluster(timeSlicing(4))
	h.driver.shares, h.Published = 4, nil
	h.driver.uid = "" // it is restarted with the shares that its administrator sets
	g.Expect(labeller.until(c, h, 60)).To(Equal(node.UpToDate), one(c.reconcile()).Message)
	g.Expect(c.classes()).To(Equal(map[string]string{"gpu.nvidia.com": "", "gpusharing-gpu": "nvidia.com/gpu"}))
	g.Expect(c.allocate(h, "train", "nvidia.com/gpu")).To(Equal("gpu-0"))
	c.Policies = nil
	labeller.until(c, h, 60)
	g.Expect(c.classes()).To(HaveKey("gpusharing-gpu"), "a pod names it")
	c.end(h, "train")
	labeller.until(c, h, 60)
	g.Expect(c.classes()).To(Equal(map[string]string{"gpu.nvidia.com": ""}))
}

// TestTheAgentOfAGPUCluster runs by another label there, which says where to look.
func TestTheAgentOfAGPUCluster(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := c.addDRA("a", sim.A100)
	c.setPolicy("research", mig(count("1g", 7)))
	newGPUCluster(h)
	h.Labels[cluster.LabelDRADriver], h.AgentReady = "false", false
	c.Now = c.Now.Add(time.Hour)
	d := one(c.reconcile())
	g.Expect(d.Reason).To(Equal(v1alpha1.ReasonAgentNotReporting))
	g.Expect(d.Message).To(ContainSubstring("its label nvidia.com/gpu.deploy.dra-driver is %q", "false"))
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelRunsAgent))
}

// TestADriverUpgradeOnAGPUCluster: the agent leaves before the module is unloaded, and the instances are there again
// afterwards.
func TestADriverUpgradeOnAGPUCluster(t *testing.T) {
	for name, u := range map[string]upgrade{"in full": {builds: 5 * time.Minute}, "of the pod only": {restart: true}} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h, labeller := onGPUCluster(onFirst(mig(count("2g", 3))))
			g.Expect(labeller.until(c, h, 120)).To(Equal(node.UpToDate))
			before := maps.Clone(h.Labels)
			h.begins(u)
			labeller.until(c, h, 1500)
			g.Expect(h.upgrade.stuck).To(BeEmpty())
			g.Expect(h.upgrade.goesOn()).To(BeFalse())
			g.Expect(labeller.until(c, h, 60)).To(Equal(node.UpToDate), one(c.reconcile()).Message)
			g.Expect(labeller.reasons).To(And(HaveKey(v1alpha1.ReasonDriverUpgrade), Not(HaveKey(v1alpha1.ReasonAgentNotReporting))))
			g.Expect(h.instances()).To(HaveLen(3))
			delete(h.Labels, upgradeLabel)
			for name, value := range h.Labels {
				if value == "" {
					delete(h.Labels, name)
				}
			}
			g.Expect(h.Labels).To(Equal(before))
			g.Expect(h.DevicesTaintedAt).To(BeZero())
		})
	}
}

// onFirst leaves the GPUs but the first whole.
func onFirst(s v1alpha1.Sharing) v1alpha1.Sharing {
	s.MIG.Layouts[0].GPUs = &v1alpha1.GPUMatch{Indexes: []int32{0}}
	return s
}

// TestAnUpgradeThatWaitsForAWholeGPUIsNamed: NVIDIA's validator claims one, so where there is none the upgrade waits
// for ever.
func TestAnUpgradeThatWaitsForAWholeGPUIsNamed(t *testing.T) {
	g := NewWithT(t)
	c, h, labeller := onGPUCluster(mig(count("2g", 3)))
	g.Expect(labeller.until(c, h, 120)).To(Equal(node.UpToDate))
	h.begins(upgrade{builds: 5 * time.Minute})
	labeller.until(c, h, 1500)
	g.Expect(h.upgrade.state).To(Equal("validation-required"), "as NVIDIA's does")
	g.Expect(one(c.reconcile())).To(And(HaveField("Reason", v1alpha1.ReasonDriverUpgrade), HaveField("State", node.UpToDate), HaveField("Message",
		ContainSubstring("kubectl label node a --overwrite nvidia.com/gpu-driver-upgrade-state=uncordon-required"))))
	h.upgradeTo("uncordon-required")
	labeller.until(c, h, 10)
	g.Expect(one(c.reconcile()).Reason).To(Equal(v1alpha1.ReasonReady))
}

// TestAnUpgradeDuringAChangeOnAGPUCluster: beside a GPU that stays whole, an upgrade that begins at any moment of a
// change ends.
func TestAnUpgradeDuringAChangeOnAGPUCluster(t *testing.T) {
	for reconciles := 0; reconciles < 24; reconciles += 3 {
		t.Run(fmt.Sprint(reconciles), func(t *testing.T) {
			g := NewWithT(t)
			c, h, labeller := onGPUCluster(onFirst(mig(count("2g", 3))))
			labeller.until(c, h, reconciles)
			h.begins(upgrade{builds: 5 * time.Minute})
			labeller.until(c, h, 1500)
			g.Expect(h.upgrade.stuck).To(BeEmpty())
			g.Expect(h.upgrade.state).To(Equal("upgrade-done"))
			g.Expect(one(c.reconcile()).State).To(Equal(node.UpToDate))
		})
	}
}

// becomesClusterPolicy lets a ClusterPolicy take the place of the GPUCluster. The GPU Operator runs mig-manager then
// and, as its chart has it, asks it for all-disabled, while it keeps the DRA driver for the claims that are left
// (controllers/nodelabeling_controller.go, updateGPUStateLabels).
func (c *site) becomesClusterPolicy(h *host) {
	c.Plugin = newSite().Plugin
	for _, name := range []string{"device-plugin", "gpu-feature-discovery", "dcgm", "dcgm-exporter", "client", "mig-manager", "container-toolkit"} {
		h.Labels["nvidia.com/gpu.deploy."+name] = "true"
	}
	for _, name := range []string{"dra-validator", "dcgm-dra", "dcgm-exporter-dra"} {
		delete(h.Labels, "nvidia.com/gpu.deploy."+name)
	}
	h.Labels[v1alpha1.LabelMIGConfig] = "all-disabled"
}

// TestMIGManagerIsKeptOffWhenAClusterPolicyComes, or it would disable MIG on GPUs that the operator partitioned.
func TestMIGManagerIsKeptOffWhenAClusterPolicyComes(t *testing.T) {
	g := NewWithT(t)
	c, h, labeller := onGPUCluster(mig(count("1g", 7)))
	c.OtherControllers = &cluster.OtherControllers{}
	g.Expect(labeller.until(c, h, 120)).To(Equal(node.UpToDate))
	g.Expect(c.allocate(h, "train", "nvidia.com/mig-1g.5gb")).NotTo(BeEmpty())
	c.becomesClusterPolicy(h)
	d := c.during(time.Minute, time.Second)
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"), one(d).Message)
	g.Expect(h.copied().GPU.Spec.Baseline.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "true"))
}

// TestTheClassForWholeGPUsGoesWithTheLastNodeOfTheDriver: pods of the device plugin request nvidia.com/gpu too.
func TestTheClassForWholeGPUsGoesWithTheLastNodeOfTheDriver(t *testing.T) {
	g := NewWithT(t)
	c, h, labeller := onGPUCluster(timeSlicing(4))
	h.driver.shares, h.Published, h.driver.uid = 4, nil, ""
	g.Expect(labeller.until(c, h, 60)).To(Equal(node.UpToDate), one(c.reconcile()).Message)
	g.Expect(c.classes()).To(HaveKey("gpusharing-gpu"))
	c.becomesClusterPolicy(h)
	c.switchOver(h, false)
	delete(h.Labels, cluster.LabelDRADriver)
	c.Policies = nil
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "user", Name: "by-plugin", UID: "by-plugin", Controller: "ReplicaSet", GPU: true, Requests: gpusOnly(1), Scheduled: c.Now,
	})
	c.during(20*time.Minute, time.Second)
	g.Expect(c.classes()).NotTo(HaveKey("gpusharing-gpu"))
}

// TestALivePolicyMovesToAGPUCluster from a ClusterPolicy, and is deleted there: nothing of the former stack is left.
func TestALivePolicyMovesToAGPUCluster(t *testing.T) {
	for name, s := range map[string]v1alpha1.Sharing{"MIG": mig(count("1g", 7)), "time-slicing": timeSlicing(4), "MPS": mps(4)} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			c.OtherControllers = &cluster.OtherControllers{}
			h := c.add("a", sim.A100)
			h.Labels[v1alpha1.LabelMIGManager] = "true"
			c.setPolicy("research", s, evicting)
			c.during(4*time.Minute, time.Second)
			g.Expect(one(c.reconcile()).State).To(Equal(node.UpToDate))

			c.setClass(dra.Class{Name: "gpu.nvidia.com"})
			c.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonDRAStackActive, Message: "a GPUCluster exists"}
			c.switchOver(h, true)
			labeller := newGPUCluster(h)
			h.driver.shares = 4
			h.features.gfd = "" // its DaemonSet owns its NodeFeature, and goes with the ClusterPolicy
			labeller.until(c, h, 1200)
			c.Policies = nil
			labeller.until(c, h, 1200)
			g.Expect(labeller.swept).To(BeEmpty())
			for key := range h.Annotations {
				g.Expect(strings.HasPrefix(key, "gpusharing.io/") && key != v1alpha1.AnnotationRunsAgent).To(BeFalse(), key)
			}
			g.Expect(h.GPU.Spec.Baseline).To(BeNil())
		})
	}
}

// TestAFailedUpgradeNamesPodsThatExist: the driver of a GPUCluster is one of an NVIDIADriver.
func TestAFailedUpgradeNamesPodsThatExist(t *testing.T) {
	g := NewWithT(t)
	c, h, labeller := onGPUCluster(mig(count("2g", 3)))
	labeller.until(c, h, 20)
	h.Labels[upgradeLabel] = "upgrade-failed"
	c.reshare(mig(count("1g", 7)))
	labeller.until(c, h, 20)
	g.Expect(one(c.reconcile()).Message).To(And(ContainSubstring("upgrade of NVIDIA's driver failed"), ContainSubstring("app.kubernetes.io/component=nvidia-driver"),
		Not(ContainSubstring("app=nvidia-driver-daemonset"))))
}

// TestAGPUClusterInPlaceOfAClusterPolicy: the operator's ConfigMap was that of the ClusterPolicy, which is gone, and a
// label of the node still names a key of it. A user who moves the node back would have a plugin that ends for that again
// and again.
func TestAGPUClusterInPlaceOfAClusterPolicy(t *testing.T) {
	for name, policies := range map[string]bool{"under its policy": true, "whose policy is gone": false} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h, labeller := onGPUCluster(mig(count("1g", 7)))
			if !policies {
				c.Policies = nil
			}
			h.Labels[v1alpha1.LabelConfig] = deviceplugin.Default("none").Key
			h.GPU.Spec.Baseline = &v1alpha1.Baseline{}
			labeller.until(c, h, 120)
			g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
		})
	}
}
