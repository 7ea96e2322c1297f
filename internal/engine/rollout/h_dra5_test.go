package rollout_test

import (
	"fmt"
	"testing"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// H5b: pods that a tenant binds itself, one after the other, have nothing on a node of the DRA driver.
func TestHAStreamOfPodsBoundByHandStopsNoDemandOnDRA(t *testing.T) {
	c := newApplied(t, onDriver).large([]sim.Model{sim.A100}, "n0")
	h := c.hosts["n0"]
	c.waits("7g.40gb", 0)
	for n := range 120 {
		name := fmt.Sprint("job-", n)
		h.Pods = append(h.Pods, cluster.Pod{
			Namespace: "user", Name: name, UID: name, Controller: "Job", GPU: true, Tolerates: true, Scheduled: c.Now, Requests: map[string]int64{"nvidia.com/mig-3g.20gb": 1},
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
	t.Errorf("not made in 30 minutes: %s; %v\n%s", h.waits(), says(h.GPU.Status.Demand), tail(c.told, 12))
}
