// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// nfd is Node Feature Discovery (NFD) in the simulated cluster.
type nfd struct {
	absent bool // it does not run
	denies bool // its options drop the labels of our objects, as with restrictions.nodeFeatureNamespaceSelector
}

// features are the NodeFeature objects of a node, as far as they concern the label nvidia.com/mps.capable.
type features struct {
	ours   time.Time       // when our object was created; zero: there is none
	gfd    string          // the value in the object of GPU Feature Discovery (GFD); empty: there is none
	merged map[string]bool // the labels on the node that are NFD's
}

// seen is what the controller knows of the objects.
func (f features) seen() cluster.NodeFeatures {
	n := cluster.NodeFeatures{OverriddenSince: f.ours, Others: f.gfd}
	if f.gfd != "" {
		n.Author = "gpu-operator/nvidia-features-for-a"
	}
	return n
}

// keepMPSOff creates our NodeFeature, if the API server has the kind.
func (c *site) keepMPSOff(h *host) {
	if c.Plugin.NodeFeatures && h.features.ours.IsZero() {
		h.features.ours = c.Now
	}
}

// mergeFeatures is nfd-master, once per second.
func (c *site) mergeFeatures(h *host) {
	if c.nfd.absent || !c.Plugin.NodeFeatures {
		return
	}
	var found []nvidia.NodeFeature
	if h.features.gfd != "" {
		found = append(found, nvidia.NodeFeature{
			Namespace: "gpu-operator", Name: "nvidia-features-for-" + h.Name, Labels: map[string]string{mpsLabel: h.features.gfd},
		})
	}
	if !h.features.ours.IsZero() && !c.nfd.denies {
		found = append(found, nvidia.NodeFeature{
			Namespace: "gpusharing-system", Name: action.OverrideName(h.Name), Labels: map[string]string{mpsLabel: "false", v1alpha1.LabelOverridden: "true"},
		})
	}
	want := nvidia.MergeFeatures(found, "node-feature-discovery")
	if change := nvidia.FeatureLabels(h.Labels, h.features.merged, want); len(change) > 0 {
		patch(h.Labels, change)
		c.version[h.Name]++
	}
	clear(h.features.merged)
	for name := range want {
		h.features.merged[name] = true
	}
}

// discoverFeatures is GFD, which reads the configuration that the device plugin reads.
func (c *site) discoverFeatures(h *host) {
	discovers := slices.ContainsFunc(h.Pods, playedBy(gfdLabel))
	if !discovers || !h.plugin.running || !c.Plugin.NodeFeatures {
		return
	}
	if capable, err := nvidia.MPSCapable(parse(c.configs(h)[h.plugin.selected]), h.devices); err == nil {
		h.features.gfd = strconv.FormatBool(capable)
	}
}

// mpsDaemonSet runs NVIDIA's MPS DaemonSet, which is always rendered, where its node selector matches. Its init
// container unmounts the shared memory of our daemons. Its daemon reads the default configuration, whatever the node
// selects (NVIDIA/k8s-device-plugin v0.18.2 to v0.20.0), and never again.
func (c *site) mpsDaemonSet(h *host) {
	at := slices.IndexFunc(h.Pods, playedBy(mpsLabel))
	wanted := h.Labels[mpsLabel] == "true" && (h.Labels[pluginLabel] == "true" || !c.Plugin.ClusterPolicy)
	selector := map[string]string{mpsLabel: "true"}
	if c.Plugin.ClusterPolicy {
		selector[pluginLabel] = "true"
	}
	switch {
	case wanted && at < 0 && !c.keptOff(h):
		c.pods++
		h.Pods = append(h.Pods, cluster.Pod{
			Namespace: "gpu-operator", Name: fmt.Sprintf("mps-%d", c.pods), UID: fmt.Sprintf("mps-%d", c.pods), Controller: "DaemonSet", NVIDIA: true,
			NodeSelector: selector, MountsConfig: true, Scheduled: c.Now, Serves: c.Plugin.ClusterPolicy, Tolerations: c.tolerations(),
		})
		c.startMPS(h)
	case !wanted && at >= 0:
		h.Pods = slices.Delete(h.Pods, at, at+1)
		c.endMPS(h)
	case at < 0 && h.theirs != nil:
		c.endMPS(h)
	}
}

// startMPS starts what is in a pod of NVIDIA's MPS DaemonSet.
func (c *site) startMPS(h *host) {
	if len(h.daemons) > 0 {
		c.beside = append(c.beside, h.Name)
	}
	if parse(c.byHand).Sharing.MPS == nil {
		return // "No devices are configured for MPS sharing; Waiting indefinitely"
	}
	h.theirs = &gpu.MPSDaemon{
		Resource: "nvidia.com/gpu", External: true, ActiveThreadPercentage: 100 / parse(c.byHand).Sharing.MPS.Resources[0].Replicas,
	}
	h.computeMode(gpu.ComputeExclusiveProcess)
}

// mpsByHand is a default configuration that shares by MPS, as clusters have it that used NVIDIA's own DaemonSet.
func mpsByHand(replicas int) string {
	return fmt.Sprintf("version: v1\nsharing:\n  mps:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: %d\n", replicas)
}

// labelledByHand lets a person set the label of a node where nobody else does.
func (h *host) labelledByHand(value string) *host {
	h.Labels[mpsLabel] = value
	return h
}
