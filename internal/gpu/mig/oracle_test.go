// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig_test

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// layout is a set of instances that the simulated hardware accepts, by start, and the room beside them.
type layout struct {
	instances []gpu.Instance
	room      []int
}

// oracle knows every layout of a GPU, by the number of instances of each profile. It finds them by asking the hardware,
// and the best of them by looking at all.
type oracle struct {
	device  gpu.Device
	layouts map[string][]layout
	all     []layout
}

func newOracle(t *testing.T, m sim.Model) *oracle {
	t.Helper()
	n, err := sim.NewNode("oracle", m)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	n.GPUs[0].MIG, n.GPUs[0].PendingMIG = true, true
	o := &oracle{device: n.Observe().Devices[0], layouts: map[string][]layout{}}
	o.explore(&n.GPUs[0], nil)
	return o
}

func (o *oracle) explore(g *sim.GPU, l []gpu.Instance) {
	found := layout{instances: slices.Clone(l), room: o.room(l)}
	key := keyOf(countsOf(l))
	o.all = append(o.all, found)
	o.layouts[key] = append(o.layouts[key], found)
	for _, p := range g.Spec().Profiles {
		for _, at := range g.FreePlacements(p) {
			if len(l) > 0 && at.Start < l[len(l)-1].Placement.Start {
				continue // each set once: by start
			}
			next := *g
			next.Instances = append(slices.Clone(g.Instances), sim.GPUInstance{ID: len(l), Profile: p.ID, Placement: at})
			o.explore(&next, append(l, gpu.Instance{Profile: p.Name, Placement: at, ID: len(l)}))
		}
	}
}

func countsOf(l []gpu.Instance) map[string]int {
	counts := map[string]int{}
	for _, i := range l {
		counts[i.Profile]++
	}
	return counts
}

func keyOf(counts map[string]int) string {
	var parts []string
	for name, n := range counts {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, name))
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

// cost is what Pack minimises, then maximises.
type cost struct {
	used, destroyed int
	room            []int
}

func (c cost) compare(o cost) int {
	return cmp.Or(cmp.Compare(c.used, o.used), cmp.Compare(c.destroyed, o.destroyed), -slices.Compare(c.room, o.room))
}

// costOf is the cost of getting from the GPU's instances to a layout.
func (o *oracle) costOf(d gpu.Device, l layout) cost {
	c := cost{room: l.room}
	for _, i := range d.State.Instances {
		keeps := slices.ContainsFunc(l.instances, func(w gpu.Instance) bool {
			return !i.Partial && w.Profile == i.Profile && w.Placement == i.Placement
		})
		if keeps {
			continue
		}
		c.destroyed++
		if d.InUse(i.ID) {
			c.used++
		}
	}
	return c
}

// room counts, by exhaustive search, how many more instances of each size would fit, largest first.
func (o *oracle) room(l []gpu.Instance) []int {
	compute := o.device.ComputeSlices()
	for _, i := range l {
		p, _ := o.device.Profile(i.Profile)
		compute -= p.Slices
	}
	profiles := slices.Clone(o.device.Profiles)
	slices.SortStableFunc(profiles, func(a, b gpu.Profile) int {
		return cmp.Or(b.Size-a.Size, b.Slices-a.Slices)
	})
	var room []int
	for _, p := range profiles {
		room = append(room, most(p, slices.Clone(l), compute, 0))
	}
	return room
}

func most(p gpu.Profile, l []gpu.Instance, compute, from int) int {
	best := 0
	for n := from; n < len(p.Starts) && compute >= p.Slices; n++ {
		at := gpu.Placement{Start: p.Starts[n], Size: p.Size}
		if slices.ContainsFunc(l, func(i gpu.Instance) bool { return i.Placement.Overlaps(at) }) {
			continue
		}
		best = max(best, 1+most(p, append(l, gpu.Instance{Placement: at}), compute-p.Slices, n+1))
	}
	return best
}

// best is the least cost of all layouts with the wanted instances.
func (o *oracle) best(d gpu.Device, want map[string]int) (least cost, fits bool) {
	for _, l := range o.layouts[keyOf(want)] {
		if c := o.costOf(d, l); !fits || c.compare(least) < 0 {
			least, fits = c, true
		}
	}
	return least, fits
}

// triple draws what a GPU has, which of it is used and broken, and what is wanted.
func (o *oracle) triple(r *rand.Rand) (gpu.Device, map[string]int) {
	d := o.device
	d.State.Instances = slices.Clone(o.all[r.IntN(len(o.all))].instances)
	for i := range d.State.Instances {
		d.State.Instances[i].Partial = r.IntN(10) == 0
		if r.IntN(3) == 0 {
			d.Processes = append(d.Processes, gpu.Process{PID: i + 1, Instance: i})
		}
		if r.IntN(6) == 0 {
			d.Holders = append(d.Holders, gpu.Holder{Pod: "trainer", Instance: i})
		}
	}
	want := countsOf(o.all[r.IntN(len(o.all))].instances)
	switch r.IntN(4) {
	case 0: // near to what is there
		want = countsOf(d.State.Instances)
		for name := range want {
			want[name] += r.IntN(3) - 1
		}
	case 1: // perhaps too much
		want[d.Profiles[r.IntN(len(d.Profiles))].Name]++
	}
	return d, want
}

// TestPackIsMinimal holds Pack against an exhaustive search on random GPUs: what is there, what of it is used, what is
// wanted.
func TestPackIsMinimal(t *testing.T) {
	total := 100_000
	if testing.Short() {
		total = 5_000
	}
	models := withMIG(t)
	for _, m := range models {
		t.Run(string(m), func(t *testing.T) {
			t.Parallel()
			o := newOracle(t, m)
			r := rand.New(rand.NewPCG(1, uint64(len(o.all))))
			for range total / len(models) {
				d, want := o.triple(r)
				if msg := o.check(d, want); msg != "" {
					t.Fatalf("%s\nhas %v used by %v %v\nwant %v", msg, d.State.Instances, d.Processes, d.Holders, want)
				}
			}
		})
	}
}

// check says what is wrong with the packing of a GPU.
func (o *oracle) check(d gpu.Device, want map[string]int) string {
	least, fits := o.best(d, want)
	p, err := mig.Pack(d, want)
	var unfit *mig.FitError
	switch {
	case !fits && errors.As(err, &unfit):
		return o.checkUnfit(unfit)
	case !fits:
		return fmt.Sprintf("does not fit, and Pack gave %v, %v", p, err)
	case err != nil:
		return fmt.Sprintf("fits, and Pack says: %v", err)
	}
	got := slices.Concat(p.Keep, p.Create)
	slices.SortFunc(got, func(a, b gpu.Instance) int { return a.Placement.Start - b.Placement.Start })
	if keyOf(countsOf(got)) != keyOf(want) {
		return fmt.Sprintf("Pack gives %v", got)
	}
	of := o.layouts[keyOf(want)]
	n := slices.IndexFunc(of, func(l layout) bool { return slices.EqualFunc(l.instances, got, alike) })
	if n < 0 {
		return fmt.Sprintf("the hardware does not allow %v", got)
	}
	if c := o.costOf(d, of[n]); c.compare(least) != 0 {
		return fmt.Sprintf("%v costs %v and the best costs %v", got, c, least)
	}
	if len(p.Destroy) != least.destroyed || len(p.InUse) != least.used {
		return fmt.Sprintf("Destroy %v, InUse %v and the best costs %v", p.Destroy, p.InUse, least)
	}
	return ""
}

func alike(a, b gpu.Instance) bool { return a.Profile == b.Profile && a.Placement == b.Placement }

// checkUnfit makes sure that what an error says would fit does.
func (o *oracle) checkUnfit(e *mig.FitError) string {
	if len(o.layouts[keyOf(e.Fits)]) == 0 {
		return fmt.Sprintf("%v is said to fit and does not", e.Fits)
	}
	return ""
}

func withMIG(t *testing.T) []sim.Model {
	t.Helper()
	var models []sim.Model
	for _, m := range sim.Models() {
		s, err := sim.SpecOf(m)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		if s.MIGCapable() {
			models = append(models, m)
		}
	}
	return models
}

func fuzzPack(t *testing.T, m sim.Model, seed uint64) {
	t.Helper()
	o := newOracle(t, m)
	d, want := o.triple(rand.New(rand.NewPCG(seed, 0)))
	NewWithT(t).Expect(o.check(d, want)).To(BeEmpty())
}
