// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"math/rand/v2"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// recreateEvent deletes NVIDIA's ClusterPolicy and creates it again, as a user does who installs the GPU Operator anew.
// Until its status tells where the GPU Operator runs, there is no device plugin to configure.
func (c *run) recreateEvent(random *rand.Rand) {
	if !c.Plugin.ClusterPolicy || c.Plugin.Reason != "" {
		return
	}
	c.tell("the ClusterPolicy is deleted")
	c.Plugin.Reason, c.Plugin.Message, c.Plugin.Ready = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy", false
	c.reconciles(1 + random.IntN(10))
	c.tell("the ClusterPolicy is created again")
	c.Plugin.Reason, c.Plugin.Message = "", ""
	c.underChart(random)
}

// chartEvent upgrades the chart of the GPU Operator, which writes mig.strategy: single.
func (c *run) chartEvent(random *rand.Rand) {
	if !c.Plugin.ClusterPolicy || c.Plugin.Reason != "" {
		return
	}
	c.tell("the chart of the GPU Operator is upgraded")
	c.underChart(random)
}

// underChart lets the ClusterPolicy be as the chart of the GPU Operator writes it, until the operator has patched it.
// With mig.strategy: single, NVIDIA's device plugin offers nothing on a node with MIG instances. Both changes start it
// anew on every node.
func (c *run) underChart(random *rand.Rand) {
	var single []*host
	for _, h := range c.all() {
		if h.broken == nil {
			h.broken = func(s cluster.Snapshot) bool { return !s.Plugin.Ready && len(h.instances()) > 0 }
			single = append(single, h)
		}
	}
	c.Plugin.Ready = false
	c.rollsOut()
	c.reconciles(1 + random.IntN(5))
	for _, h := range single {
		h.broken = nil
	}
	c.Plugin.Ready = true
	c.rollsOut()
	c.tell("the ClusterPolicy names our ConfigMap")
}

// rollsOut replaces the pods of NVIDIA's device plugin.
func (c *run) rollsOut() {
	for _, h := range c.all() {
		at := slices.IndexFunc(h.Pods, playedBy(pluginLabel))
		if !h.off && at >= 0 {
			c.deletePod(h, h.Pods[at].UID)
			c.version[h.Name]++
		}
	}
}
