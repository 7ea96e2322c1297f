// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
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
			first, _, waits := node.LooksFirst(v, []action.Action{action.Untaint{Node: "n0"}})
			NewWithT(t).Expect(waits).To(Equal(is.waits))
			NewWithT(t).Expect(first).To(HaveLen(map[string]int{"true": 1}[is.label]))
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
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{
			Instances: []v1alpha1.MIGInstances{{Profile: "3g", Count: 1}},
			OnDemand:  &v1alpha1.MIGOnDemand{Mode: v1alpha1.OnDemandModeApply, Profiles: []v1alpha1.MIGProfile{"2g", "3g"}, IdleSeconds: 30},
		}},
	}})}
	for range 200 {
		c.step()
	}
	c.edited = false
	c.waits("2g.10gb", 0)
	c.asks(h)
	g.Expect(h.Taints).To(BeEmpty())
	c.waits("3g.20gb", 0) // of another tenant
	c.binds(c.waiting[len(c.waiting)-1], "n0")
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
