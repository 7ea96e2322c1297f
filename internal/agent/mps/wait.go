// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"fmt"
	"time"

	"k8s.io/utils/clock"
)

// pace is how often something is looked at, and for how long at most.
type pace struct{ every, atMost time.Duration }

// poll looks until done says so. Once the time is over or the context has ended, the error is that and the last one of
// done, which tells why it never was.
func (p pace) poll(ctx context.Context, clk clock.Clock, done func() (bool, error)) error {
	deadline := clk.Now().Add(p.atMost)
	for {
		ok, err := done()
		if ok {
			return nil
		}
		if !clk.Now().Before(deadline) {
			return because(fmt.Errorf("waited %s", p.atMost), err)
		}
		select {
		case <-ctx.Done():
			return because(context.Cause(ctx), err)
		case <-clk.After(p.every):
		}
	}
}

// because adds the last reason to the end of a wait, if there is one.
func because(end, last error) error {
	if last == nil {
		return end
	}
	return fmt.Errorf("%w: %w", end, last)
}
