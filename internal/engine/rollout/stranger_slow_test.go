// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// slowly lets seconds pass beside a kubelet that publishes what the node offers every 10 seconds, until the taint of a change has come and gone. The node must then
// list what is there.
func (c *applied) slowly(t *testing.T, h *host, phase int, happens ...func()) {
	t.Helper()
	published, sick, tainted := maps.Clone(h.Allocatable), maps.Clone(h.Unallocatable), false
	for second := range 1500 {
		for _, do := range happens {
			do()
		}
		is, unhealthy := h.Allocatable, h.Unallocatable
		if (second+phase)%10 == 0 {
			published, sick = maps.Clone(is), maps.Clone(unhealthy)
		}
		h.Allocatable, h.Unallocatable = maps.Clone(published), maps.Clone(sick)
		c.version[h.Name]++
		for range 3 {
			c.acts()
			if tainted = tainted || h.HasChangingTaint(); tainted && !h.HasChangingTaint() {
				if node.AdvertisesNoGPU(&node.View{Node: h.Node}) {
					return // so nobody comes
				}
				listed, there := slices.Sorted(slices.Values(h.plugin.uuids)), slices.Sorted(slices.Values(h.instances()))
				if !slices.ContainsFunc(h.Pods, playedBy(pluginLabel)) || !h.plugin.running || !slices.Equal(listed, there) {
					t.Errorf("phase %d: the node takes pods, and its device plugin lists %v of %v, running %v:\n%s", phase, listed, there, h.plugin.running, strings.Join(c.told[max(0, len(c.told)-14):], "\n"))
				}
				return
			}
		}
		h.Allocatable, h.Unallocatable = is, unhealthy
		c.version[h.Name]++
		c.passes(time.Second)
	}
	t.Errorf("phase %d: the change does not end: %v %s", phase, tainted, h.waits())
}

func TestANodeTakesPodsOnceItsDevicePluginListsWhatIsThere(t *testing.T) {
	for _, swap := range []bool{false, true} {
		for phase := range 10 {
			t.Run(fmt.Sprint(swap, phase), func(t *testing.T) {
				c := largeOf(t, []sim.Model{sim.A100, sim.A100}, "n0")
				h := c.hosts["n0"]
				demands := func(of ...string) {
					h.GPU.Status.Demand = nil
					for at, profile := range of {
						h.GPU.Status.Demand = append(h.GPU.Status.Demand, v1alpha1.GPUDemand{UUID: h.devices()[at].UUID, Instances: []v1alpha1.InstanceCount{{Profile: profile, Count: map[string]int32{"3g.20gb": 2, "7g.40gb": 1}[profile]}}, SinceTime: metav1.NewTime(c.Now)})
					}
					c.version["n0"]++
				}
				demands("7g.40gb", "3g.20gb")
				c.slowly(t, h, phase)
				if !swap {
					return
				}
				for range 60 {
					c.acts()
					c.passes(time.Second)
				}
				demands("3g.20gb", "7g.40gb")
				c.slowly(t, h, phase)
			})
		}
	}
}

// TestALayoutThatMovesBetweenGPUs is no matter of pods that wait: an administrator swaps the layouts of two GPUs, so that the node offers as much as before.
func TestALayoutThatMovesBetweenGPUs(t *testing.T) {
	for phase := range 10 {
		t.Run(fmt.Sprint(phase), func(t *testing.T) {
			c := newApplied(t, 0)
			h := c.add("n0", sim.A100, sim.A100)
			layouts := func(first, second v1alpha1.MIGProfile) *v1alpha1.MIG {
				return &v1alpha1.MIG{ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{
					{GPUs: &v1alpha1.GPUMatch{Indexes: []int32{0}}, Fill: first}, {GPUs: &v1alpha1.GPUMatch{Indexes: []int32{1}}, Fill: second},
				}}
			}
			c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: layouts("7g", "3g")})}
			for range 200 {
				c.acts()
				c.passes(time.Second)
			}
			c.Policies[0].Spec.Sharing.MIG = layouts("3g", "7g")
			c.Policies[0].Generation++
			c.slowly(t, h, phase)
		})
	}
}

// TestAChangeThatFails leaves the node with instances that are made anew, as many as before. The driver cannot make what the pod waits for.
func TestAChangeThatFails(t *testing.T) {
	for phase := range 10 {
		t.Run(fmt.Sprint(phase), func(t *testing.T) {
			c := largeOn(t, "n0")
			h := c.hosts["n0"]
			h.hardware.Fail = func(op sim.Op, _ string) error {
				if op == sim.OpCreateInstance && h.GPU.Status.Rollout.Failed == nil {
					return errors.New("the driver fails")
				}
				return nil
			}
			c.waits("7g.40gb", 0)
			c.edited = true
			c.schedule()
			c.slowly(t, h, phase, c.decides)
		})
	}
}
