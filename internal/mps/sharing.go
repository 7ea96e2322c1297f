// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
)

// errSharedMemory says that clients to come cannot connect. NVIDIA's MPS DaemonSet mounts other shared memory when it starts,
// and the mounts of a container never change.
var errSharedMemory = errors.New("another program replaced the shared memory of MPS, as NVIDIA's MPS DaemonSet does when it starts, " +
	"so that new clients cannot reach the daemons")

// giveUp ends all daemons, if no client is connected to any. Their records stay, so that the next process starts them again.
func (h *Host) giveUp(ctx context.Context) error {
	resources, err := h.files.resources(recordName)
	if err != nil {
		return err
	}
	for _, resource := range resources {
		servers, err := h.control.Servers(ctx, resource)
		if err != nil {
			continue // it does not answer, so that nobody can connect
		}
		for _, s := range servers {
			if len(s.Clients) > 0 {
				return fmt.Errorf("process %d for %s: %w", s.PID, resource, errInUse)
			}
		}
	}
	var errs []error
	for _, resource := range resources {
		errs = append(errs, h.control.Quit(ctx, resource))
	}
	return errors.Join(errs...)
}
