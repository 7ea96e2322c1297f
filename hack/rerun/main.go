// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command rerun reads the report of a run of Ginkgo and prints the focus that runs what failed again.
//
//	go run ./hack/rerun REPORT.json
//
// Specs of a container build on each other, so that it prints the containers of the specs that failed. It prints nothing,
// which focuses on everything, if there is no report, or if the run ended before all specs had their turn.
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

// depth is how many containers, from the outermost one, name what runs again: all specs lie in one container of everything.
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

// focus returns the regular expression of the containers that had a failure. Empty: run everything.
func focus(reports []types.Report) string {
	var containers []string
	for i := range reports {
		if len(reports[i].SpecialSuiteFailureReasons) > 0 {
			return ""
		}
		for _, spec := range reports[i].SpecReports {
			if !spec.Failed() {
				continue
			}
			if len(spec.ContainerHierarchyTexts) < depth { // what prepares or clears up for all
				return ""
			}
			name := regexp.QuoteMeta(strings.Join(spec.ContainerHierarchyTexts[:depth], " ") + " ")
			if !slices.Contains(containers, name) {
				containers = append(containers, name)
			}
		}
	}
	return strings.Join(containers, "|")
}
