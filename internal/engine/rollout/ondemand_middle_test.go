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

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// asks lets the change of a node for a pod come to where the agent is asked.
func (c *applied) asks(h *host) {
	was := h.GPU.Generation
	for range 100 {
		c.schedule()
		c.admit()
		c.decides()
		if c.acts(); h.GPU.Generation != was {
			return
		}
		c.passes(time.Second)
	}
	c.t.Fatal("the agent is not asked: ", strings.Join(c.told, "\n"))
}

// TestANodeWhoseAgentIsLostInTheMiddleOffersNoInstanceThatIsGone: the agent has destroyed what the device plugin, which goes on, listed, and dies before it
// reports. Once the slot has expired the node takes pods again.
func TestANodeWhoseAgentIsLostInTheMiddleOffersNoInstanceThatIsGone(t *testing.T) {
	g, c := NewWithT(t), largeOn(t, "n0")
	h := c.hosts["n0"]
	c.waits("7g.40gb", 0)
	c.asks(h)
	h.converge()
	h.AgentReady = false
	c.waiting = nil
	c.waits("3g.20gb", 0)
	for range 720 {
		c.steps(5 * time.Second)
	}
	g.Expect(c.broken).To(BeEmpty(), strings.Join(c.told, "\n"))
}

// TestAPodThatToleratesEverythingOpensNoNodeInTheMiddle: it is bound while the agent destroys the instances, and the taint goes while the device plugin
// still lists what is gone.
func TestAPodThatToleratesEverythingOpensNoNodeInTheMiddle(t *testing.T) {
	g, c := NewWithT(t), largeOn(t, "n0")
	h := c.hosts["n0"]
	c.waits("7g.40gb", 0)
	c.asks(h)
	h.converge() // it reports a moment later
	h.lags = true
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "user", Name: "tolerates", UID: "tolerates", Controller: "ReplicaSet", GPU: true, Tolerates: true, Scheduled: c.Now, Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1},
	})
	c.version["n0"]++
	c.waits("3g.20gb", 0) // of another tenant
	for range 5 {
		c.step()
	}
	h.lags = false
	for range 60 {
		c.step()
	}
	g.Expect(c.broken).To(BeEmpty(), strings.Join(c.told, "\n"))
}

// TestPodsThatAreNeverReportedFailNoDemand: a tenant binds them itself (spec.nodeName) and they ask for a resource that the node never had, which its kubelet
// lets pass (kubernetes pkg/kubelet/lifecycle/predicate.go, removeMissingExtendedResources). So they have nothing that the change takes.
func TestPodsThatAreNeverReportedFailNoDemand(t *testing.T) {
	c := largeOn(t, "n0")
	h := c.hosts["n0"]
	c.waits("7g.40gb", 0)
	for n := range 40 {
		name := fmt.Sprint("job-", n)
		h.Pods = append(h.Pods, cluster.Pod{
			Namespace: "user", Name: name, UID: name, Controller: "Job", GPU: true, Tolerates: true, Scheduled: c.Now, Requests: map[string]int64{"nvidia.com/mig-1g.10gb": 1},
		})
		c.version["n0"]++
		for range 15 {
			c.step()
		}
		if len(h.devices()[0].State.Instances) == 1 {
			return
		}
		c.end(h, name)
	}
	t.Errorf("not made in 10 minutes: %s; %v", h.waits(), says(h.GPU.Status.Demand))
}

// TestANodeTakesPodsAgainOnlyOnceItOffersNothingThatMayBeGone: the device plugin stops first, and the kubelet publishes that.
func TestANodeTakesPodsAgainOnlyOnceItOffersNothingThatMayBeGone(t *testing.T) {
	now := time.Now()
	for name, is := range map[string]struct {
		label   string
		runs    bool
		offers  int64
		stopped time.Duration // ago
		waits   bool
	}{
		"the plugin runs":                   {"true", true, 2, 0, true},
		"the kubelet admits a pod":          {"true", true, 2, 0, true},
		"it is ending":                      {cluster.StoppedValue, true, 2, time.Second, true},
		"the kubelet has not published yet": {cluster.StoppedValue, false, 2, time.Second, true},
		"it has":                            {cluster.StoppedValue, false, 0, time.Second, false},
		"it does not end in time":           {cluster.StoppedValue, true, 2, time.Hour, false},
		"another controller stops it":       {"paused-for-driver-upgrade", true, 2, time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			v := &node.View{
				Snapshot: &cluster.Snapshot{Now: now, Plugin: cluster.DevicePlugin{ClusterPolicy: true}},
				Node: &cluster.Node{
					Labels: map[string]string{pluginLabel: is.label}, Annotations: map[string]string{v1alpha1.AnnotationStopped: pluginLabel},
					Allocatable: map[string]int64{"nvidia.com/mig-3g.20gb": is.offers}, MarkedAtWorkSince: now.Add(-is.stopped),
				},
			}
			v.Node.GPU.Spec.OnDemand = v1alpha1.OnDemandModeApply
			if is.runs {
				v.Node.Pods = []cluster.Pod{{UID: "plugin", NodeSelector: map[string]string{pluginLabel: "true"}, NVIDIA: true, Controller: "DaemonSet"}}
			}
			if name == "the kubelet admits a pod" {
				v.Node.Pods = append(v.Node.Pods, cluster.Pod{UID: "comes", GPU: true, Scheduled: now})
				v.Node.Taints = []corev1.Taint{{Key: v1alpha1.TaintChanging, TimeAdded: new(metav1.NewTime(now))}}
			}
			first, _, waits := node.LooksFirst(v, []action.Action{action.Untaint{Node: "n0"}})
			NewWithT(t).Expect(waits).To(Equal(is.waits))
			NewWithT(t).Expect(first).To(HaveLen(map[string]int{"the plugin runs": 1}[name]))
		})
	}
}

// TestThePluginDoesNotStopBesideClientsOfNVIDIAsMPSDaemon, which ends with it (2^40+970167): a GPUNode that was lost does not tell what the plugin lists.
func TestThePluginDoesNotStopBesideClientsOfNVIDIAsMPSDaemon(t *testing.T) {
	holders, daemon := []gpu.Holder{{Namespace: "user", Pod: "client", Instance: gpu.WholeGPU}}, gpu.State{MPS: &gpu.MPSDaemon{Resource: "nvidia.com/gpu", External: true}}
	for name, is := range map[string]struct {
		devices []gpu.Device
		asks    bool // a pod, for a GPU
		stops   bool
	}{
		"nobody uses it":            {[]gpu.Device{{State: daemon}}, false, true},
		"its server alone":          {[]gpu.Device{{State: daemon, Processes: []gpu.Process{{PID: 1, Name: gpu.MPSServer}}}}, false, true},
		"a pod":                     {[]gpu.Device{{State: daemon, Holders: holders}}, false, false},
		"a process":                 {[]gpu.Device{{State: daemon, Processes: []gpu.Process{{PID: 1}}}}, false, false},
		"a pod is not reported yet": {[]gpu.Device{{State: daemon}}, true, false},
		"no GPU is reported yet":    {nil, true, false},
		"there is no such daemon":   {[]gpu.Device{{Holders: holders}}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			n := &cluster.Node{
				Labels: map[string]string{pluginLabel: "true"}, Annotations: map[string]string{v1alpha1.AnnotationInstances: "0123456789abcdef"},
				Pods: []cluster.Pod{
					{NodeSelector: map[string]string{mpsLabel: "true"}, NVIDIA: true, Controller: "DaemonSet"},
					{Namespace: "user", Name: "asks", GPU: is.asks, Running: true},
				},
			}
			n.GPU.Status.Devices = plan.Reported(is.devices)
			v := node.NewView(&cluster.Snapshot{Now: time.Now(), Plugin: cluster.DevicePlugin{ClusterPolicy: true}}, n)
			first, _, waits := node.LooksFirst(v, []action.Action{action.Untaint{Node: "n0"}})
			NewWithT(t).Expect(waits).To(Equal(is.stops))
			NewWithT(t).Expect(first).To(HaveLen(map[bool]int{true: 1}[is.stops]))
		})
	}
}

// TestAChangeThatIsTakenBackInTheMiddle, as when the feature gate is turned off: the agent has destroyed what it reported, and that is asked for again.
func TestAChangeThatIsTakenBackInTheMiddle(t *testing.T) {
	g, c := NewWithT(t), largeOn(t, "n0")
	h := c.hosts["n0"]
	c.waits("7g.40gb", 0)
	c.asks(h)
	h.converge()
	h.lags, h.GPU.Status.Demand, c.waiting = true, nil, nil
	c.version["n0"]++
	c.waits("3g.20gb", 0)
	for n := range 60 {
		h.lags = n < 5
		c.schedule()
		c.admit()
		c.acts()
		c.passes(time.Second)
	}
	g.Expect(c.broken).To(BeEmpty(), strings.Join(c.told, "\n"))
	g.Expect(c.users() + len(c.bound)).To(BeZero())
}

// TestAPodThatRunsWithoutTheInstanceItAsksForPinsNone: a tenant binds it itself (spec.nodeName) before the node ever had such, which its kubelet lets pass
// (kubernetes pkg/kubelet/lifecycle/predicate.go, removeMissingExtendedResources).
func TestAPodThatRunsWithoutTheInstanceItAsksForPinsNone(t *testing.T) {
	g, c := NewWithT(t), largeOf(t, []sim.Model{sim.A100}, "n0", "n1", "n2", "n3")
	for name, h := range c.hosts {
		h.Pods = append(h.Pods, cluster.Pod{
			Namespace: "user", Name: "idles-" + name, UID: "idles-" + name, Controller: "Job", GPU: true, Tolerates: true, Scheduled: c.Now, Requests: map[string]int64{"nvidia.com/mig-7g.40gb": 1},
		})
		c.version[name]++
	}
	c.waits("7g.40gb", 0)
	for range 3600 {
		c.step()
	}
	made := 0
	for _, h := range c.hosts {
		if len(h.devices()[0].State.Instances) == 1 {
			made++
		}
	}
	g.Expect(made).To(BeNumerically("<=", 1), "GPUs on which 7g is made and stays for one pod that waits: %s", strings.Join(c.told[max(0, len(c.told)-40):], "\n"))
}

// TestThePluginLooksAgainBesideNoPodThatIsBeingAdmitted: instances are added without a taint. A plugin that looks again ends its servers first, and the
// kubelet refuses what it admits meanwhile (UnexpectedAdmissionError: kubernetes pkg/kubelet/cm/devicemanager, devicesToAllocate; test/e2e/pods_test.go).
func TestThePluginLooksAgainBesideNoPodThatIsBeingAdmitted(t *testing.T) {
	g, c := NewWithT(t), newApplied(t, 0)
	h := c.add("n0", sim.A100)
	c.setPolicy("research", v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{
			Instances: []v1alpha1.MIGInstances{{Profile: "3g", Count: 1}},
			OnDemand:  &v1alpha1.MIGOnDemand{Mode: v1alpha1.OnDemandModeApply, Profiles: []v1alpha1.MIGProfile{"2g", "3g"}, IdleSeconds: 30},
		}},
	}})
	for range 200 {
		c.step()
	}
	c.edited = false
	c.waits("2g.10gb", 0)
	c.asks(h)
	g.Expect(h.Taints).To(BeEmpty())
	c.waits("3g.20gb", 0) // of another tenant
	c.binds(c.waiting[len(c.waiting)-1], "n0", "")
	c.waiting = nil
	for name, b := range c.bound {
		b.admitted = c.Now.Add(10 * time.Second)
		c.bound[name] = b
	}
	for key := h.Labels[v1alpha1.LabelConfig]; h.Labels[v1alpha1.LabelConfig] == key; {
		c.passes(time.Second)
		c.admit()
		c.acts()
	}
	for name, b := range c.bound {
		b.admitted = c.Now
		c.bound[name] = b
	}
	h.plugin.uuids = nil // it looks again
	c.admit()
	g.Expect(c.broken).To(BeEmpty(), strings.Join(c.told, "\n"))
}

// TestANodeTakesNoPodsBeforeItsDevicePluginIsBack: a change is taken back, as when it fails or the feature gate is turned off, and the agent makes the former
// instances anew. The device plugin's pod, which lists what is gone, is deleted. Until another one has registered the kubelet refuses pods, and it publishes that
// up to 10 seconds later, so that the node still offers as many as it must.
func TestANodeTakesNoPodsBeforeItsDevicePluginIsBack(t *testing.T) {
	c := largeOn(t, "n0")
	h := c.hosts["n0"]
	c.waits("7g.40gb", 0)
	c.asks(h)
	h.converge()
	h.GPU.Status.Demand, c.waiting = nil, nil
	c.version["n0"]++
	for n := 0; n < 60 && h.HasChangingTaint(); n++ {
		for range 10 { // within a second or so, in which no pod starts
			if c.acts(); !h.HasChangingTaint() && !slices.ContainsFunc(h.Pods, playedBy(pluginLabel)) {
				t.Fatalf("the node takes pods, and no device plugin is there:\n%s", strings.Join(c.told[8:], "\n"))
			}
		}
		c.passes(time.Second)
	}
}

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
			c.binds(c.waiting[0], "n0", "")
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

// TestWhatNoPodWaitsForWaitsForNoIdleness: a GPU that has what the policy does not let it have any more, or whose GPUNode was lost, goes to rest once nobody
// uses it. Meanwhile its node is not Ready, so that nothing of it, such as its other GPU, is made for pods that wait.
func TestWhatNoPodWaitsForWaitsForNoIdleness(t *testing.T) {
	for name, happens := range map[string]func(c *applied, h *host){
		"7g is not allowed any more": func(c *applied, _ *host) {
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand.Profiles = []v1alpha1.MIGProfile{"2g", "3g"}
			c.Policies[0].Generation++
		},
		"the GPUNode is made anew": func(c *applied, h *host) { c.makeGPUNode(h) },
	} {
		t.Run(name, func(t *testing.T) {
			g, c := NewWithT(t), largeOf(t, []sim.Model{sim.A100, sim.A100}, "n0")
			h := c.hosts["n0"]
			of := c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand
			of.IdleSeconds, of.Profiles = 300, []v1alpha1.MIGProfile{"2g", "3g", "7g"}
			c.Policies[0].Generation++
			for uuid := range c.lastHeld {
				c.lastHeld[uuid] = c.Now.Add(-5 * time.Hour)
			}
			c.reportHeld(h, h.devices())
			c.version["n0"]++
			c.waits("7g.40gb", 0)
			for range 120 {
				c.step()
			}
			g.Expect(c.users()+len(c.bound)).To(BeZero(), strings.Join(c.told, "\n"))
			c.leave()
			for range 60 {
				c.step()
			}
			g.Expect(c.isReady()).To(BeTrue())
			c.edited = true
			happens(c, h)
			c.version["n0"]++
			c.waits("2g.10gb", 0)
			for range 1200 {
				c.step()
			}
			t.Log(h.waits(), c.isReady())
			g.Expect(c.users()).To(BeZero(), "the pod, for which the other GPU has room that has been idle for hours, waits after 20 minutes:\n%s", strings.Join(c.told[max(0, len(c.told)-12):], "\n"))
		})
	}
}

// TestANodeThatKarpenterHasNotInitializedRejectsNoPod: it must have no taint of the operator's (MustStayUntainted), so the scheduler goes on binding pods to it,
// such as those for which Karpenter made it, while the device plugin stops for a change for another. Its kubelet publishes that up to 10 seconds later.
func TestANodeThatKarpenterHasNotInitializedRejectsNoPod(t *testing.T) {
	g, c := NewWithT(t), largeOn(t, "n0")
	h := c.hosts["n0"]
	h.Labels["karpenter.sh/nodepool"] = "gpus"
	c.version["n0"]++
	for range 60 {
		c.step()
	}
	g.Expect(c.isReady()).To(BeTrue())
	c.waits("7g.40gb", 0)
	for n := 0; n < 60 && h.Labels[pluginLabel] == "true"; n++ {
		c.schedule()
		c.decides()
		if c.acts(); h.Labels[pluginLabel] == "true" {
			c.passes(time.Second)
		}
	}
	if h.Labels[pluginLabel] == "true" || len(h.Taints) > 0 {
		return
	}
	g.Expect(h.Allocatable).To(HaveKeyWithValue("nvidia.com/mig-3g.20gb", int64(2)))
	c.waits("3g.20gb", 0) // of another tenant
	last := len(c.waiting) - 1
	c.binds(c.waiting[last], "n0", "")
	c.waiting = c.waiting[:last]
	for name, b := range c.bound {
		b.admitted = c.Now.Add(time.Second)
		c.bound[name] = b
	}
	for range 10 {
		c.passes(time.Second)
		c.admit()
		c.acts()
	}
	g.Expect(c.broken).To(BeEmpty(), strings.Join(c.told[8:min(len(c.told), 50)], "\n"))
}

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
			c.setPolicy("research", v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: layouts("7g", "3g")})
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

// makesLarge has the agent of a node at rest, monitored or not, make an instance for a pod that waits, and not report that yet.
func (c *applied) makesLarge(h *host, monitors bool) {
	if monitors {
		h.monitored()
	}
	for range 30 {
		c.step()
	}
	c.waits("7g.40gb", 0)
	c.asks(h)
	h.converge()
}

// TestTheDevicePluginThatStopsLastHasItsTime: where DCGM was stopped for the change half an hour ago, the device plugin that is stopped before the node takes
// pods again has as long to end as where nothing was stopped before. What the kubelet publishes follows.
func TestTheDevicePluginThatStopsLastHasItsTime(t *testing.T) {
	for _, monitors := range []bool{false, true} {
		t.Run(fmt.Sprint("monitored ", monitors), func(t *testing.T) {
			c := largeOn(t, "n0")
			h := c.hosts["n0"]
			c.makesLarge(h, monitors)
			h.AgentReady, c.waiting = false, nil
			c.version["n0"]++
			for n := 0; n < 1000 && h.HasChangingTaint(); n++ {
				c.decides()
				for range 10 { // within a second or so, in which no pod ends
					c.acts()
				}
				if !h.HasChangingTaint() && h.Allocatable["nvidia.com/mig-3g.20gb"] > 0 {
					t.Errorf("the node takes pods while it offers instances that are gone:\n%s", strings.Join(c.told[8:min(len(c.told), 60)], "\n"))
				}
				c.passes(5 * time.Second)
			}
		})
	}
}

// TestAnInstanceThatWasUsedLatelyKeepsNoOtherFromGoing: of two, one has been idle for hours and the other one ended a job a minute ago. What is decided is
// that the former goes. The plan takes the latter, which lies where the larger instances are packed away from.
func TestAnInstanceThatWasUsedLatelyKeepsNoOtherFromGoing(t *testing.T) {
	for _, lately := range []int{0, 1} {
		t.Run(fmt.Sprint(lately), func(t *testing.T) {
			g, c := NewWithT(t), newApplied(t, 0)
			h := c.add("n0", sim.A100)
			c.setPolicy("research", v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
				ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{
					Fill:     "3g",
					OnDemand: &v1alpha1.MIGOnDemand{Mode: v1alpha1.OnDemandModeApply, Profiles: []v1alpha1.MIGProfile{"2g", "3g"}, IdleSeconds: 3600},
				}},
			}})
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
