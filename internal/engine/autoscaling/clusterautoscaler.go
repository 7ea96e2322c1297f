// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// gpuLabels mark nodes with GPUs for Cluster Autoscaler, by its cloud provider: Cluster API and OpenShift, AWS, Azure,
// GCE (GPULabel of kubernetes/autoscaler cloudprovider/*).
var gpuLabels = []string{
	"cluster-api/accelerator", "k8s.amazonaws.com/accelerator", "kubernetes.azure.com/accelerator", "cloud.google.com/gke-accelerator",
}

// clusterAutoscaler reports the traps of Cluster Autoscaler. It knows GPUs by the name nvidia.com/gpu only
// (utils/gpu/gpu.go).
func (e *entry) clusterAutoscaler() {
	e.startupGap()
	labels := e.g.labels(&e.shape)
	if e.g.scalable != nil { // as the autoscaler is told
		labels = withAll(labels, pairsIn(e.g.scalable.theirs(annotationLabels)))
	}
	labelled := slices.ContainsFunc(gpuLabels, func(label string) bool { return labels[label] != "" })
	stale := e.shape.advertised
	good := !labelled || stale[plan.ResourceGPU] > 0 // another node is never good, and never copied
	if e.shape.nodes == 0 && len(stale) > 0 && good && !maps.Equal(stale, e.resources) {
		e.find(v1alpha1.ReasonStaleTemplate, "%s is empty, and Cluster Autoscaler keeps a copy of its last node, which advertised %s. Restart Cluster Autoscaler", e.g.Ref, text(stale))
	}
	if e.resources[plan.ResourceGPU] > 0 {
		return
	}
	for _, label := range gpuLabels {
		if labels[label] == "" {
			continue
		}
		help := "Remove the label from the template of the group and from its nodes"
		if strings.HasPrefix(label, "kubernetes.azure.com/") || strings.HasPrefix(label, "cloud.google.com/") {
			help = "The cloud sets the label, so keep the name nvidia.com/gpu: no renameByDefault, or mig.resourceNames Uniform"
		}
		e.find(v1alpha1.ReasonAcceleratorLabel, "Nodes of %s have the label %s and will not advertise nvidia.com/gpu, so Cluster Autoscaler takes them for broken, and "+
			"from 1.35 on one such node can stop every scale-up. %s", e.g.Ref, label, help)
	}
	e.find(v1alpha1.ReasonScaleDownCandidate, "Cluster Autoscaler does not count %s as used, so it may scale down a full node and move its pods. To prevent that, annotate the "+
		"nodes with cluster-autoscaler.kubernetes.io/scale-down-disabled=true", strings.Join(slices.Sorted(maps.Keys(e.resources)), " and "))
}

// hidden reports what no annotation can hide: whole GPUs that status.capacity of the infrastructure provider's template names, and that
// nodes of the policy do not offer.
func (e *entry) hidden() {
	if e.resources[plan.ResourceGPU] == 0 {
		e.find(v1alpha1.ReasonScaleDownCandidate, "If status.capacity of the infrastructure template of %s names nvidia.com/gpu, pods that ask for a whole GPU start "+
			"nodes that do not offer it. Keep such pods off, or keep the name nvidia.com/gpu", e.g.Ref)
	}
}

// startupGap reports that a new node takes a while until it has the startup taint, in which Cluster Autoscaler takes it for one without
// room: each of its loops, every 10 seconds, adds another node for the same pods. Up to 6 were seen for one.
func (e *entry) startupGap() {
	switch {
	case e.unshared(): // as without the operator
	case e.by.Spec.Rollout.StartupTaint != v1alpha1.StartupTaintUntilReady:
		e.find(v1alpha1.ReasonStartupGap, "A new node of %s is Ready before it offers what its policy asks for, and Cluster Autoscaler adds a node every 10 seconds "+
			"meanwhile. Set rollout.startupTaint: UntilReady", e.g.Ref)
	case e.g.Group == GroupOpenShift:
		e.find(v1alpha1.ReasonStartupGap, "A new node of %s has no startup taint until it has the label nvidia.com/gpu.present, and Cluster Autoscaler adds a node every 10 "+
			"seconds. Bound that by maxReplicas of the MachineAutoscaler", e.g.Ref)
	case e.g.scalable == nil || !e.g.scalable.StartupTaint:
		e.find(v1alpha1.ReasonStartupGap, "A new node of %s has no startup taint until it tells its group and has a label, and Cluster Autoscaler adds "+
			"a node every 10 seconds. Register its nodes with the taint %s=:NoSchedule", e.g.Ref, v1alpha1.TaintStartupAutoscaler)
	}
}

func text(counts map[string]int64) string {
	var parts []string
	for _, r := range listed(counts) {
		parts = append(parts, fmt.Sprintf("%s %d", r.Name, r.Count))
	}
	return strings.Join(parts, ", ")
}
