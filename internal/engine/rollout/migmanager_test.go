// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// byManager asks for instances, and for NVIDIA's mig-manager to make them.
func byManager(instances ...v1alpha1.MIGInstances) v1alpha1.Sharing {
	s := mig(instances...)
	s.MIG.Actuator = v1alpha1.MIGActuatorMIGManager
	return s
}

// withManager is a node as the GPU Operator leaves it, with mig-manager at rest.
func withManager(c *site, models ...sim.Model) *host {
	h := c.add("a", models...)
	h.acts = true
	h.Labels[v1alpha1.LabelMIGManager], h.Labels[v1alpha1.LabelMIGConfig] = "true", "all-disabled"
	c.tick(time.Second)
	c.tick(time.Second)
	return h
}

func TestMIGManagerPartitionsANodeWithNobodyOnIt(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := withManager(c, sim.A100, sim.A100)
	c.hold(h, "train", 1, gpu.WholeGPU)
	sharing := byManager(count("3g", 1), count("1g", 2))
	sharing.MIG.Layouts[0].GPUs = &v1alpha1.GPUMatch{Indexes: []int32{0}}
	c.setPolicy("research", sharing, evicting)
	d := c.reconcile()
	g.Expect(one(d).Plan).To(HaveExactElements(
		MatchRegexp(`^NVIDIA's mig-manager: apply gpusharing-[0-9a-f]{12}, which clears GPU 0, GPU 1$`)), "a mode that changes concerns all GPUs")
	g.Expect(d.ConfigureMIGManager).To(BeTrue())
	c.tick(time.Second)
	d, _ = c.run(400)
	g.Expect(c.evicted).To(Equal([]string{"train"}))
	g.Expect(h.mistakes).To(BeEmpty())
	isUpToDate(g, one(d))
	isOffered(g, h, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb": 2})
	g.Expect(h.applied).To(HaveLen(1))
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "true"), "it is not disabled")
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGConfig, h.applied[0]))
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
	g.Expect(h.GPU.Spec.MIGConfigName).To(BeEmpty(), "the agent looks at the driver again")
	g.Expect(h.Taints).To(BeEmpty())

	c.Policies = nil
	d, _ = c.run(400)
	g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
	g.Expect(h.mistakes).To(BeEmpty())
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGConfig, "all-disabled"))
	g.Expect(d.ConfigureMIGManager).To(BeFalse())
	isOffered(g, h, gpusOnly(2))
}

// TestWhatMIGManagerSaysOfAnEarlierRequestIsNotTakenForAnAnswer: its pod is started anew with our ConfigMap, and compares
// what its label named before with what is there (on a busy machine for seconds) before it reads the label again.
func TestWhatMIGManagerSaysOfAnEarlierRequestIsNotTakenForAnAnswer(t *testing.T) {
	for _, compares := range []time.Duration{3 * time.Second, 12 * time.Second, 25 * time.Second} {
		t.Run(compares.String(), func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := withManager(c, sim.A100)
			h.compares = compares
			h.Labels[v1alpha1.LabelMIGConfigState] = "success"
			c.setPolicy("research", byManager(count("1g", 7)))
			d := c.during(4*time.Minute, time.Second)
			g.Expect(h.mistakes).To(BeEmpty())
			isUpToDate(g, one(d))
			isOffered(g, h, map[string]int64{"nvidia.com/mig-1g.5gb": 7})
		})
	}
}

// TestAPodOfMIGManagerThatStartsLate answers late to what its label named before: its image was pulled, or the GPU Operator's validation awaited.
func TestAPodOfMIGManagerThatStartsLate(t *testing.T) {
	for starts := 20 * time.Second; starts <= 50*time.Second; starts += 3 * time.Second {
		for _, replaced := range []bool{false, true} {
			t.Run(fmt.Sprint(starts, replaced), func(t *testing.T) {
				g := NewWithT(t)
				c := newSite()
				h := withManager(c, sim.A100)
				h.compares, h.starts = 12*time.Second, starts
				h.Labels[v1alpha1.LabelMIGConfigState] = "success"
				c.setPolicy("research", byManager(count("1g", 7)))
				var d rollout.Decision
				for range 6 * 60 {
					if d = c.reconcile(); replaced && h.GPU.Spec.MIGConfigName != "" {
						replaced = false
						h.Pods = slices.DeleteFunc(h.Pods, playedBy(v1alpha1.LabelMIGManager))
					}
					c.tick(time.Second)
				}
				g.Expect(h.mistakes).To(BeEmpty())
				isUpToDate(g, one(d))
			})
		}
	}
}

func TestMIGManagerLeavesAloneWhatIsNotItsBusiness(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := withManager(c, sim.A100, sim.A100)
	c.setPolicy("research", byManager(count("1g", 7)), evicting)
	c.run(400)
	isOffered(g, h, map[string]int64{"nvidia.com/mig-1g.5gb": 14})
	c.hold(h, "one", 0, h.devices()[0].State.Instances[0].ID)
	c.hold(h, "other", 1, h.devices()[1].State.Instances[0].ID)

	sharing := byManager(count("1g", 6))
	sharing.MIG.Layouts[0].GPUs = &v1alpha1.GPUMatch{Indexes: []int32{1}}
	sharing.MIG.Layouts = append(sharing.MIG.Layouts, byManager(count("1g", 7)).MIG.Layouts...)
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = sharing, 2
	c.settles(g, 400)
	g.Expect(c.evicted).To(Equal([]string{"other"}), "the GPU whose layout changes is cleared, the other one is not")
	g.Expect(h.mistakes).To(BeEmpty())
	g.Expect(h.devices()[0].Holders).To(HaveLen(1))
}

func TestANodeThatMIGManagerHasPartitionedIsAdoptedAsItIs(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := withManager(c, sim.A100)
	h.Labels[v1alpha1.LabelMIGConfig] = "all-1g.5gb"
	c.tick(time.Second)
	c.tick(20 * time.Second)
	c.tick(time.Second)
	g.Expect(h.devices()[0].State.Instances).To(HaveLen(7))
	c.hold(h, "train", 0, h.devices()[0].State.Instances[3].ID)
	c.setPolicy("research", byManager(count("1g", 7)), evicting)
	d, states := c.run(100)
	isUpToDate(g, one(d))
	g.Expect(states["a"]).NotTo(ContainElement(node.Draining))
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGConfig, "all-1g.5gb"))
	g.Expect(h.applied).To(Equal([]string{"all-1g.5gb"}), "nothing is applied anew")
	g.Expect(d.ConfigureMIGManager).To(BeFalse(), "and what mig-manager reads is left alone")
	g.Expect(c.evicted).To(BeEmpty())
}

func TestWhatMIGManagerDoesNotReachGoesBack(t *testing.T) {
	for breaks, says := range map[string]struct{ begin, end string }{
		"fails": {"NVIDIA's mig-manager failed to apply gpusharing-", "kubectl logs -n gpu-operator nvidia-4; rolled back; retry by gpusharing.io/retry"},
		"hangs": {"NVIDIA's mig-manager did not apply gpusharing-", "kubectl logs -n gpu-operator nvidia-4"},
		"lies":  {"NVIDIA's mig-manager has not brought the GPUs to what was asked for", ""},
	} {
		t.Run("it "+breaks, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := withManager(c, sim.A100)
			c.setPolicy("research", byManager(count("1g", 7)), evicting)
			c.run(400)
			good := h.Labels[v1alpha1.LabelMIGConfig]
			h.mishap = func(name string) string {
				if name == good {
					return ""
				}
				return breaks
			}
			c.Policies[0].Spec.Sharing, c.Policies[0].Generation = byManager(count("2g", 3)), 2
			d, _ := c.run(2500)
			g.Expect(one(d).State).To(Equal(node.Failed), "%+v", one(d))
			hasReason(g, d, v1alpha1.ReasonMIGManagerFailed)
			g.Expect(one(d).Message).To(And(HavePrefix(says.begin), HaveSuffix(says.end)))
			isOffered(g, h, map[string]int64{"nvidia.com/mig-1g.5gb": 7})
			g.Expect(h.Labels).To(HaveKeyWithValue(pluginLabel, "true"))
			g.Expect(h.GPU.Spec.MIGConfigName).To(BeEmpty())
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(h.mistakes).To(BeEmpty())
		})
	}
}

func TestAMIGManagerThatDoesNotRunIsNamed(t *testing.T) {
	for name, tt := range map[string]struct {
		prevent func(*site, *host)
		says    string
	}{
		"a stand-alone plugin": {
			prevent: func(c *site, _ *host) { c.Plugin.ClusterPolicy = false }, says: "there is no ClusterPolicy",
		},
		"disabled": {
			prevent: func(c *site, _ *host) { c.Plugin.NoMIGManager = "spec.migManager.enabled is false" },
			says:    "spec.migManager.enabled is false",
		},
		"kept off the node": {
			prevent: func(_ *site, h *host) { h.Labels[v1alpha1.LabelMIGManager] = "false" },
			says:    "the node carries nvidia.com/gpu.deploy.mig-manager=false; remove that label",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := withManager(c, sim.A100)
			tt.prevent(c, h)
			c.setPolicy("research", byManager(count("1g", 7)), evicting)
			d, _ := c.run(10)
			hasState(g, d, node.Unsupported)
			hasReason(g, d, v1alpha1.ReasonNoMIGManager)
			g.Expect(one(d).Message).To(And(ContainSubstring(tt.says), ContainSubstring("actuator: Agent")))
			g.Expect(h.Taints).To(BeEmpty())
		})
	}
}

func TestTheActuatorMayChange(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := withManager(c, sim.A100, sim.A100)
	c.setPolicy("research", mig(count("1g", 7)), evicting)
	c.run(400)
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "false"))
	kept := h.devices()[0].State.Instances[0]
	c.hold(h, "train", 0, kept.ID)

	sharing := byManager(count("2g", 3))
	sharing.MIG.Layouts[0].GPUs = &v1alpha1.GPUMatch{Indexes: []int32{1}}
	sharing.MIG.Layouts = append(sharing.MIG.Layouts, byManager(count("1g", 7)).MIG.Layouts...)
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = sharing, 2
	c.settles(g, 400)
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "true"))
	g.Expect(h.mistakes).To(BeEmpty())
	g.Expect(h.devices()[0].State.Instances[0].UUID).To(Equal(kept.UUID), "when it comes back it finds that nothing is to be done")
	g.Expect(c.evicted).To(BeEmpty())

	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("1g", 7)), 3
	c.settles(g, 400)
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "false"))
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGConfig, "gpu-sharing-operator"), "nothing of mig-manager's is there")
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelMIGConfigState))
	g.Expect(h.devices()[0].State.Instances[0].UUID).To(Equal(kept.UUID))
}

func TestMIGManagerSurvivesAnInterruptionAfterEveryAction(t *testing.T) {
	for cut := 1; ; cut++ {
		g := NewWithT(t)
		c := newSite()
		h := withManager(c, sim.A100)
		c.hold(h, "train", 0, gpu.WholeGPU)
		c.setPolicy("research", byManager(count("1g", 7)), evicting)
		done := 0
		for range 200 {
			d := rollout.Decide(c.world())
			for _, a := range d.Actions {
				if done++; done == cut {
					break // what is left of the reconcile is not carried out
				}
				c.do(a)
			}
			c.configureMIG(d)
			c.tick(time.Second)
		}
		g.Expect(h.mistakes).To(BeEmpty(), "ended after action %d", cut)
		g.Expect(rollout.Decide(c.world()).Nodes[0].State).To(Equal(node.UpToDate), "ended after action %d", cut)
		g.Expect(migmanager.Ours(h.Labels[v1alpha1.LabelMIGConfig])).To(BeTrue())
		if done < cut {
			g.Expect(cut).To(BeNumerically(">", 8))
			return
		}
	}
}

// The DaemonSet of mig-manager does not tolerate the operator's taint, so no pod of it came back before the change had
// failed.
func TestMIGManagerWhosePodIsDeletedInTheMiddleOfAChangeComesBack(t *testing.T) {
	for _, when := range []struct {
		moment string
		is     func(h *host) bool
	}{
		{"before it has begun", func(h *host) bool { return h.GPU.Spec.MIGConfigName != "" }},
		{"while NVIDIA's operands are stopped", func(h *host) bool {
			return h.Labels[v1alpha1.LabelMIGConfigState] == "pending"
		}},
	} {
		g := NewWithT(t)
		c := newSite()
		c.Plugin.Operands = &clusterpolicy.Operands{}
		h := withManager(c, sim.A100)
		c.setPolicy("research", byManager(count("1g", 7)), evicting)
		for range 200 {
			if c.reconcile(); when.is(h) {
				break
			}
			c.tick(time.Second)
		}
		g.Expect(when.is(h)).To(BeTrue(), when.moment)
		at := slices.IndexFunc(h.Pods, playedBy(v1alpha1.LabelMIGManager))
		g.Expect(at).To(BeNumerically(">=", 0), when.moment)
		g.Expect(h.Taints).NotTo(BeEmpty(), when.moment)
		h.Pods = slices.Delete(h.Pods, at, at+1)
		began := c.Now
		for range 400 {
			d := c.reconcile()
			open := slices.ContainsFunc(h.Pods, playedBy(pluginLabel)) && len(h.Taints) == 0
			if one(d).State == node.UpToDate {
				break
			}
			g.Expect(open && h.GPU.Spec.MIGConfigName != "").To(BeFalse(),
				"%s: the device plugin runs, and the taint is gone", when.moment)
			c.tick(time.Second)
		}
		g.Expect(c.Now.Sub(began)).To(BeNumerically("<", 2*time.Minute), when.moment)
		g.Expect(h.mistakes).To(BeEmpty(), when.moment)
		g.Expect(advertised(h)).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7}), when.moment)
		g.Expect(h.Taints).To(BeEmpty(), when.moment)
		g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped), when.moment)
	}
}

// releasedTo is a node that a policy had mig-manager partition, and that has just got the label back that it had
// before: one that mig-manager failed to apply before, if it asks for instances, and can apply now.
func releasedTo(g Gomega, c *site, name string) *host {
	h := withManager(c, sim.A100)
	h.mishap = func(of string) string { return map[string]string{name: "fails"}[of] }
	h.Labels[v1alpha1.LabelMIGConfig] = name
	for range 20 {
		c.tick(time.Second)
	}
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	c.setPolicy("research", byManager(count("2g", 3)), evicting)
	isUpToDate(g, c.during(5*time.Minute, time.Second).Nodes[0])
	c.Policies = nil
	for range 400 {
		if c.reconcile(); h.Labels[v1alpha1.LabelMIGConfig] == name {
			break
		}
		c.tick(time.Second)
	}
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGConfig, name))
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelMIGConfigState), "what it says next is its answer")
	h.mishap = nil
	return h
}

// TestMIGManagerKeepsItsPodUntilItHasAppliedTheLabelOfBefore: a pod that is replaced in the middle leaves NVIDIA's
// operands stopped.
func TestMIGManagerKeepsItsPodUntilItHasAppliedTheLabelOfBefore(t *testing.T) {
	for outcome, layout := range map[string]int{"": 7, "fails": 0} {
		t.Run("it "+outcome, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			h := releasedTo(g, c, "all-1g.5gb")
			h.mishap = func(string) string { return outcome }
			c.tick(time.Second)
			g.Expect(h.began).NotTo(BeZero())
			for !h.began.IsZero() {
				d := c.reconcile()
				g.Expect(d.ConfigureMIGManager).To(BeTrue())
				g.Expect(d.Nodes).To(HaveLen(1))
				hasState(g, d, node.Finishing)
				hasReason(g, d, v1alpha1.ReasonMIGManagerBusy)
				hasMessage(g, d, "nvidia.com/mig.config=all-1g.5gb, nvidia.com/mig.config.state=pending")
				g.Expect(one(d).Blockers).To(BeEmpty(), "the GPUs are not the operator's any more")
				c.tick(time.Second)
			}
			d := c.during(time.Minute, time.Second) // its pod that comes then tries again what failed
			g.Expect(h.mistakes).To(BeEmpty())
			g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
			g.Expect(d.ConfigureMIGManager).To(BeFalse())
			isForgotten(g, h)
			g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
			g.Expect(h.Labels).To(And(HaveKeyWithValue(v1alpha1.LabelMIGConfig, "all-1g.5gb"), HaveKeyWithValue(pluginLabel, "true")))
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(h.devices()[0].State.Instances).To(HaveLen(layout), "what it made of the GPUs stays")
		})
	}
}

// TestMIGManagerThatDoesNotAnswerIsWaitedForWithinItsTime, and one that has no pod on the node is not.
func TestMIGManagerThatDoesNotAnswerIsWaitedForWithinItsTime(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := releasedTo(g, c, "all-1g.5gb")
	h.mishap = func(string) string { return "hangs" }
	since := c.Now
	s := c.world()
	s.Nodes[0].Pods = slices.DeleteFunc(s.Nodes[0].Pods, playedBy(v1alpha1.LabelMIGManager))
	g.Expect(rollout.Decide(s).ConfigureMIGManager).To(BeFalse(), "no pod is there that could be replaced")

	d := c.during(19*time.Minute, 10*time.Second)
	g.Expect(d.ConfigureMIGManager).To(BeTrue())
	hasMessage(g, d, ", until "+format.Clock(since.Add(20*time.Minute))+" at the latest")
	g.Expect(d.After).To(And(BeNumerically(">", 0), BeNumerically("<=", 70*time.Second)), "it needs no event")
	for d.ConfigureMIGManager {
		g.Expect(c.Now).To(BeTemporally("<", since.Add(21*time.Minute)))
		c.tick(time.Second)
		d = c.reconcile()
	}
	c.reconcile()
	g.Expect(h.Labels).To(And(HaveKeyWithValue(pluginLabel, "true"), HaveKeyWithValue(v1alpha1.LabelRunsAgent, "true")), "nothing is left stopped")
	d, _ = c.run(10)
	g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
	isForgotten(g, h)
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
	g.Expect(h.Taints).To(BeEmpty())
}

// TestALabelThatChangesWhileMIGManagerAnswersStays: it is the administrator's, and so is what becomes of the GPUs.
func TestALabelThatChangesWhileMIGManagerAnswersStays(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := releasedTo(g, c, "all-disabled")
	h.Labels[v1alpha1.LabelMIGConfig] = "all-1g.5gb"
	d := c.during(2*time.Minute, time.Second)
	g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
	g.Expect(h.mistakes).To(BeEmpty())
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGConfig, "all-1g.5gb"))
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
	g.Expect(h.devices()[0].State.Instances).To(HaveLen(7))
}
