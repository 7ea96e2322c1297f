// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/wiring"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

const (
	// agentName is the label app.kubernetes.io/name of the agents' pods.
	agentName = "gpu-sharing-agent"
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
		Now: c.Clock.Now(), Wiring: plugin.Wiring, Keys: plugin.Applied, Policies: policies.Items,
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
	for i := range nodes.Items {
		node := &nodes.Items[i]
		gpuNode, hasGPUs := s.gpuNodes[node.Name]
		if !hasGPUs {
			continue
		}
		s.nodes[node.Name] = node
		n := nodeOf(node, gpuNode)
		if err := c.gatherPods(ctx, &n, s.plugin.ConfigMap); err != nil {
			return err
		}
		s.world.Nodes = append(s.world.Nodes, n)
	}
	return nil
}

func nodeOf(node *corev1.Node, gpuNode *v1alpha1.GPUNode) rollout.Node {
	n := rollout.Node{
		Name: node.Name, Labels: node.Labels, Annotations: node.Annotations, Taints: node.Spec.Taints, GPU: *gpuNode,
		Allocatable: map[string]int64{},
	}
	for name, quantity := range node.Status.Allocatable {
		if strings.HasPrefix(string(name), nvidiaDomain) {
			n.Allocatable[string(name)] = quantity.Value()
		}
	}
	return n
}

func (c *Controller) gatherPods(ctx context.Context, n *rollout.Node, configMap types.NamespacedName) error {
	pods := &corev1.PodList{}
	if err := c.client.List(ctx, pods, client.MatchingFields{nodeNameField: n.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reading the pods on node %s: %w", n.Name, err)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if finished(pod) {
			continue
		}
		n.Pods = append(n.Pods, podOf(pod, configMap))
		n.AgentReady = n.AgentReady || c.isReadyAgent(pod)
	}
	return nil
}

func finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

func (c *Controller) isReadyAgent(pod *corev1.Pod) bool {
	return pod.Labels[labelName] == agentName && pod.Namespace == c.Namespace && pod.DeletionTimestamp == nil && isReady(pod)
}

func isReady(pod *corev1.Pod) bool {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// podOf is what of a pod matters to a decision.
func podOf(pod *corev1.Pod, configMap types.NamespacedName) rollout.Pod {
	p := rollout.Pod{
		Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID),
		Terminating:  pod.DeletionTimestamp != nil,
		GPU:          requestsGPU(&pod.Spec),
		Scheduled:    scheduledAt(pod),
		NodeSelector: pod.Spec.NodeSelector,
		MountsConfig: pod.Namespace == configMap.Namespace && mounts(pod, configMap.Name),
		Nudge:        pod.Annotations[v1alpha1.AnnotationNudge],
	}
	_, p.Mirror = pod.Annotations[corev1.MirrorPodAnnotationKey]
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		p.Controller = owner.Kind
	}
	return p
}

func requestsGPU(spec *corev1.PodSpec) bool {
	if spec.Resources != nil && hasGPU(spec.Resources) {
		return true
	}
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			if hasGPU(&containers[i].Resources) {
				return true
			}
		}
	}
	return false
}

func hasGPU(r *corev1.ResourceRequirements) bool {
	for _, list := range []corev1.ResourceList{r.Limits, r.Requests} {
		for name := range list {
			if strings.HasPrefix(string(name), nvidiaDomain) {
				return true
			}
		}
	}
	return false
}

// mounts says whether a volume of the pod is that ConfigMap.
func mounts(pod *corev1.Pod, configMap string) bool {
	for i := range pod.Spec.Volumes {
		volume := &pod.Spec.Volumes[i]
		if volume.ConfigMap != nil && volume.ConfigMap.Name == configMap {
			return true
		}
		if volume.Projected == nil {
			continue
		}
		for _, source := range volume.Projected.Sources {
			if source.ConfigMap != nil && source.ConfigMap.Name == configMap {
				return true
			}
		}
	}
	return false
}

func scheduledAt(pod *corev1.Pod) (at time.Time) {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled {
			at = condition.LastTransitionTime.Time
		}
	}
	return at
}
