// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAGPUThatThePluginReportsUnhealthyStaysOut: a plugin that starts anew would offer it again.
func TestAGPUThatThePluginReportsUnhealthyStaysOut(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(200)
	h := c.hosts["n0"]
	h.Allocatable["nvidia.com/mig-3g.20gb"] = 0
	h.Unallocatable = map[string]int64{"nvidia.com/mig-3g.20gb": 2}
	d := c.during(2*time.Hour, time.Minute)
	g.Expect(c.writes).NotTo(HaveKey("action.DeletePod"))
	hasState(g, d, node.Degraded)
	hasMessage(g, d, "has stopped, or reports devices as unhealthy (2 of nvidia.com/mig-3g.20gb)")
}

// TestThePluginIsRestartedOnceForTheInstancesOfABoot: a second time would not help, but another boot is another matter.
func TestThePluginIsRestartedOnceForTheInstancesOfABoot(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(200)
	h := c.hosts["n0"]
	silent := func() {
		for range 120 {
			h.Allocatable["nvidia.com/mig-3g.20gb"] = 0
			c.reconcile()
			c.tick(time.Minute)
		}
	}
	silent()
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1))
	h.hardware.Update(func(n *sim.Node) { n.Boot++ })
	silent()
	g.Expect(c.writes["action.DeletePod"]).To(Equal(2))
	c.Policies = nil
	c.run(200)
	g.Expect(h.Annotations).To(BeEmpty())
}

// TestThePluginIsRestartedOnceIfItReadWhatAnotherControllerWrote: it reads the ConfigMap only when it starts or another
// key is selected.
func TestThePluginIsRestartedOnceIfItReadWhatAnotherControllerWrote(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, timeSlicing(4))
	c.run(200)
	h := c.hosts["n0"]
	ours := c.Configs[h.Labels[v1alpha1.LabelConfig]]
	c.Configs[h.Labels[v1alpha1.LabelConfig]] = "version: v1\n"
	for _, uid := range h.readers() {
		c.deletePod(h, uid)
	}
	c.tick(time.Second)
	isOffered(g, h, gpusOnly(1))
	d := c.during(time.Hour, time.Minute)
	g.Expect(c.Configs[h.Labels[v1alpha1.LabelConfig]]).To(Equal(ours))
	isUpToDate(g, one(d))
	isOffered(g, h, gpusOnly(4))
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1))

	for range 120 { // and it does not help
		h.Allocatable["nvidia.com/gpu"] = 1
		c.reconcile()
		c.tick(time.Minute)
	}
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1))
	c.Policies = nil
	c.run(200)
	g.Expect(h.Annotations).To(BeEmpty())
}

// TestThePluginIsRestartedBeforeAChangeFailsByWhatItRead: another controller writes into the ConfigMap, and stops.
func TestThePluginIsRestartedBeforeAChangeFailsByWhatItRead(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, timeSlicing(4))
	h := c.hosts["n0"]
	c.tick(time.Hour)
	for h.Labels[v1alpha1.LabelConfig] == "" {
		c.reconcile()
		for key := range c.Configs {
			c.Configs[key] = "version: v1\n"
		}
		c.tick(time.Second)
	}
	isOffered(g, h, gpusOnly(1))
	isUpToDate(g, c.during(10*time.Minute, 10*time.Second).Nodes[0])
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1))
}

func TestUnhealthyDevicesAreCapacityThatIsNotAllocatable(t *testing.T) {
	g := NewWithT(t)
	node := &corev1.Node{Status: corev1.NodeStatus{
		Capacity:    corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8"), "nvidia.com/hostdev": resource.MustParse("2"), "cpu": resource.MustParse("8")},
		Allocatable: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("7"), "cpu": resource.MustParse("7")},
	}}
	n := cluster.NodeOf(node, &v1alpha1.GPUNode{})
	g.Expect(n.Unhealthy(nil)).To(Equal(gpusOnly(1)))
}

// TestAResourceWithoutAPluginIsNotUnhealthy: the kubelet lists the devices of a plugin that is gone as capacity for 5
// minutes.
func TestAResourceWithoutAPluginIsNotUnhealthy(t *testing.T) {
	n := cluster.Node{
		Allocatable:   map[string]int64{"nvidia.com/gpu": 0, "nvidia.com/gpu.shared": 8},
		Unallocatable: gpusOnly(2),
	}
	g := NewWithT(t)
	g.Expect(n.Unhealthy(map[string]int64{"nvidia.com/gpu.shared": 8})).To(BeEmpty(), "of a former name")
	g.Expect(n.Unhealthy(nil)).To(BeEmpty())
	g.Expect(n.Unhealthy(gpusOnly(2))).To(Equal(n.Unallocatable), "of the name that it must have")
	n.Allocatable["nvidia.com/gpu"] = 6
	g.Expect(n.Unhealthy(map[string]int64{"nvidia.com/gpu.shared": 8})).To(Equal(n.Unallocatable), "its plugin is there")
}

// TestThePluginIsRestartedThoughAFormerResourceHasCapacity: a plugin that offers nothing after a change of names is no
// sick GPU.
func TestThePluginIsRestartedThoughAFormerResourceHasCapacity(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, timeSlicing(4))
	c.during(time.Hour, time.Minute)
	h := c.hosts["n0"]
	c.Policies[0].Spec.Sharing.Advertise = &v1alpha1.Advertise{RenameByDefault: new(true)}
	c.Policies[0].Generation++
	d, _ := c.run(200)
	isUpToDate(g, one(d))
	isOffered(g, h, map[string]int64{"nvidia.com/gpu.shared": 4})
	g.Expect(h.Unallocatable).To(Equal(gpusOnly(4)))
	h.Allocatable["nvidia.com/gpu.shared"] = 3
	d = c.reconcile()
	hasState(g, d, node.Degraded)
	g.Expect(one(d).Message).NotTo(ContainSubstring("unhealthy"))
	isUpToDate(g, c.during(time.Minute, time.Second).Nodes[0])
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1))
}

// TestWhatAnotherControllerWritesIntoARecordRestartsNoPlugin: such a value tells nothing of what the plugin has seen,
// and a plugin that starts anew offers the GPU again that it reports unhealthy.
func TestWhatAnotherControllerWritesIntoARecordRestartsNoPlugin(t *testing.T) {
	for _, value := range []string{"garbage", "", "0123", "0123456789abcdef0", "garbage@uid"} {
		g := NewWithT(t)
		c := fleet(1, mig(count("3g", 2)))
		c.run(200)
		h := c.hosts["n0"]
		seen := h.Annotations[v1alpha1.AnnotationInstances]
		h.Unallocatable = map[string]int64{"nvidia.com/mig-3g.20gb": 1}
		h.Annotations[v1alpha1.AnnotationInstances] = value
		c.run(200)
		g.Expect(c.writes).NotTo(HaveKey("action.DeletePod"), "%q", value)
		g.Expect(h.Annotations[v1alpha1.AnnotationInstances]).To(Equal(seen), "%q", value)
	}
}

// TestThePluginIsNotRestartedForInstancesThatItSawWhenItWasStarted: it was started because no change is possible any
// more, and it starts after the agent has made the instances of a new driver.
func TestThePluginIsNotRestartedForInstancesThatItSawWhenItWasStarted(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(200)
	h := c.hosts["n0"]
	seen := h.Annotations[v1alpha1.AnnotationInstances]
	h.Annotations[v1alpha1.AnnotationInstances] = "0123456789abcdef"
	for _, label := range []string{pluginLabel, gfdLabel} {
		h.Labels[label] = "paused-for-mig-change"
	}
	h.Annotations[v1alpha1.AnnotationStopped] = pluginLabel + "," + gfdLabel
	c.tick(time.Second)
	c.Plugin.Reason, c.Plugin.Message = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy"
	c.reconcile()
	g.Expect(h.Labels).To(HaveKeyWithValue(pluginLabel, "true"))
	c.tick(time.Second)
	h.Unallocatable = map[string]int64{"nvidia.com/mig-3g.20gb": 1}
	c.Plugin.Reason, c.Plugin.Message = "", ""
	c.run(200)
	g.Expect(c.writes).NotTo(HaveKey("action.DeletePod"))
	g.Expect(h.Annotations).To(HaveKeyWithValue(v1alpha1.AnnotationInstances, seen))
}

// TestAPluginThatIsStartedBeforeItEndedIsRestartedForNewInstances: it has not seen the instance that the agent made
// again, and would offer one that is gone.
func TestAPluginThatIsStartedBeforeItEndedIsRestartedForNewInstances(t *testing.T) {
	for name, started := range map[string]func(*v1alpha1.GPUSharingPolicy){
		"the change is withdrawn": func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("3g", 2)) },
		"the rollout is paused":   paused,
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(1, mig(count("3g", 2)))
			c.run(200)
			h := c.hosts["n0"]
			h.destroy(0)
			c.version["n0"]++
			c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g", 7)) })
			for c.reconcile(); h.Annotations[v1alpha1.AnnotationStopped] == ""; c.reconcile() {
				c.tick(time.Second)
			}
			c.edit(started)
			c.reconcile()
			g.Expect(h.Labels).To(HaveKeyWithValue(pluginLabel, "true"))
			c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing, p.Spec.Rollout.Paused = mig(count("3g", 2)), false })
			c.tick(time.Second)
			c.during(10*time.Minute, 5*time.Second)
			g.Expect(h.plugin.uuids).To(ConsistOf(h.instances()))
		})
	}
}
