// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"text/tabwriter"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// The environment of the comparison: MIG_BENCH=1 runs it, which takes some eight minutes. MIG_BENCH_SCALE=10 makes the
// simulated driver ten times as fast as the latencies below; the less weigh they beside what starting programs and
// reading takes.
const (
	benchEnv = "MIG_BENCH"
	scaleEnv = "MIG_BENCH_SCALE"
)

// runs is of how many the median is. What takes mig-parted longer than slow it does once: hardware that is waited for
// takes the same each time.
const (
	runs = 3
	slow = 20 * time.Second
)

// latencies are how long calls take. They are the same for both programs. What is observed:
//
//   - MIG mode of an A100, which the driver activates by resetting the GPU: 4.2 s, from the time stamps of mig-parted on
//     four GPUs one after the other in NVIDIA/gpu-operator issue 351;
//   - nvmlInit, where another program keeps the driver awake: 10 ms, from those of NVIDIA's DRA driver in
//     kubernetes-sigs/dra-driver-nvidia-gpu pull request 1018.
//
// The rest is assumed, for want of a source: MIG mode of a H100, which needs no reset, and what creates and destroys
// instances. Calls that read take what the simulated driver takes.
func latencies(m sim.Model) map[string]time.Duration {
	mode := 500 * time.Millisecond // assumed
	if m == sim.A100 {
		mode = 4200 * time.Millisecond
	}
	return map[string]time.Duration{
		"nvmlInit":                                 10 * time.Millisecond,
		"nvmlDeviceSetMigMode":                     mode,
		"nvmlDeviceCreateGpuInstance":              100 * time.Millisecond, // assumed, as all below
		"nvmlDeviceCreateGpuInstanceWithPlacement": 100 * time.Millisecond,
		"nvmlGpuInstanceCreateComputeInstance":     50 * time.Millisecond,
		"nvmlComputeInstanceDestroy":               50 * time.Millisecond,
		"nvmlGpuInstanceDestroy":                   100 * time.Millisecond,
		simdriver.GPUReset:                         4200 * time.Millisecond,
	}
}

// layout is instances of a GPU by profile; nil is MIG off.
type layout map[string]int

// scenario is a change of a node with eight GPUs.
type scenario struct {
	name     string
	from, to func(n names) [8]layout
	unfit    bool
	// What the project publishes: the bound of our wall time relative to mig-parted's, and how many instances have to
	// be destroyed. Where mig-parted does nothing but what is needed, to a single GPU, there is no bound: nothing is
	// left to do side by side.
	bound   float64
	destroy int
}

// names are the profiles of one to three slices.
type names struct{ one, two, three string }

func all(l layout) (node [8]layout) {
	for i := range node {
		node[i] = l
	}
	return node
}

func (n names) whole() [8]layout    { return all(nil) }
func (n names) sevenths() [8]layout { return all(layout{n.one: 7}) }
func (n names) mix() [8]layout      { return all(layout{n.three: 1, n.two: 2}) }
func (n names) tooMuch() [8]layout  { return all(layout{n.three: 3}) }

func (n names) oneMixed() [8]layout {
	node := n.sevenths()
	node[3] = n.mix()[3]
	return node
}

func (n names) oneWhole() [8]layout {
	node := n.sevenths()
	node[3] = nil
	return node
}

func scenarios() []scenario {
	return []scenario{
		{name: "whole → 7×1g on all", from: names.whole, to: names.sevenths, bound: 0.25},
		{name: "7×1g → 3g+2g+2g on all", from: names.sevenths, to: names.mix, bound: 0.25, destroy: 56},
		{name: "one GPU of eight: 7×1g → 3g+2g+2g", from: names.sevenths, to: names.oneMixed, destroy: 7},
		{name: "one GPU of eight: whole → 7×1g beside 7×1g", from: names.oneWhole, to: names.sevenths, bound: 0.34},
		{name: "no change", from: names.mix, to: names.mix},
		{name: "a layout that does not fit: 3×3g", from: names.sevenths, to: names.tooMuch, unfit: true},
	}
}

// figures are what one apply cost.
type figures struct {
	wall                     time.Duration
	destroyed, modes, resets int // instances, GPUs whose MIG mode changed, GPUs reset
	bystanders               int // GPUs that had nothing to change and lost instances or were reset
	writes                   int // calls that change the hardware, also those that were refused
}

func median(list []figures) figures {
	slices.SortFunc(list, func(a, b figures) int { return int(a.wall - b.wall) })
	return list[len(list)/2]
}

// TestMIGBesideMIGParted applies the same changes with NVIDIA's mig-parted and with our agent, to the same simulated
// node.
func TestMIGBesideMIGParted(t *testing.T) {
	if os.Getenv(benchEnv) == "" {
		t.Skip("set " + benchEnv + "=1, or make bench")
	}
	scale := 1
	if s := os.Getenv(scaleEnv); s != "" {
		var err error
		scale, err = strconv.Atoi(s)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
	}
	b := newBench(t, scale)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', 0)
	row := func(cells ...any) {
		_, _ = fmt.Fprintf(table, "| %v\t| %v\t| %v\t| %v\t| %v\t| %v\t| %v\t| %v\t| %v\t|\n", cells...)
	}
	row("GPUs", "change", "mig-parted", "agent", "ratio", "destroyed", "GPUs reset", "bystanders hurt", "calls that write")
	row("---", "---", "---", "---", "---", "---", "---", "---", "---")
	profiles := map[sim.Model]names{
		sim.A100: {"1g.5gb", "2g.10gb", "3g.20gb"},
		sim.H100: {"1g.10gb", "2g.20gb", "3g.40gb"},
	}
	for _, model := range []sim.Model{sim.A100, sim.H100} {
		n := profiles[model]
		for _, s := range scenarios() {
			var theirs, ours []figures
			for range runs {
				if len(theirs) == 0 || theirs[0].wall < slow {
					theirs = append(theirs, b.measure(t, model, s, n, b.migParted))
				}
				b.expectNothingToDo(t, s, n, b.agent)
				ours = append(ours, b.measure(t, model, s, n, b.agent))
				b.expectNothingToDo(t, s, n, b.migParted)
			}
			them, us := median(theirs), median(ours)
			row("8 × "+string(model), s.name, shown(them.wall), shown(us.wall),
				fmt.Sprintf("1/%.1f", float64(them.wall)/float64(us.wall)), pair(them.destroyed, us.destroyed),
				pair(them.resets, us.resets), pair(them.bystanders, us.bystanders), pair(them.writes, us.writes))
			s.check(t, string(model), them, us)
		}
	}
	fmt.Printf("\n8 GPUs, latencies divided by %d, medians of %d runs (one of mig-parted's that take longer than %s); figures are mig-parted's : the agent's\n", scale, runs, slow)
	_ = table.Flush()
}

func shown(d time.Duration) string { return d.Round(time.Millisecond).String() }

func pair(them, us int) string { return fmt.Sprintf("%d : %d", them, us) }

// check holds our figures to what is published.
func (s scenario) check(t *testing.T, model string, them, us figures) {
	t.Helper()
	wrong := func(format string, args ...any) {
		t.Errorf("%s, %s: "+format, append([]any{model, s.name}, args...)...)
	}
	if us.destroyed != s.destroy {
		wrong("%d instances destroyed, %d needed", us.destroyed, s.destroy)
	}
	if us.bystanders > 0 {
		wrong("%d GPUs hurt that had nothing to change", us.bystanders)
	}
	if s.unfit && us.writes > 0 {
		wrong("%d calls that write", us.writes)
	}
	if ratio := float64(us.wall) / float64(them.wall); s.bound > 0 && ratio > s.bound {
		wrong("the wall time is %.3f of mig-parted's, more than %.3f", ratio, s.bound)
	}
}
