// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// config is the part of the plugin's configuration that is written here.
type config struct {
	migStrategy string
	sharing     string // timeSlicing, mps or empty
	rename      bool   // renameByDefault
	failMany    bool   // failRequestsGreaterThanOne
	replicas    map[string]int32
}

// document is the configuration that a sharing asks for.
func document(s v1alpha1.Sharing, n Node) (config, error) {
	switch s.Strategy {
	case v1alpha1.StrategyTimeSlicing:
		return config{
			migStrategy: migNone,
			sharing:     "timeSlicing",
			rename:      plan.Renamed(s),
			failMany:    s.RefusesMoreThanOne(),
			replicas:    map[string]int32{plan.ResourceGPU: s.TimeSlicing.Replicas},
		}, nil
	case v1alpha1.StrategyMPS:
		return config{
			migStrategy: migNone,
			sharing:     "mps",
			rename:      plan.Renamed(s),
			failMany:    s.RefusesMoreThanOne(),
			replicas:    map[string]int32{plan.ResourceGPU: s.MPS.Replicas},
		}, nil
	case v1alpha1.StrategyMIG:
		return migDocument(s, n)
	case v1alpha1.StrategyExclusive:
	}
	return config{migStrategy: migNone}, nil
}

// yaml is the document. Its strings are resource names and our own words, which need no quotes.
func (c config) yaml() string {
	var b strings.Builder
	fmt.Fprintf(&b, "version: v1\nflags:\n  migStrategy: %s\n", c.migStrategy)
	if c.sharing == "mps" {
		fmt.Fprintf(&b, "  mpsRoot: %s\n", MPSRoot)
	}
	if len(c.replicas) == 0 {
		return b.String()
	}
	fmt.Fprintf(&b, "sharing:\n  %s:\n", c.sharing)
	fmt.Fprintf(&b, "    renameByDefault: %t\n    failRequestsGreaterThanOne: %t\n", c.rename, c.failMany)
	b.WriteString("    resources:\n")
	for _, name := range slices.Sorted(maps.Keys(c.replicas)) {
		fmt.Fprintf(&b, "    - name: %s\n      replicas: %d\n", name, c.replicas[name])
	}
	return b.String()
}
