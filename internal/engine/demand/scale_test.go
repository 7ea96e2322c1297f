// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
)

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
