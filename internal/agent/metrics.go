// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/memoryguard"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// metrics are what the agent tells Prometheus of its own work.
type metrics struct {
	steps       *prometheus.HistogramVec
	limitedPods *prometheus.GaugeVec
	limitErrors *prometheus.CounterVec
}

func newMetrics() *metrics {
	return &metrics{limitedPods: prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "gpusharing_memory_limit_pods",
		Help: "Pods with a share of a time-sliced GPU, by why the driver does not limit their memory; Enforced: it does, or with Report would.",
	}, []string{"reason"}), limitErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "gpusharing_memory_limit_errors_total", Help: "Memory limits that could not be read, set or recorded, by the reason that their pods get.",
	}, []string{"reason"}), steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "gpusharing_agent_step_duration_seconds",
		Help: "How long steps of plans took, by kind of step (such as createInstance) and whether they succeeded.",
		// From a compute mode, which is set at once, to a reset of MIG mode, which takes up to three minutes.
		Buckets: []float64{0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 180},
	}, []string{"step", "result"})}
}

// register adds the metrics to a registry. Agents of one process, as in tests, share those of the first.
func (m *metrics) register(registry prometheus.Registerer) error {
	err := registry.Register(m.steps)
	if there, is := errors.AsType[prometheus.AlreadyRegisteredError](err); is {
		if first, same := there.ExistingCollector.(*prometheus.HistogramVec); same {
			m.steps = first
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("registering the metrics: %w", err)
	}
	return nil
}

// registerLimits adds those of memory limits. Agents of one process, as in tests, share those of the first.
func (m *metrics) registerLimits(registry prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{m.limitedPods, m.limitErrors} {
		err := registry.Register(c)
		if _, is := errors.AsType[prometheus.AlreadyRegisteredError](err); err != nil && !is {
			return fmt.Errorf("registering the metrics of memory limits: %w", err)
		}
	}
	return nil
}

// limited counts pods by reason.
func (m *metrics) limited(pods []memoryguard.PodLimit) {
	m.limitedPods.Reset()
	for _, p := range pods {
		m.limitedPods.WithLabelValues(cmp.Or(p.Reason, v1alpha1.ReasonEnforced)).Inc()
	}
}

// took notes how long a step took.
func (m *metrics) took(s plan.Step, duration time.Duration, err error) {
	result := "succeeded"
	if err != nil {
		result = "failed"
	}
	m.steps.WithLabelValues(reflect.TypeOf(s).Name(), result).Observe(duration.Seconds())
}
