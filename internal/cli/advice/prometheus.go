// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// Query names a question to Prometheus.
type Query string

// The questions. Each has an answer for a node or for a container on a node.
const (
	QueryTime       Query = "time"       // seconds for which a node was observed
	QueryConcurrent Query = "concurrent" // most GPUs and instances held at the same time on a node
	QueryHeld       Query = "held"       // most GPUs and instances that a container held at the same time
	QueryMemory     Query = "memory"     // most memory that a container used, in bytes
	QueryCompute    Query = "compute"    // largest utilization by a container, 0 to 1
	QueryCompute95  Query = "compute95"  // utilization that 95 of 100 samples of a container did not exceed

	// QueryAsks and those below are of kube-state-metrics, which need not be there, by the UID of a pod that asked for MIG instances.
	QueryAsks      Query = "asks"      // instances that it asked for, by resource
	QueryCreated   Query = "created"   // when it was created, in seconds since 1970, as all that follow
	QueryScheduled Query = "scheduled" // when it was bound to a node
	QueryNode      Query = "node"      // to which one
	QueryCompleted Query = "completed" // when it ended
	QueryLastSeen  Query = "lastSeen"  // when it was seen last
)

// resolution is how often the questions that have to count look into a time in the past: about two thousand times,
// every five minutes of a week. What begins and ends in between is not counted. Prometheus itself takes a series for
// gone after five minutes.
func resolution(window time.Duration) time.Duration {
	const steps, finest, coarsest = 2000, 30 * time.Second, 5 * time.Minute
	return min(max(window/steps, finest), coarsest).Truncate(time.Second)
}

// Queries are the questions in PromQL, over a time that ends now. Only containers of the namespace are asked for, or
// all if it is empty; QueryHeld, QueryMemory and those after them always ask for all.
func Queries(window time.Duration, namespace string) map[Query]string {
	over, step := fmt.Sprintf("%.0fs", window.Seconds()), resolution(window).Seconds()
	steps := fmt.Sprintf("[%s:%.0fs]", over, step)
	// A scrape's own labels change with the agent's pod, and must count nothing twice.
	held := func(selectors ...string) string {
		var all []string
		for _, selector := range selectors {
			all = append(all, "gpusharing_container_gpu_memory_share_bytes"+selector, "gpusharing_container_gpu_memory_used_bytes"+selector)
		}
		return fmt.Sprintf("max by (node, gpu, gpu_instance, namespace, pod, container) (%s)", honoured(strings.Join(all, " or ")))
	}
	concurrent := held("")
	if namespace != "" {
		concurrent = held(fmt.Sprintf("{exported_namespace=%q}", namespace), fmt.Sprintf(`{namespace=%q, exported_namespace=""}`, namespace))
	}
	of := func(expression, metric string) string {
		return fmt.Sprintf("max by (node, namespace, pod, container) (%s)", honoured(fmt.Sprintf(expression, metric, over)))
	}
	const asks = `kube_pod_container_resource_requests{resource=~"nvidia_com_mig_.+"}`
	when := func(by, times string) string {
		return fmt.Sprintf("max by (uid%s) (%s) and on (uid) max by (uid) (max_over_time(%s[%s]))", by, times, asks, over)
	}
	const utilization = "gpusharing_container_gpu_sm_utilization_ratio"
	return map[Query]string{
		QueryTime:       fmt.Sprintf("sum_over_time((max by (node) (gpusharing_agent_usage_complete))%s) * %.0f", steps, step),
		QueryConcurrent: fmt.Sprintf("max_over_time((count by (node) (%s))%s)", concurrent, steps),
		QueryHeld:       fmt.Sprintf("max_over_time((count by (node, namespace, pod, container) (%s))%s)", held(""), steps),
		QueryMemory:     of("max_over_time(%s[%s])", "gpusharing_container_gpu_memory_used_bytes"),
		QueryCompute:    of("max_over_time(%s[%s])", utilization),
		QueryCompute95:  of(fmt.Sprintf("quantile_over_time(%g, %%s[%%s])", often), utilization),
		QueryAsks:       fmt.Sprintf("sum by (uid, resource) (max by (uid, container, resource) (%s))", honoured(fmt.Sprintf("max_over_time(%s[%s])", asks, over))),
		QueryCreated:    when("", fmt.Sprintf("max_over_time(kube_pod_created[%s])", over)),
		QueryScheduled:  when("", fmt.Sprintf("max_over_time(kube_pod_status_scheduled_time[%s])", over)),
		QueryNode:       when(", node, exported_node", fmt.Sprintf(`max_over_time(kube_pod_info{node!=""}[%s])`, over)),
		QueryCompleted:  when("", fmt.Sprintf("max_over_time(kube_pod_completion_time[%s])", over)),
		QueryLastSeen:   when("", "max_over_time(timestamp("+asks+")"+steps+")"),
	}
}

// honoured is an expression with the namespace, pod and container that the agent reports. A Prometheus that does not honour the labels of
// what it scrapes, as OpenShift's for user workloads, gives those names to the agent itself and calls the others exported_….
func honoured(expression string) string {
	for _, label := range []string{"namespace", "pod", "container"} {
		expression = fmt.Sprintf(`label_replace(%s, %q, "$1", "exported_%s", "(.+)")`, expression, label, label)
	}
	return expression
}

// Sample is a part of an answer of Prometheus.
type Sample struct {
	Labels map[string]string
	Value  float64
}

// FromPrometheus is what Prometheus answered to the Queries at a time.
func FromPrometheus(answers map[Query][]Sample, now time.Time) Seen {
	s := Seen{Source: "Prometheus", Past: pastPods(answers, now), Until: now, Time: map[string]time.Duration{}, Concurrent: map[string]int{}}
	for _, a := range answers[QueryTime] {
		s.Time[a.Labels["node"]] = time.Duration(a.Value * float64(time.Second))
	}
	for _, a := range answers[QueryConcurrent] {
		s.Concurrent[a.Labels["node"]] = int(a.Value)
	}
	memory, compute, compute95 := byContainer(answers[QueryMemory]), byContainer(answers[QueryCompute]), byContainer(answers[QueryCompute95])
	held := map[key]int{}
	for _, query := range []Query{QueryMemory, QueryCompute, QueryCompute95} { // what is too short to be counted still used something
		for _, a := range answers[query] {
			held[keyOf(a.Labels)] = 1
		}
	}
	for _, a := range answers[QueryHeld] {
		held[keyOf(a.Labels)] = int(a.Value)
	}
	for _, key := range slices.SortedFunc(maps.Keys(held), byName) {
		c := Container{Name: key.Name, Node: key.node, Held: held[key], Compute: compute[key], Compute95: compute95[key]}
		if used := memory[key]; used != nil {
			c.MemoryBytes = new(int64(*used))
		}
		s.Containers = append(s.Containers, c)
	}
	return s
}

// key is a container on a node.
type key struct {
	usage.Name

	node string
}

func byName(a, b key) int {
	return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
}

func keyOf(labels map[string]string) key {
	return key{usage.Name{Namespace: labels["namespace"], Pod: labels["pod"], Container: labels["container"]}, labels["node"]}
}

func byContainer(samples []Sample) map[key]*float64 {
	of := map[key]*float64{}
	for _, s := range samples {
		of[keyOf(s.Labels)] = &s.Value
	}
	return of
}
