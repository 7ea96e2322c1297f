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
