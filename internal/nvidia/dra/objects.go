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
	spec := asMap(object.Object["spec"])
	strategy, interval := sharingOf(object.Object)
	c := Class{
		Name: object.GetName(), Resource: asString(spec["extendedResourceName"]), Strategy: strategy, Interval: interval,
		Own: isOwn(object), Age: object.GetCreationTimestamp().Unix(),
	}
	if !c.Own {
		return c
	}
	c.Beside = object.GetAnnotations()[v1alpha1.AnnotationBeside]
	if selectors := asList(spec["selectors"]); len(selectors) == 1 {
		c.Selector = asString(asMap(asMap(selectors[0])["cel"])["expression"])
	}
	for field, value := range spec {
		c.Configured = c.Configured || field != "selectors" && field != "extendedResourceName" && value != nil
	}
	return c
}

// SlimClass keeps of the spec of a DeviceClass what ClassOf reads.
func SlimClass(object *unstructured.Unstructured) map[string]any {
	spec := asMap(object.Object["spec"])
	if isOwn(object) {
		return spec
	}
	return map[string]any{"extendedResourceName": spec["extendedResourceName"], "config": spec["config"]}
}

// isOwn reports whether an object has the label of the operator's.
func isOwn(object *unstructured.Unstructured) bool {
	return object.GetLabels()[v1alpha1.LabelManagedBy] == v1alpha1.ManagedByOperator
}

// TaintRuleOf reads a DeviceTaintRule of the operator's: its node, and since when it taints the devices of it. ok is
// false if it is another's, or if another controller edited it so that it does not taint all devices of the node any
// more (EditedTaintRule).
func TaintRuleOf(object *unstructured.Unstructured) (node string, since time.Time, ok bool) {
	if node, ok = taintRuleOfOurs(object); !ok || !taintsAll(object, node) {
		return "", time.Time{}, false
	}
	since = object.GetCreationTimestamp().Time
	taint := asMap(asMap(object.Object["spec"])["taint"])
	if added, err := time.Parse(time.RFC3339, asString(taint["timeAdded"])); err == nil {
		since = added
	}
	return node, since, true
}

// EditedTaintRule is the node of a DeviceTaintRule of the operator's that does not taint all devices of the node,
// because another controller edited it; ok is false if the rule is another's, or whole.
func EditedTaintRule(object *unstructured.Unstructured) (node string, ok bool) {
	node, ok = taintRuleOfOurs(object)
	return node, ok && !taintsAll(object, node)
}

func taintRuleOfOurs(object *unstructured.Unstructured) (node string, ok bool) {
	node, ok = TaintRuleNode(object.GetName())
	return node, ok && isOwn(object)
}

// taintsAll reports whether a DeviceTaintRule keeps new pods off all devices of a node, as NewTaintRule does.
func taintsAll(object *unstructured.Unstructured, node string) bool {
	spec := asMap(object.Object["spec"])
	taint, selector := asMap(spec["taint"]), asMap(spec["deviceSelector"])
	for field, value := range selector {
		if field != "driver" && field != "pool" && value != nil {
			return false // it narrows them
		}
	}
	return asString(taint["key"]) == v1alpha1.TaintChanging && asString(taint["effect"]) == "NoSchedule" &&
		asString(selector["driver"]) == DriverName && asString(selector["pool"]) == node
}

// NewTaintRule is the operator's DeviceTaintRule for a node: it keeps new pods off all devices of the node, and evicts
// none. The pool of a node has its name.
func NewTaintRule(node string, since time.Time) *unstructured.Unstructured {
	return owned(TaintRuleName(node), map[string]any{
		"deviceSelector": map[string]any{"driver": DriverName, "pool": node},
		"taint":          map[string]any{"key": v1alpha1.TaintChanging, "effect": "NoSchedule", "timeAdded": since.UTC().Format(time.RFC3339)},
	})
}

// NewClass is a DeviceClass of the operator's.
func NewClass(w Write) *unstructured.Unstructured {
	class := owned(w.Name, map[string]any{
		"extendedResourceName": w.Resource,
		"selectors":            []any{map[string]any{"cel": map[string]any{"expression": w.Selector}}},
	})
	if w.Beside != "" {
		class.SetAnnotations(map[string]string{v1alpha1.AnnotationBeside: w.Beside})
	}
	return class
}

func owned(name string, spec map[string]any) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	object.SetName(name)
	object.SetLabels(map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedByOperator})
	return object
}
