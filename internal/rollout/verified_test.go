// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"math/rand/v2"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// TestAChangeIsOneGeneration: that a wish was verified is no new generation, so the agent is not woken for it.
func TestAChangeIsOneGeneration(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	found := h.GPU.Generation
	d, _ := c.run(60)
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateUpToDate))
	g.Expect(h.GPU.Generation).To(Equal(found + 1))
	first := h.GPU.Spec.ConfigName
	g.Expect(rollout.SpecOf(&h.GPU).LastGood.ConfigName).To(Equal(first))
	g.Expect(h.GPU.Spec.LastGood).To(BeNil(), "it is written with the next wish")

	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
	c.steps(1)
	g.Expect(h.GPU.Generation).To(Equal(found + 2))
	g.Expect(h.GPU.Spec.LastGood.ConfigName).To(Equal(first))
	g.Expect(h.GPU.Annotations).NotTo(HaveKey(v1alpha1.AnnotationVerified), "the new wish is not verified")
	d, _ = c.run(60)
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateUpToDate))
	g.Expect(h.GPU.Generation).To(Equal(found + 2))
	g.Expect(rollout.SpecOf(&h.GPU).LastGood.ConfigName).To(Equal(h.GPU.Spec.ConfigName))

	c.Policies = nil
	c.run(60)
	g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
	g.Expect(h.GPU.Annotations).NotTo(HaveKey(v1alpha1.AnnotationVerified))
}

// TestANodeThatBreaksOnceItWasVerified is degraded, is waited for however long it takes, and is what a later wish that fails goes back
// to, though it did not work when that came.
func TestANodeThatBreaksOnceItWasVerified(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.run(60)
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(8), 2
	c.run(60)
	good := h.GPU.Spec.ConfigName
	h.broken = func(rollout.World) bool { return true }
	h.plugin.running = false
	for range 12 {
		c.tick(10 * time.Minute)
		d := c.pass()
		if d.Nodes[0].State == rollout.StateSelecting { // the plugin is started anew
			continue
		}
		g.Expect(d.Nodes[0].State).To(Equal(rollout.StateDegraded))
		g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonNotAdvertised))
		g.Expect(h.GPU.Spec.Failed).To(BeNil())
	}
	g.Expect(c.writes["rollout.DeletePod"]).To(Equal(1))
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = timeSlicing(2), 3
	d, _ := c.run(400)
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateFailed))
	g.Expect(h.Labels[v1alpha1.LabelConfig]).To(Equal(good))
}

// TestAWishThatSomebodyEditsIsVerifiedAnew: what was verified is what the annotation names, and nothing else.
func TestAWishThatSomebodyEditsIsVerifiedAnew(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.run(60)
	h.GPU.Spec.ConfigName = "mine"
	h.GPU.Generation++
	g.Expect(rollout.SpecOf(&h.GPU).LastGood).To(BeNil())
	d, _ := c.run(60)
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateUpToDate))
	g.Expect(rollout.SpecOf(&h.GPU).LastGood.ConfigName).To(Equal(h.GPU.Spec.ConfigName))
}

// TestWhatIsStoredIsWhatWasWanted writes specs one after the other, as rollouts do and as they do not.
func TestWhatIsStoredIsWhatWasWanted(t *testing.T) {
	g, random := NewWithT(t), rand.New(rand.NewPCG(1, 0))
	some := func() v1alpha1.NodeSharing {
		return v1alpha1.NodeSharing{
			PolicyName: []string{"a", "b"}[random.IntN(2)], ConfigName: []string{"", "x", "y"}[random.IntN(3)],
			Devices: []v1alpha1.DeviceSpec{{UUID: []string{"GPU-0", "GPU-1"}[random.IntN(2)]}},
		}
	}
	n := &v1alpha1.GPUNode{}
	recorded := 0
	for range 5000 {
		wish := some()
		want := v1alpha1.GPUNodeSpec{PolicyName: wish.PolicyName, ConfigName: wish.ConfigName, Devices: wish.Devices}
		switch random.IntN(4) {
		case 0:
			want.LastGood = new(some())
		case 1:
			want.LastGood = &wish
		case 2:
			want = rollout.SpecOf(n)
			want.LastGood = &v1alpha1.NodeSharing{PolicyName: want.PolicyName, ConfigName: want.ConfigName, Devices: want.Devices}
		}
		before := n.Spec
		spec, verified := rollout.Store(n, want)
		n.Spec, n.Annotations = spec, map[string]string{v1alpha1.AnnotationVerified: verified}
		g.Expect(rollout.SpecOf(n)).To(Equal(want))
		if verified != "" {
			recorded++
			g.Expect(spec.LastGood).To(Equal(before.LastGood))
		}
	}
	g.Expect(recorded).To(BeNumerically(">", 1000))
}
