// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"
)

// newCalls sums up what the driver of a node was asked to change since it was asked last.
func (m *machine) newCalls() string {
	data, err := os.ReadFile(m.path(driverRoot, "var/lib/simdriver/calls.log"))
	if err != nil || len(data) <= m.callsRead {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(data[m.callsRead:])), "\n")
	m.callsRead = len(data)
	var calls []string
	counts := map[string]int{}
	for _, line := range lines {
		call := callOf(line)
		if counts[call] == 0 {
			calls = append(calls, call)
		}
		counts[call]++
	}
	for i, call := range calls {
		calls[i] = fmt.Sprintf("%d× %s", counts[call], call)
	}
	return strings.Join(calls, ", ")
}

// callOf is what was called, of a line such as "12:00:00.000 NVML[4711] nvmlDeviceSetMigMode GPU-… SUCCESS", and the
// outcome if it was none.
func callOf(line string) string {
	fields := strings.Fields(line)
	if len(fields) < 3 {
		return line
	}
	before, after, _ := strings.Cut(strings.Join(fields[2:], " "), " GPU-")
	_, outcome, _ := strings.Cut(after, " ")
	if outcome == "SUCCESS" || outcome == "" {
		return before
	}
	return before + " (" + outcome + ")"
}
