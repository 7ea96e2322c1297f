// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// loseGPUNode deletes the GPUNode of a node, and a new one takes its place.
func (c *site) loseGPUNode(h *host) {
	c.makeGPUNode(h)
	c.tick(time.Second)
}

// loseNode deletes the Node, and the machine registers again: what others wrote on it is gone.
func (c *site) loseNode(h *host, registered map[string]string) {
	h.Labels, h.Annotations, h.Taints = maps.Clone(registered), map[string]string{}, nil
	h.plugin.running = false
	c.tick(time.Second)
}

// TestTheBaselineSurvivesTheLossOfEitherObject at every point of a change: the node returns to how it was found.
func TestTheBaselineSurvivesTheLossOfEitherObject(t *testing.T) {
	for name, loses := range map[string]func(*site, *host, map[string]string){
		"GPUNode": func(c *site, h *host, _ map[string]string) { c.loseGPUNode(h) },
		"Node":    func(c *site, h *host, registered map[string]string) { c.loseNode(h, registered) },
		"annotation of the Node": func(_ *site, h *host, _ map[string]string) {
			delete(h.Annotations, v1alpha1.AnnotationBaseline)
		},
	} {
		for strategy, sharing := range map[string]v1alpha1.Sharing{
			"MIG": mig(count("3g.20gb", 2)), "time-slicing": timeSlicing(4), "an interval": interval(v1alpha1.TimeSliceIntervalShort), "MPS": mps(4),
		} {
			t.Run(name+"/"+strategy, func(t *testing.T) {
				for after := range 14 {
					g := NewWithT(t)
					c, h := withGPUs(sim.A100)
					h.found(gpu.TimeSliceMedium)
					h.Labels[v1alpha1.LabelMIGManager] = "true"
					h.Labels[v1alpha1.LabelConfig], c.byHand = "by-hand", ""
					c.Configs = map[string]string{"by-hand": "version: v1\n"}
					c.Plugin.Configs = maps.Clone(c.Configs)
					c.tick(time.Second)
					registered, gpus := maps.Clone(h.Labels), h.GPU.Status.Devices[0].Sharing
					c.setPolicy("research", sharing)
					c.steps(after)
					loses(c, h, registered)
					c.run(300)
					g.Expect(c.ready()).To(Equal(1), "after %d reconciles", after)
					c.Policies = nil
					d, _ := c.run(300)
					g.Expect(d.Nodes).To(BeEmpty(), "after %d reconciles", after)
					g.Expect(h.Labels).To(Equal(registered), "after %d reconciles", after)
					g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationBaseline))
					g.Expect(h.GPU.Status.Devices[0].Sharing).To(Equal(gpus), "after %d reconciles", after)
					g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceMedium), "after %d reconciles", after)
					isForgotten(g, h)
					g.Expect(c.crashes).To(BeEmpty())
				}
			})
		}
	}
}

// TestANodeThatIsRestoredUnnoticedKeepsItsBaseline: the controller decides by the Node as it was before it was restored
// from a backup, with the copy of its baseline. The API server refuses what must not meet a Node without that copy.
func TestANodeThatIsRestoredUnnoticedKeepsItsBaseline(t *testing.T) {
	for after := range 8 {
		g := NewWithT(t)
		c, h := toMIG()
		h.Labels[v1alpha1.LabelMIGManager], h.Labels[v1alpha1.LabelMIGConfig] = "true", "all-disabled"
		c.tick(time.Second)
		backup := maps.Clone(h.Labels)
		c.steps(after)
		late := rollout.Decide(c.world())
		c.loseNode(h, backup)
		for _, a := range late.Actions {
			if !locked(a) {
				c.do(a)
			}
		}
		c.run(300)
		g.Expect(c.ready()).To(Equal(1), "after %d reconciles", after)
		c.Policies = nil
		c.run(300)
		g.Expect(h.Labels).To(Equal(backup), "after %d reconciles", after)
		g.Expect(h.Annotations).To(BeEmpty(), "after %d reconciles", after)
	}
}

// TestTheBaselineOfAGPUIsHowItWasBeforeItsFirstChange, though the change was announced on the Node before: meanwhile a
// reboot, an upgrade of the driver or a user may change the GPU. If the change is held back, that may take weeks.
func TestTheBaselineOfAGPUIsHowItWasBeforeItsFirstChange(t *testing.T) {
	for _, reconciles := range []int{1, 2} {
		g := NewWithT(t)
		c, h := withGPUs(sim.H100)
		h.byHand(0, "2g.20gb")
		c.tick(time.Second)
		c.setPolicy("research", timeSlicing(2))
		c.steps(reconciles)
		g.Expect(h.Annotations).To(HaveKey(v1alpha1.AnnotationBaseline))
		g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
		c.Policies[0].Spec.Rollout.Paused = true
		c.run(60)
		h.hardware.Reboot() // an H100 forgets its MIG mode
		c.tick(24 * time.Hour)
		g.Expect(h.devices()[0].State.MIG).To(BeFalse())
		c.Policies[0].Spec.Rollout.Paused = false
		c.run(200)
		g.Expect(c.ready()).To(Equal(1))
		c.Policies = nil
		d, _ := c.run(200)
		g.Expect(d.Nodes).To(BeEmpty())
		g.Expect(h.devices()[0].State.MIG).To(BeFalse(), "after %d reconciles", reconciles)
		g.Expect(h.Annotations).To(BeEmpty())
	}
}

// TestWhatEitherObjectLostOfTheBaselineIsWrittenAgain, so that the other may be lost next.
func TestWhatEitherObjectLostOfTheBaselineIsWrittenAgain(t *testing.T) {
	for name, policies := range map[string]int{"under a policy": 1, "left as it is": 0} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(retaining)
			c.run(200)
			c.Policies = c.Policies[:policies]
			c.run(20)
			baseline := h.GPU.Spec.Baseline
			for range 3 {
				c.loseGPUNode(h)
				c.run(200)
				g.Expect(h.GPU.Spec.Baseline).To(Equal(baseline))
				h.Annotations = map[string]string{}
				c.run(200)
				g.Expect(h.Annotations).To(HaveKey(v1alpha1.AnnotationBaseline))
			}
			g.Expect(h.devices()[1].State.MIG).To(BeTrue())
			c.Policies = nil
			c.run(60)
			g.Expect(h.devices()[1].State.MIG).To(BeTrue(), "the policy said Retain")
			g.Expect(rollout.Decide(c.world()).Actions).To(BeEmpty())
		})
	}
}

// TestTheOperatorsOwnValuesAreNoBaseline, even if all that held the baseline is lost.
func TestTheOperatorsOwnValuesAreNoBaseline(t *testing.T) {
	for name, byHand := range map[string]func() (*site, *host, v1alpha1.Sharing){
		"the agent partitions": func() (*site, *host, v1alpha1.Sharing) {
			c, h := withGPUs(sim.A100)
			return c, h, mig(count("3g.20gb", 2))
		},
		"mig-manager partitions": func() (*site, *host, v1alpha1.Sharing) {
			c := newSite()
			return c, withManager(c, sim.A100), byManager(count("3g.20gb", 2))
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h, sharing := byHand()
			h.Labels[v1alpha1.LabelMIGManager] = "true"
			c.tick(time.Second)
			c.setPolicy("research", sharing)
			c.run(400)
			g.Expect(c.ready()).To(Equal(1))
			delete(h.Annotations, v1alpha1.AnnotationBaseline)
			c.loseGPUNode(h)
			c.run(400)
			g.Expect(c.ready()).To(Equal(1))
			c.Policies = nil
			c.run(400)
			g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
			g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "true"))
			g.Expect(h.Labels[v1alpha1.LabelMIGConfig]).NotTo(Or(Equal("gpu-sharing-operator"), HavePrefix("gpusharing-")))
			g.Expect(h.devices()[0].State.MIG).To(BeFalse())
		})
	}
}

// TestARestoreSetsNoLabelThatTheOperatorDidNotChange: the label of NVIDIA's mig-manager is not there any more, since
// the GPUNode of another machine of that name was restored from a backup, or another controller removed it. The
// operator only ever sets it to "false".
func TestARestoreSetsNoLabelThatTheOperatorDidNotChange(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	h := c.hosts["n0"]
	h.Labels[v1alpha1.LabelMIGManager] = "true"
	c.run(200)
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "false"))
	delete(h.Labels, v1alpha1.LabelMIGManager)
	c.Policies = nil
	c.run(200)
	g.Expect(h.GPU.Spec.Baseline).To(BeNil())
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelMIGManager))
}

// TestALabelOfMIGManagerThatCameAfterTheBaselineIsGivenBack: the GPU Operator set it once the node was known to be capable
// of MIG, or the GPUNode of another machine of that name was restored from a backup.
func TestALabelOfMIGManagerThatCameAfterTheBaselineIsGivenBack(t *testing.T) {
	for name, then := range map[string]func(*site, *host){
		"before MIG": func(c *site, _ *host) {
			c.setPolicy("research", mig(count("3g", 2)))
		},
		"with MIG":       func(*site, *host) {},
		"at the release": func(c *site, _ *host) { c.Policies = nil },
		"and the GPUNode is lost": func(c *site, h *host) {
			c.steps(2)
			c.loseGPUNode(h)
		},
		"and the GPUNode of before is restored": func(c *site, h *host) {
			before := h.GPU
			c.run(200)
			h.restoreGPUNode(before)
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			sharing := mig(count("3g", 2))
			if name == "before MIG" {
				sharing = timeSlicing(4)
			}
			c := fleet(1, sharing)
			h := c.hosts["n0"]
			c.run(200)
			g.Expect(c.ready()).To(Equal(1))
			g.Expect(h.GPU.Spec.Baseline.Labels).NotTo(HaveKey(v1alpha1.LabelMIGManager))
			h.Labels[v1alpha1.LabelMIGManager], h.Labels[v1alpha1.LabelMIGConfig] = "true", "all-disabled"
			then(c, h)
			c.run(200)
			if len(c.Policies) > 0 {
				g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "false"))
			}
			c.Policies = nil
			c.run(200)
			g.Expect(h.GPU.Spec.Baseline).To(BeNil())
			g.Expect(h.Labels).To(And(HaveKeyWithValue(v1alpha1.LabelMIGManager, "true"), HaveKeyWithValue(v1alpha1.LabelMIGConfig, "all-disabled")))
		})
	}
}

// TestANodeThatGetsOtherGPUsEachDay, as a virtual machine that is stopped each night and starts on another host: the
// baseline never outgrows its schema. It lists the GPUs that are there and those that went last.
func TestANodeThatGetsOtherGPUsEachDay(t *testing.T) {
	for strategy, sharing := range map[string]v1alpha1.Sharing{"time-slicing": timeSlicing(4), "MIG": mig(count("3g.20gb", 2))} {
		t.Run(strategy, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := c.add("vm", slices.Repeat([]sim.Model{sim.A100}, 8)...)
			c.setPolicy("research", sharing)
			uuids := func() (all []string) {
				for _, d := range h.devices() {
					all = append(all, d.UUID)
				}
				return all
			}
			var before []string
			for day := range 12 {
				if day > 0 {
					before = uuids()
					c.dies(h)
					h.getsOther(8, day)
					c.returns(h)
					c.tick(time.Second)
				}
				c.run(300)
				g.Expect(c.refused).To(BeEmpty())
				g.Expect(c.ready()).To(Equal(1), "on day %d: %s", day, h.waits())
				var listed []string
				for _, d := range h.GPU.Spec.Baseline.Devices {
					listed = append(listed, d.UUID)
				}
				g.Expect(len(listed)).To(BeNumerically("<=", cluster.MostGPUs))
				g.Expect(listed).To(ContainElements(append(before, uuids()...)), "on day %d", day)
				g.Expect(h.Annotations[v1alpha1.AnnotationBaseline]).To(Equal(cluster.CopyOf(h.GPU.Spec)))
			}
			c.Policies = nil
			c.run(300)
			isForgotten(g, h)
			g.Expect(h.Annotations).To(BeEmpty())
			g.Expect(h.instances()).To(BeEmpty())
		})
	}
}

// TestABaselineThatIsFullTakesNoGoneGPUFromItsCopy, or the two records would exchange their entries for ever.
func TestABaselineThatIsFullTakesNoGoneGPUFromItsCopy(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(200)
	spec, older := h.GPU.Spec.DeepCopy(), h.GPU.Spec.DeepCopy()
	for i := len(spec.Baseline.Devices); i < cluster.MostGPUs; i++ {
		spec.Baseline.Devices = append(spec.Baseline.Devices, v1alpha1.DeviceSpec{UUID: fmt.Sprint("GPU-gone-", i)})
	}
	older.Baseline.Devices = append(older.Baseline.Devices, v1alpha1.DeviceSpec{UUID: "GPU-of-the-copy"})
	n := *h.Node
	n.GPU.Spec, n.Annotations = *spec, map[string]string{v1alpha1.AnnotationBaseline: cluster.CopyOf(*older)}
	joined := n.WithCopy(&n.GPU)
	g.Expect(joined.BaselineLost).To(BeFalse())
	g.Expect(joined.GPU.Spec.Baseline).To(Equal(spec.Baseline))

	n.GPU.Spec.Baseline.Devices = slices.DeleteFunc(n.GPU.Spec.Baseline.Devices, func(d v1alpha1.DeviceSpec) bool { return d.UUID == h.devices()[1].UUID })
	n.GPU.Spec.Baseline.Devices = append(n.GPU.Spec.Baseline.Devices, v1alpha1.DeviceSpec{UUID: "GPU-gone-last"})
	joined = n.WithCopy(&n.GPU)
	g.Expect(joined.BaselineLost).To(BeTrue(), "a GPU that is there has its entry in the copy alone")
	g.Expect(joined.GPU.Spec.Baseline.Devices).To(And(HaveLen(cluster.MostGPUs), ContainElement(HaveField("UUID", h.devices()[1].UUID)),
		ContainElement(HaveField("UUID", "GPU-gone-last")), Not(ContainElement(HaveField("UUID", "GPU-of-the-copy")))))
}

// Nobody knows what is to be restored, and the admission policy gpu-sharing-not-restored keeps the operator while the annotation is there.
func TestACopyOfTheBaselineThatCannotBeReadGoes(t *testing.T) {
	for _, text := range []string{"garbage", ""} {
		g := NewWithT(t)
		c, h := withGPUs(sim.A100)
		h.Annotations = map[string]string{v1alpha1.AnnotationBaseline: text}
		c.run(60)
		g.Expect(h.Annotations).To(BeEmpty())
	}
}

// TestAPolicyRightAfterAReleaseFindsWhatIsThere: the report that forgets the last good state comes later than the spec
// is emptied. What a user had made is not taken for what the former policy asked for.
func TestAPolicyRightAfterAReleaseFindsWhatIsThere(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.partitionedByHand()
	byHand := h.instances()
	c.tick(time.Second)
	for _, name := range []string{"former", "next"} {
		c.setPolicy(name, mig(count("1g", 7)))
		c.run(120)
		g.Expect(h.instances()).To(HaveLen(7))
		c.Policies = nil
		for n := 0; n < 120 && (h.GPU.Spec.Baseline != nil || len(h.instances()) == 7); n++ {
			c.steps(1)
		}
	}
	g.Expect(h.devices()[0].State.MIG).To(BeTrue())
	g.Expect(h.instances()).To(HaveLen(len(byHand)))
}

// TestACopyOfAnEarlierVersionLeavesTheNodeReady: it has no numbering, which the next change adds.
func TestACopyOfAnEarlierVersionLeavesTheNodeReady(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(onGPUs(0))
	c.run(100)
	copied := func() string { return h.Annotations[v1alpha1.AnnotationBaseline] }
	var saved cluster.SavedBaseline
	g.Expect(json.Unmarshal([]byte(copied()), &saved)).To(Succeed())
	g.Expect(saved.Numbering).NotTo(BeNil())
	saved.Numbering = nil
	h.Annotations[v1alpha1.AnnotationBaseline] = saved.Text()
	c.version["a"]++
	d := c.reconcile()
	isUpToDate(g, one(d))
	g.Expect(d.Actions).To(BeEmpty())
	c.reshare(mig(count("1g", 2)))
	c.run(100)
	g.Expect(copied()).To(ContainSubstring("numbering"))
}

// TestAPolicyOfALaterVersionUndoesNothing: after a downgrade the API server has dropped what this version's CRD does not have, and kept values of
// which it does not know. Nor does it where the GPUNode is lost.
func TestAPolicyOfALaterVersionUndoesNothing(t *testing.T) {
	later := func(change func(*v1alpha1.Sharing)) func(*v1alpha1.GPUSharingPolicy) {
		return func(p *v1alpha1.GPUSharingPolicy) { change(&p.Spec.Sharing) }
	}
	for name, change := range map[string]func(*v1alpha1.GPUSharingPolicy){
		"a strategy that is not known":            later(func(s *v1alpha1.Sharing) { *s = v1alpha1.Sharing{Strategy: "Later"} }),
		"MIG whose fields are not known":          later(func(s *v1alpha1.Sharing) { s.MIG = nil }),
		"time-slicing whose fields are not known": later(func(s *v1alpha1.Sharing) { *s = v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing} }),
		"MPS whose fields are not known":          later(func(s *v1alpha1.Sharing) { *s = v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS} }),
		"a layout that is not known":              later(func(s *v1alpha1.Sharing) { s.MIG.Layouts = []v1alpha1.MIGLayout{{}} }),
		"who partitions is not known":             later(func(s *v1alpha1.Sharing) { s.MIG.Actuator = "Later" }),
		"names of resources that are not known":   later(func(s *v1alpha1.Sharing) { s.MIG.ResourceNames = "Later" }),
		"an interval that is not known": later(func(s *v1alpha1.Sharing) {
			*s = timeSlicing(4)
			s.TimeSlicing.Interval = "Later"
		}),
		"a selector that is not known": func(p *v1alpha1.GPUSharingPolicy) {
			p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchExpressions: []v1alpha1.NodeSelectorRequirement{{Key: "gpus", Operator: "Gt", Values: []string{"1"}}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting)
			c.run(100)
			want := advertised(h)
			g.Expect(want).To(HaveKey("nvidia.com/mig-2g.10gb"))
			c.hold(h, "job", 0, h.devices()[0].State.Instances[0].ID)
			c.edit(change)
			for _, then := range []func(){func() {}, func() { c.loseGPUNode(h); c.tick(timing.PoliciesReturn) }} {
				then()
				d, _ := c.run(200)
				isOffered(g, h, want)
				g.Expect(h.inUse()).NotTo(BeEmpty())
				g.Expect(h.isTainted()).To(BeFalse())
				hasReason(g, d, v1alpha1.ReasonLaterVersion)
			}
		})
	}
}
