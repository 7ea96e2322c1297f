// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// ProfileError is a profile that a GPU does not have.
type ProfileError struct {
	Device gpu.Device
	Name   string // as it was asked for
	Why    string // empty: the GPU has no profile of that name
}

// Error says which GPU has no such profile and which profiles it has.
func (e *ProfileError) Error() string {
	switch {
	case e.Why != "":
		return fmt.Sprintf("%s cannot have profile %s: %s", e.Device, e.Name, e.Why)
	case len(e.Device.Profiles) == 0 && !e.Device.MIGCapable:
		return fmt.Sprintf("%s has no MIG profile %s, for it has no MIG", e.Device, e.Name)
	case len(e.Device.Profiles) == 0:
		return fmt.Sprintf("%s has no MIG profile %s: the driver lists none while MIG mode is off", e.Device, e.Name)
	}
	names := make([]string, 0, len(e.Device.Profiles))
	for _, p := range e.Device.SmallestFirst() {
		names = append(names, p.Name)
	}
	return fmt.Sprintf("%s has no MIG profile %s; it has %s", e.Device, e.Name, strings.Join(names, ", "))
}

// FitError is a set of instances that does not fit on a GPU, even on the empty one.
type FitError struct {
	Device gpu.Device
	Want   map[string]int
	Why    string
	Fits   map[string]int // the part of Want that fits when the largest are placed first
}

// Error says what was asked of which GPU, why it does not fit and how much of it would.
func (e *FitError) Error() string {
	msg := fmt.Sprintf("%s cannot hold %s: %s", e.Device, counts(e.Want), e.Why)
	if len(e.Fits) == 0 {
		return msg
	}
	return fmt.Sprintf("%s; %s would fit", msg, counts(e.Fits))
}

// counts writes instances by profile, such as "2 × 1g.5gb + 1 × 3g.20gb".
func counts(instances map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(instances)) {
		if n := instances[name]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d × %s", n, name))
		}
	}
	return strings.Join(parts, " + ")
}
