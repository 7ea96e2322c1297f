package rollout_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func tail(told []string, n int) string { return strings.Join(told[max(0, len(told)-n):], "\n") }

// H1: n0 was given 7g for a pod that runs on; then its agent is away for hours. n1 has idle 3g that a waiting pod's 7g could be made of.
func TestHOneNodeThatIsNotReadyKeepsNoOtherFromServing(t *testing.T) {
	for stack, seed := range map[string]uint64{"plugin": 0, "dra": onDriver} {
		t.Run(stack, func(t *testing.T) {
			c := newApplied(t, seed).large([]sim.Model{sim.A100}, "n0", "n1")
			c.waits("7g.40gb", 0)
			for range 300 {
				c.step()
			}
			NewWithT(t).Expect(c.users()+len(c.bound)).To(BeZero(), tail(c.told, 40))
			var on string
			for name, h := range c.hosts {
				if len(h.devices()[0].State.Instances) == 1 {
					on = name
				}
			}
			NewWithT(t).Expect(on).NotTo(BeEmpty())
			c.told = nil
			c.hosts[on].AgentReady = false
			for range 60 {
				c.step()
			}
			c.waits("7g.40gb", 0)
			for range 2400 {
				c.steps(3 * time.Second)
			}
			NewWithT(t).Expect(c.users()).To(BeZero(), "a pod waits after 2 hours, on %s nothing was changed: ready=%v\n%s", "the other node", c.isReady(), tail(c.told, 30))
		})
	}
}

// H2: GPUNode lost in the middle.
func TestHGPUNodeLostInTheMiddle(t *testing.T) {
	for _, lag := range []int{0, 5, 30, 4000} {
		g, c := NewWithT(t), newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0")
		h := c.hosts["n0"]
		c.waits("7g.40gb", 0)
		c.asks(h)
		h.converge()
		c.waiting = nil
		c.told = nil
		c.edited = true
		c.makeGPUNode(h)
		if lag > 0 {
			h.lags = true
		}
		if lag > 3000 {
			h.AgentReady = false
		}
		c.version["n0"]++
		c.waits("3g.20gb", 0)
		for second := range 3600 {
			h.lags = second < lag
			c.schedule()
			c.admit()
			c.acts()
			c.passes(time.Second)
			g.Expect(h.hanging()).To(BeEmpty(), "lag %d: %s", lag, tail(c.told, 40))
		}
		g.Expect(h.isTainted()).To(BeFalse(), "lag %d: still tainted after an hour", lag)
		t.Log(lag, h.waits(), c.users())
	}
}

// H3: the kubelet of the node is not reachable for a while in the middle (no reboot).
func TestHNodePartitionedInTheMiddle(t *testing.T) {
	for _, long := range []int{30, 300, 1200, 3000} {
		g, c := NewWithT(t), newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0")
		h := c.hosts["n0"]
		c.waits("7g.40gb", 0)
		c.asks(h)
		h.converge()
		c.waiting, c.told = nil, nil
		c.edited = true
		h.AgentReady, h.lags = false, true
		h.Taints = append(slices.Clone(h.Taints), corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoSchedule})
		c.version["n0"]++
		c.waits("3g.20gb", 0)
		for second := range 7200 {
			if second == long {
				h.Taints = nil
				c.version["n0"]++
			}
			if second == long+20 {
				h.AgentReady, h.lags = true, false
				c.version["n0"]++
			}
			c.schedule()
			c.admit()
			c.acts()
			c.passes(time.Second)
			g.Expect(h.hanging()).To(BeEmpty(), "away %d s: %s", long, tail(c.told, 40))
		}
		g.Expect(h.isTainted()).To(BeFalse())
		t.Log(long, h.waits(), c.users())
	}
}

// H4: an instance of GPU 1 is allocated by a claim of its pod that does not start (such as for want of a ConfigMap). GPU 0 is all idle.
func TestHClaimedAndNotPreparedKeepsNoOtherGPUFromServing(t *testing.T) {
	for name, own := range map[string]bool{"extended resource": false, "claim of its own": true} {
		for _, at := range []int{0, 1} {
			t.Run(name, func(t *testing.T) {
				c := newApplied(t, onDriver).large([]sim.Model{sim.A100, sim.A100}, "n0")
				h := c.hosts["n0"]
				for range 60 {
					c.step()
				}
				i := slices.IndexFunc(h.Published.Devices, func(d dra.Device) bool { return d.Parent == h.devices()[at].UUID || strings.HasPrefix(d.Name, map[int]string{0: "gpu-0-", 1: "gpu-1-"}[at]) })
				device := h.Published.Devices[i].Name
				h.driver.waits = withKey(h.driver.waits, "stuck", true)
				c.claim(h, "stuck", device, c.scheduler["nvidia.com/mig-3g.20gb"].Name, "nvidia.com/mig-3g.20gb")
				if own {
					h.pod("stuck").Requests = nil
				}
				c.version["n0"]++
				c.waits("7g.40gb", 0)
				c.told = nil
				for range 3600 {
					c.steps(2 * time.Second)
				}
				n := 0
				for _, l := range c.told {
					if strings.Contains(l, "demand of n0") {
						n++
					}
				}
				NewWithT(t).Expect(c.users()).To(BeZero(), "device %s claimed; a pod waits for 7g after 2 hours, %d decisions, %v\n%s", device, n, says(h.GPU.Status.Demand), tail(c.told, 30))
			})
		}
	}
}

// H5: pods that a tenant binds itself (spec.nodeName), without claim: kubelet lets them pass, and DRA gives them nothing.
func TestHPodsBoundByHandHoldNothingOnDRA(t *testing.T) {
	for _, of := range []string{"nvidia.com/mig-7g.40gb", "nvidia.com/mig-3g.20gb"} {
		t.Run(of, func(t *testing.T) {
			c := newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0")
			h := c.hosts["n0"]
			h.Pods = append(h.Pods, cluster.Pod{
				Namespace: "user", Name: "idles", UID: "idles", Controller: "Job", GPU: true, Scheduled: c.Now, Requests: map[string]int64{of: 1},
			})
			c.version["n0"]++
			c.waits("7g.40gb", 0)
			for range 3600 {
				c.step()
			}
			NewWithT(t).Expect(c.users()).To(BeZero(), "%v\n%s", c.Policies[0].Status.OnDemand, tail(c.told, 20))
		})
	}
}

// H6: edited to static in the middle, then the agent is lost.
func TestHStaticAndThenTheAgentIsLost(t *testing.T) {
	for name, edit := range map[string]func(c *applied){
		"static": func(c *applied) {
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand = nil
			c.Policies[0].Generation++
		},
		"advise": func(c *applied) {
			c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand.Mode = v1alpha1.OnDemandModeAdvise
			c.Policies[0].Generation++
		},
		"deleted": func(c *applied) {
			c.Policies = nil
		},
	} {
		for _, wait := range []int{0, 2, 5} {
			t.Run(name, func(t *testing.T) {
				g, c := NewWithT(t), newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0")
				h := c.hosts["n0"]
				c.waits("7g.40gb", 0)
				c.asks(h)
				h.converge()
				c.waiting, c.told, c.edited = nil, nil, true
				h.lags = true
				edit(c)
				for range wait {
					c.acts()
					c.passes(time.Second)
				}
				h.AgentReady = false
				c.version["n0"]++
				c.waits("3g.20gb", 0)
				for range 7200 {
					c.schedule()
					c.admit()
					c.acts()
					c.passes(time.Second)
					g.Expect(h.hanging()).To(BeEmpty(), "%s", tail(c.told, 40))
				}
				g.Expect(h.isTainted()).To(BeFalse(), tail(c.told, 20))
			})
		}
	}
}
