// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// The fields of a ClusterPolicy that matter here. NVIDIA's Go types are no module that can be imported.
func configPath() []string     { return []string{"spec", "devicePlugin", "config"} }
func strategyPath() []string   { return []string{"spec", "mig", "strategy"} }
func configNamePath() []string { return append(configPath(), "name") }
func defaultKeyPath() []string { return append(configPath(), "default") }
func annotationPath() []string {
	return []string{"metadata", "annotations", v1alpha1.AnnotationBaseline}
}

func namespaceOf(policy *unstructured.Unstructured) string {
	return stringAt(policy, "status", "namespace")
}

// namespacesOf are the namespaces in which the GPU Operator of ClusterPolicies and GPUClusters runs, sorted.
func namespacesOf(configs []unstructured.Unstructured) []string {
	var namespaces []string
	for i := range configs {
		if namespace := namespaceOf(&configs[i]); namespace != "" {
			namespaces = append(namespaces, namespace)
		}
	}
	slices.Sort(namespaces)
	return slices.Compact(namespaces)
}

// stringAt is the string at a path; empty if there is none.
func stringAt(o *unstructured.Unstructured, path ...string) string {
	value, _, err := unstructured.NestedString(o.Object, path...)
	if err != nil {
		return "" // not a string: the API server refuses that
	}
	return value
}

// pointerAt is the string at a path; nil if there is none.
func pointerAt(o *unstructured.Unstructured, path ...string) *string {
	value, found, err := unstructured.NestedString(o.Object, path...)
	if err != nil || !found {
		return nil
	}
	return &value
}

// draStackActive says that a GPUCluster keeps the operator from configuring a device plugin. Beside a ClusterPolicy the
// GPU Operator (v26.7) refuses it, runs no DRA driver, and leaves what runs for the ClusterPolicy as it is
// (controllers/gpucluster_controller.go: validatePrerequisites; clusterpolicy_controller.go: "cannot co-exist").
func draStackActive(clusters []unstructured.Unstructured, policy *unstructured.Unstructured) (message string) {
	if policy != nil {
		return fmt.Sprintf("GPUCluster %[1]s and ClusterPolicy %[2]s exist, and the GPU Operator serves only one. Delete GPUCluster %[1]s to keep "+
			"the device plugin, or ClusterPolicy %[2]s to move to DRA (docs/dra.md)", clusters[0].GetName(), policy.GetName())
	}
	return fmt.Sprintf("GPUCluster %s exists, so there is no device plugin to configure, and NVIDIA's DRA driver does not serve the node. Look at the driver's "+
		"pod there, or replace the GPUCluster by a ClusterPolicy", clusters[0].GetName())
}

func noDevicePlugin(policy *unstructured.Unstructured) string {
	const remedy = "or name a stand-alone plugin's ConfigMap by --device-plugin-namespace and --device-plugin-configmap"
	if policy != nil {
		return fmt.Sprintf("ClusterPolicy %s has spec.devicePlugin.enabled false; enable it, %s", policy.GetName(), remedy)
	}
	return "there is no ClusterPolicy in this cluster; install NVIDIA's GPU Operator, " + remedy
}

// configured says that the ClusterPolicy makes the device plugin read our ConfigMap and follow the key that a node
// selects.
func configured(policy *unstructured.Unstructured, defaultKey string) bool {
	return len(differs(policy, defaultKey)) == 0
}

// differs lists the fields of the ClusterPolicy that keep it from that, with their values.
func differs(policy *unstructured.Unstructured, defaultKey string) []string {
	var fields []string
	for _, field := range []struct {
		path []string
		want string
	}{{configNamePath(), ConfigMapName}, {defaultKeyPath(), defaultKey}, {strategyPath(), ""}} {
		if is := stringAt(policy, field.path...); is != field.want {
			fields = append(fields, fmt.Sprintf("%s %q", strings.Join(field.path[1:], "."), is)) // below spec
		}
	}
	return fields
}

// outdated says that the ClusterPolicy is as we set it, but names another of our keys for nodes without a label than it
// has to name now.
func outdated(policy *unstructured.Unstructured, keys map[string]string) bool {
	key := stringAt(policy, defaultKeyPath()...)
	_, ours := keys[key]
	return ours && configured(policy, key)
}

// pointed is the ClusterPolicy as it has to be for that, with the baseline as an annotation: a second copy, should
// a user delete our ConfigMap.
func pointed(policy *unstructured.Unstructured, defaultKey, record string) (*unstructured.Unstructured, error) {
	p := policy.DeepCopy()
	unstructured.RemoveNestedField(p.Object, strategyPath()...)
	return p, firstError(
		unstructured.SetNestedField(p.Object, ConfigMapName, configNamePath()...),
		unstructured.SetNestedField(p.Object, defaultKey, defaultKeyPath()...),
		unstructured.SetNestedField(p.Object, record, annotationPath()...),
	)
}

// restored is the ClusterPolicy as it was before us. Fields that another controller changed since stay as they are.
func restored(policy *unstructured.Unstructured, b baseline) (*unstructured.Unstructured, error) {
	p := policy.DeepCopy()
	unstructured.RemoveNestedField(p.Object, annotationPath()...)
	if stringAt(p, configNamePath()...) == ConfigMapName {
		unstructured.RemoveNestedField(p.Object, configPath()...)
		if b.Config != nil {
			if err := unstructured.SetNestedMap(p.Object, b.Config.fields(), configPath()...); err != nil {
				return nil, err
			}
		}
	}
	if err := restoreManager(p, b); err != nil {
		return nil, err
	}
	if b.MIGStrategy != nil && stringAt(p, strategyPath()...) == "" {
		return p, unstructured.SetNestedField(p.Object, *b.MIGStrategy, strategyPath()...)
	}
	return p, nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
