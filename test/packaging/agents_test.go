// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"maps"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// The DaemonSets of agents: on a node one of them has a pod, or none.
const agentSet, draAgentSet = "gpu-sharing-agent", "gpu-sharing-agent-dra"

// The values by which NVIDIA's programs stop a GPU client, and the labels of which they have these values.
const (
	forUpgrade, forMIG = "paused-for-driver-upgrade", "paused-for-mig-change"

	clientLabel, toolkit    = "nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.container-toolkit"
	draDriver, draValidator = "nvidia.com/gpu.deploy.dra-driver", "nvidia.com/gpu.deploy.dra-validator"
)

// selects reports whether node selector and affinity of a pod let it run on a node with these labels.
func selects(t *testing.T, pod corev1.PodSpec, node labels.Set) bool {
	t.Helper()
	selector := labels.SelectorFromSet(pod.NodeSelector)
	if pod.Affinity != nil {
		terms := pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		NewWithT(t).Expect(terms).To(HaveLen(1))
		for _, e := range terms[0].MatchExpressions {
			required, err := labels.NewRequirement(e.Key, selection.Operator(strings.ToLower(string(e.Operator))), e.Values)
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			selector = selector.Add(*required)
		}
	}
	return selector.Matches(node)
}

// underGPUCluster are the labels of a node where the GPU Operator's GPUCluster installs NVIDIA's programs, but for
// some.
func underGPUCluster(others map[string]string) map[string]string {
	node := map[string]string{
		"nvidia.com/gpu.deploy.driver": "true", draDriver: "true", draValidator: "true",
		"nvidia.com/gpu.deploy.dcgm-dra": "true", "nvidia.com/gpu.deploy.dcgm-exporter-dra": "true",
	}
	maps.Copy(node, others)
	return node
}

// TestOneAgentRunsOnANodeAndLeavesWhenTheDriverIsReplaced, and the MPS pod stays. k8s-driver-manager waits for pods
// whose node selector has the label of GPU clients. Before v0.12 it stops only the labels of NVIDIA's own programs, of
// which mig-manager leaves that of the container toolkit alone. Beside the DRA driver of a GPUCluster the label of GPU
// clients is never there for long.
func TestOneAgentRunsOnANodeAndLeavesWhenTheDriverIsReplaced(t *testing.T) {
	packages := map[string][]*unstructured.Unstructured{
		"chart": newHelm(t).render(t), "kustomize": kustomized(t), "OLM": installedByOLM(t),
	}
	for title, tc := range map[string]struct {
		labels map[string]string
		agent  string // the DaemonSet of the agent; empty: none runs
	}{
		"at rest":                               {labels: map[string]string{clientLabel: "true", toolkit: "true"}, agent: agentSet},
		"beside a stand-alone plugin":           {labels: map[string]string{clientLabel: "true"}, agent: agentSet},
		"by k8s-driver-manager v0.12":           {labels: map[string]string{clientLabel: forUpgrade, toolkit: forUpgrade}},
		"by k8s-driver-manager before v0.12":    {labels: map[string]string{clientLabel: "true", toolkit: forUpgrade}},
		"while mig-manager v0.15 changes GPUs":  {labels: map[string]string{clientLabel: forMIG, toolkit: "true"}},
		"before the controller allows an agent": {labels: map[string]string{toolkit: "true"}},
		"without GPUs":                          {labels: underGPUCluster(map[string]string{"nvidia.com/gpu.present": "false", clientLabel: "true"})},

		"under a GPUCluster": {labels: underGPUCluster(nil), agent: draAgentSet},
		"under a GPUCluster, with a label that another controller sets": {labels: underGPUCluster(map[string]string{clientLabel: "true"}), agent: draAgentSet},
		"under a GPUCluster, where an administrator wants none":         {labels: underGPUCluster(map[string]string{clientLabel: "false"})},
		"under a GPUCluster without a validator":                        {labels: underGPUCluster(map[string]string{draValidator: "false"}), agent: draAgentSet},
		"under a GPUCluster without the DRA driver":                     {labels: underGPUCluster(map[string]string{draDriver: "false"})},
		"under a GPUCluster, first step of a driver upgrade":            {labels: underGPUCluster(map[string]string{draValidator: forUpgrade})},
		"under a GPUCluster, last step of a driver upgrade": {
			labels: underGPUCluster(map[string]string{draValidator: forUpgrade, draDriver: forUpgrade}),
		},
		"under a GPUCluster, before a driver is loaded": {labels: underGPUCluster(map[string]string{draDriver: forUpgrade})},

		"on its way to a ClusterPolicy":                          {labels: map[string]string{clientLabel: "true", toolkit: "true", draDriver: "true"}, agent: draAgentSet},
		"on its way to a ClusterPolicy, in a driver upgrade":     {labels: map[string]string{clientLabel: forUpgrade, toolkit: forUpgrade, draDriver: "true"}},
		"on its way to a ClusterPolicy, at the upgrade's end":    {labels: map[string]string{clientLabel: "true", toolkit: "true", draDriver: forUpgrade}},
		"on its way to a ClusterPolicy, while mig-manager works": {labels: map[string]string{clientLabel: forMIG, toolkit: "true", draDriver: "true"}},
	} {
		on := labels.Set{"nvidia.com/gpu.present": "true"}
		maps.Copy(on, tc.labels)
		for by, objects := range packages {
			t.Run(title+", by "+by, func(t *testing.T) {
				for _, set := range []string{agentSet, draAgentSet} {
					runs := selects(t, podOf(t, find(t, objects, "DaemonSet "+set)).Spec, on)
					NewWithT(t).Expect(runs).To(Equal(set == tc.agent), set)
				}
			})
		}
		mps := podOf(t, find(t, packages["chart"], "DaemonSet gpu-sharing-mps")).Spec
		NewWithT(t).Expect(selects(t, mps, on)).To(Equal(on["nvidia.com/gpu.present"] == "true"), "clients of a daemon end with its pod: "+title)
	}
	for by, objects := range packages {
		agent := podOf(t, find(t, objects, "DaemonSet "+agentSet)).Spec
		NewWithT(t).Expect(agent.NodeSelector).To(HaveKey(clientLabel), "k8s-driver-manager sees no affinity: "+by)
	}
}

// TestBothDaemonSetsRunTheSameAgent: they differ in the nodes, and in a label by which the second one knows its pods.
// Kubernetes lets nobody change a selector, so that of the first one is as releases had it, and matches the pods of
// both.
func TestBothDaemonSetsRunTheSameAgent(t *testing.T) {
	own := map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"}
	for by, objects := range map[string][]*unstructured.Unstructured{
		"chart": newHelm(t).render(t, everything()...), "kustomize": kustomized(t), "OLM": installedByOLM(t),
	} {
		t.Run(by, func(t *testing.T) {
			g := NewWithT(t)
			first, second := as[appsv1.DaemonSet](t, find(t, objects, "DaemonSet "+agentSet)), as[appsv1.DaemonSet](t, find(t, objects, "DaemonSet "+draAgentSet))
			g.Expect(first.Spec.Selector.MatchLabels).To(Equal(own))
			matches := func(set appsv1.DaemonSet, pod corev1.PodTemplateSpec) bool {
				return labels.SelectorFromSet(set.Spec.Selector.MatchLabels).Matches(labels.Set(pod.Labels))
			}
			g.Expect(matches(second, second.Spec.Template)).To(BeTrue())
			g.Expect(matches(second, first.Spec.Template)).To(BeFalse())
			g.Expect(second.Labels).To(Equal(first.Labels), "doctor finds both")

			g.Expect(matches(first, second.Spec.Template)).To(BeTrue(), "the controller, PodMonitors and NetworkPolicies find both")
			delete(second.Spec.Template.Labels, "gpusharing.io/stack")
			second.Spec.Selector = first.Spec.Selector
			for _, set := range []*appsv1.DaemonSet{&first, &second} {
				set.Spec.Template.Spec.NodeSelector, set.Spec.Template.Spec.Affinity = nil, nil
			}
			g.Expect(second.Spec).To(Equal(first.Spec))
		})
	}
}
