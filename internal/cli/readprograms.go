// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// programs tell which pods are the operator's agents, and which are programs of NVIDIA's or of Node Feature Discovery.
// A tenant chooses the labels of a pod, but not its namespace.
type programs struct {
	cluster.Programs

	// agents are the namespaces of the agents; empty: not known, so that any counts.
	agents []string
	// published are the nodes for which NVIDIA's DRA driver publishes ResourceSlices. Users may not ask what the
	// controller asks the API server: which accounts may publish some.
	published map[string]bool
}

// podOf is what of a pod matters to a decision.
func (o *programs) podOf(pod *corev1.Pod) cluster.Pod {
	known := o.Programs
	if o.published[pod.Spec.NodeName] {
		known.DRADrivers = []string{pod.Namespace}
	}
	return cluster.PodOf(pod, &known)
}

// isReadyAgent reports whether a pod is one of the agents and answers.
func (o *programs) isReadyAgent(pod *corev1.Pod) bool {
	return cluster.IsReadyAgent(pod) && (len(o.agents) == 0 || slices.Contains(o.agents, pod.Namespace))
}

// readPrograms reads where the agents and NVIDIA's programs run. What the user may not read leaves NVIDIA's unverified.
// The namespace is that of ownNamespaces.
func readPrograms(ctx context.Context, c client.Client, namespace string, driver *driverObjects) (programs, error) {
	o := programs{published: driver.nodes()}
	o.Unverified = driver.unread[kindSlice]
	var err error
	if o.agents, err = ownNamespaces(ctx, c, namespace); err != nil {
		return o, err
	}
	o.Own = o.agents
	policies, err := o.readGPUOperators(ctx, c)
	if err == nil && !clusterpolicy.RunsPlugin(clusterpolicy.Active(policies)) {
		err = o.readStandAlone(ctx, c)
	}
	if apierrors.IsForbidden(err) {
		o.Unverified, err = true, nil
	}
	return o, err
}

// readGPUOperators reads in which namespaces NVIDIA's GPU Operator runs. It returns the ClusterPolicies.
func (o *programs) readGPUOperators(ctx context.Context, c client.Client) ([]unstructured.Unstructured, error) {
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
func (o *programs) readStandAlone(ctx context.Context, c client.Client) error {
	if o.agents == nil {
		o.Unverified = true // a Deployment of a tenant could name any namespace
		return nil
	}
	deployments, err := deploymentsIn(ctx, c, o.agents)
	for i := range deployments {
		o.ConfigMap.Namespace = cmp.Or(standAloneOf(&deployments[i]).Namespace, o.ConfigMap.Namespace)
	}
	return err
}

// nodes are those for which NVIDIA's DRA driver publishes ResourceSlices.
func (o *driverObjects) nodes() map[string]bool {
	published := map[string]bool{}
	for i := range o.of[kindSlice] {
		slice := &o.of[kindSlice][i]
		if node := at(slice, "spec", "nodeName"); node != "" && at(slice, "spec", "driver") == dra.DriverName {
			published[node] = true
		}
	}
	return published
}
