// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/metrics"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

func TestAccess(t *testing.T) {
	cluster := env.Start(t)
	g := NewWithT(t)
	token := func(account string) string {
		config, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: "monitoring", ServiceAccount: account})
		g.Expect(err).NotTo(HaveOccurred())
		return config.BearerToken
	}
	g.Expect(cluster.Client.Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "metrics-reader"},
		Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics"}}},
	})).To(Succeed())
	g.Expect(cluster.Client.Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "metrics-reader"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "monitoring", Name: "prometheus"}},
	})).To(Succeed())
	reader, stranger := token("prometheus"), token("stranger")

	for name, tc := range map[string]struct {
		config        *rest.Config
		authorization string
		status        int
	}{
		"without a token":                          {cluster.Config, "", http.StatusUnauthorized},
		"with a password":                          {cluster.Config, "Basic YTpi", http.StatusUnauthorized},
		"with a token that is none":                {cluster.Config, "Bearer none", http.StatusUnauthorized},
		"without the right":                        {cluster.Config, "Bearer " + stranger, http.StatusForbidden},
		"with the right":                           {cluster.Config, "Bearer " + reader, http.StatusOK},
		"with the right, which nobody can confirm": {rest.AnonymousClientConfig(cluster.Config), "Bearer " + reader, http.StatusInternalServerError},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			httpClient, err := rest.HTTPClientFor(tc.config)
			g.Expect(err).NotTo(HaveOccurred())
			filter, err := metrics.Access(tc.config, httpClient)
			g.Expect(err).NotTo(HaveOccurred())
			guarded, err := filter(logr.Discard(), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write([]byte("secret"))
			}))
			g.Expect(err).NotTo(HaveOccurred())
			request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
			if tc.authorization != "" {
				request.Header.Set("Authorization", tc.authorization)
			}
			answer := httptest.NewRecorder()
			guarded.ServeHTTP(answer, request)
			g.Expect(answer.Code).To(Equal(tc.status))
			if tc.status == http.StatusOK {
				g.Expect(answer.Body.String()).To(Equal("secret"))
			} else {
				g.Expect(answer.Body.String()).NotTo(ContainSubstring("secret"))
			}
		})
	}
}
