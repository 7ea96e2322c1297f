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

const introduction = `
What was proved on a real node. Real are etcd, the API server, controller manager, scheduler, containerd, runc, the
kubelet, NVIDIA's device plugin with its config-manager and GPU Feature Discovery, NVIDIA's container toolkit, Helm, and the
operator: its programs and its chart. Simulated are the NVIDIA driver with its GPUs, and the parts of the GPU Operator that
start NVIDIA's programs.
"pending" is what the operator cannot do yet.
`

// What was proved, for people to read: one line for each spec, under the heading of its container.
var _ = ReportAfterSuite("what was proved", func(report Report) {
	fmt.Print(introduction)
	heading := ""
	count := map[string]int{}
	for _, spec := range report.SpecReports {
		if spec.LeafNodeType != types.NodeTypeIt || notAsked(spec) {
			continue
		}
		if h := strings.Join(spec.ContainerHierarchyTexts[1:], " "); h != heading {
			heading = h
			fmt.Printf("\n%s\n", heading)
		}
		count[outcome(spec.State)]++
		fmt.Printf("  %-8s %s%s\n", outcome(spec.State), spec.LeafNodeText, details(spec))
	}
	if machine != nil && lost+machine.Lost() > 0 {
		fmt.Printf("\n%d times the kubelet lost NVIDIA's device plugin when that started anew (docs/install.md),\n"+
			"and was restarted, as an administrator must. That is the kubelet's own fault, and no program of ours could help it.\n",
			lost+machine.Lost())
	}
	fmt.Printf("\n%d proved, %d pending, %d failed, %d skipped after a failure, in %s\n",
		count["proved"], count["pending"], count["FAILED"], count["skipped"], report.RunTime.Round(time.Second))
})

// notAsked says whether a spec was left out since another part was asked for.
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
