// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/onsi/ginkgo/v2/types"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/turns"
)

const introduction = `
Real are etcd, the API server, controller manager, scheduler, containerd, runc, the kubelet, NVIDIA's device plugin with its
config-manager and GPU Feature Discovery, NVIDIA's container toolkit and DRA driver, Helm, and the operator: its programs and
its chart. Simulated are the NVIDIA driver with its GPUs, and the parts of the GPU Operator that start NVIDIA's programs.
`

// shown is how many lines are printed of what a spec that failed wrote.
const shown = 150

// tell prints what failed, how long each machine took, and how many specs passed. It reports whether all that ran did,
// and whether all had their turn, but for those for which no time was left.
func tell(to *strings.Builder, reports []types.Report, hands []hand, took time.Duration) (passed bool) {
	passed = true
	var ran, pending, failed, skipped, asked, out int
	late := leftOut(reports)
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
			case s.Failure.Message == "": // another machine's
			case late[unitName(s)] > 0:
				out++
			default:
				skipped++
			}
		}
	}
	fmt.Fprint(to, introduction+"\n")
	for i, h := range hands {
		fmt.Fprintf(to, "machine %d: %s (expected %.0fs): %s\n", i+1, runTime(reports, i), h.seconds, strings.Join(h.names(), " · "))
	}
	fmt.Fprintf(to, "\n%d proved, %d pending, %d failed, %d skipped after a failure, in %s\n", ran, pending, failed, skipped, took.Round(time.Second))
	tellLate(to, late)
	if out == asked {
		fmt.Fprintln(to, "the time is too short for any spec")
		passed = false
	}
	if missing := asked - ran - pending - failed - skipped - out; missing > 0 {
		fmt.Fprintf(to, "%d specs had no turn\n", missing)
		passed = false
	}
	return passed
}

func tellLate(to *strings.Builder, late map[string]int) {
	for _, name := range slices.Sorted(maps.Keys(late)) {
		fmt.Fprintf(to, "left out, since no time was left: %q, %d specs\n", name, late[name])
	}
}

// leftOut are the units for which no time was left, each with the number of its specs.
func leftOut(reports []types.Report) map[string]int {
	units, late := map[string]int{}, map[string]int{}
	for _, r := range reports {
		for _, s := range r.SpecReports {
			if s.LeafNodeType != types.NodeTypeIt || s.State != types.SpecStateSkipped || s.Failure.Message == "" {
				continue
			}
			units[unitName(s)]++
			if s.Failure.Message == turns.NoTime {
				late[unitName(s)] = 0
			}
		}
	}
	for name := range late {
		late[name] = units[name]
	}
	return late
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
