// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestMemoryLimits(t *testing.T) {
	cluster := env.Start(t)
	for name, test := range map[string]func(s scenario){
		"reports, limits and undoes, and writes nothing that is no news": limitsReports,
		"says what a node lacks":                        limitsLacks,
		"asks the driver about no pod again":            limitsRests,
		"says that it could not look":                   limitsCannotLook,
		"goes on where the memory guard watches beside": limitsBesideTheGuard,
		"limits both of two pods of one name":           limitsOfOneName,
		"keeps the limit of a pod that runs on unseen":  limitsOutliveTheirPod,
		"holds against a soft limit of a container":     limitsBesideSoftOnes,
	} {
		t.Run(name, func(t *testing.T) { test(scenario{T: t, cluster: cluster, name: nodeName(name)}) })
	}
}

// limited is a node whose driver limits, with one pod that has a share of its GPU.
type limited struct {
	*node

	tree     *cgroupTree
	hardware *limitHardware
	limiter  *agent.MemoryLimiter
	pod      string // cgroup
	logs     string // folder of pods' logs
}

func (s scenario) limited(gate bool) *limited {
	n := s.node("", sim.A100)
	tree, err := newCgroupTree(s.TempDir(), true, "dmem")
	n.Expect(err).NotTo(gomega.HaveOccurred())
	n.hardware.Update(func(h *sim.Node) {
		h.DriverVersion, h.GPUs[0].Persistence = "615.71.09", true
		h.Cgroups = sim.Cgroups{Backend: sim.Dmem, Root: tree.root}
	})
	n.settle()
	hostRoot, uid := s.TempDir(), "00000001-0000-4000-8000-000000000001"
	l := &limited{node: n, tree: tree, hardware: &limitHardware{Hardware: n.hardware, crashBefore: -1, crashAfter: -1}, pod: tree.pod("burstable", uid)}
	n.Expect(tree.make(l.pod, true)).To(gomega.Succeed())
	l.logs = filepath.Join(hostRoot, "var/log/pods")
	n.Expect(os.MkdirAll(filepath.Join(l.logs, "ml_train_"+uid), 0o755)).To(gomega.Succeed())
	root, err := os.OpenRoot(hostRoot)
	n.Expect(err).NotTo(gomega.HaveOccurred())
	s.Cleanup(func() { _ = root.Close() })
	n.allocations.hold("train", n.uuid(0)+"::0")
	for _, id := range []string{"::0", "::1", "::2", "::3"} {
		n.allocations.advertised = append(n.allocations.advertised, n.uuid(0)+id)
	}
	c := agent.New(agent.Config{Node: n.name, BootID: "boot-1", Client: n.client(), Hardware: l.hardware, Allocations: n.allocations, Clock: n.clock})
	l.limiter = agent.NewMemoryLimiter(c, agent.LimitSources{
		Gate: gate, Cgroups: host.Cgroups{Folder: tree.root, Unified: func(string) bool { return tree.unified }},
		PodNames: host.NewContainerLogs(root).Pods, Devices: host.Kubelet{Host: hostRoot, Folder: "/var/lib/kubelet"}.Devices, MemacctMode: func() string { return "" },
		Record: host.RecordFile{Path: filepath.Join(hostRoot, "mps/.memory-limits/record.json")},
	})
	return l
}

// ask lets the policy ask for a mode, and the limiter and the agent look.
func (l *limited) ask(memory *v1alpha1.TimeSlicedMemory) time.Duration {
	l.Helper()
	l.setSpec(v1alpha1.GPUNodeSpec{PolicyName: "research", Strategy: v1alpha1.StrategyTimeSlicing, Memory: memory})
	l.reconciled()
	after := l.look()
	l.reconciled()
	return after
}

func (l *limited) look() time.Duration {
	l.Helper()
	result, err := l.limiter.Reconcile(l.Context(), l.get())
	l.Expect(err).NotTo(gomega.HaveOccurred())
	env.ExpectStatusSane(l.T, l.get())
	return result.RequeueAfter
}

func (l *limited) limit() uint64 { return l.limitOn(l.pod) }

func (l *limited) reason() string {
	is, _ := condition.Find(l.get().Status.Conditions, v1alpha1.ConditionMemoryLimited)
	return string(is.Status) + " " + is.Reason
}

func memoryLimit(mode v1alpha1.MemoryLimitMode) *v1alpha1.TimeSlicedMemory {
	return &v1alpha1.TimeSlicedMemory{Limit: mode, PerReplica: new(resource.MustParse("4Gi"))}
}

func limitsReports(s scenario) {
	l := s.limited(true)
	l.ask(memoryLimit(v1alpha1.MemoryLimitReport))
	l.Expect(l.reason()).To(gomega.Equal("Unknown NotVerified"))
	l.Expect(l.limit()).To(gomega.Equal(sim.NoLimit))
	l.Expect(l.get().Status.MemoryLimits).To(gomega.Equal(v1alpha1.MemoryLimitsStatus{
		Backend: v1alpha1.MemoryBackendDmem, Limited: 1,
		Pods: []v1alpha1.PodMemoryLimit{{Namespace: "ml", PodName: "train", DeviceUUID: l.uuid(0), LimitBytes: 4 << 30}},
	}))
	l.Expect(l.hardware.sets).To(gomega.BeEmpty())

	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce))
	l.Expect(l.reason()).To(gomega.Equal("True Enforced"))
	l.Expect(l.limit()).To(gomega.BeEquivalentTo(4 << 30))
	l.expectIdle() // the agent's own report leaves that of the limits alone
	version := l.get().ResourceVersion
	l.look()
	l.Expect(l.get().ResourceVersion).To(gomega.Equal(version))

	l.ask(nil)
	l.Expect(l.limit()).To(gomega.Equal(sim.NoLimit))
	l.Expect(l.get().Status.MemoryLimits).To(gomega.BeZero())
	l.Expect(l.reason()).To(gomega.Equal(" "))
	l.expectIdle()
}

func limitsLacks(s scenario) {
	l := s.limited(false)
	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce))
	l.Expect(l.reason()).To(gomega.Equal("False LimitGateOff"))
	l.Expect(l.hardware.calls).To(gomega.BeZero())
	l.Expect(l.get().Status.MemoryLimits.Uncovered).To(gomega.Equal([]v1alpha1.UncoveredPods{{Reason: v1alpha1.ReasonLimitGateOff, Count: 1}}))
}

func limitsRests(s scenario) {
	l := s.limited(true)
	for i := range 3 {
		name, uid := fmt.Sprintf("more-%d", i), fmt.Sprintf("0000001%d-0000-4000-8000-000000000001", i)
		l.allocations.hold(name, fmt.Sprintf("%s::%d", l.uuid(0), i+1))
		l.anotherOf(name, uid)
	}
	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce))
	l.look()
	l.Expect(l.get().Status.MemoryLimits.Limited).To(gomega.BeEquivalentTo(4))
	calls := l.hardware.calls
	for range 3 {
		<-l.clock.After(time.Minute)
		l.look()
	}
	l.Expect(l.hardware.calls-calls).To(gomega.Equal(3), "one question for a GPU, not for each of its pods: whether the driver has lost its limits")
	l.node.hardware.Update(func(n *sim.Node) { n.GPUs[0].Limits = nil })
	l.look()
	l.Expect(l.limit()).To(gomega.BeEquivalentTo(4<<30), "set again")
}

func limitsBesideTheGuard(s scenario) {
	l := s.limited(true)
	both := guardOf(v1alpha1.MemoryGuardReport)
	both.Limit = v1alpha1.MemoryLimitEnforce
	l.ask(both)
	l.Expect(l.reason()).To(gomega.Equal("True Enforced"))
	l.Expect(condition.IsTrue(l.get().Status.Conditions, v1alpha1.ConditionMemoryGuarded)).To(gomega.BeTrue())
	l.Expect(l.limit()).To(gomega.BeEquivalentTo((40960 << 20) / 100 * 96 / 4 >> 20 << 20))
	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce))
	l.Expect(condition.IsTrue(l.get().Status.Conditions, v1alpha1.ConditionMemoryGuarded)).To(gomega.BeFalse(), "nothing watches")
}

func limitsCannotLook(s scenario) {
	l := s.limited(true)
	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce))
	l.allocations.err = errLimits
	_, err := l.limiter.Reconcile(l.Context(), l.get())
	l.Expect(err).To(gomega.MatchError(errLimits))
	l.Expect(l.reason()).To(gomega.Equal("False LimitFailed"), "nobody knows whether what was reported still holds")
	l.Expect(l.get().Status.MemoryLimits.Pods).To(gomega.HaveLen(1))
	l.allocations.err = nil
	l.look()
	l.Expect(l.reason()).To(gomega.Equal("True Enforced"))
}

// A user deletes a pod by force (--grace-period=0) that takes a day to end, and starts another one of its name: both run, and the kubelet
// lists the second alone.

func limitsOfOneName(s scenario) {
	l := s.limited(true)
	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce))
	second := l.another("00000002-0000-4000-8000-000000000002")
	<-l.clock.After(time.Second)
	l.look()
	l.Expect(l.limitOn(second)).To(gomega.BeEquivalentTo(4 << 30))
	l.Expect(l.limit()).To(gomega.BeEquivalentTo(4 << 30))
	l.Expect(l.reason()).To(gomega.Equal("True Enforced"))
	l.ask(nil)
	l.Expect(l.limitOn(second)).To(gomega.Equal(sim.NoLimit))
	l.Expect(l.limit()).To(gomega.Equal(sim.NoLimit))
}

func limitsOutliveTheirPod(s scenario) {
	l := s.limited(true)
	container := l.tree.container(l.pod, 1)
	l.Expect(l.tree.make(container, true)).To(gomega.Succeed())
	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce))
	l.allocations.free()
	for range 4 {
		<-l.clock.After(time.Minute)
		l.look()
	}
	l.Expect(l.limit()).To(gomega.BeEquivalentTo(4<<30), "its container runs")
	l.Expect(l.tree.remove(container)).To(gomega.Succeed())
	<-l.clock.After(time.Minute)
	l.look()
	l.Expect(l.limit()).To(gomega.Equal(sim.NoLimit))
}

// limitsBesideSoftOnes: by a variable of the pod NVIDIA's container toolkit sets both limits of the container, and on dmem a soft one raises
// those above it.
func limitsBesideSoftOnes(s scenario) {
	l := s.limited(true)
	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce))
	container := l.tree.container(l.pod, 1)
	l.Expect(l.tree.make(container, true)).To(gomega.Succeed())
	uuid, err := l.uuid(0), error(nil)
	l.node.hardware.Update(func(n *sim.Node) { err = n.SetMemoryLimit(uuid, container, 30<<30, 30<<30, true) })
	l.Expect(err).NotTo(gomega.HaveOccurred())
	<-l.clock.After(6 * time.Minute)
	l.look()
	l.Expect(l.reason()).To(gomega.Equal("True Enforced"), "a limit that holds")
	l.ask(nil)
	l.Expect(l.limit()).To(gomega.Equal(sim.NoLimit))
	l.ask(memoryLimit(v1alpha1.MemoryLimitEnforce)) // which meets one that is there before
	l.Expect(l.limit()).To(gomega.BeEquivalentTo(4 << 30))
	is, err := l.node.hardware.MemoryLimit(l.Context(), uuid, l.pod)
	l.Expect(err).NotTo(gomega.HaveOccurred())
	l.Expect(is.Soft).To(gomega.BeEquivalentTo(4<<30), "the driver refuses a soft limit above the hard one; else it is not ours to change")
}

// another makes the cgroup and the log folder of a further pod with the name of the first.
func (l *limited) another(uid string) (cgroup string) { return l.anotherOf("train", uid) }

func (l *limited) anotherOf(name, uid string) (cgroup string) {
	l.Helper()
	cgroup = l.tree.pod("burstable", uid)
	l.Expect(l.tree.make(cgroup, true)).To(gomega.Succeed())
	l.Expect(os.Mkdir(filepath.Join(l.logs, "ml_"+name+"_"+uid), 0o755)).To(gomega.Succeed())
	return cgroup
}

func (l *limited) limitOn(cgroup string) uint64 {
	l.Helper()
	found, err := l.node.hardware.MemoryLimit(l.Context(), l.uuid(0), cgroup)
	l.Expect(err).NotTo(gomega.HaveOccurred())
	return found.Hard
}
