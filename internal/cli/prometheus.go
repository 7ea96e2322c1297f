// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/api"
	prometheus "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
)

// queryTimeout bounds one question to Prometheus, which may have to look through days of samples.
const queryTimeout = time.Minute

// askPrometheus asks a Prometheus of that URL.
func askPrometheus(ctx context.Context, url string, queries map[advice.Query]string, now time.Time) (advice.Seen, error) {
	c, err := api.NewClient(api.Config{Address: url})
	if err != nil {
		return advice.Seen{}, hint(fmt.Errorf("--prometheus %q is no URL: %w", url, err))
	}
	answers, warned := map[advice.Query][]advice.Sample{}, []string{}
	for name, query := range queries {
		samples, warnings, err := ask(ctx, prometheus.NewAPI(c), query, now)
		if err != nil {
			return advice.Seen{}, fmt.Errorf("asking Prometheus for %s (%s): %w", name, query, err)
		}
		answers[name] = samples
		warned = append(warned, warnings...)
	}
	seen := advice.FromPrometheus(answers, now)
	if len(warned) > 0 {
		seen.Lacks = append(seen.Lacks, "Prometheus warned: "+strings.Join(warned, ", "))
	}
	return seen, nil
}

func ask(ctx context.Context, from prometheus.API, query string, now time.Time) ([]advice.Sample, []string, error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	answer, warnings, err := from.Query(ctx, query, now)
	if err != nil {
		return nil, nil, err
	}
	vector, is := answer.(model.Vector)
	if !is {
		return nil, nil, fmt.Errorf("it answered with a %s", answer.Type())
	}
	samples := make([]advice.Sample, 0, len(vector))
	for _, s := range vector {
		labels := make(map[string]string, len(s.Metric))
		for name, value := range s.Metric {
			labels[string(name)] = string(value)
		}
		samples = append(samples, advice.Sample{Labels: labels, Value: float64(s.Value)})
	}
	return samples, warnings, nil
}
