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
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
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

// labelEvent is what makes the GPU Operator set the labels of a node when it changes. It does not when a user removes a
// label that it has set (controllers/nodelabeling_controller.go, v26.7.0: getNodeLabelUpdateReasons).
type labelEvent struct {
	node, policy                types.UID
	generation                  int64
	present, operands, workload string
	onPCI, migCapable           bool
}

// labelledByEvents returns a node's labels as the GPU Operator writes them for the ClusterPolicy: all of them after such an
// event. Those that no longer belong there it removes, also those that a user sets.
func (o *Operator) labelledByEvents(n *corev1.Node, policy *unstructured.Unstructured, p *clusterPolicy) map[string]string {
	now := n.Labels
	event := labelEvent{
		node: n.UID, policy: policy.GetUID(), generation: policy.GetGeneration(), present: now[LabelPresent], operands: now[noOperands],
		workload: now["nvidia.com/gpu.workload.config"], onPCI: onPCI(now), migCapable: migCapable(now),
	}
	if event == o.events[n.Name] && deploys(now) {
		return now
	}
	labels := labelled(now, p)
	if maps.Equal(labels, now) {
		o.events[n.Name] = event // not before it has them
	}
	return labels
}

// deploys reports whether operands run on a node, by its labels.
func deploys(labels map[string]string) bool {
	return labels[LabelPresent] == "true" && labels[noOperands] != "false"
}

// labelNodes gives every node the labels that the GPU Operator owns.
func (o *Operator) labelNodes(ctx context.Context, labelled func(*corev1.Node) map[string]string) error {
	nodes := &corev1.NodeList{}
	if err := o.client.List(ctx, nodes); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	var errs []error
	for i := range nodes.Items {
		node := &nodes.Items[i]
		before := node.DeepCopy()
		node.Labels = labelled(before)
		if !maps.Equal(node.Labels, before.Labels) {
			errs = append(errs, o.client.Patch(ctx, node, client.MergeFrom(before)))
		}
	}
	return errors.Join(errs...)
}

// labelled returns a node's labels as the GPU Operator writes them. A label for an operand that has a value keeps it:
// other programs stop operands by it.
func labelled(now map[string]string, p *clusterPolicy) map[string]string {
	labels := maps.Clone(now)
	if labels == nil {
		labels = map[string]string{}
	}
	labelPresent(labels)
	if !deploys(labels) {
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

// onPCI reports whether Node Feature Discovery found a GPU of NVIDIA's.
func onPCI(labels map[string]string) bool {
	return slices.ContainsFunc(pciLabels, func(key string) bool { return labels[key] == "true" })
}

// labelPresent sets, in a node's labels, the one that says whether it has GPUs.
func labelPresent(labels map[string]string) {
	switch {
	case onPCI(labels):
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
