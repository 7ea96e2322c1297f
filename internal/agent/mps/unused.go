// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-logr/logr"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// unusedPoll is how often servers that serve no pod are looked for while the container of the driver ends: between the
// end of the last pod and the moment when k8s-driver-manager unloads the module lies what the kubelet needs to clean
// up, half a second.
const unusedPoll = 100 * time.Millisecond

// unusedServers ends the servers that keep the old driver loaded though they serve no pod, while the driver's container
// ends.
type unusedServers struct {
	tools

	silent              map[string]time.Time // until when a daemon that did not answer is not asked, by resource
	driverContainerSeen bool                 // it was ready while this process ran
}

// driverContainerEnds reports whether the container of NVIDIA's driver was ready and is not any more: its pod is being
// deleted, or its successor is not ready yet. On a node that never had such a container, or where it ended before this
// process started, nothing is known of it.
func (u *unusedServers) driverContainerEnds() bool {
	ready := u.node.DriverContainerReady()
	u.driverContainerSeen = u.driverContainerSeen || ready
	return u.driverContainerSeen && !ready
}

// end ends the servers that serve no pod: they have the GPUs open, so that the module of the driver cannot be unloaded.
// The daemons stay: pods can start until NVIDIA's device plugin stops, and the next client starts another server. The
// processes of the node are looked through once for all daemons, since the driver may be away for long.
func (u *unusedServers) end(ctx context.Context, resources ...string) error {
	if len(resources) == 0 {
		return nil
	}
	pipes := make([]string, 0, len(resources))
	for _, resource := range resources {
		pipes = append(pipes, u.files.path(resource, PipeFolder))
	}
	given, err := u.processes.Mounted(pipes...)
	if err != nil {
		return err //nolint:wrapcheck // names what it did
	}
	var errs []error
	for i, resource := range resources {
		if len(podsAmong(given[pipes[i]], u.processes)) == 0 && !u.clock.Now().Before(u.silent[resource]) {
			errs = append(errs, u.endOf(ctx, resource))
		}
	}
	return errors.Join(errs...)
}

func (u *unusedServers) endOf(ctx context.Context, resource string) error {
	servers, err := u.control.Servers(ctx, resource)
	if err != nil { // a daemon that does not answer is the business of ensure and end, which must not wait for the next question
		u.silent[resource] = u.clock.Now().Add(healthPoll)
		return nil //nolint:nilerr // see above
	}
	servers = slices.DeleteFunc(servers, func(s Server) bool { return len(s.Clients) > 0 })
	if len(servers) == 0 {
		return nil
	}
	pods, err := podsOf(u.files.path(resource, PipeFolder), u.processes) // one may have started while the daemon was asked, and be about to connect
	if err != nil || len(pods) > 0 {
		return err
	}
	var errs []error
	for _, s := range servers {
		errs = append(errs, u.control.EndServer(ctx, resource, s.PID))
	}
	return errors.Join(errs...)
}

// served are the resources whose daemon had a server at the last look. It asks no daemon. Where that server has ended,
// another one may have started for a client of another user.
func (u *unusedServers) served() []string {
	resources, err := u.files.resources(recordName)
	if err != nil {
		return nil // which the next Converge reports
	}
	return slices.DeleteFunc(resources, func(resource string) bool {
		was, _, err := u.files.record(resource)
		return err != nil || was.Use.Server == 0
	})
}

// pipeVariable is the environment variable by which daemons, servers and clients find each other. It tells whose daemon
// a process of the MPS pod is, and nothing about a process of any other pod, which sets it as it likes.
const pipeVariable = "CUDA_MPS_PIPE_DIRECTORY"

// errInUse says that a daemon is not ended although it does not answer.
var errInUse = fmt.Errorf("%w does not answer, and pods use it: waiting until it answers or they have ended", ErrDaemon)

// errHasClients says why a daemon is not told to quit: it would wait for its clients, and refuse all others meanwhile
// (seen with driver 580.159.04: CUDA_ERROR_MPS_CONNECTION_FAILED).
var errHasClients = errors.New("it has clients: waiting until they have ended")

// inUse reports whether a daemon is not ended because it is used.
func inUse(err error) bool { return errors.Is(err, errInUse) || errors.Is(err, errHasClients) }

// stopper ends daemons of ours, also those that do not answer.
type stopper struct{ tools }

// quit ends a daemon of ours: by its process if it does not answer, or does not do what it is told. One that is in use
// stays, and goes on serving.
func (s stopper) quit(ctx context.Context, was record) error {
	resource := was.Daemon.Resource
	_, answers, err := s.control.ask(ctx, resource)
	if err != nil {
		return err
	}
	var failed error
	if answers {
		servers, err := s.control.Servers(ctx, resource)
		if err == nil && len(connected(servers)) > 0 {
			return errHasClients
		}
		failed = s.control.Quit(ctx, resource)
		if failed == nil || ctx.Err() != nil {
			return failed
		}
	}
	err = s.endUnreachable(ctx, was)
	switch {
	case failed != nil && errors.Is(err, errInUse):
		return failed
	case err != nil:
		return errors.Join(failed, err)
	}
	return s.control.Quit(ctx, resource)
}

// endUnreachable ends a daemon of ours that runs and does not answer, by its process: the driver's programs are away
// while the driver's container restarts, and a daemon may hang. A daemon that is in use stays, which is an error. A
// daemon that does not run is none.
func (s stopper) endUnreachable(ctx context.Context, was record) error {
	resource := was.Daemon.Resource
	daemons, servers, err := s.running(resource)
	if err != nil || len(daemons) == 0 {
		return err
	}
	given, err := podsOf(s.files.path(resource, PipeFolder), s.processes)
	if err != nil {
		return err
	}
	use := Use{Pods: given, Clients: slices.DeleteFunc(slices.Clone(was.Use.Clients), func(pid int) bool {
		_, runs := s.processes.User(pid)
		return !runs
	})}
	if !use.unused() {
		return fmt.Errorf("process %d for %s: %w", daemons[0], resource, errInUse)
	}
	var errs []error
	for _, pid := range slices.Concat(daemons, servers) {
		errs = append(errs, s.processes.Kill(pid))
	}
	err = startPace().poll(ctx, s.clock, func() (bool, error) {
		daemons, servers, err := s.running(resource)
		return len(daemons)+len(servers) == 0 && err == nil, err
	})
	if err := errors.Join(append(errs, err)...); err != nil {
		return fmt.Errorf("ending %w for %s, which does not answer: %w", ErrDaemon, resource, err)
	}
	logr.FromContextOrDiscard(ctx).Info("Ended MPS, which did not answer", "resource", resource, "process", daemons[0])
	return nil
}

// running finds the processes of a daemon of ours and of its servers. NVIDIA's has another pipe directory, since its
// pod mounts the MPS root elsewhere. A program that asks a daemon has no arguments.
func (s stopper) running(resource string) (daemons, servers []int, err error) {
	given, err := s.processes.WithVariable(pipeVariable)
	if err != nil {
		return nil, nil, err //nolint:wrapcheck // names what it did
	}
	for pid, pipe := range given {
		if pipe != s.files.path(resource, PipeFolder) {
			continue
		}
		switch is := s.processes.Describe(pid); {
		case is.Runs(controlProgram) && len(s.processes.Arguments(pid)) > 1:
			daemons = append(daemons, pid)
		case is.Runs(gpu.MPSServer):
			servers = append(servers, pid)
		}
	}
	slices.Sort(daemons)
	return daemons, servers, nil
}
