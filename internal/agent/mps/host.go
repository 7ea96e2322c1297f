// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

const (
	// pollInterval is how often the desired state is read: a folder with few files, so that a desired state is answered
	// at once.
	pollInterval = 500 * time.Millisecond
	// healthPoll is how often each daemon is asked whether it is there, and one that failed is tried again.
	healthPoll = 5 * time.Second
	// The most that a pipe directory may hold, in bytes and in entries: a daemon has sockets, locks and its PID there.
	maxPipe, maxPipeEntries = 1 << 20, 512
	// trimTimeout is how long the other daemons wait for that.
	trimTimeout = 2 * time.Second
)

// Node is what the daemons need to know of the node around them.
type Node struct {
	Processes Processes
	// DriverContainerReady reports whether the container of NVIDIA's driver is ready. False on a node without one.
	DriverContainerReady func() bool
	// DriverLeaves reports whether the driver of the node is about to be replaced and NVIDIA's device plugin is
	// stopping.
	DriverLeaves func() bool
	// DriverVersion returns the version of the driver with which a daemon would start now. Empty: not known.
	DriverVersion func() string
	// SharesMemory reports whether clients to come get the shared memory of this process, which the daemons use.
	SharesMemory func() bool
}

// Host keeps the daemons of a node as the agent wants them. It is the whole of the MPS pod.
type Host struct {
	tools

	daemons *daemonManager
	unused  *unusedServers
	logs    *logs
	trims   *lost // whose pipe directories are being emptied

	nextHealth time.Time // when all daemons are asked again
	nextRelief time.Time // when the shared memory may be emptied again
}

// tools are what all parts of the host work with.
type tools struct {
	control   Control
	files     files
	clock     clock.Clock
	processes Processes
	node      Node
}

// NewHost makes the host of the daemons that control speaks with.
func NewHost(control Control, n Node) *Host {
	t := tools{control: control, files: control.files, clock: control.clock, processes: n.Processes, node: n}
	return &Host{
		tools: t, logs: newLogs(t.files), trims: newLost(),
		daemons: &daemonManager{stopper: stopper{t}, idle: map[int]time.Time{}},
		unused:  &unusedServers{tools: t, silent: map[string]time.Time{}},
	}
}

// Run converges until the context ends. The daemons are then left running: the pod takes them with it, and where there
// is no pod their clients live on. The error is that only a new process helps: daemons and clients to come have no
// shared memory in common.
func (h *Host) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	for ctx.Err() == nil {
		thorough := h.isThorough()
		if err := h.Converge(ctx, thorough); err != nil && ctx.Err() == nil {
			log.Error(err, "MPS daemons differ from the desired state, trying again")
		}
		if thorough && !h.node.SharesMemory() {
			if err := h.endAll(ctx); err == nil || !inUse(err) {
				return errors.Join(errSharedMemory, err)
			}
			log.Error(errSharedMemory, "Waiting until no MPS client is connected, then starting anew")
		}
		if err := h.rest(ctx); err != nil && ctx.Err() == nil {
			log.Error(err, "MPS servers that no pod uses may keep the old NVIDIA driver loaded, trying again")
		}
	}
	return nil
}

// rest waits for pollInterval. While the container of the driver ends, it looks for servers that serve no pod
// meanwhile.
func (h *Host) rest(ctx context.Context) error {
	var errs []error
	for end := h.clock.Now().Add(pollInterval); ; {
		pause := end.Sub(h.clock.Now())
		if pause <= 0 {
			return errors.Join(errs...)
		}
		if h.unused.driverContainerEnds() {
			pause = min(pause, unusedPoll)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-h.clock.After(pause):
		}
		if h.clock.Now().Before(end) {
			errs = append(errs, h.unused.end(ctx, h.unused.served()...))
		}
	}
}

// isThorough reports whether all daemons are asked now, as they are after each healthPoll.
func (h *Host) isThorough() bool {
	now := h.clock.Now()
	if now.Before(h.nextHealth) {
		return false
	}
	h.nextHealth = now.Add(healthPoll)
	return true
}

// Unused reports whether nobody uses or is to use MPS on the node: no daemon is desired or recorded, and no pod has a
// pipe directory.
func (h *Host) Unused() (bool, error) {
	desired, err := h.files.desired()
	if err != nil {
		return false, err
	}
	ours, err := h.files.resources(recordName)
	if err != nil {
		return false, err
	}
	given, err := h.given()
	return len(desired)+len(ours)+len(given) == 0, err
}

// given are the PIDs of the processes that were given a pipe directory, whose-ever daemon it is of.
func (h *Host) given() (pids []int, err error) {
	served, err := h.files.resources(PipeFolder)
	if err != nil {
		return nil, err
	}
	pipes := make([]string, 0, len(served))
	for _, resource := range served {
		pipes = append(pipes, h.files.path(resource, PipeFolder))
	}
	by, err := h.processes.Mounted(pipes...)
	return slices.Concat(slices.Collect(maps.Values(by))...), err //nolint:wrapcheck // names what it did
}

// Converge starts, limits and ends daemons once. A daemon whose record says that it is as desired, or that it failed,
// is looked at again only when thorough; while the driver leaves, one that runs is looked at each time, since NVIDIA's
// driver manager unloads the module as soon as it has evicted the last pod. Each daemon's error is in its record as
// well.
func (h *Host) Converge(ctx context.Context, thorough bool) error {
	desired, err := h.files.desired()
	if err != nil {
		return err
	}
	ours, err := h.files.resources(recordName)
	if err != nil {
		return err
	}
	errs := []error{h.logs.follow(ctx, ours)} // before a daemon is ended, which takes its logs with it
	errs = append(errs, h.trimAll(thorough))
	if thorough {
		errs = append(errs, h.relieve(ctx)) // before the daemons start again
	}
	if h.unused.driverContainerEnds() {
		errs = append(errs, h.unused.end(ctx, ours...))
	}
	for _, resource := range ours {
		if !slices.ContainsFunc(desired, func(d plan.Daemon) bool { return d.Resource == resource }) {
			errs = append(errs, h.daemons.end(ctx, resource))
		}
	}
	for _, desired := range desired {
		errs = append(errs, h.daemons.ensure(ctx, desired, thorough))
	}
	return errors.Join(append(errs, h.markReady(desired, ours))...)
}

// trimAll trims the pipe directories of our daemons, and those of none: pods that were clients of a daemon still have its
// directory mounted. Those of NVIDIA's daemons are not ours to change.
func (h *Host) trimAll(thorough bool) error {
	resources, err := h.files.resources(PipeFolder)
	errs := []error{err}
	for _, resource := range resources {
		if h.files.has(recordFile(resource)) || !h.files.has(path.Join(resource, startedMarker)) {
			errs = append(errs, h.trim(resource, thorough))
		}
	}
	return errors.Join(errs...)
}

// trim empties the pipe directory of a daemon that its clients have filled: NVIDIA's device plugin mounts it writable in
// their containers, and it lies in the node's /run, which the node needs. One that does not end in its time, because a
// client goes on filling it, goes on by itself, and no other begins before it has ended.
func (h *Host) trim(resource string, thorough bool) error {
	if h.trims.has(resource) {
		return nil
	}
	h.trims.set(resource, true)
	done := make(chan error, 1)
	go func() {
		err := h.trimPipe(resource, thorough)
		h.trims.set(resource, false)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-clock.RealClock{}.After(trimTimeout): // of the machine: the work is the kernel's
		return fmt.Errorf("%w: emptying the %s of %s goes on: its clients go on filling it", ErrDaemon, PipeFolder, resource)
	}
}

func (h *Host) trimPipe(resource string, thorough bool) error {
	pipe := h.files.path(resource, PipeFolder)
	held, err := h.processes.Trim(pipe, maxPipe, maxPipeEntries, thorough)
	if err != nil || held <= maxPipe {
		return err //nolint:wrapcheck // names what it did
	}
	pods, err := podsOf(pipe, h.processes)
	uids := make([]string, 0, len(pods))
	for _, pod := range pods {
		uids = append(uids, pod.UID)
	}
	return errors.Join(fmt.Errorf("%w: %s of %s held %d bytes, which lie in the node's memory, and was emptied: "+
		"one of the pods with these UIDs has written there: %s", ErrDaemon, PipeFolder, resource, held, format.List(uids)), err)
}

// markReady sets NVIDIA's marker that all daemons run. Where we run none, and had none to end, it is not ours.
func (h *Host) markReady(desired []plan.Daemon, ours []string) error {
	if len(desired) == 0 && len(ours) == 0 {
		return nil
	}
	ready := len(desired) > 0
	for _, desired := range desired {
		r, recorded, err := h.files.record(desired.Resource)
		if err != nil {
			return err
		}
		ready = ready && recorded && r.Applied
	}
	if _, err := h.files.root.Stat(readyMarker); (err == nil) == ready {
		return nil
	}
	return h.files.mark(readyMarker, ready)
}
