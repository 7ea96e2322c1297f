// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"strings"
	"testing"
	"time"
)

func replaced(line, resource string) string { return strings.Replace(line, "RESOURCE", resource, 1) }

func TestAKubeletHasLostAPluginWhoseEndHadNoConsequence(t *testing.T) {
	const (
		end  = `E1124 17:13:50.437479  1 client.go:95] "ListAndWatch ended unexpectedly for device plugin" err="EOF" resource="nvidia.com/RESOURCE"` + "\n"
		away = `I1124 17:13:50.437641  1 client.go:115] "Device plugin disconnected" resource="nvidia.com/RESOURCE"` + "\n"
	)
	gpu := func(line string) string { return replaced(line, "gpu") }
	mig := func(line string) string { return replaced(line, "mig-3g.20gb") }
	start := time.Date(2026, 11, 24, 17, 13, 50, 0, time.UTC)
	for name, c := range map[string]struct {
		said string
		lost bool
	}{
		"nothing":                                     {"", false},
		"each end had its consequence":                {gpu(end) + gpu(away) + mig(end) + mig(away), false},
		"an end without one":                          {gpu(end) + mig(end) + mig(away), true},
		"another's consequence is not its own":        {gpu(end) + mig(away), true},
		"one of two ends of the same":                 {gpu(end) + gpu(end) + gpu(away), true},
		"a consequence before the end proves nothing": {gpu(away) + gpu(end), true},
	} {
		e := ended{}
		e.hear([]byte(c.said), start)
		if e.before(start) {
			t.Errorf("%s: lost at once, before the kubelet could draw the consequence", name)
		}
		if got := e.before(start.Add(time.Millisecond)); got != c.lost {
			t.Errorf("%s: lost %v, expected %v", name, got, c.lost)
		}
	}
}
