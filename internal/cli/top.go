// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
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
	for printed := ""; ; {
		measured, err := agents.measure(ctx, p.Clock.Now())
		if f.watch && errors.Is(ctx.Err(), context.Canceled) {
			return nil // the user ends a watch so
		}
		if err != nil {
			return advise(err)
		}
		shown, err := p.topAs(f, of, measured, args)
		if err != nil {
			return err
		}
		if f.output != "" {
			shown = separator(printed, f.output) + shown
		}
		if err := p.write(shown); err != nil || !f.watch {
			return err
		}
		printed = shown
		select {
		case <-ctx.Done():
			return nil
		case <-p.Clock.After(topInterval):
		}
	}
}

// topAs is what top prints of what was measured: all, or what has one of some names.
func (p *Program) topAs(f *flags, of string, measured []measuredNode, names []string) (string, error) {
	chosen, err := choose(of, measured, names)
	if err != nil {
		return "", err
	}
	if f.output != "" {
		return usageReport(chosen, f.output)
	}
	shown := text{width: p.Width}
	if f.watch && p.Width > 0 {
		shown.WriteString("\x1b[H\x1b[2J") // a terminal: home, and clear
	}
	shown.top(of, chosen)
	return shown.String(), nil
}

// choose returns the part of what was measured that has one of some names, or may have one; without names all. It is an
// error if a name is not measured.
func choose(of string, measured []measuredNode, names []string) ([]measuredNode, error) {
	if len(names) == 0 {
		return measured, nil
	}
	for _, name := range names {
		if !slices.ContainsFunc(measured, func(n measuredNode) bool { return n.has(of, name) }) {
			return nil, fmt.Errorf("no GPU is measured for %s %q; `kubectl gpusharing top` lists them all", of, name)
		}
	}
	var chosen []measuredNode
	for _, n := range measured {
		has := slices.ContainsFunc(names, func(name string) bool { return n.has(of, name) })
		unknown := of != "node" && n.failed != ""
		if of == "pod" {
			n.report.Units = unitsWith(n.report.Units, names)
			unknown = unknown || n.report.Incomplete != ""
		}
		if has || unknown {
			chosen = append(chosen, n)
		}
	}
	return chosen, nil
}

// unitsWith are the units on which containers of some pods are, with only these containers.
func unitsWith(all []usage.Unit, pods []string) (units []usage.Unit) {
	for _, u := range all {
		u.Containers = slices.DeleteFunc(slices.Clone(u.Containers), func(c usage.Container) bool { return !slices.Contains(pods, c.Pod) })
		if len(u.Containers) > 0 {
			units = append(units, u)
		}
	}
	return units
}

// usageReport is what was measured as JSON or YAML.
func usageReport(measured []measuredNode, output string) (string, error) {
	type node struct {
		usage.Report

		// NotMeasured is why there is no measurement of the node; empty: there is.
		NotMeasured string `json:"notMeasured,omitempty"`
	}
	report := struct {
		Nodes []node `json:"nodes"`
	}{Nodes: []node{}}
	for _, n := range measured {
		n.report.Node = n.name // an agent speaks for no other node
		if n.report.Units == nil {
			n.report.Units = []usage.Unit{}
		}
		report.Nodes = append(report.Nodes, node{n.report, n.failed})
	}
	return marshal(report, output)
}
