// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
)

// summaryOf is what a decision asks of each node.
func summaryOf(m *member) summary {
	spec := &m.Node.GPU.Spec
	b := summary{NeedsPlugin: needsPlugin(m), ByDefault: byDefault(m), NeedsMIGManager: node.UsesMIGConfigs(m.View) && !m.Paused(), Offer: offerOf(m)}
	b.Configs = [...]string{m.Node.Labels[v1alpha1.LabelConfig], spec.ConfigName, ""}
	if good := m.Node.GPU.Status.Rollout.LastGood; good != nil {
		b.Configs[2] = good.ConfigName
	}
	return b
}

// needsPlugin reports whether the device plugin of the node has to read our ConfigMap: a policy governs it, or did. One
// that is paused from the start changes nothing, and configuring the plugin restarts it on every node. Where NVIDIA's
// DRA driver serves the node nothing reads its label, but while that names a config of ours the node may move back.
func needsPlugin(m *member) bool {
	changed := m.Node.GPU.Spec.Baseline != nil
	if !m.ReadsConfigs() {
		return changed && node.SelectsOwnConfig(m.View)
	}
	return changed || m.Policy != nil && !m.Policy.Spec.Rollout.Paused
}

// pluginStaysConfigured reports whether the ClusterPolicy keeps naming our ConfigMap though no node needs that now: a
// policy may govern the next one. To change the ClusterPolicy restarts NVIDIA's programs on every node, and a pool of
// nodes may scale to zero often.
func pluginStaysConfigured(s *cluster.Snapshot) bool {
	return s.Plugin.ClusterPolicy && s.Plugin.Ready && slices.ContainsFunc(s.Policies, func(p v1alpha1.GPUSharingPolicy) bool {
		return p.DeletionTimestamp.IsZero() && !p.Spec.Rollout.Paused
	})
}

// byDefault reports whether the node gets the default config and has instances.
func byDefault(m *member) bool {
	_, labelled := m.Node.Labels[v1alpha1.LabelConfig]
	return m.ReadsConfigs() && (m.Policy == nil || m.Paused()) && node.Retained(m.Node.GPU.Spec) && !labelled &&
		slices.ContainsFunc(m.Node.GPU.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled })
}
