// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// limitOf says whether anything keeps pods of a node to their share of the memory of time-sliced GPUs: hard (the driver), watched (the
// memory guard), or none, and why not hard where that is asked for. Empty: the policy says nothing of memory.
func limitOf(n *v1alpha1.GPUNode) string {
	is, reported := condition.Find(n.Status.Conditions, v1alpha1.ConditionMemoryLimited)
	mode := n.Spec.Memory.Limited()
	kind := "none"
	if n.Spec.Memory.Guarded() {
		kind = "watched"
	}
	switch {
	case n.Spec.Memory == nil && !reported:
		return ""
	case mode == v1alpha1.MemoryLimitEnforce && is.Status == metav1.ConditionTrue:
		return "hard: " + is.Message
	case reported:
		return fmt.Sprintf("%s. Not hard: %s: %s", kind, is.Reason, is.Message)
	case mode != v1alpha1.MemoryLimitNone:
		return kind + ". Not hard: the agent has not reported yet; if that lasts, it is older than the policy's memory.limit"
	}
	return kind
}

// limitFor is what the driver lets a pod have of a GPU, in MiB, and whether it limits the pod at all. 0: it is not in the report, which holds
// the first pods alone.
func limitFor(n *v1alpha1.GPUNode, pod, namespace, uuid string) (mib int64, limited bool) {
	if n.Spec.Memory.Limited() != v1alpha1.MemoryLimitEnforce {
		return 0, false
	}
	first := -1 // that is limited: those without a limit come before
	for i, p := range n.Status.MemoryLimits.Pods {
		if p.Namespace == namespace && p.PodName == pod && p.DeviceUUID == uuid {
			return p.LimitBytes >> 20, p.Reason == ""
		}
		if first < 0 && p.Reason == "" {
			first = i
		}
	}
	more := first >= 0 && int(n.Status.MemoryLimits.Limited) > len(n.Status.MemoryLimits.Pods)-first
	return 0, more || condition.IsTrue(n.Status.Conditions, v1alpha1.ConditionMemoryLimited)
}

// timeSliced says what a pod has of a time-sliced GPU.
func (s *share) timeSliced(one string) string {
	one += " by time-slicing: all take turns, and "
	switch total := cmp.Or(gib(s.Total), "memory"); {
	case s.MemoryMiB > 0:
		return fmt.Sprintf("%sthe driver lets its pod have %s of the %s; an allocation beyond that fails with CUDA_ERROR_OUT_OF_MEMORY", one, gib(s.MemoryMiB), total)
	case s.limited:
		return fmt.Sprintf("%sthe driver limits what its pod takes of the %s", one, total)
	default:
		return fmt.Sprintf("%snothing limits what one takes of the %s", one, total)
	}
}
