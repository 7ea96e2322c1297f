// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"context"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// Labels of nodes, see test/nvidia.
const (
	LabelPresent   = nvidia.LabelPresent
	LabelDeploy    = nvidia.LabelDeploy
	LabelMIGConfig = nvidia.LabelMIGConfig
)

const migDisabled = "all-disabled"

// labelledByEvents returns a node's labels as the GPU Operator writes them for the ClusterPolicy: all of them after an
// event.
func (o *Operator) labelledByEvents(n *corev1.Node, policy *unstructured.Unstructured, p *clusterPolicy) map[string]string {
	event := nvidia.EventOf(n, fmt.Sprint(policy.GetUID(), policy.GetGeneration()), nvidia.MIGCapable(n.Labels))
	if event == o.events[n.Name] && nvidia.Deploys(n.Labels) {
		return n.Labels
	}
	labels := labelled(n.Labels, p)
	if maps.Equal(labels, n.Labels) {
		o.events[n.Name] = event // not before it has them
	}
	return labels
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

// labelled returns a node's labels as the GPU Operator writes them for a ClusterPolicy.
func labelled(now map[string]string, p *clusterPolicy) map[string]string {
	labels := discovered(now)
	layout := ""
	if p.MIGManager.enabled() && p.MIGManager.Config.Default == migDisabled {
		layout = migDisabled
	}
	nvidia.LabelForClusterPolicy(labels, nvidia.MIGCapable(labels), layout)
	return labels
}

// discovered are labels of a node with the one that says whether it has GPUs.
func discovered(now map[string]string) map[string]string {
	labels := map[string]string{}
	maps.Copy(labels, now)
	nvidia.Discover(labels)
	return labels
}
