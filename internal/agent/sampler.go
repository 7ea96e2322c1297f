// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// Sampler measures the GPUs at an interval and keeps in memory, while the agent runs, what the samples come to. It
// writes nothing.
type Sampler struct {
	interval time.Duration // 0: it measures nothing
	measure  func(context.Context) (usage.Report, error)
	clock    clock.WithTicker

	mu       sync.Mutex
	recorder *usage.Recorder
}

// NewSampler makes the sampler of a node, of what measure measures. The interval is 0 to measure nothing.
func NewSampler(node string, interval time.Duration, measure func(context.Context) (usage.Report, error), now clock.WithTicker) *Sampler {
	return &Sampler{interval: interval, measure: measure, clock: now, recorder: usage.NewRecorder(node, now.Now(), interval)}
}

// Start samples until the context ends. A sample that takes longer than the interval delays the next one.
func (s *Sampler) Start(ctx context.Context) error {
	if s.interval == 0 {
		return nil
	}
	ticker := s.clock.NewTicker(s.interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			s.sample(ctx)
		}
	}
}

func (s *Sampler) sample(ctx context.Context) {
	report, err := s.measure(ctx)
	if ctx.Err() != nil {
		return // it was cut off
	}
	if err != nil {
		log(ctx).V(1).Info("Not all GPUs could be measured", "reason", err.Error()) // the history counts it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recorder.Add(report, err == nil, s.clock.Now())
}

// ServeHTTP answers with the history as JSON, or with 404 if none is kept.
func (s *Sampler) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if s.interval == 0 {
		http.Error(w, "the agent keeps no history: set metrics.sampling.interval of the Helm chart (docs/monitoring.md)", http.StatusNotFound)
		return
	}
	s.mu.Lock()
	history := s.recorder.History()
	s.mu.Unlock()
	writeJSON(w, history)
}

func writeJSON(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // the client has gone
}
