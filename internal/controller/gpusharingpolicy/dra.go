// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// +kubebuilder:rbac:groups=apps,resources=daemonsets,verbs=list;watch
// +kubebuilder:rbac:groups=resource.k8s.io,resources=resourceclaims;resourceslices,verbs=list;watch
// +kubebuilder:rbac:groups=resource.k8s.io,resources=deviceclasses;devicetaintrules,verbs=get;list;watch;create;patch;delete

// DRA drivers publish devices in slices, and pods have devices by claims. Clusters before Kubernetes 1.32, and some
// after, serve neither. Classes offer devices to pods, and rules keep new pods off them; rules are on by default since
// Kubernetes 1.37.
var (
	sliceKind     = schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}
	claimKind     = schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceClaim"}
	classKind     = schema.GroupKind{Group: "resource.k8s.io", Kind: "DeviceClass"}
	taintRuleKind = schema.GroupKind{Group: "resource.k8s.io", Kind: "DeviceTaintRule"}
)

// gatherDRA reads what is not read of each node by itself. awaited reports that it may be incomplete, since it was
// not known what the API server serves.
func (c *Controller) gatherDRA(ctx context.Context) (read *cluster.DRARead, awaited bool, err error) {
	shown := map[types.UID]bool{}
	if read, awaited, err = c.readDRA(ctx, &c.pools, c.deletedTaintRules, shown); err == nil {
		maps.DeleteFunc(c.deletedTaintRules, func(uid types.UID, _ bool) bool { return !shown[uid] })
	}
	return read, awaited, err
}

// DRAReader reads the same for another controller, beside this one.
func (c *Controller) DRAReader() func(context.Context) (*cluster.DRARead, error) {
	pools := map[string]knownPool{}
	return func(ctx context.Context) (*cluster.DRARead, error) {
		read, _, err := c.readDRA(ctx, &pools, nil, map[types.UID]bool{})
		return read, err
	}
}

// readDRA reads it, with the pools that were known, and notes which DeviceTaintRules are shown.
func (c *Controller) readDRA(
	ctx context.Context, known *map[string]knownPool, deleted, shown map[types.UID]bool,
) (read *cluster.DRARead, awaited bool, err error) {
	for _, kind := range c.kindsOfDRA() {
		awaited = awaited || kind.awaited.Load() // before they are read: they may get known meanwhile
	}
	pools := make(map[string]knownPool, len(*known))
	o := cluster.DRAObjects{Deleted: deleted, ServesTaintRules: c.rules.served.Load() != nil, PoolOf: func(node string, its []*unstructured.Unstructured) *dra.Pool {
		pools[node] = (*known)[node].again(node, its)
		return pools[node].pool
	}}
	served := c.classes.served.Load()
	o.ServesClasses = served != nil && served.Version == "v1" // earlier versions have no extended resource that is on by default
	for _, of := range []struct {
		kind *watchedKind
		into *[]unstructured.Unstructured
	}{{&c.slices, &o.Slices}, {&c.claims, &o.Claims}, {&c.classes, &o.Classes}, {&c.rules, &o.TaintRules}} {
		if *of.into, err = of.kind.list(ctx, c.client); err != nil {
			return nil, awaited, err
		}
		awaited = awaited || of.kind.awaited.Load()
	}
	read = o.Read()
	*known = pools
	for i := range o.TaintRules {
		shown[o.TaintRules[i].GetUID()] = true
	}
	return read, awaited, nil
}

// knownPool is a pool as it was read from slices of that version.
type knownPool struct {
	version string
	pool    *dra.Pool
}

// again reads the pool of a node, if one of its slices has changed.
func (k knownPool) again(node string, its []*unstructured.Unstructured) knownPool {
	var version strings.Builder
	for _, slice := range its {
		fmt.Fprintf(&version, "%s/%s ", slice.GetUID(), slice.GetResourceVersion())
	}
	if k.pool != nil && k.version == version.String() {
		return k
	}
	return knownPool{version: version.String(), pool: cluster.PoolOf(node, its)}
}

// deploy adds the nodes for which NVIDIA's DRA driver has a DaemonSet, also while its pod is away.
func deploy(to map[string]cluster.DRANode, drivers []appsv1.DaemonSet, nodes map[string]*corev1.Node) {
	for i := range drivers {
		set := &drivers[i]
		if set.DeletionTimestamp != nil {
			continue
		}
		required := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: set.Spec.Template.Spec})
		for n := range nodes {
			if is, err := required.Match(nodes[n]); is && err == nil {
				of := to[n]
				pod := &set.Spec.Template.Spec
				of.DRA, of.DynamicMIG = fmt.Sprintf("DaemonSet %s/%s", set.Namespace, set.Name), cluster.MakesInstances(pod)
				of.SetsTimeSlices = cluster.SetsTimeSlices(pod)
				to[n] = of
			}
		}
	}
}

// showDRA reports whether a node shows the driver.
func showDRA(nodes []cluster.Node) bool {
	return slices.ContainsFunc(nodes, func(n cluster.Node) bool {
		reason, _ := cluster.ShownBy(&n)
		return reason == v1alpha1.ReasonDRADriverActive
	})
}

func (c *Controller) kindsOfDRA() []*watchedKind {
	return []*watchedKind{&c.slices, &c.claims, &c.classes, &c.rules}
}

// listIn is a list in an object, which must not be changed.
func listIn(o *unstructured.Unstructured, path ...string) []any {
	value, _, _ := unstructured.NestedFieldNoCopy(o.Object, path...)
	list, _ := value.([]any)
	return list
}

func asMap(value any) map[string]any {
	m, _ := value.(map[string]any)
	return m
}

// slimOthers keeps of objects whose kinds cannot be named in CacheOptions what decisions depend on.
func slimOthers(cached any) (any, error) {
	object, isUnstructured := cached.(*unstructured.Unstructured)
	if !isUnstructured {
		return pluginconfig.SlimNodeFeature(cached)
	}
	slim := &unstructured.Unstructured{Object: map[string]any{}}
	switch object.GroupVersionKind().GroupKind() {
	case sliceKind:
		slim.Object = dra.Slim(object.Object)
	case classKind:
		slim.Object["spec"] = dra.SlimClass(object)
		slim.SetLabels(ownLabel(object))
		slim.SetCreationTimestamp(object.GetCreationTimestamp())
		if others := object.GetAnnotations()[v1alpha1.AnnotationBeside]; others != "" {
			slim.SetAnnotations(map[string]string{v1alpha1.AnnotationBeside: others})
		}
	case taintRuleKind:
		slim.Object["spec"] = object.Object["spec"]
		slim.SetLabels(ownLabel(object))
		slim.SetCreationTimestamp(object.GetCreationTimestamp())
		slim.SetDeletionTimestamp(object.GetDeletionTimestamp())
	case nodePoolKind:
		slim.Object["spec"] = startupTaints(object)
	case claimKind:
		if claim, counts := dra.ClaimOf(object.GetNamespace(), object.GetName(), object.Object); counts {
			slim.Object = claim.Object()
		}
	default:
		return pluginconfig.SlimNodeFeature(cached)
	}
	slim.SetGroupVersionKind(object.GroupVersionKind())
	slim.SetNamespace(object.GetNamespace())
	slim.SetName(object.GetName())
	slim.SetUID(object.GetUID())
	slim.SetResourceVersion(object.GetResourceVersion())
	return slim, nil
}

// ownLabel is the label by which the operator tells its objects, if an object has it.
func ownLabel(object *unstructured.Unstructured) map[string]string {
	if value, has := object.GetLabels()[v1alpha1.LabelManagedBy]; has {
		return map[string]string{v1alpha1.LabelManagedBy: value}
	}
	return nil
}

// slimDaemonSet keeps of DaemonSets what tells that of NVIDIA's DRA driver and its nodes. Of others nothing is kept.
func slimDaemonSet(object any) (any, error) {
	set, is := object.(*appsv1.DaemonSet)
	if !is {
		return object, nil
	}
	slim := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{
		Namespace: set.Namespace, Name: set.Name, UID: set.UID, ResourceVersion: set.ResourceVersion, DeletionTimestamp: set.DeletionTimestamp,
		Generation: set.Generation,
	}}
	if cluster.MakesGPUOffers(set) {
		pod := &set.Spec.Template
		slim.Spec.Template.Labels, slim.Spec.Template.Spec.ServiceAccountName = pod.Labels, pod.Spec.ServiceAccountName
		slim.Spec.Template.Spec.NodeSelector, slim.Spec.Template.Spec.Affinity = pod.Spec.NodeSelector, pod.Spec.Affinity
		for i := range pod.Spec.Containers {
			slim.Spec.Template.Spec.Containers = append(slim.Spec.Template.Spec.Containers, corev1.Container{Name: pod.Spec.Containers[i].Name})
		}
		slim.Spec.Template.Spec.Containers[0].Env = cluster.Gates(&pod.Spec)
	}
	return slim, nil
}
