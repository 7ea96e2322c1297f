// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
)

// errSharedMemory says that clients to come cannot connect. NVIDIA's MPS DaemonSet mounts other shared memory when it
// starts, and the mounts of a container never change.
var errSharedMemory = errors.New("another program replaced the shared memory of MPS, as NVIDIA's MPS DaemonSet does when it starts, " +
	"so that new clients cannot reach the daemons")

// endAll ends all daemons, if no client is connected to any. Their records stay, so that the next process starts them
// again. A daemon that does not answer names no clients: it counts as used while a pod has its pipe directory.
func (h *Host) endAll(ctx context.Context) error {
	resources, err := h.files.resources(recordName)
	if err != nil {
		return err
	}
	recorded := make([]record, 0, len(resources))
	for _, resource := range resources {
		was, found, err := h.files.record(resource)
		if err != nil {
			return err
		}
		if !found {
			continue
		}
		recorded = append(recorded, was)
		servers, err := h.control.Servers(ctx, resource)
		if err != nil {
			err = h.daemons.endUnreachable(ctx, was)
		} else if clients := connected(servers); len(clients) > 0 {
			err = fmt.Errorf("client %d of %s: %w", clients[0], resource, errInUse)
		}
		if err != nil {
			return err
		}
	}
	var errs []error
	for _, was := range recorded {
		errs = append(errs, h.daemons.quit(ctx, was))
	}
	return errors.Join(errs...)
}
