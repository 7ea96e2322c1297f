// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"os/exec"
	"strings"
	"testing"
)

// TestAlerts plays series to the chart's alerts, with Prometheus' own promtool.
func TestAlerts(t *testing.T) {
	promtool := strings.TrimSpace(run(t, exec.CommandContext(t.Context(), path(t, "hack/prometheus/build.sh"), "promtool")))
	command := exec.CommandContext(t.Context(), promtool, "test", "rules", "alerts.yaml")
	command.Dir = path(t, "test/packaging/testdata")
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("promtool test rules: %v\n%s", err, out)
	}
}
