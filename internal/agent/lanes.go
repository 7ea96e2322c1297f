// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// run carries out steps, those of different GPUs side by side. A step that a pod or process blocks, or that fails, ends
// the steps of its GPUs; the others go on. An error means that the node could not be observed.
func (c applier) run(ctx context.Context, steps []plan.Step, now observation, o *outcome) (acted bool, err error) {
	var stopped failedGPUs
	seen := &sharedObservation{now: now}
	for _, stage := range plan.Stages(steps) {
		results := c.stage(ctx, stage, stopped, seen)
		var errs []error
		for _, r := range results {
			acted = acted || r.acted
			stopped = append(stopped, r.stopped...)
			o.waits = append(o.waits, r.waits...)
			o.failures = append(o.failures, r.failures...)
			errs = append(errs, r.err)
		}
		if err := errors.Join(errs...); err != nil {
			return acted, err
		}
	}
	return acted, nil
}

// stage carries out the lanes of a stage side by side.
func (c applier) stage(ctx context.Context, stage []plan.Lane, stopped failedGPUs, seen *sharedObservation) []result {
	results := make([]result, len(stage))
	barrier := newResetBarrier(stage)
	var running sync.WaitGroup
	for i, steps := range stage {
		running.Go(func() {
			l := lane{applier: c, seen: seen, hardware: barrier.forLane(c.hardware)}
			defer l.hardware.leave()
			results[i] = l.run(ctx, steps, slices.Clone(stopped))
		})
	}
	running.Wait()
	return results
}

// result is what became of a lane.
type result struct {
	acted    bool
	stopped  failedGPUs
	waits    []string
	failures []failure
	err      error // why the node could not be observed
}

// lane carries out steps one after the other.
type lane struct {
	applier

	seen     *sharedObservation
	hardware *laneHardware
}

func (l lane) run(ctx context.Context, steps plan.Lane, before failedGPUs) (r result) {
	for _, s := range steps {
		if before.has(s) || r.stopped.has(s) {
			continue
		}
		blockers, err := l.blockers(ctx, s)
		if err != nil {
			r.err = err
			return r
		}
		if len(blockers) > 0 {
			r.waits = append(r.waits, describeWait(s, blockers))
			r.stopped.add(s)
			continue
		}
		r.acted = true
		if err := l.do(ctx, s); err != nil {
			if peers, ok := errors.AsType[*gpu.PeersError](err); ok { // the next observation names them, and the next plan too
				r.waits = append(r.waits, fmt.Sprintf("%s: %s, since no fabric manager runs: waiting until all of them are idle", s, peers))
				r.stopped.add(s)
				continue
			}
			r.failures = append(r.failures, failure{step: s, err: err})
			r.stopped.add(s)
			continue
		}
		log(ctx).Info("Done", "step", s.String(), "gpu", s.Device())
	}
	return r
}

func (l lane) do(ctx context.Context, s plan.Step) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	began := l.clock.Now()
	err := s.Do(ctx, plan.Tools{Hardware: l.hardware, MPS: l.mps, Persistence: persistence{l.tools}})
	l.metrics.took(s, l.clock.Since(began), err)
	return err
}

// sharedObservation is the last observation, which lanes share: one looks for all who wait for it.
type sharedObservation struct {
	mu  sync.Mutex
	now observation
}

// fresh is an observation of the moment in which it is asked for, or of shortly before.
func (s *sharedObservation) fresh(ctx context.Context, o observer) (observation, error) {
	asked := o.clock.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if asked.Sub(s.now.at) < freshFor {
		return s.now, nil
	}
	now, err := o.observe(ctx)
	if err != nil {
		return observation{}, err
	}
	s.now = now
	return now, nil
}

// failedGPUs are the GPUs whose steps have ended early.
type failedGPUs []string

func (e *failedGPUs) add(s plan.Step) { *e = append(*e, plan.GPUs(s)...) }

// has reports whether a step concerns one of them: an MPS daemon is not started before all its GPUs are ready for it.
func (e *failedGPUs) has(s plan.Step) bool {
	return slices.ContainsFunc(plan.GPUs(s), func(uuid string) bool { return slices.Contains(*e, uuid) })
}

// resetBarrier lets the resets of several GPUs begin together. Each needs all handles of this process closed, so one
// that began by itself would keep the others' changes of mode waiting, or have to wait for them.
type resetBarrier struct {
	mu      sync.Mutex
	missing int           // lanes that neither wait to reset nor have ended
	all     chan struct{} // closed when none is missing
}

func newResetBarrier(stage []plan.Lane) *resetBarrier {
	return &resetBarrier{missing: len(stage), all: make(chan struct{})}
}

func (m *resetBarrier) arrive() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.missing--; m.missing == 0 {
		close(m.all)
	}
}

func (m *resetBarrier) forLane(h gpu.Hardware) *laneHardware {
	return &laneHardware{Hardware: h, all: m.all, leave: sync.OnceFunc(m.arrive)}
}

// member is the hardware as a lane uses it.
type laneHardware struct {
	gpu.Hardware

	all   <-chan struct{}
	leave func() // the others need not wait any more
}

// Reset waits for the other lanes to be ready to reset, or to have ended.
func (m *laneHardware) Reset(ctx context.Context, uuids ...string) error {
	m.leave()
	select {
	case <-m.all:
		return m.Hardware.Reset(ctx, uuids...)
	case <-ctx.Done():
		return ctx.Err()
	}
}
