// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"path"
	"reflect"
	"slices"
	"time"

	"github.com/go-logr/logr"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// idleTime is how long a server without clients stays: long enough for the next job of a series, short enough that the
// unload of a driver is tried again after it. The next client starts another server.
const idleTime = 10 * time.Second

// errExternal says that a daemon is not ours to change.
var errExternal = fmt.Errorf("%w: NVIDIA's own MPS DaemonSet serves this resource; "+
	"waiting until it has ended, which it does where the label nvidia.com/mps.capable of the node is not true", ErrDaemon)

// errDriverLeaves says why a daemon does not run: it would keep the old driver loaded.
var errDriverLeaves = fmt.Errorf("%w: stopped because the NVIDIA driver of the node is about to change and no pod uses MPS; "+
	"it starts once the driver is ready", ErrDaemon)

// errRenumbered says why a daemon does not get other limits: it takes the index of a GPU, and nobody knows by which it
// counts now.
var errRenumbered = fmt.Errorf("%w: it started when the node had other GPUs, which it may count differently; it starts anew once "+
	"no client is connected", ErrDaemon)

// daemonManager keeps each daemon as desired:
//
//	ensure → reconcile → start or limit (apply) | look after it (keep) | start it again with another driver (restart) |
//	         make room for one (stopForDriver)
//	end    → not desired any more
type daemonManager struct {
	stopper

	idle map[int]time.Time // since when a server has no clients, by PID
}

// end ends a daemon of ours. Its record goes last, so that a crash before that does not disown the daemon.
func (k *daemonManager) end(ctx context.Context, resource string) error {
	was, recorded, err := k.files.record(resource)
	if err != nil || !recorded {
		return err
	}
	if err := k.quit(ctx, was); err != nil {
		return k.notStopped(was, err)
	}
	if err := k.clearPipe(was); err != nil {
		return err
	}
	logr.FromContextOrDiscard(ctx).Info("Stopped MPS", "resource", resource)
	return k.files.remove(recordFile(resource))
}

// clearPipe empties the pipe directory of a daemon of ours that does not run: as root on the node the next one would
// follow the links and open the named pipes that a client has left there.
func (k *daemonManager) clearPipe(was record) error {
	if was.Daemon.Resource == "" { // nobody's, or NVIDIA's
		return nil
	}
	return host.Clear(k.files.path(was.Daemon.Resource, PipeFolder)) //nolint:wrapcheck // names what it did
}

// ensure makes a daemon as desired.
func (k *daemonManager) ensure(ctx context.Context, desired plan.Daemon, thorough bool) error {
	if err := checkResource(desired.Resource); err != nil {
		return err
	}
	was, recorded, err := k.files.record(desired.Resource)
	if err != nil {
		return err
	}
	if was.answers(desired) && !thorough && (!was.Applied || !k.node.DriverLeaves()) {
		return nil
	}
	return k.reconcile(ctx, desired, was, recorded)
}

// reconcile asks a daemon and makes it as desired.
func (k *daemonManager) reconcile(ctx context.Context, desired plan.Daemon, was record, recorded bool) error {
	percentage, answers, err := k.control.ask(ctx, desired.Resource)
	if err != nil {
		return err
	}
	if recorded && !answers {
		err := k.endUnreachable(ctx, was)
		if errors.Is(err, errInUse) && k.node.DriverLeaves() {
			return nil // it stays, and answers once the driver is back
		}
		if replaced := k.control.checkListener(desired.Resource); err != nil && replaced != nil {
			err = fmt.Errorf("%w: %w", err, replaced) // the end says who does it, and is kept where there is little room
		}
		if err != nil {
			return k.note(was, err)
		}
	}
	if was.unreadable && answers {
		if was.MultiUser, err = k.assumedMultiUser(ctx, desired); err != nil {
			return err
		}
	}
	return k.reconcileState(ctx, desired, was, daemonState{percentage: percentage, answers: answers, recorded: recorded})
}

// assumedMultiUser is what a daemon whose record is lost counts as: as desired, so that it is only limited, while
// clients are connected, whom a new start would end; otherwise as not desired, so that it is started anew, because no
// other way shows which users it serves.
func (k *daemonManager) assumedMultiUser(ctx context.Context, desired plan.Daemon) (multiUser bool, err error) {
	servers, err := k.control.Servers(ctx, desired.Resource)
	return desired.MultiUser == (len(connected(servers)) > 0), err
}

// daemonState is what is known of a daemon once it was asked.
type daemonState struct {
	percentage        int // of the multiprocessors, that it answered
	answers, recorded bool
}

// reconcileState makes a daemon as desired that was asked.
func (k *daemonManager) reconcileState(ctx context.Context, desired plan.Daemon, was record, is daemonState) error {
	switch {
	case is.answers && !is.recorded:
		return errExternal
	case k.node.DriverLeaves():
		return k.stopForDriver(ctx, desired, was, is.answers)
	case is.answers && k.outlived(was):
		return k.restart(ctx, desired, was, nil)
	case is.answers && renumbered(was.Daemon, desired):
		return k.restart(ctx, desired, was, errRenumbered)
	case is.answers && was.answers(desired) && was.Applied && is.percentage == was.Answered:
		return k.keep(ctx, was)
	}
	return k.apply(ctx, desired, was, is.answers)
}

// outlived reports whether a daemon was started with another version of the driver than the node has now. Servers that
// it starts would be of that version.
func (k *daemonManager) outlived(was record) bool {
	now := k.node.DriverVersion()
	return was.DriverVersion != "" && now != "" && now != was.DriverVersion
}

// renumbered reports whether a GPU has another index than when a daemon was limited: one has fallen off the bus, and the
// driver counts those that are left.
func renumbered(was, desired plan.Daemon) bool {
	return slices.ContainsFunc(desired.Devices, func(d plan.DaemonDevice) bool {
		return slices.ContainsFunc(was.Devices, func(o plan.DaemonDevice) bool { return o.UUID == d.UUID && o.Index != d.Index })
	})
}

// restart starts a daemon again with the driver and the GPUs that the node has now. Pods that use no GPU at this moment
// find the new one. While a client is connected, the kernel module is still that of the daemon. It waits then, with a
// reason if it has to.
func (k *daemonManager) restart(ctx context.Context, desired plan.Daemon, was record, waits error) error {
	servers, err := k.control.Servers(ctx, desired.Resource)
	if err != nil {
		return err
	}
	if len(connected(servers)) > 0 {
		if waits == nil {
			return nil
		}
		return k.note(was, waits)
	}
	if err := k.quit(ctx, was); err != nil {
		return k.note(was, fmt.Errorf("stopping %w for %s, which started with driver %s: %w", ErrDaemon, desired.Resource, was.DriverVersion, err))
	}
	return k.apply(ctx, desired, was, false)
}

// keep looks at a daemon that runs as desired: whether it still has its limits, and how it is used.
func (k *daemonManager) keep(ctx context.Context, was record) error {
	limited, err := k.control.Limited(ctx, was.Daemon)
	if err != nil {
		return err
	}
	if !limited {
		return k.apply(ctx, was.Daemon, was, true)
	}
	now := was
	now.Error = ""
	if now.Use, err = k.look(ctx, was.Daemon, was.Use.Outdated); err != nil {
		return err
	}
	if reflect.DeepEqual(now, was) {
		return nil
	}
	return k.files.write(recordFile(was.Daemon.Resource), now)
}

// look finds how a daemon is used, and ends a server that has had no clients for a while.
func (k *daemonManager) look(ctx context.Context, d plan.Daemon, outdated []int) (Use, error) {
	servers, err := k.control.Servers(ctx, d.Resource)
	if err != nil {
		return Use{}, err
	}
	for _, s := range servers {
		since, was := k.idle[s.PID]
		switch {
		case len(s.Clients) > 0:
			delete(k.idle, s.PID)
		case !was:
			k.idle[s.PID] = k.clock.Now()
		case k.node.DriverLeaves() || k.clock.Since(since) >= idleTime:
			delete(k.idle, s.PID)
			if err := k.control.EndServer(ctx, d.Resource, s.PID); err != nil {
				return Use{}, err
			}
		}
	}
	return k.use(d, servers, outdated)
}

// use finds how a daemon with these servers is used, and whether it can be.
func (k *daemonManager) use(d plan.Daemon, servers []Server, outdated []int) (Use, error) {
	use, err := useOf(k.files.path(d.Resource, PipeFolder), d, servers, outdated, k.processes)
	use.Unreachable = !k.node.SharesMemory()
	return use, err
}

// stopForDriver stops a daemon that would keep the driver loaded which is about to be replaced. A daemon that has
// clients stays, and so does one whose pods may connect at any time.
func (k *daemonManager) stopForDriver(ctx context.Context, desired plan.Daemon, was record, answers bool) error {
	now := was
	now.Daemon = desired
	if answers {
		use, err := k.look(ctx, was.Daemon, was.Use.Outdated)
		if err != nil {
			return err
		}
		now.Use, now.Error = use, ""
	}
	if !answers || now.Use.unused() {
		now = record{Daemon: desired, Error: errDriverLeaves.Error()}
		if err := k.quit(ctx, was); err != nil {
			return k.notStopped(was, err)
		}
	} else if !sameDaemon(was.Daemon, desired) {
		return nil // later: until then the record is that of the daemon that runs
	}
	if reflect.DeepEqual(now, was) {
		return nil
	}
	return k.files.write(recordFile(desired.Resource), now)
}

// apply starts a daemon, or limits the one that answers, with the record written before and after. A daemon that serves
// users otherwise is started anew.
func (k *daemonManager) apply(ctx context.Context, desired plan.Daemon, was record, answers bool) error {
	now := record{Daemon: desired, Use: was.Use, MultiUser: was.MultiUser, DriverVersion: was.DriverVersion, Socket: was.Socket}
	if err := k.files.write(recordFile(desired.Resource), now); err != nil {
		return err
	}
	if answers && was.MultiUser != desired.MultiUser {
		if err := k.quit(ctx, was); err != nil {
			return k.recordFailure(now, err)
		}
		answers = false
	}
	did, do := "Started MPS", k.control.Start
	if answers {
		did, do = "Limited MPS", k.control.Limit
	} else {
		now.Use, now.DriverVersion, now.Socket = Use{}, k.node.DriverVersion(), host.FileID{} // its socket is a new one
		if err := errors.Join(k.clearPipe(was), k.files.write(recordFile(desired.Resource), now)); err != nil {
			return err
		}
	}
	if err := do(ctx, desired); err != nil {
		return k.recordFailure(now, err)
	}
	percentage, err := k.control.Ask(ctx, desired.Resource)
	if err != nil {
		return k.recordFailure(now, err)
	}
	now.Applied, now.Answered, now.MultiUser = true, percentage, desired.MultiUser
	if now.Socket == (host.FileID{}) {
		listens, err := k.control.listener(desired.Resource)
		if err != nil {
			return k.recordFailure(now, err)
		}
		now.Socket = listens.Socket
	}
	servers, err := k.control.Servers(ctx, desired.Resource)
	if err != nil {
		return k.recordFailure(now, err)
	}
	if now.Use, err = k.use(desired, servers, connected(servers)); err != nil { // the connected clients keep the limits that they have
		return k.recordFailure(now, err)
	}
	logr.FromContextOrDiscard(ctx).Info(did, "resource", desired.Resource, "activeThreadPercentage", desired.ActiveThreadPercentage,
		"multiUser", desired.MultiUser, "clientsWithFormerLimits", len(now.Use.Outdated))
	return k.files.write(recordFile(desired.Resource), now)
}

// recordFailure records why a daemon does not run as desired.
func (k *daemonManager) recordFailure(now record, why error) error {
	err := fmt.Errorf("starting %w for %s: %w", ErrDaemon, now.Daemon.Resource, why)
	now.Applied, now.Error = false, err.Error()
	return errors.Join(err, k.files.write(recordFile(now.Daemon.Resource), now))
}

// notStopped records why a daemon does not stop, and returns it.
func (k *daemonManager) notStopped(was record, why error) error {
	return k.note(was, fmt.Errorf("stopping %w for %s: %w", ErrDaemon, was.Daemon.Resource, why))
}

// note records why a daemon of ours, which may go on running as it is recorded, is not as desired, and returns it.
func (k *daemonManager) note(was record, why error) error {
	now := was
	now.Error = why.Error()
	if was.Error == now.Error || errors.Is(why, context.Canceled) {
		return why
	}
	return errors.Join(why, k.files.write(recordFile(was.Daemon.Resource), now))
}

// Persistence is what became of the persistence mode of a GPU for the sake of its compute mode.
type Persistence string

// The records of it.
const (
	PersistenceNotHeld     Persistence = ""
	PersistenceHeld        Persistence = "held"        // turned on here, so to be turned off
	PersistenceUnsupported Persistence = "unsupported" // the driver does not turn it on
)

// persistenceFile is the record of a GPU. It lies in the MPS root, which is gone with a reboot like the mode itself.
func persistenceFile(uuid string) string { return path.Join(desiredDir, "persistence", uuid) }

// Persistence is what is recorded of a GPU.
func (v *View) Persistence(uuid string) (Persistence, error) {
	var p Persistence
	_, err := v.files.read(persistenceFile(uuid), &p)
	return p, err
}

// RecordPersistence records what becomes of a GPU.
func (v *View) RecordPersistence(uuid string, p Persistence) error {
	if p == PersistenceNotHeld {
		return v.files.remove(persistenceFile(uuid))
	}
	return v.files.write(persistenceFile(uuid), p)
}
