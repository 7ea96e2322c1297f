// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// answering is a Prometheus that answers to the queries of advise over a week, and to no others.
func answering(t *testing.T, namespace string, answers map[advice.Query][]advice.Sample) string {
	t.Helper()
	g := NewWithT(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.Expect(r.URL.Path).To(Equal("/api/v1/query"))
		g.Expect(r.ParseForm()).To(Succeed())
		result := []map[string]any{}
		known := false
		for name, query := range advice.Queries(adviseWindow, namespace) {
			if query != r.Form.Get("query") {
				continue
			}
			known = true
			for _, s := range answers[name] {
				result = append(result, map[string]any{"metric": s.Labels, "value": []any{float64(now.Unix()), fmt.Sprint(s.Value)}})
			}
		}
		g.Expect(known).To(BeTrue(), r.Form.Get("query"))
		_ = json.NewEncoder(w).Encode(map[string]any{"status": "success", "data": map[string]any{"resultType": "vector", "result": result}})
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// seenOn are the answers about containers that used 3 GiB and 12 % of the multiprocessors on a node, for six days.
func seenOn(node string, pods ...string) map[advice.Query][]advice.Sample {
	const day = 24 * 3600
	answers := map[advice.Query][]advice.Sample{
		advice.QueryTime:       {{Labels: map[string]string{"node": node}, Value: 6 * day}},
		advice.QueryConcurrent: {{Labels: map[string]string{"node": node}, Value: float64(len(pods))}},
	}
	for _, pod := range pods {
		labels := map[string]string{"node": node, "namespace": "team", "pod": pod, "container": "main"}
		for query, value := range map[advice.Query]float64{
			advice.QueryHeld: 1, advice.QueryMemory: 3 << 30, advice.QueryCompute: 0.22, advice.QueryCompute95: 0.12,
		} {
			answers[query] = append(answers[query], advice.Sample{Labels: labels, Value: value})
		}
	}
	return answers
}

// TestAdviseOnAnAPIServer: what advise prints can be applied, and advise creates nothing by itself.
func TestAdviseOnAnAPIServer(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t, env.WithNVIDIA())
	c := cluster.Client
	populate(t, c, newNode(t, "one", sim.A100))
	kubeconfig := env.KubeconfigFile(t, cluster.Config)
	run := func(policy string, args ...string) (string, error) {
		var out strings.Builder
		p := &Program{In: strings.NewReader(policy), Out: &out, Clock: clocktesting.NewFakeClock(now), Width: 100}
		err := p.Run(t.Context(), append(args, "--kubeconfig", kubeconfig))
		return out.String(), failure(err)
	}
	address := answering(t, "", seenOn("one", "a", "b\n---\nspec: {priority: 7}", "c\u2028spec: {}"))
	out, err := run("", "advise", "--prometheus", address)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(strings.ReplaceAll(out, "\n#   ", " ")).To(HavePrefix("# No policy, 1 × NVIDIA-A100-SXM4-40GB on node one: 3 containers, at most 3 at the same time, observed for 6 days by Prometheus.\n"))
	g.Expect(out).To(And(
		ContainSubstring("\n# MIG, 7 × 1g.5gb fits: "), ContainSubstring("\n# Advised: MIG, 7 × 1g.5gb.\n---\n"),
		ContainSubstring("#   POLICY nvidia-a100-sxm4-40gb (new): selects 1 node\n"), ContainSubstring("nvidia.com/gpu: 7\n"),
	))
	words, _, _ := strings.Cut(out, "---\n")
	for line := range strings.Lines(words) {
		g.Expect(line).To(HavePrefix("# "), "a name from elsewhere gets nothing into the policy")
	}
	all := &v1alpha1.GPUSharingPolicyList{}
	g.Expect(c.List(t.Context(), all)).To(Succeed())
	g.Expect(all.Items).To(BeEmpty())

	printed, err := parse([]byte(out))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(printed).To(HaveLen(1))
	g.Expect(c.Create(t.Context(), printed[0])).To(Succeed())
	planned, err := run(out, "plan", "-f", "-")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(planned).To(ContainSubstring("POLICY nvidia-a100-sxm4-40gb (unchanged): selects 1 node\n"), "the output as a whole is a file")

	g.Expect(govern(t, c, "one", "nvidia-a100-sxm4-40gb")).To(Succeed())
	out, err = run("", "advise", "policy", "nvidia-a100-sxm4-40gb", "--prometheus", address)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(out).To(HaveSuffix("# Policy nvidia-a100-sxm4-40gb shares these GPUs so already.\n"))
	g.Expect(c.Delete(t.Context(), printed[0])).To(Succeed())

	byOthers := policy(t, "research", slicing)
	g.Expect(c.Create(t.Context(), &byOthers)).To(Succeed())
	g.Expect(govern(t, c, "one", "research")).To(Succeed())
	const left = "kubectl apply would leave spec.sharing.timeSlicing in policy research, because it did not set it."
	out, err = run("", "advise", "policy", "research", "--prometheus", address)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(strings.ReplaceAll(out, "\n#   ", " ")).To(And(ContainSubstring(left), ContainSubstring("\n---\napiVersion: ")))
	byOthers.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: `{"spec": {"sharing": {"strategy": "TimeSlicing", "timeSlicing": {"replicas": 4}}}}`}
	g.Expect(c.Update(t.Context(), &byOthers)).To(Succeed())
	out, err = run("", "advise", "policy", "research", "--prometheus", address)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(out).To(And(ContainSubstring("Advised: MIG"), Not(ContainSubstring("kubectl apply"))), "it removes what it has set")
	g.Expect(c.Delete(t.Context(), &byOthers)).To(Succeed())
	g.Expect(govern(t, c, "one", "")).To(Succeed())

	_, err = run("", "advise", "--prometheus", address, "--min-age", "145h")
	g.Expect(err).To(MatchError(ContainSubstring("nodes that were observed for less than --min-age 6 days: one (6 days); wait, or lower --min-age")))
	_, err = run("", "advise", "namespace", "x", "--prometheus", answering(t, "x", seenOn("one", "a")))
	g.Expect(err).To(MatchError(ContainSubstring("no container of namespace x used a GPU in that time")))
	for says, args := range map[string][]string{
		`advise takes nothing, or policy, node or namespace and a name, not "pod a"`: {"pod", "a"},
		`not "node"`: {"node"},
		`"z" is no node with GPUs; ` + "`kubectl get gpunodes` lists those that are": {"node", "z", "--prometheus", address},
		"--window as long at the least, not 24h0m0s and 1h0m0s":                      {"--prometheus", address, "--window", "1h"},
		"asking Prometheus for ": {"--prometheus", "http://127.0.0.1:1"},
	} {
		_, err := run("", append([]string{"advise"}, args...)...)
		g.Expect(err).To(MatchError(ContainSubstring(says)), strings.Join(args, " "))
	}
}

// govern writes which policy governs a node, as the controller does.
func govern(t *testing.T, c client.Client, node, policy string) error {
	t.Helper()
	n := &v1alpha1.GPUNode{}
	if err := c.Get(t.Context(), client.ObjectKey{Name: node}, n); err != nil {
		return err
	}
	n.Spec.PolicyName = policy
	return c.Update(t.Context(), n)
}

func TestHistoriesOfAgents(t *testing.T) {
	g := NewWithT(t)
	kept := `{"node":"forged","samples":120,"intervalNanoseconds":60000000000,"containers":[]}`
	histories, lacks, err := asking(t, kept, agentOn("gpus", "a", metricsPorts...), agentOn("tenant", "b", metricsPorts...)).histories(t.Context(), time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(histories).To(HaveLen(1))
	g.Expect(histories[0].Node).To(Equal("a"), "an agent speaks for no other node")
	g.Expect(histories[0].Time()).To(Equal(2 * time.Hour))
	g.Expect(lacks).To(HaveLen(1))
	g.Expect(lacks[0]).To(HavePrefix("node b: pod tenant/agent-b: "))
}

func TestAdviseSaysWhatItLacks(t *testing.T) {
	g := NewWithT(t)
	a := asking(t, "", agentOn("gpus", "a", metricsPorts...))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.Expect(r.URL.RawQuery).To(Equal("history"))
		http.Error(w, "the agent keeps no history", http.StatusNotFound)
	}))
	t.Cleanup(server.Close)
	host, err := a.host.Parse(server.URL)
	g.Expect(err).NotTo(HaveOccurred())
	a.host = host
	_, _, err = a.histories(t.Context(), time.Now())
	g.Expect(err).To(MatchError(And(ContainSubstring("give --prometheus URL, or set metrics.sampling.interval"), ContainSubstring("404: the agent keeps no history"))))
}

func TestCommentsEndWithTheirLine(t *testing.T) {
	g := NewWithT(t)
	var out strings.Builder
	comment(&out, "a\nkind: b\u0085c\u2028d\u2029e", strings.Repeat("word ", 60))
	lines := slices.Collect(strings.Lines(out.String()))
	g.Expect(len(lines)).To(BeNumerically(">", 3))
	for _, line := range lines {
		g.Expect(line).To(HavePrefix("# "))
		g.Expect(line).NotTo(ContainSubstring("\u2028"))
		g.Expect(line).NotTo(ContainSubstring("\u0085"))
	}
}
