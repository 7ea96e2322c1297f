// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
)

// What was proved, for people to read: one line for each spec, under the heading of its container.
var _ = ReportAfterSuite("what was proved", func(report Report) {
	fmt.Printf("\nOn a real node (kubelet, containerd and NVIDIA's device plugin; the driver is simulated):\n")
	heading := ""
	for _, spec := range report.SpecReports {
		if spec.LeafNodeType != types.NodeTypeIt {
			continue
		}
		if h := strings.Join(spec.ContainerHierarchyTexts, ", "); h != heading {
			heading = h
			fmt.Printf("\n%s\n", heading)
		}
		fmt.Printf("  %-8s %s%s\n", outcome(spec.State), spec.LeafNodeText, details(spec))
	}
	fmt.Printf("\n%s\n", report.RunTime.Round(time.Second))
})

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
		parts = append(parts, entry.Name+" "+entry.StringRepresentation())
	}
	return " (" + strings.Join(parts, "; ") + ")"
}
