// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Target is where a node is on its way to: the desired state of its policy, its last good state, or its baseline.
type Target struct {
	Policy   string
	Strategy v1alpha1.Strategy // of the policy that asked for it; empty: none did
	// Actuator is who partitions the GPUs; empty: the agent.
	Actuator v1alpha1.MIGActuator
	Config   string // name of the device-plugin configuration; empty: the node carries no label
	Data     string // content of the config; empty if not known
	Devices  []v1alpha1.DeviceSpec
	// Expected is what the node must advertise; nil: not known, so it is not verified.
	Expected map[string]int64
	// Shares is how many claims must be able to share a GPU where NVIDIA's DRA driver serves the node; 0: any number.
	Shares int64
	// Labels are, besides the label of the config, what labels of the node are restored to; a nil value removes the label.
	Labels map[string]*string
	// IsBaseline reports whether this is the state in which the node was found.
	IsBaseline bool
	// ReleasesNode reports whether nothing of the operator stays behind: the GPUNode's spec is emptied.
	ReleasesNode bool
}

// GPUs come and go one by one: one is replaced and has another UUID, another is no longer selected. So the baseline has
// an entry for each GPU that the operator changes, and for no other:
//
//	added     in the write of the spec that first lists the GPU, from what the agent reports: nobody has changed it before that
//	used      when no policy selects the GPU, when the desired state fails and the last good state does not list it, and when no
//	          policy governs the node
//	removed   once a GPU that the policy does not select is back in that state; from then on it is the user's

// changedDevices returns the GPUs that the operator has changed, each in its state before that. Where a policy left the
// node as it is (releasePolicy Retain), these GPUs are the user's, except those that the operator's MPS daemon serves:
// under another configuration nobody gets to it any more, and they stay closed to all others.
func changedDevices(n *v1alpha1.GPUNode) []v1alpha1.DeviceSpec {
	if n.Spec.Baseline == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(n.Spec.Baseline.Devices), func(d v1alpha1.DeviceSpec) bool {
		return releasedAsIs(n.Spec) && !leftUnderMPS(n, d.UUID)
	})
}

// leftUnderMPS reports whether the operator's MPS daemon serves a GPU, or is to. A spec that was withdrawn, or is of a
// GPUNode that was made anew, does not tell, nor does that of a GPU which a user has put into MIG mode since.
func leftUnderMPS(n *v1alpha1.GPUNode, uuid string) bool {
	const by = v1alpha1.MPSDaemonOwnerGPUSharing
	asked := func(d v1alpha1.DeviceSpec) bool { return d.UUID == uuid && sharedBy(d.Sharing, by) }
	is := slices.ContainsFunc(n.Spec.Devices, asked)
	for _, d := range n.Status.Devices {
		if d.UUID == uuid {
			is = sharedBy(d.Sharing, by) || is && d.Sharing.MIGMode != v1alpha1.MIGModeEnabled
		}
	}
	return is
}

// releasedAsIs reports whether the policy that governed the node last has left it as it is.
func releasedAsIs(spec v1alpha1.GPUNodeSpec) bool { return spec.PolicyName == "" && Retained(spec) }

// restorable returns the GPUs that the operator has changed and the node still has, each in the state to which it
// returns. One without an entry in the baseline returns to no MIG mode and no MPS daemon.
func restorable(n *v1alpha1.GPUNode, have []gpu.Device) []v1alpha1.DeviceSpec {
	if n.Spec.Baseline == nil {
		return nil
	}
	devices := withoutLost(n.Spec.Baseline.Devices, have)
	for _, d := range have {
		if cluster.Lists(n.Spec.Devices, d.UUID) && !cluster.Lists(devices, d.UUID) {
			devices = append(devices, unpartitioned(d.UUID))
		}
	}
	return devices
}

// lastGood is the last good state of a node; nil if it has none. That of a node whose agent was asked for nothing was
// forgotten: the report that removes it comes later than the spec is emptied, and another policy may come before. A GPU
// that the spec nowhere lists was left to its users.
func lastGood(n *v1alpha1.GPUNode) *v1alpha1.NodeSharing {
	good, spec := n.Status.Rollout.LastGood, &n.Spec
	if good == nil || spec.ChangeTime.IsZero() {
		return nil
	}
	theirs := func(d v1alpha1.DeviceSpec) bool {
		return !cluster.Lists(spec.Devices, d.UUID) && (spec.Baseline == nil || !cluster.Lists(spec.Baseline.Devices, d.UUID))
	}
	if slices.ContainsFunc(good.Devices, theirs) {
		good = good.DeepCopy()
		good.Devices = slices.DeleteFunc(good.Devices, theirs)
	}
	return good
}

// unpartitioned is a GPU that is not shared and not in MIG mode.
func unpartitioned(uuid string) v1alpha1.DeviceSpec {
	return v1alpha1.DeviceSpec{UUID: uuid, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}}
}

// SpecMatchesTarget reports whether the spec asks for the target already, and mig-manager, where that is its business,
// was asked for it. A spec with the record that the target failed or timed out asks for nothing until it is written
// again: the deadlines of another attempt begin with that.
func (v *View) SpecMatchesTarget() bool {
	f := v.Node.GPU.Status.Rollout.Failed
	again := f != nil && !v.FallsBack && f.Hash == v.DesiredHash() && !FailureSuperseded(v, *f)
	if _, isTimedOut := recordedTimeout(v); again || isTimedOut || releasesAgain(v) || !specMatches(v.Node.GPU.Spec, v.Target) {
		return false
	}
	name := managerRequest(v)
	_, requested := ManagerRequestedSince(v, name)
	return requested || name == "" || v.Node.GPU.Spec.MIGConfigName == name
}

// InFlight reports whether the agent has been asked for a policy's desired state that the node has not reached.
func (v *View) InFlight() bool {
	spec := v.Node.GPU.Spec
	return spec.PolicyName != "" && spec.ConfigName != "" && !isLastGood(&v.Node.GPU, Target{Config: spec.ConfigName, Devices: spec.Devices})
}

// Retained reports whether a node that no policy governs stays as it is: nothing was ever done to it, or its last
// policy says so.
func Retained(spec v1alpha1.GPUNodeSpec) bool {
	return spec.Baseline == nil || spec.Release != nil && spec.Release.ReleasePolicy == v1alpha1.ReleasePolicyRetain
}

// ConfigSelectedAt is when the node selected the config of its target; zero if it has not, or if that is not known.
func ConfigSelectedAt(v *View) time.Time {
	at, _ := timing.Stamped(v.Node.Annotations[v1alpha1.AnnotationSelected], v.Target.Config)
	return at
}

// Hash identifies the config and the GPUs of the target.
func (t Target) Hash() string { return policy.Hash(t.Config, t.Devices) }

// Sharing is the target as status.rollout.lastGood records it.
func (t Target) Sharing() *v1alpha1.NodeSharing {
	return &v1alpha1.NodeSharing{PolicyName: t.Policy, Strategy: t.Strategy, ConfigName: t.Config, Devices: t.Devices}
}

// targetOf is the desired state of a policy.
func targetOf(w policy.Desired) Target {
	return Target{
		Policy: w.Policy, Config: w.Config.Key, Data: w.Config.Data, Devices: w.Devices, Expected: w.Config.Resources,
	}
}

// driverSetsTimeSlices reports whether NVIDIA's DRA driver sets the time slices of the node. Without its feature gate for
// that nobody but the operator restores what the operator set before.
func driverSetsTimeSlices(v *View) bool {
	sets := func(p cluster.Pod) bool { return p.SetsTimeSlices }
	is := func(p cluster.Pod) bool { return p.DRA }
	unknown := !strings.HasPrefix(v.Node.DRA, "DaemonSet ") && !slices.ContainsFunc(v.Node.Pods, is) // it is being replaced: its slices alone are left
	return !v.ReadsConfigs() && (unknown || v.Node.SetsTimeSlices || slices.ContainsFunc(v.Node.Pods, sets))
}

// OnStack is a target without what only NVIDIA's device plugin reads or has, where its DRA driver serves the node. In
// its baseline the node has the former time slices.
func (v *View) OnStack(t Target) Target {
	if v.ReadsConfigs() {
		return t
	}
	t.Devices = withoutNVIDIAMPS(t.Devices)
	if driverSetsTimeSlices(v) && !t.ReleasesNode {
		t.Devices = plan.WithoutIntervals(t.Devices)
	}
	if !dra.IsConfig(t.Config) {
		t.Config, t.Data = "", ""
	}
	return t
}

// withoutNVIDIAMPS leaves out NVIDIA's MPS daemon, which does not come back beside its DRA driver.
func withoutNVIDIAMPS(devices []v1alpha1.DeviceSpec) []v1alpha1.DeviceSpec {
	devices = slices.Clone(devices)
	for i := range devices {
		if sharedBy(devices[i].Sharing, v1alpha1.MPSDaemonOwnerNVIDIA) {
			devices[i].Sharing.MPS = nil
		}
	}
	return devices
}

// LastOnStack is the GPUNode of the node without a last good state that the other one of NVIDIA's programs served, since
// nothing there reads its configuration, or whose configuration is nowhere any more.
func (v *View) LastOnStack() *v1alpha1.GPUNode {
	n := v.Node.GPU
	if good := n.Status.Rollout.LastGood; good != nil && (dra.IsConfig(good.ConfigName) == v.ReadsConfigs() || v.ReadsConfigs() && configLost(v, good.ConfigName)) {
		n.Status.Rollout.LastGood = nil
	}
	return &n
}

// baselineTarget is the state in which the node was found.
func baselineTarget(n *v1alpha1.GPUNode, have []gpu.Device) Target {
	spec := n.Spec
	t := Target{ReleasesNode: true, IsBaseline: true, Labels: map[string]*string{}}
	if spec.Baseline == nil {
		return t
	}
	t.Config = spec.Baseline.Labels[v1alpha1.LabelConfig]
	t.Devices = cluster.SortedByUUID(withNVIDIAMPS(restorable(n, have), have)) // as in GPUNode.spec
	if before, had := spec.Baseline.Labels[v1alpha1.LabelMIGManager]; had {
		t.Labels[v1alpha1.LabelMIGManager] = &before
	}
	t.Actuator = spec.MIGActuator
	return t
}

// withNVIDIAMPS adds NVIDIA's MPS daemon to the GPUs that it serves now. Where a node returns to its baseline, the
// configuration that NVIDIA's programs read is not the operator's any more, so the operator neither ends a daemon that
// it asks for nor waits for one.
func withNVIDIAMPS(devices []v1alpha1.DeviceSpec, have []gpu.Device) []v1alpha1.DeviceSpec {
	devices = slices.Clone(devices)
	for i := range devices {
		at := slices.IndexFunc(have, func(d gpu.Device) bool { return d.UUID == devices[i].UUID })
		if at < 0 || have[at].State.MPS == nil || !have[at].State.MPS.External || devices[i].Sharing.MIGMode != v1alpha1.MIGModeDisabled {
			continue
		}
		devices[i].Sharing.MPS = plan.Observed(have[at]).MPS
	}
	return devices
}

// withoutLost leaves out GPUs that the node has lost since.
func withoutLost(devices []v1alpha1.DeviceSpec, have []gpu.Device) []v1alpha1.DeviceSpec {
	var kept []v1alpha1.DeviceSpec
	for _, d := range devices {
		if slices.ContainsFunc(have, func(h gpu.Device) bool { return h.UUID == d.UUID }) {
			kept = append(kept, d)
		}
	}
	return kept
}

// baselineLabels are the labels of a node that its baseline records.
func baselineLabels() []string {
	return []string{v1alpha1.LabelConfig, v1alpha1.LabelMIGManager, v1alpha1.LabelMIGConfig, v1alpha1.LabelMIGConfigState}
}

// specMatches reports whether a spec asks for the target already.
func specMatches(spec v1alpha1.GPUNodeSpec, t Target) bool {
	return spec.ConfigName == t.Config && spec.MIGActuator == t.Actuator && sameDevices(spec.Devices, t.Devices)
}

// isLastGood reports whether a target is the last good state of a node.
func isLastGood(n *v1alpha1.GPUNode, t Target) bool {
	good := lastGood(n)
	return good != nil && good.ConfigName == t.Config && sameDevices(good.Devices, t.Devices)
}

// TargetIsLastGood reports whether the target was verified before.
func (v *View) TargetIsLastGood() bool { return isLastGood(&v.Node.GPU, v.Target) }

func sameDevices(a, b []v1alpha1.DeviceSpec) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(x v1alpha1.DeviceSpec) bool {
		return !slices.ContainsFunc(b, func(y v1alpha1.DeviceSpec) bool {
			return x.UUID == y.UUID && plan.Same(x.Sharing, y.Sharing)
		})
	})
}
