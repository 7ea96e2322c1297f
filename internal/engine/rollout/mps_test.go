// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// settled lets one policy ask for a sharing, and runs until nothing is left to do.
func settled(t *testing.T, c *site, s v1alpha1.Sharing) (rollout.Decision, []node.State) {
	t.Helper()
	p := policyOf("research", s, evicting)
	p.Generation = c.Now.Unix()
	c.Policies = []v1alpha1.GPUSharingPolicy{p}
	d, states := c.run(100)
	NewWithT(t).Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
	NewWithT(t).Expect(one(d).Reason).To(Equal(v1alpha1.ReasonReady), one(d).Message)
	return d, states["a"]
}

// released deletes the policies, and runs until nothing is left to do.
func released(t *testing.T, c *site) {
	t.Helper()
	c.Policies = nil
	d, _ := c.run(100)
	NewWithT(t).Expect(d.Nodes).To(BeEmpty())
}

// TestNVIDIAsMPSDaemonSetIsKeptOff: while the operator's MPS daemons serve a node, NVIDIA's DaemonSet has no pod there,
// and afterwards nothing overrides its label.
func TestNVIDIAsMPSDaemonSetIsKeptOff(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	limited := mps(4)
	limited.MPS.PinnedMemoryLimit = new(resource.MustParse("2Gi"))
	for name, next := range map[string]v1alpha1.Sharing{
		"other limits": limited, "more replicas": mps(10), "MIG": mig(count("1g", 7)), "time-slicing": timeSlicing(2),
	} {
		settled(t, c, mps(4))
		g.Expect(h.daemons).To(HaveLen(1))
		g.Expect(h.features.ours).NotTo(BeZero())
		g.Expect(h.features.gfd).To(Equal("true"), "our own configuration makes GFD say so")
		g.Expect(h.Labels[mpsLabel]).To(Equal("false"))
		settled(t, c, next)
		if next.MPS == nil {
			g.Expect(h.features.ours).To(BeZero(), name)
			g.Expect(h.daemons).To(BeEmpty(), name)
		}
	}
	settled(t, c, mps(4))
	released(t, c)
	g.Expect(h.features.ours).To(BeZero())
	g.Expect(h.daemons).To(BeEmpty())
	g.Expect(h.devices()[0].State.ComputeMode).To(Equal(gpu.ComputeDefault))
	g.Expect(c.crashes).To(BeEmpty())
	g.Expect(c.beside).To(BeEmpty())
}

// servedByNVIDIA is a cluster with a node that is shared by NVIDIA's MPS daemon.
func servedByNVIDIA(g *WithT, models ...sim.Model) (*site, *host) {
	c := newSite()
	c.byHand = mpsByHand(4)
	h := c.add("a", models...)
	c.tick(time.Second)
	c.tick(time.Second)
	g.Expect(h.theirs).NotTo(BeNil())
	g.Expect(h.devices()[0].State.MPS).NotTo(BeNil())
	return c, h
}

// TestNVIDIAsMPSByHand: a node that NVIDIA's daemon serves, since the default configuration says so, is drained before
// that ends, and served by it again when no policy governs the node any more.
func TestNVIDIAsMPSByHand(t *testing.T) {
	for name, next := range map[string]v1alpha1.Sharing{"MPS": mps(10), "MIG": mig(count("1g", 7)), "time-slicing": timeSlicing(2)} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := servedByNVIDIA(g, sim.A100)
			c.hold(h, "client", 0, gpu.WholeGPU)
			c.tick(time.Minute)

			_, states := settled(t, c, next)
			g.Expect(states).To(ContainElement(node.Draining))
			g.Expect(c.evicted).To(Equal([]string{"client"}))
			g.Expect(h.theirs).To(BeNil())
			g.Expect(h.features.ours.IsZero()).To(Equal(next.MPS == nil))

			released(t, c)
			c.tick(time.Second)
			c.tick(time.Second)
			g.Expect(h.theirs).NotTo(BeNil())
			g.Expect(h.daemons).To(BeEmpty())
			g.Expect(h.features.ours).To(BeZero())
			isOffered(g, h, gpusOnly(4))
			g.Expect(c.killed).To(BeEmpty())
			g.Expect(c.beside).To(BeEmpty())
		})
	}
}

// TestNVIDIAsMPSThatNothingAsksForLeavesItsGPUsOpen: it served the node for a moment when that was found, and the
// configuration to which the node returns, or falls back, does not ask for it (1012421).
func TestNVIDIAsMPSThatNothingAsksForLeavesItsGPUsOpen(t *testing.T) {
	for name, fails := range map[string]bool{"the policy goes": false, "it fails": true} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := servedByNVIDIA(g, sim.A100)
			c.Configs = map[string]string{"by-hand": "version: v1\n"}
			c.Plugin.Configs = maps.Clone(c.Configs)
			h.Labels[v1alpha1.LabelConfig] = "by-hand"
			if fails {
				h.breaks("by-hand")
				c.setPolicy("research", mps(10))
				d := c.during(2*time.Hour, 5*time.Second)
				isFailed(g, d)
			} else {
				settled(t, c, mps(10))
				c.Policies = nil
				c.during(10*time.Minute, 5*time.Second)
				g.Expect(c.reconcile().Nodes).To(BeEmpty())
			}
			g.Expect(h.theirs).To(BeNil())
			g.Expect(h.devices()[0].State.ComputeMode).To(Equal(gpu.ComputeDefault))
		})
	}
}

// TestNVIDIAsMPSThatStartsOnTheWayBackIsNotFought: its daemon was away when the node was found, and the configuration
// to which the node returns asks for it.
func TestNVIDIAsMPSThatStartsOnTheWayBackIsNotFought(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.byHand = mpsByHand(4)
	h := c.add("a", sim.A100)
	h.Labels[pluginLabel] = "false" // another controller works on the device plugin
	c.tick(time.Second)
	c.setPolicy("research", mig(count("2g", 3)))
	c.run(1000)
	g.Expect(h.GPU.Status.Rollout.Failed).NotTo(BeNil())
	h.Labels[pluginLabel] = "true"
	c.during(2*time.Hour, 10*time.Second)
	g.Expect(h.theirs).NotTo(BeNil())
	g.Expect(h.Taints).To(BeEmpty())
	version := c.version["a"]
	c.during(8*time.Hour, time.Minute)
	g.Expect(c.version["a"]).To(Equal(version), "nothing is written again and again")
	g.Expect(h.theirs).NotTo(BeNil())
	c.Policies = nil
	d, _ := c.run(400)
	g.Expect(d.Nodes).To(BeEmpty())
	g.Expect(h.theirs).NotTo(BeNil())
}

// TestNVIDIAsMPSThatIsLetBackIsKeptOff: another controller sets the label that starts NVIDIA's MPS DaemonSet, which
// reads the default configuration whatever the node selects.
func TestNVIDIAsMPSThatIsLetBackIsKeptOff(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.byHand, c.Plugin.NodeFeatures, c.nfd.absent = mpsByHand(4), false, true
	h := c.add("a", sim.A100)
	settled(t, c, timeSlicing(2))
	clear(c.writes)
	h.labelledByHand("true")
	c.tick(time.Second)
	g.Expect(h.theirs).NotTo(BeNil())
	d := c.during(10*time.Minute, 10*time.Second)
	isUpToDate(g, one(d))
	g.Expect(h.theirs).To(BeNil())
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(c.writes["action.PatchNode"]).To(BeNumerically("<=", 4), "%v", c.writes)
	g.Expect(h.Labels).To(HaveKeyWithValue(mpsLabel, "false"))

	h.labelledByHand("true")
	c.tick(time.Second)
	clear(c.writes)
	d = c.during(10*time.Minute, 10*time.Second)
	g.Expect(c.writes).To(Equal(map[string]int{"action.Report": 1}))
	hasState(g, d, node.Degraded)
	hasReason(g, d, v1alpha1.ReasonMPSCapableReset)

	released(t, c)
	g.Expect(h.Labels).To(HaveKeyWithValue(mpsLabel, "true"), "as it was before the operator changed it")
}

// exclusive is a node whose GPUs are not shared, where the default configuration shares by NVIDIA's MPS daemon.
func exclusive(t *testing.T) (*site, *host) {
	t.Helper()
	c := newSite()
	c.byHand = mpsByHand(4)
	h := c.add("a", sim.A100)
	settled(t, c, v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive})
	return c, h
}

// TestNVIDIAsMPSThatAnothersConfigurationStartsIsLeft: each attempt to end it would drain the node, and it would come back with the device plugin.
func TestNVIDIAsMPSThatAnothersConfigurationStartsIsLeft(t *testing.T) {
	g := NewWithT(t)
	c, h := exclusive(t)
	clear(c.writes)
	var d rollout.Decision
	for range 600 {
		delete(h.Labels, v1alpha1.LabelConfig)
		c.tick(time.Second)
		d = c.reconcile()
	}
	g.Expect(c.writes["action.Taint"]+c.writes["action.PatchNode"]).To(BeNumerically("<=", 3), "%v", c.writes)
	g.Expect(h.theirs).NotTo(BeNil())
	g.Expect(h.isKept()).To(BeFalse())
	hasReason(g, d, v1alpha1.ReasonConfigLabelReset)

	c.tick(d.After)
	isUpToDate(g, c.during(10*time.Minute, 10*time.Second).Nodes[0])
	g.Expect(h.theirs).To(BeNil(), "set again after an hour, and nobody objects any more")
}

// TestClientsOfAnothersConfigurationAreNotEvictedEachHour for a label that is set again each time.
func TestClientsOfAnothersConfigurationAreNotEvictedEachHour(t *testing.T) {
	g := NewWithT(t)
	c, h := exclusive(t)
	for begins := c.Now; c.Now.Sub(begins) < 5*time.Hour; c.reconcile() {
		delete(h.Labels, v1alpha1.LabelConfig)
		if h.theirs != nil && !h.isKept() && len(h.devices()[0].Holders) == 0 {
			c.hold(h, "client", 0, gpu.WholeGPU)
		}
		c.tick(10 * time.Second)
	}
	g.Expect(c.evicted).To(BeEmpty())
	g.Expect(c.killed).To(BeEmpty())
	g.Expect(h.isKept()).To(BeFalse())
	delete(h.Labels, v1alpha1.LabelConfig)
	c.end(h, "client")
	isUpToDate(g, c.during(2*time.Hour, 10*time.Second).Nodes[0])
}

// TestALabelThatWasResetOnceLongAgoHindersNoEviction: days later it is reset once more.
func TestALabelThatWasResetOnceLongAgoHindersNoEviction(t *testing.T) {
	g := NewWithT(t)
	c, h := exclusive(t)
	c.edit(evicting)
	for _, apart := range []time.Duration{time.Minute, 72 * time.Hour} {
		delete(h.Labels, v1alpha1.LabelConfig)
		c.tick(time.Second)
		c.during(apart, 10*time.Second)
	}
	g.Expect(h.Annotations).To(HaveKey(v1alpha1.AnnotationOverruled))
	delete(h.Labels, v1alpha1.LabelConfig)
	c.tick(time.Second)
	c.hold(h, "client", 0, gpu.WholeGPU)
	isUpToDate(g, c.during(time.Hour, 10*time.Second).Nodes[0])
	g.Expect(c.evicted).NotTo(BeEmpty())
}

// TestAGPUThatNVIDIAsMPSServedIsDeselected: the configuration of the node asks for no MPS, so the daemon does not come
// back before the policy goes. The node is ready without it.
func TestAGPUThatNVIDIAsMPSServedIsDeselected(t *testing.T) {
	g := NewWithT(t)
	c, h := servedByNVIDIA(g, sim.A100, sim.A100)
	settled(t, c, v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive})

	c.edit(func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Sharing = mig(count("3g", 2))
		onGPUs(0)(p)
	})
	c.settles(g, 400)
	isOffered(g, h, map[string]int64{"nvidia.com/mig-3g.20gb": 2, "nvidia.com/gpu": 1})

	released(t, c)
	c.tick(time.Second)
	c.tick(time.Second)
	g.Expect(h.theirs).NotTo(BeNil())
	isOffered(g, h, gpusOnly(8))
}

// TestNVIDIAsMPSThatIsNotReportedYetKeepsItsClients: NVIDIA's daemon starts, and pods come to it, while no agent looks.
// What the operator knows of the node is from before that, and asks for no drain.
func TestNVIDIAsMPSThatIsNotReportedYetKeepsItsClients(t *testing.T) {
	for name, test := range map[string]struct {
		next    v1alpha1.Sharing
		returns bool // the agent was away, and is Ready before it reports
	}{
		"the agent is back, and the operator's own daemons are next": {mps(10), true},
		"the agent is back, and time-slicing is next":                {timeSlicing(2), true},
		"the agent looks later, and time-slicing is next":            {timeSlicing(2), false},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			c.byHand = mpsByHand(4)
			h := c.add("a", sim.A100)
			if !test.returns {
				c.setPolicy("research", test.next, evicting)
				c.reconcile() // what disturbs nobody yet
			}
			h.lags = true
			c.steps(1)
			c.hold(h, "client", 0, gpu.WholeGPU)
			g.Expect(h.theirs).NotTo(BeNil())
			if test.returns {
				c.tick(time.Minute)
				h.AgentSince = c.Now
				c.setPolicy("research", test.next, evicting)
			}
			c.steps(10)
			g.Expect(c.killed).To(BeEmpty())
			h.lags = false
			d, states := c.run(300)
			isUpToDate(g, one(d))
			g.Expect(states["a"]).To(ContainElement(node.Draining))
			g.Expect(c.evicted).To(Equal([]string{"client"}))
			g.Expect(c.killed).To(BeEmpty())
			g.Expect(h.theirs).To(BeNil())
		})
	}
}

// TestANodeFoundBeforeNVIDIAsMPSHadStartedIsGivenBack: a new node is changed before NVIDIA's daemon has started there, so
// its baseline has none. Without a policy that daemon serves the node, as the default configuration asks.
func TestANodeFoundBeforeNVIDIAsMPSHadStartedIsGivenBack(t *testing.T) {
	for name, had := range map[string]v1alpha1.Sharing{"MPS": mps(10), "time-slicing": timeSlicing(2), "MIG": mig(count("2g", 3))} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			c.byHand = mpsByHand(4)
			h := c.add("a", sim.A100)
			settled(t, c, had)
			c.Policies = nil
			d, states := c.run(600)
			g.Expect(d.Nodes).To(BeEmpty(), "%v", d.Nodes)
			g.Expect(states["a"]).NotTo(ContainElement(node.Failed))
			c.tick(time.Second)
			c.tick(time.Second)
			g.Expect(h.theirs).NotTo(BeNil())
			g.Expect(h.features.ours).To(BeZero())
			isForgotten(g, h)
			isOffered(g, h, gpusOnly(4))
		})
	}
}

// TestAClientOfNVIDIAsMPSOnAnotherGPUIsWaitedFor: NVIDIA's daemon serves all GPUs of the node, and ends for all of them.
func TestAClientOfNVIDIAsMPSOnAnotherGPUIsWaitedFor(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.byHand = mpsByHand(4)
	h := c.add("a", sim.A100, sim.A100)
	c.steps(2)
	g.Expect(h.theirs).NotTo(BeNil())
	c.hold(h, "selected", 0, gpu.WholeGPU)
	c.hold(h, "other", 1, gpu.WholeGPU)
	c.tick(time.Minute)
	c.setPolicy("research", mig(count("1g", 7)), evicting, onGPUs(0))
	foretold := []string{}
	for _, u := range rollout.Decide(c.world()).Nodes[0].Blockers {
		foretold = append(foretold, u.String())
	}
	g.Expect(foretold).To(ConsistOf(ContainSubstring("pod user/selected uses GPU 0: is evicted"),
		ContainSubstring("pod user/other uses GPU 1: is not evicted, because the policy does not select its GPU")))
	d := c.during(20*time.Minute, 10*time.Second)
	g.Expect(c.killed).To(BeEmpty())
	g.Expect(c.evicted).To(Equal([]string{"selected"}))
	hasReason(g, d, v1alpha1.ReasonDrainTimedOut)
	g.Expect(one(d).Message).To(HaveSuffix("; pod user/other is not evicted, because the policy does not select its GPU, which NVIDIA's MPS daemon serves too; end the pod"))
	g.Expect(h.Taints).To(BeEmpty())

	c.end(h, "other")
	c.settles(g, 300)
	g.Expect(c.killed).To(BeEmpty())
}

// TestAPlanForetellsTheEvictionsUnderMPS: the kubectl plugin, which does not read the operator's ConfigMap, foretells
// the pods that the controller evicts and no others, whichever daemon serves the GPUs by MPS now.
func TestAPlanForetellsTheEvictionsUnderMPS(t *testing.T) {
	renamed := mps(4)
	renamed.Advertise = &v1alpha1.Advertise{RenameByDefault: new(true)}
	byPolicy := func(t *testing.T, c *site) { t.Helper(); settled(t, c, mps(4)) }
	byNVIDIA := func(_ *testing.T, c *site) { c.byHand = mpsByHand(4); c.tick(time.Second); c.tick(time.Second) }
	for name, test := range map[string]struct {
		served func(*testing.T, *site)
		next   v1alpha1.Sharing
		evicts []string
	}{
		"the operator's daemon stays under another policy": {byPolicy, mps(4), nil},
		"the operator's daemon serves another resource":    {byPolicy, renamed, []string{"client"}},
		"the operator's daemon ends for MIG":               {byPolicy, mig(count("1g", 7)), []string{"client"}},
		"NVIDIA's daemon hands over":                       {byNVIDIA, mps(4), []string{"client"}},
		"NVIDIA's daemon ends for time-slicing":            {byNVIDIA, timeSlicing(2), []string{"client"}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			test.served(t, c)
			c.hold(h, "client", 0, gpu.WholeGPU)
			c.tick(time.Minute)
			other := policyOf("other", test.next, evicting)
			other.Spec.Priority, other.CreationTimestamp = 5, metav1.NewTime(c.Now)
			c.Policies = append(c.Policies, other)

			s := c.world()
			s.Configs = nil
			foretold := rollout.Decide(s).Nodes[0]
			evicts := []string{}
			for _, u := range foretold.Blockers {
				g.Expect(u.Handling).To(HavePrefix("is evicted"))
				evicts = append(evicts, strings.TrimPrefix(u.Name, "pod user/"))
			}
			g.Expect(evicts).To(ConsistOf(test.evicts))
			d, _ := c.run(300)
			isUpToDate(g, one(d))
			g.Expect(one(d).Policy).To(Equal("other"))
			g.Expect(c.evicted).To(ConsistOf(test.evicts))
		})
	}
}

// TestNFDForbidsTheOverride: MPS is not started where the label stays what GFD says, and nobody is evicted for it.
func TestNFDForbidsTheOverride(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.nfd.denies = true
	c.byHand = mpsByHand(4)
	h := c.add("a", sim.A100)
	c.tick(time.Second)
	before := h.copied()
	c.setPolicy("research", mps(10), evicting)
	d, _ := c.run(300)
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonNodeFeatureIgnored)
	g.Expect(one(d).Message).To(And(ContainSubstring("zz-gpu-sharing-a"), ContainSubstring("denyNodeFeatureLabels"),
		ContainSubstring("nvidia-features-for-a")))
	g.Expect(h.daemons).To(BeEmpty())
	g.Expect(h.features.ours).To(BeZero())
	g.Expect(h.theirs).NotTo(BeNil(), "it is as it was")
	g.Expect(h.Labels[v1alpha1.LabelConfig]).To(BeEmpty())
	g.Expect(h.Taints).To(BeEmpty())
	isOffered(g, h, before.Allocatable)
	g.Expect(c.beside).To(BeEmpty())
}

// TestWithoutNodeFeatures: without the kind NodeFeature nothing overrides a label that NFD keeps, so MPS is refused; a
// label that nobody sets stays unset.
func TestWithoutNodeFeatures(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.Plugin.NodeFeatures = false
	h := c.add("a", sim.A100).labelledByHand("false")
	c.setPolicy("research", mps(4))
	d, _ := c.run(10)
	hasState(g, d, node.Unsupported)
	hasReason(g, d, v1alpha1.ReasonNoNodeFeatures)
	g.Expect(one(d).Message).To(And(ContainSubstring(mpsLabel+"=false"), ContainSubstring("Install Node Feature Discovery")))
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))

	delete(h.Labels, mpsLabel)
	settled(t, c, mps(4))
	g.Expect(h.daemons).To(HaveLen(1))
	g.Expect(h.Labels).NotTo(HaveKey(mpsLabel))
}

// TestNFDDoesNotRun: where no NodeFeature but ours names the label and NFD does not act, the operator sets the label
// itself.
func TestNFDDoesNotRun(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.nfd.absent = true
	h := c.add("a", sim.A100)
	h.Labels[gfdLabel], h.features.gfd = "false", ""
	settled(t, c, mps(4))
	g.Expect(h.daemons).To(HaveLen(1))
	g.Expect(h.Labels[mpsLabel]).To(Equal("false"))
	released(t, c)
	g.Expect(h.Labels).NotTo(HaveKey(mpsLabel))
	g.Expect(h.features.ours).To(BeZero())
}

// standAlone is a cluster without the GPU Operator: no deploy label stops anything, and NVIDIA's MPS DaemonSet needs
// only its own label.
func standAlone() (*site, *host) {
	c := newSite()
	c.Plugin.ClusterPolicy, c.Plugin.NodeFeatures = false, false
	h := c.add("a", sim.A100)
	h.Labels = map[string]string{"kubernetes.io/hostname": "a"}
	h.Pods = []cluster.Pod{pluginAlone("plugin", c.Now)}
	c.advertise(h)
	return c, h
}

func TestAStandAlonePluginWithoutNFD(t *testing.T) {
	g := NewWithT(t)
	c, h := standAlone()
	settled(t, c, mps(4))
	g.Expect(h.daemons).To(HaveLen(1))
	g.Expect(h.Labels).NotTo(HaveKey(mpsLabel), "nobody sets it")
	released(t, c)
	g.Expect(h.Labels).NotTo(HaveKey(mpsLabel))
}

// TestAStandAlonePluginLabelledByHand: the label that a user has set is set to false for as long as a policy governs
// the node, and restored afterwards.
func TestAStandAlonePluginLabelledByHand(t *testing.T) {
	for name, next := range map[string]v1alpha1.Sharing{"MPS": mps(10), "time-slicing": timeSlicing(2)} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := standAlone()
			c.byHand = mpsByHand(4)
			h.plugin.running = false
			h.labelledByHand("true")
			c.tick(time.Second)
			g.Expect(h.theirs).NotTo(BeNil())
			c.hold(h, "client", 0, gpu.WholeGPU)
			c.tick(time.Minute)

			settled(t, c, next)
			g.Expect(c.evicted).To(Equal([]string{"client"}))
			g.Expect(h.theirs).To(BeNil())
			g.Expect(h.Labels[mpsLabel]).To(Equal("false"))
			released(t, c)
			c.tick(time.Second)
			g.Expect(h.Labels[mpsLabel]).To(Equal("true"))
			g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMPSCapable))
			g.Expect(h.theirs).NotTo(BeNil())
			g.Expect(c.killed).To(BeEmpty())
			g.Expect(c.beside).To(BeEmpty())
		})
	}
}

// TestALabelThatIsSetBackIsNotFoughtOver: who sets the label back is overruled once in an hour, and named.
func TestALabelThatIsSetBackIsNotFoughtOver(t *testing.T) {
	g := NewWithT(t)
	c, h := standAlone()
	h.labelledByHand("true")
	settled(t, c, mps(4))
	patched := c.writes["action.PatchNode"]
	for range 20 {
		h.labelledByHand("true")
		c.run(3)
	}
	g.Expect(c.writes["action.PatchNode"]).To(Equal(patched), "not within an hour")
	d := c.reconcile()
	hasReason(g, d, v1alpha1.ReasonMPSCapableReset)
	hasMessage(g, d, "kubectl get node a --show-managed-fields")
	c.tick(time.Hour)
	c.run(3)
	g.Expect(h.Labels[mpsLabel]).To(Equal("false"))
}

// TestGFDThatNeverCorrectsItself: a node is not forgotten, and holds nobody up, while GFD says that it shares by MPS.
func TestGFDThatNeverCorrectsItself(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	settled(t, c, mps(4))
	h.Labels[gfdLabel] = "false" // its pod ends, and what it said stays
	c.Policies = nil
	d, _ := c.run(600)
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonMPSCapableStale)
	hasMessage(g, d, "gpu-operator/nvidia-features-for-a")
	g.Expect(h.waits()).To(ContainSubstring(v1alpha1.ReasonMPSCapableStale))
	g.Expect(h.Taints).To(BeEmpty())
	h.Labels[gfdLabel] = "true"
	c.tick(time.Second)
	d, _ = c.run(100)
	g.Expect(d.Nodes).To(BeEmpty())
	g.Expect(h.features.ours).To(BeZero())
}

// TestNVIDIAsMPSIsLetBackWhereTheDRADriverServes: GFD says for ever that the node shares by MPS.
func TestNVIDIAsMPSIsLetBackWhereTheDRADriverServes(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	settled(t, c, mps(4))
	c.switchOver(h, true)
	c.reshare(mig(count("1g", 7)))
	c.during(20*time.Minute, 10*time.Second)
	g.Expect(h.features.ours).To(BeZero())
}

// TestANodeThatNVIDIAsMPSServedIsReleasedWhereTheDRADriverServes: beside that driver NVIDIA's MPS daemon does not come back.
func TestANodeThatNVIDIAsMPSServedIsReleasedWhereTheDRADriverServes(t *testing.T) {
	g := NewWithT(t)
	c, h := servedByNVIDIA(g, sim.A100)
	c.setPolicy("research", mig(count("1g", 7)))
	for range 60 {
		if c.reconcile(); h.GPU.Spec.Baseline != nil {
			break
		}
		c.tick(time.Second)
	}
	g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())
	c.switchOver(h, true)
	c.during(20*time.Minute, 10*time.Second)
	released(t, c)
	g.Expect(h.devices()[0].State.ComputeMode).To(Equal(gpu.ComputeDefault))
}

// sharedByMPS is a cluster with a node that is shared by MPS, and with two pods on it.
func sharedByMPS(g *WithT) (*site, *host) {
	c, h := withGPUs(sim.A100)
	c.setPolicy("research", mps(4))
	c.settles(g, 100)
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "team-a", Name: "train", UID: "1"}, cluster.Pod{Namespace: "team-b", Name: "infer", UID: "2"})
	return c, h
}

func TestPodsWithFormerLimitsAreNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := sharedByMPS(g)
	h.GPU.Status.MPS = []v1alpha1.MPSStatus{{
		ResourceName: "nvidia.com/gpu", Clients: 3, OutdatedClients: 2, OutdatedPodUIDs: []string{"2", "1"},
	}}
	n := rollout.Decide(c.world()).Nodes[0]
	g.Expect(n.State).To(Equal(node.UpToDate))
	g.Expect(n.Reason).To(Equal(v1alpha1.ReasonLimitsPending))
	g.Expect(n.Message).To(HavePrefix("team-a/train, team-b/infer: started before the MPS limits changed"))

	h.GPU.Status.MPS[0].OutdatedClients, h.GPU.Status.MPS[0].OutdatedPodUIDs = 0, nil
	g.Expect(rollout.Decide(c.world()).Nodes[0].Reason).To(Equal(v1alpha1.ReasonReady))
}

func TestPodsThatWaitForAnotherUserAreNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := sharedByMPS(g)
	h.GPU.Status.MPS = []v1alpha1.MPSStatus{{
		ResourceName: "nvidia.com/gpu", User: new(int64(1000650000)), Clients: 1,
		WaitingPods: []v1alpha1.MPSWaitingPod{{UID: "2", User: 1000660000}, {UID: "gone", User: 0}},
	}}
	n := rollout.Decide(c.world()).Nodes[0]
	g.Expect(n.Reason).To(Equal(v1alpha1.ReasonMPSUserWaiting))
	g.Expect(n.Message).To(HavePrefix("MPS serves one user ID at a time, now 1000650000; " +
		"waiting: pod gone (user 0), team-b/infer (user 1000660000); run all pods"))
}

func TestADaemonThatNewPodsCannotReachIsNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := sharedByMPS(g)
	h.GPU.Status.MPS = []v1alpha1.MPSStatus{{ResourceName: "nvidia.com/gpu", Clients: 3, Unreachable: true}}
	n := rollout.Decide(c.world()).Nodes[0]
	g.Expect(n.State).To(Equal(node.UpToDate))
	g.Expect(n.Reason).To(Equal(v1alpha1.ReasonMPSUnreachable))
	g.Expect(n.Message).To(HavePrefix("nvidia.com/gpu: another program replaced the shared memory of MPS"))
	g.Expect(n.Message).To(HaveSuffix("until no client is connected, now 3; restart the pods that use MPS"))

	h.GPU.Status.MPS[0].Unreachable = false
	g.Expect(rollout.Decide(c.world()).Nodes[0].Reason).To(Equal(v1alpha1.ReasonReady))
}
