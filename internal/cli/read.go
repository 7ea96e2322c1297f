// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

const (
	// page is how many objects one answer of the API server holds.
	page = 500
	// deployPlugin is the deploy label of NVIDIA's device plugin: the GPU Operator puts it on every GPU node.
	deployPlugin = cluster.DeployPrefix + "device-plugin"
)

// read reads the cluster as the controller sees it, but for our ConfigMap, which decides when something is done and not
// what. Everybody who may look at nodes and pods may read that; NVIDIA's ClusterPolicy and what its DRA driver
// publishes are read by those who may. The namespace is that of ownNamespaces.
func (p *Program) read(ctx context.Context, c client.Client, namespace string) (s cluster.Snapshot, told readAs, err error) {
	s = cluster.Snapshot{Now: p.Clock.Now()}
	policies, gpuNodes := &v1alpha1.GPUSharingPolicyList{}, &v1alpha1.GPUNodeList{}
	if err := c.List(ctx, policies); err != nil {
		return s, told, fmt.Errorf("reading policies: %w", err)
	}
	if err := c.List(ctx, gpuNodes); err != nil {
		return s, told, fmt.Errorf("reading GPUNodes: %w", err)
	}
	s.Policies = policies.Items
	if err := readNodes(ctx, c, &s, cluster.ByName(gpuNodes.Items)); err != nil {
		return s, told, err
	}
	driver, err := readDRA(ctx, c)
	if err != nil {
		return s, told, err
	}
	if told.programs, err = readPrograms(ctx, c, namespace, &driver); err != nil {
		return s, told, err
	}
	s.Plugin = devicePluginOf(&s)
	if err := readNodeFeatures(ctx, c, &s, &told.programs); err != nil {
		return s, told, err
	}
	if err := readPods(ctx, c, &s, &told.programs); err != nil {
		return s, told, err
	}
	if err := readClusterPolicy(ctx, c, &s); err != nil {
		return s, told, err
	}
	told.lacks = driver.tell(&s)
	return s, told, nil
}

// readAs is how a cluster was read.
type readAs struct {
	lacks    []string // what is not known of NVIDIA's DRA driver, because the user may not read it
	programs cluster.Programs
}

// readClusterPolicy reads what NVIDIA's ClusterPolicy says of its programs, if there is one and who asks may know.
func readClusterPolicy(ctx context.Context, c client.Client, s *cluster.Snapshot) error {
	policy, err := clusterPolicy(ctx, c)
	if apierrors.IsForbidden(err) {
		return nil
	}
	if err != nil {
		return err
	}
	plugin := &s.Plugin
	if plugin.ClusterPolicy = clusterpolicy.RunsPlugin(policy); !plugin.ClusterPolicy {
		return nil
	}
	plugin.Operands = new(clusterpolicy.OperandsOf(policy))
	plugin.NoMIGManager = clusterpolicy.NoMIGManager(policy)
	if !namesOurs(policy) && rollout.Decide(*s).PluginConfigHeld != "" {
		plugin.Ready = false // and everything waits until it is
	}
	return nil
}

// namesOurs reports whether a ClusterPolicy names the operator's ConfigMap for the device plugin.
func namesOurs(policy *unstructured.Unstructured) bool {
	return at(policy, "spec", "devicePlugin", "config", "name") == cluster.ConfigMapName
}

// configBefore names the ConfigMap for the device plugin that NVIDIA's ClusterPolicy named before the operator changed
// it; empty: none, or the user may not read it.
func configBefore(ctx context.Context, c client.Client) (string, error) {
	policy, err := clusterPolicy(ctx, c)
	switch {
	case apierrors.IsForbidden(err):
		return "", nil
	case err != nil || policy == nil:
		return "", err
	}
	if name := configRecorded(policy); name != "" {
		return "ConfigMap " + name, nil
	}
	return "", nil
}

// configRecorded is the name of the ConfigMap for the device plugin that a ClusterPolicy had before the operator
// changed it; empty: none.
func configRecorded(policy *unstructured.Unstructured) string {
	var record struct {
		Config struct {
			Name string `json:"name"`
		} `json:"config"`
	}
	_ = json.Unmarshal([]byte(policy.GetAnnotations()[v1alpha1.AnnotationBaseline]), &record) // the operator reports a damaged record
	return record.Config.Name
}

// clusterPolicy is the ClusterPolicy that the GPU Operator follows; nil where there is none.
func clusterPolicy(ctx context.Context, c client.Client) (*unstructured.Unstructured, error) {
	all, err := configsOf(ctx, c, clusterPolicyKind())
	return clusterpolicy.Active(all), err
}

// configsOf are the objects of a kind by which NVIDIA's GPU Operator is configured; none if the API server does not
// serve it.
func configsOf(ctx context.Context, c client.Client, of schema.GroupVersionKind) ([]unstructured.Unstructured, error) {
	all := &unstructured.UnstructuredList{}
	kind, err := listOf(c, of)
	if err == nil {
		all.SetGroupVersionKind(kind)
		err = c.List(ctx, all)
	}
	if err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("reading NVIDIA's %s: %w", of.Kind, err)
	}
	return all.Items, nil
}

// clusterPolicyKind is the kind of NVIDIA's ClusterPolicy, in the version that we know.
func clusterPolicyKind() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"}
}

// listOf is the kind of a list of a kind, in the version that we know or, if the API server does not serve that, in the
// one that it prefers. Errors: one of which meta.IsNoMatchError is true if it serves none.
func listOf(c client.Client, kind schema.GroupVersionKind) (schema.GroupVersionKind, error) {
	mapping, err := c.RESTMapper().RESTMapping(kind.GroupKind(), kind.Version)
	if meta.IsNoMatchError(err) {
		mapping, err = c.RESTMapper().RESTMapping(kind.GroupKind())
	}
	if err != nil {
		return schema.GroupVersionKind{}, err
	}
	return mapping.GroupVersionKind.GroupVersion().WithKind(kind.Kind + "List"), nil
}

// eachPage reads all objects of a kind, and hands them over a page at a time. The pages share no memory.
func eachPage[T any, List interface {
	*T
	client.ObjectList
}](ctx context.Context, c client.Client, visit func(List)) error {
	for more, next := true, ""; more; more = next != "" {
		list := List(new(T))
		if err := c.List(ctx, list, client.Limit(page), client.Continue(next)); err != nil {
			return err
		}
		visit(list)
		next = list.GetContinue()
	}
	return nil
}

// readNodes reads the nodes that have GPUs.
func readNodes(ctx context.Context, c client.Client, s *cluster.Snapshot, of map[string]*v1alpha1.GPUNode) error {
	err := eachPage(ctx, c, func(nodes *corev1.NodeList) { s.AddNodes(nodes.Items, of) })
	if err != nil {
		return fmt.Errorf("reading nodes: %w", err)
	}
	return nil
}

// readPods puts the pods on their nodes.
func readPods(ctx context.Context, c client.Client, s *cluster.Snapshot, programs *cluster.Programs) error {
	at := s.NodesByName()
	err := eachPage(ctx, c, func(pods *corev1.PodList) { s.AddPods(pods.Items, at, programs) })
	if err != nil {
		return fmt.Errorf("reading pods: %w", err)
	}
	return nil
}

// devicePluginOf is how NVIDIA's device plugin is installed, as far as the controller and the nodes tell. That it does
// not read our ConfigMap yet holds a rollout up for seconds, and changes nothing about its plan. If it is for longer,
// readClusterPolicy says so.
func devicePluginOf(s *cluster.Snapshot) cluster.DevicePlugin {
	plugin := cluster.DevicePlugin{Ready: true}
	for i := range s.Policies {
		c, reported := condition.Find(s.Policies[i].Status.Conditions, v1alpha1.ConditionAccepted)
		if reported && (c.Reason == v1alpha1.ReasonNoDevicePlugin || c.Reason == v1alpha1.ReasonDRAStackActive) {
			plugin.Reason, plugin.Message = c.Reason, c.Message
		}
	}
	for i := range s.Nodes {
		plugin.ClusterPolicy = plugin.ClusterPolicy || s.Nodes[i].Labels[deployPlugin] != ""
	}
	return plugin
}

// readNodeFeatures reads what the NodeFeatures of Node Feature Discovery say, and in which namespaces it runs, if there
// are any. To users who may not read them, the plan shows what happens where they do not forbid anything.
func readNodeFeatures(ctx context.Context, c client.Client, s *cluster.Snapshot, programs *cluster.Programs) error {
	features := cluster.NewFeatures()
	for more, next := true, ""; more; more = next != "" {
		list := &unstructured.UnstructuredList{}
		kind, err := listOf(c, cluster.NodeFeatureKind())
		if err == nil {
			list.SetGroupVersionKind(kind)
			err = c.List(ctx, list, client.Limit(page), client.Continue(next))
		}
		if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
			return nil
		}
		if s.Plugin.NodeFeatures = true; apierrors.IsForbidden(err) {
			programs.Unverified = true
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading NodeFeatures: %w", err)
		}
		features.AddAll(list.Items, "")
		next = list.GetContinue()
	}
	programs.Discovery = slices.Sorted(maps.Keys(features.Discovery))
	for i := range s.Nodes {
		s.Nodes[i].Features = features.Of[s.Nodes[i].Name]
	}
	return nil
}

// podsByUID are the names of the pods on a node.
func podsByUID(n *cluster.Node) map[string]string {
	names := make(map[string]string, len(n.Pods))
	for _, pod := range n.Pods {
		names[pod.UID] = pod.Namespace + "/" + pod.Name
	}
	return names
}

// userName names a process by its pod, if it belongs to one.
func userName(process gpu.Process, pods map[string]string) string {
	if name, found := pods[process.PodUID]; found {
		return name
	}
	return fmt.Sprintf("process %d (%s)", process.PID, process.Name)
}
