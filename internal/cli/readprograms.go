// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// readPrograms reads where the agents and NVIDIA's programs run. What the user may not read leaves NVIDIA's unverified.
// The namespace is that of ownNamespaces.
func readPrograms(ctx context.Context, c client.Client, namespace string, driver *driverObjects) (cluster.Programs, error) {
	o := cluster.Programs{PublishedOn: driver.nodes()}
	o.Unverified = driver.unread[kindSlice]
	var err error
	if o.Own, err = ownNamespaces(ctx, c, namespace); err != nil {
		return o, err
	}
	policies, err := readGPUOperators(ctx, c, &o)
	if err == nil && !clusterpolicy.RunsPlugin(clusterpolicy.Active(policies)) {
		err = readStandAlone(ctx, c, &o)
	}
	if apierrors.IsForbidden(err) {
		o.Unverified, err = true, nil
	}
	return o, err
}

// readGPUOperators reads in which namespaces NVIDIA's GPU Operator runs. It returns the ClusterPolicies.
func readGPUOperators(ctx context.Context, c client.Client, o *cluster.Programs) ([]unstructured.Unstructured, error) {
	policies, err := configsOf(ctx, c, clusterPolicyKind())
	if err != nil {
		return nil, err
	}
	clusters, err := configsOf(ctx, c, kindOf("nvidia.com", "v1alpha1", "GPUCluster"))
	if err != nil {
		return nil, err
	}
	for _, config := range slices.Concat(policies, clusters) {
		if namespace := at(&config, "status", "namespace"); namespace != "" {
			o.GPUOperators = append(o.GPUOperators, namespace)
		}
	}
	return policies, nil
}

// readStandAlone reads in which namespace a device plugin runs that the GPU Operator does not run, as the controller is
// told.
func readStandAlone(ctx context.Context, c client.Client, o *cluster.Programs) error {
	if o.Own == nil {
		o.Unverified = true // a Deployment of a tenant could name any namespace
		return nil
	}
	deployments, err := deploymentsIn(ctx, c, o.Own)
	for i := range deployments {
		o.ConfigMap.Namespace = cmp.Or(standAloneOf(&deployments[i]).Namespace, o.ConfigMap.Namespace)
	}
	return err
}

// nodes are those for which NVIDIA's DRA driver publishes ResourceSlices.
func (o *driverObjects) nodes() map[string]bool {
	published := map[string]bool{}
	for i := range o.of[kindSlice] {
		if node := cluster.PublishedOn(&o.of[kindSlice][i]); node != "" {
			published[node] = true
		}
	}
	return published
}
