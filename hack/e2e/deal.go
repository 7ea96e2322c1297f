// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/onsi/ginkgo/v2/types"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/turns"
)

// recorded is how many seconds each container took when that was recorded last (make e2e RECORD=1).
//
//go:embed seconds.json
var recorded []byte

// perSpec is how long a spec is expected to take of which nothing is recorded, in seconds.
const perSpec = 15

// unit is what stays together on one machine: the specs of a container right below that of everything.
type unit struct {
	name    string
	specs   []string // whole names
	seconds float64  // that it is expected to take
}

// hand is what one machine runs.
type hand struct {
	units   []unit
	seconds float64
	turns   turns.Turns
}

func (h hand) names() (names []string) {
	for _, u := range h.units {
		names = append(names, u.name)
	}
	return names
}

func (h hand) specs() (names []string) {
	for _, u := range h.units {
		names = append(names, u.specs...)
	}
	return names
}

func seconds() (map[string]float64, error) {
	took := map[string]float64{}
	if err := json.Unmarshal(recorded, &took); err != nil {
		return nil, fmt.Errorf("reading hack/e2e/seconds.json: %w", err)
	}
	return took, nil
}

// unitsOf returns the units of these specs, in their order, each with the share of its recorded seconds that its specs
// have.
func unitsOf(specs []types.SpecReport, took map[string]float64) []unit {
	var units []unit
	for _, s := range specs {
		of := unitName(s)
		if len(units) == 0 || units[len(units)-1].name != of {
			units = append(units, unit{name: of})
		}
		u := &units[len(units)-1]
		u.specs = append(u.specs, name(s))
		u.seconds = cmp.Or(took[of], float64(perSpec*len(u.specs)))
	}
	return units
}

func unitName(s types.SpecReport) string {
	return s.ContainerHierarchyTexts[min(1, len(s.ContainerHierarchyTexts)-1)]
}

// deal gives each unit, the longest first, to the machine that is expected to be the first to be free. A machine runs
// its units in the order in which they stand in the program. No machine is left without one.
func deal(units []unit, machines int) []hand {
	hands := make([]hand, max(1, min(machines, len(units))))
	place := map[string]int{}
	for i, u := range units {
		place[u.name] = i
	}
	longest := slices.SortedStableFunc(slices.Values(units), func(a, b unit) int { return cmp.Compare(b.seconds, a.seconds) })
	for _, u := range longest {
		free, least := 0, math.Inf(1)
		for i, h := range hands {
			if h.seconds < least {
				free, least = i, h.seconds
			}
		}
		hands[free].units = append(hands[free].units, u)
		hands[free].seconds += u.seconds
	}
	for _, h := range hands {
		slices.SortFunc(h.units, func(a, b unit) int { return cmp.Compare(place[a.name], place[b.name]) })
	}
	return slices.DeleteFunc(hands, func(h hand) bool { return len(h.units) == 0 })
}

// inTurn are the units of a hand, from another one of the program on, with the first after the last: runs without time for all leave others out.
func inTurn(dealt, all []unit, by uint) (units []turns.Unit) {
	by %= uint(len(all))
	for _, u := range slices.Concat(all[by:], all[:by]) {
		if slices.ContainsFunc(dealt, func(d unit) bool { return d.name == u.name }) {
			units = append(units, turns.Unit{Name: u.name, Seconds: u.seconds})
		}
	}
	return units
}

// secondsOf returns how many seconds each container took.
func secondsOf(reports []types.Report) map[string]float64 {
	took := map[string]float64{}
	for _, r := range reports {
		for _, s := range r.SpecReports {
			if s.LeafNodeType == types.NodeTypeIt && s.RunTime > 0 {
				took[unitName(s)] += s.RunTime.Seconds()
			}
		}
	}
	for name, s := range took {
		took[name] = math.Ceil(s)
	}
	return took
}
