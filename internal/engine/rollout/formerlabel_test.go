// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

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
				c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("2g", 3)), evicting)}
				d := c.during(10*time.Minute, every)
				g.Expect(d.Nodes[0].State).To(Equal(node.UpToDate), "%+v", d.Nodes[0])
				h.applied = nil
				c.Policies = nil
				clear(c.writes)
				d = c.during(2*time.Hour, every)
				g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
				g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
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
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mig(count("1g", 7)), evicting)}
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
