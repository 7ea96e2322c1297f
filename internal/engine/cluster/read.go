// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// ByName are GPUNodes by the names of their nodes. They share memory with the list.
func ByName(gpuNodes []v1alpha1.GPUNode) map[string]*v1alpha1.GPUNode {
	of := make(map[string]*v1alpha1.GPUNode, len(gpuNodes))
	for i := range gpuNodes {
		of[gpuNodes[i].Name] = &gpuNodes[i]
	}
	return of
}

// AddNodes adds those of the nodes that have a GPUNode, without their pods.
func (s *Snapshot) AddNodes(nodes []corev1.Node, gpuNodes map[string]*v1alpha1.GPUNode) {
	for i := range nodes {
		if gpuNode, has := gpuNodes[nodes[i].Name]; has {
			s.Nodes = append(s.Nodes, NodeOf(&nodes[i], gpuNode))
		}
	}
}

// NodesByName are the nodes of a snapshot by name. They share memory with it.
func (s *Snapshot) NodesByName() map[string]*Node {
	at := make(map[string]*Node, len(s.Nodes))
	for i := range s.Nodes {
		at[s.Nodes[i].Name] = &s.Nodes[i]
	}
	return at
}

// AddPods adds pods to their nodes, which are NodesByName, and those that wait for a node with GPUs to Unscheduled.
func (s *Snapshot) AddPods(pods []corev1.Pod, at map[string]*Node, programs *Programs) {
	for i := range pods {
		pod := &pods[i]
		if n, has := at[pod.Spec.NodeName]; has {
			n.AddPod(pod, programs)
		} else if Waits(pod) {
			s.Unscheduled = append(s.Unscheduled, PodOf(pod, programs))
		}
	}
}

// AddPod adds a pod that is bound to the node, unless it has finished.
func (n *Node) AddPod(pod *corev1.Pod, programs *Programs) {
	if Finished(pod) {
		return
	}
	n.Pods = append(n.Pods, PodOf(pod, programs))
	if programs.IsReadyAgent(pod) {
		n.AgentReady, n.AgentSince = true, ReadyAt(pod)
	}
}

// Waits reports whether a pod asks for GPUs and is on no node.
func Waits(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && RequestsGPU(&pod.Spec) && !Finished(pod)
}

// Features are what NodeFeatures tell.
type Features struct {
	// Of is by node.
	Of map[string]NodeFeatures
	// Ours are the UIDs of the operator's own by node; Owned are the nodes of which it still has the owner that earlier
	// versions set.
	Ours  map[string]types.UID
	Owned []string
	// Discovery are the namespaces in which workers of Node Feature Discovery write theirs.
	Discovery map[string]bool
}

// NewFeatures are those of no NodeFeature.
func NewFeatures() Features {
	return Features{Of: map[string]NodeFeatures{}, Ours: map[string]types.UID{}, Discovery: map[string]bool{}}
}

// AddAll adds what NodeFeatures tell. The namespace is the operator's; empty if it is not known.
func (f *Features) AddAll(all []unstructured.Unstructured, namespace string) {
	for i := range all {
		feature := &all[i]
		node := feature.GetLabels()[LabelNodeName]
		if IsNFDWorkers(feature) {
			f.Discovery[feature.GetNamespace()] = true
		}
		was := f.Of[node]
		is := was.With(feature, namespace)
		if is.OverriddenSince != was.OverriddenSince {
			f.Ours[node] = feature.GetUID()
			if len(feature.GetOwnerReferences()) > 0 {
				f.Owned = append(f.Owned, node)
			}
		}
		f.Of[node] = is
	}
}
