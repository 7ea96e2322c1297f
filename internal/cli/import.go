// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
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
)

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
	if shared.Policies, err = existing(ctx, c); err != nil {
		return shared, err
	}
	s := cluster.Snapshot{}
	if err := readSharedNodes(ctx, c, &s); err != nil {
		return shared, err
	}
	if shared.Lacks, err = readDriven(ctx, c, &s); err != nil {
		return shared, err
	}
	shared.Nodes, shared.Classes, shared.GPUOperator = s.Nodes, s.DRA.Classes, clusterpolicy.RunsPlugin(policy)
	if shared.GPUOperator {
		shared.Workload = (&cluster.DevicePlugin{Operands: new(clusterpolicy.OperandsOf(policy))}).Workload()
	}
	shared.Waits = waits(policy, &s)
	return shared, nil
}

// readDriven reads what NVIDIA's DRA driver shows of the nodes, and the pods. It returns what is not known of that.
func readDriven(ctx context.Context, c client.Client, s *cluster.Snapshot) (lacks []string, err error) {
	driver, err := readDRA(ctx, c)
	if err != nil {
		return nil, err
	}
	programs, err := readPrograms(ctx, c, "", &driver)
	if err != nil {
		return nil, err
	}
	if err := readPods(ctx, c, s, &programs); err != nil {
		return nil, err
	}
	return driver.tell(s), nil
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
		var err error
		if configMap, err = namedByFlag(standAlone); err != nil {
			return err
		}
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
	if byOperator {
		return nil
	}
	return readDefault(ctx, c, shared, found)
}

// namedByFlag is the ConfigMap that --configmap names.
func namedByFlag(configMap string) (types.NamespacedName, error) {
	namespace, name, both := strings.Cut(configMap, "/")
	if !both || namespace == "" || name == "" || strings.Contains(name, "/") {
		return types.NamespacedName{}, hint(fmt.Errorf("--configmap %q is not NAMESPACE/NAME", configMap))
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// readDefault reads which configuration nodes without the label have, of a device plugin that the GPU Operator does not run.
func readDefault(ctx context.Context, c client.Client, shared *importer.Cluster, configMap *corev1.ConfigMap) (err error) {
	shared.Default, err = fallback(ctx, c, configMap)
	switch {
	case apierrors.IsForbidden(err):
		shared.DefaultUnread = fmt.Sprintf("you may not list DaemonSets in namespace %s, so it is not known which key of %s nodes without the label %s have",
			configMap.Namespace, shared.ConfigMap, v1alpha1.LabelConfig)
		return nil
	case errors.Is(err, errDefaultsDiffer):
		shared.DefaultUnread = err.Error()
		return nil
	}
	return err
}

// existing are the policies that exist already.
func existing(ctx context.Context, c client.Client) ([]v1alpha1.GPUSharingPolicy, error) {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.List(ctx, policies); err != nil {
		return nil, unlessNotServed(err, "reading policies")
	}
	return policies.Items, nil
}

// errDefaultsDiffer says that nobody knows which key nodes without a label use.
var errDefaultsDiffer = errors.New("the DaemonSets that read the ConfigMap have different values of DEFAULT_CONFIG; correct config.default of NVIDIA's chart")

// fallback is the key that nodes without a label use with a stand-alone plugin: config.default of NVIDIA's chart or, by
// config.fallbackStrategies, the one called default, the only one, or none (NVIDIA/k8s-device-plugin, cmd/config-manager).
func fallback(ctx context.Context, c client.Client, configMap *corev1.ConfigMap) (string, error) {
	all := &appsv1.DaemonSetList{}
	if err := c.List(ctx, all, client.InNamespace(configMap.Namespace)); err != nil {
		return "", fmt.Errorf("listing DaemonSets in namespace %s: %w", configMap.Namespace, err)
	}
	var keys []string
	for i := range all.Items {
		if pod := (&corev1.Pod{Spec: all.Items[i].Spec.Template.Spec}); cluster.Mounts(pod, configMap.Name) {
			keys = append(keys, fallbackOf(&pod.Spec, configMap.Data))
		}
	}
	if len(keys) == 0 {
		return fallbackOf(&corev1.PodSpec{}, configMap.Data), nil
	}
	if slices.ContainsFunc(keys, func(key string) bool { return key != keys[0] }) {
		return "", errDefaultsDiffer
	}
	return keys[0], nil
}

// fallbackOf is the key for nodes without a label by the environment of NVIDIA's config-manager.
func fallbackOf(spec *corev1.PodSpec, keys map[string]string) string {
	strategies := "named,single"
	for _, container := range spec.Containers {
		for _, variable := range container.Env {
			switch {
			case variable.Name == "DEFAULT_CONFIG" && variable.Value != "":
				return variable.Value
			case variable.Name == "FALLBACK_STRATEGIES":
				strategies = variable.Value
			}
		}
	}
	const named = "default"
	for strategy := range strings.SplitSeq(strategies, ",") {
		_, has := keys[named]
		switch {
		case strategy == "named" && has:
			return named
		case strategy == "single" && len(keys) == 1:
			return slices.Collect(maps.Keys(keys))[0]
		case strategy == "empty":
			return ""
		}
	}
	return named
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
// installed.
func readSharedNodes(ctx context.Context, c client.Client, s *cluster.Snapshot) error {
	gpuNodes := &v1alpha1.GPUNodeList{}
	if err := c.List(ctx, gpuNodes); err != nil && !meta.IsNoMatchError(err) {
		return fmt.Errorf("reading GPUNodes: %w", err)
	}
	of := cluster.ByName(gpuNodes.Items)
	err := eachPage(ctx, c, func(nodes *corev1.NodeList) {
		for i := range nodes.Items {
			if name := nodes.Items[i].Name; of[name] == nil && nodes.Items[i].Labels[cluster.LabelPresent] == cluster.LabelTrue {
				of[name] = &v1alpha1.GPUNode{}
			}
		}
		s.AddNodes(nodes.Items, of)
	})
	if err != nil {
		return fmt.Errorf("reading nodes: %w", err)
	}
	return nil
}
