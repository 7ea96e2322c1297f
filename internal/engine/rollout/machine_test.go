// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

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

// boot ends the time in which the machine is down.
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
	h.plugin.running, h.required = false, false
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
