// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// metrics are what the controller tells Prometheus: gauges of the last decision, and counts of what was carried out.
// A controller that does not lead decides nothing and tells none of the gauges.
type metrics struct {
	last atomic.Pointer[rollout.Decision]

	nodes, released, expected, advertised, oversubscription, started *prometheus.Desc

	evictions, refused, rollbacks *prometheus.CounterVec

	lastRollback *prometheus.GaugeVec
}

func newMetrics() *metrics {
	return &metrics{
		nodes: prometheus.NewDesc("gpusharing_nodes",
			"Nodes that a policy governs, or that go back to the state in which they were found (no policy), by how far they are.",
			[]string{"policy", "state"}, nil),
		released: prometheus.NewDesc("gpusharing_released_node",
			"1 for each node (gpunode) that no policy governs any more and that is not restored yet, by how far it is; absent while it waits for a slot in the budget.",
			[]string{"gpunode", "state"}, nil),
		expected: prometheus.NewDesc("gpusharing_resource_expected",
			"What the nodes of a policy advertise of an extended resource once all of them are ready.",
			[]string{"policy", "resource"}, nil),
		advertised: prometheus.NewDesc("gpusharing_resource_advertised",
			"What the nodes of a policy advertise of an extended resource now.",
			[]string{"policy", "resource"}, nil),
		oversubscription: prometheus.NewDesc("gpusharing_resource_oversubscription",
			"How many containers share what advertises one of an extended resource, the highest among the nodes; 1 if none do.",
			[]string{"policy", "resource"}, nil),
		started: prometheus.NewDesc("gpusharing_rollout_start_timestamp_seconds",
			"Since when a policy is not ready, in seconds since 1970; absent for one that is, and for one that is paused or waits for its "+
				"maintenance window, unless a node is blocked. Its age is time() minus this.",
			[]string{"policy"}, nil),
		evictions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpusharing_evictions_total",
			Help: "Pods whose eviction the API server accepted.",
		}, []string{"policy"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpusharing_evictions_refused_total",
			Help: "Evictions that a PodDisruptionBudget refused. Each is asked for again.",
		}, []string{"policy"}),
		rollbacks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "gpusharing_rollbacks_total",
			Help: "Changes that failed on a node, which then goes back to its last good state, by the reason of the failure.",
		}, []string{"policy", "reason"}),
		lastRollback: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "gpusharing_last_rollback_timestamp_seconds",
			Help: "When a change failed on a node last, which then goes back to its last good state, in seconds since 1970, by the reason of the failure.",
		}, []string{"policy", "reason"}),
	}
}

// shared are the metrics of a process: controllers of one, as in tests, have the same.
var shared = sync.OnceValue(func() *metrics {
	m := newMetrics()
	registry.Registry.MustRegister(m)
	return m
})

// decided takes over what was decided last. Counters of each policy begin at 0, since Prometheus does not notice the
// first increase of one that appears with it. Those of a policy that is gone go with it.
func (m *metrics) decided(d rollout.Decision) {
	if last := m.last.Load(); last != nil {
		for policy := range last.Policies {
			if _, there := d.Policies[policy]; !there {
				m.forget(policy)
			}
		}
	}
	for policy := range d.Policies {
		m.evictions.WithLabelValues(policy)
		m.refused.WithLabelValues(policy)
		for _, reason := range []string{v1alpha1.ReasonApplyTimedOut, v1alpha1.ReasonNotAdvertised} {
			m.rollbacks.WithLabelValues(policy, reason)
		}
	}
	m.last.Store(&d)
}

func (m *metrics) forget(policy string) {
	for _, kept := range m.kept() {
		kept.DeletePartialMatch(prometheus.Labels{"policy": policy})
	}
}

// did counts an action that was carried out on a node. Before is the desired state that had failed there before; nil:
// none had.
func (m *metrics) did(a action.Action, before *v1alpha1.FailedChange) {
	switch a := a.(type) {
	case action.Evict:
		m.evictions.WithLabelValues(a.Policy.Name).Inc()
	case action.Report:
		failed := a.Status.Rollout.Failed
		if failed != nil && failed.Reason != v1alpha1.ReasonDrainTimedOut && !equality.Semantic.DeepEqual(before, failed) {
			m.rollbacks.WithLabelValues(a.Policy.Name, failed.Reason).Inc()
			m.lastRollback.WithLabelValues(a.Policy.Name, failed.Reason).Set(float64(failed.Time.Unix()))
		}
	}
}

// refusal counts an eviction that was refused.
func (m *metrics) refusal(a action.Evict) { m.refused.WithLabelValues(a.Policy.Name).Inc() }

// Describe is part of prometheus.Collector.
func (m *metrics) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.nodes, m.released, m.expected, m.advertised, m.oversubscription, m.started} {
		to <- d
	}
	for _, kept := range m.kept() {
		kept.Describe(to)
	}
}

// Collect is part of prometheus.Collector.
func (m *metrics) Collect(to chan<- prometheus.Metric) {
	for _, kept := range m.kept() {
		kept.Collect(to)
	}
	d := m.last.Load()
	if d == nil {
		return
	}
	m.collectNodes(to, d.Nodes)
	for policy, s := range d.Policies {
		m.collectPolicy(to, policy, s)
	}
}

// vector has a series for each policy.
type vector interface {
	prometheus.Collector
	DeletePartialMatch(labels prometheus.Labels) int
}

// kept are the metrics that outlive a decision.
func (m *metrics) kept() []vector {
	return []vector{m.evictions, m.refused, m.rollbacks, m.lastRollback}
}

func (m *metrics) collectNodes(to chan<- prometheus.Metric, nodes []rollout.NodeState) {
	type series struct {
		policy string
		state  node.State
	}
	counts := map[series]int{}
	for _, n := range nodes {
		counts[series{n.Policy, n.State}]++
		if n.Policy == "" && n.State != node.UpToDate && n.Reason != v1alpha1.ReasonWaitingForBudget {
			to <- gauge(m.released, 1, n.Node, string(n.State))
		}
	}
	for s, n := range counts {
		to <- gauge(m.nodes, float64(n), s.policy, string(s.state))
	}
}

func (m *metrics) collectPolicy(to chan<- prometheus.Metric, policy string, s v1alpha1.GPUSharingPolicyStatus) {
	for _, r := range s.Resources {
		to <- gauge(m.expected, float64(r.Expected), policy, r.Name)
		to <- gauge(m.advertised, float64(r.Advertised), policy, r.Name)
		to <- gauge(m.oversubscription, float64(max(r.Oversubscription, 1)), policy, r.Name)
	}
	if c, found := condition.Find(s.Conditions, v1alpha1.ConditionReady); found && c.Status != metav1.ConditionTrue && !isIntended(c.Reason, s.Nodes) {
		to <- gauge(m.started, float64(c.LastTransitionTime.Unix()), policy)
	}
}

// isIntended reports whether a policy is not ready with that reason because its user wants it so, for as long as he
// wants. Its reason is Paused as soon as one of its nodes waits for that, but a node that is blocked, such as one that
// no longer advertises what it did, waits for something else.
func isIntended(reason string, nodes v1alpha1.NodeCounts) bool {
	return nodes.Blocked == 0 && node.ClassOf(reason).Is(node.Chosen)
}

func gauge(d *prometheus.Desc, value float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}
