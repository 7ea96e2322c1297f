// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// restPeriod is how often is looked whether the program is at rest.
	restPeriod = 10 * time.Second
	// restShare is the share of what it holds below which a program that allocates so much in a period is at rest: what
	// the heartbeats of the kubelets take.
	restShare = 0.25
)

// rest gives memory back to the system once the program is at rest after work. Go keeps what it has once needed for
// long, and a rollout over many nodes needs several times what the program holds while nothing changes.
type rest struct {
	read    func() (allocated, live uint64) // bytes: all that was ever allocated, and what is in use
	release func()

	before uint64 // what was allocated by the last look
	worked bool   // since memory was given back last
}

func newRest() *rest { return &rest{read: readMemory, release: debug.FreeOSMemory} }

// Start looks until the context ends. It implements manager.Runnable.
func (r *rest) Start(ctx context.Context) error {
	ticker := time.NewTicker(restPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			r.look()
		}
	}
}

// NeedLeaderElection is false: one that waits to lead holds the cluster as well.
func (*rest) NeedLeaderElection() bool { return false }

func (r *rest) look() {
	allocated, live := r.read()
	works := float64(allocated-r.before) > restShare*float64(live)
	r.before = allocated
	if r.worked && !works {
		r.release()
	}
	r.worked = works
}

func readMemory() (allocated, live uint64) {
	samples := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(samples)
	return samples[0].Value.Uint64(), samples[1].Value.Uint64()
}
