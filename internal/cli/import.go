// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/adopt"
)

// gpuPresent is the label that NVIDIA's GPU Operator gives to nodes with GPUs.
const gpuPresent = "nvidia.com/gpu.present"

// importPolicies prints policies that describe how the GPUs of the cluster are shared already.
func (p *Program) importPolicies(ctx context.Context, f *flags, rest []string) error {
	if len(rest) > 0 {
		return hint(fmt.Errorf("import takes no argument, but was given %s", strings.Join(rest, " ")))
	}
	c, err := connect(f)
	if err != nil {
		return err
	}
	shared, err := readShared(ctx, c, f.configMap)
	if err != nil {
		return advise(err)
	}
	text, err := adopt.Describe(shared).YAML()
	if err != nil {
		return err
	}
	return p.write(text)
}

// readShared reads what tells how GPUs are shared. The ConfigMap of a stand-alone device plugin is given as
// namespace/name; that of the GPU Operator is found.
func readShared(ctx context.Context, c client.Client, standAlone string) (adopt.Cluster, error) {
	shared := adopt.Cluster{}
	policy, err := clusterPolicy(ctx, c)
	if err != nil {
		return shared, err
	}
	configMap := types.NamespacedName{}
	if namespace, name, both := strings.Cut(standAlone, "/"); both {
		configMap = types.NamespacedName{Namespace: namespace, Name: name}
	}
	if policy != nil {
		namespace := at(policy, "status", "namespace")
		configMap = types.NamespacedName{Namespace: namespace, Name: at(policy, "spec", "devicePlugin", "config", "name")}
		shared.Default = at(policy, "spec", "devicePlugin", "config", "default")
		shared.MIGStrategy = at(policy, "spec", "mig", "strategy")
		if shared.MIGConfigs, err = migConfigs(ctx, c, namespace, at(policy, "spec", "migManager", "config", "name")); err != nil {
			return shared, err
		}
	}
	if configMap.Name != "" {
		found := &corev1.ConfigMap{}
		if err := c.Get(ctx, configMap, found); client.IgnoreNotFound(err) != nil {
			return shared, fmt.Errorf("reading ConfigMap %s, which the device plugin reads: %w", configMap, err)
		}
		shared.ConfigMap, shared.Configs = "ConfigMap "+configMap.String(), found.Data
		shared.Default = cmp.Or(shared.Default, fallback(policy == nil, found.Data))
	}
	shared.Nodes, err = readSharedNodes(ctx, c)
	return shared, err
}

// fallback is the key that nodes without a label use in the chart of the stand-alone plugin: the one called default or, if
// there is only one, that.
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
	if name == "" || name == "default-mig-parted-config" {
		return "", nil
	}
	found := &corev1.ConfigMap{}
	key := types.NamespacedName{Namespace: namespace, Name: name}
	if err := c.Get(ctx, key, found); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("reading ConfigMap %s, which NVIDIA's mig-manager reads: %w", key, err)
	}
	return found.Data["config.yaml"], nil
}

// readSharedNodes reads the nodes that have GPUs, and of their agents what those GPUs are, where the operator is installed.
func readSharedNodes(ctx context.Context, c client.Client) ([]adopt.Node, error) {
	var withGPUs []adopt.Node
	gpuNodes := &v1alpha1.GPUNodeList{}
	if err := c.List(ctx, gpuNodes); err != nil && !meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("reading GPUNodes: %w", err)
	}
	of := byName(gpuNodes)
	err := eachPage(ctx, c, func(nodes *corev1.NodeList) {
		for i := range nodes.Items {
			n := adopt.Node{Name: nodes.Items[i].Name, Labels: nodes.Items[i].Labels}
			known, has := of[n.Name]
			if has {
				n.Policy, n.Devices = known.Spec.Policy, known.Status.Devices
			}
			if has || n.Labels[gpuPresent] == "true" {
				withGPUs = append(withGPUs, n)
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("reading nodes: %w", err)
	}
	return withGPUs, nil
}
