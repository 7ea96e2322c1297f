// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
)

// A line for each spec, to the standard error, which hack/e2e shows while the specs run.
var _ = ReportAfterEach(func(spec SpecReport) {
	if !notAsked(spec) {
		of := strings.Join(spec.ContainerHierarchyTexts[min(1, len(spec.ContainerHierarchyTexts)):], " ")
		fmt.Fprintf(os.Stderr, "%-8s %s: %s%s\n", outcome(spec.State), of, spec.LeafNodeText, details(spec))
	}
})

var _ = ReportAfterSuite("what the kubelet lost", func(Report) {
	if machine != nil && lost+machine.Lost() > 0 {
		fmt.Fprintf(os.Stderr, "%d times the kubelet lost NVIDIA's device plugin when that started anew (docs/install.md),\n"+
			"and was restarted, as an administrator must. That is the kubelet's own fault, and no program of ours could help it.\n",
			lost+machine.Lost())
	}
})

// notAsked reports whether a spec was left out since another part was asked for.
func notAsked(spec SpecReport) bool {
	return spec.State == types.SpecStateSkipped && spec.Failure.Message == ""
}

func outcome(state types.SpecState) string {
	switch state {
	case types.SpecStatePassed:
		return "proved"
	case types.SpecStatePending:
		return "pending"
	case types.SpecStateSkipped:
		return "skipped"
	case types.SpecStateInvalid, types.SpecStateFailed, types.SpecStateAborted, types.SpecStatePanicked,
		types.SpecStateInterrupted, types.SpecStateTimedout:
	}
	return "FAILED"
}

// details are how long a spec took, if it ran, and what it noted.
func details(spec types.SpecReport) string {
	if spec.RunTime == 0 {
		return ""
	}
	parts := []string{spec.RunTime.Round(100 * time.Millisecond).String()}
	for _, entry := range spec.ReportEntries {
		if entry.Visibility != ReportEntryVisibilityNever { // what a command printed is for the report as JSON alone
			parts = append(parts, entry.Name+" "+entry.StringRepresentation())
		}
	}
	return " (" + strings.Join(parts, "; ") + ")"
}
