// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/onsi/ginkgo/v2/types"
)

// spec is a spec of a report, with the texts of its containers and its own.
func spec(state types.SpecState, leaf string, containers ...string) types.SpecReport {
	return types.SpecReport{State: state, LeafNodeType: types.NodeTypeIt, LeafNodeText: leaf, ContainerHierarchyTexts: containers}
}

func TestFocusIsOnTheContainersThatFailed(t *testing.T) {
	const all = "On a real node"
	ran := types.SpecReports{
		spec(types.SpecStatePassed, "passes", all, "MPS"),
		spec(types.SpecStateFailed, "fails", all, "MIG (A100)"),
		spec(types.SpecStateSkipped, "builds on it", all, "MIG (A100)"),
		spec(types.SpecStateTimedout, "takes for ever", all, "A guide", "step 2"),
		spec(types.SpecStatePanicked, "panics", all, "MIG (A100)"),
		spec(types.SpecStatePending, "is not written yet", all, "Time-slicing"),
	}
	suite := spec(types.SpecStateFailed, "")
	suite.LeafNodeType = types.NodeTypeBeforeSuite
	for name, c := range map[string]struct {
		reports []types.Report
		want    string
	}{
		"two containers": {[]types.Report{{SpecReports: ran}}, `(On a real node MIG \(A100\) fails|On a real node MIG \(A100\) builds on it|` +
			`On a real node A guide step 2 takes for ever|On a real node MIG \(A100\) panics)$`},
		"nothing failed":           {[]types.Report{{SpecReports: ran[:1]}}, ""},
		"the suite did not start":  {[]types.Report{{SpecReports: append(types.SpecReports{suite}, ran...)}}, ""},
		"the suite did not finish": {[]types.Report{{SpecReports: ran, SpecialSuiteFailureReasons: []string{"Suite Timeout Elapsed"}}}, ""},
		"no report":                {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			reports := written(t, c.reports)
			if got := focus(reports); got != c.want {
				t.Errorf("focus is %q, expected %q", got, c.want)
			}
		})
	}
}

func TestFocusMatchesTheWholeContainerAndNoOther(t *testing.T) {
	const all, guides = "On a real node", "Guides:"
	ran := types.SpecReports{
		spec(types.SpecStatePassed, "prepares", all, "MIG (A100)"),
		spec(types.SpecStateFailed, "fails", all, "MIG (A100)"),
		spec(types.SpecStatePassed, "passes", all, "MIG (A100) on one node"),
		spec(types.SpecStatePassed, "step 1", all, guides, "CERN"),
		spec(types.SpecStateFailed, "step 2", all, guides, "CERN"),
		spec(types.SpecStateSkipped, "step 3", all, guides, "CERN"),
		spec(types.SpecStatePassed, "step 1", all, guides, "NVIDIA"),
	}
	focused := regexp.MustCompile(focus([]types.Report{{SpecReports: ran}}))
	for text, want := range map[string]bool{
		"A real node On a real node MIG (A100) prepares":           true,
		"A real node On a real node MIG (A100) fails":              true,
		"A real node On a real node MIG (A100) on one node passes": false,
		"A real node On a real node Guides: CERN step 1":           true,
		"A real node On a real node Guides: CERN step 3":           true,
		"A real node On a real node Guides: NVIDIA step 1":         false,
		"A real node On a real node MPS fails":                     false,
	} {
		if got := focused.MatchString(text); got != want {
			t.Errorf("%q matches %q: %t, expected %t", focused, text, got, want)
		}
	}
}

// written writes reports as Ginkgo does and reads them again. Without any there is no file.
func written(t *testing.T, reports []types.Report) []types.Report {
	t.Helper()
	path := filepath.Join(t.TempDir(), "report.json")
	if reports != nil {
		raw, err := json.Marshal(reports)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	found, err := read(path)
	if err != nil {
		t.Fatal(err)
	}
	return found
}
