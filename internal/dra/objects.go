// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// ClassOf reads a DeviceClass.
func ClassOf(object *unstructured.Unstructured) Class {
	strategy, interval := sharingOf(object.Object)
	return Class{
		Name: object.GetName(), Resource: asString(asMap(object.Object["spec"])["extendedResourceName"]), Strategy: strategy, Interval: interval,
		Own: isOwn(object), Age: object.GetCreationTimestamp().Unix(),
	}
}

// isOwn reports whether an object has the label of the operator's.
func isOwn(object *unstructured.Unstructured) bool {
	return object.GetLabels()[v1alpha1.LabelManagedBy] == v1alpha1.ManagedByOperator
}

// RuleOf reads a DeviceTaintRule of the operator's: its node, and since when it taints the devices of it. ok is false if it is another's.
func RuleOf(object *unstructured.Unstructured) (node string, since time.Time, ok bool) {
	if node, ok = RuledNode(object.GetName()); !ok || !isOwn(object) {
		return "", time.Time{}, false
	}
	since = object.GetCreationTimestamp().Time
	taint := asMap(asMap(object.Object["spec"])["taint"])
	if added, err := time.Parse(time.RFC3339, asString(taint["timeAdded"])); err == nil {
		since = added
	}
	return node, since, true
}

// NewRule is the operator's DeviceTaintRule for a node: it keeps new pods off all devices of the node, and evicts none. The pool of a node
// has its name.
func NewRule(node string, since time.Time) *unstructured.Unstructured {
	return owned(RuleName(node), map[string]any{
		"deviceSelector": map[string]any{"driver": DriverName, "pool": node},
		"taint":          map[string]any{"key": v1alpha1.TaintChanging, "effect": "NoSchedule", "timeAdded": since.UTC().Format(time.RFC3339)},
	})
}

// NewClass is the operator's DeviceClass for a MIG profile.
func NewClass(w Write) *unstructured.Unstructured {
	return owned(w.Name, map[string]any{
		"extendedResourceName": w.Resource,
		"selectors":            []any{map[string]any{"cel": map[string]any{"expression": Selector(w.Profile)}}},
	})
}

func owned(name string, spec map[string]any) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	object.SetName(name)
	object.SetLabels(map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedByOperator})
	return object
}
