// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/memoryguard"
)

// decide decides on a report by which a pod is evicted.
func decide(change func(*memoryguard.Case)) memoryguard.Decision {
	c := caseOf("greedy")
	change(&c)
	return memoryguard.Decide(c)
}

func caseOf(pod string) memoryguard.Case {
	return memoryguard.Case{
		Memory: spec(v1alpha1.MemoryGuardEvict), Node: "n1", Now: start.Add(70 * time.Second),
		Pod: memoryguard.Pod{Found: true, Node: "n1", Created: start.Add(-time.Hour), RequestsGPU: true},
		Pressure: v1alpha1.MemoryPressure{
			DeviceUUID: "GPU-1", SinceTime: metav1.NewTime(start), ObservedTime: metav1.NewTime(start.Add(time.Minute)),
			TotalBytes: 40 * gib, FreeBytes: gib, Neighbours: []string{"ml/modest"},
			Container: v1alpha1.MemoryUser{Namespace: "ml", PodName: pod, ContainerName: "main", UsedBytes: 30 * gib, ShareBytes: 10 * gib},
		},
	}
}

func evicted(gpu, pod string, ago time.Duration) v1alpha1.MemoryEviction {
	return v1alpha1.MemoryEviction{Time: metav1.NewTime(start.Add(70*time.Second - ago)), DeviceUUID: gpu, Namespace: "ml", PodName: pod}
}

func TestThePodIsEvicted(t *testing.T) {
	for name, change := range map[string]func(*memoryguard.Case){
		"of a report that the policy asks for":  func(*memoryguard.Case) {},
		"a minute after another one of the GPU": func(c *memoryguard.Case) { c.Evicted = append(c.Evicted, evicted("GPU-1", "other", time.Minute)) },
		"beside one of another GPU":             func(c *memoryguard.Case) { c.Evicted = append(c.Evicted, evicted("GPU-2", "other", time.Second)) },
		"ten minutes after it was evicted":      func(c *memoryguard.Case) { c.Evicted = append(c.Evicted, evicted("GPU-1", "greedy", 10*time.Minute)) },
		"though a controller with a wrong clock recorded the like": func(c *memoryguard.Case) {
			c.Evicted, c.Elsewhere = append(c.Evicted, evicted("GPU-1", "other", -time.Hour)), append(c.Elsewhere, evicted("GPU-2", "greedy", -time.Hour))
		},
		"from a node whose clock is 20 s ahead":  func(c *memoryguard.Case) { c.Now = start.Add(40 * time.Second) },
		"whose share is what the policy says it": func(c *memoryguard.Case) { c.Memory.PerReplica = new(resource.MustParse("10Gi")) },
	} {
		t.Run(name, func(t *testing.T) { NewWithT(t).Expect(decide(change)).To(Equal(memoryguard.Decision{Evict: true})) })
	}
}

func TestThePodIsNotEvicted(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*memoryguard.Case)
		why    string
		after  time.Duration
	}{
		"by a policy that only reports": {func(c *memoryguard.Case) { c.Memory.Guard.Mode = v1alpha1.MemoryGuardReport }, "", 0},
		"within its share":              {func(c *memoryguard.Case) { c.Pressure.Container.UsedBytes = 10 * gib }, "does not match the policy", 0},
		"within the share that the policy says now": {func(c *memoryguard.Case) {
			c.Memory.PerReplica = new(resource.MustParse("20Gi"))
		}, "does not match the policy", 0},
		"within the memory divided by the replicas that the policy says now": {func(c *memoryguard.Case) {
			c.Replicas, c.Pressure.Container.UsedBytes, c.Pressure.Container.ShareBytes = 4, 9*gib, 8*gib
		}, "does not match the policy", 0},
		"with enough free memory for the policy": {func(c *memoryguard.Case) { c.Memory.Guard.FreeBelowPercent = 2 }, "does not match the policy", 0},
		"before the grace period of the policy":  {func(c *memoryguard.Case) { c.Memory.Guard.GracePeriodSeconds = 61 }, "does not match the policy", 0},
		"for a report that is old":               {func(c *memoryguard.Case) { c.Now = start.Add(3*time.Minute + time.Second) }, "not of the last 2m", 0},
		"for a report of the future":             {func(c *memoryguard.Case) { c.Now = start }, "not of the last 2m", 0},
		"if it is gone":                          {func(c *memoryguard.Case) { c.Pod = memoryguard.Pod{} }, "gone", 0},
		"if it took the place of the one that was meant": {func(c *memoryguard.Case) {
			c.Pod.Created = start.Add(65 * time.Second)
		}, "gone", 0},
		"if it took the place of the one that was meant, as a clock that is ahead has it": {func(c *memoryguard.Case) {
			c.Pod.Created = start.Add(35 * time.Second)
		}, "gone", 0},
		"on another node":       {func(c *memoryguard.Case) { c.Pod.Node = "n2" }, "not on this node", 0},
		"if it ends":            {func(c *memoryguard.Case) { c.Pod.Ends = true }, "ending", 0},
		"if it requests no GPU": {func(c *memoryguard.Case) { c.Pod.RequestsGPU = false }, "requests no GPU", 0},
		"of a DaemonSet":        {func(c *memoryguard.Case) { c.Pod.Protected = "belongs to DaemonSet x" }, "the pod belongs to DaemonSet x", 0},
		"twice in ten minutes":  {func(c *memoryguard.Case) { c.Evicted = append(c.Evicted, evicted("GPU-2", "greedy", 9*time.Minute)) }, "ten minutes ago", time.Minute},
		"a second for the GPU in a minute": {func(c *memoryguard.Case) {
			c.Evicted = append(c.Evicted, evicted("GPU-1", "other", 40*time.Second))
		}, "less than a minute ago", 20 * time.Second},
		"by a report from before another one of the GPU was evicted": {func(c *memoryguard.Case) {
			c.Now = start.Add(2 * time.Minute)
			c.Evicted = append(c.Evicted, evicted("GPU-1", "other", 10*time.Second))
		}, "after the agent's report", 0},
		"before it is time to ask again": {func(c *memoryguard.Case) {
			c.Refused = memoryguard.Refusal{Message: "a budget", Until: c.Now.Add(time.Second)}
		}, "a budget", time.Second},
		"after 64 others of the node": {func(c *memoryguard.Case) {
			for range 64 {
				c.Evicted = append(c.Evicted, evicted("GPU-2", "other", 5*time.Minute))
			}
		}, "64 pods of this node", time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			d := decide(tc.change)
			g.Expect(d.Evict).To(BeFalse())
			g.Expect(d.Why).To(ContainSubstring(tc.why))
			g.Expect(d.After).To(Equal(tc.after))
		})
	}
}

// ending is a first pod that ends at the latest so long after the decision, which is ten seconds after the report.
func ending(in time.Duration) func(*memoryguard.Case) {
	return func(c *memoryguard.Case) { c.Pod.Ends, c.Pod.EndsBy = true, c.Now.Add(in) }
}

// TestAPodThatIsNotEvictedShieldsNoOther of its GPU, so that no tenant keeps pods from being evicted by another one.
func TestAPodThatIsNotEvictedShieldsNoOther(t *testing.T) {
	for name, first := range map[string]func(*memoryguard.Case){
		"as it takes a day to end":      ending(24 * time.Hour),
		"as it takes minutes to end":    ending(2*time.Minute + time.Second),
		"as it should have ended":       ending(-21 * time.Second),
		"as a budget does not allow":    func(c *memoryguard.Case) { c.Refused = memoryguard.Refusal{Message: "a budget", Until: c.Now.Add(1)} },
		"as it is of a DaemonSet":       func(c *memoryguard.Case) { c.Pod.Protected = "belongs to DaemonSet x" },
		"as it requests no GPU":         func(c *memoryguard.Case) { c.Pod.RequestsGPU = false },
		"as it was evicted before":      func(c *memoryguard.Case) { c.Elsewhere = append(c.Elsewhere, evicted("GPU-2", "first", 9*time.Minute)) },
		"as it is gone for long":        func(c *memoryguard.Case) { c.Pod, c.Left = memoryguard.Pod{}, c.Now.Add(-21*time.Second) },
		"as it runs no more for long":   func(c *memoryguard.Case) { c.Pod.Ends, c.Left = true, c.Now.Add(-21*time.Second) },
		"as it is elsewhere for long":   func(c *memoryguard.Case) { c.Pod.Node, c.Left = "n2", c.Now.Add(-21*time.Second) },
		"as its report is a former one": func(c *memoryguard.Case) { c.Pressure.Container.UsedBytes = gib },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cases := []memoryguard.Case{caseOf("first"), caseOf("second"), caseOf("third")}
			first(&cases[0])
			d := memoryguard.DecideAll(cases)
			g.Expect(d[0].Evict).To(BeFalse())
			g.Expect(d[0].Why).NotTo(BeEmpty())
			g.Expect(d[1:]).To(Equal([]memoryguard.Decision{{Evict: true}, {Why: "another pod of this GPU is evicted first"}}))
		})
	}
}

// TestNoMoreIsEvictedThanFreesTheMemory: what ends by itself within a usual time is waited for, until a later report.
func TestNoMoreIsEvictedThanFreesTheMemory(t *testing.T) {
	for name, first := range map[string]func(*memoryguard.Case){
		"beside one that is evicted":           func(*memoryguard.Case) {},
		"while one ends":                       ending(30 * time.Second),
		"while one has just ended":             ending(-20 * time.Second),
		"while one ends in two minutes":        ending(2 * time.Minute),
		"while one is just gone":               func(c *memoryguard.Case) { c.Pod, c.Left = memoryguard.Pod{}, c.Now },
		"while one was just replaced":          func(c *memoryguard.Case) { c.Pod.Created, c.Left = c.Now, c.Now },
		"before a report after one was gone":   func(c *memoryguard.Case) { c.Pod, c.Left = memoryguard.Pod{}, c.Now.Add(-20*time.Second) },
		"while one has just run to its end":    func(c *memoryguard.Case) { c.Pod.Ends, c.Left = true, c.Now },
		"while one has just started elsewhere": func(c *memoryguard.Case) { c.Pod.Node, c.Left = "n2", c.Now },
	} {
		t.Run(name, func(t *testing.T) {
			cases := []memoryguard.Case{caseOf("first"), caseOf("second"), caseOf("third")}
			first(&cases[0])
			for _, d := range memoryguard.DecideAll(cases)[1:] {
				NewWithT(t).Expect(d).To(HaveField("Evict", false))
				NewWithT(t).Expect(d.Why).To(HavePrefix("another pod of this GPU is "))
			}
		})
	}
}

// TestAPodThatEndsShieldsNoneThatExceedsItsShareMore.
func TestAPodThatEndsShieldsNoneThatExceedsItsShareMore(t *testing.T) {
	cases := []memoryguard.Case{caseOf("first"), caseOf("second")}
	ending(30 * time.Second)(&cases[1])
	NewWithT(t).Expect(memoryguard.DecideAll(cases)[0].Evict).To(BeTrue())
}

func TestRecordsGoWhenTheyCountNoMore(t *testing.T) {
	g := NewWithT(t)
	p := v1alpha1.MemoryPressure{DeviceUUID: "GPU-1", Container: v1alpha1.MemoryUser{Namespace: "ml", PodName: "greedy"}}
	now := start.Add(70*time.Second + time.Millisecond)
	all := memoryguard.Recorded([]v1alpha1.MemoryEviction{evicted("GPU-1", "old", 10*time.Minute), evicted("GPU-1", "other", time.Minute)}, p, now)
	g.Expect(all).To(HaveLen(2))
	g.Expect(all[0].PodName).To(Equal("other"))
	g.Expect(all[1].PodName).To(Equal("greedy"))
	g.Expect(all[1].Time.Time).To(BeTemporally("==", start.Add(71*time.Second)), "never earlier than it was")
}

func TestTheReasonNamesUseShareFreeMemoryAndNeighbours(t *testing.T) {
	p := v1alpha1.MemoryPressure{
		DeviceUUID: "GPU-1", TotalBytes: 40 * gib, FreeBytes: gib, Neighbours: []string{"ml/modest", "ml/idle"},
		Container: v1alpha1.MemoryUser{Namespace: "ml", PodName: "greedy", ContainerName: "main", UsedBytes: 30 * gib, ShareBytes: 10 * gib},
	}
	NewWithT(t).Expect(memoryguard.Describe("n1", p)).To(Equal("Container main of pod ml/greedy uses 30.0 GiB of GPU GPU-1 on node n1, " +
		"its share is 10.0 GiB; 1.0 GiB of 40.0 GiB are free; neighbours: ml/modest, ml/idle"))
}
