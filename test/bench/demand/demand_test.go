// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// benchEnv=1 runs the comparison. TRACE=FILE plays that trace in place of the generated ones (see read), PICTURE=FILE
// draws the result.
const benchEnv = "DEMAND_BENCH"

// What is compared: a pool of 2 nodes with 8 GPUs.
const (
	podsOfTrace = 2500
	seeds       = 2
)

var loads = []float64{0.5, 0.7, 0.9, 1.1}

// contender is a system that serves a trace.
type contender struct {
	name string
	play func(t trace, c conditions) result
}

// more are contenders of other files.
var more []contender

func contenders() []contender {
	list := []contender{
		{"static: 7×1g", fixed(counts{7, 0, 0, 0, 0})},
		{"static: 3g+2g+2g", fixed(counts{0, 2, 1, 0, 0})},
		{"static: all-balanced", fixed(resting())},
		{"best static layouts in hindsight", func(t trace, c conditions) result { return static(t, bestStatic(t, c.gpus())) }},
		{"DRA, DynamicMIG: first fit", playing(func() player { return firstFit{} })},
		{"nos: list of layouts, 10 to 60 s", playing(func() player { return &nos{idle: 10 * time.Second, most: time.Minute, poll: 5 * time.Second} })},
		{"nos: list of layouts, 2 to 10 s", playing(func() player { return &nos{idle: 2 * time.Second, most: 10 * time.Second, poll: time.Second} })},
	}
	return list
}

func fixed(layout counts) func(trace, conditions) result {
	return func(t trace, c conditions) result { return static(t, everywhere(layout, c.gpus())) }
}

func playing(made func() player) func(trace, conditions) result {
	return func(t trace, c conditions) result { return play(t, c, made(), resting()) }
}

func reference() conditions {
	return conditions{nodes: 2, gpusOfNode: 8, kubelet: 10 * time.Second, nvml: time.Second / 2}
}

// row is what a contender reached with all mixes, by load.
type row struct {
	name  string
	loads []result
	mixes map[string]result // at load 0.9
}

// made are the traces by load: all systems serve the same.
var made = map[float64]map[string][]trace{}

// traces are those of a load, by mix.
func traces(t *testing.T, load float64, gpus int) map[string][]trace {
	t.Helper()
	if made[load] == nil {
		made[load] = makeTraces(t, load, gpus)
	}
	return made[load]
}

func makeTraces(t *testing.T, load float64, gpus int) map[string][]trace {
	t.Helper()
	if name := os.Getenv("TRACE"); name != "" {
		read, err := readFile(name)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		return map[string][]trace{filepath.Base(name): {read.compressed(gpus, load)}}
	}
	list := map[string][]trace{}
	for _, m := range mixes() {
		for seed := range uint64(seeds) {
			list[m.name] = append(list[m.name], generate(m, podsOfTrace, gpus, load, seed))
		}
	}
	return list
}

// TestDemand compares the systems and prints the tables of the documents.
func TestDemand(t *testing.T) {
	if os.Getenv(benchEnv) == "" {
		t.Skip("set " + benchEnv + "=1, or make bench-demand")
	}
	var rows []row
	for _, packed := range []bool{false, true} {
		c := reference()
		c.packed = packed
		for _, who := range slices.Concat(contenders(), more) {
			moves := !strings.Contains(who.name, "static") && !strings.Contains(who.name, "DRA")
			if packed && !moves {
				continue // it is the same
			}
			r := row{name: who.name, mixes: map[string]result{}}
			if moves {
				r.name += ", " + c.placement()
			}
			rows = append(rows, r)
			compare(t, who, c, &rows[len(rows)-1])
		}
	}
	best, bound := row{name: "optimum with free migration", mixes: map[string]result{}}, row{name: "what pods ask for, or all slices", mixes: map[string]result{}}
	compare(t, contender{play: func(t trace, c conditions) result { return migrating(t, c.gpus()) }}, reference(), &best)
	compare(t, contender{play: func(t trace, c conditions) result {
		return result{served: limit(t, c.gpus()), pods: len(t.pods), span: t.span}
	}}, reference(), &bound)
	rows = append(rows, best, bound)
	printed(rows, best)
	sensitivity(t)
	if name := os.Getenv("PICTURE"); name != "" {
		NewWithT(t).Expect(os.WriteFile(name, []byte(picture(rows, best)), 0o600)).To(Succeed())
	}
}

func compare(t *testing.T, who contender, c conditions, into *row) {
	t.Helper()
	for _, load := range loads {
		var sum result
		for name, list := range sorted(traces(t, load, c.gpus())) {
			for _, one := range list {
				got := who.play(one, c)
				sum.add(got)
				if load == 0.9 {
					of := into.mixes[name]
					of.add(got)
					into.mixes[name] = of
				}
			}
		}
		into.loads = append(into.loads, sum)
	}
}

func sorted[V any](m map[string]V) func(func(string, V) bool) {
	return func(yield func(string, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}

func share(a, b result) string { return fmt.Sprintf("%.3f", float64(a.served)/float64(b.served)) }

// quantile of the waits of all pods; what never started waits for ever.
func (r result) quantile(share float64) string {
	slices.Sort(r.waits)
	at := int(share * float64(r.pods))
	if at >= len(r.waits) {
		return "–"
	}
	return r.waits[at].Round(100 * time.Millisecond).String()
}

func printed(rows []row, best row) {
	what := fmt.Sprintf("%d pods × %d seeds for each mix and load", podsOfTrace, seeds)
	if name := os.Getenv("TRACE"); name != "" {
		what = fmt.Sprintf("%s: %d pods", name, best.loads[0].pods)
	}
	fmt.Printf("\n%s, 16 × A100 40 GB, kubelet 10 s, NVML 0.5 s\n\n", what)
	fmt.Println("| System | 0.5 | 0.7 | 0.9 | 1.1 | wait p50, p95 at 0.7 | at 0.9 | idle destroyed, changes for each pod | tainted s/node/day at 0.9 |")
	fmt.Println("|---|---|---|---|---|---|---|---|---|")
	for _, r := range rows {
		fmt.Printf("| %s |", r.name)
		for i := range loads {
			fmt.Printf(" %s |", share(r.loads[i], best.loads[i]))
		}
		a, b := r.loads[1], r.loads[2]
		fmt.Printf(" %s, %s | %s, %s | %.2f, %.2f | %.1f |\n", a.quantile(0.5), a.quantile(0.95), b.quantile(0.5), b.quantile(0.95),
			float64(b.destroyed)/float64(max(1, len(b.waits))), float64(b.changes)/float64(max(1, len(b.waits))), b.tainted.Seconds()/2/(b.span.Hours()/24))
	}
	fmt.Print("\n| System, load 0.9 |")
	for name := range sorted(best.mixes) {
		fmt.Printf(" %s |", name)
	}
	fmt.Println("\n|---|" + strings.Repeat("---|", len(best.mixes)))
	for _, r := range rows {
		fmt.Printf("| %s |", r.name)
		for name, of := range sorted(best.mixes) {
			fmt.Printf(" %s |", share(r.mixes[name], of))
		}
		fmt.Println()
	}
}

// sensitivity prints what kubelet, driver and placement matter to systems that repartition, of the uniform mix at load 0.9.
func sensitivity(t *testing.T) {
	t.Helper()
	c := reference()
	var one trace
	for name, list := range sorted(traces(t, 0.9, c.gpus())) {
		if one.pods == nil || name == "uniform" {
			one = list[0]
		}
	}
	best := migrating(one, c.gpus())
	fmt.Println("\n| uniform mix, load 0.9 | placement | kubelet | NVML | served | wait p50 | p95 |\n|---|---|---|---|---|---|---|")
	for _, who := range append(contenders()[6:], more...) {
		for _, packed := range []bool{false, true} {
			for _, kubelet := range []time.Duration{10 * time.Second, 250 * time.Millisecond} {
				for _, nvml := range []time.Duration{time.Second / 10, time.Second / 2, 3 * time.Second / 2} {
					c.packed, c.kubelet, c.nvml = packed, kubelet, nvml
					sum := who.play(one, c)
					fmt.Printf("| %s | %s | %s | %s | %s | %s | %s |\n", who.name, c.placement(), kubelet, nvml,
						share(sum, best), sum.quantile(0.5), sum.quantile(0.95))
				}
			}
		}
	}
}
