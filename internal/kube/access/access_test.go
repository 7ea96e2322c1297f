// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/access"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

func TestWhoMayReadMetrics(t *testing.T) {
	cluster := env.Start(t)
	g := NewWithT(t)
	token := func(account string) string {
		config, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: "monitoring", ServiceAccount: account})
		g.Expect(err).NotTo(HaveOccurred())
		return config.BearerToken
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "agent-usage-reader"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "agent-usage-reader"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "monitoring", Name: "reader"}},
	}
	g.Expect(cluster.Client.Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "agent-usage-reader"},
		Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, NonResourceURLs: []string{usage.Path}}},
	})).To(Succeed())
	g.Expect(cluster.Client.Create(t.Context(), binding)).To(Succeed())
	reader, stranger := token("reader"), token("stranger")
	// The agent's own credentials must not count: with these it might read everything.
	agents := rest.CopyConfig(cluster.Config)
	nowhere := rest.CopyConfig(cluster.Config)
	nowhere.Host = "https://127.0.0.1:1"
	clock := clocktesting.NewFakePassiveClock(time.Unix(1_800_000_000, 0))
	guarded := func(config *rest.Config) http.Handler {
		filter, err := access.Guard(clock, usage.TokenHeader)(config, nil)
		g.Expect(err).NotTo(HaveOccurred())
		h, err := filter(logr.Discard(), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("secret")) }))
		g.Expect(err).NotTo(HaveOccurred())
		return h
	}
	ask := func(h http.Handler, path, header, value string) int {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
		if header != "" {
			request.Header.Set(header, value)
		}
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, request)
		if answer.Code == http.StatusOK {
			g.Expect(answer.Body.String()).To(Equal("secret"))
		} else {
			g.Expect(answer.Body.String()).NotTo(ContainSubstring("secret"))
		}
		return answer.Code
	}
	for name, tc := range map[string]struct {
		config              *rest.Config
		path, header, value string
		status              int
	}{
		"without a token":                   {agents, usage.Path, "", "", http.StatusUnauthorized},
		"with a password":                   {agents, usage.Path, "Authorization", "Basic YTpi", http.StatusUnauthorized},
		"with an empty token":               {agents, usage.Path, "Authorization", "Bearer ", http.StatusUnauthorized},
		"with a token that is none":         {agents, usage.Path, "Authorization", "Bearer none", http.StatusUnauthorized},
		"without the right":                 {agents, usage.Path, "Authorization", "Bearer " + stranger, http.StatusForbidden},
		"with the right for another path":   {agents, "/metrics", "Authorization", "Bearer " + reader, http.StatusForbidden},
		"with the right":                    {agents, usage.Path, "Authorization", "Bearer " + reader, http.StatusOK},
		"through the API server's proxy":    {agents, usage.Path, usage.TokenHeader, reader, http.StatusOK},
		"so, without the right":             {agents, usage.Path, usage.TokenHeader, stranger, http.StatusForbidden},
		"with the right, and no API server": {nowhere, usage.Path, "Authorization", "Bearer " + reader, http.StatusInternalServerError},
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(ask(guarded(tc.config), tc.path, tc.header, tc.value)).To(Equal(tc.status))
		})
	}

	h := guarded(agents)
	g.Expect(ask(h, usage.Path, "Authorization", "Bearer "+reader)).To(Equal(http.StatusOK))
	g.Expect(cluster.Client.Delete(t.Context(), binding)).To(Succeed())
	g.Eventually(func() int { return ask(guarded(agents), usage.Path, "Authorization", "Bearer "+reader) }, "10s").Should(Equal(http.StatusForbidden))
	g.Expect(ask(h, usage.Path, "Authorization", "Bearer "+reader)).To(Equal(http.StatusOK), "a permission is remembered for a while")
	clock.SetTime(clock.Now().Add(2 * time.Minute))
	g.Expect(ask(h, usage.Path, "Authorization", "Bearer "+reader)).To(Equal(http.StatusForbidden), "and then asked for again")
}

// Anybody on the pod network can send tokens that are none.
func TestAFloodOfTokensIsNoFloodOfReviews(t *testing.T) {
	g := NewWithT(t)
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
	filter, err := access.Guard(clock.RealClock{}, usage.TokenHeader)(&rest.Config{Host: server.URL}, nil)
	g.Expect(err).NotTo(HaveOccurred())
	guarded, err := filter(logr.Discard(), http.NotFoundHandler())
	g.Expect(err).NotTo(HaveOccurred())
	var asking sync.WaitGroup
	for i := range 200 {
		asking.Go(func() {
			request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, usage.Path, nil)
			request.Header.Set("Authorization", fmt.Sprintf("Bearer none-%d", i))
			recorder := httptest.NewRecorder()
			guarded.ServeHTTP(recorder, request)
			g.Expect(recorder.Code).To(Equal(http.StatusUnauthorized))
		})
	}
	<-arrived
	g.Consistently(most.Load, "200ms").Should(BeNumerically("<=", 16))
	release()
	asking.Wait()
}
