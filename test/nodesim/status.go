// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

type counts struct{ capacity, allocatable int }

// publish writes the extended resources into the node's status when the period has passed and they changed.
func (k *kubelet) publish(ctx context.Context, node *corev1.Node) error {
	if k.Clock.Since(k.publishedAt) < k.StatusPeriod {
		return nil
	}
	want := k.resources()
	base := node.DeepCopy()
	for name, c := range want {
		node.Status.Capacity[corev1.ResourceName(name)] = *resource.NewQuantity(int64(c.capacity), resource.DecimalSI)
		node.Status.Allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(int64(c.allocatable), resource.DecimalSI)
	}
	k.publishedAt = k.Clock.Now()
	if maps.Equal(want, k.published) {
		return nil
	}
	if err := k.Client.Status().Patch(ctx, node, client.MergeFrom(base)); err != nil {
		return fmt.Errorf("publishing the status of node %s: %w", k.Name, err)
	}
	k.published = want
	k.Tell("kubelet: the node advertises %s", describe(want))
	return nil
}

// resources counts the devices of each resource. One that a plugin no longer serves stays, with nothing to allocate.
func (k *kubelet) resources() map[string]counts {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[string]counts{}
	for name, e := range k.endpoints {
		c := counts{capacity: len(e.devices), allocatable: len(e.devices)}
		if e.gone {
			c.allocatable = 0
		}
		all[name] = c
	}
	return all
}

func describe(resources map[string]counts) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(resources)) {
		if c := resources[name]; c.allocatable > 0 {
			parts = append(parts, fmt.Sprintf("%s: %d", name, c.allocatable))
		}
	}
	if len(parts) == 0 {
		return "no GPU"
	}
	return strings.Join(parts, ", ")
}
