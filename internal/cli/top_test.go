// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

func using(pod string, used, share int64, compute float64) usage.Container {
	c := usage.Container{
		Name: usage.Name{Namespace: "team", Pod: pod, Container: "main"}, MemoryBytes: new(used << 30), ShareBytes: new(share << 30), Processes: 1,
	}
	if compute > 0 {
		c.Utilization = &gpu.Utilization{Compute: compute}
	}
	return c
}

// measuredFleet has each strategy, a container over its share, values that no driver reports, and nodes that were not
// measured.
func measuredFleet() []measuredNode {
	slicing := usage.Unit{
		GPU: "GPU-1", Product: "NVIDIA-A100-SXM4-40GB", Strategy: v1alpha1.StrategyTimeSlicing, Replicas: 4,
		Memory: &gpu.Memory{Total: 40 << 30, Used: 30 << 30, Free: 10 << 30}, Utilization: &gpu.Utilization{Compute: 0.97},
		Containers: []usage.Container{using("greedy-7c9d", 17, 10, 0.75), using("modest-0", 9, 10, 0.2), using("idle-0", 0, 10, 0)},
		OtherBytes: 4 << 30,
	}
	mps := usage.Unit{
		GPU: "GPU-2", Index: 1, Product: "NVIDIA-H100-80GB-HBM3", Strategy: v1alpha1.StrategyMPS, Replicas: 8,
		Limits: &usage.Limits{ActiveThreads: 0.125, MemoryBytes: new(int64(10 << 30))}, Utilization: &gpu.Utilization{Compute: 0.4},
		Memory: &gpu.Memory{Total: 80 << 30, Used: 8 << 30}, Containers: []usage.Container{using("server-0", 8, 10, 0)},
	}
	whole := usage.Unit{
		GPU: "GPU-3", Product: "NVIDIA-A100-SXM4-40GB", Strategy: v1alpha1.StrategyMIG, Partitioned: true,
		Memory: &gpu.Memory{Total: 40 << 30, Used: 4 << 30},
	}
	small := usage.Unit{
		GPU: "GPU-3", Instance: new(9), Profile: "1g.5gb", Strategy: v1alpha1.StrategyMIG, Replicas: 1,
		Memory: &gpu.Memory{Total: 5 << 30, Used: 4 << 30}, Containers: []usage.Container{using("notebook-0", 4, 5, 0)},
	}
	free := usage.Unit{
		GPU: "GPU-3", Instance: new(10), Profile: "2g.10gb", Strategy: v1alpha1.StrategyMIG, Replicas: 2, Memory: &gpu.Memory{Total: 10 << 30},
	}
	unreported := using("python-0", 2, 1, 0)
	unreported.ShareBytes = nil
	return []measuredNode{
		{name: "a", report: usage.Report{Node: "a", Policy: "research", Units: []usage.Unit{slicing, mps}, Daemons: []usage.Daemon{
			{Resource: "nvidia.com/gpu", Clients: 3, OutdatedClients: 2},
		}}},
		{name: "b", report: usage.Report{Node: "b", Policy: "notebooks", Units: []usage.Unit{whole, small, free}}},
		{name: "c", report: usage.Report{Node: "c", Incomplete: "sampling GPU 1: nvmlDeviceGetHandleByIndex: ERROR_GPU_IS_LOST: not found", Units: []usage.Unit{
			{GPU: "GPU-4", Product: "NVIDIA-GB10", Strategy: v1alpha1.StrategyExclusive, Replicas: 1, Containers: []usage.Container{unreported}},
		}}},
		{name: "d", failed: "pod gpu-sharing-operator/gpu-sharing-agent-x: 503: waiting for the agent to have finished with the GPUs"},
	}
}

// TestTop compares what top prints with testdata/top-*.golden.
func TestTop(t *testing.T) {
	for title, tc := range map[string]struct {
		of   string
		only []string
	}{
		"nodes": {"node", nil}, "one node": {"node", []string{"b"}}, "policies": {"policy", nil}, "pods": {"pod", nil}, "one pod": {"pod", []string{"modest-0"}},
	} {
		t.Run(title, func(t *testing.T) {
			compare(t, "top "+title, func(shown *text) {
				chosen, err := choose(tc.of, measuredFleet(), tc.only)
				NewWithT(t).Expect(err).NotTo(HaveOccurred())
				shown.top(tc.of, chosen)
			})
		})
	}
}

func TestTopNamesWhatItDoesNotKnow(t *testing.T) {
	for of, name := range map[string]string{"node": "z", "policy": "z", "pod": "z"} {
		_, err := choose(of, measuredFleet(), []string{name})
		NewWithT(t).Expect(err).To(MatchError(ContainSubstring("no GPU is measured for " + of + ` "z"`)))
	}
}

func TestABarShowsThatSomethingIsUsed(t *testing.T) {
	g := NewWithT(t)
	g.Expect(bar(&gpu.Memory{Total: 1000 << 30, Used: 1 << 30}, 10)).To(HavePrefix("[#.........]"))
	g.Expect(bar(&gpu.Memory{Total: 10 << 30}, 10)).To(HavePrefix("[..........]"))
	g.Expect(bar(&gpu.Memory{Total: 10 << 30, Used: 11 << 30}, 10)).To(HavePrefix("[##########]"))
	g.Expect(bar(nil, 10)).To(Equal("memory is not reported by the driver"))
}

// asking is a cluster of these pods in which an agent answers with a body. Only the namespace gpus has the account of
// the reader.
func asking(t *testing.T, body string, pods ...client.Object) *agents {
	t.Helper()
	g := NewWithT(t)
	scheme, err := newScheme()
	g.Expect(err).NotTo(HaveOccurred())
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.Expect(r.URL.Path).To(HavePrefix("/api/v1/namespaces/gpus/pods/https:agent-"))
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(server.Close)
	host, err := url.Parse(server.URL)
	g.Expect(err).NotTo(HaveOccurred())
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "gpus", Name: reader}}
	named := func(o client.Object) []string { return []string{o.GetName()} }
	return &agents{
		client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(append(pods, account)...).WithIndex(&coordinationv1.Lease{}, "metadata.name", named).Build(),
		http:   server.Client(), host: host, tokens: map[string]token{},
	}
}

func agentOn(namespace, node string, ports ...corev1.ContainerPort) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "agent-" + node, Labels: map[string]string{"app.kubernetes.io/name": agentName}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "agent", Ports: ports}}},
	}
}

var metricsPorts = []corev1.ContainerPort{{Name: metricsPort, ContainerPort: 8443}}

// TestAPodOfATenantSpeaksForNoNode: it has the label of the agents, and its namespace an account of that name. Where the namespaces of the operator
// are not known, what it says hides no measurement from the page, which has one card for each node.
func TestAPodOfATenantSpeaksForNoNode(t *testing.T) {
	for _, name := range []string{"a-first", "z-last"} {
		g := NewWithT(t)
		foreign := agentOn("tenant", "a", metricsPorts...)
		foreign.Name = name
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: reader}}
		nodes, err := asking(t, `{"policy":"research"}`, agentOn("gpus", "a", metricsPorts...), foreign, account, bindingOf("gpus")).measure(t.Context(), time.Now())
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(nodes).To(HaveLen(1))
		g.Expect(nodes[0].failed).To(BeEmpty())

		nodes, err = asking(t, `{"policy":"research"}`, agentOn("gpus", "a", metricsPorts...), foreign).measure(t.Context(), time.Now())
		g.Expect(err).NotTo(HaveOccurred())
		for range 2 {
			of := measuredByNode(nodes)
			g.Expect(of["a"].failed).To(BeEmpty(), name)
			g.Expect(of["a"].report.Policy).To(Equal("research"), name)
			slices.Reverse(nodes)
		}
	}
}

func TestWithoutMetricsTopSaysHowToTurnThemOn(t *testing.T) {
	_, err := asking(t, "", agentOn("gpus", "a"), agentOn("gpus", "b")).measure(t.Context(), time.Now())
	NewWithT(t).Expect(err).To(MatchError(errNoMetrics))
}

// The kubelet evicted it, and the DaemonSet has made another.
func TestAnAgentThatHasEndedIsNotAsked(t *testing.T) {
	g := NewWithT(t)
	ended := agentOn("gpus", "a", metricsPorts...)
	ended.Name, ended.Status.Phase = "agent-evicted", corev1.PodFailed
	nodes, err := asking(t, `{}`, agentOn("gpus", "a", metricsPorts...), ended).measure(t.Context(), time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(nodes).To(HaveLen(1))
}

// An answer may come from an impostor.
func TestTopSendsTheTerminalNoCommands(t *testing.T) {
	g := NewWithT(t)
	body := `{"policy":"\u001b]0;owned\u0007\u009b2J","incomplete":"a\rb","units":[{"gpu":"GPU-1","product":"\u001b[31mT4","containers":[{"namespace":"x","pod":"\u001b[2J","container":"c\td\nNODE z"}]}]}`
	nodes, err := asking(t, body, agentOn("gpus", "a", metricsPorts...)).measure(t.Context(), time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	for _, of := range []string{"node", "pod", "policy"} {
		shown := &text{}
		shown.top(of, nodes)
		for _, r := range strings.ReplaceAll(shown.String(), "\n", "") {
			g.Expect(r).To(BeNumerically(">=", ' '))
			g.Expect(r < 0x7f || r > 0x9f).To(BeTrue())
		}
		g.Expect(shown.String()).NotTo(MatchRegexp(`(?m)^ *NODE z`))
	}
}

// TestThePageSaysThatNoControllerRunsBeforeAgentsAnswer: those that do not answer take 15 seconds each.
func TestThePageSaysThatNoControllerRunsBeforeAgentsAnswer(t *testing.T) {
	g := NewWithT(t)
	asked := asking(t, "", agentOn("gpus", "a", metricsPorts...))
	hangs := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	host, err := url.Parse(hangs.URL)
	g.Expect(err).NotTo(HaveOccurred())
	asked.host = host
	b := &board{program: &Program{Clock: clock.RealClock{}}, agents: asked, seen: watching(t), hub: dashboard.NewHub()}
	server := &dashboard.Server{Hub: b.hub, Clock: clock.RealClock{}}
	ctx, stop := context.WithCancel(t.Context())
	listener, address, err := server.Listen(ctx, 0)
	g.Expect(err).NotTo(HaveOccurred())
	page, token, _ := strings.Cut(address, "#")
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, page+"api/stream", nil)
	g.Expect(err).NotTo(HaveOccurred())
	request.Header.Set("Authorization", "Bearer "+token)
	var parts sync.WaitGroup
	t.Cleanup(func() { stop(); parts.Wait(); hangs.Close() })
	parts.Go(func() { g.Expect(server.Serve(ctx, listener)).To(Succeed()) })
	reads, err := http.DefaultClient.Do(request)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = reads.Body.Close() })
	parts.Go(func() { b.measure(ctx) })
	g.Eventually(func() string {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.stopped
	}, measureTimeout/2).Should(ContainSubstring("no ClusterRoleBinding"))
}
