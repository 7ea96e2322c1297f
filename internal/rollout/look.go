// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// view is a node with everything that is derived from it before it is judged.
type view struct {
	world *World
	node  *Node
	have  []gpu.Device

	by   *v1alpha1.GPUSharingPolicy // governs the node; nil if none does
	over []*v1alpha1.GPUSharingPolicy
	wish *policy.Desired // what by asks for; nil if it cannot be met, or nobody asks
	why  *plan.Problem   // why it cannot be met

	to        target // where the node is on its way to
	fallsBack bool   // to is not the wish but what the node falls back to, since the wish failed
	steps     []plan.Step
	blockers  []plan.Blocker

	// What is asked of a node that waits in each pass, and follows from the above. It is found out when it is first asked for.
	lines *[]string // planned
	saved *string   // copied
}

// look derives the view of a node.
func look(w *World, n *Node, g policy.Governed) *view {
	v := &view{world: w, node: n, have: plan.Devices(n.GPU.Status.Devices), by: g.By, over: g.Over}
	switch {
	case g.By != nil:
		v.ask()
	default:
		v.to = baseline(&n.GPU, v.have)
		if v.managed() && v.noManager() != nil {
			v.to.actuator = "" // it is gone; the agent does it
		}
	}
	if v.why == nil {
		v.plan()
	}
	return v
}

// ask finds what the policy wishes of the node, and whether the node is to fall back because it failed.
func (v *view) ask() {
	if v.why = v.takenByOthers(); v.why != nil {
		return
	}
	if len(v.have) == 0 {
		return // nobody knows yet what to ask
	}
	w, err := policy.Ask(v.by, policyNode(v.node))
	if err != nil {
		v.why = asProblem(err)
		return
	}
	v.wish, v.to = &w, targetOf(w)
	v.to.strategy, v.to.actuator = v.by.Spec.Sharing.Strategy, actuatorOf(v.by)
	if v.managed() {
		if v.why = v.noManager(); v.why != nil {
			return
		}
	}
	if v.why = v.noNodeFeatures(); v.why != nil {
		return
	}
	if f := v.failed(); f != nil && f.Reason != v1alpha1.ReasonDrainTimedOut {
		v.to, v.fallsBack = fallback(v.by.Name, &v.node.GPU, v.have), true
		v.to.actuator = actuatorOf(v.by)
	}
}

// plan finds the steps to the target and who is in their way.
func (v *view) plan() {
	steps, err := plan.Node(v.to.devices, v.have)
	if err != nil {
		v.why = asProblem(err)
		return
	}
	v.steps = steps
	if v.managed() {
		steps = plan.WithoutMIG(steps)
	}
	for _, s := range steps {
		for _, b := range plan.Blockers(s, v.have) {
			v.addBlocker(b)
		}
	}
	for _, d := range slices.Concat(v.leavesNVIDIA(), v.cleared()) {
		v.addUsers(d)
	}
	if v.reboots() {
		for _, d := range v.have {
			v.addUsers(d)
		}
	}
	if v.disruptive() || v.reboots() {
		v.addUnreportedHolders()
	}
}

// addUnreportedHolders adds the pods of which an init container, or a ResourceClaim, holds a GPU: which one, nobody reports.
func (v *view) addUnreportedHolders() {
	for i := range v.node.Pods {
		p := &v.node.Pods[i]
		if p.InitHolds && !v.reported(*p) || p.Claim != "" && !v.blocks(p) {
			v.addBlocker(plan.Blocker{Holder: &gpu.Holder{Namespace: p.Namespace, Pod: p.Name, Instance: gpu.WholeGPU}})
		}
	}
}

func (v *view) blocks(p *Pod) bool {
	return slices.ContainsFunc(v.blockers, func(b plan.Blocker) bool { return v.podOf(b) == p })
}

// addUsers adds all who use a GPU or one of its instances.
func (v *view) addUsers(d gpu.Device) {
	for i := range d.Processes {
		if !d.Processes[i].MPSServer {
			v.addBlocker(plan.Blocker{UUID: d.UUID, Instance: d.Processes[i].Instance, Process: &d.Processes[i]})
		}
	}
	for i := range d.Holders {
		v.addBlocker(plan.Blocker{UUID: d.UUID, Instance: d.Holders[i].Instance, Holder: &d.Holders[i]})
	}
}

func (v *view) addBlocker(b plan.Blocker) {
	if p := v.podOf(b); p != nil && p.Validator && v.world.Wiring.ClusterPolicy && v.closes() {
		return // it is deleted with NVIDIA's other clients
	}
	known := func(o plan.Blocker) bool {
		return o.UUID == b.UUID && samePointee(o.Process, b.Process) && samePointee(o.Holder, b.Holder)
	}
	if !slices.ContainsFunc(v.blockers, known) {
		v.blockers = append(v.blockers, b)
	}
}

func samePointee[T comparable](a, b *T) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// leavesNVIDIA are the GPUs whose MPS control daemon, which NVIDIA's MPS DaemonSet runs, must end because the GPU is to be
// shared otherwise. Its clients die with it. Under the GPU Operator it ends when NVIDIA's clients are paused, because it
// needs the device plugin's deploy label; otherwise it ends with the label nvidia.com/mps.capable.
func (v *view) leavesNVIDIA() []gpu.Device {
	var leaving []gpu.Device
	for _, d := range v.have {
		if d.State.MPS != nil && d.State.MPS.External && !v.keepsNVIDIA(d.UUID) {
			leaving = append(leaving, d)
		}
	}
	return leaving
}

func (v *view) keepsNVIDIA(uuid string) bool {
	for _, d := range v.to.devices {
		if d.UUID == uuid {
			return d.Sharing.MPS != nil && d.Sharing.MPS.Owner == v1alpha1.MPSDaemonOwnerNVIDIA
		}
	}
	return true // not ours to change
}

func policyNode(n *Node) policy.Node {
	return policy.Node{
		Name: n.Name, Labels: n.Labels, Devices: n.GPU.Status.Devices, Changed: changed(n.GPU.Spec),
		Policy: n.GPU.Spec.PolicyName, Numbering: n.GPU.Spec.Numbering,
	}
}

func asProblem(err error) *plan.Problem {
	if p, is := errors.AsType[*plan.Problem](err); is {
		return p
	}
	return &plan.Problem{Reason: v1alpha1.ReasonStepFailed, Message: err.Error()}
}

// asked names what is asked of the node: the wish of its policy, or its baseline.
func (v *view) asked() string {
	if v.wish != nil {
		return v.wish.Hash()
	}
	return v.to.hash()
}

// failed is the record that what is asked failed on this node; nil if it has not, or is to be tried again.
func (v *view) failed() *v1alpha1.FailedChange {
	f := v.node.GPU.Status.Rollout.Failed
	if f == nil || f.Hash != v.asked() || f.Attempt != v.attempt() || v.superseded(*f) {
		return nil
	}
	if f.Reason == v1alpha1.ReasonRebootRequired && v.mayReboot() {
		return nil // what was missing is there
	}
	return f
}

// superseded reports whether the agent was asked once more for what failed.
func (v *view) superseded(f v1alpha1.FailedChange) bool {
	spec := v.node.GPU.Spec
	return policy.Hash(spec.ConfigName, spec.Devices) == f.Hash && spec.ChangeTime.After(f.Time.Time)
}

// busy reports whether the agent is at work on an earlier desired state. One that can do no more before a reboot, which it has
// no permission for, is not, also if that state is another policy's.
func (v *view) busy() bool {
	_, _, stalled := v.stalled()
	waits := stalled || v.pendsReboot() && v.node.GPU.Spec.Reboot == nil
	return len(v.node.GPU.Spec.Devices) > 0 && !waits &&
		!condition.IsTrueAt(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplied, v.node.GPU.Generation)
}

// disruptive says whether a step is left that needs something idle.
func (v *view) disruptive() bool {
	return len(v.leavesNVIDIA()) > 0 ||
		slices.ContainsFunc(v.steps, func(s plan.Step) bool { return s.Needs() > plan.NeedsNothing || s.Closes() })
}

// onlyComputeMode says whether the GPUs are as they were verified, but for a compute mode that somebody else set or a daemon
// left. Nobody is driven off a node for that: the agent sets it back by itself once the GPU is idle.
func (v *view) onlyComputeMode() bool {
	spec := v.node.GPU.Spec
	return plan.OnlyComputeMode(v.steps) && wishes(spec, v.to) && v.reached()
}

// closes says whether a step is left for which NVIDIA's clients must have closed their handles.
func (v *view) closes() bool {
	return v.world.Wiring.ClusterPolicy && len(v.leavesNVIDIA()) > 0 || slices.ContainsFunc(v.steps, func(s plan.Step) bool {
		return (s.Closes() || destroys(s)) && !v.managed() // mig-manager sees to that itself
	})
}

// destroys reports whether a step destroys an instance. DCGM keeps handles of instances that nobody uses (NVIDIA/DCGM issue
// 276), so NVIDIA's clients are paused for it, as mig-manager pauses them.
func destroys(s plan.Step) bool { return plan.ChangesMIG(s) && s.Needs() == plan.NeedsInstance }

// applied says whether the GPUs are as the target wishes, as far as the agent can bring that about: NVIDIA's MPS daemon,
// with which a node was found, starts only once its configuration is selected.
// The end of a release is verified by nothing else, so there the agent has to have looked for this very spec: its last report may
// be older than steps of its own, after which it ended.
func (v *view) applied() bool {
	if len(v.steps) > 0 || v.to.final && !v.answered() {
		return false
	}
	awaits := false
	for _, d := range v.have {
		for _, want := range v.to.devices {
			if want.UUID != d.UUID || plan.Same(want.Sharing, plan.Observed(d)) {
				continue
			}
			if want.Sharing.MPS == nil || want.Sharing.MPS.Owner != v1alpha1.MPSDaemonOwnerNVIDIA || d.State.MPS != nil {
				return false
			}
			awaits = true
		}
	}
	return awaits || condition.IsTrue(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
}

// answered reports whether the agent has looked at the GPUs for the spec as it is.
func (v *view) answered() bool {
	c, reported := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	return reported && c.ObservedGeneration >= v.node.GPU.Generation
}

// stalled is the message of the agent that only another wish helps.
func (v *view) stalled() (reason, message string, is bool) {
	c, ok := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionApplyStalled)
	if !ok || c.Status != "True" || c.ObservedGeneration != v.node.GPU.Generation {
		return "", "", false
	}
	return c.Reason, c.Message, true
}

// taint is our taint on the node; nil if there is none.
func (v *view) taint() *corev1.Taint {
	for i := range v.node.Taints {
		if v.node.Taints[i].Key == v1alpha1.TaintChanging {
			return &v.node.Taints[i]
		}
	}
	return nil
}

// disturbed says whether the node is kept from its users: by our taint, or by our pauses, of which the write that takes them
// back may have failed when that of the taint did not.
func (v *view) disturbed() bool {
	_, pauses := v.node.Annotations[v1alpha1.AnnotationPaused]
	return pauses || v.taint() != nil
}

// rules are the pace and the manners of the change: the policy's, or those that the last one left behind.
func (v *view) rules() v1alpha1.Rollout {
	if v.by != nil {
		return v.by.Spec.Rollout
	}
	if r := v.node.GPU.Spec.Release; r != nil {
		return v1alpha1.Rollout{Drain: r.Drain, MaxUnavailable: r.MaxUnavailable, Reboot: r.Reboot}
	}
	return v1alpha1.Rollout{}
}

// drainTimeout is how long to wait for the node to become idle.
func (v *view) drainTimeout() time.Duration {
	const usual = 600 // the default of the API
	seconds := v.rules().Drain.TimeoutSeconds
	if seconds == 0 {
		seconds = usual
	}
	return time.Duration(seconds) * time.Second
}

func (v *view) drainMode() v1alpha1.DrainMode {
	if mode := v.rules().Drain.Mode; mode != "" {
		return mode
	}
	return v1alpha1.DrainModeWaitForIdle
}

func (v *view) ref() PolicyRef {
	if v.by == nil {
		return PolicyRef{}
	}
	return PolicyRef{Name: v.by.Name, Generation: v.by.Generation}
}

// undiscovered is the judgement of a node of whose GPUs nothing is known.
func (v *view) undiscovered() (judgement, bool) {
	j := judgement{State: StateUndiscovered, reason: v1alpha1.ReasonAgentNotReporting}
	c, found := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionDiscovered)
	switch value := v.node.Labels[v1alpha1.LabelClient]; {
	case !v.node.AgentReady && v.node.GPU.Spec.MIGConfigName != "" && value == pausedValue:
		return j, false // NVIDIA's mig-manager, which is driven here, keeps it away
	case !v.node.AgentReady && value == pausedValue:
		j.reason, j.message = v1alpha1.ReasonMIGManagerBusy, agentAway("NVIDIA's mig-manager is changing the node")
		j.actions = v.takeBackAgent()
	case !v.node.AgentReady && value != "true":
		j.message = fmt.Sprintf("the agent does not run on the node, because its label %s is %q; set it to true", v1alpha1.LabelClient, value)
	case !v.node.AgentReady:
		j.message = "the agent on the node is not Ready; look at the pods with app.kubernetes.io/name=gpu-sharing-agent there"
	case found && c.Status != "True":
		j.message = fmt.Sprintf("the agent could not read the GPUs: %s", c.Message)
	case len(v.node.GPU.Status.Devices) == 0:
		j.message = "the agent has not reported any GPU yet; look at the log of its pod there (app.kubernetes.io/name=gpu-sharing-agent)"
	default:
		return j, false
	}
	return j, true
}
