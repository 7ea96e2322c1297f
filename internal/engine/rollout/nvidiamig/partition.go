// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidiamig

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/baseline"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/desired"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/gate"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/state"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/view"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// Unavailable says why mig-manager cannot be asked on the node; nil if it can.
func Unavailable(v *view.View) *plan.Problem {
	why := v.World.Plugin.NoMIGManager
	if !v.World.Plugin.ClusterPolicy {
		why = "there is no ClusterPolicy with which the GPU Operator would run it"
	}
	if why == "" && v.Node.Labels[v1alpha1.LabelMIGManager] == "false" && !fencedByUs(v) {
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
func fencedByUs(v *view.View) bool {
	b := v.Node.GPU.Spec.Baseline
	return b != nil && b.Labels[v1alpha1.LabelMIGManager] != "false"
}

// Configs are the configurations that mig-manager needs for the node, by their names: that of the target, and while it is
// kept off the node one of what is there, which it finds when it comes back.
func Configs(v *view.View) map[string]string {
	configs := map[string]string{}
	if v.Partitions() {
		c, is := view.Config(v), migmanager.Render(nil, v.Devices)
		configs[c.Name], configs[is.Name] = c.Entries, is.Entries
	}
	return configs
}

// UsesConfigs reports whether mig-manager has to read our file for the node's sake.
func UsesConfigs(v *view.View) bool {
	return answering(v) || v.Partitions() || v.Node.GPU.Spec.MIGConfigName != "" || migmanager.Ours(v.Node.Labels[v1alpha1.LabelMIGConfig])
}

// Prepare is the gate before a node is tainted for mig-manager: it runs there and reads our file, in which the
// configuration is. Its DaemonSet does not tolerate our taint, so a pod that has to start anew has to do that before.
func Prepare(v *view.View) (gate.Judgement, bool) {
	j := gate.Judgement{State: state.PendingDisruptive, Reason: v1alpha1.ReasonConfiguringDevicePlugin, Next: gate.WithSlot(v)}
	name := view.Config(v).Name
	file, err := migmanager.Parse(v.World.Configs[migmanager.FileKey])
	_, written := file[name]
	switch {
	case !v.World.Plugin.MIGReady:
		j.Message = "NVIDIA's mig-manager is being pointed at the operator's ConfigMap"
	case err != nil || !written:
		j.Message = fmt.Sprintf("writing the configuration %s for NVIDIA's mig-manager into the ConfigMap", name)
	case v.Node.Labels[v1alpha1.LabelMIGManager] == "false":
		j.Message = "letting NVIDIA's mig-manager come back to the node"
		j.Next = gate.WithSlot(v, unfence(v))
	case !managerReads(v):
		j.Message = "waiting until NVIDIA's mig-manager runs on the node with the operator's ConfigMap; look at the pods with " +
			"app=nvidia-mig-manager there"
	case Busy(v):
		j.Message = "waiting until NVIDIA's mig-manager has done what it was asked for before: " + view.ManagerState(v)
	default:
		return gate.Judgement{}, false
	}
	return j, true
}

// unfence lets mig-manager come back. It applies what the label names when it starts, so that is what is there.
func unfence(v *view.View) action.Action {
	patch := v.Patch("letting NVIDIA's mig-manager come back to the node")
	patch.Labels[v1alpha1.LabelMIGManager] = new("true")
	patch.Labels[v1alpha1.LabelMIGConfig] = new(migmanager.Render(nil, v.Devices).Name)
	patch.Labels[v1alpha1.LabelMIGConfigState] = nil
	baseline.SaveBaseline(v, patch)
	patch.Locked = true
	return patch
}

func managerReads(v *view.View) bool {
	pods := view.ManagerPods(v)
	return len(pods) > 0 && !slices.ContainsFunc(pods, func(p world.Pod) bool { return !p.MountsConfig })
}

// Busy says whether mig-manager is at work. Where it gave up waiting for a client it says pending for ever: what it
// was asked for here, and has not done in its time, it does no more.
func Busy(v *view.View) bool {
	since, asked := view.AskedFor(v, v.Node.Labels[v1alpha1.LabelMIGConfig])
	if asked && v.World.Now.Sub(since) >= timing.RebootTimeout {
		return false
	}
	switch v.Node.Labels[v1alpha1.LabelMIGConfigState] {
	case world.ManagerRebooting:
		return true
	case world.ManagerPending:
		return !asked || v.World.Now.Sub(since) < timing.ManagerTimeout
	}
	return false
}

// Unpause starts NVIDIA's clients that mig-manager has paused and left so, as it does where it gives up waiting for one.
func Unpause(v *view.View, labels map[string]*string) {
	if !v.Managed() || Busy(v) {
		return
	}
	for _, name := range world.DeployLabels() {
		if v.Node.Labels[name] == world.PausedValue {
			labels[name] = new("true")
		}
	}
}

// Drive lets mig-manager do what the spec says, and waits for it.
func Drive(v *view.View) gate.Judgement {
	j := gate.Judgement{State: state.Applying, Reason: v1alpha1.ReasonMIGManagerPartitioning}
	name := v.Node.GPU.Spec.MIGConfigName
	since, asked := view.AskedFor(v, name)
	switch {
	case asked:
		return mirror(v, j, name, since)
	case !aside(v):
		j.Message = "waiting until the agent has closed the driver for NVIDIA's mig-manager"
	case Busy(v):
		j.Message = "waiting until NVIDIA's mig-manager has done what it was asked for before: " + view.ManagerState(v)
	default:
		request(v, &j, name)
	}
	left := v.Node.GPU.Spec.ChangeTime.Add(timing.ApplyTimeout).Sub(v.World.Now)
	if left <= 0 {
		return giveUpOnManager(v, j, v1alpha1.ReasonApplyTimedOut, fmt.Sprintf("not within %s: %s", timing.ApplyTimeout, j.Message))
	}
	j.After = timing.Sooner(j.After, left)
	return j
}

// aside says whether the agent has closed the driver.
func aside(v *view.View) bool {
	c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	return found && c.Reason == v1alpha1.ReasonMIGManagerPartitioning && c.ObservedGeneration == v.Node.GPU.Generation
}

// request makes the configuration visible in mig-manager's pod and then names it in the node's label. mig-manager notices
// another value only, so one that is there already is taken away first.
func request(v *view.View, j *gate.Judgement, name string) {
	j.Message = fmt.Sprintf("making the configuration %s visible to NVIDIA's mig-manager", name)
	var syncs []action.Action
	for _, p := range view.ManagerPods(v) {
		at, synced := timing.Stamped(p.SyncTriggered, name)
		if !synced {
			syncs = append(syncs, action.TriggerSync{
				Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Value: timing.Stamp(name, v.World.Now),
			})
			j.After = timing.VisibleAfter
			continue
		}
		j.After = max(j.After, at.Add(timing.VisibleAfter).Sub(v.World.Now))
	}
	if len(syncs) > 0 || j.After > 0 {
		j.Next = gate.AtOnce(syncs...)
		return
	}
	j.Message = "asking NVIDIA's mig-manager for the configuration " + name
	patch := v.Patch(j.Message)
	patch.Locked = true
	patch.Labels[v1alpha1.LabelMIGConfig] = nil
	if v.Node.Labels[v1alpha1.LabelMIGConfig] != name {
		patch.Labels[v1alpha1.LabelMIGConfig], patch.Labels[v1alpha1.LabelMIGConfigState] = &name, nil
		patch.Annotations[v1alpha1.AnnotationMIGConfig] = new(timing.Stamp(name, v.World.Now))
	}
	j.Next = gate.AtOnce(patch)
}

// mirror says what mig-manager says, and gives it the deadline that it does not have.
func mirror(v *view.View, j gate.Judgement, name string, since time.Time) gate.Judgement {
	timeout := timing.ManagerTimeout
	switch state := v.Node.Labels[v1alpha1.LabelMIGConfigState]; {
	case v.Node.Labels[v1alpha1.LabelMIGConfig] != name:
		return giveUpOnManager(v, j, v1alpha1.ReasonMIGManagerFailed, fmt.Sprintf("another controller has set %s=%s; let only one drive "+
			"NVIDIA's mig-manager", v1alpha1.LabelMIGConfig, v.Node.Labels[v1alpha1.LabelMIGConfig]))
	case state == world.ManagerSuccess:
		j.Message = "NVIDIA's mig-manager is done; the agent looks at the GPUs"
		j.Next = gate.AtOnce(desired.LookAgain(v, "letting the agent look at what NVIDIA's mig-manager did"))
		return j
	case state == world.ManagerFailed:
		return giveUpOnManager(v, j, v1alpha1.ReasonMIGManagerFailed,
			fmt.Sprintf("NVIDIA's mig-manager failed to apply %s; its log says why: %s", name, view.ManagerLogs(v)))
	case state == world.ManagerRebooting:
		timeout = timing.RebootTimeout
		j.Message = "NVIDIA's mig-manager reboots the node"
	case state == "":
		j.Message = fmt.Sprintf("waiting for NVIDIA's mig-manager to begin with %s", name)
	default:
		j.Message = fmt.Sprintf("NVIDIA's mig-manager applies %s (%s)", name, view.ManagerState(v))
	}
	j.After = since.Add(timeout).Sub(v.World.Now)
	if j.After <= 0 {
		return giveUpOnManager(v, j, v1alpha1.ReasonMIGManagerFailed, fmt.Sprintf("NVIDIA's mig-manager did not apply %s within %s "+
			"(%s); it may have left NVIDIA's clients paused; its log says more: %s", name, timeout, view.ManagerState(v), view.ManagerLogs(v)))
	}
	return j
}

// giveUpOnManager lets the change fail, and the agent look at what is there.
func giveUpOnManager(v *view.View, j gate.Judgement, reason, message string) gate.Judgement {
	j = gate.Fail(v, j, reason, message)
	if j.Next == nil { // on the way back, which is not given up
		j.Next = gate.AtOnce(desired.LookAgain(v, "letting the agent look at what NVIDIA's mig-manager left"))
	}
	j.After = 0
	return j
}

// Verify judges what mig-manager has left, once the agent has looked: its own word does not count.
func Verify(v *view.View) (gate.Judgement, bool) {
	c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	if _, asked := view.AskedFor(v, view.Config(v).Name); !asked || !found || c.ObservedGeneration != v.Node.GPU.Generation {
		return gate.Judgement{}, false
	}
	message := "NVIDIA's mig-manager has not brought the GPUs to what was asked for (" + view.ManagerState(v) + ")"
	j := gate.Judgement{State: state.Applying, Reason: v1alpha1.ReasonMIGManagerFailed, Message: gate.AgentMessage(v, message)}
	return gate.Fail(v, j, v1alpha1.ReasonMIGManagerFailed, j.Message), true
}

// Clearing says in one line what mig-manager is going to do.
func Clearing(v *view.View) string {
	var cleared []string
	for _, d := range view.Cleared(v) {
		cleared = append(cleared, fmt.Sprintf("GPU %d", d.Index))
	}
	return fmt.Sprintf("NVIDIA's mig-manager: apply %s, which clears %s", view.Config(v).Name, strings.Join(cleared, ", "))
}
