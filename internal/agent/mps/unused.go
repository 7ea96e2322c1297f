// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"slices"
	"time"
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
