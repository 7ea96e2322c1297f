// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

func TestMetricsOfSteps(t *testing.T) {
	g := NewWithT(t)
	registry := prometheus.NewPedanticRegistry()
	m := newMetrics()
	g.Expect(m.register(registry)).To(Succeed())
	second := newMetrics()
	g.Expect(second.register(registry)).To(Succeed())

	steps := plan.Diff(gpu.Device{MIGCapable: true}, gpu.State{MIG: true})
	g.Expect(steps).To(HaveLen(1))
	m.took(steps[0], 2*time.Second, nil)
	second.took(steps[0], time.Second, errors.New("busy"))
	g.Expect(testutil.CollectAndCount(m.steps)).To(Equal(2), "one that succeeded, one that failed")
	families, err := registry.Gather()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(families[0].GetName()).To(Equal("gpusharing_agent_step_duration_seconds"))
	g.Expect(families[0].GetMetric()[0].String()).To(ContainSubstring(`value:"setMIG"`))
	problems, err := testutil.GatherAndLint(registry)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(problems).To(BeEmpty())
}
