// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/wiring"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

const (
	labelName = "app.kubernetes.io/name"
	// nvidiaDomain is the domain of NVIDIA's resources, labels and annotations.
	nvidiaDomain = "nvidia.com/"
	// nodeNameField is the index of pods by the node that they are bound to. The API server knows it too.
	nodeNameField = "spec.nodeName"
)

// seen is the cluster as one pass read it: the world to decide on, and the objects to write to.
type seen struct {
	world    rollout.World
	plugin   *wiring.Observed
	policies map[string]*v1alpha1.GPUSharingPolicy
	nodes    map[string]*corev1.Node
	gpuNodes map[string]*v1alpha1.GPUNode
	features features
}

// gather reads the cluster, from the cache. What it returns is shared with the cache and must not be changed.
func (c *Controller) gather(ctx context.Context) (*seen, error) {
	plugin, err := c.Wiring.Observe(ctx)
	if err != nil {
		return nil, err
	}
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.client.List(ctx, policies); err != nil {
		return nil, fmt.Errorf("reading policies: %w", err)
	}
	s := &seen{plugin: plugin, policies: make(map[string]*v1alpha1.GPUSharingPolicy, len(policies.Items))}
	for i := range policies.Items {
		s.policies[policies.Items[i].Name] = &policies.Items[i]
	}
	s.world = rollout.World{
		Now: c.Clock.Now(), Wiring: plugin.Wiring, Keys: plugin.Applied, Copied: plugin.Copied, Policies: policies.Items,
	}
	if err := c.gatherFeatures(ctx, s); err != nil {
		return nil, err
	}
	return s, c.gatherNodes(ctx, s)
}

func (c *Controller) gatherNodes(ctx context.Context, s *seen) error {
	nodes, gpuNodes := &corev1.NodeList{}, &v1alpha1.GPUNodeList{}
	if err := c.client.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading nodes: %w", err)
	}
	if err := c.client.List(ctx, gpuNodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading GPUNodes: %w", err)
	}
	s.gpuNodes = make(map[string]*v1alpha1.GPUNode, len(gpuNodes.Items))
	for i := range gpuNodes.Items {
		s.gpuNodes[gpuNodes.Items[i].Name] = &gpuNodes.Items[i]
	}
	s.nodes = make(map[string]*corev1.Node, len(gpuNodes.Items))
	s.world.Nodes = make([]rollout.Node, 0, len(gpuNodes.Items))
	dra, err := c.gatherDRA(ctx, nodes.Items)
	if err != nil {
		return err
	}
	c.known.begin(s.plugin.ConfigMap)
	for _, node := range c.refusals.prune(s.world.Now) {
		c.pods.changed(node)
	}
	for i := range nodes.Items {
		node := &nodes.Items[i]
		gpuNode, hasGPUs := s.gpuNodes[node.Name]
		if !hasGPUs {
			continue
		}
		s.nodes[node.Name] = node
		n, err := c.gatherNode(ctx, node, gpuNode, others{features: s.features.of[node.Name], dra: dra[node.Name]})
		if err != nil {
			return err
		}
		s.world.Nodes = append(s.world.Nodes, n)
	}
	c.known.end(s.nodes)
	return c.gatherUnscheduled(ctx, s)
}

// gatherUnscheduled reads the pods that ask for GPUs and are on no node.
func (c *Controller) gatherUnscheduled(ctx context.Context, s *seen) error {
	pods := &corev1.PodList{}
	if err := c.client.List(ctx, pods, client.MatchingFields{nodeNameField: ""}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading the pods that are on no node: %w", err)
	}
	for i := range pods.Items {
		if pod := &pods.Items[i]; rollout.RequestsGPU(&pod.Spec) && !rollout.Finished(pod) {
			s.world.Unscheduled = append(s.world.Unscheduled, rollout.PodOf(pod, s.plugin.ConfigMap))
		}
	}
	return nil
}

// others are what objects besides Node, GPUNode and pods report of a node.
type others struct {
	features rollout.NodeFeatures
	dra      string
}

// gatherNode reads a node, if it is not known as it is.
func (c *Controller) gatherNode(
	ctx context.Context, node *corev1.Node, gpuNode *v1alpha1.GPUNode, o others,
) (rollout.Node, error) {
	pods := c.pods.of(node.Name) // before they are read
	if n, holds := c.known.find(node, gpuNode, pods); holds && n.Features == o.features && n.DRA == o.dra {
		return n, nil
	}
	n := rollout.NodeOf(node, gpuNode)
	n.Features, n.DRA = o.features, o.dra
	if err := c.gatherPods(ctx, &n, c.known.configMap); err != nil {
		return n, err
	}
	return c.known.keep(node, gpuNode, pods, n), nil
}

func (c *Controller) gatherPods(ctx context.Context, n *rollout.Node, configMap types.NamespacedName) error {
	pods := &corev1.PodList{}
	if err := c.client.List(ctx, pods, client.MatchingFields{nodeNameField: n.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading the pods on node %s: %w", n.Name, err)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if rollout.Finished(pod) {
			continue
		}
		p := rollout.PodOf(pod, configMap)
		p.Refused = c.refusals.of(p.UID)
		n.Pods = append(n.Pods, p)
		n.AgentReady = n.AgentReady || c.isReadyAgent(pod)
	}
	return nil
}

func (c *Controller) isReadyAgent(pod *corev1.Pod) bool {
	return pod.Namespace == c.Namespace && rollout.IsReadyAgent(pod)
}
