// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func retaining(p *v1alpha1.GPUSharingPolicy) { p.Spec.ReleasePolicy = v1alpha1.ReleasePolicyRetain }

// observed is the generation that the status of the first policy is about.
func (c *site) observed() int64 {
	accepted, _ := condition.Find(c.Policies[0].Status.Conditions, v1alpha1.ConditionAccepted)
	return accepted.ObservedGeneration
}

// TestRetainIsObservedOnceEveryNodeHasIt, whatever keeps a node from its change.
func TestRetainIsObservedOnceEveryNodeHasIt(t *testing.T) {
	for name, hinders := range map[string]func(*site, *host){
		"nothing":                   func(*site, *host) {},
		"the agent does not run":    func(_ *site, h *host) { h.AgentReady = false },
		"the rollout is paused":     func(c *site, _ *host) { c.edit(paused) },
		"the node has opted out":    func(_ *site, h *host) { h.Labels[optOutLabel] = "false" },
		"the device plugin is gone": func(c *site, _ *host) { c.Plugin.Reason = v1alpha1.ReasonNoDevicePlugin },
		"instances have to change": func(c *site, _ *host) {
			c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g", 7)) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			c.run(200)
			hinders(c, h)
			c.edit(retaining)
			c.reconcile()
			g.Expect(c.observed()).To(BeNumerically("<", c.Policies[0].Generation), "the nodes do not have it yet")
			c.steps(1)
			g.Expect(c.observed()).To(Equal(c.Policies[0].Generation))
			h.AgentReady, c.Plugin.Reason = true, ""
			delete(h.Labels, optOutLabel)
			c.Policies = nil
			c.run(300)
			g.Expect(h.devices()[0].State.MIG).To(BeTrue())
			g.Expect(rollout.Decide(c.world()).Actions).To(BeEmpty())
		})
	}
}

// TestANodeThatCannotBeRestoredReportsWhy: without NVIDIA's device plugin nothing can be restored, and without a policy
// there is no status that could report that.
func TestANodeThatCannotBeRestoredReportsWhy(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(60)
	h := c.hosts["n0"]
	c.Policies = nil
	c.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonNoDevicePlugin, Message: "there is no ClusterPolicy in this cluster"}
	d, _ := c.run(60)
	g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())
	g.Expect(h.waits()).To(Equal("NoDevicePlugin: There is no ClusterPolicy in this cluster"))
	g.Expect(d.Nodes).To(HaveLen(1))
	g.Expect(one(d).State).NotTo(Equal(node.UpToDate))

	c.Plugin = cluster.DevicePlugin{Ready: true, ClusterPolicy: true, NodeFeatures: true}
	c.run(60)
	isForgotten(g, h)
	g.Expect(h.waits()).To(BeEmpty())
}

// TestANodeUnderMaintenanceReportsWhyItIsNotRestored: NVIDIA's upgrade of the driver may wait for ever for another
// node.
func TestANodeUnderMaintenanceReportsWhyItIsNotRestored(t *testing.T) {
	const state = "nvidia.com/gpu-driver-upgrade-state"
	for name, begins := range map[string]int{"before anything is restored": 0, "when the agent was asked": 1, "when all but the record is restored": 2} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(1, timeSlicing(4))
			c.run(60)
			h := c.hosts["n0"]
			c.Policies = nil
			for range begins {
				c.reconcile()
				c.tick(time.Second)
			}
			g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())
			h.Labels[state] = "upgrade-required"
			c.version["n0"]++
			c.run(60)
			g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())
			g.Expect(h.waits()).To(HavePrefix("DriverUpgrade: Waiting for a driver upgrade (" + state + "=upgrade-required)"))

			delete(h.Labels, state)
			c.version["n0"]++
			c.run(60)
			isForgotten(g, h)
			g.Expect(h.waits()).To(BeEmpty())
		})
	}
}

// TestANodeWhoseReleaseFailsIsNotInOneState: it is tried again. So what waits for it must not ask for a state.
func TestANodeWhoseReleaseFailsIsNotInOneState(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(200)
	c.Policies, c.hosts["n0"].lags = nil, true
	var last node.State
	since, longest := c.Now, time.Duration(0)
	for end := c.Now.Add(5 * time.Hour); c.Now.Before(end); c.tick(10 * time.Second) {
		d := c.reconcile()
		g.Expect(d.Nodes).To(HaveLen(1))
		g.Expect(one(d).State).NotTo(Equal(node.UpToDate))
		if one(d).State != last {
			last, since = one(d).State, c.Now
		}
		longest = max(longest, c.Now.Sub(since))
	}
	g.Expect(longest).To(BeNumerically("<=", 2*time.Hour), "an hour, then two")
}

func (h *host) stampedAhead(by time.Duration) {
	ahead := h.GPU.CreationTimestamp.Add(by)
	h.GPU.Spec.ChangeTime = metav1.NewTime(ahead)
	h.Annotations[v1alpha1.AnnotationSelected] = timing.Stamp(h.Labels[v1alpha1.LabelConfig], ahead)
}

// TestAGPUNodeThatWasMadeAnewWaitsForItsPolicy: the operator's definitions are installed again after they were deleted
// with all objects, or a backup is restored, and the policies follow minutes later.
func TestAGPUNodeThatWasMadeAnewWaitsForItsPolicy(t *testing.T) {
	for name, lost := range map[string]func(*host){
		"without a spec":        func(h *host) { h.GPU.Spec = v1alpha1.GPUNodeSpec{} },
		"with that of a backup": func(*host) {},
		"with that of a backup, stamped by a clock that was ahead":          func(h *host) { h.stampedAhead(timing.PoliciesReturn / 2) },
		"with that of a backup, stamped by a clock that was a little ahead": func(h *host) { h.stampedAhead(5 * time.Second) },
		"and a Node's record that another wrote":                            func(h *host) { h.Annotations[v1alpha1.AnnotationSelected] = "garbage" },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			c.run(90)
			c.tick(time.Hour)
			selected, policies := h.Labels[v1alpha1.LabelConfig], c.Policies
			stands := func() bool {
				return h.Labels[v1alpha1.LabelConfig] == selected && h.Labels[pluginLabel] == "true" && len(h.Taints) == 0 && h.devices()[0].State.MIG
			}
			c.Policies = nil
			anew := func() {
				spec := h.GPU.Spec
				c.makeGPUNode(h)
				h.restoreGPUNode(v1alpha1.GPUNode{Spec: spec})
				lost(h)
			}
			anew()
			for ends := c.Now.Add(timing.PoliciesReturn - time.Minute); c.Now.Before(ends); c.tick(10 * time.Second) {
				c.sleeps.decided = false // another node wakes it
				c.reconcile()
				g.Expect(stands()).To(BeTrue(), "after %s", c.Now.Sub(h.GPU.CreationTimestamp.Time))
			}
			g.Expect(h.waits()).To(ContainSubstring("made anew"))
			c.Policies = policies
			for range 90 {
				c.reconcile()
				c.tick(10 * time.Second)
				g.Expect(stands()).To(BeTrue(), "under its policy again")
			}
			c.Policies = nil
			c.run(90)
			g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig), "a policy that is deleted later releases it at once")

			c.Policies = policies
			c.run(90)
			c.tick(time.Hour)
			c.Policies = nil
			anew()
			c.tick(timing.PoliciesReturn)
			c.run(90)
			g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig), "none has come back")
			isForgotten(g, h)
		})
	}
}

// TestAGPUNodeThatWasMadeAnewWaitsForItsFormerPolicy where another comes back first, which selects its node too: no pod is evicted for that.
func TestAGPUNodeThatWasMadeAnewWaitsForItsFormerPolicy(t *testing.T) {
	for name, backup := range map[string]bool{"made anew": false, "of a backup": true} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting)
			c.Policies[0].Spec.Priority = 10
			c.Policies = append(c.Policies, policyOf("base", mig(count("3g", 2)), evicting))
			c.run(200)
			c.hold(h, "train", 0, h.devices()[0].State.Instances[0].ID)
			c.tick(time.Hour)
			was, policies, instances := h.GPU, c.Policies, h.instances()
			gone := func() {
				c.makeGPUNode(h)
				if h.report(); backup {
					h.restoreGPUNode(was)
				}
				c.Policies = nil
				c.steps(10)
				c.Policies = policies[1:]
			}
			gone()
			c.during(timing.PoliciesReturn/2, 5*time.Second)
			g.Expect(h.waits()).To(HavePrefix("NoPolicy: Waiting for policy research"))
			c.Policies = policies
			c.run(200)
			g.Expect(c.evicted).To(BeEmpty())
			g.Expect(h.instances()).To(Equal(instances))
			isUpToDate(g, c.reconcile().Nodes[0])

			gone()
			c.during(timing.PoliciesReturn, 5*time.Second)
			c.run(200)
			g.Expect(c.evicted).To(Equal([]string{"train"}), "it has not come back")
			isUpToDate(g, c.reconcile().Nodes[0])
			g.Expect(h.GPU.Spec.PolicyName).To(Equal("base"))
		})
	}
}

// TestAYoungGPUNodeIsNotCalledAnewForAClock that was ahead: what the controller wrote lies in the future now (782664).
func TestAYoungGPUNodeIsNotCalledAnewForAClock(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	h.GPU.CreationTimestamp, c.ahead, h.lags = metav1.NewTime(c.Now), 10*time.Minute, true
	c.during(2*time.Minute, time.Second)
	g.Expect(h.GPU.Spec.Devices).NotTo(BeEmpty())
	g.Expect(h.waits()).To(HavePrefix(v1alpha1.ReasonApplying))
	c.ahead, c.Policies = 0, nil
	g.Expect(c.reconcile().Nodes[0].Message).NotTo(ContainSubstring("made anew"))
}

// TestANodeThatSelectedAConfigIsNotCalledAnewForAClock that was ahead before, also where nothing was said of it yet (807965).
func TestANodeThatSelectedAConfigIsNotCalledAnewForAClock(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	h.GPU.CreationTimestamp, c.ahead = metav1.NewTime(c.Now), time.Hour
	for h.GPU.Spec.ChangeTime.IsZero() {
		c.tick(time.Second)
		c.reconcile()
	}
	for c.ahead = 0; h.Annotations[v1alpha1.AnnotationSelected] == ""; c.reconcile() {
		c.tick(time.Second)
	}
	h.setReported(v1alpha1.GPUNodeStatus{Conditions: []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionUnknown, Reason: v1alpha1.ReasonAwaitingReport}}})
	c.Policies = nil
	g.Expect(c.reconcile().Nodes[0].Message).NotTo(ContainSubstring("made anew"))
}

// TestAPolicyThatFailedBeforeItAskedForAnythingIsReleasedAtOnce: the GPUNode of a new machine is as young as one that was
// made anew, and has a baseline, but nothing was done to the node under another one.
func TestAPolicyThatFailedBeforeItAskedForAnythingIsReleasedAtOnce(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.nfd.denies = true
	h := c.add("a", sim.A100)
	h.GPU.CreationTimestamp = metav1.NewTime(c.Now)
	c.tick(time.Second)
	c.setPolicy("research", mps(4))
	d, _ := c.run(60)
	hasReason(g, d, v1alpha1.ReasonNodeFeatureIgnored)
	g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())

	c.Policies = nil
	d, _ = c.run(30)
	g.Expect(c.Now.Sub(h.GPU.CreationTimestamp.Time)).To(BeNumerically("<", timing.PoliciesReturn))
	g.Expect(d.Nodes).To(BeEmpty())
	g.Expect(d.ConfigurePlugin).To(BeFalse(), "the ClusterPolicy is restored")
	isForgotten(g, h)
}

// retryA is what a user runs so that node a is tried again.
const retryA = "kubectl annotate gpunode a --overwrite gpusharing.io/retry=$(date +%s)"

// TestAFailedNodeIsTriedAgain when something changed that a user did for that, and never by itself.
func TestAFailedNodeIsTriedAgain(t *testing.T) {
	for name, again := range map[string]func(*site, *host){
		"when any field of the policy is edited": func(c *site, _ *host) {
			c.Policies[0].Spec.Rollout.Drain.TimeoutSeconds = 900
			c.Policies[0].Generation++
		},
		"when the policy is created anew": func(c *site, _ *host) { c.Policies[0].UID = "another" },
		"when the GPUNode is annotated":   func(_ *site, h *host) { h.annotate(v1alpha1.AnnotationRetry, "1") },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := slicing()
			h.breaks("")
			c.run(600)
			h.broken = nil
			d := c.during(2*time.Hour, time.Minute)
			g.Expect(one(d).State).To(Equal(node.Failed), "not by itself")
			g.Expect(one(d).Message).To(HaveSuffix("restart the kubelet; rolled back; retry by gpusharing.io/retry"))
			again(c, h)
			c.settles(g, 60)
			g.Expect(h.GPU.Status.Rollout.Failed).To(BeNil())
		})
	}
}

// TestANodeThatFailsAgainIsTriedOnce for each change.
func TestANodeThatFailsAgainIsTriedOnce(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	h.breaks("")
	c.run(600)
	h.annotate(v1alpha1.AnnotationRetry, "1")
	d, states := c.run(600)
	g.Expect(states["a"]).To(ContainElement(node.Verifying))
	isFailed(g, d)
	clear(c.writes)
	c.during(2*time.Hour, time.Minute)
	g.Expect(c.writes).To(BeEmpty())
}

// TestAnotherAttemptHasItsOwnTimeToAdvertise: a rollout that was paused before it rolled a failed change back still
// selects the config, for longer than a node may take to advertise it.
func TestAnotherAttemptHasItsOwnTimeToAdvertise(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	h.breaks("")
	for h.Labels[v1alpha1.LabelConfig] == "" {
		c.steps(1)
	}
	c.Policies[0].Spec.Rollout.Paused, c.Policies[0].Generation = true, 2
	d := c.during(20*time.Minute, 10*time.Second)
	isFailed(g, d)
	g.Expect(h.Labels[v1alpha1.LabelConfig]).NotTo(BeEmpty(), "it is not rolled back")

	c.Policies[0].Spec.Rollout.Paused, c.Policies[0].Generation = false, 3
	d = c.during(time.Minute, time.Second)
	hasState(g, d, node.Verifying)
	h.broken = nil
	isUpToDate(g, c.during(5*time.Minute, time.Second).Nodes[0])
	g.Expect(h.GPU.Status.Rollout.Failed).To(BeNil())
}

// TestAPolicyThatIsCreatedAgainHasItsOwnTimeToBeOffered: its config was selected long before, and the GPUNode of a backup
// does not say that the node had reached it. A program of NVIDIA's that fails meanwhile costs no instances.
func TestAPolicyThatIsCreatedAgainHasItsOwnTimeToBeOffered(t *testing.T) {
	for name, setUp := range map[string]func() (*site, *host){
		"by the device plugin": func() (*site, *host) { return toMIG() },
		"by the DRA driver":    func() (*site, *host) { return onDRA(mig(count("1g", 7))) },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := setUp()
			c.run(240)
			c.tick(time.Hour)
			again, spec, instances := c.Policies, h.GPU.Spec, h.instances()
			g.Expect(instances).NotTo(BeEmpty())
			c.Policies = nil
			c.makeGPUNode(h)
			h.GPU.Spec = spec
			h.broken, h.driver.broken = func(cluster.Snapshot) bool { return true }, true
			h.Published, h.plugin.running = nil, false
			c.during(timing.PoliciesReturn-time.Minute, 10*time.Second)
			again[0].UID, again[0].CreationTimestamp = "again", metav1.NewTime(c.Now)
			c.Policies = again
			d := c.during(timing.VerifyTimeout-time.Minute, 10*time.Second)
			hasState(g, d, node.Verifying)
			h.broken, h.driver.broken, h.driver.uid, h.plugin.running = nil, false, "", false
			isUpToDate(g, c.during(time.Minute, time.Second).Nodes[0])
			g.Expect(h.instances()).To(Equal(instances))
		})
	}
}
