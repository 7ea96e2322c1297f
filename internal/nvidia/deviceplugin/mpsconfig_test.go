// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

func TestSameMPS(t *testing.T) {
	const four = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	for other, same := range map[string]bool{
		four: true,
		"sharing:\n  # of the user\n  mps: {renameByDefault: false, failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}\n": true,
		"sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 5}]}}":                                                                               false,
		"sharing: {mps: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}":                                                        false,
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}":                                                                       false,
		"sharing: [": false, "": false,
	} {
		NewWithT(t).Expect(deviceplugin.SameMPS(four, other)).To(Equal(same), other)
		NewWithT(t).Expect(deviceplugin.SameMPS(other, four)).To(Equal(same), other)
	}
}
