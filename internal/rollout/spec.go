// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// setSpec asks the agent for the target.
func (v *view) setSpec() SetSpec {
	spec := v.kept()
	spec.ConfigName, spec.Devices = v.to.key, sorted(v.to.devices)
	spec.ChangeTime, spec.Reboot = metav1.NewTime(v.world.Now), nil
	spec.MIGActuator, spec.MIGConfigName = v.to.actuator, ""
	if v.partitions() {
		spec.MIGConfigName = v.config().Name
	}
	why := "applying policy " + v.to.policy
	switch {
	case v.fallsBack:
		why = "going back to the last good state"
	case v.by == nil:
		why = "going back to the state in which the node was found"
	}
	return SetSpec{Node: v.node.Name, Spec: spec, Policy: v.ref(), Why: why}
}

// kept is the spec with what every change keeps, the baseline of each GPU recorded before its first.
func (v *view) kept() v1alpha1.GPUNodeSpec {
	spec := *v.node.GPU.Spec.DeepCopy()
	v.record(&spec)
	spec.PolicyName, spec.Strategy = v.to.policy, v.to.strategy
	switch {
	case v.by != nil:
		spec.Release = releaseOf(v.by)
		spec.Numbering = policy.Number(v.by, policyNode(v.node))
	case owner(v.node, nil) != "":
		if spec.Release == nil {
			spec.Release = &v1alpha1.Release{}
		}
		spec.Release.PolicyName = owner(v.node, nil) // the copy on the Node goes before the taint does
	}
	return spec
}

func releaseOf(p *v1alpha1.GPUSharingPolicy) *v1alpha1.Release {
	return &v1alpha1.Release{
		PolicyName:     p.Name,
		ReleasePolicy:  p.Spec.ReleasePolicy,
		Drain:          p.Spec.Rollout.Drain,
		MaxUnavailable: p.Spec.Rollout.MaxUnavailable,
		Reboot:         p.Spec.Rollout.Reboot,
	}
}

// recordBaseline notes the state of the node, and changes nothing.
func (v *view) recordBaseline() SetSpec {
	return SetSpec{Node: v.node.Name, Spec: v.kept(), Policy: v.ref(), Why: "recording the state in which the node was found"}
}

// recordFailure records that the desired state failed, and withdraws the permission to reboot the node for it.
func (v *view) recordFailure(reason, message string) []Action {
	const most = 1024 // of the schema, in characters
	failed := &v1alpha1.FailedChange{
		Hash: v.asked(), Reason: reason, Message: cut(message, most), Attempt: v.attempt(), Time: metav1.NewTime(v.world.Now.Truncate(time.Second)),
	}
	status := v1alpha1.GPUNodeStatus{Rollout: v1alpha1.RolloutStatus{LastGood: v.node.GPU.Status.Rollout.LastGood, Failed: failed}}
	actions := []Action{Report{Node: v.node.Name, Status: status, Policy: v.ref(), Why: "recording that the change failed"}}
	if spec := *v.node.GPU.Spec.DeepCopy(); v.withdrawReboot(&spec) {
		actions = append(actions, SetSpec{Node: v.node.Name, Spec: spec, Policy: v.ref(), Why: "withdrawing the permission to reboot the node"})
	}
	return actions
}

// recordReached records the target as the last good state. A node that is back at its baseline is forgotten.
func (v *view) recordReached() []Action {
	if v.to.final {
		return v.writeReached(v1alpha1.GPUNodeSpec{}, "forgetting the node, which is in its baseline")
	}
	spec := v.kept()
	spec.Reboot = nil
	var actions []Action
	if !v.fallsBack {
		good := v.to.sharing()
		good.Devices = v.withoutRestored(sorted(good.Devices))
		spec.Devices, spec.Baseline.Devices = v.withoutRestored(spec.Devices), v.withoutRestored(spec.Baseline.Devices)
		if last := v.node.GPU.Status.Rollout; last.Failed != nil || !equality.Semantic.DeepEqual(last.LastGood, good) {
			status := v1alpha1.GPUNodeStatus{Rollout: v1alpha1.RolloutStatus{LastGood: good}}
			actions = []Action{Report{Node: v.node.Name, Status: status, Policy: v.ref(), Why: "recording the last good state"}}
		}
	}
	return append(actions, v.writeReached(spec, "recording what the node reached")...)
}

// writeReached writes the spec of a node that has reached it. The copy on the Node comes first: GPUs that it lists and the spec does
// not are added to the spec again.
func (v *view) writeReached(spec v1alpha1.GPUNodeSpec, why string) []Action {
	if !v.node.BaselineLost && equality.Semantic.DeepEqual(spec, v.node.GPU.Spec) {
		return nil
	}
	var actions []Action
	if spec.Baseline != nil {
		patch, text := v.patch("recording the baseline"), copyOf(spec)
		if v.node.Annotations[v1alpha1.AnnotationBaseline] != text {
			patch.Annotations[v1alpha1.AnnotationBaseline] = &text
			actions = append(actions, patch)
		}
	}
	return append(actions, SetSpec{Node: v.node.Name, Spec: spec, Policy: v.ref(), Why: why})
}

// attempt tells one attempt at the desired state from the next: another generation of the policy, or another value of
// v1alpha1.AnnotationRetry.
func (v *view) attempt() string {
	ref, uid := v.ref(), types.UID("")
	if v.by != nil {
		uid = v.by.UID
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d/%s", uid, ref.Generation, v.node.GPU.Annotations[v1alpha1.AnnotationRetry]))
	return hex.EncodeToString(sum[:8])
}

func sorted(devices []v1alpha1.DeviceSpec) []v1alpha1.DeviceSpec {
	return slices.SortedFunc(slices.Values(devices), func(a, b v1alpha1.DeviceSpec) int { return cmp.Compare(a.UUID, b.UUID) })
}

// cut makes a text at most so many characters long.
func cut(s string, most int) string {
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:most-1]) + "…"
}
