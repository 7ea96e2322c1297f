// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// TestAPodThatWaitsForAnotherDriverBlocksNothing: a pod waits for a network device or its compute domain, for as long
// as another node is not there. It has no GPU of the node by any claim.
func TestAPodThatWaitsForAnotherDriverBlocksNothing(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 3)), evicting)
	c.run(120)
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "user", Name: "domain", UID: "uid-domain", Controller: "ReplicaSet", Scheduled: c.Now.Add(-time.Hour), Starting: true,
	})
	c.reshare(mig(count("2g", 3)))
	d, _ := c.run(240)
	g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
	g.Expect(c.evicted).To(BeEmpty())
}

// TestAPodThatIsNotPreparedBlocksByWhatItIsAllocated: the kubelet reports nothing of it, and its claim does.
func TestAPodThatIsNotPreparedBlocksByWhatItIsAllocated(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)))
	c.run(120)
	c.claim(h, "waits", deviceName(h.devices()[0], h.devices()[0].State.Instances[0]), "gpusharing-mig-1g.5gb", "nvidia.com/mig-1g.5gb")
	h.waitsToStart("waits")
	held := h.devices()[0].State.Instances[0].UUID
	c.reshare(mig(count("7g", 1)))
	d := c.during(time.Minute, time.Second)
	g.Expect(one(d).Message).To(ContainSubstring("pod user/waits (GPU 0, instance 1g.5gb at"))
	g.Expect(h.instances()).To(ContainElement(held))
}

// TestAPodThatHangsOnADeviceThatIsGoneBlocksNothing: it cannot start, whatever the change does. DeviceGone names it
// before and after.
func TestAPodThatHangsOnADeviceThatIsGoneBlocksNothing(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 3)), evicting)
	c.run(120)
	c.claim(h, "stuck", "gpu-0-mig-7g40gb-0-0", "gpusharing-mig-7g.40gb", "nvidia.com/mig-7g.40gb")
	g.Expect(one(c.reconcile()).Reason).To(Equal(v1alpha1.ReasonDeviceGone))
	c.reshare(mig(count("1g", 1), count("2g", 2)))
	d := c.during(5*time.Minute, time.Second)
	g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
	g.Expect(one(d).Reason).To(Equal(v1alpha1.ReasonDeviceGone))
	g.Expect(h.Published.Published()).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-2g.10gb": 4}))
	g.Expect(c.evicted).To(BeEmpty())
}

// TestPodsThatShareAClaimAreNotEvictedForNothing: the pods of a Deployment name one ResourceClaim. A claim that is
// allocated is not allocated anew, so the DeviceTaintRule keeps no further pod of it off the node (kubernetes
// pkg/scheduler/framework/plugins/dynamicresources, PreFilter).
func TestPodsThatShareAClaimAreNotEvictedForNothing(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)), evicting)
	c.claim(h, "train", "gpu-0", "gpu.nvidia.com", "nvidia.com/gpu")
	h.Claims[0].Shared = true
	d := c.during(5*time.Minute, time.Second)
	g.Expect(one(d).State).To(Equal(node.Draining))
	g.Expect(one(d).Message).To(HaveSuffix("; pod user/train is not evicted, since ResourceClaim user/train, which pods can share, stays; scale its workload down"))
	g.Expect(h.GPU.Status.Rollout.Blockers).To(ContainElement(HaveField("Handling",
		ContainSubstring("is not evicted, because another would come by the same ResourceClaim"))))
	d = c.during(6*time.Minute, time.Second)
	g.Expect(one(d).Reason).To(Equal(v1alpha1.ReasonDrainTimedOut))
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(c.evicted).To(BeEmpty())
	c.end(h, "train") // its Deployment is scaled down
	d, _ = c.run(240)
	g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
}

// TestAPodThatNobodyMakesAgainIsEvictedFromItsClaim, also if it made the claim itself.
func TestAPodThatNobodyMakesAgainIsEvictedFromItsClaim(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)), evicting)
	c.claim(h, "train", "gpu-0", "gpu.nvidia.com", "nvidia.com/gpu")
	h.Claims[0].Shared = true
	h.pod("train").Controller = ""
	d, _ := c.run(240)
	g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
	g.Expect(c.evicted).To(ConsistOf("train"))
}

// TestAMonitorWithAdminAccessBlocksNothing: the kubelet lists its devices as those of any claim, and the agent leaves
// them out by its spec.
func TestAMonitorWithAdminAccessBlocksNothing(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)), evicting)
	c.monitor(h, "exporter")
	d, _ := c.run(240)
	g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
	g.Expect(h.GPU.Spec.AdminClaims).To(Equal([]string{"monitoring/exporter"}))
	c.end(h, "exporter") // its DaemonSet replaces it
	c.monitor(h, "next")
	c.reshare(mig(count("3g", 2)))
	d, _ = c.run(240)
	g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
	g.Expect(h.GPU.Spec.AdminClaims).To(Equal([]string{"monitoring/next"}))
	g.Expect(c.evicted).To(BeEmpty())
	clear(c.writes)
	c.during(time.Hour, time.Minute)
	g.Expect(c.writes).To(BeEmpty(), "it stays so")
	c.Policies = nil
	c.run(240)
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
}

// TestAMonitorIsNoBlockerBeforeItsAgentKnows: the agent is told of the claim when a policy comes, and reports the
// container as a user until then. A monitor that is no DaemonSet's would be evicted.
func TestAMonitorIsNoBlockerBeforeItsAgentKnows(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)), evicting)
	c.monitor(h, "exporter")
	h.Pods[len(h.Pods)-1].Controller = "ReplicaSet"
	g.Expect(h.GPU.Status.Devices[0].Holders).NotTo(BeEmpty())
	g.Expect(one(c.reconcile()).Blockers).To(BeEmpty())
	h.Claims[0].Devices = h.Claims[0].Admin[:1] // it holds one for itself
	h.Version++
	g.Expect(one(c.reconcile()).Blockers).NotTo(BeEmpty())
}

// TestAMonitorWhoseClaimIsNotKnownYetIsNotEvicted: pods, claims and what agents report are watched each by itself.
func TestAMonitorWhoseClaimIsNotKnownYetIsNotEvicted(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)), evicting)
	c.reconcile()
	c.tick(time.Second) // its scheduler has not seen the taint
	c.monitor(h, "exporter")
	h.Pods[len(h.Pods)-1].Controller = ""
	claims := h.Claims
	h.Claims = nil
	h.Version++
	g.Expect(one(c.reconcile()).Blockers).NotTo(BeEmpty())
	c.steps(3)
	g.Expect(c.evicted).To(BeEmpty())
	h.Claims = claims
	h.Version++
	d, _ := c.run(240)
	g.Expect(c.evicted).To(BeEmpty())
	g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
}

// TestAMonitorThatHasADeviceOfItsOwnBlocks: what of the claim is for administrators cannot be told from the rest by the
// agent.
func TestAMonitorThatHasADeviceOfItsOwnBlocks(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)))
	c.monitor(h, "exporter")
	h.Claims[0].Devices = h.Claims[0].Admin[:1]
	d := c.during(time.Minute, time.Second)
	g.Expect(one(d).Message).To(ContainSubstring("pod user/exporter"))
	g.Expect(h.GPU.Spec.AdminClaims).To(BeEmpty())
}

// gang lets a pod run that has a GPU by a claim that is reserved for its PodGroup
// (k8s.io/dynamic-resource-allocation/resourceclaim, IsReservedForPod).
func gang(c *site, h *host) {
	c.claim(h, "worker", "gpu-0", "gpu.nvidia.com", "nvidia.com/gpu")
	h.Claims[0].Shared, h.Claims[0].Pods = true, nil
	h.Claims[0].Others = []dra.Consumer{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang"}}
	p := h.pod("worker")
	p.PodGroup, p.Controller = "gang", "Job"
}

// TestAPodOfAPodGroupIsNamedInPlaceOfItsClaim: nobody is told to delete a claim that a pod uses.
func TestAPodOfAPodGroupIsNamedInPlaceOfItsClaim(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)), evicting)
	gang(c, h)
	d := c.during(time.Minute, time.Second)
	g.Expect(h.GPU.Status.Rollout.Blockers).NotTo(BeEmpty())
	for _, b := range h.GPU.Status.Rollout.Blockers {
		g.Expect(b.Kind).To(Equal(v1alpha1.BlockerKindPod))
		g.Expect(b.Name).To(Equal("worker"))
		g.Expect(b.Handling).To(ContainSubstring("another would come by the same ResourceClaim"))
	}
	g.Expect(one(d).Message).To(ContainSubstring("pod user/worker"))
	g.Expect(c.evicted).To(BeEmpty(), "the claim stays allocated to its group")

	c.end(h, "worker") // and another node has the group's other pods
	c.during(time.Minute, time.Second)
	g.Expect(h.GPU.Status.Rollout.Blockers).To(ConsistOf(And(HaveField("Name", "worker"), HaveField("Kind", v1alpha1.BlockerKindResourceClaim),
		HaveField("Handling", "is waited for; no pod of the node uses it, but it is reserved for PodGroup gang. Delete that if its work is over"))))
	h.Claims = nil // the group is over
	d, _ = c.run(240)
	g.Expect(one(d).State).To(Equal(node.UpToDate), one(d).Message)
}
