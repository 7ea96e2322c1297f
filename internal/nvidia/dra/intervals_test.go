// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// configured is the class of whole GPUs with a config: a list in YAML.
func configured(t *testing.T, config string) dra.Class {
	t.Helper()
	object := &unstructured.Unstructured{}
	text := "{metadata: {name: gpu.nvidia.com}, spec: {extendedResourceName: nvidia.com/gpu, config: " + config + "}}"
	NewWithT(t).Expect(yaml.Unmarshal([]byte(text), &object.Object)).To(Succeed())
	return dra.ClassOf(object)
}

// of is a config for a driver.
func of(driver, parameters string) string {
	return "{opaque: {driver: " + driver + ", parameters: {apiVersion: resource.nvidia.com/v1beta1, " + parameters + "}}}"
}

func TestTheTimeSliceOfAClass(t *testing.T) {
	slice := func(interval string) string {
		return of("gpu.nvidia.com", "kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: "+interval+"}}")
	}
	for name, c := range map[string]struct {
		config   string
		interval string
		problem  string // of a policy that needs Medium; empty: none
	}{
		"the one":                     {"[" + slice("Medium") + "]", "Medium", ""},
		"another":                     {"[" + slice("Long") + "]", "Long", "DeviceClass gpu.nvidia.com gives GPUs time slice Long by its config, and policy p needs Medium"},
		"none":                        {"[]", "", "gives GPUs no time slice by its config"},
		"the last of two":             {"[" + slice("Long") + ", " + slice("Medium") + "]", "Medium", ""},
		"the driver's default":        {"[" + of("gpu.nvidia.com", "kind: GpuConfig, sharing: {strategy: TimeSlicing}") + "]", "Default", "time slice Default"},
		"MPS":                         {"[" + of("gpu.nvidia.com", "kind: GpuConfig, sharing: {strategy: MPS}") + "]", "", "sharing strategy MPS"},
		"a config without sharing":    {"[" + of("gpu.nvidia.com", "kind: GpuConfig") + "]", "", "no time slice"},
		"that of another driver":      {"[" + of("example.com", "kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Medium}}") + "]", "", "no time slice"},
		"that of MIG instances":       {"[" + of("gpu.nvidia.com", "kind: MigDeviceConfig, sharing: {strategy: TimeSlicing}") + "]", "", "no time slice"},
		"of another API than known":   {"[{opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: example.com/v1, kind: GpuConfig, sharing: {strategy: MPS}}}}]", "", "no time slice"},
		"what is no config of a kind": {"[{opaque: 5}, 7]", "", "no time slice"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			class := configured(t, c.config)
			g.Expect(class.Interval).To(Equal(c.interval))
			problem := dra.IntervalProblem([]dra.Class{class}, v1alpha1.TimeSliceIntervalMedium, "p", "")
			if c.problem == "" {
				g.Expect(problem).To(BeZero())
				return
			}
			g.Expect(problem.Reason).To(Equal(v1alpha1.ReasonDRAIntervalDiffers))
			g.Expect(problem.Message).To(And(ContainSubstring(c.problem), HaveSuffix(", and policy p needs Medium. First drain the pods that use GPUs, or others hang. "+
				"Then set it there (docs/dra.md), or remove timeSlicing.interval")))
		})
	}
}

func TestWhenNoTimeSliceIsCompared(t *testing.T) {
	g := NewWithT(t)
	none := configured(t, "[]")
	g.Expect(dra.IntervalProblem([]dra.Class{none}, "", "p", "nvidia-dra/p")).To(BeZero(), "the policy names none")
	g.Expect(dra.IntervalProblem(nil, v1alpha1.TimeSliceIntervalLong, "p", "")).To(BeZero(), "no class offers GPUs, which is a problem of its own")
	unread := none
	unread.Unread = true
	g.Expect(dra.IntervalProblem([]dra.Class{unread}, v1alpha1.TimeSliceIntervalLong, "p", "")).To(BeZero(), "the user may not read it")
	g.Expect(dra.IntervalProblem([]dra.Class{none}, v1alpha1.TimeSliceIntervalLong, "p", "nvidia-dra/plugin-x").Message).To(And(
		ContainSubstring("feature gate TimeSlicingSettings of NVIDIA's DRA driver is off (pod nvidia-dra/plugin-x)"),
		ContainSubstring("featureGates.TimeSlicingSettings=true")), "first the gate: without it a class with a config lets no pod start")
}
