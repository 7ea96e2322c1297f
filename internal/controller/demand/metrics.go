// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// metrics are what the controller reports to Prometheus of each policy with MIG layouts on demand.
type metrics struct{ *prometheus.GaugeVec }

func newMetrics() *metrics {
	return &metrics{prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "gpusharing_mig_on_demand_pods",
		Help: "Pods that wait for MIG instances of a policy with layouts on demand, by what would become of them: ready (instances are idle " +
			"for them), planned (changes would make some) or unmet.",
	}, []string{"policy", "outcome"})}
}

// register adds the metrics to a registry. Controllers of one process, as in tests, share those of the first.
func (m *metrics) register(registry prometheus.Registerer) (*metrics, error) {
	err := registry.Register(m)
	if there, is := errors.AsType[prometheus.AlreadyRegisteredError](err); is {
		if first, same := there.ExistingCollector.(*metrics); same {
			return first, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("registering the metrics of MIG on demand: %w", err)
	}
	return m, nil
}

// set takes over what policies report.
func (m *metrics) set(reported map[string]*v1alpha1.OnDemandStatus) {
	m.Reset()
	for policy, s := range reported {
		if s == nil {
			continue
		}
		for outcome, pods := range map[string]int32{"ready": s.Ready, "planned": s.Planned, "unmet": s.Unmet} {
			m.WithLabelValues(policy, outcome).Set(float64(pods))
		}
	}
}
