// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

const (
	// pollInterval is how often the desired state is read: a folder with few files, so that a desired state is answered at once.
	pollInterval = 500 * time.Millisecond
	// healthPoll is how often each daemon is asked whether it is there, and one that failed is tried again.
	healthPoll = 5 * time.Second
	// idleTime is how long a server without clients stays: long enough for the next job of a series, short enough that the
	// unload of a driver is tried again after it. The next client starts another server.
	idleTime = 10 * time.Second
)

// errExternal says that a daemon is not ours to change.
var errExternal = fmt.Errorf("%w: NVIDIA's own MPS DaemonSet serves this resource; "+
	"waiting until it has ended, which it does where the label nvidia.com/mps.capable of the node is not true", ErrDaemon)

// errDriverLeaves says why a daemon does not run: it would keep the old driver loaded.
var errDriverLeaves = fmt.Errorf("%w: stopped because the NVIDIA driver of the node is about to change and no pod uses MPS; "+
	"it starts once the driver is ready", ErrDaemon)

// Node is what the daemons need to know of the node around them.
type Node struct {
	Processes Processes
	// DriverContainerReady reports whether the container of NVIDIA's driver is ready. False on a node without one.
	DriverContainerReady func() bool
	// DriverLeaves reports whether the driver of the node is about to be replaced and NVIDIA's device plugin is stopping.
	DriverLeaves func() bool
	// DriverVersion returns the version of the driver with which a daemon would start now. Empty: not known.
	DriverVersion func() string
	// SharesMemory reports whether clients to come get the shared memory of this process, which the daemons use.
	SharesMemory func() bool
}

// Host keeps the daemons of a node as the agent wants them. It is the whole of the MPS pod.
type Host struct {
	control   Control
	files     files
	clock     clock.Clock
	processes Processes
	node      Node
	idle      map[int]time.Time    // since when a server has no clients, by PID
	silent    map[string]time.Time // until when a daemon that did not answer is not asked for unused servers, by resource
	logs      *logs

	nextHealth time.Time // when all daemons are asked again

	driverContainerSeen bool // it was ready while this process ran
}

// NewHost makes the host of the daemons that control speaks with.
func NewHost(control Control, n Node) *Host {
	return &Host{
		control: control, files: control.files, clock: control.clock, processes: n.Processes, node: n,
		idle: map[int]time.Time{}, silent: map[string]time.Time{}, logs: newLogs(control.files),
	}
}

// Run converges until the context ends. The daemons are then left running: the pod takes them with it, and where
// there is no pod their clients live on. The error is that only a new process helps: daemons and clients to come have no shared
// memory in common.
func (h *Host) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	for ctx.Err() == nil {
		thorough := h.isThorough()
		if err := h.Converge(ctx, thorough); err != nil && ctx.Err() == nil {
			log.Error(err, "MPS daemons differ from the desired state, trying again")
		}
		if thorough && !h.node.SharesMemory() {
			if err := h.giveUp(ctx); err == nil || !errors.Is(err, errInUse) {
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

// rest waits for pollInterval. While the container of the driver ends, it looks for servers that serve no pod meanwhile.
func (h *Host) rest(ctx context.Context) error {
	var errs []error
	for end := h.clock.Now().Add(pollInterval); ; {
		pause := end.Sub(h.clock.Now())
		if pause <= 0 {
			return errors.Join(errs...)
		}
		if h.driverContainerEnds() {
			pause = min(pause, unusedPoll)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-h.clock.After(pause):
		}
		if h.clock.Now().Before(end) {
			errs = append(errs, h.endUnusedServers(ctx, h.served()...))
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

// Unused reports whether nobody uses or is to use MPS on the node: no daemon is desired or recorded, and no pod has a pipe directory.
func (h *Host) Unused() (bool, error) {
	desired, err := h.files.desired()
	if err != nil {
		return false, err
	}
	ours, err := h.files.resources(recordName)
	if err != nil {
		return false, err
	}
	given, err := h.processes.WithVariable(pipeVariable)
	if err != nil {
		return false, err //nolint:wrapcheck // names what it did
	}
	return len(desired)+len(ours)+len(given) == 0, nil
}

// Converge starts, limits and ends daemons once. A daemon whose record says that it is as desired, or that it failed, is
// looked at again only when thorough; while the driver leaves, one that runs is looked at each time, since NVIDIA's driver manager
// unloads the module as soon as it has evicted the last pod. Each daemon's error is in its record as well.
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
	if h.driverContainerEnds() {
		errs = append(errs, h.endUnusedServers(ctx, ours...))
	}
	for _, resource := range ours {
		if !slices.ContainsFunc(desired, func(d plan.Daemon) bool { return d.Resource == resource }) {
			errs = append(errs, h.end(ctx, resource))
		}
	}
	for _, desired := range desired {
		errs = append(errs, h.ensure(ctx, desired, thorough))
	}
	return errors.Join(append(errs, h.markReady(desired, ours))...)
}

// end ends a daemon of ours. Its record goes last, so that a crash before that does not disown the daemon.
func (h *Host) end(ctx context.Context, resource string) error {
	was, recorded, err := h.files.record(resource)
	if err != nil || !recorded {
		return err
	}
	if err := h.quit(ctx, was); err != nil {
		return h.notStopped(was, err)
	}
	logr.FromContextOrDiscard(ctx).Info("Stopped MPS", "resource", resource)
	return h.files.remove(recordFile(resource))
}

// ensure makes a daemon as desired.
func (h *Host) ensure(ctx context.Context, desired plan.Daemon, thorough bool) error {
	if err := checkResource(desired.Resource); err != nil {
		return err
	}
	was, recorded, err := h.files.record(desired.Resource)
	if err != nil {
		return err
	}
	if was.answers(desired) && !thorough && (!was.Applied || !h.node.DriverLeaves()) {
		return nil
	}
	return h.bring(ctx, desired, was, recorded)
}

// bring asks a daemon and makes it as desired.
func (h *Host) bring(ctx context.Context, desired plan.Daemon, was record, recorded bool) error {
	percentage, answers, err := h.control.ask(ctx, desired.Resource)
	if err != nil {
		return err
	}
	if recorded && !answers {
		err := h.endUnreachable(ctx, was)
		if errors.Is(err, errInUse) && h.node.DriverLeaves() {
			return nil // it stays, and answers once the driver is back
		}
		if err != nil {
			return h.note(was, err)
		}
	}
	if was.unreadable && answers {
		if was.MultiUser, err = h.usersOf(ctx, desired); err != nil {
			return err
		}
	}
	return h.settle(ctx, desired, was, heard{percentage: percentage, answers: answers, recorded: recorded})
}

// usersOf is what a daemon whose record is lost counts as: as desired, so that it is only limited, while clients are connected, whom a new
// start would end; otherwise as not desired, so that it is started anew, because no other way shows which users it serves.
func (h *Host) usersOf(ctx context.Context, desired plan.Daemon) (multiUser bool, err error) {
	servers, err := h.control.Servers(ctx, desired.Resource)
	return desired.MultiUser == (len(connected(servers)) > 0), err
}

// heard is what is known of a daemon once it was asked.
type heard struct {
	percentage        int // of the multiprocessors, that it answered
	answers, recorded bool
}

// settle makes a daemon as desired that was asked.
func (h *Host) settle(ctx context.Context, desired plan.Daemon, was record, is heard) error {
	switch {
	case is.answers && !is.recorded:
		return errExternal
	case h.node.DriverLeaves():
		return h.yield(ctx, desired, was, is.answers)
	case is.answers && h.outlived(was):
		return h.renew(ctx, desired, was)
	case is.answers && was.answers(desired) && was.Applied && is.percentage == was.Answered:
		return h.keep(ctx, was)
	}
	return h.apply(ctx, desired, was, is.answers)
}

// outlived reports whether a daemon was started with another version of the driver than the node has now. Servers that it starts
// would be of that version.
func (h *Host) outlived(was record) bool {
	now := h.node.DriverVersion()
	return was.DriverVersion != "" && now != "" && now != was.DriverVersion
}

// renew starts a daemon again with the driver that the node has now. Pods that use no GPU at this moment find the new one. While a
// client is connected, the kernel module is still that of the daemon.
func (h *Host) renew(ctx context.Context, desired plan.Daemon, was record) error {
	servers, err := h.control.Servers(ctx, desired.Resource)
	if err != nil {
		return err
	}
	if len(connected(servers)) > 0 {
		return nil
	}
	if err := h.quit(ctx, was); err != nil {
		return h.note(was, fmt.Errorf("stopping %w for %s, which belongs to driver %s: %w", ErrDaemon, desired.Resource, was.DriverVersion, err))
	}
	return h.apply(ctx, desired, was, false)
}

// keep looks at a daemon that runs as desired: whether it still has its limits, and how it is used.
func (h *Host) keep(ctx context.Context, was record) error {
	limited, err := h.control.Limited(ctx, was.Daemon)
	if err != nil {
		return err
	}
	if !limited {
		return h.apply(ctx, was.Daemon, was, true)
	}
	now := was
	now.Error = ""
	if now.Use, err = h.look(ctx, was.Daemon, was.Use.Outdated); err != nil {
		return err
	}
	if reflect.DeepEqual(now, was) {
		return nil
	}
	return h.files.write(recordFile(was.Daemon.Resource), now)
}

// look finds how a daemon is used, and ends a server that has had no clients for a while.
func (h *Host) look(ctx context.Context, d plan.Daemon, outdated []int) (Use, error) {
	servers, err := h.control.Servers(ctx, d.Resource)
	if err != nil {
		return Use{}, err
	}
	for _, s := range servers {
		since, was := h.idle[s.PID]
		switch {
		case len(s.Clients) > 0:
			delete(h.idle, s.PID)
		case !was:
			h.idle[s.PID] = h.clock.Now()
		case h.node.DriverLeaves() || h.clock.Since(since) >= idleTime:
			delete(h.idle, s.PID)
			if err := h.control.EndServer(ctx, d.Resource, s.PID); err != nil {
				return Use{}, err
			}
		}
	}
	return h.use(d, servers, outdated)
}

// use finds how a daemon with these servers is used, and whether it can be.
func (h *Host) use(d plan.Daemon, servers []Server, outdated []int) (Use, error) {
	use, err := useOf(d, servers, outdated, h.processes)
	use.Unreachable = !h.node.SharesMemory()
	return use, err
}

// yield stops a daemon that would keep the driver loaded which is about to be replaced. A daemon that has clients stays, and so
// does one whose pods may connect at any time.
func (h *Host) yield(ctx context.Context, desired plan.Daemon, was record, answers bool) error {
	now := was
	now.Daemon = desired
	if answers {
		use, err := h.look(ctx, was.Daemon, was.Use.Outdated)
		if err != nil {
			return err
		}
		now.Use, now.Error = use, ""
	}
	if !answers || now.Use.idle() {
		now = record{Daemon: desired, Error: errDriverLeaves.Error()}
		if err := h.quit(ctx, was); err != nil {
			return h.notStopped(was, err)
		}
	} else if !sameDaemon(was.Daemon, desired) {
		return nil // later: until then the record is that of the daemon that runs
	}
	if reflect.DeepEqual(now, was) {
		return nil
	}
	return h.files.write(recordFile(desired.Resource), now)
}

// apply starts a daemon, or limits the one that answers, with the record written before and after. A daemon that serves users
// otherwise is started anew.
func (h *Host) apply(ctx context.Context, desired plan.Daemon, was record, answers bool) error {
	now := record{Daemon: desired, Use: was.Use, MultiUser: was.MultiUser, DriverVersion: was.DriverVersion}
	if err := h.files.write(recordFile(desired.Resource), now); err != nil {
		return err
	}
	if answers && was.MultiUser != desired.MultiUser {
		if err := h.quit(ctx, was); err != nil {
			return h.failed(now, err)
		}
		answers = false
	}
	did, do := "Started MPS", h.control.Start
	if answers {
		did, do = "Limited MPS", h.control.Limit
	} else {
		now.Use, now.DriverVersion = Use{}, h.node.DriverVersion()
	}
	if err := do(ctx, desired); err != nil {
		return h.failed(now, err)
	}
	percentage, err := h.control.Ask(ctx, desired.Resource)
	if err != nil {
		return h.failed(now, err)
	}
	now.Applied, now.Answered, now.MultiUser = true, percentage, desired.MultiUser
	servers, err := h.control.Servers(ctx, desired.Resource)
	if err != nil {
		return h.failed(now, err)
	}
	if now.Use, err = h.use(desired, servers, connected(servers)); err != nil { // the connected clients keep the limits that they have
		return h.failed(now, err)
	}
	logr.FromContextOrDiscard(ctx).Info(did, "resource", desired.Resource, "activeThreadPercentage", desired.ActiveThreadPercentage,
		"multiUser", desired.MultiUser, "clientsWithFormerLimits", len(now.Use.Outdated))
	return h.files.write(recordFile(desired.Resource), now)
}

// failed records why a daemon does not run as desired.
func (h *Host) failed(now record, why error) error {
	err := fmt.Errorf("starting %w for %s: %w", ErrDaemon, now.Daemon.Resource, why)
	now.Applied, now.Error = false, err.Error()
	return errors.Join(err, h.files.write(recordFile(now.Daemon.Resource), now))
}

// notStopped records why a daemon does not stop, and returns it.
func (h *Host) notStopped(was record, why error) error {
	return h.note(was, fmt.Errorf("stopping %w for %s: %w", ErrDaemon, was.Daemon.Resource, why))
}

// note records why a daemon of ours, which may go on running as it is recorded, is not as desired, and returns it.
func (h *Host) note(was record, why error) error {
	now := was
	now.Error = why.Error()
	if was.Error == now.Error || errors.Is(why, context.Canceled) {
		return why
	}
	return errors.Join(why, h.files.write(recordFile(was.Daemon.Resource), now))
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
