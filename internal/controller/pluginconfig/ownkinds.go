// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// ErrKindsGone says that one of the operator's own kinds is being deleted, or is absent. The API server deletes the
// objects of a kind after their definition got its deletionTimestamp, so that policies vanish which nobody deleted.
var ErrKindsGone = errors.New("the controller changes and restores nothing. " +
	"Create the definitions of the operator and your policies again")

// PolicyDefinition is the name of the definition of policies.
const PolicyDefinition = "gpusharingpolicies." + v1alpha1.Group

func ownDefinitions() []string { return []string{PolicyDefinition, "gpunodes." + v1alpha1.Group} }

// OwnKinds returns nil if the definitions of the operator's own kinds are there to stay. A reader with a cache may
// lag behind the objects of the kinds: only one without tells that an absent policy was released. Errors:
// ErrKindsGone; any other error, such as that of a refusal, says that nothing is known.
func OwnKinds(ctx context.Context, reader client.Reader) error {
	for _, name := range ownDefinitions() {
		definition := Definitions()
		switch err := reader.Get(ctx, client.ObjectKey{Name: name}, definition); {
		case apierrors.IsNotFound(err):
			return fmt.Errorf("CustomResourceDefinition %s does not exist, so %w", name, ErrKindsGone)
		case err != nil:
			return fmt.Errorf("reading CustomResourceDefinition %s: %w", name, err)
		case definition.DeletionTimestamp != nil:
			return fmt.Errorf("CustomResourceDefinition %s is being deleted, so %w", name, ErrKindsGone)
		}
	}
	return nil
}

// OwnPolicies returns the policies as the API server has them. It is asked before anything is changed because a
// policy is absent, and is an error if that may have another cause than its deletion: OwnKinds, or that known, which
// the cache shows, lacks one, since a watch on a kind whose definition was made anew begins again only after a while.
func (c *Configurer) OwnPolicies(
	ctx context.Context, known []v1alpha1.GPUSharingPolicy,
) (map[string]metav1.PartialObjectMetadata, error) {
	if err := OwnKinds(ctx, c.reader); err != nil {
		return nil, err
	}
	all := &metav1.PartialObjectMetadataList{}
	all.SetGroupVersionKind(v1alpha1.SchemeGroupVersion.WithKind("GPUSharingPolicyList"))
	if err := c.reader.List(ctx, all); err != nil {
		return nil, fmt.Errorf("reading policies past the cache: %w", err)
	}
	shown := make(map[types.UID]bool, len(known))
	for i := range known {
		shown[known[i].UID] = true
	}
	policies := make(map[string]metav1.PartialObjectMetadata, len(all.Items))
	for i := range all.Items {
		policies[all.Items[i].Name] = all.Items[i]
		if !shown[all.Items[i].UID] {
			return nil, fmt.Errorf("policy %s is %w", all.Items[i].Name, ErrNotSynced)
		}
	}
	return policies, nil
}

// Restores reports whether Restore, RestoreMIG or Configure would restore something that the operator changed.
func (o *Observed) Restores(configure, configureMIG bool, tolerations []corev1.Toleration) bool {
	cluster := o.clusterPolicy
	tolerates := !o.has(tolerations)
	if configure {
		return tolerates || cluster != nil && !configureMIG && readsOurs(cluster)
	}
	if o.undecided {
		return false
	}
	if tolerates || cluster != nil && (pointsAtOurs(cluster) || readsOurs(cluster) || o.Operands.Taken != "") {
		return true
	}
	if exists(o.copied) || len(o.leftovers) > 0 {
		return true
	}
	return o.Applied != nil && (cluster != nil || !maps.Equal(o.Applied, o.keysToStay()))
}

// pointsAtOurs reports whether the ClusterPolicy makes the device plugin read our ConfigMap, or has a record of ours.
func pointsAtOurs(policy *unstructured.Unstructured) bool {
	return stringAt(policy, configNamePath()...) == ConfigMapName || stringAt(policy, annotationPath()...) != ""
}

// nodeFeature is the kind by which GPU Feature Discovery (GFD) asks Node Feature Discovery (NFD) for labels.
var nodeFeature = kind{
	cluster.NodeFeatureKind(), "nodefeatures.nfd.k8s-sigs.io",
}

// +kubebuilder:rbac:groups=nfd.k8s-sigs.io,resources=nodefeatures,verbs=list;watch

// NodeFeatures reads all NodeFeatures from the cache, in the form of SlimNodeFeature. They are shared with the cache
// and must not be changed. The result served is the version in which the API server serves them; empty where the
// cluster has no such kind. Errors: ErrNotSynced.
func (c *Configurer) NodeFeatures(ctx context.Context) (all []unstructured.Unstructured, served schema.GroupVersionKind, err error) {
	return c.listServed(ctx, nodeFeature, client.UnsafeDisableDeepCopy)
}

// NewNodeFeature returns a NodeFeature without content, in a version that NodeFeatures returned.
func NewNodeFeature(served schema.GroupVersionKind) *unstructured.Unstructured { return object(served) }

// SlimNodeFeature keeps of a NodeFeature what decisions depend on: objects of nfd-worker list every feature of the
// node's kernel and CPU. Other objects it leaves alone.
func SlimNodeFeature(cached any) (any, error) {
	feature, isUnstructured := cached.(*unstructured.Unstructured)
	if !isUnstructured || feature.GroupVersionKind().GroupKind() != nodeFeature.GroupKind() {
		return cached, nil
	}
	slim := object(feature.GroupVersionKind())
	slim.SetNamespace(feature.GetNamespace())
	slim.SetName(feature.GetName())
	slim.SetUID(feature.GetUID())
	slim.SetResourceVersion(feature.GetResourceVersion())
	slim.SetCreationTimestamp(feature.GetCreationTimestamp())
	if owners := feature.GetOwnerReferences(); len(owners) > 0 {
		slim.SetOwnerReferences(owners)
	}
	slim.SetLabels(map[string]string{cluster.LabelNodeName: feature.GetLabels()[cluster.LabelNodeName]})
	if at, stamped := feature.GetAnnotations()[v1alpha1.AnnotationMPSCapable]; stamped {
		slim.SetAnnotations(map[string]string{v1alpha1.AnnotationMPSCapable: at})
	}
	if value := cluster.RequestedMPSCapable(feature); value != "" {
		if err := unstructured.SetNestedField(slim.Object, value, "spec", "labels", cluster.LabelMPSCapable); err != nil {
			return nil, fmt.Errorf("reading NodeFeature %s/%s: %w", feature.GetNamespace(), feature.GetName(), err)
		}
	}
	return slim, nil
}

// requestChanged reports whether an update of a NodeFeature changes what it asks for.
func requestChanged(old, updated *unstructured.Unstructured) bool {
	return cluster.RequestedMPSCapable(old) != cluster.RequestedMPSCapable(updated) || old.GetUID() != updated.GetUID() || old.GetLabels()[cluster.LabelNodeName] != updated.GetLabels()[cluster.LabelNodeName]
}
