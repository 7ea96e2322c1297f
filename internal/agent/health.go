// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/http"
	"sync"
)

// health is how the last reconcile went as far as the agent itself is concerned: whether it could read the node and
// report.
type health struct {
	mu   sync.Mutex
	last error
}

func (h *health) set(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = err
}

func (h *health) get() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// Ready is a readiness check: the node counts as reporting while it passes. A step that failed is not the agent's
// illness and does not count.
func (c *Controller) Ready(*http.Request) error {
	if err := c.health.get(); err != nil {
		return fmt.Errorf("the last reconcile could not read the node or report: %w", err)
	}
	return nil
}
