// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// A time in the future tells that the clock of who wrote it was wrong: the controller's after a boot, or that of a
// person. It would keep what waits for a deadline until then, so each such time counts as long past. The annotation
// gpusharing.io/other-controller is none of them: a node is not taken over earlier for it (node.NoteOfOthers).

// LatestTime is the latest time that is recorded on a node, its pods and its GPUNode.
func LatestTime(n *Node) (latest time.Time) {
	changeTimes(n, func(at time.Time) time.Time {
		latest = timing.Latest(latest, at)
		return at
	})
	return latest
}

// WithoutFuture returns a copy of the node in which all times that are later than a limit are long past.
func (n Node) WithoutFuture(limit time.Time) *Node {
	n.Annotations, n.Taints, n.Pods, n.GPU = maps.Clone(n.Annotations), slices.Clone(n.Taints), slices.Clone(n.Pods), *n.GPU.DeepCopy()
	changeTimes(&n, func(at time.Time) time.Time {
		if at.After(limit) {
			return time.Unix(0, 0)
		}
		return at
	})
	return &n
}

// changeTimes replaces each time that is recorded on a node. What stays the same is not written.
func changeTimes(n *Node, change func(time.Time) time.Time) {
	set := func(at *time.Time) {
		if now := change(*at); !now.Equal(*at) {
			*at = now
		}
	}
	for name, value := range n.Annotations {
		if !strings.HasPrefix(name, v1alpha1.Group+"/") || name == v1alpha1.AnnotationOtherController {
			continue
		}
		if changed := changeStamps(value, change); changed != value {
			n.Annotations[name] = changed
		}
	}
	for i := range n.Pods {
		if p := &n.Pods[i]; p.SyncTriggered != "" {
			if changed := changeStamps(p.SyncTriggered, change); changed != p.SyncTriggered {
				p.SyncTriggered = changed
			}
		}
	}
	for i := range n.Taints {
		if t := &n.Taints[i]; t.Key == v1alpha1.TaintChanging && t.TimeAdded != nil {
			changeTaint(t, change)
		}
	}
	for _, at := range []*time.Time{&n.DevicesTaintedAt, &n.MarkedAtWorkSince, &n.Features.OverriddenSince, &n.GPU.Spec.ChangeTime.Time, &n.GPU.Status.Config.ChangeTime.Time} {
		set(at)
	}
	if f := n.GPU.Status.Rollout.Failed; f != nil {
		set(&f.Time.Time)
	}
}

func changeTaint(t *corev1.Taint, change func(time.Time) time.Time) {
	if now := change(t.TimeAdded.Time); !now.Equal(t.TimeAdded.Time) {
		t.TimeAdded = &metav1.Time{Time: now}
	}
}

// changeStamps replaces the times of the stamps in a list; anything else stays.
func changeStamps(list string, change func(time.Time) time.Time) string {
	if !strings.Contains(list, "@") {
		return list
	}
	parts := strings.Split(list, ",")
	for i, part := range parts {
		if key, at, is := timing.Parse(part); is {
			parts[i] = timing.Stamp(key, change(at))
		}
	}
	return strings.Join(parts, ",")
}
