// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// How often within what time MIG instances are made again that another program changes.
const (
	maxRebuilds   = 3
	rebuildWindow = time.Hour
)

// rebuild decides what to do about MIG instances that matched the desired state and do not any more though neither the
// spec nor the boot has changed: another program changed them. They are made again a few times, and then left. It
// returns when they were made again within the last hour, this time with it.
func rebuild(node *v1alpha1.GPUNode, bootID string, devices []gpu.Device, now time.Time) (at []metav1.Time, leave *plan.Problem) {
	for _, t := range node.Status.RebuildTimes {
		if age := now.Sub(t.Time); age >= 0 && age < rebuildWindow { // one from the future tells that the clock was wrong
			at = append(at, t)
		}
	}
	changed := changedMIG(node.Spec.Devices, devices)
	if len(changed) == 0 || !wasDone(node, bootID) {
		return at, nil
	}
	if len(at) < maxRebuilds {
		return append(slices.Clone(at), metav1.NewTime(now.Truncate(time.Second))), nil
	}
	until := at[len(at)-maxRebuilds].Add(rebuildWindow)
	return at, &plan.Problem{
		Reason: v1alpha1.ReasonChangedByOthers,
		Message: fmt.Sprintf("another program keeps changing MIG or the time-slice interval on %s; the agent restored it %d times within an hour and leaves it "+
			"until %s UTC; stop that program, such as a MIG service of the host",
			strings.Join(changed, "; "), len(at), until.UTC().Format("15:04:05")),
	}
}

// wasDone reports whether the last reconcile found the GPUs as this spec asks, in this boot, or left them to another
// program.
func wasDone(node *v1alpha1.GPUNode, bootID string) bool {
	applied, found := condition.Find(node.Status.Conditions, v1alpha1.ConditionApplied)
	if !found || applied.ObservedGeneration != node.Generation || node.Status.BootID != bootID {
		return false
	}
	return applied.Status == metav1.ConditionTrue || applied.Reason == v1alpha1.ReasonChangedByOthers
}

// changedMIG names the GPUs whose MIG mode or instances do not match the desired state, with what is there.
func changedMIG(desired []v1alpha1.DeviceSpec, devices []gpu.Device) []string {
	var changed []string
	for _, spec := range desired {
		d, found := find(devices, spec.UUID)
		if !found {
			continue
		}
		is, want := plan.Observed(d), spec.Sharing
		is.MPS, want.MPS = nil, nil
		if !plan.Met(want, is) {
			changed = append(changed, fmt.Sprintf("%s (%s)", d, partition(is, want)))
		}
	}
	return changed
}

// partition says how a GPU is partitioned.
func partition(s, want v1alpha1.DeviceSharing) string {
	if s.MIGMode == want.MIGMode && s.TimeSliceInterval != want.TimeSliceInterval {
		return "now with time-slice interval " + cmp.Or(string(s.TimeSliceInterval), "unknown")
	}
	if s.MIGMode != v1alpha1.MIGModeEnabled {
		return "now without MIG"
	}
	var parts []string
	for _, i := range s.Instances {
		parts = append(parts, fmt.Sprintf("%d x %s", i.Count, i.Profile))
	}
	if len(parts) == 0 {
		return "now in MIG mode without instances"
	}
	return "now " + strings.Join(parts, ", ")
}
