// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// TestAPodThatDoesNotStartOnItsDevice is known by its claims: also one that ran before its node was rebooted.
func TestAPodThatDoesNotStartOnItsDevice(t *testing.T) {
	ready := []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	claimed := corev1.PodStatus{ExtendedResourceClaimStatus: &corev1.PodExtendedResourceClaimStatus{}}
	for name, c := range map[string]struct {
		pod  corev1.Pod
		want bool
	}{
		"created just now":      {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}, Status: claimed}, true},
		"running and ready":     {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}, Status: corev1.PodStatus{Phase: corev1.PodRunning, ExtendedResourceClaimStatus: claimed.ExtendedResourceClaimStatus, Conditions: ready}}, false},
		"after a reboot":        {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}, Status: corev1.PodStatus{Phase: corev1.PodRunning, ExtendedResourceClaimStatus: claimed.ExtendedResourceClaimStatus}}, true},
		"by a claim of its own": {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a", ResourceClaims: []corev1.PodResourceClaim{{}}}}, true},
		"without a claim":       {corev1.Pod{Spec: corev1.PodSpec{NodeName: "a"}}, false},
		"on no node":            {corev1.Pod{Status: claimed}, false},
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(cluster.PodOf(&c.pod, &cluster.Programs{}).Starting).To(Equal(c.want))
		})
	}
}

// TestTheObjectsOfDRAAreJoined to what a decision needs of the cluster, of each node and of its pods.
func TestTheObjectsOfDRAAreJoined(t *testing.T) {
	g := NewWithT(t)
	read := func(text string) []unstructured.Unstructured {
		var o unstructured.Unstructured
		g.Expect(yaml.Unmarshal([]byte(text), &o.Object)).To(Succeed())
		return []unstructured.Unstructured{o}
	}
	rule := dra.NewTaintRule("a", time.Unix(1_800_000_000, 0))
	s := cluster.Snapshot{Nodes: []cluster.Node{{Name: "a", Pods: []cluster.Pod{{Namespace: "team", Name: "train", UID: "uid-1"}, {UID: "uid-2"}}}, {Name: "b"}}}
	cluster.DRAObjects{
		ServesClasses: true, ServesTaintRules: true, TaintRules: []unstructured.Unstructured{*rule},
		Slices: read(`{metadata: {name: s}, spec: {driver: gpu.nvidia.com, nodeName: a, pool: {name: a, generation: 1, resourceSliceCount: 1},
			devices: [{name: gpu-0, attributes: {type: {string: gpu}, uuid: {string: GPU-a}}}]}}`),
		Claims: read(`{metadata: {namespace: team, name: one}, spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.nvidia.com}}]}},
			status: {reservedFor: [{resource: pods, name: train, uid: uid-1}],
			allocation: {devices: {results: [{driver: gpu.nvidia.com, pool: a, device: gpu-0}]}}}}`),
		Classes: read(`{metadata: {name: gpu.nvidia.com}, spec: {extendedResourceName: nvidia.com/gpu}}`),
	}.Read().AddTo(&s)
	a, b := s.Nodes[0], s.Nodes[1]
	g.Expect(s.Plugin.StackOf(&a)).To(Equal(dra.DRADriver))
	g.Expect(s.Plugin.StackOf(&b)).To(Equal(dra.DevicePlugin))
	g.Expect(a.Offered(dra.DRADriver)).To(Equal(gpusOnly(1)))
	g.Expect(a.Claims).To(HaveLen(1))
	g.Expect([]string{a.Pods[0].Claim, a.Pods[1].Claim}).To(Equal([]string{"team/one", ""}))
	g.Expect(a.DevicesTaintedAt.Unix()).To(Equal(int64(1_800_000_000)))
	g.Expect(s.DRA.DevicesTaintedOn).To(Equal([]string{"a"}))
	g.Expect(s.DRA.Named).To(Equal([]string{"gpu.nvidia.com"}))
	g.Expect(s.DRA.Classes).To(ConsistOf(HaveField("Resource", "nvidia.com/gpu")))
	g.Expect(b).To(Equal(cluster.Node{Name: "b"}))
}

// TestWhoseADeviceTaintRuleIs: one of the operator's that another client edited is no other's, and one that is being
// deleted, or was deleted a moment ago, keeps nothing off.
func TestWhoseADeviceTaintRuleIs(t *testing.T) {
	g := NewWithT(t)
	rule := func(node string, change func(*unstructured.Unstructured)) unstructured.Unstructured {
		r := dra.NewTaintRule(node, time.Unix(1_800_000_000, 0))
		r.SetUID(types.UID(node))
		change(r)
		return *r
	}
	read := cluster.DRAObjects{
		Deleted: map[types.UID]bool{"gone": true},
		TaintRules: []unstructured.Unstructured{
			rule("whole", func(*unstructured.Unstructured) {}),
			rule("edited", func(r *unstructured.Unstructured) {
				g.Expect(unstructured.SetNestedField(r.Object, "NoExecute", "spec", "taint", "effect")).To(Succeed())
			}),
			rule("ending", func(r *unstructured.Unstructured) { r.SetDeletionTimestamp(new(metav1.Now())) }),
			rule("gone", func(*unstructured.Unstructured) {}),
			rule("taken", func(r *unstructured.Unstructured) { r.SetLabels(nil) }),
		},
	}.Read()
	g.Expect(read.Cluster.DevicesTaintedOn).To(Equal([]string{"whole"}))
	g.Expect(read.Cluster.Edited).To(Equal([]string{"edited"}))
	g.Expect(read.Rules).To(Equal(map[string]types.UID{"whole": "whole", "edited": "edited"}))
	g.Expect(read.Nodes).To(HaveLen(2))
	g.Expect(read.Nodes["whole"].DevicesTaintedAt.IsZero()).To(BeFalse())
	g.Expect(read.Nodes["taken"].TaintRuleTaken).To(BeTrue())
}

// TestATaintRuleThatCannotBeWrittenHasAReasonAndBlocksNoOtherNode: another node of the policy takes the turn, and the
// node goes on once it can.
func TestATaintRuleThatCannotBeWrittenHasAReasonAndBlocksNoOtherNode(t *testing.T) {
	for name, c := range map[string]struct {
		set    func(h *host, prevented bool)
		reason string
		says   string
	}{
		"another's has its name": {
			set:    func(h *host, prevented bool) { h.TaintRuleTaken = prevented },
			reason: v1alpha1.ReasonDRAUnavailable, says: "DeviceTaintRule gpusharing-a exists and is not the operator's",
		},
		"a webhook refuses it": {
			set:    func(h *host, prevented bool) { h.driver.refused = prevented },
			reason: v1alpha1.ReasonWriteFailed, says: "DeviceTaintRule gpusharing-a",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cluster, a := evictingOnDRA()
			cluster.Repeats = &action.Repeats{}
			b := cluster.addDRA("b", sim.A100)
			c.set(a, true)
			d := cluster.noting(5 * time.Minute)
			g.Expect(one(d).Reason).To(Equal(c.reason), one(d).Message)
			hasMessage(g, d, c.says)
			isUpToDate(g, d.Nodes[1])
			g.Expect(b.Published.Published()).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7}))
			g.Expect(a.devices()[0].State.MIG).To(BeFalse())
			g.Expect(cluster.writes["action.TaintDevices"]).To(BeNumerically("<=", 9))
			c.set(a, false)
			cluster.Now = cluster.Now.Add(time.Hour)
			d = cluster.noting(5 * time.Minute)
			isUpToDate(g, one(d))
		})
	}
}

// noting reconciles every second, and counts what is written as the executor does.
func (c *site) noting(d time.Duration) (last rollout.Decision) {
	for range int(d / time.Second) {
		last = c.memory.decide(c.world())
		for _, a := range last.Actions {
			c.do(a)
			if _, rules := a.(action.TaintDevices); rules && c.hosts[a.NodeName()].driver.refused {
				c.Repeats.Refuse(a, "denied by webhook", c.Now)
				continue
			}
			c.Repeats.Note(a, c.Now)
		}
		c.tick(time.Second)
	}
	return last
}

// TestANodeIsReleasedOnceTaintRulesAreServedAgain: until then its GPUNode has the reason.
func TestANodeIsReleasedOnceTaintRulesAreServedAgain(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.run(120)
	c.DRA.ServesTaintRules, c.Policies = false, nil
	c.during(5*time.Minute, time.Second)
	g.Expect(h.devices()[0].State.MIG).To(BeTrue())
	g.Expect(h.waits()).To(And(HavePrefix("DRAUnavailable: "), ContainSubstring("serves no DeviceTaintRules")), "%v", c.writes)
	c.DRA.ServesTaintRules = true
	c.run(240)
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(h.Annotations).To(BeEmpty())
}

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
	c.settles(g, 240)
	g.Expect(c.evicted).To(BeEmpty())
}

// TestAPodThatIsNotPreparedBlocksByWhatItIsAllocated: the kubelet reports nothing of it, and its claim does.
func TestAPodThatIsNotPreparedBlocksByWhatItIsAllocated(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)))
	c.run(120)
	c.claim(h, "waits", nvidia.DeviceName(h.devices()[0], h.devices()[0].State.Instances[0]), "gpusharing-mig-1g.5gb", "nvidia.com/mig-1g.5gb")
	h.waitsToStart("waits")
	held := h.devices()[0].State.Instances[0].UUID
	c.reshare(mig(count("7g", 1)))
	d := c.during(time.Minute, time.Second)
	hasMessage(g, d, "pod user/waits (GPU 0, instance 1g.5gb at")
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
	isUpToDate(g, one(d))
	hasReason(g, d, v1alpha1.ReasonDeviceGone)
	g.Expect(h.Published.Published()).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-2g.10gb": 4}))
	g.Expect(c.evicted).To(BeEmpty())
}

// TestPodsThatShareAClaimAreNotEvictedForNothing: the pods of a Deployment name one ResourceClaim. A claim that is
// allocated is not allocated anew, so the DeviceTaintRule keeps no further pod of it off the node (kubernetes
// pkg/scheduler/framework/plugins/dynamicresources, PreFilter).
func TestPodsThatShareAClaimAreNotEvictedForNothing(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.claim(h, "train", "gpu-0", "gpu.nvidia.com", "nvidia.com/gpu")
	h.Claims[0].Shared = true
	d := c.during(5*time.Minute, time.Second)
	hasState(g, d, node.Draining)
	g.Expect(one(d).Message).To(HaveSuffix("; pod user/train is not evicted, since ResourceClaim user/train, which pods can share, stays; scale its workload down"))
	g.Expect(h.GPU.Status.Rollout.Blockers).To(ContainElement(HaveField("Handling",
		ContainSubstring("which pods can share, stays; scale its workload down"))))
	d = c.during(6*time.Minute, time.Second)
	hasReason(g, d, v1alpha1.ReasonDrainTimedOut)
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(c.evicted).To(BeEmpty())
	c.end(h, "train") // its Deployment is scaled down
	d, _ = c.run(240)
	isUpToDate(g, one(d))
}

// TestPodsKeepTheirClaimsWhileAKubeletLies: it lists a resource of NVIDIA's device plugin, so the node counts as none of the DRA driver. A pod whose claim
// others share is not evicted for nothing, and a monitor, which holds nothing, not at all.
func TestPodsKeepTheirClaimsWhileAKubeletLies(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	c.switchOver(h, true)
	c.setPolicy("research", mig(count("1g", 7)), evicting)
	c.run(120)
	d := h.devices()[0]
	c.claim(h, "train", nvidia.DeviceName(d, d.State.Instances[0]), "gpusharing-mig-1g.5gb", "nvidia.com/mig-1g.5gb")
	h.Claims[0].Shared = true
	c.Policies = nil
	for n := range 30 {
		c.tick(time.Second)
		h.Allocatable["nvidia.com/gpu.lies"] = 1
		if n == 3 {
			h.Claims = append(slices.Clone(h.Claims), dra.Claim{
				Name: "user/watch", Classes: []string{"mig.nvidia.com"}, Pods: []string{"uid-watch"},
				Admin: []dra.Allocated{{Pool: h.Name, Device: nvidia.DeviceName(d, d.State.Instances[1])}},
			})
			h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: "watch", UID: "uid-watch", Controller: "ReplicaSet", Scheduled: c.Now})
			h.holds(d.UUID, d.State.Instances[1].ID, "watch")
			h.report()
		}
		c.reconcile()
	}
	g.Expect(h.waits()).To(ContainSubstring("user/train"))
	g.Expect(c.evicted).To(BeEmpty())
}

// TestAPodThatNobodyMakesAgainIsEvictedFromItsClaim, also if it made the claim itself.
func TestAPodThatNobodyMakesAgainIsEvictedFromItsClaim(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.claim(h, "train", "gpu-0", "gpu.nvidia.com", "nvidia.com/gpu")
	h.Claims[0].Shared = true
	h.pod("train").Controller = ""
	c.settles(g, 240)
	g.Expect(c.evicted).To(ConsistOf("train"))
}

// TestAMonitorWithAdminAccessBlocksNothing: the kubelet lists its devices as those of any claim, and the agent leaves
// them out by its spec.
func TestAMonitorWithAdminAccessBlocksNothing(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.monitor(h, "exporter", "DaemonSet", false)
	d, _ := c.run(240)
	isUpToDate(g, one(d))
	g.Expect(h.GPU.Spec.AdminClaims).To(Equal([]string{"user/exporter"}))
	c.end(h, "exporter") // its successor finds no GPU that is not partitioned
	c.reshare(mig(count("3g", 2)))
	d, _ = c.run(240)
	isUpToDate(g, one(d))
	g.Expect(h.GPU.Spec.AdminClaims).To(BeEmpty())
	g.Expect(c.evicted).To(BeEmpty())
	clear(c.writes)
	c.during(time.Hour, time.Minute)
	g.Expect(c.writes).To(BeEmpty(), "it stays so")
	c.Policies = nil
	c.run(240)
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	isForgotten(g, h)
}

// TestAMonitorIsNoBlockerBeforeItsAgentKnows: the agent is told of the claim when a policy comes, and reports the
// container as a user until then. A monitor that is no DaemonSet's would be evicted.
func TestAMonitorIsNoBlockerBeforeItsAgentKnows(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.monitor(h, "exporter", "DaemonSet", false)
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
	c, h := evictingOnDRA()
	c.reconcile()
	c.tick(time.Second) // its scheduler has not seen the taint
	c.monitor(h, "exporter", "DaemonSet", false)
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
	isUpToDate(g, one(d))
}

// TestAMonitorThatHasADeviceOfItsOwnBlocks: what of the claim is for administrators cannot be told from the rest by the
// agent.
func TestAMonitorThatHasADeviceOfItsOwnBlocks(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)))
	c.monitor(h, "exporter", "DaemonSet", false)
	h.Claims[0].Devices = h.Claims[0].Admin[:1]
	d := c.during(time.Minute, time.Second)
	hasMessage(g, d, "pod user/exporter")
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
	c, h := evictingOnDRA()
	gang(c, h)
	d := c.during(time.Minute, time.Second)
	g.Expect(h.GPU.Status.Rollout.Blockers).NotTo(BeEmpty())
	for _, b := range h.GPU.Status.Rollout.Blockers {
		g.Expect(b.Kind).To(Equal(v1alpha1.BlockerKindPod))
		g.Expect(b.Name).To(Equal("worker"))
		g.Expect(b.Handling).To(ContainSubstring("which pods can share, stays; scale its workload down"))
	}
	hasMessage(g, d, "pod user/worker")
	g.Expect(c.evicted).To(BeEmpty(), "the claim stays allocated to its group")

	c.end(h, "worker") // and another node has the group's other pods
	c.during(time.Minute, time.Second)
	g.Expect(h.GPU.Status.Rollout.Blockers).To(ConsistOf(And(HaveField("Name", "worker"), HaveField("Kind", v1alpha1.BlockerKindResourceClaim),
		HaveField("Handling", "is waited for; no pod of the node uses it, but it is reserved for PodGroup gang. Delete that if its work is over"))))
	h.Claims = nil // the group is over
	d, _ = c.run(240)
	isUpToDate(g, one(d))
}
