// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/host"
)

// resetTimeout bounds the reset of one GPU, which takes seconds.
const resetTimeout = 2 * time.Minute

// Reset resets a GPU by its PCI address with nvidia-smi, for NVML has no call for it. nvidia-smi says on stdout why it
// could not, so that is part of the error.
func Reset(runner host.Runner, driver host.DriverRoot) func(ctx context.Context, pciBusID string) error {
	return func(ctx context.Context, pciBusID string) error {
		ctx, cancel := context.WithTimeout(ctx, resetTimeout)
		defer cancel()
		stdout, err := runner.Run(ctx, host.Command{
			Path: driver.Program("nvidia-smi"), Args: []string{"--gpu-reset", "-i", pciBusID}, Env: driver.Env(),
		})
		if err != nil {
			return fmt.Errorf("%w: %s", err, strings.Join(strings.Fields(stdout), " "))
		}
		return nil
	}
}
