// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gpuoperator stands for the parts of NVIDIA's GPU Operator that decide how NVIDIA's programs run: it renders
// their DaemonSets from the ClusterPolicy or the GPUCluster as the GPU Operator does, and labels the nodes on which
// Node Feature Discovery found a GPU. The programs in the DaemonSets are NVIDIA's own.
//
// What it does follows NVIDIA/gpu-operator v26.7: which volumes, environment and containers a DaemonSet gets in
// controllers/object_controls.go, and that a DaemonSet is written only when what is rendered has changed, so that what
// others write to it stays until then.
package gpuoperator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

const (
	// Namespace is the GPU Operator's.
	Namespace = "gpu-operator"
	// PolicyName is the ClusterPolicy's name, as NVIDIA's Helm chart gives it.
	PolicyName = "cluster-policy"

	fieldManager = "gpu-operator"
	// poll is how often the operator looks; the real one is told by watches. What it looks at comes from watches all
	// the same, but for the ClusterPolicy and the GPUCluster, whose definitions may be missing.
	poll = 200 * time.Millisecond
)

// PolicyKind is the ClusterPolicy's.
func PolicyKind() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"}
}

// Operator is the stand-in.
type Operator struct {
	cache  cache.Cache
	client client.Client
	log    io.Writer
	said   string
	events map[string]nvidia.Event // by node: that for which it has its labels
}

// New makes an operator of the cluster that tells on log what it could not do.
func New(of *rest.Config, scheme *runtime.Scheme, log io.Writer) (*Operator, error) {
	watched, err := cache.New(of, cache.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("making the cache of the GPU Operator's stand-in: %w", err)
	}
	c, err := client.New(of, client.Options{Scheme: scheme, Cache: &client.CacheOptions{Reader: watched}})
	if err != nil {
		return nil, fmt.Errorf("making the client of the GPU Operator's stand-in: %w", err)
	}
	return &Operator{cache: watched, client: c, log: log, events: map[string]nvidia.Event{}}, nil
}

// Install creates what NVIDIA's Helm chart does: namespace, accounts, the runtime class.
func (o *Operator) Install(ctx context.Context) error {
	for _, object := range installed() {
		if err := o.apply(ctx, object); err != nil {
			return err
		}
	}
	return nil
}

// Run works until the context ends.
func (o *Operator) Run(ctx context.Context) {
	var watches sync.WaitGroup
	watches.Go(func() { o.tell(ctx, o.cache.Start(ctx)) })
	defer watches.Wait()
	o.cache.WaitForCacheSync(ctx)
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		if err := o.reconcile(ctx); err != nil && err.Error() != o.said {
			o.said = err.Error()
			o.tell(ctx, err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (o *Operator) tell(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil {
		_, _ = fmt.Fprintln(o.log, "   gpu-operator stand-in:", err)
	}
}

func (o *Operator) reconcile(ctx context.Context) error {
	clusters, err := nodesim.Listed(ctx, o.client, "v1alpha1", "GPUCluster")
	if err != nil {
		return err
	}
	policies, err := nodesim.Listed(ctx, o.client, "v1", "ClusterPolicy")
	switch {
	case err != nil:
		return err
	case len(clusters) > 0 && len(policies) > 0: // it follows no ClusterPolicy any more, and what it has rendered for that stays
		return nodesim.WriteStatus(ctx, o.client, &clusters[0], nvidia.Refuses(&clusters[0], Namespace, time.Now()))
	case len(clusters) > 0:
		return o.runCluster(ctx, &clusters[0])
	case len(policies) == 0:
		return o.applySets(ctx, nil)
	}
	found := &policies[0]
	p, err := parsePolicy(found)
	if err != nil {
		return err
	}
	return errors.Join(o.keepRuntimeClass(ctx, p), o.applySets(ctx, found, render(p)...),
		o.labelNodes(ctx, func(n *corev1.Node) map[string]string { return o.labelledByEvents(n, found, p) }),
		nodesim.WriteStatus(ctx, o.client, found, nvidia.Reports(found, Namespace, time.Now())))
}

// applySets makes the DaemonSets those that are rendered for an object, and removes the others.
func (o *Operator) applySets(ctx context.Context, owner *unstructured.Unstructured, rendered ...*appsv1.DaemonSet) error {
	return nodesim.ApplySets(ctx, o.client, Namespace, owner, rendered, append(operands(), DRAName))
}

func (o *Operator) apply(ctx context.Context, object client.Object) error {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return fmt.Errorf("applying %s: %w", object.GetName(), err)
	}
	u := &unstructured.Unstructured{Object: content}
	unstructured.RemoveNestedField(u.Object, "status")
	err = o.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(fieldManager), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("applying %s %s: %w", u.GetKind(), u.GetName(), err)
	}
	return nil
}
