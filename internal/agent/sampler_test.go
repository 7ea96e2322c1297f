// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// history asks a sampler as a client does.
func history(g *WithT, s *agent.Sampler) (usage.History, *httptest.ResponseRecorder) {
	answer := httptest.NewRecorder()
	s.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, usage.Path+"?"+usage.HistoryQuery, nil))
	var h usage.History
	if answer.Code == http.StatusOK {
		g.Expect(json.Unmarshal(answer.Body.Bytes(), &h)).To(Succeed())
	}
	return h, answer
}

func TestASamplerMeasuresAtItsIntervalAndServesWhatItKeeps(t *testing.T) {
	g := NewWithT(t)
	began := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	clock := clocktesting.NewFakeClock(began)
	type outcome struct{ err error }
	measured := make(chan outcome)
	s := agent.NewSampler("n1", time.Minute, func(context.Context) (usage.Report, error) {
		result := <-measured
		used := gib
		return usage.Report{Node: "n1", Units: []usage.Unit{{
			GPU: "GPU-1", Containers: []usage.Container{{Name: usage.Name{Namespace: "ml", Pod: "train", Container: "main"}, MemoryBytes: &used}},
		}}}, result.err
	}, clock)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Start(ctx) }()
	g.Eventually(clock.HasWaiters, "30s").Should(BeTrue())
	for _, result := range []outcome{{}, {errors.New("GPU is lost")}} {
		g.Consistently(measured, "50ms").ShouldNot(BeSent(result), "not before its time")
		clock.Step(time.Minute)
		g.Eventually(measured, "30s").Should(BeSent(result))
	}
	g.Eventually(func() int { h, _ := history(g, s); return h.Samples + h.Incomplete }, "30s").Should(Equal(2))
	h, answer := history(g, s)
	g.Expect(answer.Header().Get("Content-Type")).To(Equal("application/json"))
	g.Expect(h.Node).To(Equal("n1"))
	g.Expect(h.Since).To(BeTemporally("==", began))
	g.Expect(h.Time()).To(Equal(time.Minute), "what a sample lacks is not observed")
	g.Expect(h.Incomplete).To(Equal(1))
	g.Expect(h.Containers).To(HaveLen(1))
	g.Expect(h.Containers[0].Memory.Peak).To(Equal(float64(gib)))
	stop()
	g.Eventually(ended, "30s").Should(Receive(BeNil()))
}

func TestWithoutAnIntervalNothingIsSampled(t *testing.T) {
	g := NewWithT(t)
	s := agent.NewSampler("n1", 0, func(context.Context) (usage.Report, error) {
		t.Error("it measures")
		return usage.Report{}, nil
	}, clocktesting.NewFakeClock(time.Now()))
	g.Expect(s.Start(t.Context())).To(Succeed())
	_, answer := history(g, s)
	g.Expect(answer.Code).To(Equal(http.StatusNotFound))
	g.Expect(answer.Body.String()).To(ContainSubstring("set metrics.sampling.interval"))
}
