// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func TestProductLabel(t *testing.T) {
	for name, label := range map[string]string{
		"NVIDIA A100-SXM4-40GB":    "NVIDIA-A100-SXM4-40GB",
		"Tesla T4":                 "Tesla-T4",
		"NVIDIA H100 80GB HBM3":    "NVIDIA-H100-80GB-HBM3",
		"NVIDIA B300 SXM6 AC ":     "NVIDIA-B300-SXM6-AC",
		"NVIDIA  RTX (6000) Ada™":  "NVIDIA-RTX-6000-Ada",
		"NVIDIA GH200 144G_HBM.3e": "NVIDIA-GH200-144G_HBM.3e",
		"":                         "",
	} {
		NewWithT(t).Expect(gpu.ProductLabel(name)).To(Equal(label), name)
	}
}

func TestAGPUIsNamedAsNvidiaSMIShowsIt(t *testing.T) {
	d := gpu.Device{Index: 3, Product: "NVIDIA A30", UUID: "GPU-5f"}
	NewWithT(t).Expect(d.String()).To(Equal("GPU 3 (NVIDIA-A30)"))
}
