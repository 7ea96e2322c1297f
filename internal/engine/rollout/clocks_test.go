// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAWrongClockOfANodeKeepsNoNodeFromBeingReady: its kubelet says by that clock since when a pod of NVIDIA's is Ready.
func TestAWrongClockOfANodeKeepsNoNodeFromBeingReady(t *testing.T) {
	for _, skew := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		t.Run("the device plugin, ahead by "+skew.String(), func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			h.skew = skew
			c.setPolicy("research", mig(count("2g", 3)))
			d, _ := c.run(120)
			isUpToDate(g, one(d))
		})
		t.Run("the agent, ahead by "+skew.String(), func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			h.AgentSince = c.Now.Add(skew)
			h.Pods = append(h.Pods, cluster.Pod{ // its image is not there
				Namespace: "user", Name: "pulls", UID: "pulls", Controller: "ReplicaSet", GPU: true, Scheduled: c.Now.Add(-time.Hour),
			})
			c.setPolicy("research", mig(count("2g", 3)))
			d, _ := c.run(120)
			isUpToDate(g, one(d))
		})
		t.Run("the DRA driver, ahead by "+skew.String(), func(t *testing.T) {
			g := NewWithT(t)
			c, h := onDRA(mig(count("1g", 7)))
			h.skew = skew
			h.restartDriver() // so that it has just started when the instances are made
			d, _ := c.run(120)
			isUpToDate(g, one(d))
		})
	}
}

// TestAControllersClockThatWasAheadKeepsNothing: what it stamped lies in the future once its clock is right, or once
// another controller leads. A node that was in mid-change then is its users' again within the time of its stages.
func TestAControllersClockThatWasAheadKeepsNothing(t *testing.T) {
	for stage, reached := range map[string]func(*host) bool{
		"tainted":            (*host).isTainted,
		"operands stopped":   func(h *host) bool { return h.Annotations[v1alpha1.AnnotationStopped] != "" },
		"the agent is asked": func(h *host) bool { return len(h.GPU.Spec.Devices) > 0 },
	} {
		t.Run(stage, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			c.ahead, h.lags = 400*24*time.Hour, true
			c.setPolicy("research", mig(count("2g", 3)))
			for range 60 {
				if !reached(h) {
					c.steps(1)
				}
			}
			g.Expect(reached(h)).To(BeTrue())
			c.ahead = 0
			c.during(2*time.Hour, time.Minute)
			g.Expect(h.isKept()).To(BeFalse(), "%v", h.Taints)
		})
	}
}

// TestAFailureOfTheFutureIsTriedAgainOnce: each request of the agent is older than such a record.
func TestAFailureOfTheFutureIsTriedAgainOnce(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	h.breaks("")
	c.ahead = 13 * time.Hour
	c.run(600)
	g.Expect(h.GPU.Status.Rollout.Failed).NotTo(BeNil())
	c.ahead, h.broken = 0, nil
	c.Policies[0].Generation++
	clear(c.writes)
	isUpToDate(g, c.during(2*time.Hour, time.Minute).Nodes[0])
	g.Expect(c.writes["action.SetSpec"]).To(BeNumerically("<", 6))
}

// sleeping is a controller between two decisions. It wakes as the real one does: when something that it reads has
// changed, or when the time is there that its decision named. In the seconds between it would decide the same again.
type sleeping struct {
	last    rollout.Decision
	nodes   cluster.Snapshot // of which the last decision was made
	rest    []byte           // of that snapshot, since others may write into it
	decided bool
	repeats bool // what was written too often wakes the controller too, by Decision.After
}

// decide returns a new decision on the snapshot, or the last one if nobody would have woken the controller.
func (s *sleeping) decide(snapshot cluster.Snapshot, decide func(cluster.Snapshot) rollout.Decision) rollout.Decision {
	rest := others(snapshot)
	passed := snapshot.Now.Sub(s.nodes.Now)
	if s.decided && passed >= 0 && (s.repeats || snapshot.Repeats == nil) && snapshot.OtherControllers == nil && len(s.last.Actions) == 0 &&
		(s.last.After == 0 || passed < s.last.After) && bytes.Equal(rest, s.rest) &&
		reflect.DeepEqual(snapshot.Policies, s.nodes.Policies) && reflect.DeepEqual(snapshot.Nodes, s.nodes.Nodes) {
		d := s.last
		if d.After > 0 {
			d.After -= passed
		}
		return d
	}
	s.last, s.decided = decide(snapshot), true
	for i := range snapshot.Nodes {
		snapshot.Nodes[i].Version = 0 // of remembering
	}
	s.nodes, s.rest = snapshot, rest
	return s.last
}

// others is what a snapshot holds besides its nodes, policies and time.
func others(s cluster.Snapshot) []byte {
	s.Nodes, s.Policies, s.Now = nil, nil, time.Time{}
	return values(nil, reflect.ValueOf(s))
}

// TestTheSimulatedControllerWakes: when anything that it reads has changed, when its time has come, and not else.
func TestTheSimulatedControllerWakes(t *testing.T) {
	g := NewWithT(t)
	decisions := 0
	counted := func(s cluster.Snapshot) rollout.Decision {
		decisions++
		return rollout.Decide(s)
	}
	c := fleet(1, timeSlicing(4))
	c.steps(60)
	var s sleeping
	for range 3 {
		g.Expect(s.decide(c.world(), counted).Nodes[0].State).To(Equal(node.UpToDate))
		c.tick(time.Second)
	}
	g.Expect(decisions).To(Equal(1))

	for _, change := range []func(){
		func() { c.hosts["n0"].Labels["team.example/label"] = "other" },
		func() { c.hosts["n0"].AgentReady = false },
		func() { c.Policies[0].Generation++ },
		func() { c.Configs["another"] = "version: v1\n" },
		func() { c.Plugin.Ready = false },
	} {
		s.last.Actions = nil
		decisions = 0
		change()
		s.decide(c.world(), counted)
		g.Expect(decisions).To(Equal(1))
	}

	s.last.Actions, s.last.After = nil, 10*time.Second
	decisions = 0
	c.Now = c.Now.Add(9 * time.Second)
	g.Expect(s.decide(c.world(), counted).After).To(Equal(time.Second))
	g.Expect(decisions).To(BeZero())
	c.Now = c.Now.Add(time.Second)
	s.decide(c.world(), counted)
	g.Expect(decisions).To(Equal(1))
}

// bootTime is how long a machine is down.
const bootTime = 90 * time.Second

// machine is what of a host matters where its GPUs change their MIG mode only at a reboot.
type machine struct {
	now       time.Time
	skew      time.Duration // by which its clock, that of the kubelet and the agent, is ahead of the controller's
	canReboot bool
	forgets   bool      // a reboot does not help
	required  bool      // the agent has found that only a reboot helps
	since     time.Time // when it first did
	down      time.Time // when the machine went down; zero: it runs
	reboots   []string  // for each its desired state, and what used a GPU then
}

// virtual makes a host a virtual machine, whose GPUs cannot be reset.
func (h *host) virtual() *host {
	h.canReboot = true
	h.hardware.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			n.GPUs[i].NoReset = true
		}
	})
	h.report()
	return h
}

func (h *host) bootID() (id string) {
	h.hardware.Update(func(n *sim.Node) { id = fmt.Sprintf("boot-%d", n.Boot) })
	return id
}

// goDown is the agent rebooting its node, as it does once that is reported.
func (h *host) goDown() {
	p := h.GPU.Spec.Reboot
	if !h.AgentReady || !h.required || !h.canReboot || p == nil || p.BootID != h.bootID() || h.inUse() != "" {
		return
	}
	h.reboots = append(h.reboots, p.Hash+h.inUse())
	h.down, h.AgentReady = h.now, false
}

func (h *host) inUse() (users string) {
	for _, d := range h.devices() {
		for _, o := range d.Holders {
			users += " " + o.Pod
		}
	}
	return users
}

// boot ends the time in which the machine is down. The kubelet offers nothing until NVIDIA's device plugin has registered anew: readCheckpoint of
// https://github.com/kubernetes/kubernetes/blob/v1.37.1/pkg/kubelet/cm/devicemanager/manager.go
func (h *host) boot() {
	if h.down.IsZero() || h.now.Sub(h.down) < bootTime {
		return
	}
	h.down, h.AgentReady, h.AgentSince = time.Time{}, true, h.now.Add(h.skew)
	if h.forgets {
		h.hardware.Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].PendingMIG = n.GPUs[i].MIG
			}
		})
	}
	h.hardware.Reboot()
	h.startsAgain()
	h.plugin.running, h.required, h.Unallocatable = false, false, nil
	clear(h.plugin.gone)
	for name := range h.Allocatable {
		h.Allocatable[name] = 0
	}
}

// reportReboot adds what the agent says about reboots.
func (h *host) reportReboot() {
	h.required = h.required && h.stillPending() // also for a spec that the agent has not worked on yet
	if !h.required {
		h.since = time.Time{}
		return
	}
	if h.since.IsZero() {
		h.since = h.now.Add(h.skew)
	}
	required := metav1.Condition{
		Type: v1alpha1.ConditionRebootRequired, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonRebootRequired,
		LastTransitionTime: metav1.NewTime(h.since), ObservedGeneration: h.GPU.Generation,
	}
	if p := h.GPU.Spec.Reboot; p != nil && p.BootID != h.bootID() {
		required.Reason = v1alpha1.ReasonRebootInVain
		stalled := required
		stalled.Type, stalled.Message = v1alpha1.ConditionApplyStalled, "it was rebooted in vain"
		h.GPU.Status.Conditions = append(h.GPU.Status.Conditions, stalled)
	}
	h.GPU.Status.Conditions = append(h.GPU.Status.Conditions, required)
}

// stillPending reports whether the desired MIG mode of a GPU is pending: a reboot sets no other one (stillPending of
// internal/agent/reboot.go).
func (h *host) stillPending() bool {
	return slices.ContainsFunc(h.devices(), func(d gpu.Device) bool {
		return d.PendingMIG != d.State.MIG && slices.ContainsFunc(h.GPU.Spec.Devices, func(want v1alpha1.DeviceSpec) bool {
			return want.UUID == d.UUID && d.PendingMIG == (want.Sharing.MIGMode == v1alpha1.MIGModeEnabled)
		})
	})
}
