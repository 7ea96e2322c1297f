// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// readGroups reads the objects of autoscalers, as far as the cluster has them and the user may read them.
func readGroups(ctx context.Context, c client.Client, s cluster.Snapshot) (autoscaling.Snapshot, error) {
	groups := autoscaling.Snapshot{Now: s.Now, Policies: s.Policies, Nodes: s.Nodes}
	for i := range s.Nodes {
		for _, p := range s.Nodes[i].Pods {
			if p.Discovers && !p.Terminating {
				groups.Discovery = append(groups.Discovery, p.Tolerations)
			}
		}
	}
	const overlay = "NodeOverlay"
	for _, kind := range []schema.GroupVersionKind{
		kindOf(autoscaling.GroupKarpenter, "v1", "NodePool"), kindOf(autoscaling.GroupKarpenter, "v1alpha1", overlay),
		kindOf(autoscaling.GroupOpenShift, "v1beta1", "MachineSet"), kindOf(autoscaling.GroupClusterAPI, "v1beta2", "MachineSet"),
		kindOf(autoscaling.GroupClusterAPI, "v1beta2", "MachineDeployment"), kindOf("config.openshift.io", "v1", "ClusterVersion"),
	} {
		version, err := eachOf(ctx, c, kind, groups.Add)
		if err != nil {
			return groups, err
		}
		if kind.Kind == overlay {
			groups.OverlayVersion = version
		}
	}
	_, err := eachOf(ctx, c, kindOf(autoscaling.GroupOpenShift, "v1beta1", "Machine"), func(o *unstructured.Unstructured) { groups.AddMachine(o) })
	return groups, err
}

func kindOf(group, version, kind string) schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: group, Version: version, Kind: kind}
}

// eachOf visits the objects of a kind that the cluster may not have, or that the user may not read, and returns its
// version.
func eachOf(ctx context.Context, c client.Client, of schema.GroupVersionKind, visit func(*unstructured.Unstructured)) (version string, err error) {
	kind, err := listOf(c, of)
	if meta.IsNoMatchError(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("looking for %s: %w", of.Kind, err)
	}
	for more, next := true, ""; more; more = next != "" {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind)
		err := c.List(ctx, list, client.Limit(page), client.Continue(next))
		if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
			return kind.GroupVersion().String(), nil
		}
		if err != nil {
			return "", fmt.Errorf("reading %s: %w", of.Kind, err)
		}
		for i := range list.Items {
			visit(&list.Items[i])
		}
		next = list.GetContinue()
	}
	return kind.GroupVersion().String(), nil
}

// nodeGroups writes what autoscalers must know of new nodes once these policies exist.
func (t *text) nodeGroups(s autoscaling.Snapshot, policies []v1alpha1.GPUSharingPolicy) {
	advice := s.Advise()
	for i := range policies {
		for _, g := range advice.Groups[policies[i].Name] {
			t.nodeGroup(policies[i].Name, g)
		}
	}
}

func (t *text) nodeGroup(policy string, g autoscaling.Group) {
	name := strings.TrimPrefix(g.Namespace+"/"+g.Name, "/")
	t.WriteString("\n")
	t.row(0, "", fmt.Sprintf("NODE GROUP %s %s of policy %s: %s, scaled by %s", g.Kind, name, policy, count(int(g.Nodes), "node"), g.Autoscaler))
	if g.GPUsPerNode > 0 {
		t.row(2, "GPUs", fmt.Sprintf("%d × %s", g.GPUsPerNode, g.Product))
	}
	offers := map[string]int64{}
	for _, r := range g.Resources {
		offers[r.Name] = r.Count
	}
	if len(offers) > 0 {
		t.row(2, "advertises", resources(offers))
	}
	t.row(2, "autoscaler", fmt.Sprintf("%s: %s", g.Reason, g.Message))
	for _, block := range g.Paste {
		t.WriteString("\n" + strings.TrimRight(block, "\n") + "\n")
	}
}
