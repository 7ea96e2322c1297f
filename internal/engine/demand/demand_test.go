// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
)

var now = time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)

func model(t *testing.T, product string) *gpu.Device {
	t.Helper()
	d, ok := catalogue.Find(product)
	NewWithT(t).Expect(ok).To(BeTrue(), product)
	return &d
}

func a100(t *testing.T) *gpu.Device {
	t.Helper()
	return model(t, "NVIDIA-A100-SXM4-40GB")
}

// has is an instance that a pod holds, or that has been idle since a time ago.
func has(d *gpu.Device, profile string, start int, holder string, idle time.Duration) demand.Instance {
	p, _ := d.Profile(profile)
	i := demand.Instance{Instance: gpu.Instance{Profile: profile, Placement: gpu.Placement{Start: start, Size: p.Size}}, Holder: holder}
	if holder == "" {
		i.IdleSince = now.Add(-idle)
	}
	return i
}

func pool(gpus ...demand.GPU) demand.Pool {
	return demand.Pool{GPUs: gpus, Profiles: []string{"1g", "2g", "3g", "4g", "7g"}, Idle: 5 * time.Minute, Rest: 15 * time.Minute, Budget: -1}
}

func asks(profile string, pods int) demand.Class {
	return demand.Class{Asks: map[string]int{profile: 1}, Oldest: now.Add(-time.Minute), Pods: pods}
}

func TestFreeRoomIsUsedBeforeIdleInstances(t *testing.T) {
	g, d := NewWithT(t), a100(t)
	got := new(demand.Memory).Decide(now, pool(
		demand.GPU{Node: "a", UUID: "0", Model: d, Instances: []demand.Instance{has(d, "3g.20gb", 0, "", time.Hour), has(d, "3g.20gb", 4, "", time.Hour)}},
		demand.GPU{Node: "b", UUID: "1", Model: d, Instances: []demand.Instance{has(d, "4g.20gb", 0, "x/y", 0)}},
	), []demand.Class{asks("2g.10gb", 1)})
	g.Expect(got.Changes).To(HaveLen(1))
	g.Expect(got.Changes[0].UUID).To(Equal("1"))
	g.Expect(got.Changes[0].Disruptive()).To(BeFalse())
	g.Expect(got.Changes[0].Create).To(Equal([]gpu.Instance{{Profile: "2g.10gb", Placement: gpu.Placement{Start: 4, Size: 2}}}))
	g.Expect(got.Changes[0].Classes).To(Equal([]int{0}))
	g.Expect(got.Outcomes).To(Equal([]demand.Outcome{{Planned: 1}}))
}

func TestAnInstanceInTheMakingIsPromisedOnce(t *testing.T) {
	g, d := NewWithT(t), a100(t)
	made := has(d, "3g.20gb", 0, "", -10*time.Second)
	got := new(demand.Memory).Decide(now, pool(demand.GPU{Node: "a", UUID: "0", Model: d, Instances: []demand.Instance{made}, Frozen: true, Withheld: true}),
		[]demand.Class{asks("3g.20gb", 2)})
	g.Expect(got.Changes).To(BeEmpty())
	g.Expect(got.Outcomes).To(Equal([]demand.Outcome{{Ready: 1, Unmet: 1, Reason: demand.Changing}}))
}

// TestWhyPodsWait: each reason, where nothing else blocks the pod.
func TestWhyPodsWait(t *testing.T) {
	d := a100(t)
	full := func(holder string, idle time.Duration) demand.GPU {
		return demand.GPU{Node: "a", UUID: "0", Model: d, Instances: []demand.Instance{has(d, "7g.40gb", 0, holder, idle)}}
	}
	one := func(change func(*demand.Class)) []demand.Class {
		class := asks("1g.5gb", 1)
		if change != nil {
			change(&class)
		}
		return []demand.Class{class}
	}
	changed := full("", time.Hour)
	changed.Changed = now.Add(-time.Minute)
	frozen := full("", time.Hour)
	frozen.Frozen = true
	unknown := full("", time.Hour)
	unknown.Instances[0].IdleSince = time.Time{}
	noBudget := pool(full("", time.Hour))
	noBudget.Budget = 0
	reserve := pool(full("", time.Hour))
	reserve.Reserve = map[string]int{"7g": 1}
	for name, c := range map[string]struct {
		pool    demand.Pool
		classes []demand.Class
		want    demand.Outcome
		next    time.Time
	}{
		"another profile":       {pool(full("", time.Hour)), []demand.Class{asks("1g.5gb+me", 1)}, demand.Outcome{Unmet: 1, Reason: demand.NotAllowed}, time.Time{}},
		"another node":          {pool(full("", time.Hour)), one(func(c *demand.Class) { c.Nodes = map[string]bool{"z": true} }), demand.Outcome{Unmet: 1, Reason: demand.NotAllowed}, time.Time{}},
		"in vain before":        {pool(full("", time.Hour)), one(func(c *demand.Class) { c.BackOff = now.Add(time.Minute) }), demand.Outcome{Unmet: 1, Reason: demand.BackOff, Until: now.Add(time.Minute)}, now.Add(time.Minute)},
		"no slot":               {noBudget, one(nil), demand.Outcome{Unmet: 1, Reason: demand.Budget}, time.Time{}},
		"idle for a short time": {pool(full("", time.Minute)), one(nil), demand.Outcome{Unmet: 1, Reason: demand.Held, Until: now.Add(4 * time.Minute)}, now.Add(4 * time.Minute)},
		"changed just now":      {pool(changed), one(nil), demand.Outcome{Unmet: 1, Reason: demand.Held, Until: now.Add(4 * time.Minute)}, now.Add(4 * time.Minute)},
		"idle since unknown":    {pool(unknown), one(nil), demand.Outcome{Unmet: 1, Reason: demand.Held}, time.Time{}},
		"the reserve":           {reserve, one(nil), demand.Outcome{Unmet: 1, Reason: demand.Reserve}, time.Time{}},
		"a change":              {pool(frozen), one(nil), demand.Outcome{Unmet: 1, Reason: demand.Changing}, time.Time{}},
		"a pod":                 {pool(full("x/y", 0)), one(nil), demand.Outcome{Unmet: 1, Reason: demand.NoIdleRoom, Blockers: []string{"x/y"}}, time.Time{}},
		"nothing":               {pool(full("", time.Hour)), one(nil), demand.Outcome{Planned: 1}, time.Time{}},
	} {
		t.Run(name, func(t *testing.T) {
			got := new(demand.Memory).Decide(now, c.pool, c.classes)
			NewWithT(t).Expect(got.Outcomes).To(Equal([]demand.Outcome{c.want}))
			NewWithT(t).Expect(got.Next).To(Equal(c.next))
			NewWithT(t).Expect(got.Changes).To(HaveLen(c.want.Planned))
		})
	}
}

func TestTheReserveIsRefilled(t *testing.T) {
	g, d := NewWithT(t), a100(t)
	p := pool(demand.GPU{Node: "a", UUID: "0", Model: d, Instances: []demand.Instance{has(d, "3g.20gb", 0, "x/y", 0)}})
	p.Reserve = map[string]int{"1g": 2}
	got := new(demand.Memory).Decide(now, p, nil)
	g.Expect(got.Changes).To(HaveLen(1))
	g.Expect(got.Changes[0].Create).To(HaveLen(2))
	g.Expect(got.Changes[0].Classes).To(BeEmpty())
}

func TestAnUnusedGPUReturnsToItsRestingLayout(t *testing.T) {
	g, d := NewWithT(t), a100(t)
	unused := func(idle time.Duration) demand.Pool {
		return pool(demand.GPU{
			Node: "a", UUID: "0", Model: d, Instances: []demand.Instance{has(d, "7g.40gb", 0, "", idle)}, Resting: map[string]int{"3g.20gb": 2},
		})
	}
	rest := pool().Rest
	got := new(demand.Memory).Decide(now, unused(rest), nil)
	g.Expect(got.Changes).To(HaveLen(1))
	g.Expect(got.Changes[0].Create).To(HaveLen(2))
	got = new(demand.Memory).Decide(now, unused(rest-time.Minute), nil)
	g.Expect(got.Changes).To(BeEmpty())
	g.Expect(got.Next).To(Equal(now.Add(time.Minute)))
	got = new(demand.Memory).Decide(now, unused(0), nil)
	g.Expect(got.Next).To(Equal(now.Add(rest)), "also while its instances must not go yet")
	got = new(demand.Memory).Decide(now, unused(rest), []demand.Class{asks("7g.40gb", 1)})
	g.Expect(got.Changes).To(BeEmpty())
	for name, waits := range map[string]func(*demand.Class){
		"not now":   func(c *demand.Class) { c.BackOff = now.Add(time.Minute) },
		"elsewhere": func(c *demand.Class) { c.Nodes = map[string]bool{"b": true} },
	} {
		class := asks("7g.40gb", 1)
		waits(&class)
		g.Expect(new(demand.Memory).Decide(now, unused(rest), []demand.Class{class}).Changes).To(HaveLen(1), name)
	}
}

func TestSeveralInstancesOfAPodComeFromOneNode(t *testing.T) {
	g, d := NewWithT(t), a100(t)
	free := func(node, uuid string) demand.GPU {
		return demand.GPU{Node: node, UUID: uuid, Model: d, Instances: []demand.Instance{has(d, "3g.20gb", 4, "x/y", 0)}}
	}
	class := demand.Class{Asks: map[string]int{"4g.20gb": 2}, Oldest: now, Pods: 1}
	got := new(demand.Memory).Decide(now, pool(free("a", "0"), free("b", "1")), []demand.Class{class})
	g.Expect(got.Outcomes[0].Reason).To(Equal(demand.NoIdleRoom))
	got = new(demand.Memory).Decide(now, pool(free("a", "0"), free("b", "1"), free("b", "2")), []demand.Class{class})
	g.Expect(got.Changes).To(HaveLen(2))
	g.Expect(got.Changes[0].Node + got.Changes[1].Node).To(Equal("bb"))
}

// world draws a pool of up to four GPUs, and classes of up to six pods.
func world(t *testing.T, r *rand.Rand) (demand.Pool, []demand.Class) {
	t.Helper()
	models := []*gpu.Device{a100(t), model(t, "NVIDIA-A30")}
	d := models[r.IntN(2)]
	p := demand.Pool{Idle: 5 * time.Minute, Budget: r.IntN(4) - 1, Profiles: []string{"1g", "2g", "4g"}}
	if len(d.Profiles) > 5 && r.IntN(2) == 0 {
		p.Profiles = []string{"1g", "2g", "3g", "7g"}
	}
	for n := range 1 + r.IntN(4) {
		g := demand.GPU{Node: fmt.Sprint("n", r.IntN(2)), UUID: fmt.Sprint(n), Model: d, Frozen: r.IntN(8) == 0}
		if r.IntN(4) == 0 {
			g.Changed = now.Add(-time.Duration(r.IntN(10)) * time.Minute)
		}
		for range r.IntN(6) {
			profile := d.Profiles[r.IntN(len(d.Profiles))]
			i := has(d, profile.Name, profile.Starts[r.IntN(len(profile.Starts))], []string{"", "", "x/y"}[r.IntN(3)], time.Duration(r.IntN(10))*time.Minute)
			if more := append(slices.Clone(g.Instances), i); valid(d, more) {
				g.Instances = more
			}
		}
		p.GPUs = append(p.GPUs, g)
	}
	if r.IntN(3) == 0 {
		p.Reserve = map[string]int{"1g": 1}
	}
	var classes []demand.Class
	for range 1 + r.IntN(3) {
		names := exact(d, p.Profiles)
		class := demand.Class{
			Asks: map[string]int{names[r.IntN(len(names))]: 1}, Priority: int32(r.IntN(2)), Pods: 1 + r.IntN(2),
			Oldest: now.Add(-time.Duration(1+14*r.IntN(2)) * time.Minute),
		}
		if r.IntN(4) == 0 {
			class.Asks[names[r.IntN(len(names))]] = 2
			class.Pods = 1
		}
		if r.IntN(4) == 0 {
			class.Nodes = map[string]bool{"n0": true}
		}
		classes = append(classes, class)
	}
	return p, classes
}

// TestTheDecisionIsTheBest compares it with an oracle that tries everything.
func TestTheDecisionIsTheBest(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 44))
	served := 0
	for n := range 1500 {
		p, classes := world(t, r)
		got := new(demand.Memory).Decide(now, p, classes)
		if mine, best := valueOf(p, classes, got), oracle(p, classes); mine.compare(best) != 0 {
			t.Fatalf("%d: %v, the oracle %v\n%+v\n%+v\n%+v", n, mine, best, p, classes, got)
		}
		for _, o := range got.Outcomes {
			served += o.Planned
		}
	}
	NewWithT(t).Expect(served).To(BeNumerically(">", 500))
}

// TestADecisionKeepsItsPromises: what is held, too young, frozen or the reserve stays, layouts are valid, the budget is
// kept, every pod is accounted for and has a reason, and neither the order of what is given nor the memory matters.
func TestADecisionKeepsItsPromises(t *testing.T) {
	g := NewWithT(t)
	r := rand.New(rand.NewPCG(2, 44))
	memory := &demand.Memory{}
	for range 1500 {
		p, classes := world(t, r)
		got := new(demand.Memory).Decide(now, p, classes)
		tainted := map[string]bool{}
		for _, c := range got.Changes {
			of := p.GPUs[slices.IndexFunc(p.GPUs, func(x demand.GPU) bool { return x.UUID == c.UUID })]
			g.Expect(of.Frozen).To(BeFalse())
			after := slices.Clone(of.Instances)
			for _, i := range c.Destroy {
				at := slices.IndexFunc(after, func(x demand.Instance) bool { return x.Placement == i.Placement })
				g.Expect(after[at].Holder).To(BeEmpty())
				g.Expect(after[at].IdleSince.Add(p.Idle).After(now)).To(BeFalse())
				g.Expect(of.Changed.Add(demand.Hold).After(now)).To(BeFalse())
				after = slices.Delete(after, at, at+1)
				tainted[c.Node] = true
			}
			for _, i := range c.Create {
				g.Expect(exact(of.Model, p.Profiles)).To(ContainElement(i.Profile))
				after = append(after, demand.Instance{Instance: i})
			}
			g.Expect(valid(of.Model, after)).To(BeTrue())
		}
		if p.Budget >= 0 {
			g.Expect(len(tainted)).To(BeNumerically("<=", p.Budget))
		}
		small := exact(p.GPUs[0].Model, []string{"1g"})[0]
		if p.Reserve != nil {
			g.Expect(idleAfter(p, got, small)).To(BeNumerically(">=", min(p.Reserve["1g"], idleAfter(p, demand.Decision{}, small))))
		}
		for n, o := range got.Outcomes {
			g.Expect(o.Ready + o.Planned + o.Unmet).To(Equal(classes[n].Pods))
			g.Expect(o).To(Satisfy(func(o demand.Outcome) bool { return (o.Reason == "") == (o.Unmet == 0) }))
		}
		other := p
		other.GPUs = slices.Clone(p.GPUs)
		r.Shuffle(len(other.GPUs), func(i, j int) { other.GPUs[i], other.GPUs[j] = other.GPUs[j], other.GPUs[i] })
		g.Expect(memory.Decide(now, other, classes)).To(Equal(got))
	}
}

func idleAfter(p demand.Pool, d demand.Decision, profile string) (n int) {
	for _, g := range p.GPUs {
		for _, i := range g.Instances {
			if i.Profile == profile && i.Holder == "" {
				n++
			}
		}
	}
	for _, c := range d.Changes {
		for _, i := range c.Destroy {
			if i.Profile == profile {
				n--
			}
		}
		for _, i := range c.Create {
			if i.Profile == profile {
				n++
			}
		}
	}
	return n
}

// A pod that asks for more instances than a node has room for ends the search, however many ways there are to begin with it.
func TestManyInstancesOfOnePodEndTheSearch(t *testing.T) {
	d := a100(t)
	var gpus []demand.GPU
	for n := range 8 {
		gpus = append(gpus, demand.GPU{Node: "a", UUID: fmt.Sprint(n), Model: d, Instances: []demand.Instance{has(d, "1g.5gb", n%7, "x/y", 0)}})
	}
	for name, c := range map[string]struct {
		asks map[string]int
		want demand.Outcome
	}{
		"too many": {map[string]int{"1g.5gb": 40, "2g.10gb": 9}, demand.Outcome{Unmet: 1, Reason: demand.NoIdleRoom}},
		"some":     {map[string]int{"1g.5gb": 12, "2g.10gb": 6}, demand.Outcome{Planned: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			class := asks("1g.5gb", 1)
			class.Asks = c.asks
			done := make(chan demand.Decision, 1)
			go func() { done <- new(demand.Memory).Decide(now, pool(gpus...), []demand.Class{class}) }()
			var got demand.Decision
			NewWithT(t).Eventually(done, 20*time.Second).Should(Receive(&got))
			NewWithT(t).Expect(got.Outcomes).To(Equal([]demand.Outcome{c.want}))
		})
	}
}

// BenchmarkDecide: 1,000 nodes of 8 GPUs, 1,000 pods in 40 classes, with a memory.
func BenchmarkDecide(b *testing.B) {
	d, _ := catalogue.Find("NVIDIA-A100-SXM4-40GB")
	layouts := [][]demand.Instance{
		{has(&d, "7g.40gb", 0, "x/y", 0)},
		{has(&d, "1g.5gb", 0, "", time.Hour), has(&d, "2g.10gb", 2, "x/y", 0), has(&d, "3g.20gb", 4, "x/y", 0)},
		{has(&d, "3g.20gb", 0, "x/y", 0), has(&d, "3g.20gb", 4, "", time.Hour)},
		{has(&d, "1g.5gb", 0, "x/y", 0), has(&d, "1g.5gb", 1, "", time.Hour), has(&d, "2g.10gb", 2, "", time.Minute)},
	}
	var gpus []demand.GPU
	for n := range 8000 {
		gpus = append(gpus, demand.GPU{Node: fmt.Sprintf("n%04d", n/8), UUID: fmt.Sprint(n % 8), Model: &d, Instances: layouts[n%len(layouts)]})
	}
	var classes []demand.Class
	for n := range 40 {
		class := asks([]string{"1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"}[n%5], 25)
		class.Priority = int32(n % 3)
		class.Oldest = now.Add(-time.Duration(n) * time.Minute)
		classes = append(classes, class)
	}
	for name, reserve := range map[string]map[string]int{"no reserve": nil, "reserve": {"1g": 100, "3g": 1990}} {
		b.Run(name, func(b *testing.B) {
			p := pool(gpus...)
			p.Reserve = reserve
			memory := &demand.Memory{}
			memory.Decide(now, p, classes)
			for b.Loop() {
				memory.Decide(now, p, classes)
			}
		})
	}
}
