// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package history

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// What clusters have in which advice and import must harm nobody. Two worlds play them: values alone in internal/cli, thousands in seconds, and
// the real controllers of test/cluster.

// Pick is one of several values.
func Pick[T any](r *rand.Rand, all ...T) T { return all[r.IntN(len(all))] }

// Maybe is true every other time.
func Maybe(r *rand.Rand) bool { return r.IntN(2) == 0 }

// AnySharing is a way to share that the API takes.
func AnySharing(r *rand.Rand) v1alpha1.Sharing {
	advertise := &v1alpha1.Advertise{RenameByDefault: new(Maybe(r)), FailRequestsGreaterThanOne: new(Maybe(r))}
	replicas := int32(2 + r.IntN(7))
	switch r.IntN(5) {
	case 0:
		return v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}
	case 1:
		advertise.FailRequestsGreaterThanOne = nil
		return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: replicas}, Advertise: advertise}
	case 2:
		s := v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
			ResourceNames: Pick(r, v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGResourceNamesUniform),
			Layouts:       []v1alpha1.MIGLayout{{Fill: Pick[v1alpha1.MIGProfile](r, "1g", "2g", "3g")}},
		}}
		if Maybe(r) {
			s.MIG.Layouts[0].Replicas, s.Advertise = replicas, advertise
		}
		return s
	}
	s := v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: replicas}, Advertise: advertise}
	if Maybe(r) {
		s.TimeSlicing.Memory = &v1alpha1.TimeSlicedMemory{Guard: v1alpha1.MemoryGuard{Mode: v1alpha1.MemoryGuardEvict, FreeBelowPercent: int32(1 + r.IntN(50))}}
	}
	return s
}

// PluginConfig is a configuration that NVIDIA's device plugin may be given, in one of the forms in which people write it.
func PluginConfig(r *rand.Rand) string {
	resources := []string{}
	for _, name := range []string{"nvidia.com/gpu", "gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.20gb"} {
		if r.IntN(3) == 0 {
			resources = append(resources, fmt.Sprintf("{name: %s, replicas: %d%s}", name, Pick(r, 1, 2, 3, 4, 10, 48, 49, 256, 257),
				Pick(r, "", "", ", rename: mine", ", devices: all", ", devices: [0]", ", Replicas: 7")))
		}
	}
	shared := fmt.Sprintf("{%s: %t, %s: %t, resources: [%s]}", Pick(r, "renameByDefault", "renameByDefault", "RenameByDefault"), Maybe(r),
		Pick(r, "failRequestsGreaterThanOne", "failrequestsgreaterthanone"), Maybe(r), strings.Join(resources, ", "))
	sharing := Pick(r, "timeSlicing: ", "timeslicing: ", "timeSlicing: ", "mps: ", "MPS: ") + shared
	if r.IntN(8) == 0 {
		sharing += ", mps: {resources: [{name: nvidia.com/gpu, replicas: 3}]}"
	}
	return Pick(r, "version: v1\n", "version: v1\n", "", "Version: v1\n", "version: v2\n") +
		Pick(r, "", "flags: {migStrategy: mixed}\n", "flags: {MigStrategy: mixed}\n", "flags: {migStrategy: single, failOnInitError: false}\n", "flags: {migStrategy: none}\n") +
		Pick(r, "sharing: {", "Sharing: {") + sharing + "}\n"
}

// Layout is how often a person has each of these profiles on a GPU; it may not fit.
func Layout(r *rand.Rand, profiles []string) map[string]int {
	layout := map[string]int{}
	for range r.IntN(5) {
		layout[Pick(r, profiles...)]++
	}
	return layout
}
