// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package history

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// Others returns the labels and annotations that the operator writes to a Node, and the values that another controller
// may give each; an empty value removes it.
func Others() map[string][]string {
	return map[string][]string{
		v1alpha1.LabelConfig:         {"", "theirs"},
		v1alpha1.LabelMIGManager:     {"", "true", "false"},
		v1alpha1.LabelMIGConfig:      {"", "all-1g.5gb", "all-disabled"},
		v1alpha1.LabelMIGConfigState: {"", "success", "failed", "pending"},
		v1alpha1.LabelRunsAgent:      {"", "true", "false"},
		v1alpha1.LabelOverridden:     {"", "true"},

		"nvidia.com/gpu.deploy.device-plugin":         {"", "true"},
		"nvidia.com/gpu.deploy.gpu-feature-discovery": {"", "true"},
		"nvidia.com/mps.capable":                      {"", "true", "false"},

		v1alpha1.AnnotationSelected: {"", "garbage"}, v1alpha1.AnnotationInstances: {"", "garbage"}, v1alpha1.AnnotationStopped: {""},
		v1alpha1.AnnotationTaints: {""}, v1alpha1.AnnotationMPSCapable: {""}, v1alpha1.AnnotationMIGConfig: {"", "garbage"},
		v1alpha1.AnnotationOverruled: {""}, v1alpha1.AnnotationRunsAgent: {""}, v1alpha1.AnnotationInterrupted: {"", "garbage"},
	}
}

// Other is one of Others.
func Other(random *rand.Rand) (name, value string) {
	all := Others()
	names := slices.SortedFunc(maps.Keys(all), func(a, b string) int { return strings.Compare(drawnAs(a), drawnAs(b)) })
	name = names[random.IntN(len(names))]
	return name, all[name][random.IntN(len(all[name]))]
}

// drawnAs is the name by which a label or annotation is drawn. The recorded histories are from a time when
// v1alpha1.AnnotationStopped was called paused.
func drawnAs(name string) string {
	if name == v1alpha1.AnnotationStopped {
		return v1alpha1.Group + "/paused"
	}
	return name
}
