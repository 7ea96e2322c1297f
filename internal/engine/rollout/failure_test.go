// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// breaks lets the plugin of a node advertise nothing under the key that is not good.
func (h *host) breaks(good string) {
	h.broken = func(cluster.Snapshot) bool { return h.Labels[v1alpha1.LabelConfig] != good }
}

func TestAFailedChangeGoesBackToTheLastGoodState(t *testing.T) {
	for name, next := range map[string]v1alpha1.Sharing{"time-slicing": timeSlicing(8), "MIG": mig(count("1g", 7)), "MPS": mps(4)} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			for _, node := range []string{"a", "b"} {
				c.add(node, sim.A100)
			}
			c.setPolicy("research", timeSlicing(4))
			c.run(60)
			good := c.hosts["a"].GPU.Spec.ConfigName
			c.hosts["a"].breaks(good)

			c.Policies[0].Spec.Sharing, c.Policies[0].Generation = next, 2
			d, states := c.run(400)
			g.Expect(states["a"]).To(ContainElement(node.Verifying))
			g.Expect(d.Actions).To(BeEmpty())
			isFailed(g, d)
			hasReason(g, d, v1alpha1.ReasonNotAdvertised)
			g.Expect(one(d).Message).To(And(
				ContainSubstring("not advertised within 5m0s"), HaveSuffix("restart the kubelet; rolled back; retry by gpusharing.io/retry")))
			g.Expect(c.hosts["a"].Labels[v1alpha1.LabelConfig]).To(Equal(good))
			g.Expect(advertised(c.hosts["a"])).To(Equal(gpusOnly(4)))
			g.Expect(c.hosts["a"].Taints).To(BeEmpty())
			g.Expect(c.hosts["a"].Labels[pluginLabel]).To(Equal("true"))

			g.Expect(states["b"]).NotTo(ContainElement(node.Applying), "the rollout is halted")
			g.Expect(d.Nodes[1].Reason).To(Equal(v1alpha1.ReasonRolloutHalted))
			g.Expect(advertised(c.hosts["b"])).To(Equal(gpusOnly(4)))

			stalled := metav1.Condition{}
			for _, condition := range d.Policies["research"].Conditions {
				if condition.Type == v1alpha1.ConditionStalled {
					stalled = condition
				}
			}
			g.Expect(stalled.Status).To(Equal(metav1.ConditionTrue))
			g.Expect(stalled.Message).To(ContainSubstring("node a: not advertised within 5m0s"))

			c.hosts["a"].broken = nil
			c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(2), 3
			d, _ = c.run(200)
			g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(2)), "another desired state is tried: %v", d.Nodes)
			g.Expect(c.hosts["a"].GPU.Status.Rollout.Failed).To(BeNil())
		})
	}
}

// TestNoNodeSelectsAConfigThatIsGone when it falls back: nothing keeps that of a last good state while no policy governs
// the node and NVIDIA's DRA driver serves it. One that only the copy has is written again first.
func TestNoNodeSelectsAConfigThatIsGone(t *testing.T) {
	for name, copied := range map[string]bool{"nowhere": false, "taken away again and again": true} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			c.setPolicy("research", timeSlicing(4))
			c.run(60)
			good := h.Labels[v1alpha1.LabelConfig]
			h.breaks(good)
			c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = timeSlicing(8) })
			for h.GPU.Status.Rollout.Failed == nil {
				c.steps(1)
			}
			kept := c.Configs
			for range 100 {
				if c.Configs, c.ConfigsCopy = maps.Clone(c.Configs), nil; copied {
					c.ConfigsCopy = kept
				}
				delete(c.Configs, good)
				c.reconcile()
				delete(c.Configs, good)
				c.tick(time.Second)
			}
			g.Expect(c.crashes).To(BeEmpty())
			g.Expect(h.Labels[v1alpha1.LabelConfig]).NotTo(Equal(good))
			if c.steps(200); copied {
				g.Expect(h.Labels[v1alpha1.LabelConfig]).To(Equal(good))
			} else {
				g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
			}
			g.Expect(c.crashes).To(BeEmpty())
		})
	}
}

// TestAChangeDoesNotFailByTheClusterPolicyOfAnother: while the operator stands back from a controller that keeps
// mig.strategy: single, NVIDIA's device plugin offers nothing on a node with MIG instances, whatever the layout.
func TestAChangeDoesNotFailByTheClusterPolicyOfAnother(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	h.broken = func(s cluster.Snapshot) bool { return !s.Plugin.Ready }
	for range 200 {
		c.reconcile()
		if c.Plugin.Ready && len(h.instances()) > 0 {
			c.Plugin.Ready, c.Plugin.Message = false, "field manager x keeps mig.strategy"
		}
		c.tick(time.Second)
	}
	g.Expect(c.Plugin.Ready).To(BeFalse())
	h.Labels[v1alpha1.LabelConfig] = h.GPU.Spec.ConfigName // as if the plugin had been configured until just now
	h.Annotations[v1alpha1.AnnotationSelected] = timing.Stamp(h.GPU.Spec.ConfigName, c.Now)
	d, _ := c.run(1200)
	hasState(g, d, node.Verifying)
	hasMessage(g, d, "field manager x keeps mig.strategy")
	g.Expect(h.GPU.Status.Rollout.Failed).To(BeNil())
	g.Expect(h.Taints).To(BeEmpty(), "it takes pods again all the same")

	c.Plugin.Ready, c.Plugin.Message, c.Plugin.Overruled = true, "", c.Now
	h.broken, h.plugin.running = nil, false
	c.settles(g, 60)
}

// TestAnotherMPSRootOfTheClusterPolicyIsNamed: NVIDIA's device plugin waits for daemons where nobody starts them.
func TestAnotherMPSRootOfTheClusterPolicyIsNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.breaks("")
	c.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy", MPSRoot: "/var/lib/mps"}
	c.setPolicy("research", mps(4))
	d, _ := c.run(400)
	isFailed(g, d)
	hasMessage(g, d, "ClusterPolicy cluster-policy has spec.devicePlugin.mps.root /var/lib/mps")
}

func TestTheFirstChangeThatFailsGoesBackToWhatWasFound(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.breaks("")
	c.setPolicy("research", mig(count("1g", 7)))
	d, _ := c.run(400)
	g.Expect(d.Actions).To(BeEmpty())
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonNotAdvertised)
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
	isOffered(g, h, gpusOnly(1))
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	g.Expect(h.Taints).To(BeEmpty())

	c.Policies = nil
	d, _ = c.run(60)
	g.Expect(d.Nodes).To(BeEmpty())
	isForgotten(g, h)
}

func TestANodeThatDoesNotBecomeIdleInTime(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.hold(h, "train", 1, gpu.WholeGPU)
	c.steps(5)
	g.Expect(h.Taints).NotTo(BeEmpty())
	c.tick(10 * time.Minute)
	c.steps(3)
	d := rollout.Decide(c.world())
	g.Expect(d.Actions).To(BeEmpty())
	g.Expect(h.Taints).To(BeEmpty(), "it takes pods again")
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonDrainTimedOut)
	g.Expect(one(d).Message).To(And(
		Equal("not idle within 10m0s, now pod user/train (GPU 1); tried again once the node is idle, or by " + retryA)))
	g.Expect(d.Policies["research"].Nodes.Failed).To(Equal(int32(1)))

	c.add("b", sim.A100)
	d, _ = c.run(60)
	g.Expect(d.Nodes[1].State).To(Equal(node.UpToDate), "one user halts no rollout: %v", d.Nodes)
	c.end(h, "train")
	d, _ = c.run(60)
	g.Expect(one(d).State).To(Equal(node.UpToDate), "it is idle at last")
	g.Expect(h.GPU.Status.Rollout.Failed).To(BeNil())

	slices.Reverse(h.GPU.Spec.Baseline.Devices) // as GPUs that came later
	c.hold(h, "train", 1, h.devices()[1].State.Instances[0].ID)
	c.Policies = nil
	c.run(900)
	g.Expect(h.GPU.Status.Rollout.Failed).NotTo(BeNil())
	c.end(h, "train")
	c.run(60)
	isForgotten(g, h)
}

// TestAnotherAttemptHasTheWholeTimeToApply: users held the GPUs until long after the agent was asked, so that it could
// do nothing. Once they are gone its time begins anew.
func TestAnotherAttemptHasTheWholeTimeToApply(t *testing.T) {
	for name, retry := range map[string]func(*site){
		"the node is idle at last": func(*site) {},
		"the policy is edited":     func(c *site) { c.Policies[0].Generation++ },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			c.setPolicy("research", mps(4))
			h.lags = true // the agent reports nobody who comes
			c.hold(h, "train", 0, gpu.WholeGPU)
			c.tick(time.Minute)
			for h.GPU.Spec.Devices == nil {
				c.steps(1)
			}
			h.lags = false
			d := c.during(20*time.Minute, 10*time.Second)
			isFailed(g, d)
			hasReason(g, d, v1alpha1.ReasonDrainTimedOut)
			c.end(h, "train")
			retry(c)
			d, states := c.run(200)
			isUpToDate(g, one(d))
			g.Expect(states["a"]).NotTo(ContainElement(node.Failed))
			g.Expect(h.GPU.Status.Rollout.Failed).To(BeNil())
		})
	}
}

func TestFailureThresholdLetsOthersGoOn(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	for _, node := range []string{"a", "b", "c"} {
		c.add(node, sim.A100)
	}
	c.hosts["a"].breaks("")
	c.setPolicy("research", timeSlicing(4), failures(2), unavailable("2"))
	d, _ := c.run(600)
	g.Expect(d.Policies["research"].Nodes.Failed).To(Equal(int32(1)))
	g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(2)), "%v", d.Nodes)
}

func TestOnlyBlockersAreEvicted(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(60)
	instances := h.devices()[0].State.Instances
	c.hold(h, "inside", 0, instances[0].ID)
	c.hold(h, "bystander", 0, instances[2].ID)
	c.tick(time.Minute)

	// One instance of the first GPU has to go: a free one does, and nobody is evicted.
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("2g", 2)), 2
	evicting(&c.Policies[0])
	c.settles(g, 60)
	g.Expect(c.evicted).To(BeEmpty())

	// Room for a large instance has to be made on both GPUs: one holder blocks the change, the other does not.
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("4g", 1), count("2g", 1)), 3
	c.settles(g, 60)
	g.Expect(c.evicted).To(Equal([]string{"inside"}))
}

func TestPodsThatWouldComeBackAreNotEvicted(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting)
	for _, name := range []string{"of-a-daemon-set", "of-the-kubelet", "going-already", "of-a-job"} {
		c.hold(h, name, 0, gpu.WholeGPU)
	}
	for i := range h.Pods {
		switch h.Pods[i].Name {
		case "of-a-daemon-set":
			h.Pods[i].Controller = "DaemonSet"
		case "of-the-kubelet":
			h.Pods[i].Mirror = true
		case "going-already":
			h.Pods[i].Terminating = true
		}
	}
	c.steps(3)
	g.Expect(c.evicted).To(Equal([]string{"of-a-job"}))
	d := rollout.Decide(c.world())
	g.Expect(d.Actions).To(BeEmpty())
	hasMessage(g, d, "; of 2 that stay, pod user/of-a-daemon-set is not evicted, since it would come back at once; end it")
}

func TestNeverWaitsWithoutATaint(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(neverEvicting)
	c.hold(h, "train", 0, gpu.WholeGPU)
	d, _ := c.run(5)
	g.Expect(h.Taints).To(BeEmpty())
	hasReason(g, d, v1alpha1.ReasonGPUInUse)
	c.end(h, "train")
	c.steps(1)
	g.Expect(h.Taints).NotTo(BeEmpty(), "idle now: nobody may come before it is done")
	c.hold(h, "quick", 0, gpu.WholeGPU)
	c.steps(2)
	g.Expect(h.Taints).To(BeEmpty(), "another controller was quicker")
	c.end(h, "quick")
	c.settles(g, 60)
}

// TestTimeInWhichAGPUWasInUseIsNoTimeOfTheAgent: a pod comes in the middle, and the policy evicts nobody.
func TestTimeInWhichAGPUWasInUseIsNoTimeOfTheAgent(t *testing.T) {
	for name, goes := range map[string]func(*site, *host){
		"the pod ends": func(c *site, h *host) { c.end(h, "quick") },
		"the pod ends, and the policy was deleted":  func(c *site, h *host) { c.Policies = nil; c.end(h, "quick") },
		"the pod ends, and the policy was edited":   func(c *site, h *host) { c.setSharing(mig(count("1g", 7))); c.end(h, "quick") },
		"the policy is deleted before the pod ends": func(c *site, h *host) { c.Policies = nil; c.during(time.Hour, time.Minute); c.end(h, "quick") },
		"the agent is lost before, and then returns": func(c *site, h *host) {
			h.AgentReady = false
			c.during(time.Hour, time.Minute)
			c.end(h, "quick")
			h.AgentReady = true
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(neverEvicting)
			for h.GPU.Spec.Devices == nil {
				c.reconcile()
				if h.GPU.Spec.Devices == nil {
					c.tick(time.Second)
				}
			}
			c.hold(h, "quick", 0, gpu.WholeGPU)
			h.report()
			h.lags = true
			d := c.during(time.Hour, 10*time.Second)
			hasReason(g, d, v1alpha1.ReasonGPUInUse)
			g.Expect(h.Taints).To(BeEmpty())
			h.lags = false
			goes(c, h)
			for range 300 {
				for _, n := range c.reconcile().Nodes {
					g.Expect(n.State).NotTo(Equal(node.Failed), n.Message)
				}
				c.tick(time.Second)
			}
			if len(c.Policies) > 0 {
				g.Expect(c.ready()).To(Equal(1))
			} else {
				isForgotten(g, h)
			}
			g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationInterrupted))
		})
	}
}

func TestAnAgentLostInTheMiddleIsWaitedFor(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.steps(2)
	c.reconcile() // the spec is set
	h.AgentReady = false
	d, _ := c.run(60)
	hasState(g, d, node.Unknown)
	g.Expect(h.Taints).NotTo(BeEmpty(), "the GPUs may be half-way")
	g.Expect(d.Policies["research"].Nodes.Changing).To(Equal(int32(1)))
	h.AgentReady = true
	c.settles(g, 60)
	g.Expect(h.Taints).To(BeEmpty())
}

func TestAPolicyEditedInEveryStateEndsInTheLastEdit(t *testing.T) {
	for n := range 12 {
		g := NewWithT(t)
		c, h := toMIG()
		c.steps(n)
		c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mps(4), 2
		c.steps(n)
		c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(2), 3
		c.steps(n)
		c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("1g", 7)), 4
		d, _ := c.run(100)
		g.Expect(one(d).State).To(Equal(node.UpToDate), "%d: %s", n, one(d).Message)
		isOffered(g, h, map[string]int64{"nvidia.com/mig-1g.5gb": 14})
		g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
	}
}

func TestAPolicyDeletedInEveryStateLeavesNothingBehind(t *testing.T) {
	for n := range 12 {
		g := NewWithT(t)
		c, h := toMIG()
		h.Labels[v1alpha1.LabelMIGManager] = "true"
		c.steps(n)
		c.Policies = nil
		d, _ := c.run(100)
		g.Expect(d.Nodes).To(BeEmpty(), "%d: %v", n, d.Nodes)
		isForgotten(g, h)
		g.Expect(h.Taints).To(BeEmpty())
		g.Expect(h.Annotations).To(BeEmpty())
		g.Expect(h.Labels).To(Equal(map[string]string{
			"kubernetes.io/hostname": "a", pluginLabel: "true", gfdLabel: "true", v1alpha1.LabelMIGManager: "true",
			v1alpha1.LabelRunsAgent: "true", mpsLabel: "false",
		}))
		isOffered(g, h, gpusOnly(2))
	}
}

func TestWhatAUserUndoesIsDoneAgain(t *testing.T) {
	for name, harm := range map[string]func(*site, *host){
		"the label of the key":        func(_ *site, h *host) { delete(h.Labels, v1alpha1.LabelConfig) },
		"the label to something else": func(_ *site, h *host) { h.Labels[v1alpha1.LabelConfig] = "mine" },
		"the ConfigMap":               func(c *site, _ *host) { c.Configs = nil },
		"mig-manager is let in":       func(_ *site, h *host) { h.Labels[v1alpha1.LabelMIGManager] = "true" },
		"the spec":                    func(_ *site, h *host) { h.GPU.Spec.Devices = nil; h.GPU.Generation++ },
		"a taint of ours by hand": func(_ *site, h *host) {
			h.Taints = append(h.Taints, taint())
		},
		"an instance is destroyed and made anew": func(_ *site, h *host) { h.destroy(1) },
		"a reboot, which no instance survives": func(_ *site, h *host) {
			h.hardware.Reboot()
			h.plugin.running = false
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			h.Labels[v1alpha1.LabelMIGManager] = "true"
			d, _ := c.run(60)
			isUpToDate(g, one(d))
			c.tick(time.Hour)
			harm(c, h)
			c.advertise(h)
			c.tick(time.Second)
			d, _ = c.run(60)
			isUpToDate(g, one(d))
			g.Expect(d.Actions).To(BeEmpty())
			isOffered(g, h, map[string]int64{"nvidia.com/mig-2g.10gb": 6})
			g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"))
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(c.Configs).To(HaveKey(h.Labels[v1alpha1.LabelConfig]))
			g.Expect(h.plugin.uuids).To(ConsistOf(h.instances()), "the plugin advertises the instances that are there")
		})
	}
}

func TestARestoreWaitsForUsersAsThePolicySaid(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(60)
	c.hold(h, "train", 0, h.devices()[0].State.Instances[0].ID)
	c.tick(time.Minute)
	c.Policies = nil
	c.steps(3)
	g.Expect(h.Taints).NotTo(BeEmpty())
	c.tick(10 * time.Minute)
	c.steps(3)
	d := rollout.Decide(c.world())
	g.Expect(changes(d.Actions)).To(BeEmpty())
	g.Expect(h.Taints).To(BeEmpty())
	hasReason(g, d, v1alpha1.ReasonDrainTimedOut)
	g.Expect(d.ConfigurePlugin).To(BeTrue())
	const who = "pod user/train (GPU 0, instance 2g.10gb at 0:2)"
	told := slices.Compact(slices.Clone(c.told))
	g.Expect(told).To(HaveExactElements(BeEmpty(), HavePrefix("GPUInUse: Waiting until"), HavePrefix("DrainTimedOut: Not idle"),
		HavePrefix("DrainTimedOut: Not idle")), "ready, while it drains, when its time is over, and what to do then")
	g.Expect(h.waits()).To(And(HavePrefix("DrainTimedOut: Not idle within 10m0s"), ContainSubstring(who)))
	c.end(h, "train")
	d, _ = c.run(60)
	g.Expect(h.waits()).To(BeEmpty())
	g.Expect(d.Nodes).To(BeEmpty())
	isOffered(g, h, gpusOnly(2))
}

func TestAChangeFailsWhoseOperandDoesNotEnd(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.steps(1)
	c.reconcile()
	stuck := slices.Clone(h.Pods)
	for range 20 {
		c.tick(time.Minute)
		h.Pods = slices.Clone(stuck)
		if h.Labels[pluginLabel] == "true" {
			break
		}
		c.reconcile()
	}
	d := rollout.Decide(c.world())
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonStoppingOperands)
	hasMessage(g, d, "waiting until NVIDIA's operands are gone: gpu-operator/nvidia-1")
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
}

func TestANodeThatIsSharedSoAlreadyIsTakenOverWithoutDisturbance(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(60)
	h.GPU.Spec, h.Annotations = v1alpha1.GPUNodeSpec{}, map[string]string{} // as if by hand
	h.Labels[v1alpha1.LabelMIGManager] = "true"
	instances := h.devices()[0].State.Instances
	c.hold(h, "train", 0, instances[0].ID)
	d, states := c.run(60)
	isUpToDate(g, one(d))
	g.Expect(states["a"]).NotTo(ContainElement(node.Draining))
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"))
	g.Expect(h.GPU.Spec.Baseline.Labels[v1alpha1.LabelMIGManager]).To(Equal("true"))
	g.Expect(h.devices()[0].State.Instances).To(Equal(instances))
}

func TestAnAgentThatIsSlowAfterARebootIsNoFailure(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(60)
	c.tick(time.Hour)
	h.hardware.Reboot()
	h.report()
	d := rollout.Decide(c.world())
	hasState(g, d, node.Applying)
}

func TestAClusterWithoutPoliciesIsLeftAlone(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.add("a", sim.A100)
	c.Plugin.Configs = map[string]string{"default-1": "version: v1"}
	d := rollout.Decide(c.world())
	g.Expect(changes(d.Actions)).To(BeEmpty())
	d.Actions = nil
	g.Expect(d).To(Equal(rollout.Decision{Policies: map[string]v1alpha1.GPUSharingPolicyStatus{}}))
}

// TestAControllerThatWasAwayRestartsThePluginOnceMore: the time for verifying is over, and it has not had the plugin restarted. That is tried once,
// and has its time.
func TestAControllerThatWasAwayRestartsThePluginOnceMore(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting)
	h.broken = func(cluster.Snapshot) bool { return true }
	c.run(30)
	g.Expect(h.devices()[0].State.MIG).To(BeTrue(), "the change has reached the GPUs")
	before := h.of(pluginLabel).UID
	c.tick(time.Hour)
	d := c.during(4*time.Minute, 10*time.Second)
	g.Expect(h.of(pluginLabel).UID).NotTo(Equal(before))
	hasState(g, d, node.Verifying)
	d = c.during(4*time.Minute, 10*time.Second)
	isFailed(g, d)
}

// TestARollbackThatNeedsIdleGPUsGivesTheNodeBackMeanwhile: it keeps nobody off for longer than a drain may take, says
// who blocks it, and goes on once nothing does.
func TestARollbackThatNeedsIdleGPUsGivesTheNodeBackMeanwhile(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting)
	c.run(60)
	good := h.GPU.Spec.ConfigName
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("3g", 2)), 2
	h.breaks(good)
	c.steps(8)
	g.Expect(h.Taints).To(BeEmpty(), "nothing is advertised, so nobody is kept off")
	c.hold(h, "quick", 0, h.devices()[0].State.Instances[0].ID)
	c.during(10*time.Minute, 30*time.Second)
	d, _ := c.run(60)
	g.Expect(d.Actions).To(BeEmpty())
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(c.evicted).To(BeEmpty())
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonNotAdvertised)
	g.Expect(one(d).Message).To(And(ContainSubstring("not advertised within 5m0s"),
		ContainSubstring("waiting until nobody uses what must be changed: pod user/quick (GPU 0, instance 3g.20gb at 0:4)")))
	c.end(h, "quick")
	d, _ = c.run(60)
	g.Expect(h.Labels[v1alpha1.LabelConfig]).To(Equal(good), one(d).Message)
	g.Expect(h.Taints).To(BeEmpty())
	isOffered(g, h, map[string]int64{"nvidia.com/mig-2g.10gb": 6})
}

// TestARollbackThatDrainsInVainLetsGo: the taint of the change that failed is not kept for ever.
func TestARollbackThatDrainsInVainLetsGo(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(60)
	good := h.GPU.Spec.ConfigName
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("3g", 2)), 2
	for rollout.Decide(c.world()).Nodes[0].State != node.Finishing {
		c.steps(1)
	}
	g.Expect(h.Taints).NotTo(BeEmpty())
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: "tolerates", UID: "tolerates", GPU: true})
	c.hold(h, "tolerates", 0, h.devices()[0].State.Instances[0].ID)
	h.Allocatable["nvidia.com/mig-3g.20gb"] = 3 // not what it must be
	c.Now = c.Now.Add(6 * time.Minute)
	c.reconcile()
	g.Expect(h.GPU.Status.Rollout.Failed).NotTo(BeNil())
	c.reconcile()
	g.Expect(h.Taints).NotTo(BeEmpty(), "it drains for as long as the policy allows")
	c.Now = c.Now.Add(10 * time.Minute)
	c.reconcile()
	d := rollout.Decide(c.world())
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(changes(d.Actions)).To(BeEmpty())
	hasMessage(g, d, "pod user/tolerates")
	c.end(h, "tolerates")
	d, _ = c.run(60)
	g.Expect(h.Labels[v1alpha1.LabelConfig]).To(Equal(good), one(d).Message)
}

// TestAChangeThatHasNotBegunIsNotStoppingOperands: to keep NVIDIA's mig-manager off the node is its first step, and it is
// held back.
func TestAChangeThatHasNotBegunIsNotStoppingOperands(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.H100)
	h.partitionedByHand()
	h.Labels[v1alpha1.LabelMIGManager] = "true"
	c.setPolicy("research", mig(count("2g", 3)), paused)
	d := c.reconcile()
	hasState(g, d, node.PendingNonDisruptive)
	hasMessage(g, d, "mig-manager")
	g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelMIGManager, "true"))
}

// TestAReleaseThatFailsIsTriedAgainInAnHour: meanwhile the node is neither tainted again nor are NVIDIA's operands
// stopped again, and nobody is evicted for another attempt.
func TestAReleaseThatFailsIsTriedAgainInAnHour(t *testing.T) {
	for name, test := range map[string]struct {
		strike func(*host)
		after  time.Duration // the agent is given up
	}{
		"the agent lags": {func(h *host) { h.lags = true }, timing.ApplyTimeout},
		"NVML refuses a step": {func(h *host) {
			h.hardware.Fail = func(op sim.Op, _ string) error {
				if op == sim.OpObserve {
					return nil
				}
				return gpu.ErrBusy
			}
		}, timing.ApplyTimeout},
		"the agent is stalled": {func(h *host) { h.lags = true; h.stalls() }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting)
			c.run(60)
			c.Policies = nil
			for h.GPU.Spec.PolicyName != "" {
				c.reconcile()
				if h.GPU.Spec.PolicyName == "" {
					test.strike(h)
				}
				c.tick(time.Second)
			}
			attempts := func(of time.Duration) (taints int) {
				for range of / (10 * time.Second) {
					for _, a := range c.reconcile().Actions {
						if _, is := a.(action.Taint); is {
							taints++
						}
					}
					c.tick(10 * time.Second)
				}
				return taints
			}
			g.Expect(attempts(50 * time.Minute)).To(BeZero())
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
			g.Expect(h.GPU.Spec.Devices).To(BeEmpty(), "the node takes pods, whose GPUs an agent must not find idle between two containers")
			g.Expect(rollout.Decide(c.world()).After).To(BeNumerically("~", 10*time.Minute+test.after, time.Minute))
			again := time.Date(0, 1, 1, 9, 0, 0, 0, time.UTC).Add(test.after)
			g.Expect(h.waits()).To(ContainSubstring("; the operator tries again at " + again.Format("15:04")))
			g.Expect(attempts(time.Hour)).To(Equal(1))
			c.hold(h, "train", 0, gpu.WholeGPU)
			h.lags, h.hardware.Fail = false, nil
			h.report()
			g.Expect(attempts(3 * time.Hour)).To(BeZero())
			g.Expect(c.evicted).To(BeEmpty())
			g.Expect(h.waits()).NotTo(BeEmpty())
			c.end(h, "train")
			c.run(60)
			isForgotten(g, h)
			g.Expect(h.waits()).To(BeEmpty())
		})
	}
}

// stalls lets the agent report that only another spec helps.
func (h *host) stalls() {
	h.GPU.Status.Conditions = append(h.GPU.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonLayoutDoesNotFit, Message: "it does not fit",
		ObservedGeneration: h.GPU.Generation,
	})
}

// TestAReleaseEndsOnlyWithAnAnswerOfTheAgent: it ended in the middle of a change, so its last report says that the GPUs
// are restored.
func TestAReleaseEndsOnlyWithAnAnswerOfTheAgent(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.byHand(0, "2g.10gb")
	c.tick(time.Second)
	c.setPolicy("research", mig(count("1g", 7)))
	for h.GPU.Spec.Devices == nil {
		c.reconcile()
		if h.GPU.Spec.Devices == nil {
			c.tick(time.Second)
		}
	}
	h.lags = true
	d := h.devices()[0]
	g.Expect(h.hardware.DestroyInstance(t.Context(), d.UUID, d.State.Instances[0].ID)).To(Succeed())
	c.Policies = nil
	c.steps(60)
	g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil(), "nobody knows whether the node is back")
	h.lags = false
	c.run(100)
	isForgotten(g, h)
	g.Expect(h.devices()[0].State.Instances).To(HaveLen(1))
	g.Expect(h.devices()[0].State.Instances[0].Profile).To(Equal("2g.10gb"))
}

// TestOfWhatTheAgentSaysTheEndIsKept: it says what came of it, in status.pending of the policy too.
func TestOfWhatTheAgentSaysTheEndIsKept(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.steps(2)
	c.reconcile()
	const cause = "end the pods that use MPS: pod 6a1f3c9e-0f0c-4b57-9d3e-1d2c3b4a5f60 listens there"
	h.GPU.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonMPSDaemonFailed, ObservedGeneration: h.GPU.Generation,
		Message: "the MPS pod of this node did not start the MPS control daemon: " + strings.Repeat("starting it failed: ", 6) + cause + "; it is tried again",
	}}
	said := func() string { return c.reconcile().Policies["research"].Pending[0].Message }
	g.Expect(said()).To(And(HavePrefix("The agent is changing the GPUs; the agent says MPSDaemonFailed: …"), HaveSuffix(cause)))
	c.Now = c.Now.Add(15 * time.Minute)
	g.Expect(said()).To(And(HavePrefix("The GPUs did not match the desired state within 15m0s; the agent says MPSDaemonFailed: …"), HaveSuffix(cause[len("end the pods "):])))
}

// TestAGPUThatFallsBackToItsBaselineIsOpened: NVIDIA's MPS daemon served it when it was found, and the last good state,
// from when the GPU was away, does not ask for that daemon.
func TestAGPUThatFallsBackToItsBaselineIsOpened(t *testing.T) {
	g := NewWithT(t)
	c, h := servedByNVIDIA(g, sim.A100, sim.A100)
	settled(t, c, v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive})
	away := c.loseGPU(h, 1)
	settled(t, c, timeSlicing(2))
	h.breaks(h.Labels[v1alpha1.LabelConfig])
	h.hardware.Update(func(n *sim.Node) { n.GPUs = append(n.GPUs, away) })
	h.plugin.running = false
	c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mps(10) })
	c.tick(time.Second)
	d := c.during(2*time.Hour, 5*time.Second)
	isFailed(g, d)
	isOffered(g, h, gpusOnly(4))
	g.Expect(h.theirs).To(BeNil())
	g.Expect(h.devices()[1].State.ComputeMode).To(Equal(gpu.ComputeDefault))
}
