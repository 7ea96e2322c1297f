// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build hardware

package nvml_test

import (
	"encoding/json"
	"testing"

	. "github.com/onsi/gomega"

	drivers "github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/gputest"
)

// The contract's cases that only read, on the GPUs of this machine:
//
//	go test -tags hardware -run TestContractOnRealGPUs -v ./internal/agent/nvml
//
// What it logs belongs into docs/dev/hardware.md.
func TestContractOnRealGPUs(t *testing.T) {
	g := NewWithT(t)
	library, err := drivers.Node{Host: "/"}.Library("/")
	g.Expect(err).NotTo(HaveOccurred())
	h := nvml.New(nvml.Options{Library: library})
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	seen, err := json.MarshalIndent(inv, "", "  ")
	g.Expect(err).NotTo(HaveOccurred())
	t.Logf("%s", seen)
	gputest.Contract(t, func(*testing.T, ...string) gputest.Fixture { return gputest.Fixture{Hardware: h} })
}
