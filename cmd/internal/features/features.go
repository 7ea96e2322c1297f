// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package features reads the feature gates, of which every program takes all: one setting is for the whole operator.
package features

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The feature gates.
const (
	MemoryLimits = "MemoryLimits" // of the agent
	OnDemandMIG  = "OnDemandMIG"  // of the controller
)

// Variable is the environment variable that sets them where nobody can give a program flags.
const Variable = "FEATURE_GATES"

// Set sets the gates of a program by a list such as A=true,B=false; those of other programs it only checks. Errors: a gate
// that there is none of, or a value that is none.
func Set(list string, gates map[string]*bool) error {
	for one := range strings.SplitSeq(list, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(one), "=")
		if name == "" {
			continue
		}
		if all := []string{MemoryLimits, OnDemandMIG}; !slices.Contains(all, name) {
			return fmt.Errorf("no feature gate is called %q; there is %s", name, format.List(all))
		}
		on, err := strconv.ParseBool(value)
		if err != nil {
			return fmt.Errorf("feature gate %s must be true or false, not %q", name, value)
		}
		if gate := gates[name]; gate != nil {
			*gate = on
		}
	}
	return nil
}
