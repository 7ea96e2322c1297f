// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// allocationPoll is how often the kubelet is asked whether its allocations changed: a question over a local socket,
// where a pass opens the driver. A drain waits no longer than this for the report that a pod has left.
const allocationPoll = 3 * time.Second

// watchAllocations asks for a pass whenever the kubelet's allocations change, or which pods MPS keeps waiting or lets run with
// former limits. While it cannot be asked nothing is sent: the next pass says so.
func (c *Controller) watchAllocations(ctx context.Context, changes chan<- event.GenericEvent) error {
	node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: c.node}}
	var last []Allocation
	var lastUse []v1alpha1.MPSStatus
	for {
		use, err := c.mps.Recorded()
		changed := err == nil && !sameUse(mpsStatus(use), lastUse)
		if changed {
			lastUse = mpsStatus(use)
		}
		if now, err := c.allocations.List(ctx); err == nil {
			slices.SortFunc(now, byDevice)
			changed = changed || !slices.Equal(now, last)
			last = now
		}
		if changed {
			select {
			case changes <- event.GenericEvent{Object: node}:
			case <-ctx.Done():
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-c.clock.After(allocationPoll):
		}
	}
}

// byDevice puts allocations in an order, which the kubelet does not keep.
func byDevice(a, b Allocation) int {
	return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
}
