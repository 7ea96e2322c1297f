// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// LabelPresent is on nodes that have, or once had, GPUs.
	LabelPresent = "nvidia.com/gpu.present"
	// LabelDeploy with the name of an operand says whether its DaemonSet runs on the node.
	LabelDeploy = "nvidia.com/gpu.deploy."
	// LabelMIGConfig names the layout that mig-manager applies.
	LabelMIGConfig = "nvidia.com/mig.config"

	migManager   = LabelDeploy + "mig-manager"
	noOperands   = LabelDeploy + "operands"
	migDisabled  = "all-disabled"
	labelProduct = "nvidia.com/gpu.product"
	labelCapable = "nvidia.com/mig.capable"
	vgpuHost     = "nvidia.com/vgpu.host-driver-version"
)

// pciLabels are those of Node Feature Discovery that name a GPU of NVIDIA's, by vendor or by class and vendor.
var pciLabels = []string{
	"feature.node.kubernetes.io/pci-10de.present",
	"feature.node.kubernetes.io/pci-0302_10de.present",
	"feature.node.kubernetes.io/pci-0300_10de.present",
}

// deployed are the operands that run on a node for containers; client stands for programs of third parties.
var deployed = []string{
	"driver", "gpu-feature-discovery", "container-toolkit", "device-plugin", "dcgm", "dcgm-exporter", "node-status-exporter",
	"operator-validator", "client",
}

// labelNodes gives every node the labels that the GPU Operator owns.
func (o *Operator) labelNodes(ctx context.Context, labelled func(now map[string]string) map[string]string) error {
	nodes := &corev1.NodeList{}
	if err := o.client.List(ctx, nodes); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	var errs []error
	for i := range nodes.Items {
		node := &nodes.Items[i]
		before := node.DeepCopy()
		node.Labels = labelled(node.Labels)
		if !maps.Equal(node.Labels, before.Labels) {
			errs = append(errs, o.client.Patch(ctx, node, client.MergeFrom(before)))
		}
	}
	return errors.Join(errs...)
}

// labelled returns a node's labels as the GPU Operator writes them. A label for an operand that has a value keeps it:
// other programs pause operands by it.
func labelled(now map[string]string, p *clusterPolicy) map[string]string {
	labels := maps.Clone(now)
	if labels == nil {
		labels = map[string]string{}
	}
	labelPresent(labels)
	if labels[LabelPresent] != "true" || labels[noOperands] == "false" {
		for _, operand := range deployed {
			delete(labels, LabelDeploy+operand)
		}
		delete(labels, migManager)
		return labels
	}
	for _, operand := range deployed {
		if labels[LabelDeploy+operand] == "" {
			labels[LabelDeploy+operand] = "true"
		}
	}
	if _, ok := labels[migManager]; !ok && migCapable(labels) {
		labels[migManager] = "true"
	}
	if p.MIGManager.enabled() && p.MIGManager.Config.Default == migDisabled && migCapable(labels) && labels[LabelMIGConfig] == "" {
		labels[LabelMIGConfig] = migDisabled
	}
	return labels
}

// labelPresent sets, in a node's labels, the one that says whether it has GPUs.
func labelPresent(labels map[string]string) {
	onPCI := slices.ContainsFunc(pciLabels, func(key string) bool { return labels[key] == "true" })
	switch {
	case onPCI:
		labels[LabelPresent] = "true"
	case labels[LabelPresent] == "true":
		labels[LabelPresent] = "false"
	}
}

// migCapable reports whether a node's GPUs can be partitioned, by GPU Feature Discovery's label or else by their
// product.
func migCapable(labels map[string]string) bool {
	if labels[vgpuHost] != "" {
		return false
	}
	if capable, ok := labels[labelCapable]; ok {
		return capable == "true"
	}
	product := strings.ToLower(labels[labelProduct])
	return slices.ContainsFunc([]string{"h100", "a100", "a30"}, func(name string) bool { return strings.Contains(product, name) })
}
