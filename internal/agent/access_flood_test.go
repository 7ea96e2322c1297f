// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr"
	"github.com/onsi/gomega"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// Anybody on the pod network can send tokens that are none.
func TestAFloodOfTokensIsNoFloodOfReviews(t *testing.T) {
	g := gomega.NewWithT(t)
	var reviews, most atomic.Int32
	arrived, answer := make(chan struct{}, 200), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		most.Store(max(most.Load(), reviews.Add(1))) // too low at times, but not of hundreds
		arrived <- struct{}{}
		<-answer
		reviews.Add(-1)
		w.WriteHeader(http.StatusUnauthorized)
	}))
	t.Cleanup(server.Close)
	release := sync.OnceFunc(func() { close(answer) })
	t.Cleanup(release) // before the server waits for its handlers
	filter, err := agent.Access(clock.RealClock{})(&rest.Config{Host: server.URL}, nil)
	g.Expect(err).NotTo(gomega.HaveOccurred())
	guarded, err := filter(logr.Discard(), http.NotFoundHandler())
	g.Expect(err).NotTo(gomega.HaveOccurred())
	var asking sync.WaitGroup
	for i := range 200 {
		asking.Go(func() {
			request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, usage.Path, nil)
			request.Header.Set("Authorization", fmt.Sprintf("Bearer none-%d", i))
			recorder := httptest.NewRecorder()
			guarded.ServeHTTP(recorder, request)
			g.Expect(recorder.Code).To(gomega.Equal(http.StatusUnauthorized))
		})
	}
	<-arrived
	g.Consistently(most.Load, "200ms").Should(gomega.BeNumerically("<=", 16))
	release()
	asking.Wait()
}
