// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/access"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestTopNeedsTheRoleOfTheChart: with the Roles of the chart, kubectl gpusharing top reads an agent through the API
// server's proxy, with a token of an account that may do nothing else. Without one of them it says which is missing,
// and the agent never sees the user's token.
func TestTopNeedsTheRoleOfTheChart(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	c := cluster.Client
	g.Expect(c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	for _, o := range newHelm(t).render(t, "metrics.enabled=true") {
		switch o.GetKind() {
		case "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role":
			g.Expect(c.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("test"))).To(Succeed())
		}
	}
	user, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: "people", ServiceAccount: "alice"})
	g.Expect(err).NotTo(HaveOccurred())
	agentsConfig, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: namespace, ServiceAccount: "gpu-sharing-agent"})
	g.Expect(err).NotTo(HaveOccurred())

	var tokens, queries []string
	filter, err := access.Guard(clock.RealClock{}, usage.TokenHeader)(agentsConfig, nil)
	g.Expect(err).NotTo(HaveOccurred())
	guarded, err := filter(logr.Discard(), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(usage.Report{Node: "n1", Policy: "research", Units: []usage.Unit{{
			GPU: "GPU-1", Product: "Tesla-T4", Strategy: v1alpha1.StrategyTimeSlicing, Replicas: 4, Memory: &gpu.Memory{Total: 16 << 30, Used: 8 << 30},
			Containers: []usage.Container{{
				Name:        usage.Name{Namespace: "ml", Pod: "greedy", Container: "main"},
				MemoryBytes: new(int64(8 << 30)), ShareBytes: new(int64(4 << 30)),
			}},
		}}})
	}))
	g.Expect(err).NotTo(HaveOccurred())
	address, port := serveTLS(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		queries = append(queries, r.URL.RawQuery)
		tokens = append(tokens, r.Header.Get(usage.TokenHeader)+r.Header.Get("Authorization"))
		guarded.ServeHTTP(w, r)
	}))
	pod := agentPod("n1", port)
	plugin := func(command string) (string, error) {
		file := env.KubeconfigFile(t, user)
		var out strings.Builder
		program := &cli.Program{Out: &out, Clock: clock.RealClock{}}
		err = program.Run(t.Context(), []string{command, "--kubeconfig", file})
		return out.String(), err
	}
	top := func() (string, error) { return plugin("top") }
	bind := func(o client.Object) { g.Expect(c.Create(t.Context(), o)).To(Succeed()) }
	alice := []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "people", Name: "alice"}}

	_, err = top()
	g.Expect(err).To(MatchError(ContainSubstring("gpu-sharing-cli")), "she may not list pods")
	bind(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "alice-cli"}, Subjects: alice,
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "gpu-sharing-cli"},
	})
	eventually := func(what string) {
		t.Helper()
		g.Eventually(func() error { _, err := top(); return err }, "20s").Should(MatchError(ContainSubstring(what)))
	}
	eventually("no agent runs")
	g.Expect(c.Create(t.Context(), pod)).To(Succeed())
	pod.Status.PodIP, pod.Status.PodIPs, pod.Status.Phase = address, []corev1.PodIP{{IP: address}}, corev1.PodRunning
	g.Expect(c.Status().Update(t.Context(), pod)).To(Succeed())
	eventually("bind the Role gpu-sharing-top to you: kubectl -n " + namespace + " create rolebinding NAME --role=gpu-sharing-top")
	g.Expect(tokens).To(BeEmpty(), "without the Role nothing reaches the agent")

	bind(&rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "alice-top"}, Subjects: alice,
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "gpu-sharing-top"},
	})
	g.Eventually(top, "20s").Should(SatisfyAll(ContainSubstring("NODE n1   research"), MatchRegexp(`8\.0 GiB +4\.0 GiB +- +! +ml/greedy main`)))
	bind(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "alice-view"}, Subjects: alice,
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "gpu-sharing-view"},
	})
	g.Eventually(func() error { _, err := plugin("advise"); return err }, "20s").Should(MatchError(ContainSubstring("no node with GPUs is there to advise on")))
	g.Expect(queries).To(ContainElement(usage.HistoryQuery), "the API server's proxy hands the query on")
	g.Expect(tokens).NotTo(BeEmpty())
	for _, token := range tokens {
		g.Expect(token).NotTo(ContainSubstring(user.BearerToken), "an agent never sees what the user may do")
		config := rest.AnonymousClientConfig(cluster.Config)
		config.BearerToken = token
		reader, err := kubernetes.NewForConfig(config)
		g.Expect(err).NotTo(HaveOccurred())
		_, err = reader.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
		g.Expect(apierrors.IsForbidden(err)).To(BeTrue(), "a user who may run top may not read the API server's own metrics with that token: %v", err)
	}
}

// agentPod is a pod of the agents that serves metrics.
func agentPod(node string, port int32) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "gpu-sharing-agent-" + node, Labels: map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"}},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{
			Name: "agent", Image: "agent", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: port}},
		}}},
	}
}

// serveTLS serves on an address of this machine to which the API server's proxy connects: it refuses 127.0.0.1.
func serveTLS(t *testing.T, handler http.Handler) (address string, port int32) {
	t.Helper()
	g := NewWithT(t)
	addresses, err := net.InterfaceAddrs()
	g.Expect(err).NotTo(HaveOccurred())
	for _, a := range addresses {
		if n, is := a.(*net.IPNet); is && n.IP.IsGlobalUnicast() && n.IP.To4() != nil {
			address = n.IP.String()
		}
	}
	g.Expect(address).NotTo(BeEmpty(), "this machine needs an IPv4 address beside 127.0.0.1")
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", net.JoinHostPort(address, "0"))
	g.Expect(err).NotTo(HaveOccurred())
	server := httptest.NewUnstartedServer(handler)
	g.Expect(server.Listener.Close()).To(Succeed())
	server.Listener = listener
	server.StartTLS()
	t.Cleanup(server.Close)
	_, number, err := net.SplitHostPort(listener.Addr().String())
	g.Expect(err).NotTo(HaveOccurred())
	parsed, err := strconv.ParseInt(number, 10, 32)
	g.Expect(err).NotTo(HaveOccurred())
	return address, int32(parsed)
}
