// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"strings"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// TestAnEditInTheMiddleOfAChangeGivesNobodyWhatIsGone: the agent has destroyed what the device plugin, which goes on, lists, and reports later. What the
// node is to have now is not on demand any more.
func TestAnEditInTheMiddleOfAChangeGivesNobodyWhatIsGone(t *testing.T) {
	static := func(name string) v1alpha1.GPUSharingPolicy {
		return policyOf(name, v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
			ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{Fill: "3g"}},
		}})
	}
	for name, happens := range map[string]func(c *applied, h *host){
		"nothing": func(*applied, *host) {},
		"mode Advise": func(c *applied, _ *host) {
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand.Mode = v1alpha1.OnDemandModeAdvise
			c.Policies[0].Generation++
		},
		"static": func(c *applied, _ *host) {
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand = nil
			c.Policies[0].Generation++
		},
		"7g is not allowed any more": func(c *applied, _ *host) {
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand.Profiles = []v1alpha1.MIGProfile{"3g"}
			c.Policies[0].Generation++
		},
		"another policy": func(c *applied, _ *host) {
			p := static("static")
			p.Spec.Priority = 10
			c.Policies = append(c.Policies, p)
		},
		"no policy for it": func(c *applied, _ *host) {
			c.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"no": "node"}}
			c.Policies[0].Generation++
		},
		"profiles in other words": func(c *applied, _ *host) {
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].Fill = "3g.20gb"
			c.Policies[0].Generation++
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := largeOn(t, "n0")
			h := c.hosts["n0"]
			c.waits("7g.40gb", 0)
			c.asks(h)
			h.converge()
			h.lags, c.waiting, c.edited = true, nil, true
			happens(c, h)
			c.version["n0"]++
			for second := 0; second < 60 && h.HasChangingTaint(); second++ {
				c.decides()
				for range 10 { // what the operator does within a second or so, in which a device plugin that is to look again does not
					c.acts()
				}
				if h.HasChangingTaint() {
					c.passes(time.Second)
				}
			}
			h.lags = h.HasChangingTaint()
			if h.HasChangingTaint() {
				return
			}
			c.waits("3g.20gb", 0) // of another tenant
			c.binds(c.waiting[0], "n0")
			for name, b := range c.bound {
				b.admitted = c.Now
				c.bound[name] = b
			}
			c.edited, c.broken = false, ""
			c.admit()
			if c.broken != "" {
				t.Error(c.broken, "\n", strings.Join(c.told[8:min(len(c.told), 60)], "\n"))
			}
		})
	}
}
