// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

// +kubebuilder:rbac:groups=karpenter.sh,resources=nodepools;nodeoverlays,verbs=list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machinedeployments;machinesets,verbs=list;watch
// +kubebuilder:rbac:groups=machine.openshift.io,resources=machinesets;machines,verbs=list;watch
// +kubebuilder:rbac:groups=config.openshift.io,resources=clusterversions,verbs=list;watch

// kind is a kind of an autoscaler, in the version that is known. Its definition may be installed before the operator,
// after it or never.
type kind struct {
	schema.GroupVersionKind
	definition string
	// metadata: nothing else of its objects is read.
	metadata bool
}

var (
	nodePools = kind{schema.GroupVersionKind{Group: autoscaling.GroupKarpenter, Version: "v1", Kind: "NodePool"}, "nodepools.karpenter.sh", false}
	overlays  = kind{
		schema.GroupVersionKind{Group: autoscaling.GroupKarpenter, Version: "v1alpha1", Kind: "NodeOverlay"}, "nodeoverlays.karpenter.sh", false,
	}
	deployments = kind{
		schema.GroupVersionKind{Group: autoscaling.GroupClusterAPI, Version: "v1beta2", Kind: "MachineDeployment"},
		"machinedeployments.cluster.x-k8s.io", false,
	}
	sets         = kind{schema.GroupVersionKind{Group: autoscaling.GroupClusterAPI, Version: "v1beta2", Kind: "MachineSet"}, "machinesets.cluster.x-k8s.io", false}
	openShifts   = kind{schema.GroupVersionKind{Group: autoscaling.GroupOpenShift, Version: "v1beta1", Kind: "MachineSet"}, "machinesets.machine.openshift.io", false}
	machines     = kind{schema.GroupVersionKind{Group: autoscaling.GroupOpenShift, Version: "v1beta1", Kind: "Machine"}, "machines.machine.openshift.io", true}
	versionKinds = kind{schema.GroupVersionKind{Group: "config.openshift.io", Version: "v1", Kind: "ClusterVersion"}, "clusterversions.config.openshift.io", false}
)

// kinds reads the objects of autoscalers from a cache of its own, in the versions that are served. A kind that is not
// served is not watched: a watch on it would fail again and again.
type kinds struct {
	cache        cache.Cache
	pluginConfig *pluginconfig.Configurer
	wake         func()
	watching     map[string]watched // by name of the definition
}

type watched struct {
	schema.GroupVersionKind
	informer cache.Informer
}

func (k *kinds) object(of kind, version schema.GroupVersionKind) client.Object {
	if of.metadata {
		o := &metav1.PartialObjectMetadata{}
		o.SetGroupVersionKind(version)
		return o
	}
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(version)
	return o
}

// follow watches a kind in the version that is served. It returns the zero value if none is, and
// pluginconfig.ErrNotSynced as long as the objects are not read.
func (k *kinds) follow(ctx context.Context, of kind) (schema.GroupVersionKind, error) {
	served, err := k.pluginConfig.Served(ctx, of.GroupVersionKind, of.definition)
	if err != nil && !errors.Is(err, pluginconfig.ErrNotSynced) {
		return served, err
	}
	have, watching := k.watching[of.definition]
	if watching && have.GroupVersionKind != served {
		if err := k.cache.RemoveInformer(ctx, k.object(of, have.GroupVersionKind)); err != nil {
			return served, fmt.Errorf("ending the watch on %s: %w", have, err)
		}
		delete(k.watching, of.definition)
		watching = false
	}
	if served.Empty() {
		return served, nil // a definition without a version is one whose objects nobody can read or write
	}
	if !watching {
		if have, err = k.watch(ctx, of, served); meta.IsNoMatchError(err) {
			return served, fmt.Errorf("objects of %s are %w", of.definition, pluginconfig.ErrNotSynced)
		}
		if err != nil {
			return served, err
		}
		k.watching[of.definition] = have
	}
	if !have.informer.HasSynced() {
		return served, fmt.Errorf("objects of %s in version %s are %w", of.definition, served.Version, pluginconfig.ErrNotSynced)
	}
	return served, nil
}

func (k *kinds) watch(ctx context.Context, of kind, version schema.GroupVersionKind) (watched, error) {
	informer, err := k.cache.GetInformer(ctx, k.object(of, version), cache.BlockUntilSynced(false))
	if err != nil {
		return watched{}, err
	}
	_, err = informer.AddEventHandlerWithOptions(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { k.wake() }, DeleteFunc: func(any) { k.wake() },
		UpdateFunc: func(old, updated any) {
			if !reflect.DeepEqual(viewOf(old), viewOf(updated)) {
				k.wake()
			}
		},
	}, toolscache.HandlerOptions{})
	return watched{version, informer}, err
}

// view is what decisions depend on of an object, if its kind is one that changes all the time.
type view struct {
	scalable autoscaling.Scalable
	other    any
}

func viewOf(cached any) view {
	o, is := cached.(*unstructured.Unstructured)
	if !is {
		return view{other: cached}
	}
	switch o.GetKind() {
	case sets.Kind, deployments.Kind:
		s := autoscaling.ScalableOf(o)
		s.ResourceVersion = ""
		return view{scalable: s}
	case nodePools.Kind:
		return view{other: o.GetGeneration()}
	case versionKinds.Kind:
		return view{other: autoscaling.OpenShiftVersion(o)}
	}
	return view{other: cached}
}

// list reads the objects of a kind; the version is empty if the kind is not served.
func (k *kinds) list(ctx context.Context, of kind, all client.ObjectList) (schema.GroupVersionKind, error) {
	version, err := k.follow(ctx, of)
	if err != nil || version.Empty() {
		return version, err
	}
	all.GetObjectKind().SetGroupVersionKind(version.GroupVersion().WithKind(version.Kind + "List"))
	if err := k.cache.List(ctx, all, client.UnsafeDisableDeepCopy); err != nil {
		return version, fmt.Errorf("reading %s: %w", of.definition, err)
	}
	return version, nil
}

// slim keeps of Machines which MachineSet owns them. A cluster has one for each node.
func slim(cached any) (any, error) {
	if m, is := cached.(*metav1.PartialObjectMetadata); is {
		m.ObjectMeta = metav1.ObjectMeta{
			Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion, OwnerReferences: m.OwnerReferences,
		}
	}
	return cached, nil
}
