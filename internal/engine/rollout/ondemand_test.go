// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// advised is MIG on demand in mode Advise, in a history: the layouts of policies have it, and their statuses say what
// pods wait for.
type advised struct {
	memory           pure.Memory
	attempts         demand.Attempts
	planned, reviews int
}

// look gives the policies that a reconcile sees their layouts on demand, and decides for them.
func (a *advised) look(s *cluster.Snapshot) {
	if a == nil {
		return
	}
	s.Policies = slices.Clone(s.Policies)
	for i := range s.Policies {
		p := s.Policies[i].DeepCopy()
		s.Policies[i] = *p
		if mig := p.Spec.Sharing.MIG; mig != nil {
			mig.Layouts[0].OnDemand = &v1alpha1.MIGOnDemand{
				Mode: v1alpha1.OnDemandModeAdvise, Profiles: []v1alpha1.MIGProfile{"1g", "2g", "3g"}, IdleSeconds: 300,
				Reserve: []v1alpha1.MIGReserve{{Profile: "1g", Count: 1}},
			}
		}
		if demand.Of(p) == nil {
			continue
		}
		before := ""
		if a.reviews%100 == 0 {
			before = canonical(s.Nodes)
		}
		of := demand.Review(&a.memory, longIdle(s), demand.Asked{Policy: p, Pods: manyWait(s), Attempts: a.attempts})[p.Name]
		status, is := of.Status, of.Condition
		if before != "" && canonical(s.Nodes) != before {
			panic("a review changes what it looks at")
		}
		p.Status.OnDemand = status
		p.Status.Conditions = append(p.Status.Conditions, is)
		s.Policies[i] = *p
		a.reviews, a.planned = a.reviews+1, a.planned+int(status.Planned)
	}
}

// longIdle is what a reconcile sees, of which the agents report too since when no pod has had each instance.
func longIdle(s *cluster.Snapshot) *cluster.Snapshot {
	seen := *s
	seen.Nodes = slices.Clone(s.Nodes)
	for n := range seen.Nodes {
		status := &seen.Nodes[n].GPU.Status
		status.Devices = slices.Clone(status.Devices)
		for d := range status.Devices {
			instances := slices.Clone(status.Devices[d].Instances)
			for i := range instances {
				instances[i].LastHeldTime = metav1.NewTime(s.Now.Add(-time.Hour))
			}
			status.Devices[d].Instances = instances
		}
	}
	return &seen
}

// manyWait are pods that wait for instances of each profile.
func manyWait(s *cluster.Snapshot) (pods []*corev1.Pod) {
	for _, name := range []string{"nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.6gb"} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name[len("nvidia.com/"):]}}
		pod.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
			corev1.ResourceName(name): resource.MustParse("1"),
		}}}}
		pod.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, LastTransitionTime: metav1.NewTime(s.Now),
		}}
		pods = append(pods, pod)
	}
	return pods
}

// TestTheAgentIsAskedForIdleTimes while a policy has MIG on demand.
func TestTheAgentIsAskedForIdleTimes(t *testing.T) {
	g := NewWithT(t)
	sharing := mig(v1alpha1.MIGInstances{Profile: "1g.5gb", Count: 7})
	sharing.MIG.Layouts[0].OnDemand = &v1alpha1.MIGOnDemand{Mode: v1alpha1.OnDemandModeAdvise, Profiles: []v1alpha1.MIGProfile{"1g"}}
	c := fleet(1, sharing)
	c.run(60)
	g.Expect(c.hosts["n0"].GPU.Spec.OnDemand).To(Equal(v1alpha1.OnDemandModeAdvise))
	asked := c.hosts["n0"].GPU.Spec.ChangeTime
	c.setSharing(mig(v1alpha1.MIGInstances{Profile: "1g.5gb", Count: 7}))
	c.run(30)
	g.Expect(c.hosts["n0"].GPU.Spec.OnDemand).To(BeEmpty())
	g.Expect(c.hosts["n0"].GPU.Spec.ChangeTime).To(Equal(asked), "no GPU changes for it")
}

// TestAGPUNodeThatIsMadeAnewTakesNoInstanceOnDemand: with its status it is forgotten that pods waited for what is there. Like
// any change for demand, the way back to rest waits until nobody uses an instance.
func TestAGPUNodeThatIsMadeAnewTakesNoInstanceOnDemand(t *testing.T) {
	g := NewWithT(t)
	sharing := mig(v1alpha1.MIGInstances{Profile: "7g.40gb", Count: 1})
	sharing.MIG.Layouts[0].OnDemand = &v1alpha1.MIGOnDemand{Mode: v1alpha1.OnDemandModeApply, Profiles: []v1alpha1.MIGProfile{"1g", "7g"}}
	c, h := toMIG(evicting)
	c.setSharing(sharing)
	c.run(120)
	var decided []v1alpha1.GPUDemand
	for _, d := range h.devices() {
		decided = append(decided, v1alpha1.GPUDemand{UUID: d.UUID, SinceTime: metav1.NewTime(c.Now), Instances: []v1alpha1.InstanceCount{{Profile: "1g.5gb", Count: 7}}})
	}
	h.GPU.Status.Demand = decided
	c.run(120)
	has := h.instances()
	g.Expect(has).To(HaveLen(14))
	c.hold(h, "train", 0, h.devices()[0].State.Instances[0].ID)
	c.tick(time.Minute)
	c.makeGPUNode(h)
	h.report()
	for range 600 {
		c.during(time.Second, time.Second)
		g.Expect(h.isKept()).To(BeFalse(), h.waits())
	}
	g.Expect(c.evicted).To(BeEmpty())
	g.Expect(h.instances()).To(Equal(has))
	c.end(h, "train")
	c.run(240)
	g.Expect(h.instances()).To(HaveLen(2), h.waits())
}

// TestAdviceChangesNothing: with MIG on demand in mode Advise the controller writes what it writes without. EFFECTS=advice plays all seeds of
// make effects.
func TestAdviceChangesNothing(t *testing.T) {
	g := NewWithT(t)
	a := &advised{attempts: demand.Attempts{}}
	var seeds []uint64
	for n := uint64(1); n <= 220; n++ {
		seeds = append(seeds, n)
		if n > 200 {
			seeds[n-1] += onDriver
		}
	}
	if os.Getenv("EFFECTS") == "advice" {
		seeds = recordedSeeds()
	}
	for _, seed := range seeds {
		e := &effects{}
		_, _ = playing(historyOf(seed), false, watching{effects: e, advised: a})
		for i := range e.lines { // the agent is asked for lastHeldTime beside
			e.lines[i] = strings.ReplaceAll(e.lines[i], `,"onDemand":"Advise"`, "")
		}
		if !slices.Equal(e.lines, effectsOf(seed)) {
			t.Fatalf("seed %d has other effects with advice", seed)
		}
	}
	g.Expect(a.reviews).To(BeNumerically(">", 1000))
	g.Expect(a.planned).To(BeNumerically(">", 1000))
}

// TestAnAgentTakesNothingFromANodeThatTakesPodsAgain once it is back, or reports again: it does not see what their init containers hold. The
// change begins anew, with a drain.
func TestAnAgentTakesNothingFromANodeThatTakesPodsAgain(t *testing.T) {
	for name, meanwhile := range map[string]func(*site, *host) (back func()){
		"the agent is lost": func(_ *site, h *host) func() {
			h.AgentReady = false
			return func() { h.AgentReady = true }
		},
		"no device plugin can be configured": func(c *site, _ *host) func() {
			was := c.Plugin
			c.Plugin.Ready, c.Plugin.Reason, c.Plugin.Message = false, v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy"
			return func() { c.Plugin = was }
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			h.partitionedByHand()
			byHand := h.instances()
			c.tick(time.Second)
			h.lags = true
			c.setPolicy("research", mig(count("1g", 7)))
			for range 60 {
				if len(h.GPU.Spec.Devices) == 0 {
					c.steps(1)
				}
			}
			g.Expect(h.GPU.Spec.Devices).NotTo(BeEmpty())
			back := meanwhile(c, h)
			c.during(time.Hour, time.Minute)
			g.Expect(h.isKept()).To(BeFalse())
			back()
			h.lags = false
			h.converge()
			g.Expect(h.instances()).To(Equal(byHand))
			c.run(120)
			g.Expect(h.instances()).To(HaveLen(7))
		})
	}
}

// TestALabelOfAConfigurationThatIsGoneIsTakenBack on a node whose policy cannot be honoured: the operator was removed by
// force with its ConfigMap, and installed again.
func TestALabelOfAConfigurationThatIsGoneIsTakenBack(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.T4)
	c.setPolicy("research", timeSlicing(4))
	c.run(120)
	g.Expect(h.Labels).To(HaveKey(v1alpha1.LabelConfig))
	c.Configs, c.ConfigsCopy = nil, nil
	c.Policies[0].Generation++
	c.Policies[0].Spec.Sharing = mig(count("1g", 7))
	d := c.during(10*time.Minute, time.Minute)
	hasState(g, d, node.Unsupported)
	g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
}
