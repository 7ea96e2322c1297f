// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
)

// errNeverReported is the illness of an agent that has just started: what the GPUNode says is of the one before it.
var errNeverReported = errors.New("the agent has not reported since it started; if that lasts, look whether the node has a GPUNode")

// health is how the last reconcile went as far as the agent itself is concerned: whether it could read the node and
// report.
type health struct {
	mu       sync.Mutex
	reported bool // or has tried to
	last     error
}

func (h *health) set(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reported, h.last = true, err
}

func (h *health) get() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.reported {
		return errNeverReported
	}
	return h.last
}

// Ready is a readiness check: the node counts as reporting while it passes. A step that failed is not the agent's
// illness and does not count.
func (c *Controller) Ready(*http.Request) error {
	err := c.health.get()
	if err != nil && !errors.Is(err, errNeverReported) {
		return fmt.Errorf("the last reconcile could not read the node or report: %w", err)
	}
	return err
}
