// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// errSharedMemory says that clients to come cannot connect. NVIDIA's MPS DaemonSet mounts other shared memory when it
// starts, and the mounts of a container never change.
var errSharedMemory = errors.New("another program replaced the shared memory of MPS, as NVIDIA's MPS DaemonSet does when it starts, " +
	"so that new clients cannot reach the daemons")

// endAll ends all daemons, if no client is connected to any. Their records stay, so that the next process starts them
// again. A daemon that does not answer names no clients: it counts as used while a pod has its pipe directory.
func (h *Host) endAll(ctx context.Context) error {
	resources, err := h.files.resources(recordName)
	if err != nil {
		return err
	}
	recorded := make([]record, 0, len(resources))
	for _, resource := range resources {
		was, found, err := h.files.record(resource)
		if err != nil {
			return err
		}
		if !found {
			continue
		}
		recorded = append(recorded, was)
		servers, err := h.control.Servers(ctx, resource)
		if err != nil {
			err = h.daemons.endUnreachable(ctx, was)
		} else if clients := connected(servers); len(clients) > 0 {
			err = fmt.Errorf("client %d of %s: %w", clients[0], resource, errInUse)
		}
		if err != nil {
			return err
		}
	}
	var errs []error
	for _, was := range recorded {
		errs = append(errs, h.daemons.quit(ctx, was))
	}
	return errors.Join(errs...)
}

const (
	// reliefInterval is how often the shared memory is emptied at most. Who has it open without being a client may fill
	// it again at once, and each time the daemons are started anew.
	reliefInterval = 10 * time.Minute
	// vainReliefInterval is the same where that did not help.
	vainReliefInterval = time.Hour
)

// relieve empties the shared memory of what pods that have ended have left there, which no container's memory limit
// counts any more. That is done once it holds a quarter of what it can, and nobody uses MPS. The daemons are started anew
// after it: nothing tells which of the files are theirs.
func (h *Host) relieve(ctx context.Context) error {
	if h.clock.Now().Before(h.nextRelief) {
		return nil
	}
	shared := h.files.path(SharedMemory)
	filled, err := host.Filled(shared)
	if err != nil || !filled || !h.node.SharesMemory() || h.node.DriverLeaves() {
		return err //nolint:wrapcheck // names what it did
	}
	if used, err := h.used(); used || err != nil {
		return err
	}
	if err := h.endAll(ctx); err != nil {
		if inUse(err) {
			return nil // by a client that nobody gave a pipe directory, such as a program on the node itself
		}
		return err
	}
	h.nextRelief = h.clock.Now().Add(reliefInterval)
	if used, err := h.used(); used || err != nil { // a pod has started meanwhile
		return err
	}
	logr.FromContextOrDiscard(ctx).Info("Emptied the shared memory of MPS, which pods that have ended had filled", "folder", shared)
	return errors.Join(host.Clear(shared), h.checkRelief(shared))
}

// checkRelief says that the shared memory is still filled though it has no files any more.
func (h *Host) checkRelief(shared string) error {
	filled, err := host.Filled(shared)
	if err != nil || !filled {
		return err //nolint:wrapcheck // names what it did
	}
	h.nextRelief = h.clock.Now().Add(vainReliefInterval)
	return fmt.Errorf("%s is more than a quarter full though all its files were removed: a process that is no MPS client has removed files "+
		"open. Find it on the node (lsof +L1) and end it. The next try is in %s", shared, vainReliefInterval)
}

// used reports whether a process may use the shared memory: one that was given a pipe directory, or NVIDIA's own daemon.
// Whether a client is connected to a daemon of ours endAll asks.
func (h *Host) used() (bool, error) {
	given, err := h.given()
	if err != nil || len(given) > 0 {
		return true, err
	}
	started, err := h.files.resources(startedMarker)
	for _, resource := range started {
		if !h.files.has(path.Join(resource, recordName)) {
			return true, nil
		}
	}
	return err != nil, err
}

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
