// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// TestASampleThatTookTooLongClosesTheDriver when it returns at last: its caller could not.
func TestASampleThatTookTooLongClosesTheDriver(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.A100)
	g.Expect(driver(t).AddFault(simdriver.Fault{Call: "nvmlDeviceGetHandleByIndex", Hang: time.Second, Times: 1})).To(Succeed())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := h.Sample(ctx)
	g.Expect(err).To(MatchError(context.DeadlineExceeded))
	g.Expect(h.Close()).To(MatchError(gpu.ErrBusy))
	g.Eventually(driver(t).UnloadModule).WithTimeout(10 * time.Second).WithPolling(100 * time.Millisecond).Should(Succeed())
}
