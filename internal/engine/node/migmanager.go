// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// NVIDIA's mig-manager is kept off a node that the agent partitions, or driven where a policy asks for that.
//
//	agent:       awaitMIGManagerDisabled → NVIDIA's mig-manager is gone → … → managerLabelRestored: its labels are restored, it
//	             comes back → awaitMIGManagerDone
//	mig-manager: awaitMIGManagerPrepared → drained → driveManager → verifyManager → … → managerLabelRestored: its label is restored
//	             → awaitMIGManagerDone
//
// It is driven by one label of the node, which names a configuration in a file that all nodes share, and answers with
// another. It drains nobody and knows no deadline, so all around it is done here:
//
//	prepared  it runs on the node and reads our file, with the configuration in it
//	drained   nobody uses a GPU that it clears, as for any disruptive change
//	aside     the spec names the configuration, and the agent has closed the driver
//	asked     the label names it, the state is removed in the same patch; a stamp on the node tells since when
//	success   the spec no longer names it, so the agent looks: what counts is what NVML says
//	failed    or no answer in time: the node goes back to its last good state, in the same way
//	released  the label names what it did before the operator; our file stays until mig-manager has answered

// actuatorOf is who partitions the GPUs under a policy; empty for the agent.
func actuatorOf(p *v1alpha1.GPUSharingPolicy) v1alpha1.MIGActuator {
	if p.Spec.Sharing.MIG != nil && p.Spec.Sharing.MIG.Actuator == v1alpha1.MIGActuatorMIGManager {
		return v1alpha1.MIGActuatorMIGManager
	}
	return ""
}

// byMIGManager reports whether NVIDIA's mig-manager, and not the agent, makes the MIG instances of the target. Only
// this file asks it.
func byMIGManager(v *View) bool { return v.Target.Actuator == v1alpha1.MIGActuatorMIGManager }

// partitions reports whether mig-manager has something to do.
func partitions(v *View) bool {
	return byMIGManager(v) && slices.ContainsFunc(v.Steps, plan.ChangesMIG)
}

// managerRequest names the configuration that mig-manager is to apply; empty: the agent does all.
func managerRequest(v *View) string {
	if !partitions(v) {
		return ""
	}
	return migConfig(v).Name
}

// migConfig is the configuration that brings the GPUs to the target.
func migConfig(v *View) migmanager.Config { return migmanager.Render(v.Target.Devices, v.Devices) }

// ManagerRequestedSince says since when mig-manager is asked for a configuration; ok is false if it is not.
func ManagerRequestedSince(v *View, name string) (since time.Time, ok bool) {
	return timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationMIGConfig], name)
}

// managerUnavailable says why mig-manager cannot be asked on the node; nil if it can, or need not.
func managerUnavailable(v *View) *plan.Problem {
	if !byMIGManager(v) {
		return nil
	}
	why := v.Snapshot.Plugin.NoMIGManager
	if !v.Snapshot.Plugin.ClusterPolicy {
		why = "there is no ClusterPolicy with which the GPU Operator would run it"
	}
	if why == "" && v.Node.Labels[v1alpha1.LabelMIGManager] == "false" && !migManagerDisabledByUs(v) {
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

// AgentSteps are the steps that the agent carries out: all but those of mig-manager where that partitions the GPUs.
func (v *View) AgentSteps() []plan.Step {
	if byMIGManager(v) {
		return plan.WithoutMIG(v.Steps)
	}
	return v.Steps
}

// canRequestAgain reports whether who partitions the GPUs can be asked for the same once more. NVIDIA's mig-manager is
// not.
func canRequestAgain(v *View) bool { return !byMIGManager(v) }

// migManagerDisabledByUs reports whether it was us who keep mig-manager off the node.
func migManagerDisabledByUs(v *View) bool {
	b := v.Node.GPU.Spec.Baseline
	return b != nil && b.Labels[v1alpha1.LabelMIGManager] != "false"
}

// MIGConfigs are the configurations that mig-manager needs for the node, by their names: that of the target, and while
// it is kept off the node one of what is there, which it finds when it comes back.
func MIGConfigs(v *View) map[string]string {
	configs := map[string]string{}
	if partitions(v) {
		c, is := migConfig(v), migmanager.Render(nil, v.Devices)
		configs[c.Name], configs[is.Name] = c.Entries, is.Entries
	}
	return configs
}

// UsesMIGConfigs reports whether mig-manager has to read our file for the node's sake.
func UsesMIGConfigs(v *View) bool {
	return managerMayFinish(v) || partitions(v) || v.Node.GPU.Spec.MIGConfigName != "" || migmanager.Ours(v.Node.Labels[v1alpha1.LabelMIGConfig])
}

// awaitMIGManagerPrepared is the gate before a node is tainted for mig-manager: it runs there and reads our file, in
// which the configuration is. Its DaemonSet does not tolerate our taint, so a pod that has to start anew has to do that
// before.
func awaitMIGManagerPrepared(v *View) (Result, bool) {
	r := Result{State: PendingDisruptive, Reason: v1alpha1.ReasonConfiguringDevicePlugin, Next: withSlot(v)}
	name := migConfig(v).Name
	file, err := migmanager.Parse(v.Snapshot.Configs[migmanager.FileKey])
	_, written := file[name]
	switch {
	case !v.Snapshot.Plugin.MIGReady:
		r.Message = "NVIDIA's mig-manager is being configured to use the operator's ConfigMap"
	case err != nil || !written:
		r.Message = fmt.Sprintf("writing the configuration %s for NVIDIA's mig-manager into the ConfigMap", name)
	case v.Node.Labels[v1alpha1.LabelMIGManager] == "false":
		r.Message = "letting NVIDIA's mig-manager come back to the node"
		r.Next = withSlot(v, enableMIGManager(v))
	case !managerReads(v):
		r.Message = "waiting until NVIDIA's mig-manager runs on the node with the operator's ConfigMap; look at the pods with " +
			"app=nvidia-mig-manager there"
	case managerBusy(v):
		r.Message = "waiting until NVIDIA's mig-manager has done what it was asked for before: " + managerState(v)
	case managerAnswersIn(v) > 0:
		r.Message = managerAnswers
		r.After = managerAnswersIn(v)
	default:
		return Result{}, false
	}
	return r, true
}

const managerAnswers = "waiting until NVIDIA's mig-manager, whose pod is new, has answered to what its label named before"

// managerAnswersIn is how long a pod of mig-manager that is new, or whose containers are, may still take to say what it
// finds. When it starts it compares what its label names with what is there, and does not say that it does: "success"
// comes after another request then, and would be taken for the answer to that (NVIDIA/mig-parted, pkg/mig/reconfigure:
// pending is written after that).
func managerAnswersIn(v *View) (d time.Duration) {
	for _, p := range managerPods(v) {
		since := timing.Latest(p.Scheduled, p.ReadySince)
		if of := since.Add(timing.ManagerReturns).Sub(v.Snapshot.Now); of < timing.ManagerReturns+timing.ClocksDiffer {
			d = max(d, of)
		}
	}
	return d
}

// enableMIGManager lets mig-manager come back. It applies what the label names when it starts, so that is what is
// there.
func enableMIGManager(v *View) action.Action {
	patch := v.Patch("letting NVIDIA's mig-manager come back to the node")
	patch.Labels[v1alpha1.LabelMIGManager] = new("true")
	patch.Labels[v1alpha1.LabelMIGConfig] = new(migmanager.Render(nil, v.Devices).Name)
	patch.Labels[v1alpha1.LabelMIGConfigState] = nil
	saveBaselineCopy(v, patch)
	patch.Locked = true
	return patch
}

func managerReads(v *View) bool {
	pods := managerPods(v)
	return len(pods) > 0 && !slices.ContainsFunc(pods, func(p cluster.Pod) bool { return !p.MountsConfig })
}

// managerBusy reports whether mig-manager is at work. Where it gave up waiting for an operand it says pending for ever:
// what it was asked for here, and has not done in its time, it does no more.
func managerBusy(v *View) bool {
	since, requested := ManagerRequestedSince(v, v.Node.Labels[v1alpha1.LabelMIGConfig])
	if requested && v.Snapshot.Now.Sub(since) >= timing.RebootTimeout {
		return false
	}
	switch v.Node.Labels[v1alpha1.LabelMIGConfigState] {
	case cluster.ManagerRebooting:
		return true
	case cluster.ManagerPending:
		return !requested || v.Snapshot.Now.Sub(since) < timing.ManagerTimeout
	}
	return false
}

// startManagersOperands starts NVIDIA's operands that mig-manager has stopped and left so, as it does where it gives up
// waiting for one.
func startManagersOperands(v *View, labels map[string]*string) {
	if !byMIGManager(v) || managerBusy(v) {
		return
	}
	for _, name := range cluster.DeployLabels() {
		if v.Node.Labels[name] == cluster.StoppedValue {
			labels[name] = new("true")
		}
	}
}

// byManager is the part of NVIDIA's mig-manager, where it partitions the GPUs of the node.
func byManager(v *View, targetInSpec bool) (Result, bool) {
	switch {
	case partitions(v) && targetInSpec && v.Node.GPU.Spec.MIGConfigName != "":
		return managerReturns(v, driveManager(v)), true
	case partitions(v) && !targetInSpec && v.Taint() == nil:
		return awaitMIGManagerPrepared(v)
	}
	return Result{}, false
}

// managerReturns lets a pod of mig-manager come to a node on which it must change the GPUs and has none, because it was
// deleted or its DaemonSet changed. The DaemonSet does not tolerate our taint, so the taint is off as long as there is
// no pod. NVIDIA's device plugin is stopped before that, as mig-manager does it, so the node advertises no GPU to users'
// pods that come meanwhile. The new pod applies what the label names.
func managerReturns(v *View, r Result) Result {
	if act, paced := SplitAct(r.Next); len(act)+len(paced.Start) > 0 || r.State == Failed {
		return r
	}
	switch gone := len(managerPods(v)) == 0; {
	case !gone && !v.Tainted() && !MustStayUntainted(v):
		r.Next = withSlot(v, v.taint(v)...)
	case gone && v.Tainted():
		r.Message = "waiting until NVIDIA's mig-manager, which has no pod on the node, comes back to apply " +
			v.Node.GPU.Spec.MIGConfigName
		patch, stops := stopPatch(v, cluster.DeployLabels())
		plugins := operandPods(v, cluster.DeployLabels()[0])
		switch {
		case stops:
			r.Next = atOnce(patch)
		case len(plugins) > 0:
			r.Message += ", for which NVIDIA's device plugin has to end first: " + format.List(plugins)
		default:
			r.Next = atOnce(removeTaints(v)...)
		}
	}
	return r
}

// driveManager lets mig-manager do what the spec says, and waits for it.
func driveManager(v *View) Result {
	r := Result{State: Applying, Reason: v1alpha1.ReasonMIGManagerPartitioning}
	name := v.Node.GPU.Spec.MIGConfigName
	since, requested := ManagerRequestedSince(v, name)
	switch {
	case requested:
		return mirrorManager(v, r, name, since)
	case !agentClosedDriver(v):
		r.Message = "waiting until the agent has closed the driver for NVIDIA's mig-manager"
	case managerBusy(v):
		r.Message = "waiting until NVIDIA's mig-manager has done what it was asked for before: " + managerState(v)
	case managerAnswersIn(v) > 0:
		r.Message = managerAnswers
		r.After = managerAnswersIn(v)
	default:
		requestManager(v, &r, name)
	}
	remaining := v.OrGrace(v.Node.GPU.Spec.ChangeTime.Add(timing.ApplyTimeout).Sub(v.Snapshot.Now))
	if remaining <= 0 {
		return failManager(v, r, v1alpha1.ReasonApplyTimedOut, fmt.Sprintf("not within %s: %s", timing.ApplyTimeout, r.Message))
	}
	r.After = timing.Sooner(r.After, remaining)
	return r
}

// agentClosedDriver reports whether the agent has closed the driver.
func agentClosedDriver(v *View) bool {
	c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	return found && c.Reason == v1alpha1.ReasonMIGManagerPartitioning && c.ObservedGeneration == v.Node.GPU.Generation
}

// requestManager makes the configuration visible in mig-manager's pod and then names it in the node's label.
// mig-manager notices another value only, so one that is there already is taken away first.
func requestManager(v *View, r *Result, name string) {
	r.Message = fmt.Sprintf("making the configuration %s visible to NVIDIA's mig-manager", name)
	var syncs []action.Action
	for _, p := range managerPods(v) {
		at, synced := timing.Stamped(p.SyncTriggered, name)
		if !synced {
			syncs = append(syncs, action.TriggerSync{
				Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Value: timing.Stamp(name, v.Snapshot.Now),
			})
			r.After = timing.VisibleAfter
			continue
		}
		r.After = max(r.After, at.Add(timing.VisibleAfter).Sub(v.Snapshot.Now))
	}
	if len(syncs) > 0 || r.After > 0 {
		r.Next = atOnce(syncs...)
		return
	}
	r.Message = "asking NVIDIA's mig-manager for the configuration " + name
	patch := v.Patch(r.Message)
	patch.Locked = true
	patch.Labels[v1alpha1.LabelMIGConfig] = nil
	if v.Node.Labels[v1alpha1.LabelMIGConfig] != name {
		patch.Labels[v1alpha1.LabelMIGConfig], patch.Labels[v1alpha1.LabelMIGConfigState] = &name, nil
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = new(timing.Stamp(name, v.Snapshot.Now))
	}
	r.Next = atOnce(patch)
}

// mirrorManager says what mig-manager says, and gives it the deadline that it does not have.
func mirrorManager(v *View, r Result, name string, since time.Time) Result {
	timeout := timing.ManagerTimeout
	switch state := v.Node.Labels[v1alpha1.LabelMIGConfigState]; {
	case v.Node.Labels[v1alpha1.LabelMIGConfig] != name:
		return failManager(v, r, v1alpha1.ReasonMIGManagerFailed, fmt.Sprintf("another controller has set %s=%s; let only one drive "+
			"NVIDIA's mig-manager", v1alpha1.LabelMIGConfig, v.Node.Labels[v1alpha1.LabelMIGConfig]))
	case state == cluster.ManagerSuccess:
		r.Message = "NVIDIA's mig-manager is done; the agent looks at the GPUs"
		r.Next = atOnce(lookAgain(v, "letting the agent look at what NVIDIA's mig-manager did"))
		return r
	case state == cluster.ManagerFailed:
		return failManager(v, r, v1alpha1.ReasonMIGManagerFailed,
			fmt.Sprintf("NVIDIA's mig-manager failed to apply %s; its log says why: %s", name, managerLogs(v)))
	case state == cluster.ManagerRebooting:
		timeout = timing.RebootTimeout
		r.Message = "NVIDIA's mig-manager reboots the node"
	case state == "":
		r.Message = fmt.Sprintf("waiting for NVIDIA's mig-manager to begin with %s", name)
	default:
		r.Message = fmt.Sprintf("NVIDIA's mig-manager applies %s (%s)", name, managerState(v))
	}
	r.After = v.OrGrace(since.Add(timeout).Sub(v.Snapshot.Now))
	if r.After <= 0 {
		return failManager(v, r, v1alpha1.ReasonMIGManagerFailed, fmt.Sprintf("NVIDIA's mig-manager did not apply %s within %s "+
			"(%s); it may have left NVIDIA's operands stopped; its log says more: %s", name, timeout, managerState(v), managerLogs(v)))
	}
	return r
}

// failManager lets the change fail, and the agent look at what is there.
func failManager(v *View, r Result, reason, message string) Result {
	r = failChange(v, r, reason, message)
	if r.Next == nil { // on the way back, which does not fail
		r.Next = atOnce(lookAgain(v, "letting the agent look at what NVIDIA's mig-manager left"))
	}
	r.After = 0
	return r
}

// verifyManager decides on what mig-manager has left, once the agent has looked: its own word does not count.
func verifyManager(v *View) (Result, bool) {
	c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	name := managerRequest(v)
	if _, requested := ManagerRequestedSince(v, name); name == "" || !requested || !found || c.ObservedGeneration != v.Node.GPU.Generation {
		return Result{}, false
	}
	message := "NVIDIA's mig-manager has not brought the GPUs to what was asked for (" + managerState(v) + ")"
	r := Result{State: Applying, Reason: v1alpha1.ReasonMIGManagerFailed, Message: agentMessage(v, message)}
	return failChange(v, r, v1alpha1.ReasonMIGManagerFailed, r.Message), true
}

// ManagerClearing says in one line what mig-manager is going to do; empty: nothing.
func ManagerClearing(v *View) string {
	if !partitions(v) {
		return ""
	}
	var cleared []string
	for _, d := range managerClears(v) {
		cleared = append(cleared, fmt.Sprintf("GPU %d", d.Index))
	}
	return fmt.Sprintf("NVIDIA's mig-manager: apply %s, which clears %s", migConfig(v).Name, strings.Join(cleared, ", "))
}

// awaitMIGManagerDisabled keeps NVIDIA's mig-manager off a node whose MIG instances are the operator's: only one may
// drive MIG. Its label is recorded in the baseline before it is changed, and stays until the node goes back to that.
func awaitMIGManagerDisabled(v *View) (Result, bool) {
	value := v.Node.Labels[v1alpha1.LabelMIGManager]
	if !mustDisableMIGManager(v) {
		return Result{}, false
	}
	r := Result{State: StoppingOperands, Reason: v1alpha1.ReasonStoppingOperands, Next: withSlot(v)}
	if value == "" || value == "false" {
		remain := operandPods(v, v1alpha1.LabelMIGManager)
		r.Message = "waiting until NVIDIA's mig-manager is gone: " + format.List(remain)
		return r, len(remain) > 0
	}
	patch := v.Patch("keeping NVIDIA's mig-manager off the node")
	patch.Labels[v1alpha1.LabelMIGManager] = new("false")
	overwriteMIGLabels(v, patch.Labels)
	saveBaselineCopy(v, patch)
	patch.Locked = true // on a Node that was restored from a backup meanwhile, the copy of the baseline would be missing
	r.Message, r.Next = "NVIDIA's mig-manager is being kept off the node, since only one may drive MIG", withSlot(v, patch)
	return r, true
}

// migManagerIsBack reports whether a user or another controller lets NVIDIA's mig-manager back onto a node that was
// verified without it.
func migManagerIsBack(v *View) bool {
	return !v.Target.ReleasesNode && mustDisableMIGManager(v) && v.TargetIsLastGood() && v.Node.Labels[v1alpha1.LabelMIGManager] == "true"
}

// disablesMIGManagerAgain reports whether the label that keeps NVIDIA's mig-manager off the node is to be set, and
// notes in the patch that another controller is overruled.
func disablesMIGManagerAgain(v *View, patch action.PatchNode) bool {
	manager := v.Node.Labels[v1alpha1.LabelMIGManager]
	if v.Target.ReleasesNode || !mustDisableMIGManager(v) || manager == "" || manager == "false" {
		return false
	}
	if !migManagerIsBack(v) {
		return true
	}
	if overruledFor(v, v1alpha1.LabelMIGManager) > 0 {
		return false
	}
	noteOverruled(v, patch, v1alpha1.LabelMIGManager)
	return true
}

// keepMIGManagerOff keeps NVIDIA's mig-manager off a node on which nothing else is changed while both of NVIDIA's
// programs offer its GPUs: where a ClusterPolicy takes the place of a GPUCluster, the GPU Operator starts it and asks
// it for no instances, also while pods use those that the operator made.
func keepMIGManagerOff(v *View) []action.Action {
	spec := &v.Node.GPU.Spec
	if v.Stack != dra.Both || spec.Baseline == nil || spec.MIGActuator != "" || !mustDisableMIGManager(v) || v.Node.Labels[v1alpha1.LabelMIGManager] != "true" ||
		overruledFor(v, v1alpha1.LabelMIGManager) > 0 {
		return nil
	}
	patch := v.Patch("keeping NVIDIA's mig-manager off instances that the operator made")
	patch.Labels[v1alpha1.LabelMIGManager] = new("false")
	saveBaselineCopy(v, patch)
	patch.Locked = true
	noteOverruled(v, patch, v1alpha1.LabelMIGManager)
	return []action.Action{patch}
}

// migManagerEnabledByOthers finds that a user or another controller let NVIDIA's mig-manager back onto the node, again.
func migManagerEnabledByOthers(v *View, _ State) Finding {
	remaining := overruledFor(v, v1alpha1.LabelMIGManager)
	if !migManagerIsBack(v) || remaining <= 0 {
		return Finding{}
	}
	return Finding{
		Reason: v1alpha1.ReasonMIGManagerReenabled, After: remaining,
		Message: fmt.Sprintf("a user or another controller sets %s=true again; it is set back to false at %s; find who does it "+
			"(kubectl get node %s --show-managed-fields -o yaml), or use mig.actuator MIGManager", v1alpha1.LabelMIGManager, format.Clock(v.Snapshot.Now.Add(remaining)), v.Node.Name),
	}
}

// migConfigIgnored finds that a user tells NVIDIA's mig-manager what to do on a node where it does not run.
func migConfigIgnored(v *View, _ State) Finding {
	spec := v.Node.GPU.Spec
	if v.Policy == nil || v.Target.ReleasesNode || spec.Baseline == nil || !mustDisableMIGManager(v) || partitionedByManager(v) {
		return Finding{}
	}
	was, requested := spec.Baseline.Labels[v1alpha1.LabelMIGConfig], v.Node.Labels[v1alpha1.LabelMIGConfig]
	if requested == was || requested == "" || requested == migConfigPlaceholder || was == "" && requested == migConfigDefault {
		return Finding{}
	}
	return Finding{
		Reason: v1alpha1.ReasonMIGConfigIgnored,
		Message: fmt.Sprintf("a user or another controller set %s=%s (it was %q before the operator), without effect, since policy %s partitions the "+
			"node; say it in the policy, and set the label back",
			v1alpha1.LabelMIGConfig, requested, was, v.Policy.Name),
	}
}

// A node that returns to its baseline gets the label back that mig-manager had before, and mig-manager itself where it
// was kept off. mig-manager applies what the label names, which may be another layout than the one in which the node
// was found, and from then on the GPUs are the administrator's: to restore them once more would begin a fight without
// end. The ClusterPolicy keeps naming the operator's ConfigMap until mig-manager has answered: to change that replaces
// the pod of mig-manager, which in the middle of its work would leave NVIDIA's operands stopped.

// restoreManagerLabels are the labels of mig-manager's that a node goes back to when nothing of ours is to be applied
// there. Its state is removed with that, so that the next one is its answer.
func restoreManagerLabels(v *View, labels map[string]*string) {
	if byMIGManager(v) && !v.Target.ReleasesNode || !migmanager.Ours(v.Node.Labels[v1alpha1.LabelMIGConfig]) {
		return
	}
	before := labelBefore(v, v1alpha1.LabelMIGConfig)
	labels[v1alpha1.LabelMIGConfig] = before
	if before != nil && byMIGManager(v) {
		labels[v1alpha1.LabelMIGConfigState] = nil
	}
}

// stampManagerRequest notes in the patch of a release since when mig-manager has its label back, and removes the stamp
// of anything else that it was asked for. One from a clock that was ahead is written anew: its time would end late.
func stampManagerRequest(v *View, patch action.PatchNode) {
	name := labelRestored(v, patch)
	if at, former, is := managerFormerSince(v); name == "" && is && v.Target.ReleasesNode {
		if !at.After(v.Snapshot.Now) {
			return
		}
		name = former
	}
	if name != "" {
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = new(timing.Stamp(name, v.Snapshot.Now))
		return
	}
	if _, requested := v.Node.Annotations[v1alpha1.AnnotationMIGConfig]; requested && !managerMayFinish(v) {
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = nil
	}
}

// labelRestored is the former label that a patch restores for mig-manager; empty if it restores none, or if no
// mig-manager is to read it.
func labelRestored(v *View, patch action.PatchNode) string {
	_, manager := patch.Labels[v1alpha1.LabelMIGManager]
	_, config := patch.Labels[v1alpha1.LabelMIGConfig]
	name := labelPatched(v, patch, v1alpha1.LabelMIGConfig)
	reads := byMIGManager(v) || labelPatched(v, patch, v1alpha1.LabelMIGManager) == cluster.LabelTrue
	if !v.Target.ReleasesNode || !reads || !manager && !config || migmanager.Ours(name) || name == migConfigPlaceholder {
		return ""
	}
	return name
}

// labelPatched is the value of a label once a patch is written.
func labelPatched(v *View, patch action.PatchNode, label string) string {
	if value, changes := patch.Labels[label]; changes {
		return ptr.Deref(value, "")
	}
	return v.Node.Labels[label]
}

// managerLabelRestored reports whether mig-manager has the label back that it had before, so that the GPUs are not the
// operator's any more. A GPUNode that was restored from a backup asks for what a policy did.
func managerLabelRestored(v *View) bool {
	_, _, is := managerFormerSince(v)
	return is && v.Target.ReleasesNode && v.Node.GPU.Spec.PolicyName == ""
}

// leftToManager is the state of a node whose GPUs are the administrator's again, and NVIDIA's mig-manager applies what
// they ask for. The operator changes them no more, so it needs no report of the agent.
func leftToManager(v *View) Result {
	gates := []gateFunc{awaitSelected, awaitMIGManagerDone, awaitAgentReadmitted}
	if !byMIGManager(v) {
		gates = []gateFunc{awaitSelected, awaitPublishedInTime, awaitUntainted, awaitMIGManagerDone} // the pod of mig-manager does not tolerate the taint, and has yet to come
	}
	for _, gate := range gates {
		if r, pending := gate(v); pending {
			return r
		}
	}
	return changeDone(v)
}

// awaitAgentReadmitted lets the agent return where mig-manager has stopped it and given up.
func awaitAgentReadmitted(v *View) (Result, bool) {
	if v.Node.Labels[v1alpha1.LabelRunsAgent] != cluster.StoppedValue {
		return Result{}, false
	}
	actions := readmitAgent(v)
	return Result{
		State: Finishing, Reason: underwayReason(v), Message: "NVIDIA's mig-manager left the agent stopped; it is allowed on the node again",
		Next: atOnce(actions...),
	}, len(actions) > 0
}

// readmitAgent lets the agent return where NVIDIA's mig-manager, which we asked, has stopped it and given up.
func readmitAgent(v *View) []action.Action {
	if !byMIGManager(v) || managerBusy(v) {
		return nil
	}
	patch := v.Patch("allowing the agent on the node again, which NVIDIA's mig-manager left stopped")
	patch.Labels[v1alpha1.LabelRunsAgent] = new("true")
	patch.Locked = true
	return []action.Action{patch}
}

// managerFormerSince is since when mig-manager has the label back that it had before, and its value; another policy may
// govern the node since.
func managerFormerSince(v *View) (at time.Time, name string, is bool) {
	name, at, is = timing.Parse(v.Node.Annotations[v1alpha1.AnnotationMIGConfig])
	return at, name, is && name != "" && !migmanager.Ours(name)
}

// managerDoneBy is until when the answer of mig-manager to its former label is waited for; ok is false if it has
// answered, has no pod on the node that could, or if no change of the ClusterPolicy would replace its pod.
func managerDoneBy(v *View) (by time.Time, ok bool) {
	at, _, former := managerFormerSince(v)
	if !former || v.Node.GPU.Spec.Baseline == nil || !v.Snapshot.Plugin.MIGReady {
		return time.Time{}, false
	}
	runs, wasAway := len(managerPods(v)) > 0, v.Node.GPU.Spec.MIGActuator == ""
	switch state := v.Node.Labels[v1alpha1.LabelMIGConfigState]; {
	case state == cluster.ManagerRebooting:
		return at.Add(timing.RebootTimeout), runs
	case state == cluster.ManagerPending:
		return at.Add(timing.ManagerTimeout), runs
	case wasAway: // the state is the former one until its pod comes and begins
		return at.Add(timing.ManagerReturns), true
	case state == cluster.ManagerSuccess || state == cluster.ManagerFailed:
		return time.Time{}, false
	}
	return at.Add(timing.ManagerTimeout), runs
}

// managerMayFinish reports whether mig-manager still has time to answer.
func managerMayFinish(v *View) bool {
	by, waits := managerDoneBy(v)
	return waits && by.After(v.Snapshot.Now)
}

// migManagerFinishing finds that mig-manager is still at work on its label of before under another policy, and forgets
// that once it is over: its next pod may begin anew, and is the administrator's.
func migManagerFinishing(v *View, _ State) Finding {
	if _, _, former := managerFormerSince(v); !former || managerLabelRestored(v) {
		return Finding{}
	}
	if by, _ := managerDoneBy(v); managerMayFinish(v) {
		return Finding{After: by.Sub(v.Snapshot.Now)}
	}
	patch, _ := ForgetManager(v)
	return Finding{Repair: []action.Action{patch}}
}

// awaitMIGManagerDone is the gate before a node is forgotten: mig-manager has answered to its label of before, or the
// time for that is over.
func awaitMIGManagerDone(v *View) (Result, bool) {
	by, waits := managerDoneBy(v)
	remaining := by.Sub(v.Snapshot.Now)
	if !waits || remaining <= 0 {
		return Result{}, false
	}
	return Result{
		State: Finishing, Reason: v1alpha1.ReasonMIGManagerBusy, After: remaining,
		Message: fmt.Sprintf("Waiting for NVIDIA's mig-manager, which has its former label again (%s), until %s at the latest; a change of the "+
			"ClusterPolicy before that would restart mig-manager", managerState(v), format.Clock(by)),
	}, true
}

// ForgetManager removes the stamp from a node that is forgotten, and reports whether there was one.
func ForgetManager(v *View) (patch action.PatchNode, is bool) {
	patch = v.Patch("forgetting what NVIDIA's mig-manager was asked for")
	patch.Annotations[v1alpha1.AnnotationMIGConfig] = nil
	_, is = v.Node.Annotations[v1alpha1.AnnotationMIGConfig]
	return patch, is
}

// managerRemaining is how much remains of the time that NVIDIA's mig-manager may take for what it has begun by itself.
func managerRemaining(v *View) (remaining time.Duration, works bool) {
	if partitionedByManager(v) || !managerWorks(v) {
		return 0, false
	}
	if v.Node.MarkedAtWorkSince.IsZero() {
		return timing.UnrepairedTimeout, true
	}
	return v.Node.MarkedAtWorkSince.Add(timing.UnrepairedTimeout).Sub(v.Snapshot.Now), true
}

// ManagerBlocksChange reports whether a change has to wait for NVIDIA's mig-manager. One that is stuck is waited for no
// longer where it has to leave the node anyway.
func ManagerBlocksChange(v *View) bool {
	remaining, works := managerRemaining(v)
	return works && (remaining > 0 || !mustDisableMIGManager(v))
}

// ManagerChanging is the message for a node that NVIDIA's mig-manager is changing.
func ManagerChanging(v *View) string {
	return fmt.Sprintf("NVIDIA's mig-manager is changing the node (%s)", managerState(v))
}

// managerStuck finds a mig-manager that has begun and not ended. It is not ours to repair.
func managerStuck(v *View, _ State) Finding {
	remaining, works := managerRemaining(v)
	switch {
	case !works:
		return Finding{}
	case remaining > 0:
		return Finding{After: remaining}
	}
	return Finding{
		Reason: v1alpha1.ReasonMIGManagerStuck,
		Message: fmt.Sprintf("not ended since %s: %s; look at its log, and delete its pod",
			format.Clock(v.Node.MarkedAtWorkSince), ManagerChanging(v)),
	}
}

// partitionedByManager reports whether the policy of the node has its GPUs partitioned by mig-manager, also where that
// is impossible.
func partitionedByManager(v *View) bool {
	return v.Policy != nil && actuatorOf(v.Policy) == v1alpha1.MIGActuatorMIGManager
}

// managerClears are the GPUs that mig-manager clears on its way to the target.
func managerClears(v *View) []gpu.Device {
	if !partitions(v) {
		return nil
	}
	return migmanager.Clears(v.Target.Devices, v.Devices)
}

// mustDisableMIGManager reports whether NVIDIA's mig-manager has to stay off the node.
func mustDisableMIGManager(v *View) bool {
	return v.ByGPUOperator() && !byMIGManager(v) && touchesMIG(v)
}

// touchesMIG reports whether MIG mode is on somewhere on the node or will be.
func touchesMIG(v *View) bool {
	for _, d := range v.Devices {
		if d.State.MIG || d.PendingMIG {
			return true
		}
	}
	return slices.ContainsFunc(v.Target.Devices, func(d v1alpha1.DeviceSpec) bool {
		return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled
	})
}

// managerPods are the pods of NVIDIA's mig-manager on the node.
func managerPods(v *View) []cluster.Pod {
	var pods []cluster.Pod
	for _, p := range v.Node.Pods {
		if p.KeptBy(v1alpha1.LabelMIGManager) && !p.Terminating {
			pods = append(pods, p)
		}
	}
	return pods
}

// managerState says what NVIDIA's mig-manager says.
func managerState(v *View) string {
	return fmt.Sprintf("%s=%s, %s=%s", v1alpha1.LabelMIGConfig, v.Node.Labels[v1alpha1.LabelMIGConfig],
		v1alpha1.LabelMIGConfigState, v.Node.Labels[v1alpha1.LabelMIGConfigState])
}

// managerLogs is the command that shows what NVIDIA's mig-manager says.
func managerLogs(v *View) string {
	pods := managerPods(v)
	if len(pods) == 0 {
		return "there is no pod of it on the node"
	}
	return fmt.Sprintf("kubectl logs -n %s %s", pods[0].Namespace, pods[0].Name)
}

// managerWorks reports whether NVIDIA's mig-manager runs on the node and has begun to change it.
func managerWorks(v *View) bool {
	return cluster.ManagerAtWork(v.Node.Labels[v1alpha1.LabelMIGConfigState]) && len(managerPods(v)) > 0
}
