// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package demand measures how much of what pods ask for GPUs can serve whose MIG layout follows demand, beside static
// layouts, other systems and what no system can pass. Time and cluster are simulated, layouts are those of the product.
package demand

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
)

// The pools are of A100 40 GB. Their pods ask for these profiles.
const (
	kinds       = 5
	slicesOfGPU = 8
)

func names() []string      { return []string{"1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"} }
func computeSlices() []int { return []int{1, 2, 3, 4, 7} }

// size is the memory slices of a profile.
func size(profile int) int { return [kinds]int{1, 2, 4, 4, 8}[profile] }

var theGPU = sync.OnceValue(func() gpu.Device {
	d, _ := catalogue.Find("NVIDIA-A100-SXM4-40GB")
	d.State.MIG, d.PendingMIG = true, true
	return d
})

func kindOf(profile string) int { return slices.Index(names(), profile) }

// counts are instances by profile.
type counts [kinds]int

func (c counts) wanted() map[string]int {
	want := map[string]int{}
	for p, n := range c {
		if n > 0 {
			want[names()[p]] = n
		}
	}
	return want
}

func (c counts) plus(o counts) counts {
	for p := range c {
		c[p] += o[p]
	}
	return c
}

func (c counts) covers(o counts) bool {
	for p := range c {
		if c[p] < o[p] {
			return false
		}
	}
	return true
}

func (c counts) sizes() (sum int) {
	for p, n := range c {
		sum += n * size(p)
	}
	return sum
}

// placed are the instances of a set where the product places them on an empty GPU.
func placed(c counts) []gpu.Instance {
	p, err := mig.Pack(theGPU(), c.wanted())
	if err != nil {
		return nil
	}
	return p.Create
}

// halves are the halves of some GPUs that 7g, 4g and 3g leave. An A100 has a lower half of four memory slices, which
// holds 4g, 3g, two 2g or four 1g, and an upper half, which holds 3g, or three 1g of which two may be one 2g. 7g takes
// both. So a 3g lies best in an upper half, which it fills without loss. TestWhatFits compares that with the product.
func halves(c counts, gpus int) (low, high int, fit bool) {
	high = gpus - c[4]
	low = high - c[3]
	upper := min(c[2], max(0, high))
	low, high = low-(c[2]-upper), high-upper
	return low, high, low >= 0 && high >= 0
}

// fits reports whether instances fit on so many empty GPUs.
func fits(c counts, gpus int) bool {
	low, high, fit := halves(c, gpus)
	return fit && c[1] <= 2*low+high && c[0] <= 4*low+3*high-2*c[1]
}

// everyLayout calls f for each set of instances of which there are no more than the largest numbers on one GPU.
func everyLayout(f func(c counts)) {
	for i := range 8 * 4 * 3 * 2 * 2 {
		f(counts{i % 8, i / 8 % 4, i / 32 % 3, i / 96 % 2, i / 192})
	}
}

// full are the layouts of one GPU to which nothing can be added.
func full() (list []counts) {
	everyLayout(func(c counts) {
		if !fits(c, 1) {
			return
		}
		for p := range c {
			more := c
			more[p]++
			if fits(more, 1) {
				return
			}
		}
		list = append(list, c)
	})
	return list
}

func TestWhatFits(t *testing.T) {
	g := NewWithT(t)
	everyLayout(func(c counts) {
		_, err := mig.Pack(theGPU(), c.wanted())
		g.Expect(fits(c, 1)).To(Equal(err == nil), fmt.Sprint(c))
	})
	g.Expect(full()).To(HaveLen(12))

	// Sums of two to four layouts that are full are all that fits on as many GPUs.
	sums := map[counts]bool{{}: true}
	for gpus := 1; gpus <= 4; gpus++ {
		next := map[counts]bool{}
		for sum := range sums {
			for _, layout := range full() {
				next[sum.plus(layout)] = true
			}
		}
		sums = next
		largest := make([]counts, 0, len(sums))
		for sum := range sums {
			largest = append(largest, sum)
		}
		everySum(gpus, func(c counts) {
			possible := slices.ContainsFunc(largest, func(l counts) bool { return l.covers(c) })
			if fits(c, gpus) != possible {
				t.Fatalf("%v on %d GPUs: possible is %t", c, gpus, possible)
			}
		})
	}
}

// everySum calls f for each set of instances with at most a few more than some GPUs can hold.
func everySum(gpus int, f func(c counts)) {
	for seven := 0; seven <= gpus+1; seven++ {
		for four := 0; four <= gpus+1; four++ {
			for three := 0; three <= 2*gpus+1; three++ {
				for two := 0; two <= 3*gpus+1; two++ {
					for one := max(0, 7*gpus-2*two-3*three-4*four-7*seven-4); one <= 7*gpus+1; one++ {
						f(counts{one, two, three, four, seven})
						if !fits(counts{one, two, three, four, seven}, gpus) {
							break
						}
					}
				}
			}
		}
	}
}
