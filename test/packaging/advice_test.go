// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
)

// series is a series of the agents, scraped once a minute from an agent at an address.
func series(metric, address, labels, values string) map[string]string {
	return map[string]string{"series": fmt.Sprintf(`%s{job="gpu-sharing-agent", instance=%q, node="a", %s}`, metric, address, labels), "values": values}
}

// TestQueriesOfAdvice plays series to the queries of `kubectl gpusharing advise`, with Prometheus' own promtool: of a Prometheus that honours the
// labels of what it scrapes, and of OpenShift's for user workloads, which does not (overrideHonorLabels).
func TestQueriesOfAdvice(t *testing.T) {
	const (
		used, share, sm = "gpusharing_container_gpu_memory_used_bytes", "gpusharing_container_gpu_memory_share_bytes", "gpusharing_container_gpu_sm_utilization_ratio"
		before, after   = "10.0.0.1:8443", "10.0.0.9:8443"
		// Two containers on one GPU, of which the first has another GPU too. The second begins when the agent's pod is
		// replaced.
		train  = `gpu="GPU-1", gpu_index="0", gpu_instance="", namespace="team", pod="train", container="main"`
		second = `gpu="GPU-2", gpu_index="1", gpu_instance="", namespace="team", pod="train", container="main"`
		web    = `gpu="GPU-1", gpu_index="0", gpu_instance="", namespace="x", pod="web", container="main"`
	)
	input := []map[string]string{
		series("gpusharing_agent_usage_complete", before, `namespace="gpus"`, "1x59 stale"),
		series("gpusharing_agent_usage_complete", after, `namespace="gpus"`, "_x60 1x29 0x29"),
		series(share, before, train, "10x59 stale"), series(share, after, train, "_x60 10x59"),
		series(used, before, train, "1+1x29 5x29 stale"), series(used, after, train, "_x60 7x59"),
		series(share, before, second, "10x59 stale"), series(share, after, second, "_x60 10x59"),
		series(used, before, second, "0x59 stale"), series(used, after, second, "_x60 0x59"),
		series(used, after, web, "_x60 3x59"), // its share is not known
		series(sm, before, train, "0.1x59 stale"), series(sm, after, train, "_x60 0.1x54 0.9x1"),
	}
	// What kube-state-metrics says of a pod that ran for some minutes, one that waits for two instances, and one that asks for none.
	for uid, p := range map[string]struct {
		node, resource, asks, until   string
		created, scheduled, completed string
	}{
		"u1": {"a", "nvidia_com_mig_1g_5gb", "1", "30 stale", "60", "120", "600"}, "u2": {"", "nvidia_com_mig_3g_20gb", "2", "120", "300", "", ""},
		"u3": {"b", "cpu", "4", "120", "60", "61", ""}, "u4": {"b", "nvidia_com_mig_1g_5gb", "1", "120", "60", "3600", ""},
	} {
		of := fmt.Sprintf(`namespace="team", pod=%[1]q, uid=%[1]q`, uid)
		add := func(metric, more, value string) {
			if value != "" {
				input = append(input, map[string]string{"series": fmt.Sprintf(`%s{job="kube-state-metrics", %s%s}`, metric, of, more), "values": value + "x" + p.until})
			}
		}
		add("kube_pod_container_resource_requests", fmt.Sprintf(`, container="main", node=%q, resource=%q, unit="integer"`, p.node, p.resource), p.asks)
		add("kube_pod_info", fmt.Sprintf(`, node=%q`, p.node), "1")
		if uid == "u4" { // it waited before
			add("kube_pod_info", `, node=""`, "1")
		}
		add("kube_pod_created", "", p.created)
		add("kube_pod_status_scheduled_time", "", p.scheduled)
		add("kube_pod_completion_time", "", p.completed)
	}
	container := func(pod, namespace string) string {
		return fmt.Sprintf(`{node="a", namespace=%q, pod=%q, container="main"}`, namespace, pod)
	}
	type sample struct {
		Labels string  `json:"labels"`
		Value  float64 `json:"value"`
	}
	want := func(namespace string, nodes []sample) map[advice.Query][]sample {
		both := map[advice.Query][]sample{
			advice.QueryTime:       {{`{node="a"}`, 89.5 * 60}}, // the steps of half a minute in which all GPUs were measured
			advice.QueryConcurrent: {{`{node="a"}`, 3}},
			advice.QueryHeld:       {{container("train", "team"), 2}, {container("web", "x"), 1}},
			advice.QueryMemory:     {{container("train", "team"), 30}, {container("web", "x"), 3}},
			advice.QueryCompute:    {{container("train", "team"), 0.9}},
			advice.QueryCompute95:  {{container("train", "team"), 0.1}},
			advice.QueryAsks:       {{`{uid="u1", resource="nvidia_com_mig_1g_5gb"}`, 1}, {`{uid="u4", resource="nvidia_com_mig_1g_5gb"}`, 1}, {`{uid="u2", resource="nvidia_com_mig_3g_20gb"}`, 2}},
			advice.QueryCreated:    {{`{uid="u1"}`, 60}, {`{uid="u2"}`, 300}, {`{uid="u4"}`, 60}},
			advice.QueryScheduled:  {{`{uid="u1"}`, 120}, {`{uid="u4"}`, 3600}},
			advice.QueryNode:       nodes,
			advice.QueryCompleted:  {{`{uid="u1"}`, 600}},
			advice.QueryLastSeen:   {{`{uid="u1"}`, 30 * 60}, {`{uid="u2"}`, 120 * 60}, {`{uid="u4"}`, 120 * 60}},
		}
		if namespace != "" {
			both[advice.QueryConcurrent] = []sample{{`{node="a"}`, 1}}
		}
		return both
	}
	tests := func(nodes ...sample) (all []map[string]any) {
		for _, namespace := range []string{"", "x"} {
			for name, query := range advice.Queries(2*time.Hour, namespace) {
				all = append(all, map[string]any{"expr": query, "eval_time": "2h", "exp_samples": want(namespace, nodes)[name]})
			}
		}
		return all
	}
	on := []sample{{`{uid="u1", node="a"}`, 1}, {`{uid="u4", node="b"}`, 1}}
	var onTwo []sample
	for _, labels := range []string{`uid="u1", exported_node="a"`, `uid="u2"`, `uid="u4"`, `uid="u4", exported_node="b"`} {
		onTwo = append(onTwo, sample{fmt.Sprintf(`{node="infra-1", %s}`, labels), 1}, sample{fmt.Sprintf(`{node="infra-2", %s}`, labels), 1})
	}
	var exported, two []map[string]string
	for _, s := range input {
		labels := s["series"]
		for _, label := range []string{"namespace", "pod", "container"} {
			labels = strings.ReplaceAll(labels, " "+label+"=", fmt.Sprintf(" %[1]s=\"the-agents\", exported_%[1]s=", label))
		}
		exported = append(exported, map[string]string{"series": labels, "values": s["values"]})
		if !strings.Contains(labels, "kube-state-metrics") {
			two = append(two, map[string]string{"series": labels, "values": s["values"]})
			continue
		}
		for _, node := range []string{"infra-1", "infra-2"} { // two of kube-state-metrics, or one that moved
			of := strings.ReplaceAll(labels, ` node=`, fmt.Sprintf(` node=%q, exported_node=`, node))
			of = strings.ReplaceAll(of, `, exported_node=""`, "")
			two = append(two, map[string]string{"series": of, "values": s["values"]})
		}
	}
	file := filepath.Join(t.TempDir(), "advice.yaml")
	data, err := yaml.Marshal(map[string]any{"evaluation_interval": "1m", "tests": []map[string]any{
		{"name": "advise", "interval": "1m", "input_series": input, "promql_expr_test": tests(on...)},
		{"name": "labels that are not honoured", "interval": "1m", "input_series": exported, "promql_expr_test": tests(on...)},
		{"name": "two whose node is theirs", "interval": "1m", "input_series": two, "promql_expr_test": tests(onTwo...)},
	}})
	g := NewWithT(t)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(os.WriteFile(file, data, 0o600)).To(Succeed())
	promtool := strings.TrimSpace(run(t, exec.CommandContext(t.Context(), path(t, "hack/prometheus/build.sh"), "promtool")))
	out, err := exec.CommandContext(t.Context(), promtool, "test", "rules", file).CombinedOutput()
	g.Expect(err).NotTo(HaveOccurred(), string(out))
}
