// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
)

// past is a pod of kube-state-metrics: minutes since the beginning of the last day; negative: never.
type past struct {
	asks                               string
	node                               string
	created, started, ended, seen, and int
}

// answersOf are what Prometheus answers of pods of the past.
func answersOf(now time.Time, pods []past) map[advice.Query][]advice.Sample {
	answers := map[advice.Query][]advice.Sample{}
	for n, p := range pods {
		add := func(query advice.Query, minutes int) {
			if minutes >= 0 {
				at := now.Add(-24*time.Hour + time.Duration(minutes)*time.Minute)
				answers[query] = append(answers[query], advice.Sample{Labels: map[string]string{"uid": fmt.Sprint(n), "node": p.node}, Value: float64(at.Unix())})
			}
		}
		for range 1 + p.and {
			answers[advice.QueryAsks] = append(answers[advice.QueryAsks], advice.Sample{Labels: map[string]string{"uid": fmt.Sprint(n), "resource": "nvidia_com_mig_" + p.asks}, Value: 1})
		}
		add(advice.QueryCreated, p.created)
		add(advice.QueryScheduled, p.started)
		add(advice.QueryNode, p.started)
		add(advice.QueryCompleted, p.ended)
		add(advice.QueryLastSeen, p.seen)
	}
	return answers
}

// TestThePastIsReplayedWithLayoutsOnDemand on one A100 with seven instances of 1g.5gb at rest.
func TestThePastIsReplayedWithLayoutsOnDemand(t *testing.T) {
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	const here, whole = "a", 24*60 - 1
	ran := func(asks string, created, started, ended int) past {
		return past{asks, here, created, started, ended, ended, 0}
	}
	never := func(asks string, created, seen int) past { return past{asks, "", created, -1, -1, seen, 0} }
	seven := func(ended int) (pods []past) {
		for range 7 {
			pods = append(pods, ran("1g_5gb", 0, 0, ended))
		}
		return pods
	}
	for name, c := range map[string]struct {
		pods []past
		want string
	}{
		"nothing is known":                    {nil, ""},
		"pods of another product":             {[]past{never("1g_10gb_what", 0, whole)}, ""},
		"pods that ran on another node":       {[]past{{"1g_5gb", "b", 0, 5, 9, 9, 0}}, ""},
		"none waited":                         {seven(60), "with the 7 pods that asked for MIG instances of these GPUs: none waited longer than a minute, so"},
		"one never started":                   {[]past{never("3g_20gb", 10, whole)}, "1 pod that asked for MIG instances of these GPUs: 1 waited longer than a minute or did not start, and 1 of these would have started, half of them within 11s. A layout"},
		"one that asks for two":               {[]past{{"3g_20gb", "", 10, -1, -1, whole, 1}}, "and 1 of these would have started, half of them within 11s."},
		"one that asks for more than a GPU":   {[]past{{"3g_20gb", "", 10, -1, -1, whole, 2}}, "1 waited longer than a minute or did not start, and 0 of these would have started. A"},
		"it was deleted while others ran":     {append(seven(600), never("7g_40gb", 10, 500)), "and 0 of these would have started. A"},
		"others ended, and were idle a while": {append(seven(100), never("7g_40gb", 10, whole)), "and 1 of these would have started, half of them within 1h35m11s."},
		"a large one that waits for small ones is beaten": {
			append([]past{never("7g_40gb", 0, whole)}, ran("1g_5gb", 5, 5, 9)), "and 1 of these would have started, half of them within 11s; 1 that did not wait would have. A",
		},
		"one that ran shortly, and was not seen after that": {
			[]past{{"7g_40gb", here, 0, 0, -1, -1, 0}, ran("7g_40gb", 30, 50, 70)},
			"2 pods that asked for MIG instances of these GPUs: 1 waited longer than a minute or did not start, and 1 of these would have started, half of them within 0s.",
		},
		"one that came a moment ago": {
			append(seven(whole+1), past{"7g_40gb", "", whole - 4, -1, -1, -1, 0}), "1 waited longer than a minute or did not start, and 0 of these would have started.",
		},
		"one that was seen last before it ran": {
			append([]past{{"7g_40gb", here, 0, 5, -1, 4, 0}}, ran("7g_40gb", 30, 50, 70)), "2 waited longer than a minute or did not start, and 2 of these would have started, half of them within 0s.",
		},
		"one of two that ran a while": {
			[]past{ran("7g_40gb", 0, 50, 70), ran("7g_40gb", 1, 71, 91)}, "2 waited longer than a minute or did not start, and 2 of these would have started, half of them within 11s.",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			devices := gpus(a100, 1)
			devices[0].Sharing.MIGMode = v1alpha1.MIGModeEnabled
			for i := range int32(7) {
				devices[0].Instances = append(devices[0].Instances, v1alpha1.InstanceStatus{ID: i + 1, Profile: "1g.5gb", Start: i, Size: 1, UUID: fmt.Sprint("MIG-", i)})
			}
			cluster := on(devices)
			cluster.Nodes[0].GPU.Spec.PolicyName = "research"
			cluster.Policies = []v1alpha1.GPUSharingPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "research"}, Spec: v1alpha1.GPUSharingPolicySpec{
				Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{Layouts: []v1alpha1.MIGLayout{{Fill: "1g"}}}},
			}}}
			seen := advice.FromPrometheus(answersOf(now, c.pods), now)
			cluster.Seen.Past, cluster.Seen.Until = seen.Past, seen.Until
			a := adviseOne(t, cluster)
			if c.want == "" {
				g.Expect(a.OnDemand).To(BeEmpty())
				return
			}
			g.Expect(a.OnDemand).To(ContainSubstring(c.want))
			g.Expect(a.Lines()).To(ContainElement(a.OnDemand))
		})
	}
}

// TestWhatAPodAsksForIsANumberOfInstances that is looked at: any number can be written into a pod.
func TestWhatAPodAsksForIsANumberOfInstances(t *testing.T) {
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	tooMany := []map[string]int{{"nvidia_com_mig_1g_5gb": 128}}
	for value, want := range map[float64][]map[string]int{0: nil, -1: nil, 7: {{"nvidia_com_mig_1g_5gb": 7}}, 1e9: tooMany, math.Inf(1): tooMany, math.NaN(): nil} {
		t.Run(fmt.Sprint(value), func(t *testing.T) {
			answers := answersOf(now, []past{{"1g_5gb", "", 0, -1, -1, 24*60 - 1, 0}})
			answers[advice.QueryAsks][0].Value = value
			var asks []map[string]int
			for _, pod := range advice.FromPrometheus(answers, now).Past {
				asks = append(asks, pod.Asks)
			}
			NewWithT(t).Expect(asks).To(Equal(want))
		})
	}
}

// TestTheNodeOfAPodIsNotThatOfKubeStateMetrics, which a Prometheus that honours no labels gives the name, and pods that wait have alone.
func TestTheNodeOfAPodIsNotThatOfKubeStateMetrics(t *testing.T) {
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	answers := answersOf(now, []past{{"1g_5gb", "infra", 0, 1, -1, 9, 0}, {"1g_5gb", "infra", 1, -1, -1, 9, 0}})
	for _, node := range []string{"", "a", ""} {
		labels := map[string]string{"uid": "0", "node": "infra", "exported_node": node}
		answers[advice.QueryNode] = append(answers[advice.QueryNode], advice.Sample{Labels: labels, Value: 1})
	}
	answers[advice.QueryNode] = append(answers[advice.QueryNode], advice.Sample{Labels: map[string]string{"uid": "1", "node": "infra"}, Value: 1})
	pods := advice.FromPrometheus(answers, now).Past
	NewWithT(t).Expect([]string{pods[0].Node, pods[1].Node}).To(Equal([]string{"a", ""}))
}
