// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// topInterval is how often top --watch measures.
const topInterval = 5 * time.Second

// top prints who uses the GPUs: of each node, or as a table of policies or pods.
func (p *Program) top(ctx context.Context, f *flags, args []string) error {
	of := "node"
	if len(args) > 0 {
		of, args = args[0], args[1:]
	}
	if !slices.Contains([]string{"node", "policy", "pod"}, of) {
		return hint(fmt.Errorf("top prints node, policy or pod, not %q", of))
	}
	agents, err := dial(f)
	if err != nil {
		return err
	}
	for {
		measured, err := agents.measure(ctx, p.Clock.Now())
		if f.watch && errors.Is(ctx.Err(), context.Canceled) {
			return nil // the user ends a watch so
		}
		if err != nil {
			return advise(err)
		}
		shown := text{width: p.Width}
		if f.watch && p.Width > 0 {
			shown.WriteString("\x1b[H\x1b[2J") // a terminal: home, and clear
		}
		if err := shown.top(of, measured, args); err != nil {
			return err
		}
		if err := p.write(shown.String()); err != nil || !f.watch {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.Clock.After(topInterval):
		}
	}
}
