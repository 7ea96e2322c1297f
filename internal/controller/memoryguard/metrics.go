// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
)

// metrics are what the controller reports to Prometheus of each policy that has a memory guard.
type metrics struct {
	pressure         *prometheus.GaugeVec
	evictions, holds *prometheus.CounterVec
}

func newMetrics() *metrics {
	return &metrics{
		pressure: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "gpusharing_memory_guard_gpus_under_pressure",
			Help: "GPUs of a policy with a memory guard that are almost full while a container uses more than its share.",
		}, []string{"policy"}),
		evictions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpusharing_memory_guard_evictions_total",
			Help: "Pods whose eviction for the memory guard of a policy the API server accepted.",
		}, []string{"policy"}),
		holds: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpusharing_memory_guard_evictions_refused_total",
			Help: "Evictions for the memory guard of a policy that the API server refused, because of a PodDisruptionBudget or " +
				"because it denies the request. Each is asked for again while the pressure lasts.",
		}, []string{"policy"}),
	}
}

// shared are the metrics of a process: controllers of one, as in tests, have the same.
var shared = sync.OnceValue(func() *metrics {
	m := newMetrics()
	registry.Registry.MustRegister(m)
	return m
})

// found takes over how many GPUs of each policy with a guard are under pressure. Counters begin at 0, since Prometheus
// does not notice the first increase of one that appears with it.
func (m *metrics) found(gpus map[string]int) {
	m.pressure.Reset()
	for policy, n := range gpus {
		m.pressure.WithLabelValues(policy).Set(float64(n))
		m.evictions.WithLabelValues(policy)
		m.holds.WithLabelValues(policy)
	}
}

func (m *metrics) evicted(policy string) { m.evictions.WithLabelValues(policy).Inc() }

func (m *metrics) refused(policy string) { m.holds.WithLabelValues(policy).Inc() }

// Describe is part of prometheus.Collector.
func (m *metrics) Describe(to chan<- *prometheus.Desc) {
	m.pressure.Describe(to)
	m.evictions.Describe(to)
	m.holds.Describe(to)
}

// Collect is part of prometheus.Collector.
func (m *metrics) Collect(to chan<- prometheus.Metric) {
	m.pressure.Collect(to)
	m.evictions.Collect(to)
	m.holds.Collect(to)
}
