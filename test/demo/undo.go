// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// snapshot is what belongs to others and we change for a while, field by field, each as JSON.
type snapshot map[string]string

func (s snapshot) put(name string, value any) {
	encoded, err := json.Marshal(value)
	if err != nil {
		encoded = []byte(err.Error())
	}
	s[name] = string(encoded)
}

// differences are the fields that are not in b as they are in a, sorted.
func (s snapshot) differences(now snapshot) []string {
	var found []string
	fields := maps.Clone(s)
	maps.Copy(fields, now)
	for field := range fields {
		if s[field] != now[field] {
			found = append(found, fmt.Sprintf("%s was %s and is %s", field, s[field], now[field]))
		}
	}
	slices.Sort(found)
	return found
}

// snapshot reads the nodes, the ClusterPolicy, the GPU Operator's ConfigMaps, the NodeFeatures, what NVIDIA's DRA
// driver publishes, and the hardware itself.
func (from *site) snapshot(ctx context.Context) (snapshot, error) {
	s := snapshot{}
	policies := &unstructured.UnstructuredList{}
	policies.SetGroupVersionKind(schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicyList"})
	configMaps := &corev1.ConfigMapList{}
	err := errors.Join(from.cluster.Client.List(ctx, policies),
		from.cluster.Client.List(ctx, configMaps, client.InNamespace(gpuOperator)))
	if err != nil {
		return nil, fmt.Errorf("reading what is NVIDIA's: %w", err)
	}
	for _, p := range policies.Items {
		s.put("ClusterPolicy "+p.GetName(), p.Object["spec"])
	}
	for _, c := range configMaps.Items {
		s.put("ConfigMap "+c.Name, c.Data)
	}
	features := &unstructured.UnstructuredList{}
	features.SetGroupVersionKind(schema.GroupVersionKind{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeatureList"})
	if err := from.cluster.Client.List(ctx, features); err != nil {
		return nil, fmt.Errorf("reading the NodeFeatures: %w", err)
	}
	for _, f := range features.Items {
		s.put(fmt.Sprintf("NodeFeature %s/%s", f.GetNamespace(), f.GetName()), f.Object["spec"])
	}
	if err := from.snapshotDRA(ctx, s); err != nil {
		return nil, err
	}
	for _, m := range from.machines {
		if err := from.snapshotNode(ctx, m, s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (from *site) snapshotNode(ctx context.Context, m *machine, s snapshot) error {
	node := &corev1.Node{}
	if err := from.cluster.Client.Get(ctx, client.ObjectKey{Name: m.name}, node); err != nil {
		return fmt.Errorf("reading node %s: %w", m.name, err)
	}
	for key, value := range node.Labels {
		s.put(fmt.Sprintf("label %s of node %s", key, m.name), value)
	}
	s.put("annotations of node "+m.name, node.Annotations)
	s.put("taints of node "+m.name, node.Spec.Taints)
	for resource, quantity := range node.Status.Allocatable {
		if !quantity.IsZero() {
			s.put(fmt.Sprintf("%s of node %s", resource, m.name), quantity)
		}
	}
	inventory, err := m.inventory(ctx)
	if err != nil {
		return err
	}
	for _, gpu := range inventory.Devices {
		s.put(fmt.Sprintf("GPU %d of node %s", gpu.Index, m.name), gpu.State)
	}
	return nil
}

// undo deletes every policy and waits until everything is as it was before the first.
func (d *demo) undo(ctx, _ context.Context, _ *sync.WaitGroup) error {
	d.narration.chapter("The pods have ended, and you delete the policies")
	if _, err := d.askKubectl(ctx, "delete", "pod", "--all"); err != nil {
		return err
	}
	began := time.Now()
	if err := d.runKubectl(ctx, "delete", "gpusharingpolicies", "--all"); err != nil {
		return err
	}
	var differences []string
	err := until(ctx, func() (bool, error) {
		now, err := d.snapshot(ctx)
		if err != nil {
			return false, err
		}
		differences = d.before.differences(now)
		return len(differences) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("%w: not everything went back to what it was:\n  %s", err, strings.Join(differences, "\n  "))
	}
	return d.sayCost(ctx, began, fmt.Sprintf("none of %d fields of nodes, GPUs and NVIDIA's objects differs from before the first policy", len(d.before)))
}
