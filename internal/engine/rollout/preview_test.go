// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// TestThePreviewIsWhatHappens: what is foretold before the first action, by a paused policy, is what is done later.
func TestThePreviewIsWhatHappens(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting, paused)
	c.hold(h, "train", 0, gpu.WholeGPU)
	c.hold(h, "web", 1, gpu.WholeGPU)
	c.hold(h, "daemon", 1, gpu.WholeGPU)
	h.Pods[len(h.Pods)-1].Controller = "DaemonSet"
	c.Now = c.Now.Add(time.Minute)
	before := rollout.Decide(c.world()).Nodes[0]
	g.Expect(before.Reason).To(Equal(v1alpha1.ReasonPaused))
	g.Expect(before.Advertised).To(Equal(gpusOnly(2)))
	g.Expect(before.Blockers).To(Equal([]node.Blocker{
		{Name: "pod user/daemon", Uses: "GPU 1", Handling: "is not evicted, since it would come back at once; end it"},
		{Name: "pod user/train", Uses: "GPU 0", Handling: "is evicted, as far as PodDisruptionBudgets allow"},
		{Name: "pod user/web", Uses: "GPU 1", Handling: "is evicted, as far as PodDisruptionBudgets allow"},
	}))

	c.reconcile()
	reported := h.GPU.Status.Rollout
	g.Expect(reported.Steps).To(Equal(before.Plan))
	g.Expect(reported.Blockers).To(HaveLen(3))
	g.Expect(reported.Resources).To(Equal([]v1alpha1.ResourceCount{
		{Name: "nvidia.com/gpu", Advertised: 2}, {Name: "nvidia.com/mig-2g.10gb", Expected: 6},
	}))
	g.Expect(h.done).To(BeEmpty())

	c.Policies[0].Spec.Rollout.Paused, c.Policies[0].Generation = false, 2
	var evicted []string
	for range 60 {
		d := c.reconcile()
		for _, a := range d.Actions {
			if e, is := a.(action.Evict); is {
				evicted = append(evicted, "pod "+e.Namespace+"/"+e.Pod)
			}
		}
		if one(d).State == node.Draining && len(one(d).Blockers) == 1 {
			c.end(h, "daemon") // as the preview says
		}
		c.tick(time.Second)
	}
	g.Expect(h.done).To(Equal(before.Plan), "word for word, in that order")
	slices.Sort(evicted)
	var foretold []string
	for _, u := range before.Blockers {
		if strings.HasPrefix(u.Handling, "is evicted") {
			foretold = append(foretold, u.Name)
		}
	}
	g.Expect(slices.Compact(evicted)).To(Equal(foretold))
	after := rollout.Decide(c.world()).Nodes[0]
	g.Expect(after.State).To(Equal(node.UpToDate), after.Message)
	g.Expect(after.Advertised).To(Equal(before.Expected))
	g.Expect(h.Labels[v1alpha1.LabelConfig]).To(Equal(before.ConfigName))
}

func TestThePreviewSaysHowLongIsWaited(t *testing.T) {
	for name, test := range map[string]struct {
		with     func(*v1alpha1.GPUSharingPolicy)
		handling string
	}{
		"until the time for draining is over": {
			func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Drain.TimeoutSeconds = 90 }, "is waited for, up to 1m30s (rollout.drain)",
		},
		"however long": {neverEvicting, "is waited for, however long, while the node takes new pods (rollout.drain.mode Never)"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(test.with)
			c.hold(h, "train", 0, gpu.WholeGPU)
			g.Expect(rollout.Decide(c.world()).Nodes[0].Blockers).To(Equal([]node.Blocker{
				{Name: "pod user/train", Uses: "GPU 0", Handling: test.handling},
			}))
		})
	}
}
