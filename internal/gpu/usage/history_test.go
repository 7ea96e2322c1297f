// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package usage_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

var started = time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)

const every = time.Minute

// used is a sample of one GPU on which containers use memory, and the streaming multiprocessors if compute is not 0.
func used(containers ...usage.Container) usage.Report {
	return usage.Report{Node: "n1", Units: []usage.Unit{{GPU: uuid, Containers: containers}}}
}

func using(pod string, bytes int64, compute float64) usage.Container {
	c := usage.Container{Name: name(pod), MemoryBytes: &bytes}
	if compute > 0 {
		c.Utilization = &gpu.Utilization{Compute: compute}
	}
	return c
}

func TestAHistoryHasPeaksAndDistributions(t *testing.T) {
	g := NewWithT(t)
	r := usage.NewRecorder("n1", started, every)
	for i, compute := range []float64{0.1, 0.22, 0, 0.12} {
		r.Add(used(using("a", int64(i)*gib, compute)), true, started.Add(time.Duration(i)*every))
	}
	r.Add(usage.Report{}, false, started.Add(4*every))
	h := r.History()
	g.Expect(h.Time()).To(Equal(4*time.Minute), "the incomplete sample stands for no time")
	g.Expect(h.Incomplete).To(Equal(1))
	g.Expect(h.Containers).To(HaveLen(1))
	a := h.Containers[0]
	g.Expect(a.First).To(Equal(started))
	g.Expect(a.Last).To(Equal(started.Add(3 * every)))
	g.Expect(a.Memory.Peak).To(Equal(float64(3 * gib)))
	g.Expect(a.Memory.Quantile(0.5, usage.MemoryBounds())).To(Equal(float64(gib)), "two of four samples use 1 GiB at most")
	g.Expect(a.Compute.Peak).To(Equal(0.22))
	g.Expect(a.Compute.Quantile(0.3, usage.ComputeBounds())).To(Equal(0.1), "the upper end of a range belongs to it")
	g.Expect(a.Compute.Quantile(0.6, usage.ComputeBounds())).To(Equal(0.15), "the sample without a value counts for none")
	g.Expect(a.Compute.Quantile(0.95, usage.ComputeBounds())).To(Equal(0.22), "never more than the peak")
}

func TestAPeakOfWhichASampleWasNotReportedIsNotKnown(t *testing.T) {
	for title, samples := range map[string][]*int64{"at first": {nil, new(gib)}, "later": {new(gib), nil, new(gib)}} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			r := usage.NewRecorder("n1", started, every)
			for i, bytes := range samples {
				r.Add(used(usage.Container{Name: name("a"), MemoryBytes: bytes}), true, started.Add(time.Duration(i)*every))
			}
			g.Expect(r.History().Containers).To(HaveLen(1))
			g.Expect(r.History().Containers[0].Memory).To(BeNil())
			g.Expect(r.History().Containers[0].Compute).To(BeNil(), "it is not 0")
		})
	}
}

func TestAHistoryTellsInstancesApart(t *testing.T) {
	g := NewWithT(t)
	on := func(instance int, profile string) usage.Unit {
		return usage.Unit{GPU: uuid, Instance: &instance, Profile: profile, Containers: []usage.Container{using("a", gib, 0)}}
	}
	r := usage.NewRecorder("n1", started, every)
	r.Add(usage.Report{Units: []usage.Unit{on(1, "1g.5gb"), on(2, "1g.5gb")}}, true, started)
	r.Add(usage.Report{Units: []usage.Unit{on(1, "2g.10gb")}}, true, started.Add(every))
	g.Expect(r.History().Containers).To(HaveLen(3), "the id of an instance that is gone is used again")
}

func TestAHistoryIsBoundedAndDropsTheOldest(t *testing.T) {
	g := NewWithT(t)
	r := usage.NewRecorder("n1", started, every)
	for i := range usage.MaxObserved + 10 {
		r.Add(used(using("server", gib, 0), using(fmt.Sprintf("job-%04d", i), gib, 0)), true, started.Add(time.Duration(i)*every))
	}
	h := r.History()
	g.Expect(h.Containers).To(HaveLen(usage.MaxObserved))
	g.Expect(h.Dropped).To(Equal(11))
	pods := map[string]bool{}
	for _, o := range h.Containers {
		pods[o.Pod] = true
	}
	g.Expect(pods).To(And(HaveKey("server"), HaveKey(fmt.Sprintf("job-%04d", usage.MaxObserved+9)), HaveKey("job-0011"), Not(HaveKey("job-0010"))),
		"the one that goes on is kept, however long ago it began")
}

func TestAHistorySurvivesItsJSON(t *testing.T) {
	g := NewWithT(t)
	r := usage.NewRecorder("n1", started, every)
	r.Add(used(using("a", 300*gib, 1), using("b", 0, 0)), true, started)
	h := r.History()
	raw, err := json.Marshal(h)
	g.Expect(err).NotTo(HaveOccurred())
	var read usage.History
	g.Expect(json.Unmarshal(raw, &read)).To(Succeed())
	g.Expect(read).To(Equal(h))
	g.Expect(read.Containers[0].Memory.Quantile(1, usage.MemoryBounds())).To(Equal(float64(300*gib)), "more than the last bound")

	h.Containers[0].Memory.Counts[0] = 99
	g.Expect(r.History()).To(Equal(read), "a history is a copy")
}
