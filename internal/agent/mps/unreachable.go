// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/go-logr/logr"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

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
