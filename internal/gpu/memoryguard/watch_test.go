// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/memoryguard"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

const gib = int64(1 << 30)

var start = time.Unix(1_800_000_000, 0)

func spec(mode v1alpha1.MemoryGuardMode) v1alpha1.TimeSlicedMemory {
	return v1alpha1.TimeSlicedMemory{Guard: v1alpha1.MemoryGuard{Mode: mode, FreeBelowPercent: 5, GracePeriodSeconds: 60}}
}

func container(pod string, used, share *int64) usage.Container {
	return usage.Container{Name: usage.Name{Namespace: "ml", Pod: pod, Container: "main"}, MemoryBytes: used, ShareBytes: share}
}

// full is a time-sliced GPU of 40 GiB with 1 GiB free, of which one container uses three times its share.
func full() usage.Unit {
	return usage.Unit{
		GPU: "GPU-1", Strategy: v1alpha1.StrategyTimeSlicing, Replicas: 4,
		Memory: &gpu.Memory{Total: 40 * gib, Used: 39 * gib, Free: gib},
		Containers: []usage.Container{
			container("greedy", new(30*gib), new(10*gib)), container("modest", new(9*gib), new(10*gib)), container("idle", new(int64(0)), new(10*gib)),
		},
	}
}

// sampled is what a guard finds in samples of one GPU, one every five seconds.
func sampled(s v1alpha1.TimeSlicedMemory, units ...usage.Unit) (found []v1alpha1.MemoryPressure) {
	w, now := memoryguard.Watch{}, start
	for _, u := range units {
		w, found = w.Next(s, []usage.Unit{u}, now)
		now = now.Add(5 * time.Second)
	}
	return found
}

// lasting is the same sample for so long.
func lasting(u usage.Unit, d time.Duration) []usage.Unit {
	var all []usage.Unit
	for at := time.Duration(0); at <= d; at += 5 * time.Second {
		all = append(all, u)
	}
	return all
}

func TestTheContainerThatExceedsItsShareTheMostIsReported(t *testing.T) {
	g := NewWithT(t)
	u := full()
	u.Containers = append(u.Containers, container("second", new(11*gib), new(10*gib)))
	found := sampled(spec(v1alpha1.MemoryGuardReport), lasting(u, time.Minute)...)
	g.Expect(found).To(HaveLen(1))
	g.Expect(found[0].DeviceUUID).To(Equal("GPU-1"))
	g.Expect(found[0].Container).To(Equal(v1alpha1.MemoryUser{
		Namespace: "ml", PodName: "greedy", ContainerName: "main", UsedBytes: 30 * gib, ShareBytes: 10 * gib,
	}))
	g.Expect(found[0].FreeBytes).To(Equal(gib))
	g.Expect(found[0].TotalBytes).To(Equal(40 * gib))
	g.Expect(found[0].Neighbours).To(Equal([]string{"ml/modest", "ml/idle", "ml/second"}))
	g.Expect(found[0].SinceTime.Time).To(BeTemporally("==", start))
	g.Expect(found[0].ObservedTime.Time).To(BeTemporally("==", start.Add(time.Minute)))
}

// crowded is full with five pods over their shares, of which one has two containers that are.
func crowded() usage.Unit {
	u := full()
	u.Containers = append(u.Containers, container("a", new(12*gib), new(10*gib)), container("b", new(16*gib), new(10*gib)),
		container("greedy", new(20*gib), new(10*gib)), container("c", new(11*gib), new(10*gib)), container("d", new(16*gib), new(10*gib)))
	u.Containers[5].Container = "sidecar"
	return u
}

func names(reports []v1alpha1.MemoryPressure) (all []string) {
	for _, p := range reports {
		all = append(all, p.DeviceUUID+"/"+p.Container.PodName+"/"+p.Container.ContainerName)
	}
	return all
}

// TestSeveralOfAGPUAreReportedWherePodsAreEvicted, the worst first: one that is not evicted shields no other.
func TestSeveralOfAGPUAreReportedWherePodsAreEvicted(t *testing.T) {
	g := NewWithT(t)
	found := sampled(spec(v1alpha1.MemoryGuardEvict), lasting(crowded(), time.Minute)...)
	g.Expect(names(found)).To(Equal([]string{"GPU-1/greedy/main", "GPU-1/b/main", "GPU-1/d/main", "GPU-1/a/main", "GPU-1/c/main"}))
	g.Expect(found[1].Container.UsedBytes).To(Equal(16 * gib))
	g.Expect(found[1].Neighbours).To(Equal([]string{"ml/greedy", "ml/modest", "ml/idle", "ml/a", "ml/c", "ml/d"}))
	g.Expect(names(sampled(spec(v1alpha1.MemoryGuardReport), lasting(crowded(), time.Minute)...))).To(Equal([]string{"GPU-1/greedy/main"}))
}

// TestReportsFitInTheStatus: half of what the API takes, and the worst of each GPU at least.
func TestReportsFitInTheStatus(t *testing.T) {
	text, err := os.ReadFile("../../../config/crd/gpusharing.io_gpunodes.yaml")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	var crd apiextensionsv1.CustomResourceDefinition
	NewWithT(t).Expect(yaml.Unmarshal(text, &crd)).To(Succeed())
	most := *crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"].Properties["memoryPressure"].MaxItems
	for gpus, each := range map[int]int{1: 8, 8: 8, 9: 7, 16: 4, 33: 1, 64: 1, 70: 1} {
		g := NewWithT(t)
		var units []usage.Unit
		for i := range gpus {
			u := full()
			u.GPU = fmt.Sprint("GPU-", i)
			for j := range 20 {
				u.Containers = append(u.Containers, container(fmt.Sprint("pod-", j), new(11*gib), new(10*gib)))
			}
			units = append(units, u)
		}
		s := spec(v1alpha1.MemoryGuardEvict)
		s.Guard.GracePeriodSeconds = 0
		_, found := memoryguard.Watch{}.Next(s, units, start)
		g.Expect(int64(len(found))).To(BeNumerically("<=", most/2))
		lists := memoryguard.ByGPU(found)
		g.Expect(lists).To(HaveLen(min(gpus, 64)))
		for _, of := range lists {
			g.Expect(of).To(HaveLen(each))
			g.Expect(of[0].Container.PodName).To(Equal("greedy"))
		}
	}
}

// TestReportsOfAGPUAreKeptTogether: the order of those behind the worst is a figure, who they are is not.
func TestReportsOfAGPUAreKeptTogether(t *testing.T) {
	s, now := spec(v1alpha1.MemoryGuardEvict), start.Add(90*time.Second)
	was := sampled(s, lasting(crowded(), time.Minute)...)
	for name, tc := range map[string]struct {
		change func(*usage.Unit)
		kept   bool
	}{
		"figures":        {func(u *usage.Unit) { u.Containers[4].MemoryBytes = new(17 * gib) }, true},
		"another order":  {func(u *usage.Unit) { u.Containers[3].MemoryBytes = new(19 * gib) }, true},
		"another worst":  {func(u *usage.Unit) { u.Containers[3].MemoryBytes = new(35 * gib) }, false},
		"one more":       {func(u *usage.Unit) { u.Containers[2].MemoryBytes = new(13 * gib) }, false},
		"one less":       {func(u *usage.Unit) { u.Containers[6].MemoryBytes = new(gib) }, false},
		"one of another": {func(u *usage.Unit) { u.Containers[6].Pod = "e" }, false},
		"another share":  {func(u *usage.Unit) { u.Containers[6].ShareBytes = new(gib) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			u := crowded()
			tc.change(&u)
			found := sampled(s, lasting(u, 90*time.Second)...)
			want := found
			if tc.kept {
				want = was
			}
			NewWithT(t).Expect(memoryguard.Kept(s, was, found, now)).To(Equal(want))
		})
	}
}

func TestNothingIsReported(t *testing.T) {
	minute := func(change func(*usage.Unit)) []usage.Unit {
		u := full()
		change(&u)
		return lasting(u, time.Minute)
	}
	freeFor := func(u usage.Unit) usage.Unit {
		u.Memory = &gpu.Memory{Total: 40 * gib, Used: 30 * gib, Free: 10 * gib}
		return u
	}
	unknown := func(u usage.Unit) usage.Unit {
		u.Memory = nil
		return u
	}
	for name, units := range map[string][]usage.Unit{
		"before the grace period is over": lasting(full(), 55*time.Second),
		"after a break within it":         append(append(lasting(full(), 30*time.Second), freeFor(full())), lasting(full(), 30*time.Second)...),
		"after a sample without memory":   append(append(lasting(full(), 30*time.Second), unknown(full())), lasting(full(), 30*time.Second)...),
		"with enough free memory":         minute(func(u *usage.Unit) { u.Memory = &gpu.Memory{Total: 40 * gib, Free: 2 * gib} }),
		"of containers within their shares": minute(func(u *usage.Unit) {
			u.Containers = []usage.Container{container("a", new(10*gib), new(10*gib)), container("b", new(9*gib), new(10*gib))}
		}),
		"while the use of a container is not known":   minute(func(u *usage.Unit) { u.Containers[1].MemoryBytes = nil }),
		"while the share of a container is not known": minute(func(u *usage.Unit) { u.Containers[1].ShareBytes = nil }),
		"while the memory is not known":               minute(func(u *usage.Unit) { u.Memory = nil }),
		"of a GPU that MPS shares":                    minute(func(u *usage.Unit) { u.Strategy = v1alpha1.StrategyMPS }),
		"of a MIG instance":                           minute(func(u *usage.Unit) { u.Instance = new(1) }),
		"of a GPU that is not known to be shared":     minute(func(u *usage.Unit) { u.Strategy = "" }),
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(sampled(spec(v1alpha1.MemoryGuardReport), units...)).To(BeEmpty())
		})
	}
}

// A driver that answers nonsense for one GPU keeps none of the others from being reported.
func TestAGPUWhoseMemoryCannotBeIsLeftOut(t *testing.T) {
	g := NewWithT(t)
	bad := full()
	bad.GPU, bad.Memory = "GPU-2", &gpu.Memory{Total: 40 * gib, Used: 40 * gib, Free: -1}
	w, _ := memoryguard.Watch{}.Next(spec(v1alpha1.MemoryGuardReport), []usage.Unit{bad, full()}, start)
	for at := 5 * time.Second; at < time.Minute; at += 5 * time.Second {
		w, _ = w.Next(spec(v1alpha1.MemoryGuardReport), []usage.Unit{bad, full()}, start.Add(at))
	}
	_, found := w.Next(spec(v1alpha1.MemoryGuardReport), []usage.Unit{bad, full()}, start.Add(time.Minute))
	g.Expect(found).To(ConsistOf(HaveField("DeviceUUID", "GPU-1")))
}

func TestSamplesFarApartAreNoStretch(t *testing.T) {
	g := NewWithT(t)
	w, _ := memoryguard.Watch{}.Next(spec(v1alpha1.MemoryGuardReport), []usage.Unit{full()}, start)
	_, found := w.Next(spec(v1alpha1.MemoryGuardReport), []usage.Unit{full()}, start.Add(2*time.Minute))
	g.Expect(found).To(BeEmpty(), "what was between them is not known")
}

func TestSamplesAreCloserWhileMemoryIsLow(t *testing.T) {
	g := NewWithT(t)
	w := memoryguard.Watch{}
	g.Expect(w.Interval()).To(Equal(15 * time.Second))
	w, _ = w.Next(spec(v1alpha1.MemoryGuardReport), []usage.Unit{full()}, start)
	g.Expect(w.Interval()).To(Equal(5 * time.Second))
	w, _ = w.Next(spec(v1alpha1.MemoryGuardReport), nil, start)
	g.Expect(w.Interval()).To(Equal(15 * time.Second))
}

func TestFiguresAloneAreNoNewReport(t *testing.T) {
	g := NewWithT(t)
	was := sampled(spec(v1alpha1.MemoryGuardReport), lasting(full(), time.Minute)...)
	u := full()
	u.Containers[0].MemoryBytes = new(31 * gib)
	later := sampled(spec(v1alpha1.MemoryGuardReport), lasting(u, 2*time.Minute)...)
	now := start.Add(2 * time.Minute)
	g.Expect(memoryguard.Kept(spec(v1alpha1.MemoryGuardReport), was, later, now)).To(Equal(was))
	g.Expect(memoryguard.Kept(spec(v1alpha1.MemoryGuardEvict), was, later, now)).To(Equal(later), "the controller evicts for no report that is old")
	g.Expect(memoryguard.Kept(spec(v1alpha1.MemoryGuardEvict), was, later, now.Add(-time.Second))).To(Equal(was))
	u.Containers[0].Pod = "another"
	another := sampled(spec(v1alpha1.MemoryGuardReport), lasting(u, 2*time.Minute)...)
	g.Expect(memoryguard.Kept(spec(v1alpha1.MemoryGuardReport), was, another, now)).To(Equal(another))
	g.Expect(memoryguard.Kept(spec(v1alpha1.MemoryGuardReport), was, nil, now)).To(BeEmpty())
}

// TestAReportIsMadeAnewIfThePolicyRequiresAnother: otherwise the controller ignores it, for as long as the pressure
// lasts.
func TestAReportIsMadeAnewIfThePolicyRequiresAnother(t *testing.T) {
	for name, change := range map[string]func(*v1alpha1.TimeSlicedMemory, *usage.Unit){
		"a longer grace period": func(s *v1alpha1.TimeSlicedMemory, _ *usage.Unit) { s.Guard.GracePeriodSeconds = 300 },
		"less free memory": func(s *v1alpha1.TimeSlicedMemory, u *usage.Unit) {
			s.Guard.FreeBelowPercent = 2
			u.Memory = &gpu.Memory{Total: 40 * gib, Free: gib / 4}
		},
		"a larger share": func(s *v1alpha1.TimeSlicedMemory, u *usage.Unit) {
			s.PerReplica = new(resource.MustParse("12Gi"))
			u.Containers[0].ShareBytes = new(12 * gib)
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			was := sampled(spec(v1alpha1.MemoryGuardReport), lasting(full(), time.Minute)...)
			changed, u := spec(v1alpha1.MemoryGuardReport), full()
			change(&changed, &u)
			found := sampled(changed, lasting(u, time.Hour)...)
			kept := memoryguard.Kept(changed, was, found, start.Add(time.Hour))
			g.Expect(kept).To(HaveLen(1))
			g.Expect(memoryguard.Exceeds(changed, kept[0])).To(BeTrue())
			g.Expect(kept[0].Container.ShareBytes).To(Equal(found[0].Container.ShareBytes))
		})
	}
}

// TestTwoContainersThatTakeTurnsAreOneReport: what they use changes with each sample, and each report is a write and an
// Event.
func TestTwoContainersThatTakeTurnsAreOneReport(t *testing.T) {
	g := NewWithT(t)
	s, w, now := spec(v1alpha1.MemoryGuardReport), memoryguard.Watch{}, start
	var reported, found []v1alpha1.MemoryPressure
	changes := 0
	for i := range 120 {
		u := full()
		u.Containers = []usage.Container{
			container("a", new(19*gib+int64(i%2)), new(10*gib)), container("b", new(19*gib+int64(1-i%2)), new(10*gib)),
		}
		w, found = w.Next(s, []usage.Unit{u}, now)
		kept := memoryguard.Kept(s, reported, found, now)
		if len(kept) != len(reported) || len(kept) > 0 && kept[0].Container.PodName != reported[0].Container.PodName {
			changes++
		}
		reported, now = kept, now.Add(5*time.Second)
	}
	g.Expect(changes).To(Equal(1))
}
