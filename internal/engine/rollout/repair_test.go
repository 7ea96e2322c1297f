// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const (
	dcgmLabel   = "nvidia.com/gpu.deploy.dcgm"
	stateLabel  = "nvidia.com/mig.config.state"
	leftStopped = "paused-for-mig-change"
)

// migManager runs NVIDIA's mig-manager on a node: a pod of its own, because the label is another controller's here.
func (c *site) migManager(h *host, state string) {
	h.Labels[v1alpha1.LabelMIGManager] = "true"
	h.Labels["nvidia.com/mig.config"], h.Labels[stateLabel] = "all-1g.5gb", state
	c.settle(h)
	c.held(h)
}

// sliced is a cluster of one node that is time-sliced, with nothing left to do.
func sliced() (*site, *host) {
	c, h := slicing()
	c.run(60)
	return c, h
}

// of is a pod of NVIDIA's on a node, by the deploy label that starts it.
func (h *host) of(label string) *cluster.Pod {
	for i := range h.Pods {
		if playedBy(label)(h.Pods[i]) {
			return &h.Pods[i]
		}
	}
	panic("no pod with " + label)
}

// TestWhatIsLeftHalfDone brings a node into what was left half-done, and asks what is reported and repaired: before its
// deadline nothing, then the reason.
func TestWhatIsLeftHalfDone(t *testing.T) {
	for name, c := range map[string]struct {
		situation func() *site
		state     node.State
		reason    string
		message   string   // a part of it
		actions   []string // past the deadline
		after     time.Duration
	}{
		"operands that mig-manager left stopped": {
			situation: func() *site {
				c, h := sliced()
				h.Labels[dcgmLabel], h.Labels[stateLabel] = leftStopped, "failed"
				c.held(h)
				return c
			},
			state: node.UpToDate, reason: v1alpha1.ReasonOperandsLeftStopped,
			message: "left stopped since 08:00:" /* of the clock of the tests */, after: 15 * time.Minute,
			actions: []string{"patch node a (starting NVIDIA's operands again, which its mig-manager left stopped): " + dcgmLabel + "=true"},
		},
		"operands that we stopped for an agent that is gone": {
			situation: func() *site { c, h := toMIG(); c.steps(3); h.AgentReady = false; return c },
			state:     node.Unknown, reason: v1alpha1.ReasonOperandsLeftStopped,
			message: "for a change that the agent has not ended", after: 14*time.Minute + 58*time.Second,
			actions: []string{
				"remove our taint from node a",
				"patch node a (starting NVIDIA's operands again: the agent does not come back): " + pluginLabel + "=true " +
					gfdLabel + "=true gpusharing.io/stopped- gpusharing.io/timed-out=ApplyTimedOut.62554f97.0@1800000901",
			},
		},
		"a mig-manager that does not end": {
			situation: func() *site { c, h := sliced(); c.migManager(h, "pending"); return c },
			state:     node.UpToDate, reason: v1alpha1.ReasonMIGManagerStuck,
			message: "not ended since 08:00:05 UTC: NVIDIA's mig-manager is changing the node (nvidia.com/mig.config=all-1g.5gb, nvidia.com/mig.config.state=pending)", after: 15 * time.Minute,
		},
		"a mig-manager that waits for operands": {
			situation: func() *site {
				c, h := sliced()
				h.Labels[dcgmLabel] = leftStopped
				c.migManager(h, "pending")
				return c
			},
			state: node.UpToDate, reason: v1alpha1.ReasonMIGManagerStuck, message: "not ended since 08:00:05 UTC: ", after: 15 * time.Minute,
		},
		"a pod of NVIDIA's that does not end": {
			situation: func() *site {
				c, h := toMIG()
				c.steps(1)
				c.reconcile()
				p := h.of(pluginLabel)
				p.Terminating, p.EndsBy = true, c.Now
				return c
			},
			state: node.StoppingOperands, reason: v1alpha1.ReasonOperandsNotEnding,
			message: "were deleted and do not end: gpu-operator/nvidia-1 (since 08:00:01 UTC)", after: 2 * time.Minute,
		},
		"pods that read another ConfigMap": {
			situation: func() *site {
				c, h := slicing()
				c.steps(1)
				for i := range h.Pods {
					h.Pods[i].MountsConfig = false
				}
				return c
			},
			state: node.Selecting, reason: v1alpha1.ReasonDevicePluginOutdated, message: "another ConfigMap than the ClusterPolicy names",
			after: 10*time.Minute - time.Second,
			actions: []string{
				"delete pod gpu-operator/nvidia-1: it still reads another ConfigMap than the operator's",
				"delete pod gpu-operator/nvidia-2: it still reads another ConfigMap than the operator's",
			},
		},
		"a device plugin that is not there": {
			situation: func() *site {
				c, h := slicing()
				c.steps(3)
				c.reconcile()
				h.Pods = h.Pods[1:]
				return c
			},
			state: node.Verifying, reason: v1alpha1.ReasonDevicePluginFailing,
			message: "no pod of NVIDIA's device plugin is on the node; look at its DaemonSet", after: time.Minute,
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := c.situation()
			world := cl.world()
			before := rollout.Decide(world)
			g.Expect(before.Nodes).To(HaveLen(1))
			g.Expect(before.Nodes[0].Reason).NotTo(Equal(c.reason), before.Nodes[0].Message)
			if before.After != c.after {
				g.Expect(cl.wakes()).To(Equal(c.after), "the deadline wakes")
			}

			world.Now = world.Now.Add(c.after)
			d := rollout.Decide(world)
			g.Expect(one(d).State).To(Equal(c.state), one(d).Message)
			g.Expect(one(d).Reason).To(Equal(c.reason), one(d).Message)
			hasMessage(g, d, c.message)
			g.Expect(said(d.Actions)).To(ConsistOf(c.actions))
			pending := d.Policies["research"].Pending
			g.Expect(pending).To(HaveLen(1))
			g.Expect(pending[0].Reason).To(Equal(c.reason))
			g.Expect(pending[0].Message).To(Equal(format.Message(one(d).Message)))
		})
	}
}

func TestAConfigManagerThatKeepsEndingIsNamed(t *testing.T) {
	trouble := func(c *site, h *host) {
		h.of(pluginLabel).Troubles = []cluster.Trouble{{Container: "config-manager", Why: "keeps ending with exit code 1", Ended: c.Now}}
	}
	t.Run("though the key is there, which its pod may not see", func(t *testing.T) {
		g := NewWithT(t)
		c, h := sliced()
		c.tick(11 * time.Minute)
		trouble(c, h)
		d := rollout.Decide(c.world())
		hasReason(g, d, v1alpha1.ReasonConfigManagerFailing)
		hasMessage(g, d, "container config-manager of pod gpu-operator/nvidia-1 keeps ending with exit code 1")
		g.Expect(said(d.Actions)).To(ConsistOf("delete pod gpu-operator/nvidia-1: its config-manager keeps ending"))
		c.tick(6 * time.Minute)
		g.Expect(rollout.Decide(c.world()).Nodes[0].Reason).To(Equal(v1alpha1.ReasonReady), "it runs again")
	})
	t.Run("a pod that has started lately is left alone", func(t *testing.T) {
		g := NewWithT(t)
		c, h := sliced()
		trouble(c, h)
		d := rollout.Decide(c.world())
		hasReason(g, d, v1alpha1.ReasonConfigManagerFailing)
		g.Expect(changes(d.Actions)).To(BeEmpty())
	})
	t.Run("since the key is missing, on a node that goes back", func(t *testing.T) {
		g := NewWithT(t)
		c, h := withGPUs(sim.A100)
		h.Labels[v1alpha1.LabelConfig] = "of-the-user"
		c.setPolicy("research", timeSlicing(4))
		h.breaks("")
		c.run(400)
		trouble(c, h)
		d := rollout.Decide(c.world())
		g.Expect(one(d).Message).To(ContainSubstring(
			"the node selects the key of-the-user (nvidia.com/device-plugin.config), which the ConfigMap that the pod mounts does not hold"))
	})
}

func TestAChangeWaitsForAMIGManagerAtWork(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.migManager(h, "pending")
	d := rollout.Decide(c.world())
	hasReason(g, d, v1alpha1.ReasonMIGManagerBusy)
	g.Expect(h.Taints).To(BeEmpty())
	h.Labels[stateLabel] = "success"
	c.held(h)
	c.settles(g, 60)
}

func TestAStopOfTheDriversManagerIsLeftAlone(t *testing.T) {
	g := NewWithT(t)
	c, h := sliced()
	h.Labels[dcgmLabel] = "paused-for-driver-upgrade"
	c.held(h)
	c.Now = c.Now.Add(time.Hour)
	g.Expect(rollout.Decide(c.world()).Actions).To(BeEmpty())
}

// TestALostComputeModeIsTold: without nvidia-persistenced the driver forgets it when the last program closes the GPU.
func TestALostComputeModeIsTold(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	settled(t, c, mps(4))
	c.hold(h, "client", 0, gpu.WholeGPU)
	h.hardware.Update(func(n *sim.Node) { n.GPUs[0].ComputeMode = gpu.ComputeDefault })
	h.report()
	d := rollout.Decide(c.world())
	isUpToDate(g, one(d))
	hasReason(g, d, v1alpha1.ReasonComputeModeLost)
	hasMessage(g, d, "GPU 0: in the default compute mode")
	g.Expect(changes(d.Actions)).To(BeEmpty(), "nobody is driven off a node for that")
	c.end(h, "client")
	c.tick(time.Second)
	g.Expect(rollout.Decide(c.world()).Nodes[0].Reason).To(Equal(v1alpha1.ReasonReady))
}

func TestAComputeModeThatAUserLeftEvictsNoPod(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	evicting(&c.Policies[0])
	c.run(60)
	c.hold(h, "train", 1, gpu.WholeGPU)
	h.hardware.Update(func(n *sim.Node) { n.GPUs[1].ComputeMode = gpu.ComputeExclusiveProcess })
	h.report()
	d := rollout.Decide(c.world())
	isUpToDate(g, one(d))
	hasReason(g, d, v1alpha1.ReasonComputeModeLeft)
	hasMessage(g, d, "GPU 1 (EXCLUSIVE_PROCESS): not in the default compute mode")
	hasMessage(g, d, "now pod user/train (GPU 1)")
	g.Expect(changes(d.Actions)).To(BeEmpty())
	c.end(h, "train")
	c.tick(time.Second)
	d = rollout.Decide(c.world())
	hasReason(g, d, v1alpha1.ReasonReady)
	g.Expect(h.devices()[1].State.ComputeMode).To(Equal(gpu.ComputeDefault), "the agent has set it back")
}
