// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const gib = int64(1 << 30)

func TestUsage(t *testing.T) {
	cluster := env.Start(t)
	for name, test := range map[string]func(s scenario){
		"attributes processes to containers":                                        attributes,
		"knows not what a container without a name uses":                            knowsNotWhatAnUnnamedContainerUses,
		"measures MIG instances and their containers":                               measuresMIGInstances,
		"attributes containers by the devices of their claims":                      attributesClaims,
		"attributes nothing to the MPS server":                                      attributesNothingToTheServer,
		"leaves the driver closed for mig-manager":                                  measuresNotBesideMIGManager,
		"leaves the driver closed for mig-manager, whose turn came while it waited": measuresNotBesideMIGManagerThatCameMeanwhile,
		"waits for a reconcile no longer than it may":                               waitsForAReconcile,
		"lets a reconcile wait for a measurement":                                   letsAReconcileWait,
		"serves what it measured, and says why it could not":                        serves,
	} {
		t.Run(name, func(t *testing.T) { test(scenario{T: t, cluster: cluster, name: nodeName(name)}) })
	}
}

// busy puts a process of a pod on the first GPU, to which the kubelet allocated one of four replicas.
func (n *node) busy(pid int, pod string, use gpu.ProcessUse) {
	n.Helper()
	id := strings.Repeat("0", 60) + pod[:4]
	use.PID, use.Instance = pid, gpu.WholeGPU
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: pid, Instance: gpu.WholeGPU})).To(Succeed())
	n.Expect(n.hardware.SetUse(n.uuid(0), use)).To(Succeed())
	n.processes.Set(pid, host.Process{Name: "python3", PodUID: "uid-" + pod, ContainerID: id})
	n.containers[id] = host.ContainerName{Namespace: "ml", Pod: pod, Container: "main"}
	n.allocations.hold(pod, n.uuid(0)+"::1")
	n.allocations.advertised = []string{n.uuid(0) + "::0", n.uuid(0) + "::1", n.uuid(0) + "::2", n.uuid(0) + "::3"}
}

func attributes(s scenario) {
	n := s.node("", sim.A100, sim.T4)
	n.settle()
	n.busy(100, "greedy", gpu.ProcessUse{MemoryBytes: new(12 * gib), Utilization: &gpu.Utilization{Compute: 0.5, Memory: 0.25}})
	n.busy(200, "modest", gpu.ProcessUse{MemoryBytes: new(gib)})
	n.allocations.claim("by-claim")
	writes, closed := n.writes, n.between.closed

	collector := agent.NewUsageCollector(func() (usage.Report, error) { return n.controller.Usage(n.Context()) })
	expected := `
# HELP gpusharing_agent_usage_complete 1 if all GPUs of the node could be measured for this scrape, otherwise 0; the agent's log has the error.
# TYPE gpusharing_agent_usage_complete gauge
gpusharing_agent_usage_complete{node="NODE"} 1
# HELP gpusharing_container_gpu_memory_share_bytes GPU memory that a container is meant to have: the limit of the MPS server, what the policy's memory guard says, or the memory divided by the replicas.
# TYPE gpusharing_container_gpu_memory_share_bytes gauge
gpusharing_container_gpu_memory_share_bytes{A100 greedy} 1.073741824e+10
gpusharing_container_gpu_memory_share_bytes{A100 modest} 1.073741824e+10
# HELP gpusharing_container_gpu_memory_used_bytes GPU memory that the processes of a container use; 0 for a container that holds the GPU and has no process on it.
# TYPE gpusharing_container_gpu_memory_used_bytes gauge
gpusharing_container_gpu_memory_used_bytes{A100 greedy} 1.2884901888e+10
gpusharing_container_gpu_memory_used_bytes{A100 modest} 1.073741824e+09
# HELP gpusharing_container_gpu_sm_utilization_ratio Part of the driver's last sample period in which the streaming multiprocessors worked for a container, 0 to 1. Absent if they did not lately, for MPS clients and in MIG mode.
# TYPE gpusharing_container_gpu_sm_utilization_ratio gauge
gpusharing_container_gpu_sm_utilization_ratio{A100 greedy} 0.5
# HELP gpusharing_gpu_containers Containers that hold or use a GPU or a MIG instance. Absent for a GPU that has instances.
# TYPE gpusharing_gpu_containers gauge
gpusharing_gpu_containers{A100} 2
gpusharing_gpu_containers{T4} 0
# HELP gpusharing_gpu_memory_used_bytes Memory of a GPU or a MIG instance that is in use, without what the driver reserves.
# TYPE gpusharing_gpu_memory_used_bytes gauge
gpusharing_gpu_memory_used_bytes{A100} 1.3958643712e+10
gpusharing_gpu_memory_used_bytes{T4} 0
`
	labels := func(uuid, index, product, strategy, pod string) string {
		whole := `{gpu="` + uuid + `",gpu_index="` + index + `",gpu_instance="",`
		if pod == "" {
			return whole + `node="` + n.name + `",product="` + product + `",profile="",strategy="` + strategy + `"}`
		}
		return `{container="main",` + whole[1:] + `namespace="ml",node="` + n.name + `",pod="` + pod + `",product="` + product +
			`",profile="",strategy="` + strategy + `"}`
	}
	a100 := func(pod string) string { return labels(n.uuid(0), "0", "NVIDIA-A100-SXM4-40GB", "TimeSlicing", pod) }
	expected = strings.NewReplacer("NODE", n.name, "{T4}", labels(n.uuid(1), "1", "Tesla-T4", "", ""),
		"{A100}", a100(""), "{A100 greedy}", a100("greedy"), "{A100 modest}", a100("modest")).Replace(expected)
	n.Expect(testutil.CollectAndCompare(collector, strings.NewReader(expected),
		"gpusharing_agent_usage_complete", "gpusharing_container_gpu_memory_share_bytes", "gpusharing_container_gpu_memory_used_bytes",
		"gpusharing_container_gpu_sm_utilization_ratio", "gpusharing_gpu_containers", "gpusharing_gpu_memory_used_bytes")).To(Succeed())
	n.Expect(n.writes).To(Equal(writes), "no API write")
	n.Expect(n.between.closed).To(Equal(closed+1), "the driver is closed again")

	registry := prometheus.NewPedanticRegistry()
	n.Expect(registry.Register(collector)).To(Succeed())
	problems, err := testutil.GatherAndLint(registry)
	n.Expect(err).NotTo(HaveOccurred())
	n.Expect(problems).To(BeEmpty())

	n.hardware.RemoveProcess(100)
	n.allocations.free()
	n.Expect(testutil.CollectAndCount(collector, "gpusharing_container_gpu_memory_used_bytes")).To(Equal(1), "a series goes with its container")
}

func measuresMIGInstances(s scenario) {
	n := s.node("", sim.H100)
	n.specify(mig(n.uuid(0), instances("3g.40gb", 2)))
	n.settle()
	instance := n.get().Status.Devices[0].Instances[0]
	use := gpu.ProcessUse{
		PID: 100, Instance: int(instance.ID), MemoryBytes: new(5 * gib), Utilization: &gpu.Utilization{Compute: 0.75, Memory: 0.25},
	}
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 100, Instance: use.Instance})).To(Succeed())
	n.Expect(n.hardware.SetUse(n.uuid(0), use)).To(Succeed())
	id := strings.Repeat("0", 64)
	n.processes.Set(100, host.Process{Name: "python3", PodUID: "uid-train", ContainerID: id})
	n.containers[id] = host.ContainerName{Namespace: "ml", Pod: "train", Container: "main"}
	n.allocations.hold("train", instance.UUID)
	n.allocations.advertised = []string{instance.UUID, n.get().Status.Devices[0].Instances[1].UUID}
	report, err := n.controller.Usage(n.Context())
	n.Expect(err).NotTo(HaveOccurred())
	n.Expect(report.Units).To(HaveLen(3))
	busy := report.Units[1]
	if *busy.Instance != use.Instance {
		busy = report.Units[2]
	}
	n.Expect(busy.Utilization).To(Equal(use.Utilization))
	n.Expect(busy.Containers).To(HaveLen(1))
	n.Expect(busy.Containers[0].Pod).To(Equal("train"))
	n.Expect(busy.Containers[0].MemoryBytes).To(HaveValue(Equal(5 * gib)))

	collector := agent.NewUsageCollector(func() (usage.Report, error) { return report, nil })
	values, err := gathered(collector)
	n.Expect(err).NotTo(HaveOccurred())
	id = strconv.Itoa(use.Instance)
	n.Expect(values["gpusharing_gpu_sm_utilization_ratio"]).To(HaveKeyWithValue(id, 0.75))
	n.Expect(values["gpusharing_gpu_memory_bandwidth_utilization_ratio"]).To(HaveKeyWithValue(id, 0.25))
	n.Expect(values["gpusharing_container_gpu_memory_used_bytes"]).To(Equal(map[string]float64{id: float64(5 * gib)}))
	n.Expect(values).NotTo(HaveKey("gpusharing_gpu_utilization_ratio"), "of the GPU the driver reports none in MIG mode")
	n.Expect(values["gpusharing_gpu_containers"]).To(HaveLen(2), "and none of the GPU itself")
}

// attributesClaims: NVIDIA's DRA driver serves the node, so the kubelet lists devices of claims, and none as
// allocatable.
func attributesClaims(s scenario) {
	n := s.node("", sim.A100, sim.H100, sim.T4)
	n.setSpec(v1alpha1.GPUNodeSpec{
		PolicyName: "research", AdminClaims: []string{"ml/admin"},
		Devices: []v1alpha1.DeviceSpec{mig(n.uuid(0), instances("2g.10gb", 1), instances("1g.5gb", 2))},
	})
	n.settle()
	first := n.get().Status.Devices[0]
	second := first.Instances[slices.IndexFunc(first.Instances, func(i v1alpha1.InstanceStatus) bool { return i.Profile == "2g.10gb" })]
	n.allocations.list = []agent.Allocation{
		{Namespace: "ml", Pod: "part", Container: "main", Device: fmt.Sprintf("gpu-0-mig-2g10gb-14-%d", second.Start), Claim: "ml/claim"},
		{Namespace: "ml", Pod: "gone", Container: "main", Device: "gpu-0-mig-3g20gb-9-4", Claim: "ml/claim"},
		{Namespace: "ml", Pod: "odd", Container: "main", Device: "gpu-0", Claim: "ml/claim"},
		{Namespace: "ml", Pod: "whole", Container: "main", Device: "gpu-2", Claim: "ml/claim"},
		{Namespace: "ml", Pod: "starting", Container: "main", Claim: "ml/claim"},
		{Namespace: "ml", Pod: "monitor", Container: "main", Device: "gpu-2", Claim: "ml/admin"},
	}
	n.rollout(v1alpha1.RolloutStatus{Shares: 4})
	report, err := n.controller.Usage(n.Context())
	n.Expect(err).NotTo(HaveOccurred())
	held := map[string][]string{}
	for _, u := range report.Units {
		what := strconv.Itoa(u.Index)
		if u.Instance != nil {
			what += " " + u.Profile
			n.Expect(u.Replicas).To(Equal(1), "a claim has all of an instance")
		} else if !u.Partitioned {
			n.Expect(u.Replicas).To(Equal(4), "of GPU "+what)
		}
		for _, c := range u.Containers {
			held[c.Pod] = append(held[c.Pod], what)
			n.Expect(c.ShareBytes).To(HaveValue(Equal(u.Memory.Total / int64(u.Replicas))))
		}
	}
	n.Expect(held).To(Equal(map[string][]string{"part": {"0 2g.10gb"}, "whole": {"2"}}), "what a name does not tell is not shown")
	values, err := gathered(agent.NewUsageCollector(func() (usage.Report, error) { return report, nil }))
	n.Expect(err).NotTo(HaveOccurred())
	n.Expect(values["gpusharing_gpu_replicas"]).To(HaveKeyWithValue("", 4.0))
	n.Expect(values["gpusharing_container_gpu_memory_share_bytes"]).To(HaveLen(2))
}

// rollout is what the controller reports of the node.
func (n *node) rollout(is v1alpha1.RolloutStatus) {
	n.Helper()
	has := n.get()
	has.Status.Rollout = is
	n.Expect(n.cluster.Client.Status().Update(n.Context(), has)).To(Succeed())
}

// gathered are the values of a collector by metric and instance.
func gathered(collector prometheus.Collector) (map[string]map[string]float64, error) {
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(collector); err != nil {
		return nil, err
	}
	families, err := registry.Gather()
	values := map[string]map[string]float64{}
	for _, f := range families {
		values[f.GetName()] = map[string]float64{}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "gpu_instance" {
					values[f.GetName()][l.GetValue()] = m.GetGauge().GetValue()
				}
			}
		}
	}
	return values, err
}

func attributesNothingToTheServer(s scenario) {
	n := s.node("", sim.T4)
	n.settle()
	n.busy(100, "mps-pod", gpu.ProcessUse{MemoryBytes: new(gib)})
	n.allocations.free()
	n.processes.Set(100, host.Process{Name: gpu.MPSServer, PodUID: "uid", ContainerID: strings.Repeat("0", 60) + "mps-", HostPIDs: true})
	report, err := n.controller.Usage(n.Context())
	n.Expect(err).NotTo(HaveOccurred())
	n.Expect(report.Units[0].Containers).To(BeEmpty())
	n.Expect(report.Units[0].OtherBytes).To(Equal(gib))
}

func knowsNotWhatAnUnnamedContainerUses(s scenario) {
	n := s.node("", sim.T4)
	n.settle()
	n.busy(100, "long-name", gpu.ProcessUse{MemoryBytes: new(gib)})
	clear(n.containers)
	report, err := n.controller.Usage(n.Context())
	n.Expect(err).NotTo(HaveOccurred())
	n.Expect(report.Units[0].Containers).To(HaveLen(1))
	n.Expect(report.Units[0].Containers[0].MemoryBytes).To(BeNil(), "it is not 0: the process in a container may be its")
}

func measuresNotBesideMIGManager(s scenario) {
	n := s.node("", sim.A100)
	n.setSpec(v1alpha1.GPUNodeSpec{MIGActuator: v1alpha1.MIGActuatorMIGManager, MIGConfigName: "all-balanced"})
	n.hardware.Fail = func(op sim.Op, _ string) error { return errors.New("the driver is open: " + string(op)) }
	_, err := n.controller.Usage(n.Context())
	n.Expect(err).To(MatchError(ContainSubstring("mig-manager is changing the GPUs")))
}

func measuresNotBesideMIGManagerThatCameMeanwhile(s scenario) {
	n := s.node("", sim.A100)
	h := n.hold()
	reconciled, measured := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := n.controller.Reconcile(n.Context(), n.get())
		reconciled <- err
	}()
	n.Expect(<-h.reached).To(Equal("Observe"))
	read := make(chan struct{}, 1)
	n.afterGet = func() {
		select {
		case read <- struct{}{}:
		default:
		}
	}
	go func() {
		_, err := n.controller.Usage(n.Context())
		measured <- err
	}()
	select { // one that reads what is asked for before its turn has done so by now
	case <-read:
	case <-time.After(200 * time.Millisecond):
	}
	n.setSpec(v1alpha1.GPUNodeSpec{MIGActuator: v1alpha1.MIGActuatorMIGManager, MIGConfigName: "all-balanced"})
	close(h.resume)
	n.Expect(<-reconciled).To(Succeed())
	select {
	case call := <-h.reached:
		n.Fatalf("%s opens the driver while mig-manager changes the GPUs", call)
	case err := <-measured:
		n.Expect(err).To(MatchError(ContainSubstring("mig-manager is changing the GPUs")))
	}
}

// held is hardware that stops at each call until it is let go on.
type held struct {
	gpu.Hardware

	reached chan string
	resume  chan struct{}
}

func (h held) Observe(ctx context.Context) (gpu.Inventory, error) {
	h.reached <- "Observe"
	<-h.resume
	return h.Hardware.Observe(ctx)
}

func (h held) Sample(ctx context.Context) (gpu.Sample, error) {
	h.reached <- "Sample"
	<-h.resume
	return h.Hardware.Sample(ctx)
}

// hold makes the agent stop at each look at the hardware.
func (n *node) hold() held {
	h := held{Hardware: n.between.Hardware, reached: make(chan string), resume: make(chan struct{})}
	n.between.Hardware = h
	return h
}

func waitsForAReconcile(s scenario) {
	n := s.node("", sim.T4)
	h := n.hold()
	done := make(chan error, 1)
	go func() {
		_, err := n.controller.Reconcile(n.Context(), n.get())
		done <- err
	}()
	n.Expect(<-h.reached).To(Equal("Observe"))
	ctx, cancel := context.WithTimeout(n.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := n.controller.Usage(ctx)
	n.Expect(err).To(MatchError(ContainSubstring("waiting for the agent to have finished with the GPUs")))
	close(h.resume)
	n.Expect(<-done).To(Succeed())
}

func letsAReconcileWait(s scenario) {
	n := s.node("", sim.T4)
	h := n.hold()
	measured, reconciled := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := n.controller.Usage(n.Context())
		measured <- err
	}()
	n.Expect(<-h.reached).To(Equal("Sample"))
	go func() {
		_, err := n.controller.Reconcile(n.Context(), n.get())
		reconciled <- err
	}()
	n.Consistently(h.reached, "100ms").ShouldNot(Receive(), "the reconcile would close the driver under the measurement")
	close(h.resume)
	n.Expect(<-measured).To(Succeed())
	n.Expect(<-h.reached).To(Equal("Observe"))
	n.Expect(<-reconciled).To(Succeed())
}

func serves(s scenario) {
	n := s.node("", sim.T4)
	n.settle()
	n.busy(100, "train", gpu.ProcessUse{MemoryBytes: new(gib)})
	answer := httptest.NewRecorder()
	n.controller.ServeUsage(answer, httptest.NewRequestWithContext(n.Context(), http.MethodGet, usage.Path, nil))
	n.Expect(answer.Code).To(Equal(http.StatusOK))
	var report usage.Report
	n.Expect(json.Unmarshal(answer.Body.Bytes(), &report)).To(Succeed())
	n.Expect(report.Node).To(Equal(n.name))
	n.Expect(report.Units[0].Containers[0].Pod).To(Equal("train"))

	n.hardware.Fail = func(sim.Op, string) error { return errors.New("GPU is lost") }
	answer = httptest.NewRecorder()
	n.controller.ServeUsage(answer, httptest.NewRequestWithContext(n.Context(), http.MethodGet, usage.Path, nil))
	n.Expect(answer.Code).To(Equal(http.StatusServiceUnavailable))
	n.Expect(answer.Body.String()).To(ContainSubstring("GPU is lost"))
	n.Expect(testutil.CollectAndCompare(agent.NewUsageCollector(func() (usage.Report, error) { return n.controller.Usage(n.Context()) }),
		strings.NewReader(`
# HELP gpusharing_agent_usage_complete 1 if all GPUs of the node could be measured for this scrape, otherwise 0; the agent's log has the error.
# TYPE gpusharing_agent_usage_complete gauge
gpusharing_agent_usage_complete{node="`+n.name+`"} 0
`))).To(Succeed(), "and nothing else is known")
}

// history asks a sampler as a client does.
func history(g *WithT, s *agent.Sampler) (usage.History, *httptest.ResponseRecorder) {
	answer := httptest.NewRecorder()
	s.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, usage.Path+"?"+usage.HistoryQuery, nil))
	var h usage.History
	if answer.Code == http.StatusOK {
		g.Expect(json.Unmarshal(answer.Body.Bytes(), &h)).To(Succeed())
	}
	return h, answer
}

func TestASamplerMeasuresAtItsIntervalAndServesWhatItKeeps(t *testing.T) {
	g := NewWithT(t)
	began := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	clock := clocktesting.NewFakeClock(began)
	type outcome struct{ err error }
	measured := make(chan outcome)
	s := agent.NewSampler("n1", time.Minute, func(context.Context) (usage.Report, error) {
		result := <-measured
		used := gib
		return usage.Report{Node: "n1", Units: []usage.Unit{{
			GPU: "GPU-1", Containers: []usage.Container{{Name: usage.Name{Namespace: "ml", Pod: "train", Container: "main"}, MemoryBytes: &used}},
		}}}, result.err
	}, clock)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Start(ctx) }()
	g.Eventually(clock.HasWaiters, "30s").Should(BeTrue())
	for _, result := range []outcome{{}, {errors.New("GPU is lost")}} {
		g.Consistently(measured, "50ms").ShouldNot(BeSent(result), "not before its time")
		clock.Step(time.Minute)
		g.Eventually(measured, "30s").Should(BeSent(result))
	}
	g.Eventually(func() int { h, _ := history(g, s); return h.Samples + h.Incomplete }, "30s").Should(Equal(2))
	h, answer := history(g, s)
	g.Expect(answer.Header().Get("Content-Type")).To(Equal("application/json"))
	g.Expect(h.Node).To(Equal("n1"))
	g.Expect(h.Since).To(BeTemporally("==", began))
	g.Expect(h.Time()).To(Equal(time.Minute), "what a sample lacks is not observed")
	g.Expect(h.Incomplete).To(Equal(1))
	g.Expect(h.Containers).To(HaveLen(1))
	g.Expect(h.Containers[0].Memory.Peak).To(Equal(float64(gib)))
	stop()
	g.Eventually(ended, "30s").Should(Receive(BeNil()))
}

func TestWithoutAnIntervalNothingIsSampled(t *testing.T) {
	g := NewWithT(t)
	s := agent.NewSampler("n1", 0, func(context.Context) (usage.Report, error) {
		t.Error("it measures")
		return usage.Report{}, nil
	}, clocktesting.NewFakeClock(time.Now()))
	g.Expect(s.Start(t.Context())).To(Succeed())
	_, answer := history(g, s)
	g.Expect(answer.Code).To(Equal(http.StatusNotFound))
	g.Expect(answer.Body.String()).To(ContainSubstring("set metrics.sampling.interval"))
}
