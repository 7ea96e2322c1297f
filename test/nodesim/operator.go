// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// GPUOperator plays NVIDIA's GPU Operator: it renders its DaemonSets from the ClusterPolicy that counts and says so in
// its status.
type GPUOperator struct {
	Client    client.Client
	Namespace string
	Clock     clock.WithTicker
	Tell      func(format string, args ...any)
	// First is the ClusterPolicy that it has reconciled first since its start, which counts up to v26.3 for as long as it
	// exists. Empty: the oldest counts, as since v26.7.
	First string

	labelled string // the ClusterPolicy and its generation for which all nodes have their labels
}

// operand is one of the GPU Operator's DaemonSets.
type operand struct {
	app    string
	deploy string // its deploy label is nvidia.com/gpu.deploy.<deploy>
	mps    bool   // is kept on a node by the label nvidia.com/mps.capable too
	config bool   // reads the device plugin's configuration (object_controls.go, handleDevicePluginConfig)
}

func operands() []operand {
	return []operand{
		{app: appDevicePlugin, deploy: "device-plugin", config: true},
		{app: appFeatureDiscovery, deploy: "gpu-feature-discovery", config: true},
		{app: appMPS, deploy: "device-plugin", mps: true, config: true},
		{app: "nvidia-dcgm-exporter", deploy: "dcgm-exporter"},
		{app: "nvidia-mig-manager", deploy: "mig-manager"},
	}
}

// Run reconciles until the context ends.
func (o *GPUOperator) Run(ctx context.Context, interval time.Duration) {
	ticker := o.Clock.NewTicker(interval)
	defer ticker.Stop()
	for {
		if err := o.Reconcile(ctx); err != nil && ctx.Err() == nil {
			o.Tell("GPU Operator: %v", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

// Reconcile renders the DaemonSets of the ClusterPolicy that counts. Others it ignores. With the last one the
// DaemonSets go, which it owns. Beside a GPUCluster it follows no ClusterPolicy, and what it has rendered stays
// (v26.7.0, controllers/clusterpolicy_controller.go).
func (o *GPUOperator) Reconcile(ctx context.Context) error {
	policies, err := Listed(ctx, o.Client, "v1", "ClusterPolicy")
	if err != nil {
		return err
	}
	clusters, err := Listed(ctx, o.Client, "v1alpha1", "GPUCluster")
	if err != nil {
		return err
	}
	if len(policies) == 0 {
		return o.apply(ctx, nil)
	}
	if len(clusters) > 0 {
		return nil
	}
	slices.SortStableFunc(policies, func(a, b unstructured.Unstructured) int { return o.follows(b.GetName()) - o.follows(a.GetName()) })
	for i := range policies {
		if i > 0 {
			if err := WriteStatus(ctx, o.Client, &policies[i], nvidia.Ignores(&policies[i], o.Namespace)); err != nil {
				return err
			}
			continue
		}
		if err := o.render(ctx, &policies[i]); err != nil {
			return err
		}
		if err := o.labelNodes(ctx, &policies[i]); err != nil {
			return err
		}
	}
	return nil
}

// follows is 1 for the ClusterPolicy that counts whatever its age.
func (o *GPUOperator) follows(name string) int {
	if name == o.First {
		return 1
	}
	return 0
}

// Listed are the objects of a kind of NVIDIA's, the oldest first; none where it is not served.
func Listed(ctx context.Context, c client.Client, version, kind string) ([]unstructured.Unstructured, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: "nvidia.com", Version: version, Kind: kind + "List"})
	if err := c.List(ctx, list); client.IgnoreNotFound(err) != nil && !meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("listing objects of kind %s: %w", kind, err)
	}
	slices.SortFunc(list.Items, func(a, b unstructured.Unstructured) int {
		return cmp.Or(a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time), cmp.Compare(a.GetName(), b.GetName()))
	})
	return list.Items, nil
}

// labelNodes sets the labels of all nodes anew for each generation of the ClusterPolicy, which is an event as
// nvidia.Event is one of a node.
func (o *GPUOperator) labelNodes(ctx context.Context, policy *unstructured.Unstructured) error {
	event := fmt.Sprint(policy.GetUID(), policy.GetGeneration())
	if event == o.labelled {
		return nil
	}
	nodes := &corev1.NodeList{}
	if err := o.Client.List(ctx, nodes, client.MatchingLabels{nvidia.LabelPresent: "true"}); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if n.Labels[nvidia.LabelDeploy+"dra-driver"] != "" {
			continue
		}
		if err := setDeployLabels(ctx, o.Client, n, nvidia.MIGCapable(n.Labels)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	o.labelled = event
	return nil
}

func (o *GPUOperator) render(ctx context.Context, policy *unstructured.Unstructured) error {
	var sets []*appsv1.DaemonSet
	for _, operand := range operands() {
		sets = append(sets, o.daemonSet(policy, operand))
	}
	if err := o.apply(ctx, policy, sets...); err != nil {
		return err
	}
	return WriteStatus(ctx, o.Client, policy, nvidia.Reports(policy, o.Namespace, o.Clock.Now()))
}

func (o *GPUOperator) apply(ctx context.Context, policy *unstructured.Unstructured, sets ...*appsv1.DaemonSet) error {
	var names []string
	for _, operand := range operands() {
		names = append(names, operand.app)
	}
	return ApplySets(ctx, o.Client, o.Namespace, policy, sets, names)
}

// WriteStatus makes one write after the other to the status of an object of NVIDIA's.
func WriteStatus(ctx context.Context, c client.Client, object *unstructured.Unstructured, writes []map[string]any) error {
	for _, fields := range writes {
		base := object.DeepCopy()
		for name, value := range fields {
			if err := unstructured.SetNestedField(object.Object, value, "status", name); err != nil {
				return fmt.Errorf("reporting %s %s: %w", object.GetKind(), object.GetName(), err)
			}
		}
		if err := c.Status().Patch(ctx, object, client.MergeFrom(base)); err != nil {
			return fmt.Errorf("reporting %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return nil
}

// ApplySets is what the GPU Operator does with the DaemonSets by some names in a namespace, when it has rendered these for
// an object. It creates or replaces one when what is rendered differs from what was rendered last; what others changed
// meanwhile stays until then (the annotation nvidia.com/last-applied-hash). It deletes the others.
func ApplySets(ctx context.Context, c client.Client, namespace string, owner *unstructured.Unstructured, rendered []*appsv1.DaemonSet, names []string) error {
	have := &appsv1.DaemonSetList{}
	if err := c.List(ctx, have, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("listing the DaemonSets of the GPU Operator: %w", err)
	}
	var errs []error
	for _, set := range rendered {
		hash := fnv.New64a()
		if err := json.NewEncoder(hash).Encode(set.Spec); err != nil { // its String would have addresses in it
			return err
		}
		set.Annotations = map[string]string{annotationHash: strconv.FormatUint(hash.Sum64(), 16)}
		set.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, owner.GroupVersionKind())}
		at := slices.IndexFunc(have.Items, func(o appsv1.DaemonSet) bool { return o.Name == set.Name })
		switch {
		case at < 0:
			errs = append(errs, client.IgnoreAlreadyExists(c.Create(ctx, set))) // a cache may be behind
		case have.Items[at].Annotations[annotationHash] != set.Annotations[annotationHash]:
			errs = append(errs, c.Update(ctx, set))
		}
	}
	for i := range have.Items {
		set := &have.Items[i]
		isRendered := slices.ContainsFunc(rendered, func(o *appsv1.DaemonSet) bool { return o.Name == set.Name })
		if !isRendered && set.Annotations[annotationHash] != "" && slices.Contains(names, set.Name) {
			errs = append(errs, client.IgnoreNotFound(c.Delete(ctx, set)))
		}
	}
	return errors.Join(errs...)
}

const annotationHash = "nvidia.com/last-applied-hash"

func (o *GPUOperator) daemonSet(policy *unstructured.Unstructured, operand operand) *appsv1.DaemonSet {
	set := newDaemonSet(o.Namespace, operand.app, map[string]string{"app": operand.app}, corev1.PodSpec{
		NodeSelector: map[string]string{nvidia.LabelDeploy + operand.deploy: "true"},
		Containers:   []corev1.Container{{Name: operand.app, Image: "example.invalid/simulated"}},
		Tolerations:  clusterpolicy.OperandsOf(policy).Tolerations,
	})
	if operand.mps { // assets/state-mps-control-daemon/0400_daemonset.yaml
		set.Spec.Template.Spec.NodeSelector["nvidia.com/mps.capable"] = "true"
	}
	if operand.config {
		withConfig(&set.Spec.Template.Spec, policy)
	}
	return set
}

// withConfig is what the GPU Operator makes of spec.mig.strategy, spec.devicePlugin.mps.root and .config: environment,
// and the ConfigMap as a volume that has its name.
func withConfig(pod *corev1.PodSpec, policy *unstructured.Unstructured) {
	field := func(path ...string) string {
		value, _, _ := unstructured.NestedString(policy.Object, append([]string{"spec"}, path...)...)
		return value
	}
	env := []corev1.EnvVar{{Name: "MPS_ROOT", Value: cmp.Or(field("devicePlugin", "mps", "root"), "/run/nvidia/mps")}}
	if strategy := field("mig", "strategy"); strategy != "" {
		env = append(env, corev1.EnvVar{Name: "MIG_STRATEGY", Value: strategy})
	}
	if name := field("devicePlugin", "config", "name"); name != "" {
		env = append(env, corev1.EnvVar{Name: "DEFAULT_CONFIG", Value: field("devicePlugin", "config", "default")})
		pod.Volumes = append(pod.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}},
		}})
	}
	pod.Containers[0].Env = env
}
