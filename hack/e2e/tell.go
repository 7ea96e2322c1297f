// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/onsi/ginkgo/v2/types"
)

const introduction = `
Real are etcd, the API server, controller manager, scheduler, containerd, runc, the kubelet, NVIDIA's device plugin with its
config-manager and GPU Feature Discovery, NVIDIA's container toolkit and DRA driver, Helm, and the operator: its programs and
its chart. Simulated are the NVIDIA driver with its GPUs, and the parts of the GPU Operator that start NVIDIA's programs.
`

// shown is how many lines are printed of what a spec that failed wrote.
const shown = 150

// tell prints what failed, how long each machine took, and how many specs passed. It reports whether all that ran did,
// and whether all had their turn.
func tell(to *strings.Builder, reports []types.Report, hands []hand, took time.Duration) (passed bool) {
	passed = true
	var ran, pending, failed, skipped, asked int
	for _, h := range hands {
		asked += len(h.specs())
	}
	for _, r := range reports {
		passed = passed && r.SuiteSucceeded
		for _, reason := range r.SpecialSuiteFailureReasons {
			fmt.Fprintln(to, "\n"+reason)
		}
		for _, s := range r.SpecReports {
			it := s.LeafNodeType == types.NodeTypeIt
			switch {
			case s.Failed():
				failed++
				failure(to, s)
			case !it:
			case s.State == types.SpecStatePassed:
				ran++
			case s.State == types.SpecStatePending:
				pending++
			case s.Failure.Message != "":
				skipped++
			}
		}
	}
	fmt.Fprint(to, introduction+"\n")
	for i, h := range hands {
		var names []string
		for _, u := range h.units {
			names = append(names, u.name)
		}
		fmt.Fprintf(to, "machine %d: %s (expected %.0fs): %s\n", i+1, runTime(reports, i), h.seconds, strings.Join(names, " · "))
	}
	fmt.Fprintf(to, "\n%d proved, %d pending, %d failed, %d skipped after a failure, in %s\n", ran, pending, failed, skipped, took.Round(time.Second))
	if missing := asked - ran - pending - failed - skipped; missing > 0 {
		fmt.Fprintf(to, "%d specs had no turn\n", missing)
		passed = false
	}
	return passed
}

func runTime(reports []types.Report, i int) time.Duration {
	if i >= len(reports) {
		return 0
	}
	return reports[i].RunTime.Round(time.Second)
}

// failure prints what is known of a spec that failed, and how to run it again.
func failure(to *strings.Builder, s types.SpecReport) {
	fmt.Fprintf(to, "\n== FAILED: %s\n%s\n", name(s), lastLines(s.CapturedGinkgoWriterOutput, shown))
	fmt.Fprintf(to, "%s\n%s\nRun it again, with what it builds on: make e2e FAILED=1\n", s.Failure.Location, s.Failure.Message)
}
