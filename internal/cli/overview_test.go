// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestNoPolicyIsNotEverythingRestored: a node can wait for its pods long after its policy was deleted.
func TestNoPolicyIsNotEverythingRestored(t *testing.T) {
	g := NewWithT(t)
	restored, waiting := ready(newNode(t, "a", sim.T4)), newNode(t, "b", sim.T4)
	g.Expect(sight{snapshot: snapshotOf(restored)}.page().NoPolicy).To(Equal("There is no GPUSharingPolicy: all GPUs are in their former state."))
	waiting.GPU.Spec.PolicyName = "gone"
	g.Expect(sight{snapshot: snapshotOf(restored, waiting)}.page().NoPolicy).To(Equal("There is no GPUSharingPolicy any more; not restored yet: 1 node."))
}

func TestEqualStepsAreOneLine(t *testing.T) {
	g := NewWithT(t)
	g.Expect(brief([]string{
		"GPU 0 (NVIDIA-A30): destroy 2g.12gb at 0:2", "GPU 0 (NVIDIA-A30): create 1g.6gb at 0:1", "GPU 0 (NVIDIA-A30): create 1g.6gb at 1:1",
		"GPU 1 (NVIDIA-A30): create 1g.6gb at 0:1", "device plugin: select configuration x", "device plugin: select configuration x",
	})).To(Equal([]string{
		"GPU 0 (NVIDIA-A30): destroy 2g.12gb at 0:2", "GPU 0 (NVIDIA-A30): create 2 × 1g.6gb", "GPU 1 (NVIDIA-A30): create 1g.6gb at 0:1",
		"device plugin: select configuration x",
	}))
}
