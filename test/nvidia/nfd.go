// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import (
	"cmp"
	"maps"
	"slices"
)

// NodeFeature is an object by which its author asks Node Feature Discovery (NFD) for labels of a node.
type NodeFeature struct {
	Namespace, Name string
	Labels          map[string]string
}

// MergeFeatures makes one set of labels of all NodeFeatures of a node, as nfd-master in a namespace does: those of its
// own namespace first, then by name, then by namespace. A later one overwrites an earlier one (NFD v0.19.0
// pkg/nfd-master/nfd-master.go, getAndMergeNodeFeatures).
func MergeFeatures(features []NodeFeature, namespace string) map[string]string {
	foreign := func(f NodeFeature) int {
		if f.Namespace == namespace {
			return 0
		}
		return 1
	}
	slices.SortFunc(features, func(a, b NodeFeature) int {
		return cmp.Or(foreign(a)-foreign(b), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Namespace, b.Namespace))
	})
	labels := map[string]string{}
	for _, f := range features {
		maps.Copy(labels, f.Labels)
	}
	return labels
}

// FeatureLabels are the labels of a node that nfd-master then changes; nil removes one. What it has set before and no
// object names any more goes.
func FeatureLabels(have map[string]string, before map[string]bool, want map[string]string) map[string]*string {
	change := map[string]*string{}
	for name, set := range before {
		_, wanted := want[name]
		if _, has := have[name]; set && has && !wanted {
			change[name] = nil
		}
	}
	for name, value := range want {
		if is, has := have[name]; !has || is != value {
			change[name] = &value
		}
	}
	return change
}
