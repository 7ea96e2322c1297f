// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterpolicy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// FieldManager is the one with which the operator changes a ClusterPolicy.
const FieldManager = "gpusharing-controller"

func tolerationsPath() []string { return []string{"spec", "daemonsets", "tolerations"} }

func recordPath() []string {
	return []string{"metadata", "annotations", v1alpha1.AnnotationTolerations}
}

// byDefault is what NVIDIA's DaemonSets tolerate while the ClusterPolicy says nothing (assets/*/*_daemonset.yaml;
// controllers/object_controls.go: applyCommonDaemonsetConfig replaces it by a list that is not empty).
func byDefault() []corev1.Toleration {
	return []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
}

// record is the annotation that tells our tolerations from the user's. It is written in one patch with them.
type record struct {
	Added []corev1.Toleration `json:"added"`
	// Found says how the list held nothing before us, if it did: NVIDIA's own default was in force then, and has to be
	// repeated beside ours.
	Found string `json:"found,omitempty"`
}

// How a list holds nothing.
const (
	absent = "absent"
	empty  = "empty"
)

// recorded is what is ours of the list; lost: another client has removed it, or a webhook some of it.
func recorded(policy *unstructured.Unstructured) (r record, lost bool) {
	encoded := policy.GetAnnotations()[v1alpha1.AnnotationTolerations]
	if encoded == "" || taken(policy) != "" {
		return record{}, false
	}
	have, err := tolerations(policy), json.Unmarshal([]byte(encoded), &r)
	if err != nil {
		return record{}, true
	}
	added := len(r.Added)
	r.Added = slices.DeleteFunc(r.Added, func(t corev1.Toleration) bool { return !Among(have, t) })
	if len(r.Added) == 0 {
		return record{}, added > 0
	}
	return r, len(r.Added) < added
}

// taken is the field manager that has written the list since we added to it: all of it is theirs then. Lists
// that have one author only belong to who wrote them last.
func taken(policy *unstructured.Unstructured) (manager string) {
	if policy.GetAnnotations()[v1alpha1.AnnotationTolerations] == "" {
		return ""
	}
	for _, entry := range policy.GetManagedFields() {
		switch {
		case !Owns(entry, tolerationsPath()):
		case entry.Manager == FieldManager:
			return ""
		default:
			manager = entry.Manager
		}
	}
	return manager
}

// Owns reports whether a field manager owns one of these fields.
func Owns(entry metav1.ManagedFieldsEntry, paths ...[]string) bool {
	set := &fieldpath.Set{}
	if entry.FieldsV1 == nil || set.FromJSON(entry.FieldsV1.GetRawReader()) != nil {
		return false
	}
	return slices.ContainsFunc(paths, func(path []string) bool {
		parts := make([]any, len(path))
		for i, name := range path {
			parts[i] = name
		}
		return set.Has(fieldpath.MakePathOrDie(parts...))
	})
}

// tolerations are those that a ClusterPolicy lists. What the API server would not have taken counts as none.
func tolerations(policy *unstructured.Unstructured) []corev1.Toleration {
	list, _, _ := unstructured.NestedSlice(policy.Object, tolerationsPath()...)
	var all []corev1.Toleration
	for _, entry := range list {
		fields, isMap := entry.(map[string]any)
		var t corev1.Toleration
		if !isMap || runtime.DefaultUnstructuredConverter.FromUnstructured(fields, &t) != nil {
			return nil
		}
		all = append(all, t)
	}
	return all
}

// WithTolerations is the ClusterPolicy with exactly these tolerations of ours beside the user's. Without any it is as
// it was before us, but for what the user has changed since.
func WithTolerations(policy *unstructured.Unstructured, ours []corev1.Toleration) (*unstructured.Unstructured, error) {
	p := policy.DeepCopy()
	r, _ := recorded(policy)
	users := slices.DeleteFunc(tolerations(policy), func(t corev1.Toleration) bool { return Among(r.Added, t) })
	if r.Found != "" && slices.EqualFunc(users, byDefault(), same) {
		users = nil // repeated by us, not said by the user
	}
	if len(ours) == 0 {
		return p, restore(p, r, users)
	}
	all := users
	if len(users) > 0 {
		r.Found = ""
	} else {
		all = byDefault()
		r.Found = cmp.Or(r.Found, emptiness(policy))
	}
	r.Added = ours
	encoded, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("recording tolerations: %w", err)
	}
	if err := set(p, slices.Concat(all, ours)); err != nil {
		return nil, err
	}
	return p, unstructured.SetNestedField(p.Object, string(encoded), recordPath()...)
}

// emptiness is how the list of a ClusterPolicy holds nothing of the user's.
func emptiness(policy *unstructured.Unstructured) string {
	if _, listed, err := unstructured.NestedSlice(policy.Object, tolerationsPath()...); !listed || err != nil {
		return absent
	}
	return empty
}

func restore(p *unstructured.Unstructured, r record, users []corev1.Toleration) error {
	unstructured.RemoveNestedField(p.Object, recordPath()...)
	if len(r.Added) == 0 {
		return nil
	}
	if len(users) > 0 || r.Found == empty {
		return set(p, users)
	}
	unstructured.RemoveNestedField(p.Object, tolerationsPath()...) // daemonsets itself is a field that every ClusterPolicy has
	return nil
}

func set(p *unstructured.Unstructured, all []corev1.Toleration) error {
	list := []any{}
	for i := range all {
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&all[i])
		if err != nil {
			return fmt.Errorf("encoding a toleration: %w", err)
		}
		list = append(list, fields)
	}
	return unstructured.SetNestedSlice(p.Object, list, tolerationsPath()...)
}

// Among reports whether a toleration is one of these.
func Among(all []corev1.Toleration, t corev1.Toleration) bool {
	return slices.ContainsFunc(all, func(o corev1.Toleration) bool { return same(o, t) })
}

func same(a, b corev1.Toleration) bool { return a.MatchToleration(&b) }

// Tolerates reports whether one of the tolerations is for a taint, as the scheduler and the daemon-set controller see
// it. The operators that compare numbers are behind a feature gate and count as no match.
func Tolerates(all []corev1.Toleration, taint corev1.Taint) bool {
	return slices.ContainsFunc(all, func(t corev1.Toleration) bool {
		switch {
		case t.Effect != "" && t.Effect != taint.Effect, t.Key != "" && t.Key != taint.Key:
			return false
		case t.Operator == corev1.TolerationOpExists:
			return true
		}
		return (t.Operator == "" || t.Operator == corev1.TolerationOpEqual) && t.Key != "" && t.Value == taint.Value
	})
}
