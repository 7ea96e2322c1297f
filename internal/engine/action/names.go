// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package action

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// SetsSpec reports whether an action writes GPUNode.spec.
func SetsSpec(a Action) bool {
	_, is := a.(SetSpec)
	return is
}

// KeepsOff reports whether an action keeps new pods off the GPUs of a node.
func KeepsOff(a Action) bool {
	switch a.(type) {
	case Taint, TaintDevices:
		return true
	}
	return false
}

// OverrideName is the name of the operator's NodeFeature for a node. NFD reads the objects outside its own namespace in
// the order of their names, and a later one overwrites an earlier one (NFD pkg/nfd-master/nfd-master.go). So the name
// must sort after nvidia-features-for-<node> of GFD.
func OverrideName(node string) string { return "zz-gpu-sharing-" + node }

// NameOf is what tells a taint from the others of a node: its key and effect.
func NameOf(t corev1.Taint) string { return t.Key + ":" + string(t.Effect) }

// WithValue is a taint as kubectl writes it.
func WithValue(t corev1.Taint) string {
	if t.Value == "" {
		return NameOf(t)
	}
	return fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect)
}

// Names lists taints as kubectl writes them.
func Names(taints []corev1.Taint) []string {
	var all []string
	for _, t := range taints {
		all = append(all, WithValue(t))
	}
	return all
}
