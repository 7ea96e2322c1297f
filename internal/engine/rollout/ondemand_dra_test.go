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
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// Histories of demand where NVIDIA's DRA driver serves the nodes: the scheduler gives a pod a device that the driver published and that no rule taints, and the
// kubelet has it prepared by its name, or the pod hangs.

// comes adds a node of the program that serves all nodes.
func (c *applied) comes(name string, models ...sim.Model) *host {
	if c.onDRA {
		return c.addDRA(name, models...)
	}
	return c.add(name, models...)
}

// devices are those of a node that the scheduler may give to a pod that asks for a resource.
func (c *applied) devices(h *host, of string) []string {
	chosen := map[string]bool{}
	for _, l := range c.late {
		chosen[l.device] = chosen[l.device] || l.node == h.Name
	}
	return c.allocatable(h, of, chosen)
}

// device is the first of these; empty: there is none.
func (c *applied) device(h *host, of string) string {
	if h == nil || !c.onDRA {
		return ""
	}
	return append(c.devices(h, of), "")[0]
}

// allocates has a pod come to a device of a node, which its kubelet has prepared now or, if it is slow, later.
func (c *applied) allocates(h *host, pod *corev1.Pod, device string) {
	of, after := resourceOf(pod), time.Duration(c.random.IntN(4))*time.Second
	if c.random.IntN(8) == 0 {
		after *= 30
	}
	h.driver.waits = withKey(h.driver.waits, pod.Name, true)
	c.claim(h, pod.Name, device, c.scheduler[of].Name, of)
	c.version[h.Name]++
	c.bound[pod.Name] = boundPod{node: h.Name, resource: of, chosen: c.Now, admitted: c.Now.Add(after)}
	c.tell("pod %s is bound to %s, with %s", pod.Name, h.Name, device)
}

// prepares is the kubelet, which tries again while the driver is away.
func (c *applied) prepares(h *host, name string) {
	delete(h.driver.waits, name)
	c.prepare(h)
	switch {
	case h.driver.prepared[name]:
		delete(c.bound, name)
		c.tell("pod %s starts on %s", name, h.Name)
	case slices.Contains(h.hanging(), name):
		c.breaks(!c.edited && !c.hasBooted(h, c.Now) && !c.hasBooted(h, c.bound[name].chosen), "6: pod %s hangs on %s: it was allocated an instance that is gone", name, h.Name)
		delete(c.bound, name)
		c.end(h, name)
	}
}

// keepsClaimed holds an agent to invariant 1 for instances that are allocated to a claim, also before a container has them.
func (c *applied) keepsClaimed(h *host, was, is gpu.Device) {
	for _, i := range was.State.Instances {
		same := func(o gpu.Instance) bool { return o.UUID == i.UUID }
		has := func(claim dra.Claim) bool { return slices.Contains(claim.Of(h.Name), nvidia.DeviceName(was, i)) }
		c.breaks(!slices.ContainsFunc(is.State.Instances, same) && slices.ContainsFunc(h.Claims, has), "1: instance %s of GPU %s is destroyed, which a claim has", i.Profile, is.UUID)
	}
}

// upgradesDriver restarts the driver on a node now and then, which may take long.
func (c *applied) upgradesDriver(h *host) {
	if !c.onDRA || c.random.IntN(12) > 0 {
		return
	}
	h.driver.pulls = time.Duration(c.random.IntN(3)*c.random.IntN(40)) * time.Second
	h.restartDriver()
	c.tell("the driver of %s restarts, and takes %s to start", h.Name, h.driver.pulls)
}

// leavesNothing reports whether the operator has no object of the driver's left.
func (c *applied) leavesNothing() bool {
	return len(c.devicesTaintedOn()) == 0 && !slices.ContainsFunc(c.DRA.Classes, func(class dra.Class) bool { return class.Own })
}

// TestNoPodIsGivenWhatIsGoneInTheMiddle of a change for a pod: the agent has destroyed what the driver publishes, and has not reported that, or is lost. The
// driver looks again before the devices of the node can be given to pods.
func TestNoPodIsGivenWhatIsGoneInTheMiddle(t *testing.T) {
	for name, happens := range map[string]func(c *applied, h *host){
		"the agent is lost, until the slot has expired": func(_ *applied, h *host) { h.AgentReady = false },
		"the feature gate is turned off": func(c *applied, h *host) {
			h.lags, h.GPU.Status.Demand = true, nil
			c.version["n0"]++
		},
		"static, and the agent is lost": func(c *applied, h *host) {
			h.lags, c.edited = true, true
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand = nil
			c.Policies[0].Generation++
			for range 5 {
				c.acts()
				c.passes(time.Second)
			}
			h.AgentReady = false
		},
		"7g is not allowed any more": func(c *applied, h *host) {
			h.lags, c.edited = true, true
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand.Profiles = []v1alpha1.MIGProfile{"3g"}
			c.Policies[0].Generation++
		},
		"static": func(c *applied, h *host) {
			h.lags, c.edited = true, true
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand = nil
			c.Policies[0].Generation++
		},
	} {
		t.Run(name, func(t *testing.T) {
			g, c := NewWithT(t), onDriverLarge(t, 1, "n0")
			h := c.hosts["n0"]
			c.waits("7g.40gb", 0)
			c.asks(h)
			h.converge()
			c.waiting = nil
			happens(c, h)
			c.waits("3g.20gb", 0) // of another tenant
			for second := range 3600 {
				h.lags = h.lags && second < 5
				c.schedule()
				c.admit()
				c.acts()
				c.passes(time.Second)
				g.Expect(h.hanging()).To(BeEmpty(), strings.Join(c.told, "\n"))
			}
			g.Expect(h.isTainted()).To(BeFalse())
			g.Expect(c.users() == 0 || !h.AgentReady).To(BeTrue(), "the pod starts in the end")
		})
	}
}

// onDriverLarge is largeOn where NVIDIA's DRA driver serves the nodes, with as many GPUs each.
func onDriverLarge(t *testing.T, gpus int, nodes ...string) *applied {
	t.Helper()
	return newApplied(t, onDriver).large(slices.Repeat([]sim.Model{sim.A100}, gpus), nodes...)
}

// servesAll lets an hour pass, in which every pod that can start must.
func (c *applied) servesAll() {
	c.t.Helper()
	for range 1200 {
		c.steps(3 * time.Second)
	}
	if c.users() > 0 || c.broken != "" {
		c.t.Errorf("%d pods wait: %+v; %s\n%s", c.users(), c.Policies[0].Status.OnDemand, c.broken, strings.Join(c.told[max(0, len(c.told)-30):], "\n"))
	}
}

// TestANodeThatIsNotReadyKeepsNoOtherFromServing: it was changed for a pod that runs on.
func TestANodeThatIsNotReadyKeepsNoOtherFromServing(t *testing.T) {
	for name, happens := range map[string]func(h *host){
		"its agent is away": func(h *host) { h.AgentReady = false },
		"its driver does not start": func(h *host) {
			h.driver.pulls = 24 * time.Hour
			h.restartDriver()
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := onDriverLarge(t, 1, "n0", "n1")
			c.waits("7g.40gb", 0)
			c.servesAll()
			for name, h := range c.hosts {
				if len(h.Claims) > 0 {
					happens(h)
					c.version[name]++
				}
			}
			c.waits("7g.40gb", 0)
			c.servesAll()
		})
	}
}

// TestWhatAClaimHasIsNotIdle, though no container has it, as for want of a ConfigMap: another GPU serves the pod that waits.
func TestWhatAClaimHasIsNotIdle(t *testing.T) {
	for _, at := range []int{0, 1} {
		for name, requests := range map[string]map[string]int64{"a claim of its own": nil, "an extended resource": {"nvidia.com/mig-3g.20gb": 1}} {
			t.Run(fmt.Sprint(name, ", GPU ", at), func(t *testing.T) {
				c := onDriverLarge(t, 2, "n0")
				h := c.hosts["n0"]
				with := slices.IndexFunc(h.Published.Devices, func(d dra.Device) bool { return d.Parent == h.devices()[at].UUID })
				h.driver.waits = withKey(h.driver.waits, "starts-not", true)
				c.claim(h, "starts-not", h.Published.Devices[with].Name, c.scheduler["nvidia.com/mig-3g.20gb"].Name, "nvidia.com/mig-3g.20gb")
				h.pod("starts-not").Requests = requests
				c.version["n0"]++
				c.waits("7g.40gb", 0)
				c.servesAll()
			})
		}
	}
}

// TestPodsThatAreBoundByHandHaveNothingOfTheDriver: a tenant names their node, so they have no claim.
func TestPodsThatAreBoundByHandHaveNothingOfTheDriver(t *testing.T) {
	for _, of := range []string{"nvidia.com/mig-7g.40gb", "nvidia.com/mig-3g.20gb"} {
		c := onDriverLarge(t, 1, "n0")
		h := c.hosts["n0"]
		c.waits("7g.40gb", 0)
		for n := 0; n < 120 && len(h.devices()[0].State.Instances) > 1; n++ {
			name := fmt.Sprint("job-", n)
			h.Pods = append(h.Pods, cluster.Pod{
				Namespace: "user", Name: name, UID: name, Controller: "Job", GPU: true, Tolerates: true, Scheduled: c.Now, Requests: map[string]int64{of: 1},
			})
			c.version["n0"]++
			c.seconds(15)
		}
		c.servesAll()
	}
}

// TestADriverIsRestartedForEachPod that waits: each sees other instances, so that is no fight with who makes it come back.
func TestADriverIsRestartedForEachPod(t *testing.T) {
	c := onDriverLarge(t, 8, "n0")
	for range 8 {
		c.waits("7g.40gb", 0)
		c.seconds(60)
	}
	NewWithT(t).Expect(c.users()).To(BeZero(), "%s\n%s", c.hosts["n0"].waits(), strings.Join(c.told[max(0, len(c.told)-30):], "\n"))
}
