// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
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
	if !v.fallsBack {
		spec.Failed = nil
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

// recordFailure notes that the wish failed.
func (v *view) recordFailure(reason, message string) SetSpec {
	const most = 1024 // of the schema, in characters
	spec := v.kept()
	v.withdrawReboot(&spec)
	spec.Failed = &v1alpha1.FailedChange{Hash: v.asked(), Reason: reason, Message: cut(message, most), Attempt: v.attempt()}
	return SetSpec{Node: v.node.Name, Spec: spec, Policy: v.ref(), Why: "recording that the change failed"}
}

// recordReached notes the target as the last good state; a node that is back at its baseline forgets us.
func (v *view) recordReached() (SetSpec, bool) {
	var spec v1alpha1.GPUNodeSpec
	why := "forgetting the node, which is as it was found"
	if !v.to.final {
		spec, why = v.kept(), "recording the last good state"
		spec.Reboot = nil
		if !v.fallsBack {
			spec.LastGood, spec.Failed = v.to.sharing(), nil
			spec.LastGood.Devices = sorted(spec.LastGood.Devices)
			v.forget(&spec)
		}
	}
	differs := v.node.BaselineLost || !equality.Semantic.DeepEqual(spec, v.node.GPU.Spec)
	return SetSpec{Node: v.node.Name, Spec: spec, Policy: v.ref(), Why: why}, differs
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
