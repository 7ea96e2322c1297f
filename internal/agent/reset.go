// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/host"
)

// resetTimeout bounds the reset of one GPU, which takes seconds.
const resetTimeout = 2 * time.Minute

// Reset resets a GPU by its PCI address with nvidia-smi, for NVML has no call for it. What nvidia-smi says is part of the
// error.
func Reset(runner host.Runner, driver host.DriverRoot) func(ctx context.Context, pciBusID string) error {
	return func(ctx context.Context, pciBusID string) error {
		ctx, cancel := context.WithTimeout(ctx, resetTimeout)
		defer cancel()
		_, err := runner.Run(ctx, host.Command{
			Path: driver.Program("nvidia-smi"), Args: []string{"--gpu-reset", "-i", pciBusID}, Env: driver.Env(),
		})
		return err
	}
}
