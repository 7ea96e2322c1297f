// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// WithoutFuture returns a copy of the node in which all recorded times that are later than a limit are long past, and
// the latest that the node has. A time in the future tells that a clock was wrong, such as the controller's after a boot;
// what waits for a deadline would wait until then. The annotation gpusharing.io/other-controller stays: no node is taken
// over earlier for a wrong clock.
func (n Node) WithoutFuture(limit time.Time) (past *Node, latest time.Time) {
	n.Annotations, n.Taints, n.Pods, n.GPU = maps.Clone(n.Annotations), slices.Clone(n.Taints), slices.Clone(n.Pods), *n.GPU.DeepCopy()
	bound := func(at *time.Time) {
		if latest = timing.Latest(latest, *at); at.After(limit) {
			*at = time.Unix(0, 0)
		}
	}
	for name, value := range n.Annotations {
		if strings.HasPrefix(name, v1alpha1.Group+"/") && name != v1alpha1.AnnotationOtherController {
			n.Annotations[name] = boundStamps(value, bound)
		}
	}
	for i := range n.Pods {
		n.Pods[i].SyncTriggered = boundStamps(n.Pods[i].SyncTriggered, bound)
	}
	for i := range n.Taints {
		if t := &n.Taints[i]; t.Key == v1alpha1.TaintChanging && t.TimeAdded != nil {
			t.TimeAdded = t.TimeAdded.DeepCopy()
			bound(&t.TimeAdded.Time)
		}
	}
	for _, at := range []*time.Time{&n.DevicesTaintedAt, &n.MarkedAtWorkSince, &n.Features.OverriddenSince, &n.GPU.Spec.ChangeTime.Time, &n.GPU.Status.Config.ChangeTime.Time} {
		bound(at)
	}
	if f := n.GPU.Status.Rollout.Failed; f != nil {
		bound(&f.Time.Time)
	}
	return &n, latest
}

// boundStamps bounds the times of the stamps in a list; anything else stays.
func boundStamps(list string, bound func(*time.Time)) string {
	parts := strings.Split(list, ",")
	for i, part := range parts {
		if key, at, is := timing.Parse(part); is {
			bound(&at)
			parts[i] = timing.Stamp(key, at)
		}
	}
	return strings.Join(parts, ",")
}
