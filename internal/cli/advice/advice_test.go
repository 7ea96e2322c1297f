// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

var update = flag.Bool("update", false, "write the golden files anew")

const (
	a100 = "NVIDIA-A100-SXM4-40GB"
	t4   = "Tesla-T4"
	day  = 24 * time.Hour
)

// gib is a number of bytes.
func gib(n float64) *int64 { return new(int64(n * (1 << 30))) }

// using is a container of the node a.
func using(namespace, pod string, memory *int64, compute *float64) advice.Container {
	return advice.Container{
		Name: usage.Name{Namespace: namespace, Pod: pod, Container: "main"}, Node: "a", Held: 1, MemoryBytes: memory, Compute: compute, Compute95: compute,
	}
}

// equal are n containers of the namespace team that use the same.
func equal(n int, memory, compute float64) []advice.Container {
	all := make([]advice.Container, 0, n)
	for i := range n {
		all = append(all, using("team", fmt.Sprintf("infer-%d", i), gib(memory), new(compute)))
	}
	return all
}

func gpus(product string, n int) []v1alpha1.DeviceStatus {
	d := v1alpha1.DeviceStatus{Product: product, MemoryMiB: 40960, ComputeCapability: "8.0", MIGCapable: true}
	if product == t4 {
		d.MemoryMiB, d.ComputeCapability, d.MIGCapable = 15360, "7.5", false
	}
	all := make([]v1alpha1.DeviceStatus, 0, n)
	for i := range n {
		d.UUID, d.Index = fmt.Sprintf("GPU-%d", i), int32(i)
		all = append(all, d)
	}
	return all
}

// node is a node with GPUs that a policy governs; empty: none does.
func node(name, policy string, devices []v1alpha1.DeviceStatus) cluster.Node {
	return cluster.Node{Name: name, GPU: v1alpha1.GPUNode{
		Spec: v1alpha1.GPUNodeSpec{PolicyName: policy}, Status: v1alpha1.GPUNodeStatus{Devices: devices},
	}}
}

// on is a cluster of the node a, observed for six days, with these containers at the same time.
func on(devices []v1alpha1.DeviceStatus, containers ...advice.Container) advice.Cluster {
	a := node("a", "", devices)
	a.Labels = map[string]string{"kubernetes.io/hostname": "a.example"}
	return advice.Cluster{
		Nodes: []cluster.Node{a}, MinAge: day,
		Seen: advice.Seen{
			Source: "Prometheus", Time: map[string]time.Duration{"a": 6 * day}, Containers: containers,
			Concurrent: map[string]int{"a": len(containers)},
		},
	}
}

func adviseOne(t *testing.T, c advice.Cluster) advice.Advice {
	t.Helper()
	all, err := advice.Of(c)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(all).To(HaveLen(1))
	return all[0]
}

func option(t *testing.T, a advice.Advice, name string) advice.Option {
	t.Helper()
	var names []string
	for _, o := range a.Options {
		if strings.HasPrefix(o.Name, name) {
			return o
		}
		names = append(names, o.Name)
	}
	t.Fatalf("no option %s, only %v", name, names)
	return advice.Option{}
}

// TestCriteria has for each criterion a fleet to which it applies, and one like it to which it does not.
func TestCriteria(t *testing.T) {
	several := equal(2, 1, 0.1)
	several[0].Held = 2
	type fleet struct {
		cluster advice.Cluster
		option  string
	}
	tests := map[string]struct {
		applies, not fleet
		says         string
	}{
		"EnoughRoom": {
			applies: fleet{on(gpus(a100, 1), equal(8, 1, 0.1)...), "MIG, 7 × 1g.5gb"}, not: fleet{on(gpus(a100, 1), equal(7, 1, 0.1)...), "MIG, 7 × 1g.5gb"},
			says: "it has room for 7, and 8 were held at the same time",
		},
		"SeveralGPUs": {
			applies: fleet{on(gpus(a100, 2), several...), "MIG, 7 × 1g.5gb"}, not: fleet{on(gpus(a100, 2), several...), "Exclusive"},
			says: "containers that use several GPUs at the same time need whole ones: team/infer-0 main",
		},
		"MemoryKnown": {
			applies: fleet{on(gpus(a100, 1), using("team", "a", nil, nil)), "MPS"}, not: fleet{on(gpus(a100, 1), using("team", "a", gib(0), nil)), "MPS"},
			says: "the driver did not report the memory of team/a main",
		},
		"MemoryFits": {
			applies: fleet{on(gpus(a100, 1), append(equal(2, 1, 0.1), using("x", "big", gib(7.9), new(0.1)))...), "MIG, 7 × 1g.5gb"},
			not:     fleet{on(gpus(a100, 1), append(equal(2, 1, 0.1), using("x", "big", gib(4.2), new(0.1)))...), "MIG, 7 × 1g.5gb"},
			says:    "1 container of namespace x (7.9 GiB) would not fit 1g.5gb, which has 4.8 GiB",
		},
		"MemoryTogether": {
			applies: fleet{on(gpus(a100, 1), equal(4, 10, 0.1)...), "TimeSlicing"}, not: fleet{on(gpus(a100, 1), equal(4, 9, 0.1)...), "TimeSlicing"},
			says: "the 4 largest containers used 40.0 GiB together, and a GPU has 40.0 GiB",
		},
		"ComputeFits": {
			applies: fleet{on(gpus(a100, 1), equal(2, 1, 0.2)...), "MIG, 7 × 1g.5gb"}, not: fleet{on(gpus(a100, 1), equal(2, 1, 0.14)...), "MIG, 7 × 1g.5gb"},
			says: "team/infer-0 main, team/infer-1 main would take longer: they use more of the multiprocessors in 5 of 100 samples than the 14 % of 1g.5gb",
		},
		"TakesTurns": {
			applies: fleet{on(gpus(t4, 1), equal(3, 1, 0.4)...), "TimeSlicing"}, not: fleet{on(gpus(t4, 1), equal(3, 1, 0.33)...), "TimeSlicing"},
			says: "the 3 busiest containers would wait for each other: together they use 120 % of the multiprocessors",
		},
		"OneTenant": {
			applies: fleet{on(gpus(t4, 1), append(equal(1, 1, 0.1), using("x", "a", gib(1), new(0.1)))...), "MPS"},
			not:     fleet{on(gpus(t4, 1), equal(2, 1, 0.1)...), "MPS"},
			says:    "a fault of one client ends all, and the containers belong to several namespaces: team, x",
		},
		"Isolates": {
			applies: fleet{on(gpus(a100, 1), equal(2, 1, 0.1)...), "MIG, 7 × 1g.5gb"}, not: fleet{on(gpus(a100, 2), equal(2, 1, 0.1)...), "Exclusive"},
			says: "isolates memory, computing time and faults",
		},
		"ComputeKnown": {
			applies: fleet{on(gpus(a100, 1), using("team", "a", gib(1), nil)), "MIG, 7 × 1g.5gb"},
			not:     fleet{on(gpus(a100, 1), using("team", "a", gib(1), new(0.1))), "MIG, 7 × 1g.5gb"},
			says:    "rests on memory alone for 1 container without a reported utilization of the multiprocessors",
		},
		"OneUser": {
			applies: fleet{on(gpus(t4, 1), equal(2, 1, 0.1)...), "MPS"}, not: fleet{on(gpus(t4, 1), equal(2, 1, 0.1)...), "TimeSlicing"},
			says: "it serves one user ID at a time, and that of these is not known",
		},
		"AsSafe": {
			applies: fleet{underPolicy(on(gpus(t4, 2), equal(2, 1, 0.1)...), v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}), "TimeSlicing"},
			not:     fleet{on(gpus(t4, 2), equal(2, 1, 0.1)...), "TimeSlicing"},
			says:    "policy research asks for Exclusive, which isolates better",
		},
		"NodesTakeIt": {
			applies: fleet{optedOut(on(gpus(t4, 2), equal(2, 1, 0.1)...)), "TimeSlicing"}, not: fleet{on(gpus(t4, 2), equal(2, 1, 0.1)...), "TimeSlicing"},
			says: "node a refuses it: the node carries nvidia.com/gpu.deploy.operands=false",
		},
		"NamesStay": {
			applies: fleet{underPolicy(on(gpus(a100, 1), equal(2, 1, 0.1)...), timeSliced(2, true)), "MIG, 7 × 1g.5gb"},
			not:     fleet{underPolicy(on(gpus(a100, 1), equal(2, 1, 0.1)...), timeSliced(2, false)), "MIG, 7 × 1g.5gb"},
			says:    "pods on node a request 1 nvidia.com/gpu.shared, and it would offer 0",
		},
		"LabelsStay": {
			applies: fleet{selecting(t4, "nvidia.com/gpu.product"), "TimeSlicing"}, not: fleet{selecting(t4, "nvidia.com/gpu.product"), "Exclusive"},
			says: "pod team/infer-0 selects its node by nvidia.com/gpu.product, which changes",
		},
	}
	docs, err := os.ReadFile("../../../docs/choosing.md")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	for _, r := range advice.Criteria() {
		t.Run(r.Name, func(t *testing.T) {
			g := NewWithT(t)
			tc, tested := tests[r.Name]
			g.Expect(tested).To(BeTrue(), "each criterion has a test")
			advised := adviseOne(t, tc.applies.cluster)
			o := option(t, advised, tc.applies.option)
			g.Expect(r.Against(advised.Fleet, o)).To(ContainSubstring(tc.says))
			printed := o.Against
			if r.Note {
				printed = o.Notes
			}
			g.Expect(printed).To(ContainElement(ContainSubstring(tc.says)))
			advised = adviseOne(t, tc.not.cluster)
			g.Expect(r.Against(advised.Fleet, option(t, advised, tc.not.option))).To(BeEmpty())
			g.Expect(string(docs)).To(ContainSubstring("`"+r.Name+"`"), "a reason is in docs/choosing.md")
		})
	}
}

// TestAdvice compares the advice with testdata/*.golden.
func TestAdvice(t *testing.T) {
	governed := func(c advice.Cluster, spec v1alpha1.GPUSharingPolicySpec) advice.Cluster {
		c.Nodes[0].GPU.Spec.PolicyName = "research"
		c.Policies = []v1alpha1.GPUSharingPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "research", ResourceVersion: "7"}, Spec: spec}}
		return c
	}
	slicing := v1alpha1.GPUSharingPolicySpec{
		NodeSelector: &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "research"}}, Priority: 3,
		Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 2}, Advertise: &v1alpha1.Advertise{RenameByDefault: new(true)}},
	}
	second := func(c advice.Cluster, n cluster.Node) advice.Cluster {
		c.Nodes = append(c.Nodes, n)
		c.Seen.Time[n.Name] = 2 * day
		if n.Name == "young" {
			c.Seen.Time[n.Name] = time.Hour
		}
		return c
	}
	scoped := func(c advice.Cluster, s advice.Scope) advice.Cluster {
		c.Scope = s
		if s.Namespace == "x" {
			c.Seen.Concurrent["a"] = 2
		}
		return c
	}
	big := append(equal(4, 3.1, 0.1), using("x", "train-0", gib(7.9), new(0.1)), using("x", "train-1", gib(7.9), nil))
	for name, c := range map[string]advice.Cluster{
		"14 small containers on A100s":           governed(on(gpus(a100, 2), equal(14, 3.1, 0.12)...), slicing),
		"some containers need a larger instance": on(gpus(a100, 1), big...),
		"small containers on T4s":                governed(on(gpus(t4, 2), equal(8, 2, 0.2)...), slicing),
		"MPS for several users on T4s": governed(on(gpus(t4, 1), equal(3, 2, 0.2)...), v1alpha1.GPUSharingPolicySpec{Sharing: v1alpha1.Sharing{
			Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: 2, MultiUser: new(true), ActiveThreadPercentage: new(int32(50))},
			Advertise: &v1alpha1.Advertise{RenameByDefault: new(true)},
		}}),
		"several tenants on T4s":                      on(gpus(t4, 1), append(equal(2, 2, 0.2), using("x", "a", gib(1), nil))...),
		"a container that fills the GPU":              on(gpus(t4, 2), equal(2, 12, 0.98)...),
		"containers that fit in no way":               on(gpus(t4, 1), equal(3, 12, 0.98)...),
		"memory that the driver does not report":      on(gpus(a100, 2), using("team", "a", nil, nil), using("team", "b", gib(1), nil)),
		"nobody used the GPUs":                        on(gpus(a100, 1)),
		"one node of a policy of several products":    second(governed(on(gpus(a100, 1), equal(3, 3, 0.1)...), slicing), node("b", "research", gpus(t4, 1))),
		"a young node of the same policy":             second(governed(on(gpus(a100, 1), equal(3, 3, 0.1)...), slicing), node("young", "research", gpus(a100, 1))),
		"one node of a policy":                        scoped(second(governed(on(gpus(a100, 1), equal(3, 3, 0.1)...), slicing), node("b", "research", gpus(a100, 1))), advice.Scope{Node: "a"}),
		"one node":                                    scoped(second(on(gpus(a100, 1), equal(3, 3, 0.1)...), node("b", "", gpus(a100, 1))), advice.Scope{Node: "a"}),
		"a namespace that is alone":                   scoped(on(gpus(a100, 1), equal(3, 3, 0.1)...), advice.Scope{Namespace: "team"}),
		"a namespace beside others":                   scoped(on(gpus(a100, 1), big...), advice.Scope{Namespace: "x"}),
		"a node of several products and a young node": second(on(append(gpus(a100, 1), gpus(t4, 1)...)), node("b", "", gpus(t4, 1))),
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			all, err := advice.Of(c)
			g.Expect(err).NotTo(HaveOccurred())
			var shown strings.Builder
			for _, a := range all {
				shown.WriteString(strings.Join(a.Lines(), "\n") + "\n")
				if a.Policy != nil {
					text, err := a.YAML()
					g.Expect(err).NotTo(HaveOccurred())
					shown.WriteString("---\n" + text)
				}
			}
			file := filepath.Join("testdata", strings.ReplaceAll(name, " ", "-")+".golden")
			if *update {
				g.Expect(os.WriteFile(file, []byte(shown.String()), 0o644)).To(Succeed())
			}
			want, err := os.ReadFile(file)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(shown.String()).To(Equal(string(want)), "go test -update writes the golden files anew")
		})
	}
}

func TestNothingIsAdvisedFromLessThanTheMinimum(t *testing.T) {
	g := NewWithT(t)
	c := on(gpus(a100, 1), equal(3, 3, 0.1)...)
	c.MinAge = 7 * day
	_, err := advice.Of(c)
	g.Expect(err).To(MatchError("there is nothing to advise from: nodes that were observed for less than --min-age 7 days: a (6 days)"))
	c.MinAge = 6 * day
	_, err = advice.Of(c)
	g.Expect(err).NotTo(HaveOccurred())
	c.MinAge, c.Seen.Time = 0, nil
	_, err = advice.Of(c)
	g.Expect(err).To(MatchError(ContainSubstring("a (0 minutes)")), "a node that was not observed at all")
	c.Nodes = nil
	_, err = advice.Of(c)
	g.Expect(err).To(MatchError("no node with GPUs is there to advise on"))
}

func TestTheMemoryOfAgentsIsWhatTheyHaveSeen(t *testing.T) {
	g := NewWithT(t)
	began := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	seen := func(pod, gpu string, from, to int, memory, compute float64) usage.Observed {
		o := usage.Observed{
			Name: usage.Name{Namespace: "team", Pod: pod, Container: "main"}, GPU: gpu,
			First: began.Add(time.Duration(from) * time.Hour), Last: began.Add(time.Duration(to) * time.Hour),
		}
		if memory >= 0 {
			o.Memory = &usage.Distribution{Peak: memory}
		}
		if compute > 0 {
			o.Compute = &usage.Distribution{Peak: compute, Counts: make([]int, len(usage.ComputeBounds())+1)}
			o.Compute.Counts[0] = 99
			o.Compute.Counts[10] = 1
		}
		return o
	}
	other := seen("web", "GPU-0", 0, 9, 1, 0)
	other.Namespace = "x"
	history := usage.History{Node: "a", Interval: time.Minute, Samples: 120, Dropped: 3, Containers: []usage.Observed{
		seen("pair", "GPU-0", 0, 4, 100, 0.6), seen("pair", "GPU-1", 0, 4, 200, 0),
		seen("moved", "GPU-0", 0, 1, 5, 0), seen("moved", "GPU-1", 5, 6, 4, 0),
		seen("unknown", "GPU-0", 5, 6, -1, 0), other,
	}}
	s := advice.FromAgents([]usage.History{history}, "")
	g.Expect(s.Time).To(Equal(map[string]time.Duration{"a": 2 * time.Hour}))
	g.Expect(s.Concurrent).To(Equal(map[string]int{"a": 4}))
	g.Expect(s.Lacks).To(ConsistOf(ContainSubstring("3 containers on node a that ended first")))
	byPod := map[string]advice.Container{}
	for _, c := range s.Containers {
		byPod[c.Pod] = c
	}
	g.Expect(byPod).To(HaveLen(4))
	g.Expect(byPod["pair"].Held).To(Equal(2))
	g.Expect(*byPod["pair"].MemoryBytes).To(Equal(int64(200)))
	g.Expect(*byPod["pair"].Compute).To(Equal(0.6))
	g.Expect(*byPod["pair"].Compute95).To(Equal(0.05))
	g.Expect(byPod["moved"].Held).To(Equal(1), "one GPU after the other")
	g.Expect(byPod["moved"].Compute95).To(BeNil(), "it is not 0")
	g.Expect(byPod["unknown"].MemoryBytes).To(BeNil(), "it is not 0")
	shift := usage.History{Node: "a", Containers: []usage.Observed{seen("early", "GPU-0", 0, 1, 1, 0), seen("late", "GPU-0", 1, 2, 1, 0)}}
	g.Expect(advice.FromAgents([]usage.History{shift}, "").Concurrent).To(Equal(map[string]int{"a": 2}), "one sample has both")
	g.Expect(advice.FromAgents([]usage.History{history}, "x").Concurrent).To(Equal(map[string]int{"a": 1}))
}
