// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// Configure points the ClusterPolicy at our ConfigMap, after making sure that the ConfigMap holds all keys that nodes
// need and the record of what was there before, and makes exactly these tolerations ours, in one patch: each replaces
// NVIDIA's pods. It reports whether it changed the ClusterPolicy.
func (c *Configurer) Configure(ctx context.Context, o *Observed, tolerations []corev1.Toleration) (bool, error) {
	if o.Reason != "" || o.clusterPolicy == nil {
		return false, nil
	}
	return c.retry(ctx, o, func() (bool, error) { return c.configure(ctx, o, tolerations) })
}

func (c *Configurer) configure(ctx context.Context, o *Observed, tolerations []corev1.Toleration) (bool, error) {
	want, record := o.clusterPolicy, o.baseline
	o.keepStrategy()
	if !o.Ready && o.Overridden == nil && (o.Held == "" || !o.repoints()) {
		record = o.overruled(c.clock.Now())
		pointed, err := c.point(ctx, o, record)
		if err != nil {
			return false, err
		}
		want = pointed
	}
	want, err := c.tolerate(o, want, tolerations)
	if err != nil {
		return false, err
	}
	changed, err := c.patch(ctx, o.clusterPolicy, want)
	if !changed || record.Revision == o.baseline.Revision {
		return changed, err
	}
	// Only now has anybody been overruled. Our ConfigMap has to tell it too, for a controller may replace the whole
	// ClusterPolicy.
	o.baseline = record
	_, err = c.writeKeys(ctx, o, o.Applied)
	return true, err
}

// point is the ClusterPolicy as it has to be, once all that it will name is written, with a record of what was there
// before. What another controller takes from our ConfigMap later, the decision writes again, as often as it may.
func (c *Configurer) point(ctx context.Context, o *Observed, record baseline) (*unstructured.Unstructured, error) {
	if !configured(o.clusterPolicy, o.defaultKey) && (!contains(o.Applied, o.Configs) || o.record != o.baseline.String()) {
		keys := maps.Clone(o.Configs)
		maps.Copy(keys, o.Applied)
		maps.Copy(keys, o.Configs)
		if _, err := c.writeKeys(ctx, o, keys); err != nil {
			return nil, err
		}
	}
	want, err := pointed(o.clusterPolicy, o.defaultKey, record.String())
	if err != nil {
		return nil, fmt.Errorf("pointing ClusterPolicy %s at ConfigMap %s: %w", o.clusterPolicy.GetName(), o.ConfigMap, err)
	}
	o.did = append(o.did, fmt.Sprintf("spec.devicePlugin.config names ConfigMap %s and spec.mig.strategy is empty, so that each node's "+
		"key counts; what they were is recorded", o.ConfigMap))
	return want, nil
}

// has reports whether exactly these tolerations are ours.
func (o *Observed) has(ours []corev1.Toleration) bool {
	return o.Operands == nil || !o.Operands.Removed && slices.Equal(ours, o.Operands.Ours)
}

// tolerate makes exactly these tolerations of the ClusterPolicy ours, unless it was read anew and has to wait.
func (c *Configurer) tolerate(o *Observed, policy *unstructured.Unstructured, ours []corev1.Toleration) (*unstructured.Unstructured, error) {
	if len(ours) > 0 && (o.Operands.Taken != "" || len(o.Operands.Ours) == 0 && c.clock.Now().Before(o.Operands.NotBefore)) {
		ours = o.Operands.Ours
	}
	if o.has(ours) {
		return policy, nil
	}
	want, err := clusterpolicy.WithTolerations(policy, ours)
	if err != nil {
		return nil, fmt.Errorf("changing the tolerations of ClusterPolicy %s: %w", policy.GetName(), err)
	}
	says := "spec.daemonsets.tolerations has none of the operator's"
	if len(ours) > 0 {
		keys := make([]string, 0, len(ours))
		for _, t := range ours {
			keys = append(keys, t.Key)
		}
		says = "spec.daemonsets.tolerations has those of the operator for " + format.List(keys) + ", which taints of policies need"
	}
	o.did = append(o.did, says)
	return want, nil
}

// Restore puts the ClusterPolicy back as it was, but for these tolerations, and then, once no pod mounts it any more,
// removes our ConfigMap. From a ConfigMap of another owner it removes our keys. It reports whether it changed the
// ClusterPolicy.
func (c *Configurer) Restore(ctx context.Context, o *Observed, mounted bool, tolerations []corev1.Toleration) (bool, error) {
	if o.undecided || o.Waits() != "" {
		return false, nil
	}
	changed, err := c.retry(ctx, o, func() (bool, error) { return c.restore(ctx, o, tolerations) })
	if err != nil {
		return false, err
	}
	remove := o.leftovers
	if exists(o.copied) {
		remove = append(remove, *o.copied)
	}
	switch {
	case o.clusterPolicy != nil && exists(o.configMap):
		remove = append(remove, *o.configMap)
	case o.ConfigMap.Name != "" && o.Applied != nil:
		if _, err := c.writeKeys(ctx, o, o.keysToStay()); err != nil {
			return changed, err
		}
	}
	standAlone := o.clusterPolicy == nil && o.ConfigMap.Name != ""
	if mounted && !standAlone { // a stand-alone plugin mounts its own ConfigMap, which is not removed
		return changed, nil
	}
	for i := range remove {
		if err := c.remove(ctx, &remove[i]); err != nil {
			return changed, err
		}
	}
	return changed, nil
}

func (c *Configurer) restore(ctx context.Context, o *Observed, tolerations []corev1.Toleration) (bool, error) {
	if o.clusterPolicy == nil {
		return false, nil
	}
	want, err := restored(o.clusterPolicy, o.baseline)
	if err != nil {
		return false, fmt.Errorf("putting ClusterPolicy %s back: %w", o.clusterPolicy.GetName(), err)
	}
	o.did = append(o.did, "spec.devicePlugin.config and spec.mig.strategy are what they were before the operator changed them")
	if o.Operands.Taken != "" { // what is recorded is no longer so
		unstructured.RemoveNestedField(want.Object, "metadata", "annotations", v1alpha1.AnnotationTolerations)
	}
	if want, err = c.tolerate(o, want, tolerations); err != nil {
		return false, err
	}
	return c.patch(ctx, o.clusterPolicy, want)
}

// tries is how often a write of the ClusterPolicy is tried that meets one of another controller. NVIDIA's operator
// writes the status of a new one several times within seconds, and whatever it writes makes the API server refuse ours.
const tries = 5

// retry tries a write of the ClusterPolicy again at once if another controller has written it since it was read: with
// what that client wrote, which may have to be recorded. A ClusterPolicy that another one has replaced is left to the
// next reconcile.
func (c *Configurer) retry(ctx context.Context, o *Observed, write func() (bool, error)) (bool, error) {
	for try := 1; ; try++ {
		changed, err := write()
		if !apierrors.IsConflict(err) || try == tries {
			return changed, err
		}
		now := object(o.clusterPolicy.GroupVersionKind())
		if err := c.reader.Get(ctx, client.ObjectKeyFromObject(o.clusterPolicy), now); err != nil {
			return false, fmt.Errorf("reading ClusterPolicy %s again: %w", o.clusterPolicy.GetName(), err)
		}
		if now.GetUID() != o.clusterPolicy.GetUID() || !clusterpolicy.RunsPlugin(now) || namespaceOf(now) != namespaceOf(o.clusterPolicy) {
			return false, err
		}
		o.clusterPolicy, o.Operands, o.did = now, c.operandsOf(now), nil
		if err := c.observeClusterPolicy(ctx, o); err != nil {
			return false, err
		}
	}
}

// patch changes an object from have to want by one merge patch, unless they are the same. It fails if another
// controller changed the object meanwhile, for what they changed may be what is to be recorded.
func (c *Configurer) patch(ctx context.Context, have, want *unstructured.Unstructured) (bool, error) {
	diff, err := client.MergeFrom(have).Data(want)
	if err != nil {
		return false, fmt.Errorf("comparing %s %s: %w", have.GetKind(), have.GetName(), err)
	}
	if string(diff) == "{}" {
		return false, nil
	}
	patch := client.MergeFromWithOptions(have, client.MergeFromWithOptimisticLock{})
	tolerates := want.GetAnnotations()[v1alpha1.AnnotationTolerations] != "" && clusterpolicy.OperandsOf(have).Taken == ""
	if err := c.client.Patch(ctx, want, patch, client.FieldOwner(fieldManager)); err != nil {
		return false, fmt.Errorf("patching %s %s: %w", have.GetKind(), have.GetName(), err)
	}
	if c.removals.generation = 0; tolerates { // a webhook may have removed them from this very write
		c.removals.generation = want.GetGeneration()
	}
	return true, nil
}
