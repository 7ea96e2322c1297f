// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

// depth is the number of containers, at least, around what can run again alone: all specs lie in one container of
// everything.
const depth = 2

// read reads a report. One that is not there holds nothing.
func read(path string) ([]types.Report, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the report: %w", err)
	}
	var reports []types.Report
	if err := json.Unmarshal(raw, &reports); err != nil {
		return nil, fmt.Errorf("reading the report %s: %w", path, err)
	}
	return reports, nil
}

// focus returns the regular expression of what failed: specs of a container build on each other, so it names all specs
// of the innermost containers of those that failed. Empty, which focuses on everything, if nothing did, or if a run
// ended before all specs had their turn.
func focus(reports []types.Report) string {
	var again []string
	for i := range reports {
		if len(reports[i].SpecialSuiteFailureReasons) > 0 {
			return ""
		}
		specs := reports[i].SpecReports
		for _, spec := range specs {
			if spec.Failed() && len(spec.ContainerHierarchyTexts) < depth { // what prepares or clears up for all
				return ""
			}
		}
		for _, spec := range specs {
			beside := func(other types.SpecReport) bool { return other.Failed() && container(other) == container(spec) }
			if spec.LeafNodeType == types.NodeTypeIt && slices.ContainsFunc(specs, beside) {
				again = append(again, name(spec))
			}
		}
	}
	return only(again)
}

// only returns the regular expression of the specs of these names. Empty: of all.
func only(names []string) string {
	if len(names) == 0 {
		return ""
	}
	quoted := make([]string, len(names))
	for i, n := range names {
		quoted[i] = regexp.QuoteMeta(n)
	}
	return "(" + strings.Join(quoted, "|") + ")$" // whole names: "MPS" is the beginning of "MPS clients" too
}

// name is the whole name of a spec.
func name(spec types.SpecReport) string { return container(spec) + " " + spec.LeafNodeText }

// container names the innermost container of a spec, with those around it.
func container(spec types.SpecReport) string { return strings.Join(spec.ContainerHierarchyTexts, " ") }
