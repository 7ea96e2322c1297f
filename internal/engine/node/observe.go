// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// takeBackAgent lets the agent return where NVIDIA's mig-manager, which we asked, has paused it and given up.
func takeBackAgent(v *View) []action.Action {
	if !v.Managed() || managerBusy(v) {
		return nil
	}
	patch := v.Patch("allowing the agent on the node again, which NVIDIA's mig-manager left paused")
	patch.Labels[v1alpha1.LabelClient] = new("true")
	patch.Locked = true
	return []action.Action{patch}
}

// Observe derives the view of a node.
func Observe(w *cluster.Snapshot, n *cluster.Node, g policy.Governed) *View {
	v := &View{Snapshot: w, Node: n, Devices: plan.Devices(n.GPU.Status.Devices), Stack: w.StackOf(n), Policy: g.By, Losers: g.Over}
	switch {
	case g.By != nil:
		requestAgent(v)
	default:
		v.Target = v.OnStack(baselineTarget(&n.GPU, v.Devices))
		if v.Managed() && managerUnavailable(v) != nil {
			v.Target.Actuator = "" // it is gone; the agent does it
		}
		if dynamicMIG(v) != nil {
			v.Target.Devices = nil // the instances are the driver's
		}
	}
	if v.Unsupported == nil && !managerReleased(v) {
		planSteps(v)
	}
	return v
}

// requestAgent finds the desired state that the policy has for the node, and whether the node is to fall back because
// it failed.
func requestAgent(v *View) {
	if v.Unsupported = offeredByOthers(v); v.Unsupported != nil {
		return
	}
	if len(v.Devices) == 0 {
		return // nobody knows yet what to ask
	}
	w, err := policy.Ask(v.Policy, v.RequestedNode())
	if err != nil {
		v.Unsupported = asProblem(err)
		return
	}
	v.Desired, v.Target = &w, targetOf(w)
	v.Target.Strategy, v.Target.Actuator = v.Policy.Spec.Sharing.Strategy, actuatorOf(v.Policy)
	if v.ByDriver() {
		v.Target.Shares = dra.Shares(v.Policy.Spec.Sharing)
		if v.Unsupported = draLacks(v); v.Unsupported != nil {
			return
		}
	}
	if v.Managed() {
		if v.Unsupported = managerUnavailable(v); v.Unsupported != nil {
			return
		}
	}
	if v.Unsupported = noNodeFeatures(v); v.Unsupported != nil {
		return
	}
	if f := failedChange(v); f != nil && f.Reason != v1alpha1.ReasonDrainTimedOut {
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
	if v.Managed() {
		steps = plan.WithoutMIG(steps)
	}
	for _, s := range steps {
		for _, b := range plan.Blockers(s, v.Devices) {
			addBlocker(v, b)
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
	if v.Disruptive() || OnlyRebootLeft(v) {
		addUnreportedHolders(v)
	}
	if emptiesNode(v) {
		addOtherPods(v)
	}
}

// addOtherPods adds the pods that hold no GPU. Those that would come back at once, and the operator's own, go down with
// the node.
func addOtherPods(v *View) {
	known := map[*cluster.Pod]bool{} // a node may have hundreds of pods
	for _, b := range v.Blockers {
		known[v.PodOf(b)] = true
	}
	for i := range v.Node.Pods {
		if p := &v.Node.Pods[i]; !p.ReturnsAtOnce() && !p.Own && !known[p] {
			addBlocker(v, unknownUse(p))
		}
	}
}

// unknownUse is a pod as a blocker of which no agent reports that it uses a GPU.
func unknownUse(p *cluster.Pod) plan.Blocker {
	return plan.Blocker{Holder: &gpu.Holder{Namespace: p.Namespace, Pod: p.Name, Instance: gpu.WholeGPU}, Instance: gpu.WholeGPU}
}

// addUnreportedHolders adds the pods of which an init container, or a ResourceClaim, holds a GPU: which one, nobody
// reports.
func addUnreportedHolders(v *View) {
	for i := range v.Node.Pods {
		p := &v.Node.Pods[i]
		if p.InitHolds && !podReported(v, *p) && !v.ByDriver() || p.Claim != "" && !podBlocks(v, p) && !v.ByDriver() {
			addBlocker(v, unknownUse(p))
		}
	}
	if v.ByDriver() {
		addClaims(v)
	}
}

// addClaims adds who has devices of the node by ResourceClaims: pods, also those whose containers have not started yet,
// and claims that no pod of the node uses as yet. A device that the node does not publish counts as any of its GPUs,
// until NVIDIA's DRA driver publishes all that is there: then it is gone.
func addClaims(v *View) {
	gone := len(v.Node.Published.Differs(v.Node.GPU.Status.Devices, 0)) == 0
	for _, c := range v.Node.Claims {
		for _, device := range c.Of(v.Node.Name) {
			uuid, instance, known := v.Node.Published.Locate(device, v.Node.GPU.Status.Devices)
			if known && !OnlyRebootLeft(v) && !slices.ContainsFunc(v.Steps, func(s plan.Step) bool { return podBlocksStep(s, v, uuid, instance) }) {
				continue
			}
			for _, b := range claimants(v, c) {
				if b.Instance = instance; known {
					b.UUID = uuid
				} else if gone && v.PodOf(b) != nil && v.PodOf(b).Starting {
					continue // it cannot start, so it has nothing that the change could take away
				}
				if b.Claim != "" || !podBlocks(v, v.PodOf(b)) {
					addBlocker(v, b)
				}
			}
		}
	}
}

// podBlocksStep reports whether who uses an instance blocks a step. If only the GPU is known, any of its instances may
// be the one.
func podBlocksStep(s plan.Step, v *View, uuid string, instance int) bool {
	if plan.Blocks(s, uuid, instance) {
		return true
	}
	at := slices.IndexFunc(v.Devices, func(d gpu.Device) bool { return d.UUID == uuid })
	return at >= 0 && v.Devices[at].State.MIG && instance == gpu.WholeGPU &&
		slices.ContainsFunc(v.Devices[at].State.Instances, func(i gpu.Instance) bool { return plan.Blocks(s, uuid, i.ID) })
}

// claimants are the pods of the node for which a claim is reserved, or the claim itself if there are none.
func claimants(v *View, c dra.Claim) []plan.Blocker {
	var all []plan.Blocker
	for i := range v.Node.Pods {
		if p := &v.Node.Pods[i]; p.Has(c) {
			all = append(all, unknownUse(p))
		}
	}
	if len(all) == 0 {
		return []plan.Blocker{{Claim: c.Name, Instance: gpu.WholeGPU}}
	}
	return all
}

func podBlocks(v *View, p *cluster.Pod) bool {
	return slices.ContainsFunc(v.Blockers, func(b plan.Blocker) bool { return v.PodOf(b) == p })
}

// addUsers adds all who use a GPU or one of its instances.
func addUsers(v *View, d gpu.Device) {
	for i := range d.Processes {
		if !d.Processes[i].MPSServer {
			addBlocker(v, plan.Blocker{UUID: d.UUID, Instance: d.Processes[i].Instance, Process: &d.Processes[i]})
		}
	}
	for i := range d.Holders {
		addBlocker(v, plan.Blocker{UUID: d.UUID, Instance: d.Holders[i].Instance, Holder: &d.Holders[i]})
	}
}

func addBlocker(v *View, b plan.Blocker) {
	if p := v.PodOf(b); p != nil && p.Validator && v.ByGPUOperator() && v.Closes() {
		return // it is deleted with NVIDIA's other clients
	}
	known := func(o plan.Blocker) bool {
		return o.UUID == b.UUID && o.Claim == b.Claim && samePointee(o.Process, b.Process) && samePointee(o.Holder, b.Holder)
	}
	if !slices.ContainsFunc(v.Blockers, known) {
		v.Blockers = append(v.Blockers, b)
	}
}

func samePointee[T comparable](a, b *T) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

func asProblem(err error) *plan.Problem {
	if p, is := errors.AsType[*plan.Problem](err); is {
		return p
	}
	return &plan.Problem{Reason: v1alpha1.ReasonStepFailed, Message: err.Error()}
}

// AgentNotReporting is the result of a node of whose GPUs nothing is known: its agent does not report.
func AgentNotReporting(v *View) (Result, bool) {
	j := Result{State: Unknown, Reason: v1alpha1.ReasonAgentNotReporting}
	c, found := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionDiscovered)
	switch value := v.Node.Labels[cluster.AgentLabel(v.Node)]; {
	case !v.Node.AgentReady && v.Node.GPU.Spec.MIGConfigName != "" && value == cluster.PausedValue:
		return j, false // NVIDIA's mig-manager, which is driven here, keeps it away
	case !v.Node.AgentReady && value == cluster.PausedValue:
		j.Reason, j.Message = v1alpha1.ReasonMIGManagerBusy, agentAwayMessage("NVIDIA's mig-manager is changing the node")
		j.Next = atOnce(takeBackAgent(v)...)
	case !v.Node.AgentReady && value != "true":
		j.Message = fmt.Sprintf("the agent does not run on the node, because its label %s is %q; set it to true", cluster.AgentLabel(v.Node), value)
	case !v.Node.AgentReady:
		j.Message = "the agent on the node is not Ready; look at the pods with app.kubernetes.io/name=gpu-sharing-agent there"
	case found && c.Status != "True":
		j.Message = fmt.Sprintf("the agent could not read the GPUs: %s", c.Message)
	case len(v.Node.GPU.Status.Devices) == 0:
		j.Message = "the agent has not reported any GPU yet; look at the log of its pod there (app.kubernetes.io/name=gpu-sharing-agent)"
	default:
		return j, false
	}
	return j, true
}
