// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// +kubebuilder:rbac:groups=karpenter.sh,resources=nodepools,verbs=list;watch

// nodePoolKind is Karpenter's kind for a group of nodes.
var nodePoolKind = schema.GroupKind{Group: "karpenter.sh", Kind: "NodePool"}

// gatherNodePools reads which startup taints the NodePools of Karpenter list, by the name of the NodePool.
func (c *Controller) gatherNodePools(ctx context.Context) (map[string]cluster.NodePool, error) {
	all, err := c.nodePools.list(ctx, c.client)
	if err != nil {
		return nil, err
	}
	pools := make(map[string]cluster.NodePool, len(all))
	for i := range all {
		var pool cluster.NodePool
		for _, taint := range listIn(&all[i], "spec", "template", "spec", "startupTaints") {
			if key, is := asMap(taint)["key"].(string); is {
				pool.StartupTaints = append(pool.StartupTaints, key)
			}
		}
		pools[all[i].GetName()] = pool
	}
	return pools, nil
}

// startupTaints is what the cache keeps of the spec of a NodePool.
func startupTaints(pool *unstructured.Unstructured) map[string]any {
	var keys []any
	for _, taint := range listIn(pool, "spec", "template", "spec", "startupTaints") {
		keys = append(keys, map[string]any{"key": asMap(taint)["key"]})
	}
	return map[string]any{"template": map[string]any{"spec": map[string]any{"startupTaints": keys}}}
}
