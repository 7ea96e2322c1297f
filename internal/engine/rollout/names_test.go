// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAPodThatHasAnotherInstanceHoldsUpNoDemand: it came an hour ago and is reported, on the other GPU.
func TestAPodThatHasAnotherInstanceHoldsUpNoDemand(t *testing.T) {
	g, c := NewWithT(t), largeOf(t, []sim.Model{sim.A100, sim.A100}, "n0")
	h := c.hosts["n0"]
	c.hold(h, "p", 1, h.devices()[1].State.Instances[0].ID)
	p := &h.Pods[len(h.Pods)-1]
	p.Scheduled, p.Requests = c.Now.Add(-time.Hour), map[string]int64{"nvidia.com/mig-3g.20gb": 1}
	h.GPU.Status.Demand = []v1alpha1.GPUDemand{{UUID: h.devices()[0].UUID, Instances: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}, SinceTime: metav1.NewTime(c.Now)}}
	c.version["n0"]++
	for range 60 {
		c.acts()
		c.passes(time.Second)
	}
	g.Expect(c.broken).To(BeEmpty())
	g.Expect(h.devices()[0].State.Instances).To(ConsistOf(HaveField("Profile", "7g.40gb")))
}

// TestPodsThatComeAndGoHoldUpNoChange of another GPU, as long as the agent reports each at once: names of a ReplicaSet's pods do not recur.
func TestPodsThatComeAndGoHoldUpNoChange(t *testing.T) {
	c, h := toMIG(onGPUs(0), neverEvicting)
	for n := range 100 {
		name := fmt.Sprint("job-", n)
		if !h.HasChangingTaint() {
			c.hold(h, name, 1, gpu.WholeGPU)
			h.Pods[len(h.Pods)-1].Requests = gpusOnly(1)
		}
		c.during(15*time.Second, time.Second)
		if h.HasChangingTaint() || h.devices()[0].State.MIG {
			return
		}
		c.end(h, name)
	}
	t.Errorf("not begun for 25 minutes: %s", h.waits())
}

// TestPodsThatComeAndGoFailNoDemand: each is reported at once and has what no change destroys. What has not begun after 20 s counts as failed.
func TestPodsThatComeAndGoFailNoDemand(t *testing.T) {
	c := largeOf(t, []sim.Model{sim.A100, sim.A100}, "n0")
	h := c.hosts["n0"]
	busy := h.devices()[1]
	c.waits("7g.40gb", 0)
	for n := range 40 {
		name := fmt.Sprint("job-", n)
		if !h.HasChangingTaint() {
			c.hold(h, name, 1, busy.State.Instances[0].ID)
			h.Pods[len(h.Pods)-1].Requests = map[string]int64{"nvidia.com/mig-1g.5gb": 1}
			c.version["n0"]++
		}
		for range 15 {
			c.step()
		}
		if len(h.devices()[0].State.Instances) == 1 {
			return
		}
		c.end(h, name)
		c.version["n0"]++
	}
	t.Errorf("not made in 10 minutes: %s", h.waits())
}

// TestPodsThatTolerateTheTaintKeepNoNodeTainted: they come and go on a GPU that stays as it is, and each is reported at once. rollout.drain has a
// time after which the node takes pods again.
func TestPodsThatTolerateTheTaintKeepNoNodeTainted(t *testing.T) {
	for name, controller := range map[string]string{"names that do not recur": "ReplicaSet", "names that may": "StatefulSet"} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting, onGPUs(0))
			for n := range 100 {
				name := fmt.Sprint("pod-", n)
				c.hold(h, name, 1, gpu.WholeGPU)
				p := &h.Pods[len(h.Pods)-1]
				p.Requests, p.Tolerates, p.Controller = gpusOnly(1), true, controller
				c.during(15*time.Second, time.Second)
				c.end(h, name)
			}
			g.Expect(h.Taints).To(BeEmpty(), h.waits())
			g.Expect(h.devices()[0].State.MIG).To(Equal(controller == "ReplicaSet"), h.waits())
		})
	}
}

// TestWhatABoundPodMayBeGivenIsNoReboot: the status says what the node waits for.
func TestWhatABoundPodMayBeGivenIsNoReboot(t *testing.T) {
	g, c := NewWithT(t), largeOn(t, "n0")
	h := c.hosts["n0"]
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "user", Name: "p", UID: "p", Controller: "ReplicaSet", GPU: true, Scheduled: c.Now.Add(-time.Minute), Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1},
	})
	h.GPU.Status.Demand = []v1alpha1.GPUDemand{{UUID: h.devices()[0].UUID, Instances: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}, SinceTime: metav1.NewTime(c.Now)}}
	c.version["n0"]++
	for range 10 {
		c.acts()
		c.passes(time.Second)
	}
	g.Expect(h.waits()).To(ContainSubstring("pod user/p"))
	g.Expect(h.waits()).NotTo(ContainSubstring("reboot"))
}

// TestAPodThatHasJustComeHoldsUpOnlyWhatItMayBeGiven, if the agent reports one of its name: which may be a former one.
func TestAPodThatHasJustComeHoldsUpOnlyWhatItMayBeGiven(t *testing.T) {
	for resource, waits := range map[string]bool{"nvidia.com/mig-3g.20gb": false, "nvidia.com/mig-2g.10gb": true, "nvidia.com/gpu": true} {
		t.Run(resource, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(onGPUs(0), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("3g.20gb", 1), count("2g.10gb", 2)) })
			c.run(100)
			at := slices.IndexFunc(h.devices()[0].State.Instances, func(i gpu.Instance) bool { return i.Profile == "3g.20gb" })
			c.hold(h, "db-0", 0, h.devices()[0].State.Instances[at].ID)
			p := &h.Pods[len(h.Pods)-1]
			p.Controller, p.Requests = "StatefulSet", map[string]int64{resource: 1}
			c.Policies[0].Spec.Sharing = mig(count("3g.20gb", 1), count("1g.5gb", 4))
			c.during(15*time.Second, time.Second)
			g.Expect(h.devices()[0].State.Instances).To(HaveLen(map[bool]int{false: 5, true: 3}[waits]), h.waits())
			c.during(15*time.Second, time.Second)
			g.Expect(h.devices()[0].State.Instances).To(HaveLen(5), h.waits())
		})
	}
}
