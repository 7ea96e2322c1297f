// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAnInstanceThatWasUsedLatelyKeepsNoOtherFromGoing: of two, one has been idle for hours and the other one ended a job a minute ago. What is decided is
// that the former goes. The plan takes the latter, which lies where the larger instances are packed away from.
func TestAnInstanceThatWasUsedLatelyKeepsNoOtherFromGoing(t *testing.T) {
	for _, lately := range []int{0, 1} {
		t.Run(fmt.Sprint(lately), func(t *testing.T) {
			g, c := NewWithT(t), newApplied(t, 0)
			h := c.add("n0", sim.A100)
			c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
				ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{
					Fill:     "3g",
					OnDemand: &v1alpha1.MIGOnDemand{Mode: v1alpha1.OnDemandModeApply, Profiles: []v1alpha1.MIGProfile{"2g", "3g"}, IdleSeconds: 3600},
				}},
			}})}
			for range 200 {
				c.step()
			}
			c.edited = false
			instances := slices.SortedFunc(slices.Values(h.devices()[0].State.Instances), func(a, b gpu.Instance) int { return a.Placement.Start - b.Placement.Start })
			g.Expect(instances).To(HaveLen(2))
			c.lastHeld[instances[1-lately].UUID] = c.Now.Add(-5 * time.Hour)
			c.lastHeld[instances[lately].UUID] = c.Now.Add(-time.Minute)
			c.reportHeld(h, h.devices())
			c.version["n0"]++
			c.waits("2g.10gb", 0)
			for range 600 {
				c.step()
			}
			g.Expect(c.broken).To(BeEmpty())
			decided := 0
			for _, told := range c.told {
				if strings.Contains(told, "demand of n0") && strings.Contains(told, "user/") {
					decided++
				}
			}
			g.Expect(c.users()).To(BeZero(), "the pod waits after 10 minutes; decided %d times:\n%s", decided, strings.Join(c.told[8:min(len(c.told), 40)], "\n"))
			g.Expect(decided).To(BeNumerically("<", 3))
		})
	}
}
