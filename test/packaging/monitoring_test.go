// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"encoding/json"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// metricName finds what is selected from in an expression: a name before the braces that select its series.
var metricName = regexp.MustCompile(`([a-z_]+)\{`)

// ownMetric finds the names that our programs give to their metrics.
var ownMetric = regexp.MustCompile(`"(gpusharing_[a-z_]+)"`)

// offered are our own metrics, those of every program that uses controller-runtime, and what Prometheus itself adds.
func offered(t *testing.T) map[string]bool {
	t.Helper()
	_ = controller.Options{} // its package registers the metrics of controllers
	registry, isCollector := metrics.Registry.(prometheus.Collector)
	NewWithT(t).Expect(isCollector).To(BeTrue())
	descriptions := make(chan *prometheus.Desc)
	go func() {
		registry.Describe(descriptions)
		close(descriptions)
	}()
	names := map[string]bool{"up": true}
	for _, ours := range ownMetric.FindAllStringSubmatch(contents(t, "internal/*/*metrics.go", "internal/controller/*/metrics.go"), -1) {
		names[ours[1]] = true
	}
	for d := range descriptions {
		name := regexp.MustCompile(`fqName: "([^"]+)"`).FindStringSubmatch(d.String())
		names[name[1]] = true
	}
	return names
}

func TestNothingIsWatchedThatNobodyMeasures(t *testing.T) {
	g := NewWithT(t)
	names := offered(t)
	g.Expect(names).To(SatisfyAll(HaveKey("controller_runtime_reconcile_errors_total"), HaveKey("gpusharing_nodes")))
	objects := newHelm(t).render(t, everything()...)
	for _, expression := range append(alerts(t, objects), panels(t, objects)...) {
		used := metricName.FindAllStringSubmatch(expression, -1)
		g.Expect(used).NotTo(BeEmpty(), expression)
		for _, u := range used {
			g.Expect(names).To(HaveKey(strings.TrimSuffix(strings.TrimSuffix(u[1], "_bucket"), "_count")), expression)
		}
	}
}

// alerts are the expressions of the alerts, each of which says what to do.
func alerts(t *testing.T, objects []*unstructured.Unstructured) []string {
	t.Helper()
	g := NewWithT(t)
	var rule struct {
		Spec struct {
			Groups []struct {
				Rules []struct {
					Alert, Expr, For    string
					Labels, Annotations map[string]string
				}
			}
		}
	}
	data, err := find(t, objects, "PrometheusRule gpu-sharing").MarshalJSON()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(json.Unmarshal(data, &rule)).To(Succeed())
	var expressions []string
	for _, r := range rule.Spec.Groups[0].Rules {
		g.Expect(r.For+r.Expr).To(MatchRegexp(`^[0-9]+[mh]|\[[0-9]+[mh]\]`), r.Alert+" does not fire at once")
		g.Expect(r.Expr).NotTo(MatchRegexp(`by \([^)]*state[^)]*\) \(gpusharing_released_node`), r.Alert+" begins to wait anew with each attempt")
		g.Expect(r.Labels).To(HaveKey("severity"), r.Alert)
		g.Expect(r.Annotations).To(SatisfyAll(HaveKey("summary"), HaveKey("description")), r.Alert)
		expressions = append(expressions, r.Expr)
	}
	g.Expect(expressions).NotTo(BeEmpty())
	return expressions
}

// panels are the expressions of the dashboard.
func panels(t *testing.T, objects []*unstructured.Unstructured) []string {
	t.Helper()
	g := NewWithT(t)
	var dashboard struct {
		Panels []struct {
			ID      int
			Title   string
			Targets []struct{ Expr string }
		}
	}
	content := as[corev1.ConfigMap](t, find(t, objects, "ConfigMap gpu-sharing-dashboard")).Data["gpu-sharing.json"]
	g.Expect(json.Unmarshal([]byte(content), &dashboard)).To(Succeed())
	var expressions []string
	for i, p := range dashboard.Panels {
		g.Expect(p.ID).To(Equal(i+1), p.Title)
		for _, target := range p.Targets {
			expressions = append(expressions, target.Expr)
		}
	}
	g.Expect(expressions).NotTo(BeEmpty())
	return expressions
}

// TestAlerts plays series to the chart's alerts, with Prometheus' own promtool.
func TestAlerts(t *testing.T) {
	promtool := strings.TrimSpace(run(t, exec.CommandContext(t.Context(), path(t, "hack/prometheus/build.sh"), "promtool")))
	command := exec.CommandContext(t.Context(), promtool, "test", "rules", "alerts.yaml")
	command.Dir = path(t, "test/packaging/testdata")
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("promtool test rules: %v\n%s", err, out)
	}
}
