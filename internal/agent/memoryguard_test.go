// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestMemoryGuard(t *testing.T) {
	cluster := env.Start(t)
	for name, test := range map[string]func(s scenario){
		"reports the container over its share once":        reportsOnce,
		"renews the report where pods are evicted":         renews,
		"reports a second one where pods are evicted":      reportsASecond,
		"measures nothing without a guard":                 measuresNothingWithoutAGuard,
		"reports nothing while the driver gives nothing":   reportsNothingUnknown,
		"takes the share from the policy":                  takesTheShareFromThePolicy,
		"leaves the driver closed while mig-manager works": leavesTheDriverToMIGManager,
		"sees a container whose process has another name":  seesWhateverItsName,
		"blames no neighbour of one with another name":     blamesNoNeighbour,
		"sees a pod whose name is too long for its log":    seesALongName,
		"says of each generation that it measures":         saysThatItMeasures,
		"does not say so of a GPU whose memory is unknown": measuresNoUnknownMemory,
	} {
		t.Run(name, func(t *testing.T) { test(scenario{T: t, cluster: cluster, name: nodeName(name)}) })
	}
}

// guarded is a node with a guard of its policy, on whose GPU of 40 GiB one pod of four uses 38.5 GiB and another 1 GiB.
type guarded struct {
	*node

	guard *agent.MemoryGuard
}

func (s scenario) guarded(guard *v1alpha1.TimeSlicedMemory) *guarded {
	n := s.node("", sim.A100)
	n.setSpec(v1alpha1.GPUNodeSpec{PolicyName: "research", Memory: guard})
	n.settle()
	n.busy(100, "greedy", gpu.ProcessUse{MemoryBytes: new(38*gib + gib/2)})
	n.busy(200, "modest", gpu.ProcessUse{MemoryBytes: new(gib)})
	d := &guarded{node: n}
	d.guard = agent.NewMemoryGuard(n.name, n.client(), n.controller.Usage, n.clock)
	return d
}

func guardOf(mode v1alpha1.MemoryGuardMode) *v1alpha1.TimeSlicedMemory {
	return &v1alpha1.TimeSlicedMemory{Guard: v1alpha1.MemoryGuard{Mode: mode, FreeBelowPercent: 5, GracePeriodSeconds: 30}}
}

// sample lets the guard take a sample, and the time pass until the next one.
func (n *guarded) sample() time.Duration {
	n.Helper()
	result, err := n.guard.Reconcile(n.Context(), n.get())
	n.Expect(err).NotTo(gomega.HaveOccurred())
	<-n.clock.After(result.RequeueAfter)
	return result.RequeueAfter
}

// settleFor takes samples for so long.
func (n *guarded) settleFor(d time.Duration) {
	n.Helper()
	for end := n.clock.Now().Add(d); n.clock.Now().Before(end); {
		n.sample()
	}
}

func (n *guarded) pressure() []v1alpha1.MemoryPressure { return n.get().Status.MemoryPressure }

func reportsOnce(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardReport))
	n.Expect(n.sample()).To(gomega.Equal(5*time.Second), "the free memory is low")
	n.settleFor(25 * time.Second)
	n.Expect(n.pressure()).To(gomega.BeEmpty(), "the grace period is not over")
	writes := n.writes
	n.settleFor(10 * time.Minute)
	n.Expect(n.writes).To(gomega.Equal(writes+1), "written once, though figures are measured again and again")
	p := n.pressure()
	n.Expect(p).To(gomega.HaveLen(1))
	n.Expect(p[0].DeviceUUID).To(gomega.Equal(n.uuid(0)))
	n.Expect(p[0].Container).To(gomega.Equal(v1alpha1.MemoryUser{
		Namespace: "ml", PodName: "greedy", ContainerName: "main", UsedBytes: 38*gib + gib/2, ShareBytes: 10 * gib,
	}))
	n.Expect(p[0].Neighbours).To(gomega.Equal([]string{"ml/modest"}))

	n.reconciled()
	n.Expect(n.pressure()).To(gomega.Equal(p), "a reconcile of the agent leaves it")

	n.hardware.RemoveProcess(100)
	n.Expect(n.sample()).To(gomega.Equal(15 * time.Second))
	n.Expect(n.pressure()).To(gomega.BeEmpty())
	writes = n.writes
	n.settleFor(10 * time.Minute)
	n.Expect(n.writes).To(gomega.Equal(writes), "no write at rest")
}

func renews(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardEvict))
	n.settleFor(35 * time.Second)
	first := n.pressure()[0]
	writes := n.writes
	n.settleFor(5 * time.Minute)
	n.Expect(n.writes).To(gomega.Equal(writes+5), "once a minute")
	last := n.pressure()[0]
	n.Expect(last.SinceTime).To(gomega.Equal(first.SinceTime))
	n.Expect(last.ObservedTime.Sub(first.ObservedTime.Time)).To(gomega.BeNumerically(">=", 4*time.Minute))
}

func reportsASecond(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardEvict))
	n.Expect(n.hardware.SetUse(n.uuid(0), gpu.ProcessUse{PID: 100, Instance: gpu.WholeGPU, MemoryBytes: new(16 * gib)})).To(gomega.Succeed())
	n.busy(300, "ending", gpu.ProcessUse{MemoryBytes: new(22 * gib)})
	n.settleFor(time.Minute)
	p := n.pressure()
	n.Expect(p).To(gomega.HaveLen(2))
	n.Expect(p[0].Container.PodName).To(gomega.Equal("ending"))
	n.Expect(p[1].Container.PodName).To(gomega.Equal("greedy"))
}

func measuresNothingWithoutAGuard(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardReport))
	n.settleFor(35 * time.Second)
	n.Expect(n.pressure()).To(gomega.HaveLen(1))
	n.setSpec(v1alpha1.GPUNodeSpec{PolicyName: "research"})
	closed := n.between.closed
	result, err := n.guard.Reconcile(n.Context(), n.get())
	n.Expect(err).NotTo(gomega.HaveOccurred())
	n.Expect(result.RequeueAfter).To(gomega.BeZero())
	n.Expect(n.between.closed).To(gomega.Equal(closed), "the driver was not opened")
	n.Expect(n.pressure()).To(gomega.BeEmpty(), "what was reported goes with the guard")
}

func reportsNothingUnknown(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardReport))
	n.Expect(n.hardware.SetUse(n.uuid(0), gpu.ProcessUse{PID: 200, Instance: gpu.WholeGPU})).To(gomega.Succeed())
	n.settleFor(2 * time.Minute)
	n.Expect(n.pressure()).To(gomega.BeEmpty(), "the driver does not give the memory of one process")

	n.Expect(n.hardware.SetUse(n.uuid(0), gpu.ProcessUse{PID: 200, Instance: gpu.WholeGPU, MemoryBytes: new(gib)})).To(gomega.Succeed())
	n.settleFor(35 * time.Second)
	n.Expect(n.pressure()).To(gomega.HaveLen(1))
	n.hardware.Fail = func(sim.Op, string) error { return errors.New("GPU is lost") }
	n.sample()
	n.Expect(n.pressure()).To(gomega.BeEmpty(), "nothing is known any more")
	n.hardware.Fail = nil
	n.settleFor(25 * time.Second)
	n.Expect(n.pressure()).To(gomega.BeEmpty(), "the grace period has begun anew")
}

func takesTheShareFromThePolicy(s scenario) {
	guard := guardOf(v1alpha1.MemoryGuardReport)
	guard.PerReplica = new(resource.MustParse("512Mi"))
	n := s.guarded(guard)
	n.settleFor(35 * time.Second)
	n.Expect(n.pressure()[0].Container.ShareBytes).To(gomega.Equal(gib / 2))
	report, err := n.controller.Usage(n.Context())
	n.Expect(err).NotTo(gomega.HaveOccurred())
	for _, c := range report.Units[0].Containers {
		n.Expect(*c.ShareBytes).To(gomega.Equal(gib/2), "metrics and top show the same share")
	}
}

func leavesTheDriverToMIGManager(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardReport))
	n.settleFor(35 * time.Second)
	n.Expect(n.pressure()).To(gomega.HaveLen(1))
	n.setSpec(v1alpha1.GPUNodeSpec{Memory: guardOf(v1alpha1.MemoryGuardReport), MIGActuator: v1alpha1.MIGActuatorMIGManager, MIGConfigName: "all-balanced"})
	n.between.Hardware = opened{Hardware: n.between.Hardware, fail: n.Fatalf}
	n.settleFor(time.Minute)
	n.Expect(n.pressure()).To(gomega.BeEmpty())
}

// opened is hardware that must not be looked at.
type opened struct {
	gpu.Hardware

	fail func(string, ...any)
}

func (o opened) Sample(context.Context) (gpu.Sample, error) {
	o.fail("the driver was opened")
	return gpu.Sample{}, nil
}

func saysThatItMeasures(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardReport))
	says := func() bool {
		now := n.get()
		return condition.IsTrueAt(now.Status.Conditions, v1alpha1.ConditionMemoryGuarded, now.Generation)
	}
	n.Expect(says()).To(gomega.BeTrue())
	n.setSpec(v1alpha1.GPUNodeSpec{PolicyName: "research", Memory: guardOf(v1alpha1.MemoryGuardEvict)})
	n.Expect(says()).To(gomega.BeFalse(), "not yet of the new one")
	n.settle()
	n.Expect(says()).To(gomega.BeTrue())
	n.setSpec(v1alpha1.GPUNodeSpec{PolicyName: "research"})
	n.settle()
	_, found := condition.Find(n.get().Status.Conditions, v1alpha1.ConditionMemoryGuarded)
	n.Expect(found).To(gomega.BeFalse())
}

func measuresNoUnknownMemory(s scenario) {
	n := s.node("", sim.T4, sim.GB10)
	n.setSpec(v1alpha1.GPUNodeSpec{PolicyName: "research", Memory: guardOf(v1alpha1.MemoryGuardReport)})
	n.settle()
	_, found := condition.Find(n.get().Status.Conditions, v1alpha1.ConditionMemoryGuarded)
	n.Expect(found).To(gomega.BeFalse())
}

// hides lets the greedy container call its process like NVIDIA's MPS server, whose memory counts for nobody.
func (n *guarded) hides() {
	n.processes.Set(100, host.Process{Name: gpu.MPSServer, PodUID: "uid-greedy", ContainerID: strings.Repeat("0", 60) + "gree"})
}

func seesWhateverItsName(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardEvict))
	n.hides()
	n.settleFor(time.Minute)
	n.Expect(n.pressure()).To(gomega.ConsistOf(gomega.HaveField("Container.PodName", "greedy")))
}

func blamesNoNeighbour(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardEvict))
	n.Expect(n.hardware.SetUse(n.uuid(0), gpu.ProcessUse{PID: 100, Instance: gpu.WholeGPU, MemoryBytes: new(28 * gib)})).To(gomega.Succeed())
	n.Expect(n.hardware.SetUse(n.uuid(0), gpu.ProcessUse{PID: 200, Instance: gpu.WholeGPU, MemoryBytes: new(10*gib + gib/2)})).To(gomega.Succeed())
	n.hides()
	n.settleFor(time.Minute)
	n.Expect(n.pressure()[0].Container.PodName).To(gomega.Equal("greedy"))
}

func seesALongName(s scenario) {
	n := s.guarded(guardOf(v1alpha1.MemoryGuardEvict))
	delete(n.containers, strings.Repeat("0", 60)+"gree")
	n.containers["uid-greedy"] = host.ContainerName{Namespace: "ml", Pod: "greedy"} // where the link of its log leads
	n.settleFor(time.Minute)
	n.Expect(n.pressure()).To(gomega.ConsistOf(gomega.HaveField("Container", v1alpha1.MemoryUser{
		Namespace: "ml", PodName: "greedy", ContainerName: "main", UsedBytes: 38*gib + gib/2, ShareBytes: 10 * gib,
	})))
}
