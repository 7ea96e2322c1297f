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
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
)

// nodePoll is how often the kubelet is asked whether its allocations changed, and the driver looked for: a question
// over a local socket and a few files, where a reconcile opens the driver. A drain waits no longer than this for the
// report that a pod has left.
const nodePoll = 3 * time.Second

// watchNode asks for a reconcile whenever the kubelet's allocations change, or which pods MPS keeps waiting or lets run
// with former limits, or whether one of its daemons fails, or whenever the driver comes, goes or is another. While the kubelet cannot be asked nothing is
// sent: the next reconcile says so.
func (c *Controller) watchNode(ctx context.Context, changes chan<- event.GenericEvent) error {
	node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: c.node}}
	var last []Allocation
	var lastUse []v1alpha1.MPSStatus
	var failed []string
	lastDriver := c.identity()
	for {
		use, err := c.mps.Recorded()
		changed := err == nil && (!sameUse(mpsStatus(use), lastUse) || !slices.Equal(failing(use), failed))
		if changed {
			lastUse, failed = mpsStatus(use), failing(use)
		}
		if now, err := c.allocations.List(ctx); err == nil {
			slices.SortFunc(now, byDevice)
			changed = changed || !slices.Equal(now, last)
			last = now
		}
		if now := c.identity(); now != lastDriver {
			changed, lastDriver = true, now
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
		case <-c.clock.After(nodePoll):
		}
	}
}

// failing are the resources whose daemons fail. Why they do so may be put in other words each time.
func failing(recorded []mps.Serving) (resources []string) {
	for _, s := range recorded {
		if s.Failing {
			resources = append(resources, s.Resource)
		}
	}
	return resources
}

// identity is that of the driver which the node has; zero if it has none.
func (c *Controller) identity() driver.Identity {
	if c.driver == nil {
		return driver.Identity{}
	}
	found, err := c.driver()
	if err != nil {
		return driver.Identity{}
	}
	return found.Identity
}

// byDevice puts allocations in an order, which the kubelet does not keep.
func byDevice(a, b Allocation) int {
	return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
}
