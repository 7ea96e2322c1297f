// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package turns decides which specs one machine of make e2e still begins, where it has to end by some time: how fast a
// machine is shows while it runs. hack/e2e deals them.
package turns

import (
	"slices"
	"time"
)

// Variable of the environment has the Turns of a machine, as JSON. Without it the machine runs all that it is asked for.
const Variable = "GPUSHARING_E2E_TURNS"

// NoTime is why a spec was skipped that would not have ended in time.
const NoTime = "no time is left for it (WITHIN)"

// Unit is what stays together: the specs of a container right below that of everything.
type Unit struct {
	Name    string
	Seconds float64 // that it took when that was recorded last
}

// Turns are those of one machine.
type Turns struct {
	Until time.Time
	Units []Unit // what comes first is left out last

	began   time.Time // the first unit
	ran     float64   // seconds that were recorded of the units that began
	decided map[string]bool
}

// Begins decides whether a unit is run, once, when its turn has come: whether it is among those that are expected to end
// in time, at the pace of the units before it.
func (t *Turns) Begins(name string, now time.Time) bool {
	if t.decided == nil {
		t.decided, t.began = map[string]bool{}, now
	}
	begins, known := t.decided[name]
	if !known {
		begins = slices.ContainsFunc(t.inTime(now), func(u Unit) bool { return u.Name == name })
		t.decided[name] = begins
		for _, u := range t.Units {
			if begins && u.Name == name {
				t.ran += u.Seconds
			}
		}
	}
	return begins
}

// inTime are the units still to come that are expected to end in time.
func (t *Turns) inTime(now time.Time) (fit []Unit) {
	left, pace := t.Until.Sub(now).Seconds(), 1.0
	if t.ran > 0 {
		pace = max(pace, now.Sub(t.began).Seconds()/t.ran)
	}
	for _, u := range t.Units {
		if _, had := t.decided[u.Name]; !had && u.Seconds*pace <= left {
			fit = append(fit, u)
			left -= u.Seconds * pace
		}
	}
	return fit
}
