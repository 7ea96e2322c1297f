// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

func TestSmoke(t *testing.T) {
	g := NewWithT(t)
	cache, err := simdriver.CacheDir()
	g.Expect(err).NotTo(HaveOccurred())
	programs, err := simdriver.Build(t.Context(), cache)
	g.Expect(err).NotTo(HaveOccurred())
	root := t.TempDir()
	d, err := simdriver.New(root, programs, simdriver.Times("n", sim.A100, 2))
	g.Expect(err).NotTo(HaveOccurred())
	lib, err := nvml.FindLibrary(root)
	g.Expect(err).NotTo(HaveOccurred())
	h := nvml.New(nvml.Options{Library: lib})
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	n, _ := d.Node()
	g.Expect(inv).To(Equal(n.Observe()))
	g.Expect(h.SetMIG(t.Context(), n.GPUs[0].UUID, true)).To(Succeed())
	g.Expect(h.CreateInstance(t.Context(), n.GPUs[0].UUID, "3g.20gb", gpu.Placement{Start: 4, Size: 4})).To(Succeed())
	inv, err = h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	n, _ = d.Node()
	g.Expect(inv).To(Equal(n.Observe()))
	g.Expect(h.Close()).To(Succeed())
}
