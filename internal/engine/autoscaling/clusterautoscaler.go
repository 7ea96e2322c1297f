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

// hidden reports what no annotation can hide: resources beside the announced one that status.capacity of the infrastructure template names,
// and that nodes of the policy do not offer so.
func (e *entry) hidden(announced string) {
	if s := e.g.scalable; s != nil && s.Capacity != nil {
		wrong := maps.Clone(s.Capacity)
		maps.DeleteFunc(wrong, func(name string, count int64) bool { return name == announced || e.resources[name] == count })
		if len(wrong) > 0 {
			e.find(v1alpha1.ReasonMultipleResources, "status.capacity of %s %s/%s says %s, and nodes will offer %s: pods that ask for that start nodes for nothing. "+
				"Keep them off, or keep the name nvidia.com/gpu", s.Template.Kind, s.Namespace, s.Template.Name, text(wrong), text(e.resources))
		}
		return
	}
	if announced != plan.ResourceGPU && e.resources[plan.ResourceGPU] < int64(e.shape.count) {
		e.find(v1alpha1.ReasonScaleDownCandidate, "If status.capacity of the infrastructure template of %s names nvidia.com/gpu, pods that ask for a whole GPU start "+
			"nodes that do not offer it. Keep such pods off, or keep the name nvidia.com/gpu", e.g.Ref)
	}
}

// startupGap reports that a new node takes a while until it has the startup taint, in which Cluster Autoscaler takes it for one without
// room: each of its loops, every 10 seconds, adds another node for the same pods. Up to 6 were seen for one. The kubelets of clouds register
// a node with the label of its group, before it is Ready.
func (e *entry) startupGap() {
	until, early := "tells its group and has a label", e.s.taintsEarly(e.by)
	if early {
		until = "tells its group"
	}
	switch {
	case e.unshared(): // as without the operator
	case e.by.Spec.Rollout.StartupTaint != v1alpha1.StartupTaintUntilReady:
		e.find(v1alpha1.ReasonStartupGap, "A new node of %s is Ready before it offers what its policy asks for, and Cluster Autoscaler adds a node every 10 seconds "+
			"meanwhile. Set rollout.startupTaint: UntilReady", e.g.Ref)
	case e.g.Group == GroupOpenShift:
		e.find(v1alpha1.ReasonStartupGap, "A new node of %s has no startup taint until it %s, and Cluster Autoscaler adds a node every 10 "+
			"seconds. Bound that by maxReplicas of the MachineAutoscaler", e.g.Ref, until)
	case early && isCloud(e.g.Kind):
	case e.g.scalable == nil || !e.g.scalable.StartupTaint:
		e.find(v1alpha1.ReasonStartupGap, "A new node of %s has no startup taint until it %s, and Cluster Autoscaler adds "+
			"a node every 10 seconds. Register its nodes with the taint %s=:NoSchedule", e.g.Ref, until, v1alpha1.TaintStartupAutoscaler)
	}
}

func text(counts map[string]int64) string {
	var parts []string
	for _, r := range listed(counts) {
		parts = append(parts, fmt.Sprintf("%s %d", r.Name, r.Count))
	}
	return strings.Join(parts, ", ")
}

// cloud prints the tags or labels of a node group of a cloud. The operator has no credentials of clouds, so it neither
// reads nor writes them.
func (e *entry) cloud() {
	counts := maps.Clone(e.resources)
	if _, has := counts[plan.ResourceGPU]; !has {
		counts[plan.ResourceGPU] = 0 // of the instance type otherwise
	}
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		switch e.g.Kind {
		case v1alpha1.NodeGroupEKS: // cloudprovider/aws/aws_manager.go
			e.paste = append(e.paste, fmt.Sprintf("k8s.io/cluster-autoscaler/node-template/resources/%s=%d", name, counts[name]))
		case v1alpha1.NodeGroupAKS: // cloudprovider/azure/azure_template.go
			e.paste = append(e.paste, fmt.Sprintf("k8s.io_cluster-autoscaler_node-template_resources_%s=%d", strings.ReplaceAll(name, "/", "_"), counts[name]))
		case v1alpha1.NodeGroupGKE: // cloudprovider/gce/templates.go
			e.paste = append(e.paste, fmt.Sprintf("clusterautoscaler-nodetemplate-resources.%s=%d", name, counts[name]))
		case v1alpha1.NodeGroupNodePool, v1alpha1.NodeGroupMachineDeployment, v1alpha1.NodeGroupMachineSet:
		}
	}
	where := map[v1alpha1.NodeGroupKind]string{
		v1alpha1.NodeGroupEKS: "Put the tags that `kubectl gpusharing plan` prints on the managed node group and its Auto Scaling group",
		v1alpha1.NodeGroupAKS: "Put the tags that `kubectl gpusharing plan` prints on the scale set, if you run Cluster Autoscaler yourself. That of AKS starts a node for " +
			"each pod that asks for a replica: set its maximum",
		v1alpha1.NodeGroupGKE: "Add the labels that `kubectl gpusharing plan` prints to the node pool, if you run Cluster Autoscaler yourself (1.33 or newer). Whether the one " +
			"that GKE runs reads them is not known",
	}[e.g.Kind]
	e.find(v1alpha1.ReasonAdviceOnly, "%s. The operator neither sees nor changes node groups of clouds", where)
}
