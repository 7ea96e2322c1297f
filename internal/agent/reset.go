// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// smiTimeout bounds a run of nvidia-smi, the longest of which resets GPUs, which takes seconds.
const smiTimeout = 2 * time.Minute

// SMI runs the nvidia-smi of the driver that is there now and returns what it printed. What it says of a failure is
// part of the error. The program runs in the driver's own root, where it reaches nvidia-persistenced and the fabric
// manager.
func SMI(runner host.Runner, find func() (driver.Driver, error)) func(ctx context.Context, args ...string) (string, error) {
	return func(ctx context.Context, args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, smiTimeout)
		defer cancel()
		found, err := find()
		if err != nil {
			return "", err
		}
		command, err := found.Inside("nvidia-smi", args...)
		if err != nil {
			return "", err
		}
		return runner.Run(ctx, command)
	}
}
