package rollout_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func (c *applied) resting(profile v1alpha1.MIGProfile) {
	c.edited = true
	c.Policies[0].Spec.Sharing.MIG.Layouts[0].Fill = profile
	c.Policies[0].Generation++
	for range 300 {
		c.step()
	}
	c.edited = false
}

// H7: own claims of pods that do not start have the 3g that there are; another GPU, at rest with 7g, could be cut.
func TestHClaimedInstancesCountAsIdle(t *testing.T) {
	c := newApplied(t, onDriver).large([]sim.Model{sim.A100, sim.A100}, "n0")
	c.resting("7g")
	h := c.hosts["n0"]
	c.waits("3g.20gb", 0)
	c.waits("3g.20gb", 0)
	for range 300 {
		c.step()
	}
	g := NewWithT(t)
	g.Expect(c.users()+len(c.bound)).To(BeZero(), tail(c.told, 20))
	n := 0
	for _, p := range append(h.Pods[:0:0], h.Pods...) {
		if p.Namespace == "user" {
			c.end(h, p.Name)
		}
	}
	for _, d := range h.Published.Devices {
		if strings.Contains(d.Name, "3g20gb") {
			n++
			name := fmt.Sprint("stuck", n)
			h.driver.waits = withKey(h.driver.waits, name, true)
			c.claim(h, name, d.Name, c.scheduler["nvidia.com/mig-3g.20gb"].Name, "nvidia.com/mig-3g.20gb")
			h.pod(name).Requests = nil
		}
	}
	g.Expect(n).To(Equal(2))
	c.version["n0"]++
	c.told = nil
	c.waits("3g.20gb", 0)
	for range 3600 {
		c.steps(2 * time.Second)
	}
	g.Expect(c.users()).To(BeZero(), "%+v\n%s", c.Policies[0].Status.OnDemand, tail(c.told, 30))
}

// H8: an administrator's DeviceTaintRule bars the devices of n0, as for repair. n1 could serve.
func TestHDevicesThatAnAdministratorTaintsCountAsIdle(t *testing.T) {
	for _, on := range []string{"n0", "n1"} {
		t.Run(on, func(t *testing.T) { adminTaints(t, on) })
	}
}

func adminTaints(t *testing.T, on string) {
	c := newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0", "n1")
	c.resting("7g")
	h := c.hosts[on]
	for _, d := range h.Published.Devices {
		h.driver.barred = withKey(h.driver.barred, d.Name, true)
	}
	for _, p := range []string{"gpu-0-mig-3g20gb-9-0", "gpu-0-mig-3g20gb-9-4", "gpu-0-mig-7g40gb-0-0"} {
		h.driver.barred = withKey(h.driver.barred, p, true)
	}
	c.told = nil
	c.waits("3g.20gb", 0)
	for range 3600 {
		c.steps(2 * time.Second)
	}
	NewWithT(t).Expect(c.users()).To(BeZero(), "%+v\n%s", c.Policies[0].Status.OnDemand, tail(c.told, 30))
}

// Pre-existing? static: 3g -> 7g asked, destroyed, not reported, edited back.
func TestHStaticEditedBack(t *testing.T) {
	for _, static := range []bool{true, false} {
		t.Run(fmt.Sprint("static ", static), func(t *testing.T) {
			g, c := NewWithT(t), newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0")
			h := c.hosts["n0"]
			layout := &c.Policies[0].Spec.Sharing.MIG.Layouts[0]
			if static {
				layout.OnDemand = nil
				c.Policies[0].Generation++
				for range 100 {
					c.step()
				}
				layout.Fill = "7g"
				c.Policies[0].Generation++
			} else {
				c.waits("7g.40gb", 0)
			}
			c.edited = true
			c.asks(h)
			h.converge()
			for static && len(h.devices()[0].State.Instances) != 1 { // until the agent has made 7g, and not reported it
				c.acts()
				h.converge()
				if len(h.devices()[0].State.Instances) != 1 {
					c.passes(time.Second)
				}
			}
			c.waiting, c.told = nil, nil
			h.lags = true
			layout.Fill, layout.OnDemand = "3g", nil
			c.Policies[0].Generation++
			c.version["n0"]++
			for range 30 {
				c.acts()
				c.passes(time.Second)
			}
			t.Logf("tainted after 30 s, agent has not reported: %v", h.isTainted())
			c.waits("3g.20gb", 0)
			c.schedule()
			c.schedule()
			c.passes(2 * time.Second)
			c.schedule()
			c.admit()
			t.Log(tail(c.told, 20), h.instances(), h.hanging())
			g.Expect(h.hanging()).To(BeEmpty(), tail(c.told, 20))
		})
	}
}

// Stack switch in the middle.
func TestHStackSwitchInTheMiddle(t *testing.T) {
	for _, toDRA := range []bool{false, true} {
		for _, phase := range []int{0, 1, 2, 4, 7} {
			t.Run(fmt.Sprint(toDRA, phase), func(t *testing.T) {
				g := NewWithT(t)
				seed := uint64(onDriver)
				if toDRA {
					seed = 0
				}
				c := newApplied(t, seed).large([]sim.Model{sim.A100, sim.A100}, "n0")
				h := c.hosts["n0"]
				c.waits("3g.20gb", 0)
				for range 60 {
					c.step()
				}
				c.waits("7g.40gb", 0)
				for !h.isTainted() {
					c.step()
				}
				for range phase {
					c.step()
				}
				c.waiting, c.late, c.told = nil, nil, nil
				c.edited = true
				running := ""
				for _, p := range h.Pods {
					if p.Namespace == "user" {
						running = p.Name
					}
				}
				c.switchOver(h, toDRA)
				c.onDRA = toDRA
				c.version["n0"]++
				for second := range 3600 {
					c.decides()
					c.acts()
					c.passes(time.Second)
					_ = second
				}
				t.Log("running", running, "waits", h.waits(), "pods", len(h.Pods), says(h.GPU.Status.Demand))
				g.Expect(h.isTainted()).To(BeFalse(), tail(c.told, 30))
				c.waits("7g.40gb", 0)
				for range 1800 {
					c.step()
				}
				t.Log("waits", c.users(), h.waits(), says(h.GPU.Status.Demand))
				g.Expect(c.users()).To(BeZero(), "%s\n%v\n%s", h.waits(), c.Policies[0].Status.Conditions, tail(c.told, 30))
			})
		}
	}
}

// H1b: what makes n0 not Ready is a pod of a tenant that hangs.
func TestHAHangingPodKeepsNoOtherNodeFromServing(t *testing.T) {
	c := newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0", "n1")
	c.waits("7g.40gb", 0)
	for range 300 {
		c.step()
	}
	on := "n0"
	if len(c.hosts["n1"].devices()[0].State.Instances) == 1 {
		on = "n1"
	}
	h := c.hosts[on]
	c.claim(h, "hangs", "gpu-0-mig-3g20gb-9-0", "gpusharing-mig-3g.20gb", "nvidia.com/mig-3g.20gb")
	h.pod("hangs").Requests = nil
	c.version[on]++
	for range 30 {
		c.step()
	}
	t.Log(h.waits(), h.GPU.Status.Conditions)
	c.waits("7g.40gb", 0)
	for range 1200 {
		c.steps(3 * time.Second)
	}
	NewWithT(t).Expect(c.users()).To(BeZero(), tail(c.told, 10))
}

// H1c: the driver of n0 crash-loops (a bad upgrade on that node).
func TestHADriverThatDoesNotStartKeepsNoOtherNodeFromServing(t *testing.T) {
	c := newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0", "n1")
	c.waits("7g.40gb", 0)
	for range 300 {
		c.step()
	}
	on := "n0"
	if len(c.hosts["n1"].devices()[0].State.Instances) == 1 {
		on = "n1"
	}
	h := c.hosts[on]
	h.driver.pulls = 24 * time.Hour
	h.restartDriver()
	c.version[on]++
	for range 60 {
		c.step()
	}
	t.Log(h.waits())
	c.waits("7g.40gb", 0)
	for range 1200 {
		c.steps(3 * time.Second)
	}
	NewWithT(t).Expect(c.users()).To(BeZero(), tail(c.told, 10))
}

var _ = corev1.Pod{}
