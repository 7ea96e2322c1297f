// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"context"
	"errors"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// planned is what the agent has left to do.
type planned struct {
	devices []gpu.Device
	steps   []plan.Step
	err     error
}

func (h *host) plans() *planned {
	p := planned{devices: h.devices()}
	for _, was := range plan.Devices(h.GPU.Status.Devices) {
		for i := range p.devices {
			if p.devices[i].UUID == was.UUID {
				p.devices[i].Before = was.State.Instances
			}
		}
	}
	p.steps, p.err = plan.Node(h.allowed(p.devices), p.devices)
	return &p
}

// converge is the agent's reconcile over the spec. It returns what it has planned last, if it is at work.
func (h *host) converge() *planned {
	if !h.AgentReady || h.lags || h.blind() || h.GPU.Spec.MIGConfigName != "" || h.now.Sub(h.upgrade.returned) < resetTime {
		return nil
	}
	h.required = h.required && h.stillPending()
	failed := map[string]bool{} // GPUs whose steps have ended early
	for {
		p := h.plans()
		steps := p.steps
		if h.GPU.Spec.MIGActuator == v1alpha1.MIGActuatorMIGManager {
			steps = plan.WithoutMIG(steps)
		}
		at := slices.IndexFunc(steps, func(s plan.Step) bool { return !failed[s.Device()] })
		if p.err != nil || at < 0 {
			return p
		}
		step := steps[at]
		held := step.Closes() && slices.ContainsFunc(h.Pods, playedBy(pluginLabel))
		if held || h.leaked(step) || len(plan.Blockers(step, p.devices)) > 0 {
			return p
		}
		h.done = append(h.done, step.String())
		if err := step.Do(context.Background(), plan.Tools{Hardware: h.hardware, MPS: h}); err != nil {
			h.required = h.required || errors.Is(err, gpu.ErrResetRequired) && errors.Is(err, gpu.ErrNotSupported)
			failed[step.Device()] = true
		}
	}
}

// allowed is the desired state as far as the agent may set it now.
func (h *host) allowed(devices []gpu.Device) []v1alpha1.DeviceSpec {
	var baseline []v1alpha1.DeviceSpec
	if h.GPU.Spec.Baseline != nil {
		baseline = h.GPU.Spec.Baseline.Devices
	}
	now, _ := plan.WithoutUnrecorded(h.GPU.Spec.Devices, baseline, devices)
	return now
}

// report is the agent's status of the node.
func (h *host) report() { h.reports(nil) }

func (h *host) reports(p *planned) {
	if !h.AgentReady || h.lags || h.late || h.blind() {
		return
	}
	if h.GPU.Spec.MIGConfigName != "" {
		h.reportAside()
		return
	}
	if p == nil {
		p = h.plans()
	}
	applied := metav1.Condition{
		Type: v1alpha1.ConditionApplied, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonApplied, ObservedGeneration: h.GPU.Generation,
	}
	h.GPU.Status.Conditions = rollout.ReportedStatus(h.GPU.Status).Conditions
	if p.err != nil || len(p.steps) > 0 || !h.same(p.devices) {
		applied.Status, applied.Reason, applied.Message = metav1.ConditionFalse, v1alpha1.ReasonStepFailed, "it is tried again"
	}
	h.GPU.Status.CanReboot, h.GPU.Status.BootID = h.canReboot, h.bootID()
	h.reportReboot()
	if p.err != nil {
		h.GPU.Status.Conditions = append(h.GPU.Status.Conditions, metav1.Condition{
			Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonLayoutDoesNotFit,
			Message: p.err.Error(), ObservedGeneration: h.GPU.Generation,
		})
	}
	h.GPU.Status.Conditions = append(h.GPU.Status.Conditions, applied, metav1.Condition{
		Type: v1alpha1.ConditionDiscovered, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonDiscovered, ObservedGeneration: h.GPU.Generation,
	})
	if h.GPU.Spec.Memory.Limited() == v1alpha1.MemoryLimitEnforce {
		limited := metav1.Condition{
			Type: v1alpha1.ConditionMemoryLimited, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonEnforced, ObservedGeneration: h.GPU.Generation,
		}
		if h.unlimited {
			limited.Status, limited.Reason, limited.Message = metav1.ConditionFalse, v1alpha1.ReasonNotEnforced, "0 pods are limited, not: 1 NotEnforced"
		}
		h.GPU.Status.Conditions = append(h.GPU.Status.Conditions, limited)
	}
	h.GPU.Status.Devices = plan.Reported(p.devices)
}

// same reports whether the GPUs match the desired state; with nothing left to do for the agent they may still wait for
// NVIDIA.
func (h *host) same(devices []gpu.Device) bool {
	for _, d := range devices {
		for _, desired := range h.GPU.Spec.Devices {
			if desired.UUID == d.UUID && !plan.Met(desired.Sharing, plan.Observed(d)) {
				return false
			}
		}
	}
	return true
}
