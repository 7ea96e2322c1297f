// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/source"

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

// serveAgain is how often the API server is asked for these kinds while it does not serve them.
const serveAgain = time.Minute

// watchedKind is a kind that the API server may not serve, and the version of it that is watched; nil: none is.
type watchedKind struct {
	schema.GroupKind
	served atomic.Pointer[schema.GroupVersionKind]
	// awaited reports that it is not known yet whether the API server serves the kind.
	awaited atomic.Bool
}

// list reads all objects of the kind from the cache. There are none as long as the kind is not watched.
func (k *watchedKind) list(ctx context.Context, c client.Client) ([]unstructured.Unstructured, error) {
	kind := k.served.Load()
	if kind == nil {
		return nil, nil
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := c.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("reading %ss: %w", kind.Kind, err)
	}
	return list.Items, nil
}

// seenDRA is what the objects of NVIDIA's DRA driver, and of Kubernetes around it, tell.
type seenDRA struct {
	cluster cluster.DRA
	nodes   map[string]nodeDRA   // by node; the pool of a node has its name
	claimed map[string]string    // by which claim a pod has GPUs, by its UID or PodGroup
	rules   map[string]types.UID // of the operator, by node
	classes map[string]types.UID // by name
}

// nodeDRA is what they tell of one node.
type nodeDRA struct {
	sign             string
	dynamicMIG       bool // by the feature gates of the DaemonSet
	published        *dra.Pool
	claims           []dra.Claim
	devicesTaintedAt time.Time
	taintRuleTaken   bool
}

// draOf is what they told of a node last.
func draOf(n *cluster.Node) nodeDRA {
	return nodeDRA{sign: n.DRA, dynamicMIG: n.DynamicMIG, published: n.Published, claims: n.Claims, devicesTaintedAt: n.DevicesTaintedAt, taintRuleTaken: n.TaintRuleTaken}
}

// addTo adds what they tell to the node.
func (d nodeDRA) addTo(n *cluster.Node) {
	n.DRA, n.DynamicMIG, n.Published, n.Claims, n.DevicesTaintedAt, n.TaintRuleTaken = d.sign, d.dynamicMIG, d.published, d.claims, d.devicesTaintedAt, d.taintRuleTaken
}

// gatherDRA reads what is not read of each node by itself. Errors: pluginconfig.ErrNotSynced, while a node shows the
// driver and it is not known yet what the API server serves.
func (c *Controller) gatherDRA(ctx context.Context) (*seenDRA, error) {
	d := &seenDRA{nodes: map[string]nodeDRA{}, claimed: map[string]string{}, rules: map[string]types.UID{}, classes: map[string]types.UID{}}
	for _, gather := range []func(context.Context, *seenDRA) error{c.gatherSlices, c.gatherClaims, c.gatherClasses, c.gatherTaintRules} {
		if err := gather(ctx, d); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// deploy finds the nodes for which NVIDIA's DRA driver has a DaemonSet, also while its pod is away.
func (d *seenDRA) deploy(drivers []appsv1.DaemonSet, nodes map[string]*corev1.Node) {
	for i := range drivers {
		set := &drivers[i]
		if set.DeletionTimestamp != nil {
			continue
		}
		required := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: set.Spec.Template.Spec})
		for n := range nodes {
			if is, err := required.Match(nodes[n]); is && err == nil {
				of := d.nodes[n]
				of.sign, of.dynamicMIG = fmt.Sprintf("DaemonSet %s/%s", set.Namespace, set.Name), cluster.MakesInstances(&set.Spec.Template.Spec)
				d.nodes[n] = of
			}
		}
	}
}

// gatherSlices reads what is published of each node. A pool is read again only where one of its slices has changed.
func (c *Controller) gatherSlices(ctx context.Context, d *seenDRA) error {
	published, err := c.slices.list(ctx, c.client)
	if err != nil {
		return err
	}
	slices.SortFunc(published, func(a, b unstructured.Unstructured) int { return strings.Compare(a.GetName(), b.GetName()) })
	of := map[string][]*unstructured.Unstructured{}
	for i := range published {
		driver, _, _ := unstructured.NestedString(published[i].Object, "spec", "driver")
		node, _, _ := unstructured.NestedString(published[i].Object, "spec", "nodeName")
		if driver == cluster.DRADriver && node != "" {
			of[node] = append(of[node], &published[i])
		}
	}
	pools := make(map[string]knownPool, len(of))
	for node, its := range of {
		var version strings.Builder
		for _, slice := range its {
			fmt.Fprintf(&version, "%s/%s ", slice.GetUID(), slice.GetResourceVersion())
		}
		pool, known := c.pools[node]
		if !known || pool.version != version.String() {
			read := make([]dra.Slice, 0, len(its))
			for _, slice := range its {
				read = append(read, dra.SliceOf(slice.Object))
			}
			pool = knownPool{version: version.String(), pool: new(dra.PoolOf(read))}
		}
		pools[node] = pool
		d.nodes[node] = nodeDRA{sign: "ResourceSlice " + its[len(its)-1].GetName(), published: pool.pool}
	}
	c.pools = pools
	return nil
}

// knownPool is a pool as it was read from slices of that version.
type knownPool struct {
	version string
	pool    *dra.Pool
}

// gatherClaims finds which devices are allocated by NVIDIA's DRA driver, and to which pods. An allocation precedes the
// start of the pod, and older kubelets do not report to the agent who has GPUs by claims.
func (c *Controller) gatherClaims(ctx context.Context, d *seenDRA) error {
	claims, err := c.claims.list(ctx, c.client)
	if err != nil {
		return err
	}
	for i := range claims {
		claim, counts := dra.ClaimOf(claims[i].GetNamespace(), claims[i].GetName(), claims[i].Object)
		if !counts {
			continue
		}
		d.cluster.Named = append(d.cluster.Named, claim.Classes...)
		for _, pool := range claim.Pools() {
			of := d.nodes[pool]
			of.claims = append(of.claims, claim)
			d.nodes[pool] = of
		}
		if len(claim.Devices) == 0 {
			continue
		}
		for _, uid := range claim.Pods {
			d.claimed[uid] = claim.Name
		}
		for _, o := range claim.Others {
			if o.IsPodGroup() {
				d.claimed[podGroup(claims[i].GetNamespace(), o.Name)] = claim.Name
			}
		}
	}
	slices.Sort(d.cluster.Named)
	d.cluster.Named = slices.Compact(d.cluster.Named)
	for _, of := range d.nodes {
		slices.SortFunc(of.claims, func(a, b dra.Claim) int { return strings.Compare(a.Name, b.Name) })
	}
	return nil
}

// podGroup names a PodGroup as no UID of a pod is.
func podGroup(namespace, name string) string { return namespace + "/" + name }

// claimOf is by which claim a pod has GPUs; empty: by none.
func claimOf(p *cluster.Pod, claims map[string]string) string {
	return cmp.Or(claims[p.UID], claims[podGroup(p.Namespace, p.PodGroup)])
}

func (c *Controller) gatherClasses(ctx context.Context, d *seenDRA) error {
	classes, err := c.classes.list(ctx, c.client)
	if err != nil {
		return err
	}
	served := c.classes.served.Load()
	d.cluster.ServesClasses = served != nil && served.Version == "v1" // earlier versions have no extended resource that is on by default
	for i := range classes {
		d.cluster.Classes = append(d.cluster.Classes, dra.ClassOf(&classes[i]))
		d.classes[classes[i].GetName()] = classes[i].GetUID()
	}
	slices.SortFunc(d.cluster.Classes, func(a, b dra.Class) int { return strings.Compare(a.Name, b.Name) })
	return nil
}

// gatherTaintRules reads the operator's DeviceTaintRules. One that was deleted is gone, also while the cache still
// shows it: a node whose rule is gone must not be taken for one that new pods are kept off.
func (c *Controller) gatherTaintRules(ctx context.Context, d *seenDRA) error {
	rules, err := c.rules.list(ctx, c.client)
	if err != nil {
		return err
	}
	d.cluster.ServesTaintRules = c.rules.served.Load() != nil
	shown := map[types.UID]bool{}
	for i := range rules {
		uid := rules[i].GetUID()
		node, since, ours := dra.TaintRuleOf(&rules[i])
		shown[uid] = true
		if edited, is := dra.EditedTaintRule(&rules[i]); is && !c.deletedTaintRules[uid] {
			d.rules[edited] = uid
			d.cluster.Edited = append(d.cluster.Edited, edited)
			continue
		}
		if !ours {
			if named, is := dra.TaintRuleNode(rules[i].GetName()); is {
				of := d.nodes[named]
				of.taintRuleTaken = true
				d.nodes[named] = of
			}
			continue
		}
		if c.deletedTaintRules[uid] || rules[i].GetDeletionTimestamp() != nil {
			continue
		}
		d.rules[node] = uid
		d.cluster.DevicesTaintedOn = append(d.cluster.DevicesTaintedOn, node)
		of := d.nodes[node]
		of.devicesTaintedAt = since
		d.nodes[node] = of
	}
	maps.DeleteFunc(c.deletedTaintRules, func(uid types.UID, _ bool) bool { return !shown[uid] })
	slices.Sort(d.cluster.DevicesTaintedOn)
	slices.Sort(d.cluster.Edited)
	return nil
}

// awaitsDRA reports whether a node shows the driver though it is not known yet what the API server serves of its kinds.
func (c *Controller) awaitsDRA(nodes []cluster.Node) bool {
	unknown := false
	for _, kind := range c.kindsOfDRA() {
		unknown = unknown || kind.awaited.Load()
	}
	return unknown && slices.ContainsFunc(nodes, func(n cluster.Node) bool {
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

// watchKind wakes the controller when an object of a kind changes, as soon as the API server serves the kind. Only
// nodes of NVIDIA's DRA driver wait for that.
func (c *Controller) watchKind(kind *watchedKind, mgr manager.Manager) source.TypedSource[Request] {
	kind.awaited.Store(true)
	return source.TypedFunc[Request](func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[Request]) error {
		go func() {
			_ = wait.PollUntilContextCancel(ctx, serveAgain, true, func(ctx context.Context) (bool, error) {
				err := kind.watch(ctx, mgr, func() { queue.AddAfter(Request{}, gathering) })
				if meta.IsNoMatchError(err) {
					kind.awaited.Store(false)
				} else if err != nil {
					log.FromContext(ctx).Error(err, "watching a kind", "kind", kind.Kind)
				}
				return err == nil, nil
			})
		}()
		return nil
	})
}

func (k *watchedKind) watch(ctx context.Context, mgr manager.Manager, wake func()) error {
	mapping, err := mgr.GetRESTMapper().RESTMapping(k.GroupKind)
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(mapping.GroupVersionKind)
	informer, err := mgr.GetCache().GetInformer(ctx, object, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandlerWithOptions(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { wake() }, DeleteFunc: func(any) { wake() },
		UpdateFunc: func(old, updated any) {
			if !reflect.DeepEqual(contentOf(old), contentOf(updated)) {
				wake()
			}
		},
	}, toolscache.HandlerOptions{})
	if err == nil && toolscache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		k.served.Store(&mapping.GroupVersionKind)
		k.awaited.Store(false)
		wake() // the objects count from now on
	}
	return err
}

// contentOf is what the cache keeps of an object, without its metadata.
func contentOf(cached any) [2]any {
	object, is := cached.(*unstructured.Unstructured)
	if !is {
		return [2]any{}
	}
	return [2]any{object.Object["spec"], object.Object["status"]}
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
