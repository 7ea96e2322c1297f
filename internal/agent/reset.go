// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/host"
)

// smiTimeout bounds a run of nvidia-smi, the longest of which resets GPUs, which takes seconds.
const smiTimeout = 2 * time.Minute

// SMI runs the driver's nvidia-smi and returns what it printed. What it says of a failure is part of the error.
func SMI(runner host.Runner, driver host.DriverRoot) func(ctx context.Context, args ...string) (string, error) {
	return func(ctx context.Context, args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, smiTimeout)
		defer cancel()
		return runner.Run(ctx, host.Command{Path: driver.Program("nvidia-smi"), Args: args, Env: driver.Env()})
	}
}
