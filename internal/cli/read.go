// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
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
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
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
	all, err := anyOf(ctx, c, clusterPolicyKind())
	return clusterpolicy.Active(all), err
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

// everyOf reads all objects of a kind, and hands them over a page at a time. It returns the kind of their list; an error is
// the API server's, also that it has no such kind.
func everyOf(ctx context.Context, c client.Client, of schema.GroupVersionKind, visit func([]unstructured.Unstructured), opts ...client.ListOption) (
	schema.GroupVersionKind, error,
) {
	kind, err := listOf(c, of)
	for more, next := err == nil, ""; more; more = err == nil && next != "" {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind)
		err = c.List(ctx, list, append(opts, client.Limit(page), client.Continue(next))...)
		visit(list.Items)
		next = list.GetContinue()
	}
	return kind, err
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
	_, err := everyOf(ctx, c, cluster.NodeFeatureKind(), func(items []unstructured.Unstructured) { features.AddAll(items, "") })
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

// The kinds around NVIDIA's DRA driver.
const (
	kindSlice     = "ResourceSlice"
	kindClaim     = "ResourceClaim"
	kindClass     = "DeviceClass"
	kindTaintRule = "DeviceTaintRule"
)

// withoutDRA is what is not known without each of them, in the order in which it is printed. DeviceTaintRules tell only
// how far a change is.
var withoutDRA = []struct{ kind, plural, lacks string }{
	{kindSlice, "ResourceSlices", "what NVIDIA's DRA driver publishes is not known, and no number of shares is compared"},
	{kindClaim, "ResourceClaims", "pods and claims that have a device by a ResourceClaim are not named, unless the agent reports them"},
	{kindClass, "DeviceClasses", "the DeviceClass gpu.nvidia.com of the driver's chart is taken for granted, and no other is known"},
	{kindTaintRule, "DeviceTaintRules", "it is not known which nodes' devices are tainted"},
}

// driverObjects are the objects of resource.k8s.io, as far as the API server serves them and the user may read them.
type driverObjects struct {
	of     map[string][]unstructured.Unstructured // by kind
	served map[string]string                      // the version, by kind
	unread map[string]bool                        // kinds that the user may not read
}

// readDRA reads what NVIDIA's DRA driver publishes, and what Kubernetes has around it. Clusters before Kubernetes 1.34
// serve less.
func readDRA(ctx context.Context, c client.Client) (driverObjects, error) {
	o := driverObjects{of: map[string][]unstructured.Unstructured{}, served: map[string]string{}, unread: map[string]bool{}}
	for _, w := range withoutDRA {
		kind, err := everyOf(ctx, c, schema.GroupVersionKind{Group: draGroup, Version: "v1", Kind: w.kind}, func(items []unstructured.Unstructured) {
			o.of[w.kind] = append(o.of[w.kind], items...)
		})
		if meta.IsNoMatchError(err) {
			continue
		}
		if o.served[w.kind], o.unread[w.kind] = kind.Version, apierrors.IsForbidden(err); err != nil && !o.unread[w.kind] {
			return o, fmt.Errorf("reading %s: %w", w.plural, err)
		}
	}
	return o, nil
}

// draGroup is the API group of dynamic resource allocation.
const draGroup = "resource.k8s.io"

// tell puts into the snapshot what the controller reads of these objects. It returns what is not known because the user
// may not read it, where NVIDIA's DRA driver serves a node.
func (o *driverObjects) tell(s *cluster.Snapshot) (lacks []string) {
	cluster.DRAObjects{
		Slices: o.of[kindSlice], Claims: o.of[kindClaim], Classes: o.of[kindClass], TaintRules: o.of[kindTaintRule],
		ServesClasses: o.served[kindClass] == "v1", ServesTaintRules: o.served[kindTaintRule] != "",
	}.Read().AddTo(s)
	if o.unread[kindClass] {
		s.DRA.Classes = []dra.Class{{Name: dra.DriverName, Resource: plan.ResourceGPU, Unread: true}}
	}
	for i := range s.Nodes {
		// Its DaemonSet may be there while its pod and ResourceSlices are not: the controller has recorded that.
		if n := &s.Nodes[i]; n.DRA == "" && n.Annotations[v1alpha1.AnnotationOtherController] == v1alpha1.ReasonDRADriverActive {
			n.DRA = "the annotation " + v1alpha1.AnnotationOtherController
		}
	}
	if !slices.ContainsFunc(s.Nodes, func(n cluster.Node) bool { return s.Plugin.StackOf(&n) != dra.DevicePlugin }) {
		return nil
	}
	for _, without := range withoutDRA {
		if o.unread[without.kind] {
			lacks = append(lacks, fmt.Sprintf("You may not list %s, so %s. Ask an administrator to bind the ClusterRole gpu-sharing-cli of the installed "+
				"version to you", without.plural, without.lacks))
		}
	}
	return lacks
}

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
	policies, err := anyOf(ctx, c, clusterPolicyKind())
	if err != nil {
		return nil, err
	}
	clusters, err := anyOf(ctx, c, kindOf("nvidia.com", "v1alpha1", "GPUCluster"))
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
