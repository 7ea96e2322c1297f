// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package features reads the feature gates that the programs take.
package features

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Set sets the gates of a program by a list such as A=true,B=false. Errors: a gate that there is none of, or a value that
// is none.
func Set(list string, gates map[string]*bool) error {
	for one := range strings.SplitSeq(list, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(one), "=")
		if name == "" {
			continue
		}
		gate, known := gates[name]
		if !known {
			return fmt.Errorf("no feature gate is called %q; there is %s", name, format.List(slices.Sorted(maps.Keys(gates))))
		}
		on, err := strconv.ParseBool(value)
		if err != nil {
			return fmt.Errorf("feature gate %s must be true or false, not %q", name, value)
		}
		*gate = on
	}
	return nil
}
