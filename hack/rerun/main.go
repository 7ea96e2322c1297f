// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command rerun reads the report of a run of Ginkgo and prints the focus that runs what failed again.
//
//	go run ./hack/rerun REPORT.json
//
// Specs of a container build on each other, so that it prints all specs of the innermost containers of those that failed. It
// prints nothing, which focuses on everything, if there is no report, or if the run ended before all specs had their turn.
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

// depth is the number of containers, at least, around what can run again alone: all specs lie in one container of everything.
const depth = 2

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: rerun REPORT.json")
		os.Exit(2)
	}
	reports, err := read(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "rerun:", err)
		os.Exit(1)
	}
	_, _ = os.Stdout.WriteString(focus(reports) + "\n")
}

// read reads a report. One that is not there holds nothing.
func read(path string) ([]types.Report, error) {
	raw, err := os.ReadFile(path) //nolint:gosec // the report that the developer names
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

// focus returns the regular expression of the specs whose container had a failure. Empty: run everything.
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
				again = append(again, regexp.QuoteMeta(container(spec)+" "+spec.LeafNodeText))
			}
		}
	}
	if len(again) == 0 {
		return ""
	}
	return "(" + strings.Join(again, "|") + ")$" // whole names: "MPS" is the beginning of "MPS clients" too
}

// container names the innermost container of a spec, with those around it.
func container(spec types.SpecReport) string { return strings.Join(spec.ContainerHierarchyTexts, " ") }
