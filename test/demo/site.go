// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// site is the cluster and its nodes, as the demo observes them.
type site struct {
	cluster  *env.Cluster
	machines []*machine
}

// nothing is what a node without GPUs advertises.
const nothing = "-"

// advertises is what a node offers to pods of NVIDIA's resources: what the kubelet lists, or what NVIDIA's DRA driver
// publishes.
func (s *site) advertises(ctx context.Context, name string) (string, error) {
	node := &corev1.Node{}
	if err := s.cluster.Client.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return nothing, client.IgnoreNotFound(err)
	}
	var parts []string
	for resource, quantity := range node.Status.Allocatable {
		if strings.HasPrefix(string(resource), "nvidia.com/") && !quantity.IsZero() {
			parts = append(parts, fmt.Sprintf("%s: %s", resource, quantity.String()))
		}
	}
	published, err := s.published(ctx, name)
	if err != nil {
		return nothing, err
	}
	for resource, count := range published {
		parts = append(parts, fmt.Sprintf("%s: %d", resource, count))
	}
	if len(parts) == 0 {
		return nothing, nil
	}
	slices.Sort(parts)
	return strings.Join(parts, ", "), nil
}

func (s *site) advertisedBy(ctx context.Context, nodes ...string) (string, error) {
	var all []string
	for _, node := range nodes {
		one, err := s.advertises(ctx, node)
		if err != nil {
			return "", err
		}
		all = append(all, one)
	}
	return strings.Join(all, "; "), nil
}

func (s *site) machineOf(name string) *machine {
	for _, m := range s.machines {
		if m.name == name {
			return m
		}
	}
	return nil
}

// heldInstance is the instance that the pod holds, as the node's agent reports it; empty while it reports none.
func (s *site) heldInstance(ctx context.Context) (string, error) {
	node := &v1alpha1.GPUNode{}
	if err := s.cluster.Client.Get(ctx, client.ObjectKey{Name: changedNode}, node); err != nil {
		return "", fmt.Errorf("reading GPUNode %s: %w", changedNode, err)
	}
	for _, device := range node.Status.Devices {
		for _, h := range device.Holders {
			for _, i := range device.Instances {
				if h.Instance != nil && *h.Instance == i.ID {
					return fmt.Sprintf("instance %s at %d:%d of GPU %d (%s)", i.Profile, i.Start, i.Size, device.Index, i.UUID), nil
				}
			}
		}
	}
	return "", nil
}

// stepFailed reports whether the agent of the node has reported that the change fails.
func (s *site) stepFailed(ctx context.Context) (bool, error) {
	node := &v1alpha1.GPUNode{}
	if err := s.cluster.Client.Get(ctx, client.ObjectKey{Name: changedNode}, node); err != nil {
		return false, fmt.Errorf("reading GPUNode %s: %w", changedNode, err)
	}
	ready, _ := condition.Find(node.Status.Conditions, v1alpha1.ConditionApplied)
	return ready.Reason == v1alpha1.ReasonStepFailed && ready.ObservedGeneration == node.Generation, nil
}

// pending are the nodes of the policy that are not ready, of its present generation.
func (s *site) pending(ctx context.Context) ([]v1alpha1.PendingNode, error) {
	policy := &v1alpha1.GPUSharingPolicy{}
	if err := s.cluster.Client.Get(ctx, client.ObjectKey{Name: changedPolicy}, policy); err != nil {
		return nil, fmt.Errorf("reading policy %s: %w", changedPolicy, err)
	}
	ready, _ := condition.Find(policy.Status.Conditions, v1alpha1.ConditionReady)
	if ready.ObservedGeneration != policy.Generation {
		return nil, nil
	}
	return policy.Status.Pending, nil
}
