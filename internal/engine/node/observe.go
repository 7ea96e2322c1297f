// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Observe derives the view of a node.
func Observe(s *cluster.Snapshot, n *cluster.Node, g policy.Governed) *View {
	v := NewView(s, n)
	v.Devices, v.Policy, v.Losers = plan.Devices(n.GPU.Status.Devices), g.By, g.Over
	switch {
	case g.By != nil:
		findDesired(v)
	default:
		v.Target = v.OnStack(baselineTarget(&n.GPU, v.Devices))
		if managerUnavailable(v) != nil {
			v.Target.Actuator = "" // it is gone; the agent does it
		}
		if dynamicMIG(v) != nil {
			v.Target.Devices = besideDriversInstances(v.Target.Devices, v.Devices)
		}
	}
	if data := s.Configs[v.Target.Config]; v.Target.IsBaseline && data != "" && servedByNVIDIAMPS(v) && !deviceplugin.SharesByMPS(data) {
		v.Target.Devices = withNVIDIAMPS(withoutNVIDIAMPS(v.Target.Devices), v.Devices) // it ran for a moment, as on a machine that is replaced
	}
	if v.Unsupported == nil && !managerLabelRestored(v) {
		planSteps(v)
	}
	return v
}

// findDesired finds the desired state that the policy has for the node, and whether the node is to fall back because
// it failed.
func findDesired(v *View) {
	if v.Unsupported = offeredByOthers(v); v.Unsupported != nil {
		return
	}
	if len(v.Devices) == 0 {
		return // nobody knows yet what to ask
	}
	w, err := policy.DesiredState(v.Policy, v.RequestedNode())
	if err != nil {
		v.Unsupported = asProblem(err)
		return
	}
	v.Desired, v.Target = &w, targetOf(w)
	v.Target.Strategy, v.Target.Actuator = v.Policy.Spec.Sharing.Strategy, actuatorOf(v.Policy)
	v.Target.Shares = dra.Shares(v.Policy.Spec.Sharing)
	for _, lacks := range []func(*View) *plan.Problem{v.lacks, managerUnavailable, noNodeFeatures} {
		if v.Unsupported = lacks(v); v.Unsupported != nil {
			return
		}
	}
	if f := recordedFailure(v); f != nil && f.Reason != v1alpha1.ReasonDrainTimedOut {
		v.Target, v.FallsBack = v.OnStack(FallbackTarget(v.Policy.Name, v.LastOnStack(), v.Devices)), true
		v.Target.Actuator = actuatorOf(v.Policy)
	}
}

// planSteps finds the steps to the target and who is in their way.
func planSteps(v *View) {
	steps, err := plan.Node(v.Target.Devices, v.Devices)
	if err != nil {
		v.Unsupported = asProblem(err)
		return
	}
	v.Steps = steps
	v.ForDemand = isForDemand(v)
	for _, s := range v.AgentSteps() {
		for _, b := range plan.Blockers(s, v.Devices) {
			addReported(v, b)
		}
	}
	for _, d := range slices.Concat(v.EndingNVIDIAMPS(), managerClears(v)) {
		addUsers(v, d)
	}
	if OnlyRebootLeft(v) {
		for _, d := range v.Devices {
			addUsers(v, d)
		}
	}
	if v.ChangeIsDisruptive() || OnlyRebootLeft(v) {
		addUnreportedHolders(v)
		addJustBound(v)
	}
	if emptiesNode(v) {
		addOtherPods(v)
	}
}

func asProblem(err error) *plan.Problem {
	if p, is := errors.AsType[*plan.Problem](err); is {
		return p
	}
	return &plan.Problem{Reason: v1alpha1.ReasonStepFailed, Message: err.Error()}
}

// AgentNotReporting is the result of a node of whose GPUs nothing is known: its agent does not report.
func AgentNotReporting(v *View) (Result, bool) {
	r := Result{State: Unknown, Reason: v1alpha1.ReasonAgentNotReporting}
	c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionDiscovered)
	switch value := v.Node.Labels[cluster.AgentLabel(v.Node)]; {
	case !v.Node.AgentReady && v.Node.GPU.Spec.MIGConfigName != "" && value == cluster.StoppedValue:
		return r, false // NVIDIA's mig-manager, which is driven here, keeps it away
	case !v.Node.AgentReady && value == cluster.StoppedValue:
		r.Reason, r.Message = v1alpha1.ReasonMIGManagerBusy, agentAwayMessage("NVIDIA's mig-manager is changing the node")
		r.Next = atOnce(readmitAgent(v)...)
	case !v.Node.AgentReady && value != "true":
		r.Reason, r.Message = agentKeptOff(v)
	case !v.Node.AgentReady:
		r.Message = "the agent on the node is not Ready; look at the pods with app.kubernetes.io/name=gpu-sharing-agent there"
	case found && c.Status != "True":
		r.Message = fmt.Sprintf("the agent could not read the GPUs: %s", c.Message)
	case len(v.Node.GPU.Status.Devices) == 0:
		r.Message = "the agent has not reported any GPU yet; look at the log of its pod there (app.kubernetes.io/name=gpu-sharing-agent)"
	default:
		return r, false
	}
	return r, true
}

// agentKeptOff says why the label that runs the agent does not do so, and what to do about it that the GPU Operator does
// not undo: it removes that label from a node that has opted out or has no GPU.
func agentKeptOff(v *View) (reason, message string) {
	const away = "the agent does not run on the node"
	switch problem := policy.OptedOut(v.Node.Labels, v.Snapshot.Plugin.Workload()); {
	case problem != nil && v.Policy == nil:
		return problem.Reason, away + ", which has opted out of NVIDIA's programs by its labels (nvidia.com/gpu.deploy.operands, " +
			"nvidia.com/gpu.workload.config), so its GPUs cannot be restored; take that back until they are"
	case problem != nil:
		return problem.Reason, away + ": " + problem.Message
	case v.Node.Labels[cluster.LabelPresent] == cluster.LabelFalse:
		otherwise := "leave the node out of nodeSelector"
		if v.Policy == nil {
			otherwise = fmt.Sprintf("if they are gone for good run kubectl delete node/%s gpunode/%[1]s and restart its kubelet", v.Node.Name)
		}
		return v1alpha1.ReasonAgentNotReporting, fmt.Sprintf("%s, because Node Feature Discovery finds no GPU of NVIDIA's there (%s is false); "+
			"look at its GPUs (lspci -d 10de:), or %s", away, cluster.LabelPresent, otherwise)
	}
	label := cluster.AgentLabel(v.Node)
	return v1alpha1.ReasonAgentNotReporting, fmt.Sprintf("%s, because its label %s is %q; set it to true", away, label, v.Node.Labels[label])
}
