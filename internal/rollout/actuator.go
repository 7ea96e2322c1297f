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
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/migmanager"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

// Where a policy asks for it (sharing.mig.actuator: MIGManager), NVIDIA's mig-manager partitions the GPUs in place of our
// agent. It is driven by one label of the node, which names a configuration in a file that all nodes share, and answers
// with another. It drains nobody and knows no deadline, so all around it is done here:
//
//	prepared  it runs on the node and reads our file, with the configuration in it
//	drained   nobody uses a GPU that it clears, as for any disruptive change
//	aside     the spec names the configuration, and the agent has closed the driver
//	asked     the label names it, the state is removed in the same patch; a stamp on the node tells since when
//	success   the spec no longer names it, so the agent looks: what counts is what NVML says
//	failed    or no answer in time: the node goes back to its last good state, in the same way
//
// Its own label says true all the while. It pauses NVIDIA's clients itself.

// managerTimeout is how long mig-manager may take: it waits five minutes for each of NVIDIA's clients to end.
const managerTimeout = 20 * time.Minute

// actuatorOf is who partitions the GPUs under a policy; empty for the agent.
func actuatorOf(p *v1alpha1.GPUSharingPolicy) v1alpha1.MIGActuator {
	if p.Spec.Sharing.MIG != nil && p.Spec.Sharing.MIG.Actuator == v1alpha1.MIGActuatorMIGManager {
		return v1alpha1.MIGActuatorMIGManager
	}
	return ""
}

// asksManager says whether the policy of the node has its GPUs partitioned by mig-manager, also where that is impossible.
func (v *view) asksManager() bool {
	return v.by != nil && actuatorOf(v.by) == v1alpha1.MIGActuatorMIGManager
}

// managed says whether mig-manager brings the GPUs of the node to their target.
func (v *view) managed() bool { return v.to.actuator == v1alpha1.MIGActuatorMIGManager }

// partitions says whether it has something to do.
func (v *view) partitions() bool { return v.managed() && slices.ContainsFunc(v.steps, plan.ChangesMIG) }

// noManager says why mig-manager cannot be asked on the node; nil if it can.
func (v *view) noManager() *plan.Problem {
	why := v.world.Wiring.NoMIGManager
	if !v.world.Wiring.ClusterPolicy {
		why = "there is no ClusterPolicy with which the GPU Operator would run it"
	}
	if why == "" && v.node.Labels[v1alpha1.LabelMIGManager] == "false" && !v.fencedByUs() {
		why = fmt.Sprintf("the node carries %s=false; remove that label", v1alpha1.LabelMIGManager)
	}
	if why == "" {
		return nil
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonNoMIGManager,
		Message: fmt.Sprintf("the policy asks for NVIDIA's mig-manager (sharing.mig.actuator), which does not run here: %s, "+
			"or let the operator's agent do it (actuator: Agent)", why),
	}
}

// fencedByUs says whether it was us who keep mig-manager off the node.
func (v *view) fencedByUs() bool {
	b := v.node.GPU.Spec.Baseline
	return b != nil && b.Labels[v1alpha1.LabelMIGManager] != "false"
}

// config is the configuration that brings the GPUs to the target.
func (v *view) config() migmanager.Config { return migmanager.Render(v.to.devices, v.have) }

// configs are the configurations that mig-manager needs for the node, by their names: that of the target, and while it is
// kept off the node one of what is there, which it finds when it comes back.
func (v *view) configs() map[string]string {
	configs := map[string]string{}
	if v.partitions() {
		c, is := v.config(), migmanager.Render(nil, v.have)
		configs[c.Name], configs[is.Name] = c.Entries, is.Entries
	}
	return configs
}

// usesConfigs says whether mig-manager has to read our file for the node's sake.
func (v *view) usesConfigs() bool {
	return v.partitions() || v.node.GPU.Spec.MIGConfigName != "" || migmanager.Ours(v.node.Labels[v1alpha1.LabelMIGConfig])
}

// cleared are the GPUs that mig-manager clears on its way to the target.
func (v *view) cleared() []gpu.Device {
	if !v.partitions() {
		return nil
	}
	return migmanager.Clears(v.to.devices, v.have)
}

// prepared is the gate before a node is tainted for mig-manager: it runs there and reads our file, in which the
// configuration is. Its daemon set does not tolerate our taint, so a pod that has to start anew has to do that before.
func (v *view) prepared() (judgement, bool) {
	j := judgement{State: StateStaleDisruptive, reason: v1alpha1.ReasonConfiguringDevicePlugin}
	name := v.config().Name
	file, err := migmanager.Parse(v.world.Keys[migmanager.FileKey])
	_, written := file[name]
	switch {
	case !v.world.Wiring.MIGReady:
		j.message = "NVIDIA's mig-manager is being pointed at the operator's ConfigMap"
	case err != nil || !written:
		j.message = fmt.Sprintf("writing the configuration %s for NVIDIA's mig-manager into the ConfigMap", name)
	case v.node.Labels[v1alpha1.LabelMIGManager] == "false":
		j.message = "letting NVIDIA's mig-manager come back to the node"
		j.start = []Action{v.unfence()}
	case !v.managerReads():
		j.message = "waiting until NVIDIA's mig-manager runs on the node with the operator's ConfigMap; look at the pods with " +
			"app=nvidia-mig-manager there"
	case v.managerBusy():
		j.message = "waiting until NVIDIA's mig-manager has done what it was asked for before: " + v.managerState()
	default:
		return judgement{}, false
	}
	return j, true
}

// unfence lets mig-manager come back. It applies what the label names when it starts, so that is what is there.
func (v *view) unfence() Action {
	patch := v.patch("letting NVIDIA's mig-manager come back to the node")
	patch.Labels[v1alpha1.LabelMIGManager] = new("true")
	patch.Labels[v1alpha1.LabelMIGConfig] = new(migmanager.Render(nil, v.have).Name)
	patch.Labels[v1alpha1.LabelMIGConfigState] = nil
	v.saveBaseline(patch)
	patch.Locked = true
	return patch
}

func (v *view) managerReads() bool {
	pods := v.managerPods()
	return len(pods) > 0 && !slices.ContainsFunc(pods, func(p Pod) bool { return !p.MountsConfig })
}

// managerBusy says whether mig-manager is at work. Where it gave up waiting for a client it says pending for ever: what it
// was asked for here, and has not done in its time, it does no more.
func (v *view) managerBusy() bool {
	since, asked := v.askedFor(v.node.Labels[v1alpha1.LabelMIGConfig])
	if asked && v.world.Now.Sub(since) >= rebootTimeout {
		return false
	}
	switch v.node.Labels[v1alpha1.LabelMIGConfigState] {
	case managerRebooting:
		return true
	case managerPending:
		return !asked || v.world.Now.Sub(since) < managerTimeout
	}
	return false
}

// unpause starts NVIDIA's clients that mig-manager has paused and left so, as it does where it gives up waiting for one.
func (v *view) unpause(labels map[string]*string) {
	if !v.managed() || v.managerBusy() {
		return
	}
	for _, name := range deployLabels() {
		if v.node.Labels[name] == pausedValue {
			labels[name] = new("true")
		}
	}
}

// askedFor says since when mig-manager is asked for a configuration; ok is false if it is not.
func (v *view) askedFor(name string) (since time.Time, ok bool) {
	return stamped(v.node.Annotations[v1alpha1.AnnotationMIGConfig], name)
}

// drive lets mig-manager do what the spec says, and waits for it.
func (v *view) drive() judgement {
	j := judgement{State: StateApplying, reason: v1alpha1.ReasonMIGManagerPartitioning}
	name := v.node.GPU.Spec.MIGConfigName
	since, asked := v.askedFor(name)
	switch {
	case asked:
		return v.mirror(j, name, since)
	case !v.aside():
		j.message = "waiting until the agent has closed the driver for NVIDIA's mig-manager"
	case v.managerBusy():
		j.message = "waiting until NVIDIA's mig-manager has done what it was asked for before: " + v.managerState()
	default:
		v.request(&j, name)
	}
	left := v.node.GPU.Spec.ChangeTime.Add(applyTimeout).Sub(v.world.Now)
	if left <= 0 {
		return v.giveUpOnManager(j, v1alpha1.ReasonApplyTimedOut, fmt.Sprintf("not within %s: %s", applyTimeout, j.message))
	}
	j.after = Sooner(j.after, left)
	return j
}

// aside says whether the agent has closed the driver.
func (v *view) aside() bool {
	c, found := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	return found && c.Reason == v1alpha1.ReasonMIGManagerPartitioning && c.ObservedGeneration == v.node.GPU.Generation
}

// request makes the configuration visible in mig-manager's pod and then names it in the node's label. mig-manager notices
// another value only, so one that is there already is taken away first.
func (v *view) request(j *judgement, name string) {
	j.message = fmt.Sprintf("making the configuration %s visible to NVIDIA's mig-manager", name)
	for _, p := range v.managerPods() {
		at, nudged := stamped(p.Nudge, name)
		if !nudged {
			j.actions = append(j.actions, Nudge{
				Node: v.node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Value: stamp(name, v.world.Now),
			})
			j.after = visibleAfter
			continue
		}
		j.after = max(j.after, at.Add(visibleAfter).Sub(v.world.Now))
	}
	if len(j.actions) > 0 || j.after > 0 {
		return
	}
	j.message = "asking NVIDIA's mig-manager for the configuration " + name
	patch := v.patch(j.message)
	patch.Locked = true
	patch.Labels[v1alpha1.LabelMIGConfig] = nil
	if v.node.Labels[v1alpha1.LabelMIGConfig] != name {
		patch.Labels[v1alpha1.LabelMIGConfig], patch.Labels[v1alpha1.LabelMIGConfigState] = &name, nil
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = new(stamp(name, v.world.Now))
	}
	j.actions = []Action{patch}
}

// mirror says what mig-manager says, and gives it the deadline that it does not have.
func (v *view) mirror(j judgement, name string, since time.Time) judgement {
	timeout := managerTimeout
	switch state := v.node.Labels[v1alpha1.LabelMIGConfigState]; {
	case v.node.Labels[v1alpha1.LabelMIGConfig] != name:
		return v.giveUpOnManager(j, v1alpha1.ReasonMIGManagerFailed, fmt.Sprintf("somebody else has set %s=%s; let only one drive "+
			"NVIDIA's mig-manager", v1alpha1.LabelMIGConfig, v.node.Labels[v1alpha1.LabelMIGConfig]))
	case state == managerSuccess:
		j.message = "NVIDIA's mig-manager is done; the agent looks at the GPUs"
		j.actions = []Action{v.lookAgain("letting the agent look at what NVIDIA's mig-manager did")}
		return j
	case state == managerFailed:
		return v.giveUpOnManager(j, v1alpha1.ReasonMIGManagerFailed,
			fmt.Sprintf("NVIDIA's mig-manager failed to apply %s; its log says why: %s", name, v.managerLogs()))
	case state == managerRebooting:
		timeout = rebootTimeout
		j.message = "NVIDIA's mig-manager reboots the node"
	case state == "":
		j.message = fmt.Sprintf("waiting for NVIDIA's mig-manager to begin with %s", name)
	default:
		j.message = fmt.Sprintf("NVIDIA's mig-manager applies %s (%s)", name, v.managerState())
	}
	j.after = since.Add(timeout).Sub(v.world.Now)
	if j.after <= 0 {
		return v.giveUpOnManager(j, v1alpha1.ReasonMIGManagerFailed, fmt.Sprintf("NVIDIA's mig-manager did not apply %s within %s "+
			"(%s); it may have left NVIDIA's clients paused; its log says more: %s", name, timeout, v.managerState(), v.managerLogs()))
	}
	return j
}

// giveUpOnManager lets the wish fail, and the agent look at what is there.
func (v *view) giveUpOnManager(j judgement, reason, message string) judgement {
	j = v.fail(j, reason, message)
	if len(j.actions) == 0 { // on the way back, which is not given up
		j.actions = []Action{v.lookAgain("letting the agent look at what NVIDIA's mig-manager left")}
	}
	j.after = 0
	return j
}

// lookAgain lets the agent open the driver.
func (v *view) lookAgain(why string) SetSpec {
	spec := v.kept()
	spec.MIGConfigName, spec.ChangeTime = "", metav1.NewTime(v.world.Now)
	return SetSpec{Node: v.node.Name, Spec: spec, Policy: v.ref(), Why: why}
}

// afterManager judges what mig-manager has left, once the agent has looked: its own word does not count.
func (v *view) afterManager() (judgement, bool) {
	c, found := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	if _, asked := v.askedFor(v.config().Name); !asked || !found || c.ObservedGeneration != v.node.GPU.Generation {
		return judgement{}, false
	}
	message := "NVIDIA's mig-manager has not brought the GPUs to what was asked for (" + v.managerState() + ")"
	j := judgement{State: StateApplying, reason: v1alpha1.ReasonMIGManagerFailed, message: v.agentSays(message)}
	return v.fail(j, v1alpha1.ReasonMIGManagerFailed, j.message), true
}

// clearing says in one line what mig-manager is going to do.
func (v *view) clearing() string {
	var cleared []string
	for _, d := range v.cleared() {
		cleared = append(cleared, fmt.Sprintf("GPU %d", d.Index))
	}
	return fmt.Sprintf("NVIDIA's mig-manager: apply %s, which clears %s", v.config().Name, strings.Join(cleared, ", "))
}

// releaseLabels are the labels of mig-manager's that a node goes back to when nothing of ours is to be applied there.
func (v *view) releaseLabels(labels map[string]*string) {
	if v.managed() && !v.to.final || !migmanager.Ours(v.node.Labels[v1alpha1.LabelMIGConfig]) {
		return
	}
	labels[v1alpha1.LabelMIGConfig] = nil
	if b := v.node.GPU.Spec.Baseline; b != nil {
		if before, had := b.Labels[v1alpha1.LabelMIGConfig]; had {
			labels[v1alpha1.LabelMIGConfig] = &before
		}
	}
}
