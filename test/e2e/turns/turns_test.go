// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package turns_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/turns"
)

// played are the units that a machine begins which needs pace times as long as was recorded. It has them in the order of the program.
func played(pace, seconds float64, precedence ...string) (begun []string) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	t := turns.Turns{Until: now.Add(time.Duration(seconds * float64(time.Second)))}
	for _, name := range precedence {
		t.Units = append(t.Units, turns.Unit{Name: name, Seconds: 100})
	}
	for _, name := range slices.Sorted(slices.Values(precedence)) {
		if t.Begins(name, now) {
			begun = append(begun, name)
			now = now.Add(time.Duration(pace * 50 * float64(time.Second)))
		}
		if t.Begins(name, now) { // another container of the same unit
			now = now.Add(time.Duration(pace * 50 * float64(time.Second)))
		}
	}
	return begun
}

func TestUnitsBeginThatEndInTimeAtThePaceOfTheMachine(test *testing.T) {
	for name, c := range map[string]struct {
		pace, seconds float64
		precedence    []string
		want          []string
	}{
		"time for all":                    {1, 400, []string{"a", "b", "c", "d"}, []string{"a", "b", "c", "d"}},
		"a faster machine gives no bound": {0.5, 400, []string{"a", "b", "c", "d"}, []string{"a", "b", "c", "d"}},
		"the last are left out":           {1, 250, []string{"a", "b", "c", "d"}, []string{"a", "b"}},
		"others have precedence":          {1, 250, []string{"c", "d", "a", "b"}, []string{"c", "d"}},
		"a slow machine leaves more out":  {2, 400, []string{"a", "b", "c", "d"}, []string{"a", "b"}},
		"what is left out takes no time":  {2, 410, []string{"d", "a", "b", "c"}, []string{"a", "d"}},
		"none":                            {1, 99, []string{"a", "b"}, nil},
	} {
		if got := played(c.pace, c.seconds, c.precedence...); !slices.Equal(got, c.want) {
			test.Errorf("%s: begun are %v, expected %v", name, got, c.want)
		}
	}
}
