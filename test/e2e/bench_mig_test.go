// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// migChange is a change of the first of two A100, both idle.
type migChange struct {
	from, to string // spec.sharing
	want     map[string]int64
}

func migChanges() map[string]migChange {
	const (
		whole    = `{strategy: Exclusive}`
		sevenths = `{strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g.5gb}]}}`
		mix      = `{strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, instances: [
			{profile: 3g.20gb, count: 1}, {profile: 2g.10gb, count: 2}]}]}}`
	)
	return map[string]migChange{
		"7×1g → 3g+2g+2g": {sevenths, mix, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-2g.10gb": 2}},
		"whole → 7×1g":    {whole, sevenths, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-1g.5gb": 7}},
	}
}

// latencies are how long the simulated driver takes; which of them were observed and where, test/bench says.
func latencies() map[string]time.Duration {
	return map[string]time.Duration{
		"nvmlInit":                                 10 * time.Millisecond,
		"nvmlDeviceSetMigMode":                     4200 * time.Millisecond,
		"nvmlDeviceCreateGpuInstance":              100 * time.Millisecond,
		"nvmlDeviceCreateGpuInstanceWithPlacement": 100 * time.Millisecond,
		"nvmlGpuInstanceCreateComputeInstance":     50 * time.Millisecond,
		"nvmlComputeInstanceDestroy":               50 * time.Millisecond,
		"nvmlGpuInstanceDestroy":                   100 * time.Millisecond,
		simdriver.GPUReset:                         4200 * time.Millisecond,
	}
}

// migCost is where the time of a change goes. The driver's calls are one after the other, since one GPU changes.
type migCost struct {
	total time.Duration
	// before is from kubectl's or the API's first byte to the first call that changes the GPU, between what passes from
	// there to the last beside the calls themselves, and after from the last until the node offers the instances.
	before, driver, between, after time.Duration
	calls                          int
}

func costOf(ctx context.Context, c migChange) migCost {
	GinkgoHelper()
	log := callsLog()
	Expect(os.RemoveAll(log)).To(Succeed())
	began := time.Now().UTC()
	total := until(ctx, c.want, func() { share(ctx, c.to) })
	raw, err := os.ReadFile(log)
	Expect(err).NotTo(HaveOccurred())
	cost := migCost{total: total}
	var first, last time.Time
	for line := range strings.Lines(string(raw)) {
		fields := strings.Fields(line)
		at, err := time.Parse("2006-01-02 15:04:05.000", began.Format(time.DateOnly)+" "+fields[0])
		Expect(err).NotTo(HaveOccurred())
		takes := latencies()[strings.Join(fields[2:len(fields)-2], " ")]
		if first.IsZero() {
			first = at.Add(-takes) // a call is logged when it is done
		}
		last = at
		cost.driver += takes
		cost.calls++
	}
	cost.before = first.Sub(began)
	cost.between = last.Sub(first) - cost.driver
	cost.after = total - last.Sub(began)
	return cost
}

// told is the medians of the parts.
func told(all []migCost) string {
	part := func(of func(migCost) time.Duration) []time.Duration {
		var list []time.Duration
		for _, c := range all {
			list = append(list, of(c))
		}
		return list
	}
	median := func(of func(migCost) time.Duration) string {
		m, _ := summary(part(of))
		return fmt.Sprintf("%.2f s", m.Seconds())
	}
	_, worst := summary(part(func(c migCost) time.Duration { return c.total }))
	calls := 0
	if len(all) > 0 {
		calls = all[0].calls
	}
	return fmt.Sprintf("%d runs, %s to allocatable (worst %s): until the first call %s, the driver's %d calls %s, "+
		"between them %s, from the last call until the kubelet has published %s", len(all),
		median(func(c migCost) time.Duration { return c.total }), shown(worst),
		median(func(c migCost) time.Duration { return c.before }), calls, median(func(c migCost) time.Duration { return c.driver }),
		median(func(c migCost) time.Duration { return c.between }), median(func(c migCost) time.Duration { return c.after }))
}
