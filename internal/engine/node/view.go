// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// NewView is the view of a node of which nothing is derived yet but what offers its GPUs.
func NewView(s *cluster.Snapshot, n *cluster.Node) *View {
	stack := s.Plugin.StackOf(n)
	return &View{Snapshot: s, Node: n, Stack: stack, offering: offeringOf(stack)}
}

// View is a node with everything that is derived from it before Decide.
type View struct {
	Snapshot *cluster.Snapshot
	Node     *cluster.Node
	Devices  []gpu.Device
	Stack    dra.Stack // which of NVIDIA's programs offers the GPUs of the node; only reported and compared, what differs by it is in offering
	offering

	Policy      *v1alpha1.GPUSharingPolicy // governs the node; nil if none does
	Losers      []*v1alpha1.GPUSharingPolicy
	Desired     *policy.Desired // what Policy asks for; nil if nobody asks, no GPU is known, or no state meets it
	Unsupported *plan.Problem   // why Policy cannot be honoured here, also beside Desired

	// ForDemand reports whether the node is on its way between states that differ in nothing but MIG instances that follow pods that wait
	// (ondemand.go).
	ForDemand bool

	Target    Target // where the node is on its way to
	FallsBack bool   // Target is not the desired state but what the node falls back to, because the desired state failed
	Steps     []plan.Step
	Blockers  []plan.Blocker

	// The following is read in each reconcile of a node that waits, and follows from the above. It is computed when it is
	// first read.

	Lines *[]string // the steps as the status lists them
	Saved *string   // the copy of the baseline
}

// EndingNVIDIAMPS are the GPUs whose MPS control daemon, which NVIDIA's MPS DaemonSet runs, must end because the GPU is
// to be shared otherwise, or another one is: that DaemonSet serves all GPUs of the node or none. Its clients die with
// it. Under the GPU Operator it ends when NVIDIA's operands are stopped, because it needs the device plugin's deploy label;
// otherwise it ends with the label nvidia.com/mps.capable.
func (v *View) EndingNVIDIAMPS() []gpu.Device {
	var served []gpu.Device
	ends := false
	for _, d := range v.Devices {
		if d.State.MPS != nil && d.State.MPS.External {
			served, ends = append(served, d), ends || !needsNVIDIAMPS(v, d.UUID)
		}
	}
	if !ends {
		return nil
	}
	return served
}

func needsNVIDIAMPS(v *View, uuid string) bool {
	for _, d := range v.Target.Devices {
		if d.UUID == uuid {
			return sharedBy(d.Sharing, v1alpha1.MPSDaemonOwnerNVIDIA)
		}
	}
	return true // not ours to change
}

// PolicyNode is what a policy needs to know of a node to select it. A GPUNode that was made anew does not tell which one
// governed it.
func PolicyNode(n *cluster.Node) policy.Node {
	by := n.GPU.Spec.PolicyName
	if n.GPU.Spec.ChangeTime.IsZero() {
		by = cmp.Or(by, n.ChangedFor)
	}
	return policy.Node{
		Name: n.Name, Labels: n.Labels, Devices: n.GPU.Status.Devices, Changed: changedDevices(&n.GPU), Policy: by, Numbering: n.GPU.Spec.Numbering,
	}
}

// RequestedNode is what a policy needs to know of the node to ask something of it.
func (v *View) RequestedNode() policy.Node {
	n := PolicyNode(v.Node)
	n.Stack, n.Workload, n.SetsTimeSlices = v.Stack, v.Snapshot.Plugin.Workload(), driverSetsTimeSlices(v)
	n.Shares, _ = v.Node.Published.Shares()
	n.Demand, n.ConfigName, n.Asked = v.Node.GPU.Status.Demand, v.Node.GPU.Spec.ConfigName, v.Node.GPU.Spec.Devices
	return n
}

// NoPlugin reports whether the node would need NVIDIA's device plugin, and the cluster has none that the operator can
// configure.
func (v *View) NoPlugin() bool { return v.Snapshot.Plugin.Reason != "" && v.ReadsConfigs() }

// DesiredHash names what is asked of the node: the desired state of its policy, or its baseline.
func (v *View) DesiredHash() string {
	if v.Desired != nil {
		return v.Desired.Hash()
	}
	return v.Target.Hash()
}

// BusyFor is for how long the agent may yet be at work on an earlier desired state; 0: it is not. One that can do no
// more before a reboot, which it has no permission for, is not, also if that state is another policy's.
func BusyFor(v *View) time.Duration {
	spec := v.Node.GPU.Spec
	_, _, stalled := v.ApplyStalled()
	waits := stalled || specNeedsReboot(v) && spec.Reboot == nil
	if len(spec.Devices) == 0 || waits || condition.IsTrueAt(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied, v.Node.GPU.Generation) {
		return 0
	}
	timeout := timing.ApplyTimeout
	if spec.Reboot != nil {
		timeout = timing.RebootTimeout
	}
	return max(spec.ChangeTime.Add(timeout).Sub(v.Snapshot.Now), 0)
}

// ChangeIsDisruptive reports whether a step is left that needs something idle.
func (v *View) ChangeIsDisruptive() bool {
	return len(v.EndingNVIDIAMPS()) > 0 ||
		slices.ContainsFunc(v.Steps, func(s plan.Step) bool { return s.Needs() > plan.NeedsNothing || s.Closes() })
}

// OnlyComputeMode reports whether the GPUs are as they were verified, but for a compute mode that a user set or a
// daemon left. Nobody is driven off a node for that: the agent sets it back by itself once the GPU is idle.
func (v *View) OnlyComputeMode() bool {
	spec := v.Node.GPU.Spec
	return plan.OnlyComputeMode(v.Steps) && specMatches(spec, v.Target) && v.TargetIsLastGood()
}

// Closes reports whether a step is left for which NVIDIA's operands must have closed their handles. mig-manager sees to
// that itself.
func (v *View) Closes() bool {
	return v.Snapshot.Plugin.ClusterPolicy && len(v.EndingNVIDIAMPS()) > 0 || slices.ContainsFunc(v.AgentSteps(), func(s plan.Step) bool {
		return s.Closes() || destroysInstance(s)
	})
}

// destroysInstance reports whether a step destroys an instance. DCGM keeps handles of instances that nobody uses
// (NVIDIA/DCGM issue 276), so NVIDIA's operands are stopped for it, as mig-manager stops them.
func destroysInstance(s plan.Step) bool { return plan.ChangesMIG(s) && s.Needs() == plan.NeedsInstance }

// Applied reports whether the GPUs match the target, as far as the agent can bring that about: NVIDIA's MPS daemon,
// with which a node was found, starts only once its configuration is selected. The end of a release is verified by
// nothing else, nor that a change is taken back, or edited, beside a device plugin that goes on, or a DRA driver. So there the agent has to have looked
// for this very spec: its last report may be older than steps of its own, after which it ended.
func (v *View) Applied() bool {
	if len(v.Steps) > 0 || !agentObservedGeneration(v) && mustHaveLooked(v) {
		return false
	}
	awaits := false
	for _, d := range v.Devices {
		for _, want := range v.Target.Devices {
			if want.UUID != d.UUID || plan.Met(want.Sharing, plan.Observed(d)) {
				continue
			}
			if !sharedBy(want.Sharing, v1alpha1.MPSDaemonOwnerNVIDIA) || d.State.MPS != nil {
				return false
			}
			awaits = true
		}
	}
	return awaits || condition.IsTrue(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
}

func mustHaveLooked(v *View) bool {
	return v.Target.ReleasesNode || mayListGone(v) || pluginGoesOn(v) || v.ByClaims() && v.Tainted()
}

// agentObservedGeneration reports whether the agent has looked at the GPUs for the spec as it is.
func agentObservedGeneration(v *View) bool {
	c, reported := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplied)
	return reported && c.ObservedGeneration >= v.Node.GPU.Generation
}

// mostReason is how long a reason is at most, of the schema of status.pending and status.rollout.
const mostReason = 64

// ApplyStalled is the agent's condition ApplyStalled for the spec as it is: only another desired state helps.
func (v *View) ApplyStalled() (reason, message string, is bool) {
	c, ok := condition.Find(v.Node.GPU.Status.Conditions, v1alpha1.ConditionApplyStalled)
	if !ok || c.Status != "True" || c.ObservedGeneration != v.Node.GPU.Generation {
		return "", "", false
	}
	if len(c.Reason) > mostReason {
		c.Reason = v1alpha1.ReasonStepFailed // no agent of the operator's reports it
	}
	return c.Reason, c.Message, true
}

// Taint is our taint on the node or, where we have none there, on its devices (DeviceTaintRule); nil if there is
// neither.
func (v *View) Taint() *corev1.Taint {
	for i := range v.Node.Taints {
		if v.Node.Taints[i].Key == v1alpha1.TaintChanging {
			return &v.Node.Taints[i]
		}
	}
	if v.Node.DevicesTaintedAt.IsZero() {
		return nil
	}
	since := metav1.NewTime(v.Node.DevicesTaintedAt)
	return &corev1.Taint{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &since}
}

// Tainted reports whether our taint keeps new pods off the GPUs, in the form that the stack of the node heeds.
func (v *View) Tainted() bool {
	if v.ByClaims() {
		return !v.Node.DevicesTaintedAt.IsZero()
	}
	return v.Node.HasChangingTaint()
}

// MadeUnavailable reports whether the operator keeps the node from its users, as rollout.maxUnavailable counts it: by
// our taint, or by operands that we stopped, of which the write that starts them may have failed when that of the taint did not.
func (v *View) MadeUnavailable() bool {
	_, stops := v.Node.Annotations[v1alpha1.AnnotationStopped]
	return stops || v.Taint() != nil
}

// RolloutSpec is the pace and the manners of the change: spec.rollout of the policy, or of what the last one left
// behind.
func (v *View) RolloutSpec() v1alpha1.Rollout {
	if v.Policy != nil {
		return v.Policy.Spec.Rollout
	}
	if r := v.Node.GPU.Spec.Release; r != nil {
		return v1alpha1.Rollout{Drain: r.Drain, MaxUnavailable: r.MaxUnavailable, Reboot: r.Reboot}
	}
	return v1alpha1.Rollout{}
}

// DrainTimeout is how long to wait for the node to become idle.
func (v *View) DrainTimeout() time.Duration { return DrainTimeout(v.RolloutSpec().Drain) }

// DrainTimeout is how long a policy lets a node be drained.
func DrainTimeout(drain v1alpha1.Drain) time.Duration {
	const usual = 600 // the default of the API
	return time.Duration(cmp.Or(drain.TimeoutSeconds, usual)) * time.Second
}

// DrainMode is how pods that block the change are handled; WaitForIdle if the policy names none. A change for pods that wait hinders no other, and nobody
// is evicted once an hour for what another controller sets again.
func (v *View) DrainMode() v1alpha1.DrainMode {
	if v.ForDemand {
		return v1alpha1.DrainModeNever
	}
	if mode := v.RolloutSpec().Drain.Mode; mode == v1alpha1.DrainModeNever || mode != "" && !othersConfigAgain(v) {
		return mode
	}
	return v1alpha1.DrainModeWaitForIdle
}

// Ref names the policy that governs the node, at its generation; zero if none does.
func (v *View) Ref() action.PolicyRef {
	if v.Policy == nil {
		return action.PolicyRef{}
	}
	return action.PolicyRef{Name: v.Policy.Name, Generation: v.Policy.Generation}
}

// A policy that is gone cannot say how its nodes are released, so each GPUNode says it (spec.release). Users who set
// releasePolicy: Retain and then delete the policy rely on that. So it is recorded at once on every node that the
// policy has changed, whatever the state of the node and also while the rollout is paused, and the policy counts as
// observed only then.

// ReleaseRecorded reports whether the GPUNode of a node records how a policy releases it, or has nothing to record.
func ReleaseRecorded(n *cluster.Node, by *v1alpha1.GPUSharingPolicy) bool {
	spec := &n.GPU.Spec
	return by == nil || spec.Baseline == nil || spec.PolicyName != by.Name || equality.Semantic.DeepEqual(spec.Release, ReleaseFor(by))
}

// ReleaseFor is how the policy releases its nodes, as GPUNode.spec records it.
func ReleaseFor(p *v1alpha1.GPUSharingPolicy) *v1alpha1.Release {
	return &v1alpha1.Release{
		PolicyName:     p.Name,
		ReleasePolicy:  p.Spec.ReleasePolicy,
		Drain:          p.Spec.Rollout.Drain,
		MaxUnavailable: p.Spec.Rollout.MaxUnavailable,
		Reboot:         p.Spec.Rollout.Reboot,
	}
}

// memoryOf is what the policy says of the memory of time-sliced GPUs; nil: nothing. A limit that failed on the node is none there.
func memoryOf(v *View) *v1alpha1.TimeSlicedMemory {
	if v.Policy == nil || v.Policy.Spec.Sharing.TimeSlicing == nil {
		return nil
	}
	memory := v.Policy.Spec.Sharing.TimeSlicing.Memory.DeepCopy()
	if f := recordedFailure(v); memory.Limited() == v1alpha1.MemoryLimitEnforce && f != nil && f.Reason == v1alpha1.ReasonNotEnforced {
		memory.Limit = v1alpha1.MemoryLimitNone
	}
	return memory
}

// awaitsLimit reports whether the spec does not ask yet for the limit that the driver is to enforce.
func awaitsLimit(v *View) bool {
	want, is := memoryOf(v), v.Node.GPU.Spec.Memory
	return want.Limited() == v1alpha1.MemoryLimitEnforce &&
		(is.Limited() != v1alpha1.MemoryLimitEnforce || !equality.Semantic.DeepEqual(is.PerReplica, want.PerReplica))
}

// AdminClaims are the ResourceClaims by which pods of the node have devices with adminAccess and no others, as
// GPUNode.spec records them. Further ones than that can hold count as users.
func AdminClaims(n *cluster.Node) []string {
	const most = 64 // of the schema
	var names []string
	for _, c := range n.Claims {
		if isAdmins(c, n) && len(names) < most {
			names = append(names, c.Name)
		}
	}
	return names
}

// isAdmins reports whether devices of the node are allocated to a claim, and all of them with adminAccess.
func isAdmins(c dra.Claim, n *cluster.Node) bool {
	return slices.Contains(c.Pools(), n.Name) && len(c.Of(n.Name)) == 0
}

// PodOf is the pod of a blocker; nil if it has none, or one that is gone already.
func (v *View) PodOf(b plan.Blocker) *cluster.Pod {
	at := slices.IndexFunc(v.Node.Pods, func(p cluster.Pod) bool {
		if b.Holder != nil {
			return p.Namespace == b.Holder.Namespace && p.Name == b.Holder.Pod
		}
		return b.Process != nil && b.Process.PodUID != "" && p.UID == b.Process.PodUID
	})
	if at < 0 {
		return nil
	}
	return &v.Node.Pods[at]
}

// Patch is an empty patch of the Node, for what it is needed.
func (v *View) Patch(why string) action.PatchNode {
	return action.PatchNode{
		Node: v.Node.Name, Policy: v.Ref(), Why: why,
		Labels: map[string]*string{}, Annotations: map[string]*string{},
	}
}

// deletePod deletes a pod of the node.
func deletePod(v *View, p cluster.Pod, why string) action.DeletePod {
	return action.DeletePod{Node: v.Node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Why: why}
}

// AdvertisesNoGPU reports whether the node offers nothing that a pod could get. NVIDIA's DaemonSets do not tolerate our
// taint, so while it stands none of their pods that is not there comes; and where nothing is offered it keeps nobody
// off.
func AdvertisesNoGPU(v *View) bool {
	return len(v.Node.OfferedGPUs(v.Stack)) == 0
}

// MustStayUntainted reports whether v1alpha1.TaintChanging on the node would make Karpenter start another one: until a
// node is initialized, Karpenter takes any taint that it does not know for a sign that the node has no room. A change
// that nothing blocks then begins without the taint, however long the node has waited for NVIDIA's driver and for its
// turn. Its time counts from when NVIDIA's operands were stopped (DrainingSince): before that it keeps nobody waiting.
func MustStayUntainted(v *View) bool {
	return !v.ByClaims() && cluster.IsUninitialized(v.Node)
}

// OrGrace is what remains until a deadline, or what is left of timing.Grace if that is more.
func (v *View) OrGrace(remaining time.Duration) time.Duration {
	for _, began := range []time.Time{v.Snapshot.LeadsSince, v.Node.AgentSince} {
		if left := began.Add(timing.Grace).Sub(v.Snapshot.Now); left > 0 && !fromFuture(v, began) { // it may be of the node's clock
			remaining = max(remaining, min(left, timing.Grace))
		}
	}
	return remaining
}

// WithheldFor is how long an action on the node has to wait, because it was repeated too often, or refused.
func (v *View) WithheldFor(a action.Action) time.Duration {
	return v.Snapshot.Repeats.Remaining(v.Restamped(a), v.Node.Created, v.Snapshot.Now)
}

// IsFought reports whether an action waits because it was repeated too often. What was refused a moment ago is soon tried again.
func (v *View) IsFought(a action.Action) bool {
	return v.WithheldFor(a) > 0 && v.Snapshot.Repeats.Refusal(v.Restamped(a)) == ""
}

// Restamped is action.Restamped of what the node has.
func (v *View) Restamped(a action.Action) action.Action {
	spec := v.Node.GPU.Spec
	if v.Node.BaselineLost { // the GPUNode lacks what is here from the copy
		spec.Baseline = nil
	}
	return action.Restamped(a, v.Node.Labels, v.Node.Annotations, spec)
}
