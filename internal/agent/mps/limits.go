// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// limit is one limit of the clients of a daemon: a percentage of the threads, or memory of one GPU.
type limit struct {
	name     string // of NVIDIA's commands, without set_, get_ and default_
	argument string // the index of the GPU
	value    string
	holds    func(answer string) bool
}

// setting is a limit of the daemon or of one of its servers: the command that sets it and the one that reads it.
type setting struct {
	set, get string
	holds    func(answer string) bool // reports whether the answer to get is the limit
}

func (l limit) ofDaemon() setting {
	return setting{
		set: words("set_default_"+l.name, l.argument, l.value), get: words("get_default_"+l.name, l.argument), holds: l.holds,
	}
}

func (l limit) ofServer(pid int) setting {
	server := strconv.Itoa(pid)
	return setting{
		set: words("set_"+l.name, server, l.argument, l.value), get: words("get_"+l.name, server, l.argument), holds: l.holds,
	}
}

// words joins what is not empty.
func words(all ...string) string { return strings.Join(strings.Fields(strings.Join(all, " ")), " ") }

// limitsOf are the limits of a daemon in NVIDIA's order: the memory of each GPU, then the threads. A GPU without a
// memory limit has none: NVIDIA's daemon has no limit either where the memory of the GPU is not known.
func limitsOf(d plan.Daemon) []limit {
	limits := make([]limit, 0, len(d.Devices)+1)
	for _, device := range d.Devices {
		if mib := device.PinnedMemoryLimitMiB; mib > 0 {
			limits = append(limits, limit{
				name: "device_pinned_mem_limit", argument: strconv.Itoa(device.Index), value: fmt.Sprintf("%dM", mib),
				holds: func(answer string) bool { return isMemory(answer, mib) },
			})
		}
	}
	return append(limits, limit{
		name: "active_thread_percentage", value: strconv.Itoa(d.ActiveThreadPercentage),
		holds: func(answer string) bool { return isPercentage(answer, d.ActiveThreadPercentage) },
	})
}

// isPercentage allows for the daemon's rounding.
func isPercentage(answer string, want int) bool {
	p, err := strconv.ParseFloat(strings.TrimSpace(answer), 64)
	return err == nil && math.Abs(p-float64(want)) < 1
}

// isMemory reports whether an answer is a memory limit. Driver 595 leaves out the fraction of a gibibyte.
func isMemory(answer string, wantMiB int64) bool {
	number := strings.TrimSpace(answer)
	if n, err := strconv.ParseInt(number, 10, 64); err == nil { // bytes
		return n>>20 == wantMiB
	}
	for unit, mib := range map[string]float64{"K": 1. / 1024, "M": 1, "G": 1024, "T": 1024 * 1024} {
		digits, found := strings.CutSuffix(strings.TrimSuffix(strings.ToUpper(number), "B"), unit)
		if !found {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(digits), 64)
		want := float64(wantMiB) / mib
		return err == nil && (math.Abs(n-want) < 1/mib || n == math.Floor(want))
	}
	return false
}
