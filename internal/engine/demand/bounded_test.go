// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
)

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
