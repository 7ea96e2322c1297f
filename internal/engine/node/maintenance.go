// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// What interrupts a change of a node as a whole is another controller that works on it, or a reboot.
//
//	driver upgrade | machine-config operator → underMaintenanceResult
//	     → over → continueInterrupted: the agent looks again, all deadlines begin anew
//	reboot permitted → beingRebooted → agent Ready | not permitted: leftUntilManualReboot

// What begins the value of v1alpha1.AnnotationInterrupted.
const (
	stampMaintenance = "maintenance"
	StampAgentLost   = "agent-lost"
	stampInUse       = "in-use"
)

// Maintenance is work of another controller on the node as a whole. No change begins meanwhile.
type Maintenance struct {
	Reason, Message string
	// Unloads says that the driver is still to be unloaded.
	Unloads bool
	// Validates says that the upgrade ends once the device plugin runs with the new driver.
	Validates bool
}

// UnderMaintenance is the maintenance that the node is under, if it is.
func UnderMaintenance(v *View) (m Maintenance, is bool) {
	state := v.Node.Labels[cluster.LabelUpgrade]
	waits := state == cluster.UpgradeRequired && v.Node.Labels[cluster.LabelUpgradeSkip] == "true" // it waits for ever
	stopped := stoppedForUpgrade(v)
	current, desired := v.Node.Annotations[cluster.AnnotationCurrentConfig], v.Node.Annotations[cluster.AnnotationDesiredConfig]
	m.Reason = v1alpha1.ReasonDriverUpgrade
	switch {
	case state == cluster.UpgradeFailed:
		m.Message = fmt.Sprintf("The upgrade of NVIDIA's driver failed on the node (%s=%s). Look at the logs of the driver's pod there "+
			"(%s), then retry: kubectl label node %s --overwrite %s=%s",
			cluster.LabelUpgrade, state, driverPodLabels(v), v.Node.Name, cluster.LabelUpgrade, cluster.UpgradeRequired)
	case state != "" && state != cluster.UpgradeDone && !waits:
		m.Message = fmt.Sprintf("Waiting for a driver upgrade (%s=%s)", cluster.LabelUpgrade, state)
		m.Unloads = slices.Contains(unloadingStates(), state)
		m.Validates = !m.Unloads && state != cluster.UpgradeRequired
	case stopped != "":
		m.Message = fmt.Sprintf("Waiting for a driver upgrade (%s=%s)", stopped, v.Node.Labels[stopped])
		m.Unloads = true
	case desired != current:
		m.Reason = v1alpha1.ReasonNodeMaintenance
		m.Message = fmt.Sprintf("Waiting for OpenShift's machine-config operator, which is updating the node (%s=%s, now %s)",
			cluster.AnnotationDesiredConfig, desired, current)
	default:
		return Maintenance{}, false
	}
	return m, true
}

// driverPodLabels are the labels of the pods of NVIDIA's driver: those of a ClusterPolicy, or of an NVIDIADriver, which
// a GPUCluster needs (NVIDIA/gpu-operator internal/state/driver.go, v26.7.0).
func driverPodLabels(v *View) string {
	const ofNVIDIADriver = "app.kubernetes.io/component=nvidia-driver"
	if cluster.OfGPUCluster(v.Node.Labels) {
		return ofNVIDIADriver
	}
	return "app=nvidia-driver-daemonset, or with an NVIDIADriver " + ofNVIDIADriver
}

// unloadingStates are the states of an upgrade in which the old driver may still be loaded.
func unloadingStates() []string {
	return []string{
		"node-maintenance-required", "cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required",
		"pod-restart-required",
	}
}

// stoppedForUpgrade is a deploy label that k8s-driver-manager has stopped; empty if there is none.
func stoppedForUpgrade(v *View) string {
	first := ""
	for name, value := range v.Node.Labels {
		if strings.HasPrefix(name, cluster.DeployPrefix) && strings.Contains(value, cluster.StoppedForUpgrade) && (first == "" || name < first) {
			first = name
		}
	}
	return first
}

// agentMakesInstances reports whether the agent has been asked for MIG instances.
func agentMakesInstances(v *View) bool {
	spec := v.Node.GPU.Spec
	return v.ByGPUOperator() && spec.MIGActuator == "" &&
		slices.ContainsFunc(spec.Devices, func(d v1alpha1.DeviceSpec) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled })
}

// InterruptedAt is when maintenance interrupted a change; ok is false if none did.
func InterruptedAt(v *View) (at time.Time, ok bool) {
	return timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationInterrupted], stampMaintenance)
}

// AgentLostAt is when the controller recorded that the agent was lost during a change; ok is false if it did not.
func AgentLostAt(v *View) (at time.Time, ok bool) {
	return timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationInterrupted], StampAgentLost)
}

// interruptedByUsersAt is when the controller recorded that users of the GPUs interrupt a change; ok is false if it did
// not.
func interruptedByUsersAt(v *View) (at time.Time, ok bool) {
	return timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationInterrupted], stampInUse)
}

// WasInterrupted reports whether a change was interrupted, by maintenance, by users or because the agent was lost.
func WasInterrupted(v *View) bool {
	_, maintained := InterruptedAt(v)
	_, lost := AgentLostAt(v)
	_, used := interruptedByUsersAt(v)
	return maintained || lost || used
}

// interruptionOverdue reports whether the change was interrupted for so long that it keeps no slot in the budget.
func interruptionOverdue(v *View) bool {
	at, was := InterruptedAt(v)
	return was && v.Snapshot.Now.Sub(at) >= timing.MaintenanceTimeout
}

// untilOverdue has the node decided on again when its interrupted change is overdue.
func untilOverdue(v *View, r Result) Result {
	if at, was := InterruptedAt(v); was {
		r.After = timing.Sooner(r.After, at.Add(timing.MaintenanceTimeout).Sub(v.Snapshot.Now))
	}
	return r
}

// underMaintenanceResult is the result of a node under maintenance. What has not reached the GPUs yet is given up. What
// has is interrupted, and its deadlines begin anew afterwards.
func underMaintenanceResult(v *View, m Maintenance, r Result) Result {
	act, paced := SplitAct(r.Next)
	actions := slices.DeleteFunc(slices.Concat(act, paced.OnDenied), action.SetsSpec)
	if again, waits := RequestAgain(v); waits && m.Validates && r.State != Unknown {
		r = again
		actions, _ = SplitAct(again.Next)
	}
	if _, recorded := InterruptedAt(v); !recorded && (v.InFlight() || m.Unloads && agentMakesInstances(v)) {
		patch := v.Patch("recording that maintenance interrupts the node")
		patch.Annotations[v1alpha1.AnnotationInterrupted] = new(timing.Stamp(stampMaintenance, v.Snapshot.Now))
		actions = append(actions, patch)
	}
	if patch, stops := keepPluginAwayFromDriver(v, m); stops {
		actions = append(actions, patch)
	}
	if m.Validates && v.MadeUnavailable() {
		remaining := v.Node.MarkedAtWorkSince.Add(timing.StopTimeout).Sub(v.Snapshot.Now)
		if remaining <= 0 {
			actions = RestoreScheduling(v, "the driver upgrade waits for them")
		}
		r.After = timing.Sooner(r.After, remaining)
	}
	r.Next = atOnce(actions...)
	return explainMaintenance(v, m, r)
}

// explainMaintenance adds to a result that maintenance is the reason.
func explainMaintenance(v *View, m Maintenance, r Result) Result {
	switch {
	case r.State == UpToDate && !v.Target.ReleasesNode: // one that goes back is not forgotten meanwhile
		return r
	case r.State == Failed || r.State == Unsupported:
		r.Message += ". " + m.Message
		return r
	case r.State == Unknown && !v.Node.AgentReady:
		r.Message = agentAwayMessage(m.Message)
	default:
		r.Message = strings.TrimSuffix(m.Message+"; "+r.Message, "; ")
	}
	r.Reason = m.Reason
	if interruptionOverdue(v) {
		r.Message += fmt.Sprintf(". It takes no slot in the budget any more, because that lasts for more than %s", timing.MaintenanceTimeout)
	}
	if stopped := stoppedForUpgrade(v); m.Validates && stopped != "" { // the upgrade waits for it, and k8s-driver-manager runs no more
		r.Message += fmt.Sprintf(". If %s stays stopped, delete the driver's pod on the node", stopped)
	}
	return untilOverdue(v, r)
}

// keepPluginAwayFromDriver keeps the device plugin away while the driver is replaced under MIG instances that our agent
// makes. They are gone with the module, and on Hopper and newer the MIG mode too. So the agent makes them again before
// anything is advertised, and before the node takes pods again. k8s-driver-manager restores our value with its own
// taken off.
func keepPluginAwayFromDriver(v *View, m Maintenance) (patch action.PatchNode, stops bool) {
	if !m.Unloads {
		return action.PatchNode{}, false
	}
	return keepPluginAway(v)
}

// RequestAgain asks the agent anew after an interruption, and waits for its answer: the MIG instances of its last
// report may be gone with the driver's module, and an agent that has not left the node looks at the GPUs only once in a
// minute. Without an answer in time the deadlines of the change count again.
func RequestAgain(v *View) (r Result, waits bool) {
	at, was := InterruptedAt(v)
	why := "continuing after the maintenance of the node"
	if lost, is := AgentLostAt(v); is {
		at, was, why = lost, true, "continuing, because the agent is back"
	}
	if used, is := interruptedByUsersAt(v); is && v.SpecMatchesTarget() {
		at, was, why = used, true, "continuing, because nobody uses the GPUs any more"
	}
	if !was || !v.InFlight() && !agentMakesInstances(v) {
		return Result{}, false
	}
	r = Result{
		State: Applying, Reason: v1alpha1.ReasonApplying, Message: "Waiting for the agent to report what is on the node now",
	}
	spec := *v.Node.GPU.Spec.DeepCopy()
	if !spec.ChangeTime.After(at) {
		spec.ChangeTime = metav1.NewTime(v.Snapshot.Now)
		r.Next = atOnce(v.setSpec(spec, why))
		r.After = time.Second // an interruption of less than that
		return r, true
	}
	remaining := spec.ChangeTime.Add(timing.ApplyTimeout).Sub(v.Snapshot.Now)
	c, reported := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	r.After = remaining
	return r, remaining > 0 && (!reported || c.ObservedGeneration < v.Node.GPU.Generation)
}

// beforeAnswer keeps the device plugin away after maintenance until the agent has answered. An overdue interruption keeps the node no longer where it could not
// even be asked.
func beforeAnswer(v *View, next NextAct) NextAct {
	at, maintained := InterruptedAt(v)
	actions, _ := SplitAct(next)
	switch patch, stops := keepPluginAway(v); {
	case maintained && interruptionOverdue(v) && neverAsked(v, at):
		return atOnce(append(actions, restoreSchedulingUnlessBusy(v, "the agent could not be asked in time")...)...)
	case maintained && stops && !interruptionOverdue(v):
		return atOnce(append(actions, patch)...)
	}
	return next
}

// neverAsked reports whether an agent that is there was not asked since an interruption, for as long as it may take: its GPUNode cannot be written.
func neverAsked(v *View, interrupted time.Time) bool {
	since := v.Node.AgentSince
	return !since.IsZero() && v.Snapshot.Now.Sub(since) >= timing.ApplyTimeout && !v.Node.GPU.Spec.ChangeTime.After(interrupted)
}

// waitsForUsers reports whether users interrupted the change, or the way back from one that failed, and are still there.
func waitsForUsers(v *View, r Result) bool {
	_, used := interruptedByUsersAt(v)
	return used && len(v.Blockers) > 0 && (r.State == PendingDisruptive || r.State == Failed && !v.MadeUnavailable()) // 2^40+10114
}

// continueInterrupted goes on with a change that was interrupted, once the agent is back. All deadlines begin anew.
// After maintenance NVIDIA's operands stay away until then, also where only k8s-driver-manager had stopped them: without
// an upgrade controller nothing tells of the upgrade before that. They are stopped no more once the agent has answered,
// or the slot has expired, because the agent may never return.
func continueInterrupted(v *View, r Result) Result {
	if !WasInterrupted(v) {
		return r
	}
	if _, rests := restsAfterTimeout(v); rests || waitsForUsers(v, r) {
		return r
	}
	again, unanswered := RequestAgain(v)
	waits := unanswered
	if r.State == Unknown {
		again, waits = r, true
	}
	if unanswered {
		again.Next = beforeAnswer(v, again.Next)
	}
	if waits {
		return untilOverdue(v, again)
	}
	patch := v.Patch("continuing, because the agent has reported")
	patch.Annotations[v1alpha1.AnnotationInterrupted] = nil
	if stopped, since := cluster.Stopped(v.Node.Annotations); !since.IsZero() {
		patch.Annotations[v1alpha1.AnnotationStopped] = cluster.StoppedRecord(stopped, v.Snapshot.Now)
	}
	verifyAnew(v, patch)
	return Result{State: r.State, Reason: r.Reason, Message: r.Message, Next: atOnce(patch)}
}
