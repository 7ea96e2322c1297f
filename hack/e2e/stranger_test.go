// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/onsi/ginkgo/v2/types"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/turns"
)

// TestStrangerWhatOtherMachinesRunIsNotLeftOutOnce more by each of them: Ginkgo reports what the focus leaves out as skipped.
func TestStrangerWhatOtherMachinesRunIsNotLeftOut(t *testing.T) {
	hands := deal(unitsOf(listedSpecs(), nil), 2)
	for name, had := range map[string]bool{"no time for any": false, "one unit late, another without a turn": true} {
		t.Run(name, func(t *testing.T) {
			var reports []types.Report
			for m, h := range hands {
				specs := listedSpecs()
				for i := range specs {
					mine := false
					for _, u := range h.units {
						mine = mine || u.name == unitName(specs[i])
					}
					late := mine && (!had || unitName(specs[i]) == hands[0].units[0].name)
					switch {
					case late:
						specs[i].State, specs[i].Failure.Message = types.SpecStateSkipped, turns.NoTime
					case !mine, had && m == 1: // that machine's focus found nothing
						specs[i].State = types.SpecStateSkipped
					}
				}
				reports = append(reports, types.Report{SuiteSucceeded: true, SpecReports: specs})
			}
			var out strings.Builder
			if tell(&out, reports, hands, time.Minute) {
				t.Errorf("passed:\n%s", out.String()[strings.Index(out.String(), "machine 1"):])
			}
		})
	}
}
