// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
)

// NVIDIA's upgrade controller takes a node through the states of labelUpgrade (NVIDIA/k8s-operator-libs pkg/upgrade/consts.go).
// In pod-restart-required its k8s-driver-manager pauses the deploy labels, unloads the driver, and restores the labels. It
// does the latter alone where a driver pod restarts by itself.
const (
	labelUpgrade     = nvidiaDomain + "gpu-driver-upgrade-state"
	labelUpgradeSkip = nvidiaDomain + "gpu-driver-upgrade.skip"
	upgradeRequired  = "upgrade-required"
	upgradeDone      = "upgrade-done"
	upgradeFailed    = "upgrade-failed"
	// pausedForUpgrade is in the value of each deploy label that k8s-driver-manager has paused.
	pausedForUpgrade = "paused-for-driver-upgrade"
)

// OpenShift's machine-config operator updates a node whose two annotations differ: it cordons, drains and reboots it.
const (
	annotationCurrentConfig = machineConfig + "currentConfig"
	annotationDesiredConfig = machineConfig + "desiredConfig"
	machineConfig           = "machineconfiguration.openshift.io/"
)

// maintenanceTimeout is how long a node under maintenance keeps its slot in the budget. A driver container that builds the
// driver takes up to 20 minutes.
const maintenanceTimeout = 30 * time.Minute

// What begins the value of v1alpha1.AnnotationInterrupted.
const (
	stampMaintenance = "maintenance"
	stampAgentLost   = "agent-lost"
	stampInUse       = "in-use"
)

// maintenance is work of another controller on the node as a whole. No change begins meanwhile.
type maintenance struct {
	reason, message string
	// unloads says that the driver is still to be unloaded.
	unloads bool
	// validates says that the upgrade ends once the device plugin runs with the new driver.
	validates bool
}

// maintenance is the maintenance that the node is under, if it is.
func (v *view) maintenance() (m maintenance, is bool) {
	state := v.node.Labels[labelUpgrade]
	waits := state == upgradeRequired && v.node.Labels[labelUpgradeSkip] == "true" // it waits for ever
	paused := v.pausedForUpgrade()
	current, desired := v.node.Annotations[annotationCurrentConfig], v.node.Annotations[annotationDesiredConfig]
	m.reason = v1alpha1.ReasonDriverUpgrade
	switch {
	case state == upgradeFailed:
		m.message = fmt.Sprintf("The upgrade of NVIDIA's driver failed on the node (%s=%s). Look at the logs of the driver's pod there "+
			"(app=nvidia-driver-daemonset), then retry: kubectl label node %s --overwrite %s=%s",
			labelUpgrade, state, v.node.Name, labelUpgrade, upgradeRequired)
	case state != "" && state != upgradeDone && !waits:
		m.message = fmt.Sprintf("Paused for a driver upgrade (%s=%s)", labelUpgrade, state)
		m.unloads = slices.Contains(unloading(), state)
		m.validates = !m.unloads && state != upgradeRequired
	case paused != "":
		m.message = fmt.Sprintf("Paused for a driver upgrade (%s=%s)", paused, v.node.Labels[paused])
		m.unloads = true
	case desired != current:
		m.reason = v1alpha1.ReasonNodeMaintenance
		m.message = fmt.Sprintf("Paused for OpenShift's machine-config operator, which is updating the node (%s=%s, now %s)",
			annotationDesiredConfig, desired, current)
	default:
		return maintenance{}, false
	}
	return m, true
}

// OfMaintenance reports whether an annotation of a Node reports that the node is under maintenance.
func OfMaintenance(annotation string) bool {
	return annotation == annotationCurrentConfig || annotation == annotationDesiredConfig
}

// unloading are the states of an upgrade in which the old driver may still be loaded.
func unloading() []string {
	return []string{
		"node-maintenance-required", "cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required",
		"pod-restart-required",
	}
}

// pausedForUpgrade is a deploy label that k8s-driver-manager has paused; empty if there is none.
func (v *view) pausedForUpgrade() string {
	first := ""
	for name, value := range v.node.Labels {
		if strings.HasPrefix(name, deployPrefix) && strings.Contains(value, pausedForUpgrade) && (first == "" || name < first) {
			first = name
		}
	}
	return first
}

// maintained is the judgement of a node under maintenance. What has not reached the GPUs yet is given up. What has is
// interrupted, and its deadlines begin anew afterwards.
func (v *view) maintained(m maintenance, j judgement) judgement {
	if again, waits := v.asksAgain(); waits && m.validates && j.State != StateUndiscovered {
		j = again
	} else {
		actions := slices.DeleteFunc(slices.Concat(j.actions, j.giveUp), setsSpec)
		j.start, j.giveUp, j.actions = nil, nil, actions
	}
	if _, recorded := v.interruptedAt(); !recorded && (v.inFlight() || m.unloads && v.makesInstances()) {
		patch := v.patch("recording that maintenance interrupts the node")
		patch.Annotations[v1alpha1.AnnotationInterrupted] = new(stamp(stampMaintenance, v.world.Now))
		j.actions = append(j.actions, patch)
	}
	if patch, pauses := v.protect(m); pauses {
		j.actions = append(j.actions, patch)
	}
	if m.validates && v.disturbed() {
		left := v.node.HeldSince.Add(quiesceTimeout).Sub(v.world.Now)
		if left <= 0 {
			j.actions = v.letGo("the driver upgrade waits for them")
		}
		j.after = Sooner(j.after, left)
	}
	return v.explained(m, j)
}

// explained adds to a judgement that maintenance is the reason.
func (v *view) explained(m maintenance, j judgement) judgement {
	switch {
	case j.State == StateUpToDate && !v.to.final: // one that goes back is not forgotten meanwhile
		return j
	case j.State == StateFailed || j.State == StateImpossible:
		j.message += ". " + m.message
		return j
	case j.State == StateUndiscovered && !v.node.AgentReady:
		j.message = agentAway(m.message)
	default:
		j.message = strings.TrimSuffix(m.message+"; "+j.message, "; ")
	}
	j.reason = m.reason
	if v.overdue() {
		j.message += fmt.Sprintf(". It takes no slot in the budget any more, because that lasts for more than %s", maintenanceTimeout)
	}
	return v.untilOverdue(j)
}

// agentAway adds to a message that the agent is away for that reason.
func agentAway(why string) string {
	return why + "; the agent leaves the node meanwhile and returns by itself"
}

func setsSpec(a Action) bool {
	_, is := a.(SetSpec)
	return is
}

// inFlight reports whether the agent has been asked for a policy's desired state that the node has not reached.
func (v *view) inFlight() bool {
	spec := v.node.GPU.Spec
	return spec.PolicyName != "" && spec.ConfigName != "" && !reached(&v.node.GPU, target{key: spec.ConfigName, devices: spec.Devices})
}

// protect keeps the device plugin away while the driver is replaced under MIG instances that our agent makes. They are gone
// with the module, and on Hopper and newer the MIG mode too. So the agent makes them again before anything is advertised,
// and before the node takes pods again. k8s-driver-manager restores our pause with its own taken off.
func (v *view) protect(m maintenance) (patch PatchNode, pauses bool) {
	if !m.unloads {
		return PatchNode{}, false
	}
	return v.keepPluginAway()
}

// keepPluginAway pauses NVIDIA's clients where the device plugin runs, or may start, before the agent has made its instances.
func (v *view) keepPluginAway() (patch PatchNode, pauses bool) {
	if !v.makesInstances() || v.node.Labels[deployLabels()[0]] != "true" {
		return PatchNode{}, false
	}
	return v.pause()
}

// keepsPaused reports whether NVIDIA's clients have to stay paused until the driver is replaced.
func (v *view) keepsPaused() bool {
	m, is := v.maintenance()
	return is && m.unloads && v.makesInstances()
}

// makesInstances reports whether the agent has been asked for MIG instances.
func (v *view) makesInstances() bool {
	spec := v.node.GPU.Spec
	return v.world.Wiring.ClusterPolicy && spec.MIGActuator == "" &&
		slices.ContainsFunc(spec.Devices, func(d v1alpha1.DeviceSpec) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled })
}

// interruptedAt is when maintenance interrupted a change; ok is false if none did.
func (v *view) interruptedAt() (at time.Time, ok bool) {
	return stamped(v.node.Annotations[v1alpha1.AnnotationInterrupted], stampMaintenance)
}

// lostAt is when the controller recorded that the agent was lost during a change; ok is false if it did not.
func (v *view) lostAt() (at time.Time, ok bool) {
	return stamped(v.node.Annotations[v1alpha1.AnnotationInterrupted], stampAgentLost)
}

// usedAt is when the controller recorded that users of the GPUs interrupt a change; ok is false if it did not.
func (v *view) usedAt() (at time.Time, ok bool) {
	return stamped(v.node.Annotations[v1alpha1.AnnotationInterrupted], stampInUse)
}

// wasInterrupted reports whether a change was interrupted, by maintenance, by users or because the agent was lost.
func (v *view) wasInterrupted() bool {
	_, maintained := v.interruptedAt()
	_, lost := v.lostAt()
	_, used := v.usedAt()
	return maintained || lost || used
}

// overdue reports whether the change was interrupted for so long that it keeps no slot in the budget.
func (v *view) overdue() bool {
	at, was := v.interruptedAt()
	return was && v.world.Now.Sub(at) >= maintenanceTimeout
}

func (v *view) untilOverdue(j judgement) judgement {
	if at, was := v.interruptedAt(); was {
		j.after = Sooner(j.after, at.Add(maintenanceTimeout).Sub(v.world.Now))
	}
	return j
}

// asksAgain asks the agent anew after an interruption, and waits for its answer: the MIG instances of its last report may be
// gone with the driver's module, and an agent that has not left the node looks at the GPUs only once in a minute. Without an
// answer in time the deadlines of the change count again.
func (v *view) asksAgain() (j judgement, waits bool) {
	at, was := v.interruptedAt()
	why := "continuing after the maintenance of the node"
	if lost, is := v.lostAt(); is {
		at, was, why = lost, true, "continuing, because the agent is back"
	}
	if used, is := v.usedAt(); is && v.asks() {
		at, was, why = used, true, "continuing, because nobody uses the GPUs any more"
	}
	if !was || !v.inFlight() && !v.makesInstances() {
		return judgement{}, false
	}
	j = judgement{
		State: StateApplying, reason: v1alpha1.ReasonApplying, message: "Waiting for the agent to report what is on the node now",
	}
	spec := *v.node.GPU.Spec.DeepCopy()
	if !spec.ChangeTime.After(at) {
		spec.ChangeTime = metav1.NewTime(v.world.Now)
		j.actions = []Action{SetSpec{Node: v.node.Name, Spec: spec, Policy: v.ref(), Why: why}}
		j.after = time.Second // an interruption of less than that
		return j, true
	}
	left := spec.ChangeTime.Add(applyTimeout).Sub(v.world.Now)
	c, reported := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	j.after = left
	return j, left > 0 && (!reported || c.ObservedGeneration < v.node.GPU.Generation)
}

// continued goes on with a change that was interrupted, once the agent is back. All deadlines begin anew. After maintenance
// NVIDIA's clients stay away until then, also where only k8s-driver-manager had paused them: without an upgrade controller
// nothing tells of the upgrade before that. They are paused no more once the slot has expired, because the agent may never return.
func (v *view) continued(j judgement) judgement {
	if !v.wasInterrupted() {
		return j
	}
	if _, used := v.usedAt(); used && j.State == StateStaleDisruptive && len(v.blockers) > 0 {
		return j
	}
	again, waits := v.asksAgain()
	if j.State == StateUndiscovered {
		again, waits = j, true
	}
	_, maintained := v.interruptedAt()
	if patch, pauses := v.keepPluginAway(); waits && maintained && pauses && !v.overdue() {
		again.actions = append(again.actions, patch)
	}
	if waits {
		return v.untilOverdue(again)
	}
	patch := v.patch("continuing, because the agent has reported")
	patch.Annotations[v1alpha1.AnnotationInterrupted] = nil
	if _, has := v.node.Annotations[v1alpha1.AnnotationSelected]; has && v.to.key != "" {
		patch.Annotations[v1alpha1.AnnotationSelected] = new(stamp(v.to.key, v.world.Now))
	}
	return judgement{State: j.State, reason: j.reason, message: j.message, actions: []Action{patch}}
}
