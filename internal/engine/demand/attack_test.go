// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Of several instances that could go, the one that may go first tells when to decide again.
func TestHeldUntilTheFirstInstanceMayGo(t *testing.T) {
	d := a100(t)
	for name, idle := range map[string][2]time.Duration{"the lower lies longer": {4 * time.Minute, time.Second}, "the upper lies longer": {time.Second, 4 * time.Minute}} {
		t.Run(name, func(t *testing.T) {
			got := new(demand.Memory).Decide(now, pool(demand.GPU{
				Node: "a", UUID: "0", Model: d, Instances: []demand.Instance{has(d, "3g.20gb", 0, "", idle[0]), has(d, "3g.20gb", 4, "", idle[1])},
			}), []demand.Class{asks("2g.10gb", 1)})
			NewWithT(t).Expect(got.Outcomes).To(Equal([]demand.Outcome{{Unmet: 1, Reason: demand.Held, Until: now.Add(time.Minute)}}))
			NewWithT(t).Expect(got.Next).To(Equal(now.Add(time.Minute)))
		})
	}
}

// The reserve is a number of instances, and none that lies anywhere in particular: those that may not go in any case are it first.
func TestTheReserveIsFirstWhatMayNotGo(t *testing.T) {
	d := a100(t)
	for _, idle := range [][2]time.Duration{{time.Hour, time.Second}, {time.Second, time.Hour}} {
		p := pool(
			demand.GPU{Node: "a", UUID: "0", Model: d, Instances: []demand.Instance{has(d, "1g.5gb", 0, "", idle[0])}},
			demand.GPU{Node: "b", UUID: "1", Model: d, Instances: []demand.Instance{has(d, "1g.5gb", 0, "", idle[1])}},
		)
		p.Reserve = map[string]int{"1g": 1}
		NewWithT(t).Expect(new(demand.Memory).Decide(now, p, []demand.Class{asks("7g.40gb", 1)}).Outcomes).To(Equal([]demand.Outcome{{Planned: 1}}), fmt.Sprint(idle))
	}
}

// Which idle instances are the reserve is part of the choice: a pod that only one node takes may need one of them there.
func TestTheReserveIsWhereNoPodNeedsIt(t *testing.T) {
	d := a100(t)
	idle := func(node string) demand.GPU {
		return demand.GPU{Node: node, UUID: node, Model: d, Instances: []demand.Instance{has(d, "1g.5gb", 0, "", time.Hour)}}
	}
	for only, more := range map[string]int{"a": 0, "b": 0, "z": 200} { // beyond 128 GPUs, nothing is searched
		t.Run(only, func(t *testing.T) {
			p := pool(idle("a"), idle("b"), idle("z"))
			for n := range more {
				p.GPUs = append(p.GPUs, idle(fmt.Sprintf("n%03d", n)))
			}
			p.Reserve = map[string]int{"1g": len(p.GPUs) - 1}
			class := asks("7g.40gb", 2)
			class.Nodes = map[string]bool{only: true}
			got := new(demand.Memory).Decide(now, p, []demand.Class{class})
			NewWithT(t).Expect(got.Outcomes[0].Planned).To(Equal(1))
			other := asks("7g.40gb", 1)
			other.Oldest = class.Oldest.Add(time.Second)
			got = new(demand.Memory).Decide(now, p, []demand.Class{class, other})
			NewWithT(t).Expect(got.Outcomes[1]).To(Equal(demand.Outcome{Unmet: 1, Reason: demand.Reserve}))
			NewWithT(t).Expect(got.Changes).To(HaveLen(1))
		})
	}
}

// Numbers that no API lets through end no process.
func TestOddNumbersEndNothing(t *testing.T) {
	d := a100(t)
	p := pool(demand.GPU{Node: "a", UUID: "0", Model: d})
	p.Reserve = map[string]int{"1g": -1}
	for _, class := range []demand.Class{
		{Pods: -1, Asks: map[string]int{"1g.5gb": 1}},
		{Pods: 1, Asks: map[string]int{"1g.5gb": -1}},
		{Pods: 1},
		{Pods: 1, Asks: map[string]int{"": 1}},
		{Pods: 1, Asks: map[string]int{"1g.5gb": 300}},
		{Pods: 1, Asks: map[string]int{"1g.5gb": 0}},
	} {
		t.Run(fmt.Sprint(class.Pods, class.Asks), func(*testing.T) { new(demand.Memory).Decide(now, p, []demand.Class{class}) })
	}
}

// More kinds of GPUs than a byte can number.
func TestManyKindsOfGPUsStayApart(t *testing.T) {
	g := NewWithT(t)
	p := pool()
	p.Profiles = []string{"1g"}
	of := map[string]*gpu.Device{}
	for n := range 300 {
		product := "NVIDIA-A30"
		if n >= 256 {
			product = "NVIDIA-A100-SXM4-40GB"
		}
		name := fmt.Sprintf("%03d", n)
		of[name] = model(t, product)
		p.GPUs = append(p.GPUs, demand.GPU{Node: name, UUID: name, Model: of[name]})
	}
	got := new(demand.Memory).Decide(now, p, []demand.Class{asks("1g.6gb", 9999), asks("1g.5gb", 9999)})
	g.Expect(got.Changes).To(HaveLen(300))
	for _, c := range got.Changes {
		d := *of[c.Node]
		for _, i := range c.Create {
			_, has := d.Profile(i.Profile)
			g.Expect(has).To(BeTrue(), "%s on %s %s", i.Profile, c.Node, d.Product)
		}
	}
}
