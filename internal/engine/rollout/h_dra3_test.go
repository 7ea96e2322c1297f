package rollout_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// HReboot: a GPU was repartitioned beside a pod that has ended since, so its instances lie where they would not be packed. The machine reboots: pods come back
// on the same claims (dra.md, "Recreate them at the same placements").
func TestHARebootedNodeHasItsInstancesWhereTheyWere(t *testing.T) {
	g, c := NewWithT(t), newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0")
	h := c.hosts["n0"]
	c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand.Profiles = []v1alpha1.MIGProfile{"1g", "2g", "3g"}
	c.resting("1g")
	c.waits("1g.5gb", 0) // p1 is given the first, at 0
	for range 100 {
		c.step()
	}
	g.Expect(c.users() + len(c.bound)).To(BeZero())
	c.waits("2g.10gb", 0) // p2
	for range 300 {
		c.step()
	}
	g.Expect(c.users()+len(c.bound)).To(BeZero(), tail(c.told, 20))
	c.end(h, "p1")
	for range 100 {
		c.step()
	}
	var claim, device = "", ""
	for _, cl := range h.Claims {
		claim, device = cl.Name, cl.Of("n0")[0]
	}
	before := placesOf(h)
	c.edited = true
	c.turnsOff(h)
	for range 20 {
		c.step()
	}
	c.turnsOff(h)
	c.claim(h, "p2", device, "gpusharing-mig-2g.10gb", "nvidia.com/mig-2g.10gb") // it comes back on its claim
	for range 1200 {
		c.step()
	}
	g.Expect(h.hanging()).To(BeEmpty(), "claim %s has %s; instances before %v, after %v\n%s", claim, device, before, placesOf(h), tail(c.told, 12))
}

func placesOf(h *host) (list []string) {
	for _, d := range h.devices() {
		for _, i := range d.State.Instances {
			list = append(list, i.Profile+"@"+i.Placement.String())
		}
	}
	return list
}
