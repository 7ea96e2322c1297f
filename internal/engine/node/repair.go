// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// What the operator or another controller left half-done on a node is reported, and repaired where it is the
// operator's.
//
//	result → each check → Finding{reason, message, repair} → result

// findingFunc finds what is left half-done on a node in a state.
type findingFunc func(*View, State) Finding

// AddFindings adds to a result what is left half-done on the node. A finding is the reason of a node that has not
// failed; repairs wait for no slot in the budget, since they only restore. It returns them after what the result has
// done at once.
func AddFindings(v *View, r Result) (Result, []action.Action) {
	actions, _ := SplitAct(r.Next)
	checks := []findingFunc{ // the one that matters most comes last
		limitsPending, userWaiting, mpsUnreachable, gpuMissing, migConfigIgnored, migManagerFinishing,
		mpsOverrideNotNeeded, nvidiaMPSNotKeptOff, computeModeLeft, computeModeLost,
	}
	checks = append(append(checks, v.findings()...), notEnding, migManagerEnabledByOthers, managerStuck, leftStopped, requestLeft, configGone)
	if _, is := UnderMaintenance(v); is {
		checks = []findingFunc{upgradeUnvalidated, nvidiaMPSNotKeptOff, leftStopped, requestLeft, configGone} // all else follows from the maintenance
	}
	for _, find := range checks {
		f := find(v, r.State)
		actions, r.After = append(actions, f.Repair...), timing.Sooner(r.After, f.After)
		if f.Reason == "" {
			continue
		}
		if r.State == Failed || r.State == Unsupported || f.Beside && r.State != UpToDate {
			r.Message += "; " + f.Message
			continue
		}
		r.Reason = f.Reason
		r.Message = strings.TrimSuffix(f.Message+"; "+r.Message, "; ")
	}
	return r, actions
}

// gpuMissing finds that GPUs are missing which the policy selects by index.
func gpuMissing(v *View, _ State) Finding {
	if v.Desired == nil {
		return Finding{}
	}
	missing := policy.Missing(v.Policy, PolicyNode(v.Node))
	if len(missing) == 0 {
		return Finding{}
	}
	return Finding{
		Reason: v1alpha1.ReasonGPUMissing, Beside: true,
		Message: fmt.Sprintf("The node no longer has %s, which gpuSelector.indexes selected. Policy %s keeps the other GPUs that it "+
			"selected, though their indexes have changed. Replace the GPU, or change gpuSelector.indexes", format.List(missing), v.Policy.Name),
	}
}

// leftStopped finds NVIDIA's operands stopped though nobody changes anything: by us, on a node whose agent is gone, or by
// a mig-manager that ended on its way. k8s-driver-manager stops them with another value, and is left alone.
func leftStopped(v *View, s State) Finding {
	if !v.ByGPUOperator() || v.Node.MarkedAtWorkSince.IsZero() {
		return Finding{}
	}
	remaining := v.Node.MarkedAtWorkSince.Add(timing.UnrepairedTimeout).Sub(v.Snapshot.Now)
	theirs := stoppedByOthers(v)
	switch {
	case len(theirs) > 0 && !managerWorks(v):
		if remaining > 0 {
			return Finding{After: remaining}
		}
		patch := v.Patch("starting NVIDIA's operands again, which its mig-manager left stopped")
		for _, name := range theirs {
			patch.Labels[name] = new("true")
		}
		patch.Locked = true
		return Finding{
			Reason: v1alpha1.ReasonOperandsLeftStopped, Repair: []action.Action{patch},
			Message: fmt.Sprintf("NVIDIA's operands were left stopped since %s (%s) by a mig-manager that does not work on "+
				"the node any more; they are being started again", format.Clock(v.Node.MarkedAtWorkSince), format.List(theirs)),
		}
	case len(StoppedByOperator(v)) > 0 && s == Unknown && !keepsOperandsStopped(v): // else they could not be started, and it would be said each time
		if remaining > 0 {
			return Finding{After: remaining}
		}
		return Finding{
			Reason: v1alpha1.ReasonOperandsLeftStopped, Repair: EndInterrupted(v, "the agent does not come back"),
			Message: fmt.Sprintf("the operator stopped NVIDIA's operands at %s for a change that the agent has not ended; "+
				"they are being started again, and the change goes on once the agent reports again", format.Clock(v.Node.MarkedAtWorkSince)),
		}
	}
	return Finding{}
}

// requestLeft finds a node that takes pods again though its agent is still asked for what needs instances or GPUs idle,
// and withdraws that. An agent that comes back, or waits for one user, would take them from pods that have come since: it
// sees no init container. The change begins anew, with a drain.
func requestLeft(v *View, _ State) Finding {
	if v.MadeUnavailable() || MustStayUntainted(v) {
		return Finding{}
	}
	return Finding{Repair: AskNothingOfUsers(v)}
}

// AskNothingOfUsers withdraws what the agent is asked for that needs instances or GPUs idle.
func AskNothingOfUsers(v *View) []action.Action {
	if !AsksOfUsers(v) {
		return nil
	}
	withdrawn := withdrawRequest(v, "withdrawing what needs GPUs idle, since the node takes pods again")
	withdrawn.Spec.ChangeTime = v.Node.GPU.Spec.ChangeTime // a change that timed out rests as it would
	return []action.Action{withdrawn}
}

// configGone finds that the node selects a configuration that is gone.
func configGone(v *View, _ State) Finding { return Finding{Repair: LeaveLostConfig(v)} }

// AsksOfUsers reports whether the agent is asked for what needs instances or GPUs idle. What was reached before it keeps
// up by itself, and what waits for a reboot that the operator does not make takes nothing before that. Nor does a target
// that cannot be reached, which would be asked for anew before its time is over (930306); but an agent that comes back, or
// is asked for what is no target any more, may yet change other GPUs.
func AsksOfUsers(v *View) bool {
	spec := v.Node.GPU.Spec
	_, _, stalled := v.ApplyStalled()
	_, timedOut := recordedTimeout(v)
	if len(spec.Devices) == 0 || stalled && !timedOut && v.Node.AgentReady && specMatches(spec, v.Target) || spec.Reboot == nil && specNeedsReboot(v) ||
		isLastGood(&v.Node.GPU, Target{Config: spec.ConfigName, Devices: spec.Devices}) {
		return false
	}
	steps, _ := plan.Node(spec.Devices, plan.Devices(v.Node.GPU.Status.Devices))
	if spec.MIGActuator == v1alpha1.MIGActuatorMIGManager {
		steps = plan.WithoutMIG(steps)
	}
	needsIdle := func(s plan.Step) bool { return s.Needs() > plan.NeedsNothing }
	return slices.ContainsFunc(steps, needsIdle) && !plan.OnlyComputeMode(steps)
}

// stoppedByOthers are the deploy labels that carry mig-manager's value and that we did not set to it.
func stoppedByOthers(v *View) []string {
	var theirs []string
	for name, value := range v.Node.Labels {
		if strings.HasPrefix(name, cluster.DeployPrefix) && value == cluster.StoppedValue && !slices.Contains(StoppedByOperator(v), name) {
			theirs = append(theirs, name)
		}
	}
	slices.Sort(theirs)
	return theirs
}

// notEnding finds pods of NVIDIA's that should be gone long since, in a state that waits for that.
func notEnding(v *View, s State) Finding {
	if s != StoppingOperands && s != Selecting && s != Verifying && s != Degraded {
		return Finding{}
	}
	var names []string
	f := Finding{}
	for _, p := range v.Node.Pods {
		if !p.Terminating || !p.NVIDIA || !cluster.SelectsDeploy(p.NodeSelector) {
			continue
		}
		if remaining := p.EndsBy.Add(timing.EndTimeout).Sub(v.Snapshot.Now); remaining > 0 {
			f.After = timing.Sooner(f.After, remaining)
			continue
		}
		names = append(names, fmt.Sprintf("%s/%s (since %s)", p.Namespace, p.Name, format.Clock(p.EndsBy)))
	}
	if len(names) > 0 {
		slices.Sort(names)
		f.Reason = v1alpha1.ReasonOperandsNotEnding
		f.Message = fmt.Sprintf("these pods of NVIDIA's were deleted and do not end: %s; look at the kubelet and the container "+
			"runtime of the node, which have to end them", format.List(names))
	}
	return f
}

// pluginOutdated finds pods of NVIDIA's device plugin that the GPU Operator has not started anew since the
// ClusterPolicy names our ConfigMap, as with updateStrategy OnDelete, and starts them anew.
func pluginOutdated(v *View, s State) Finding {
	since, names := v.Node.GPU.Spec.ChangeTime, pluginsReadingOthers(v)
	if s != Selecting || len(names) == 0 || since.IsZero() || !v.Snapshot.Plugin.Ready {
		return Finding{}
	}
	if remaining := since.Add(timing.OutdatedTimeout).Sub(v.Snapshot.Now); remaining > 0 {
		return Finding{After: remaining}
	}
	restarts, after := restartPlugin(v, "it still reads another ConfigMap than the operator's", readsOthersConfig)
	return Finding{
		Reason: v1alpha1.ReasonDevicePluginOutdated, Repair: restarts, After: after,
		Message: fmt.Sprintf("pods read another ConfigMap than the ClusterPolicy names: %s; "+
			"they are being started anew; look at daemonsets.updateStrategy of the ClusterPolicy", format.List(names)),
	}
}

// computeModeLeft finds GPUs that let only one process in, or none, though no MPS control daemon serves them: the
// daemon died, or a user set it by hand.
func computeModeLeft(v *View, s State) Finding {
	if s != UpToDate {
		return Finding{} // until then it is a step of the plan, or changes all the time
	}
	var ours, others []string
	for _, d := range v.Devices {
		if d.State.MIG || d.Virtual || d.State.MPS != nil || d.State.ComputeMode == gpu.ComputeDefault {
			continue
		}
		name := fmt.Sprintf("GPU %d (%s)", d.Index, d.State.ComputeMode)
		if cluster.Lists(v.Target.Devices, d.UUID) {
			ours = append(ours, name)
		} else {
			others = append(others, name)
		}
	}
	f := Finding{Reason: v1alpha1.ReasonComputeModeLeft}
	switch {
	case len(ours) > 0:
		f.Message = fmt.Sprintf("%s: not in the default compute mode, and no MPS control daemon serves it, so pods get \"busy or "+
			"unavailable\"; the agent sets it back once nobody uses the GPU", format.List(ours))
		if len(v.Blockers) > 0 {
			f.Message += ", now " + describeBlockers(v)
		}
	case len(others) > 0:
		f.Message = fmt.Sprintf("%s: not in the default compute mode, and no MPS control daemon serves it, so pods get \"busy or "+
			"unavailable\"; the policy does not select it, so set it back: nvidia-smi -i INDEX -c DEFAULT", format.List(others))
	default:
		return Finding{}
	}
	return f
}

// computeModeLost finds GPUs that a daemon of the operator serves and that let any program in: the driver has forgotten
// the compute mode, or a user set it by hand.
func computeModeLost(v *View, s State) Finding {
	if s != UpToDate {
		return Finding{}
	}
	var names []string
	for _, d := range v.Devices {
		if m := d.State.MPS; m != nil && !m.External && d.State.ComputeMode == gpu.ComputeDefault && !d.State.MIG && cluster.Lists(v.Target.Devices, d.UUID) {
			names = append(names, fmt.Sprintf("GPU %d", d.Index))
		}
	}
	if len(names) == 0 {
		return Finding{}
	}
	return Finding{Reason: v1alpha1.ReasonComputeModeLost, Message: fmt.Sprintf("%s: in the default compute mode, so a program that is no MPS client "+
		"can use it without the limits; the agent sets the mode again once nobody uses the GPU, or start nvidia-persistenced", format.List(names))}
}

// limitsPending finds pods that keep the MPS limits from before the last change.
func limitsPending(v *View, s State) Finding {
	if s != UpToDate {
		return Finding{} // until then the limits are a part of the change
	}
	var names []string
	clients := int32(0)
	for _, d := range v.Node.GPU.Status.MPS {
		clients += d.OutdatedClients
		for _, uid := range d.OutdatedPodUIDs {
			names = append(names, podNameOf(v, uid))
		}
	}
	if clients == 0 {
		return Finding{}
	}
	slices.Sort(names)
	who := fmt.Sprintf("%d MPS clients", clients)
	if len(names) > 0 {
		who = format.List(names)
	}
	return Finding{Reason: v1alpha1.ReasonLimitsPending, Message: fmt.Sprintf("%s: started before the MPS limits changed, and "+
		"keep their former limits until they end; restart them to apply the new limits", who)}
}

// mpsUnreachable finds daemons that new pods cannot reach.
func mpsUnreachable(v *View, _ State) Finding {
	var names []string
	clients := int32(0)
	for _, d := range v.Node.GPU.Status.MPS {
		if d.Unreachable {
			names = append(names, d.ResourceName)
			clients += d.Clients
		}
	}
	if len(names) == 0 {
		return Finding{}
	}
	slices.Sort(names)
	return Finding{Reason: v1alpha1.ReasonMPSUnreachable, Message: fmt.Sprintf("%s: another program replaced the shared memory of MPS, "+
		"as NVIDIA's MPS DaemonSet does when it starts, so new pods cannot use it until no client is connected, now %d; restart the pods "+
		"that use MPS", format.List(names), clients)}
}

// userWaiting finds pods that wait because MPS serves one user ID at a time.
func userWaiting(v *View, _ State) Finding {
	var names []string
	var active int64
	for _, d := range v.Node.GPU.Status.MPS {
		if d.User == nil || len(d.WaitingPods) == 0 {
			continue
		}
		active = *d.User
		for _, p := range d.WaitingPods {
			names = append(names, fmt.Sprintf("%s (user %d)", podNameOf(v, p.UID), p.User))
		}
	}
	if len(names) == 0 {
		return Finding{}
	}
	slices.Sort(names)
	return Finding{Reason: v1alpha1.ReasonMPSUserWaiting, Message: fmt.Sprintf("MPS serves one user ID at a time, now %d; waiting: "+
		"%s; run all pods of the node as one user ID (securityContext.runAsUser), or set sharing.mps.multiUser", active, format.List(names))}
}

// podNameOf is the name of a pod of the node.
func podNameOf(v *View, uid string) string {
	for _, p := range v.Node.Pods {
		if p.UID == uid {
			return p.Namespace + "/" + p.Name
		}
	}
	return "pod " + uid
}
