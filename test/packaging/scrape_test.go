// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/access"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// endpoint is how Prometheus reads a pod, as far as a PodMonitor says.
type endpoint struct {
	Port, Scheme  string
	HonorLabels   bool
	Authorization struct {
		Credentials corev1.SecretKeySelector
	}
}

// TestPrometheusMayReadTheMetrics: the token that the chart's PodMonitor sends is that of an account which may read
// what controller and agents serve, as these ask the API server with the rights that the chart gives them; and nobody
// else may.
func TestPrometheusMayReadTheMetrics(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	objects := newHelm(t).render(t, everything()...)
	g.Expect(cluster.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	for _, o := range objects {
		switch o.GetKind() {
		case "ServiceAccount", "Secret", "ClusterRole", "ClusterRoleBinding":
			g.Expect(cluster.Client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("test"))).To(Succeed())
		}
	}
	reads := monitored(g, find(t, objects, "PodMonitor gpu-sharing-controller"))
	g.Expect(reads.Scheme).To(Equal("https"))
	controller := as[appsv1.Deployment](t, find(t, objects, "Deployment gpu-sharing-controller")).Spec.Template.Spec
	agentPod := as[appsv1.DaemonSet](t, find(t, objects, "DaemonSet gpu-sharing-agent")).Spec.Template.Spec
	g.Expect(controller.Containers[0].Ports).To(ContainElement(HaveField("Name", reads.Port)))
	secret := &corev1.Secret{}
	g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: reads.Authorization.Credentials.Name}, secret)).To(Succeed())
	g.Expect(secret.Type).To(Equal(corev1.SecretTypeServiceAccountToken), "Kubernetes fills in the token")
	g.Expect(reads.Authorization.Credentials.Key).To(Equal(corev1.ServiceAccountTokenKey))

	as := func(account string) *rest.Config {
		config, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: namespace, ServiceAccount: account})
		g.Expect(err).NotTo(HaveOccurred())
		return config
	}
	config := as(controller.ServiceAccountName)
	filter, err := access.Guard(clock.RealClock{}, "")(config, nil)
	g.Expect(err).NotTo(HaveOccurred())
	guarded, err := filter(logr.Discard(), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	g.Expect(err).NotTo(HaveOccurred())
	path := "/metrics"
	answer := func(account string) int {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
		request.Header.Set("Authorization", "Bearer "+as(account).BearerToken)
		recorder := httptest.NewRecorder()
		guarded.ServeHTTP(recorder, request)
		return recorder.Code
	}
	g.Expect(answer(secret.Annotations[corev1.ServiceAccountNameKey])).To(Equal(http.StatusOK))
	g.Expect(answer(controller.ServiceAccountName)).To(Equal(http.StatusForbidden))

	agents := monitored(g, find(t, objects, "PodMonitor gpu-sharing-agent"))
	g.Expect(agents.HonorLabels).To(BeTrue(), "the pods of the series are those that use the GPUs")
	g.Expect(agents.Scheme).To(Equal("https"))
	g.Expect(agents.Authorization).To(Equal(reads.Authorization))
	g.Expect(agentPod.Containers[0].Ports).To(ContainElement(HaveField("Name", agents.Port)))
	agentFilter, err := access.Guard(clock.RealClock{}, usage.TokenHeader)(as(agentPod.ServiceAccountName), nil)
	g.Expect(err).NotTo(HaveOccurred())
	guarded, err = agentFilter(logr.Discard(), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	g.Expect(err).NotTo(HaveOccurred())
	for may, account := range map[string]string{"/metrics": secret.Annotations[corev1.ServiceAccountNameKey], usage.Path: "gpu-sharing-usage"} {
		path = may
		g.Expect(answer(account)).To(Equal(http.StatusOK), path)
		g.Expect(answer(agentPod.ServiceAccountName)).To(Equal(http.StatusForbidden), path)
	}
}

func monitored(g Gomega, monitor *unstructured.Unstructured) endpoint {
	var m struct {
		Spec struct{ PodMetricsEndpoints []endpoint }
	}
	data, err := monitor.MarshalJSON()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(json.Unmarshal(data, &m)).To(Succeed())
	g.Expect(m.Spec.PodMetricsEndpoints).To(HaveLen(1))
	return m.Spec.PodMetricsEndpoints[0]
}
