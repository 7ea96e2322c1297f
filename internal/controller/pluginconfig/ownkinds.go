// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
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
	if configure {
		return cluster != nil && (!configureMIG && readsOurs(cluster) || !slices.Equal(tolerations, o.Operands.Ours))
	}
	if o.undecided {
		return false
	}
	if cluster != nil && (pointsAtOurs(cluster) || readsOurs(cluster) || o.keepsOperands(tolerations)) {
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

// keepsOperands reports whether NVIDIA's programs have something of the operator's besides these tolerations.
func (o *Observed) keepsOperands(tolerations []corev1.Toleration) bool {
	return o.Operands.Taken != "" || !slices.Equal(tolerations, o.Operands.Ours)
}
