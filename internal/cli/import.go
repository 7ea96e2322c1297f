// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/importer"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// gpuPresent is the label that NVIDIA's GPU Operator gives to nodes with GPUs.
const gpuPresent = "nvidia.com/gpu.present"

// importPolicies prints policies that describe how the GPUs of the cluster are shared already.
func (p *Program) importPolicies(ctx context.Context, f *flags, _ []string) error {
	c, err := connect(f)
	if err != nil {
		return err
	}
	shared, err := readShared(ctx, c, f.configMap)
	if err != nil {
		return advise(err)
	}
	text, err := importer.Describe(shared).YAML()
	if err != nil {
		return err
	}
	return p.write(text)
}

// readShared reads what tells how GPUs are shared. The ConfigMap of a stand-alone device plugin is given as
// namespace/name; that of the GPU Operator is found.
func readShared(ctx context.Context, c client.Client, standAlone string) (importer.Cluster, error) {
	shared := importer.Cluster{}
	policy, err := clusterPolicy(ctx, c)
	if err != nil {
		return shared, err
	}
	if policy != nil {
		namespace, name := at(policy, "status", "namespace"), at(policy, "spec", "migManager", "config", "name")
		if shared.MIGConfigs, err = migConfigs(ctx, c, namespace, name); err != nil {
			return shared, err
		}
	}
	if err := readConfigs(ctx, c, &shared, policy, standAlone); err != nil {
		return shared, err
	}
	if shared.Policies, err = policyNames(ctx, c); err != nil {
		return shared, err
	}
	s := cluster.Snapshot{}
	if shared.Nodes, err = readSharedNodes(ctx, c, &s); err != nil {
		return shared, err
	}
	s.Plugin.ClusterPolicy = clusterpolicy.RunsPlugin(policy)
	if err := readDriven(ctx, c, &shared, &s); err != nil {
		return shared, err
	}
	shared.Waits = waits(policy, &s)
	return shared, nil
}

// readDriven reads what NVIDIA's DRA driver shows of the nodes, and the pods.
func readDriven(ctx context.Context, c client.Client, shared *importer.Cluster, s *cluster.Snapshot) error {
	driver, err := readDRA(ctx, c)
	if err != nil {
		return err
	}
	programs, err := readPrograms(ctx, c, "", &driver)
	if err != nil {
		return err
	}
	if err := readPods(ctx, c, s, &programs); err != nil {
		return err
	}
	shared.Lacks = driver.tell(s)
	shared.Classes = s.DRA.Classes
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if stack := s.StackOf(n); stack != dra.DevicePlugin {
			shared.Nodes[i].Driver = &importer.Driver{
				Alone: stack == dra.DRADriver, Pool: n.Published, MakesInstances: slices.ContainsFunc(n.Pods, func(p cluster.Pod) bool { return p.DynamicMIG }),
			}
		}
	}
	return nil
}

// waits is why a policy that is applied now has to wait for clients of NVIDIA's MPS daemons.
func waits(policy *unstructured.Unstructured, s *cluster.Snapshot) string {
	if !clusterpolicy.RunsPlugin(policy) || namesOurs(policy) {
		return ""
	}
	s.Plugin = cluster.DevicePlugin{ClusterPolicy: true, Operands: new(clusterpolicy.OperandsOf(policy))}
	return rollout.Decide(*s).PluginConfigHeld
}

// keepLabels is what to do as long as it is not known what the device plugin reads.
const keepLabels = "Until then keep the labels " + v1alpha1.LabelConfig + ", which may share GPUs"

// readConfigs reads the configurations of the device plugin.
func readConfigs(ctx context.Context, c client.Client, shared *importer.Cluster, policy *unstructured.Unstructured, standAlone string) error {
	byOperator := clusterpolicy.RunsPlugin(policy)
	var configMap types.NamespacedName
	switch {
	case byOperator && standAlone != "":
		return hint(fmt.Errorf("--configmap is for a device plugin that the GPU Operator does not run, but ClusterPolicy %s runs one", policy.GetName()))
	case byOperator:
		configMap.Namespace, configMap.Name = at(policy, "status", "namespace"), at(policy, "spec", "devicePlugin", "config", "name")
		shared.Default, shared.MIGStrategy = at(policy, "spec", "devicePlugin", "config", "default"), at(policy, "spec", "mig", "strategy")
		if configMap.Name == "" {
			return nil // the device plugin reads none, so no label has an effect
		}
		if configMap.Namespace == "" {
			shared.Unread = fmt.Sprintf("ClusterPolicy %s has no status.namespace yet; look at the log of the GPU Operator. %s", policy.GetName(), keepLabels)
			return nil
		}
	case standAlone == "":
		shared.Unread = "the GPU Operator does not run the device plugin here, so its ConfigMap is not known; name it by --configmap " +
			"NAMESPACE/NAME. " + keepLabels
		return nil
	default:
		namespace, name, both := strings.Cut(standAlone, "/")
		if !both || namespace == "" || name == "" || strings.Contains(name, "/") {
			return hint(fmt.Errorf("--configmap %q is not NAMESPACE/NAME", standAlone))
		}
		configMap = types.NamespacedName{Namespace: namespace, Name: name}
	}
	found := &corev1.ConfigMap{}
	err := c.Get(ctx, configMap, found)
	switch {
	case apierrors.IsNotFound(err) && byOperator:
		shared.Unread = fmt.Sprintf("ClusterPolicy %s names ConfigMap %s for the device plugin, which does not exist; create it or correct "+
			"the ClusterPolicy. %s", policy.GetName(), configMap, keepLabels)
		return nil
	case err != nil:
		return fmt.Errorf("reading ConfigMap %s, which the device plugin reads: %w", configMap, err)
	}
	shared.ConfigMap, shared.Configs = "ConfigMap "+configMap.String(), found.Data
	shared.Default = cmp.Or(shared.Default, fallback(!byOperator, found.Data))
	return nil
}

// policyNames are the names of the policies that exist.
func policyNames(ctx context.Context, c client.Client) ([]string, error) {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.List(ctx, policies); err != nil {
		return nil, unlessNotServed(err, "reading policies")
	}
	names := make([]string, len(policies.Items))
	for i := range policies.Items {
		names[i] = policies.Items[i].Name
	}
	return names, nil
}

// fallback is the key that nodes without a label use in the chart of the stand-alone plugin: the one called default or,
// if there is only one, that.
func fallback(standAlone bool, keys map[string]string) string {
	if !standAlone {
		return ""
	}
	if _, has := keys["default"]; has || len(keys) != 1 {
		return "default"
	}
	for key := range keys {
		return key
	}
	return ""
}

// at is the string at a path; empty if there is none.
func at(o *unstructured.Unstructured, path ...string) string {
	value, _, _ := unstructured.NestedString(o.Object, path...)
	return value
}

// migConfigs are the layouts of NVIDIA's mig-manager; empty where it has its own.
func migConfigs(ctx context.Context, c client.Client, namespace, name string) (string, error) {
	if name == "" || name == "default-mig-parted-config" || namespace == "" {
		return "", nil
	}
	found := &corev1.ConfigMap{}
	key := types.NamespacedName{Namespace: namespace, Name: name}
	if err := c.Get(ctx, key, found); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("reading ConfigMap %s, which NVIDIA's mig-manager reads: %w", key, err)
	}
	return found.Data["config.yaml"], nil
}

// readSharedNodes reads the nodes that have GPUs, and of their agents what those GPUs are, where the operator is
// installed. It adds the nodes to the snapshot too.
func readSharedNodes(ctx context.Context, c client.Client, s *cluster.Snapshot) ([]importer.Node, error) {
	var withGPUs []importer.Node
	gpuNodes := &v1alpha1.GPUNodeList{}
	if err := c.List(ctx, gpuNodes); err != nil && !meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("reading GPUNodes: %w", err)
	}
	of := byName(gpuNodes)
	err := eachPage(ctx, c, func(nodes *corev1.NodeList) {
		for i := range nodes.Items {
			n := importer.Node{
				Name: nodes.Items[i].Name, Labels: nodes.Items[i].Labels, Machine: nodes.Items[i].Annotations[cluster.AnnotationMachine],
			}
			known, has := of[n.Name]
			if has {
				n.Policy, n.Devices = known.Spec.PolicyName, known.Status.Devices
			}
			if has || n.Labels[gpuPresent] == "true" {
				withGPUs = append(withGPUs, n) // in the order of the nodes of the snapshot
				s.Nodes = append(s.Nodes, cluster.NodeOf(&nodes.Items[i], &v1alpha1.GPUNode{}))
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("reading nodes: %w", err)
	}
	return withGPUs, nil
}
