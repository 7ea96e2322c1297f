// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// onDRA is a cluster with one node that NVIDIA's DRA driver serves, and a policy for it.
func onDRA(s v1alpha1.Sharing, with ...func(*v1alpha1.GPUSharingPolicy)) (*site, *host) {
	c := newSite()
	c.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonNoDevicePlugin, Message: "there is no ClusterPolicy"}
	h := c.addDRA("a", sim.A100, sim.A100)
	c.setPolicy("research", s, with...)
	return c, h
}

func evictingOnDRA() (*site, *host) { return onDRA(mig(count("1g", 7)), evicting) }

// reshare gives the only policy another sharing.
func (c *site) reshare(s v1alpha1.Sharing) {
	c.Policies[0].Spec.Sharing = s
	c.Policies[0].Generation++
}

// noted is a reconcile of a controller that counts what it writes.
func (c *site) noted(step time.Duration) rollout.Decision {
	d := c.reconcile()
	for _, a := range d.Actions {
		c.Repeats.Note(a, c.Now)
	}
	c.tick(step)
	return d
}

func one(d rollout.Decision) rollout.NodeState { return d.Nodes[0] }

func TestMIGWhereTheDRADriverServes(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	before := h.Published
	g.Expect(c.allocate(h, "train", "nvidia.com/gpu")).To(Equal("gpu-0"))
	d, states := c.run(120)
	isUpToDate(g, one(d))
	g.Expect(states["a"]).To(ContainElements(node.Draining, node.Verifying, node.Finishing))
	g.Expect(c.evicted).To(ConsistOf("train"))
	g.Expect(c.classes()).To(Equal(map[string]string{"gpu.nvidia.com": "nvidia.com/gpu", "gpusharing-mig-1g.5gb": "nvidia.com/mig-1g.5gb"}))
	g.Expect(h.Published.Published()).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 14}))
	g.Expect(one(d).Advertised).To(Equal(one(d).Expected))
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(h.untouched()).To(BeEmpty())
	g.Expect(c.Configs).To(BeNil(), "nothing reads a configuration")
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1), "the driver is restarted once")
	g.Expect(d.Policies["research"].Resources).To(ConsistOf(v1alpha1.ResourceCount{Name: "nvidia.com/mig-1g.5gb", Expected: 14, Advertised: 14}))
	for range 14 {
		c.pods++
		g.Expect(c.allocate(h, "p"+string(rune('a'+c.pods)), "nvidia.com/mig-1g.5gb")).NotTo(BeEmpty())
	}
	g.Expect(c.allocate(h, "onemore", "nvidia.com/mig-1g.5gb")).To(BeEmpty())
	g.Expect(h.hanging()).To(BeEmpty())
	clear(c.writes)
	c.during(time.Hour, time.Minute)
	g.Expect(c.writes).To(BeEmpty(), "it stays so")

	c.Policies = nil
	d, _ = c.run(120)
	g.Expect(d.Nodes).To(BeEmpty())
	g.Expect(h.Published).To(Equal(before))
	g.Expect(c.classes()).To(Equal(map[string]string{"gpu.nvidia.com": "nvidia.com/gpu"}))
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(h.Annotations).To(BeEmpty())
	isForgotten(g, h)
}

// TestInstancesAreAddedBesidePodsThatRun: nobody is kept off or evicted, and the restart of the driver disturbs none.
func TestInstancesAreAddedBesidePodsThatRun(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 3)), evicting)
	c.run(120)
	device := c.allocate(h, "train", "nvidia.com/mig-1g.5gb")
	was, _ := h.Published.Named(device)
	clear(c.writes)
	c.reshare(mig(count("1g", 4)))
	c.settles(g, 120)
	g.Expect(c.writes).NotTo(HaveKey("action.TaintDevices"))
	g.Expect(c.evicted).To(BeEmpty())
	is, _ := h.Published.Named(device)
	g.Expect(is).To(Equal(was))
	g.Expect(h.Published.Published()).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 8}))
}

// TestARepartitionKeepsAPodOnItsInstance that the new layout has too.
func TestARepartitionKeepsAPodOnItsInstance(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.run(120)
	device := c.allocate(h, "train", "nvidia.com/mig-1g.5gb")
	was, _ := h.Published.Named(device)
	c.reshare(mig(count("1g", 1), count("2g", 2)))
	c.settles(g, 120)
	g.Expect(c.evicted).To(BeEmpty())
	is, _ := h.Published.Named(device)
	g.Expect(is).To(Equal(was))
	g.Expect(c.classes()).To(HaveKey("gpusharing-mig-2g.10gb"))
}

// TestAPodThatIsAllocatedJustBeforeTheTaintRuleIsDrained: its claim shows a moment after the taint.
func TestAPodThatIsAllocatedJustBeforeTheTaintRuleIsDrained(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	for h.DevicesTaintedAt.IsZero() {
		c.reconcile()
	}
	withTaintRule := h.DevicesTaintedAt
	h.DevicesTaintedAt = time.Time{}
	g.Expect(c.allocate(h, "late", "nvidia.com/gpu")).NotTo(BeEmpty(), "by a scheduler that has not seen the rule")
	h.DevicesTaintedAt = withTaintRule
	h.pod("late").Starting = true
	h.hardware.Update(func(n *sim.Node) { n.GPUs[0].Holders = nil }) // no container of it has started, so the agent reports nothing
	h.report()
	d, _ := c.run(120)
	g.Expect(c.evicted).To(ConsistOf("late"))
	isUpToDate(g, one(d))
	g.Expect(h.hanging()).To(BeEmpty())
}

func TestAClaimThatHoldsADeviceBlocksAndIsNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	h.Claims = []dra.Claim{{Name: "team/reserved", Devices: []dra.Allocated{{Pool: "a", Device: "gpu-0"}}}}
	d := c.during(time.Minute, time.Second)
	hasState(g, d, node.Draining)
	hasMessage(g, d, "ResourceClaim team/reserved (GPU 0)")
	g.Expect(h.GPU.Status.Rollout.Blockers).To(ContainElement(And(
		HaveField("Kind", v1alpha1.BlockerKindResourceClaim), HaveField("Namespace", "team"), HaveField("Name", "reserved"),
		HaveField("Handling", ContainSubstring("delete it unless one is to come")))))
	g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
	h.Claims = nil
	d, _ = c.run(120)
	isUpToDate(g, one(d))
}

// TestAnUnknownDeviceCountsAsAnyGPU: the driver restarts without one that a claim still has.
func TestAnUnknownDeviceCountsAsAnyGPU(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	h.Claims = []dra.Claim{{Name: "team/reserved", Devices: []dra.Allocated{{Pool: "a", Device: "gpu-9"}}}, {Name: "team/elsewhere", Devices: []dra.Allocated{{Pool: "b", Device: "gpu-0"}}}}
	d := c.during(time.Minute, time.Second)
	g.Expect(one(d).Message).To(And(ContainSubstring("ResourceClaim team/reserved (GPUs that the node does not publish)"), Not(ContainSubstring("elsewhere"))))
	g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
}

// TestADriverThatDoesNotComeBackFailsTheChange, and the node returns to what it was.
func TestADriverThatDoesNotComeBackFailsTheChange(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	h.driver.broken = true
	d := c.during(5*time.Minute, time.Second)
	hasState(g, d, node.Verifying)
	hasMessage(g, d, "instance 1g.5gb at 0 of GPU 0")
	d = c.during(5*time.Minute, time.Second)
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonNotPublished)
	g.Expect(h.devices()[0].State.MIG).To(BeFalse(), "rolled back")
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(h.Published.Differs(h.GPU.Status.Devices, 1)).To(BeEmpty())

	h.driver.broken = false
	h.annotate(v1alpha1.AnnotationRetry, "1")
	d, _ = c.run(120)
	isUpToDate(g, one(d))
}

// TestTheDriverIsRestartedAfterARebootOnly where it started before the agent had made the instances again.
func TestTheDriverIsRestartedAfterARebootOnly(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.run(120)
	names := func() (names []string) {
		for _, d := range h.Published.Devices {
			names = append(names, d.Name)
		}
		return names
	}
	before := names()
	h.hardware.Reboot()
	h.Pods, h.Published = nil, h.shown() // as a driver that started first
	c.tick(time.Second)
	c.tick(time.Second)
	h.Published = &dra.Pool{Complete: true}
	clear(c.writes)
	d, _ := c.run(240)
	isUpToDate(g, one(d))
	g.Expect(names()).To(Equal(before), "so that the same pods run again on the same claims")
	g.Expect(c.writes["action.DeletePod"]).To(Equal(1))
	g.Expect(c.writes).NotTo(HaveKey("action.TaintDevices"))
}

func TestSharesAreTheAdministrators(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(timeSlicing(4))
	d := c.during(time.Minute, time.Second)
	hasState(g, d, node.Unsupported)
	hasReason(g, d, v1alpha1.ReasonDRASharesDiffer)
	hasMessage(g, d, "featureGates.ConsumableShares=true and consumableShares=4")
	g.Expect(c.writes).NotTo(HaveKey("action.SetSpec"))

	h.driver.shares, h.driver.uid = 4, "" // a Helm upgrade restarts it
	c.tick(time.Second)
	d, _ = c.run(120)
	isUpToDate(g, one(d))
	g.Expect(one(d).Advertised).To(Equal(gpusOnly(8)))
	g.Expect(h.GPU.Status.Rollout.Shares).To(Equal(int64(4)), "of which the agent learns the share of a container")
	g.Expect(c.writes).NotTo(HaveKey("action.TaintDevices"))

	c.reshare(v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive})
	d = c.during(time.Minute, time.Second)
	g.Expect(one(d).Message).To(And(ContainSubstring("First drain the pods"), ContainSubstring("consumableShares=disabled")))
}

// TestTheTimeSliceIsTheAdministrators: it is the config of the class that offers GPUs, and the agent sets none.
func TestTheTimeSliceIsTheAdministrators(t *testing.T) {
	g := NewWithT(t)
	s := timeSlicing(4)
	s.TimeSlicing.Interval = v1alpha1.TimeSliceIntervalMedium
	c, h := onDRA(s)
	h.driver.shares, h.driver.uid = 4, ""
	c.tick(time.Second)
	refused := func(why string) {
		t.Helper()
		d := c.during(time.Minute, time.Second)
		hasState(g, d, node.Unsupported)
		hasReason(g, d, v1alpha1.ReasonDRAIntervalDiffers)
		hasMessage(g, d, why)
	}
	refused("feature gate TimeSlicingSettings of NVIDIA's DRA driver is off")
	g.Expect(c.writes).NotTo(HaveKey("action.SetSpec"))

	h.driver.slices = true // a Helm upgrade restarts it
	h.restartDriver()
	refused("DeviceClass gpu.nvidia.com gives GPUs no time slice")

	c.DRA.Classes[0].Strategy, c.DRA.Classes[0].Interval = "TimeSlicing", "Medium"
	d, _ := c.run(120)
	isUpToDate(g, one(d))
	g.Expect(h.GPU.Spec.Devices).To(HaveEach(HaveField("Sharing.TimeSliceInterval", BeEmpty())), "the driver sets it")
	g.Expect(h.GPU.Spec.Devices).NotTo(BeEmpty())

	c.DRA.Classes[0].Interval = "Long"
	refused("gives GPUs time slice Long")
}

func TestPoliciesThatNeedDifferentSharesAreNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(timeSlicing(4))
	c.addDRA("b", sim.T4)
	for name, of := range map[string]*v1alpha1.GPUSharingPolicy{"a": &c.Policies[0]} {
		of.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"kubernetes.io/hostname": name}}
	}
	other := policyOf("other", timeSlicing(2), func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"kubernetes.io/hostname": "b"}}
	})
	c.Policies = append(c.Policies, other)
	h.driver.shares, h.driver.uid, c.hosts["b"].driver.shares, c.hosts["b"].driver.uid = 4, "", 4, ""
	c.tick(time.Second)
	d := c.during(time.Minute, time.Second)
	isUpToDate(g, one(d))
	g.Expect(d.Nodes[1].Reason).To(Equal(v1alpha1.ReasonDRASharesDiffer))
	g.Expect(d.Nodes[1].Message).To(ContainSubstring("policy research needs 4 shares"))
}

// neighbour adds a node of the driver, which another policy governs, and gives each of the two policies its node.
func (c *site) neighbour(name string, s v1alpha1.Sharing, with ...func(*v1alpha1.GPUSharingPolicy)) *host {
	h := c.addDRA(name, sim.A100)
	c.Policies = append(c.Policies, policyOf("other", s, with...))
	for i, node := range []string{"a", name} {
		c.Policies[i].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"kubernetes.io/hostname": node}}
	}
	return h
}

// shares lets an administrator give each GPU of all nodes so many shares. A Helm upgrade restarts the driver.
func (c *site) shares(count int64) {
	for _, h := range c.hosts {
		h.driver.shares, h.driver.uid = count, ""
	}
	c.tick(time.Second)
}

// TestMIGOnSomeGPUsTakesTheSharesOfTheDriver, which has one number for all nodes: it is for a policy of another pool.
func TestMIGOnSomeGPUsTakesTheSharesOfTheDriver(t *testing.T) {
	for name, with := range map[string]func(*v1alpha1.GPUSharingPolicy){
		"gpuSelector leaves a GPU out": func(p *v1alpha1.GPUSharingPolicy) { p.Spec.GPUSelector = &v1alpha1.GPUMatch{Indexes: []int32{0}} },
		"no layout matches a GPU":      func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = onFirst(p.Spec.Sharing) },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := onDRA(mig(count("1g", 7)), evicting, with)
			c.neighbour("b", timeSlicing(4))
			c.shares(4)
			d, _ := c.run(240)
			g.Expect(d.Nodes).To(HaveEach(HaveField("State", node.UpToDate)))
			offered := map[string]int64{"nvidia.com/mig-1g.5gb": 7, "nvidia.com/gpu": 4}
			g.Expect(one(d).Advertised).To(Equal(offered))
			g.Expect(one(d).Expected).To(Equal(offered))
			g.Expect(one(d).Replicas).To(Equal(map[string]int32{"nvidia.com/gpu": 4}))
			g.Expect(d.Policies["research"].Resources).To(ContainElement(
				v1alpha1.ResourceCount{Name: "nvidia.com/gpu", Expected: 4, Advertised: 4, Oversubscription: 4}))
			g.Expect(c.allocate(h, "train", "nvidia.com/gpu")).To(Equal("gpu-1"))
			g.Expect(c.allocate(h, "more", "nvidia.com/gpu")).To(Equal("gpu-1"))

			asked, config := *h.GPU.Spec.DeepCopy(), one(d).ConfigName
			for _, count := range []int64{8, 2, 0} {
				clear(c.writes)
				c.shares(count)
				d = c.during(10*time.Minute, time.Second)
				offered["nvidia.com/gpu"] = max(count, 1)
				isUpToDate(g, one(d))
				g.Expect(one(d).Advertised).To(Equal(offered))
				g.Expect(one(d).Expected).To(Equal(offered))
				g.Expect(one(d).ConfigName).To(Equal(config))
				g.Expect(h.GPU.Spec).To(Equal(asked))
				g.Expect(c.writes).NotTo(Or(HaveKey("action.DeletePod"), HaveKey("action.TaintDevices"), HaveKey("action.SetSpec")))
			}
			g.Expect(c.evicted).To(BeEmpty())
			g.Expect(h.hanging()).To(BeEmpty())
		})
	}
}

// TestMIGOnSomeGPUsTakesTheTimeSliceOfTheDriver: policies of other pools ask for it.
func TestMIGOnSomeGPUsTakesTheTimeSliceOfTheDriver(t *testing.T) {
	g := NewWithT(t)
	c, _ := onDRA(onFirst(mig(count("1g", 7))), evicting)
	s := timeSlicing(4)
	s.TimeSlicing.Interval = v1alpha1.TimeSliceIntervalMedium
	c.neighbour("b", s)
	c.shares(4)
	d, _ := c.run(240)
	g.Expect(d.Nodes).To(HaveExactElements(HaveField("State", node.UpToDate), HaveField("Reason", v1alpha1.ReasonDRAIntervalDiffers)))
	for _, h := range c.hosts {
		h.driver.slices = true
		h.restartDriver()
	}
	c.DRA.Classes[0].Strategy, c.DRA.Classes[0].Interval = "TimeSlicing", "Medium"
	d, _ = c.run(240)
	g.Expect(d.Nodes).To(HaveEach(HaveField("State", node.UpToDate)))
}

// TestAPolicyThatPartitionsGPUsRequestsNoShares, so it is not named as the one that needs another number.
func TestAPolicyThatPartitionsGPUsRequestsNoShares(t *testing.T) {
	g := NewWithT(t)
	c, _ := onDRA(timeSlicing(4))
	c.neighbour("b", onFirst(mig(count("1g", 7))))
	d := c.during(time.Minute, time.Second)
	hasReason(g, d, v1alpha1.ReasonDRASharesDiffer)
	g.Expect(one(d).Message).To(And(ContainSubstring("consumableShares=4"), Not(ContainSubstring("policy other"))))
}

// TestNotOnDRA: a reason each, and the node stays as it was.
func TestNotOnDRA(t *testing.T) {
	dynamic := func(_ *site, h *host) {
		h.Pods = append(h.Pods, cluster.Pod{Namespace: "nvidia-dra", Name: "p", UID: "p", DRA: true, DynamicMIG: true})
	}
	for name, c := range map[string]struct {
		sharing v1alpha1.Sharing
		with    func(*site, *host)
		reason  string
		says    string
	}{
		"MPS":        {sharing: mps(4), reason: v1alpha1.ReasonNotOnDRA, says: "serves one ResourceClaim"},
		"DynamicMIG": {sharing: mig(count("1g", 7)), with: dynamic, reason: v1alpha1.ReasonDynamicMIGActive, says: "featureGates.DynamicMIG=false"},
		"a Kubernetes without DeviceTaintRules": {
			sharing: mig(count("1g", 7)), with: func(c *site, _ *host) { c.DRA.ServesTaintRules = false }, reason: v1alpha1.ReasonDRAUnavailable, says: "Kubernetes 1.37",
		},
		"a Kubernetes without extended resources of classes": {
			sharing: mig(count("1g", 7)), with: func(c *site, _ *host) { c.DRA.ServesClasses = false }, reason: v1alpha1.ReasonDRAUnavailable, says: "Kubernetes 1.36",
		},
		"a class of another owner": {
			sharing: mig(count("1g", 7)), with: func(c *site, _ *host) {
				c.DRA.Classes = append(c.DRA.Classes, dra.Class{Name: "gpusharing-mig-1g.5gb"})
			},
			reason: v1alpha1.ReasonDeviceClassConflict, says: "is not the operator's",
		},
		"a class of another owner for whole GPUs": {
			sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}, with: func(c *site, _ *host) { c.DRA.Classes = []dra.Class{{Name: "gpusharing-gpu"}} },
			reason: v1alpha1.ReasonDeviceClassConflict, says: "DeviceClass gpusharing-gpu exists and is not the operator's, and it does not serve nvidia.com/gpu",
		},
		"a driver of an unknown version": {
			sharing: mig(count("1g", 7)), with: func(_ *site, h *host) {
				h.Published = &dra.Pool{Complete: true, Devices: []dra.Device{{Name: "gpu-0"}}}
			},
			reason: v1alpha1.ReasonDRADriverUnknown, says: "v0.5.0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cluster, h := onDRA(c.sharing, evicting)
			if c.with != nil {
				c.with(cluster, h)
			}
			d := cluster.during(10*time.Minute, 10*time.Second)
			hasState(g, d, node.Unsupported)
			g.Expect(one(d).Reason).To(Equal(c.reason))
			hasMessage(g, d, c.says)
			g.Expect(cluster.evicted).To(BeEmpty())
			g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
			g.Expect(h.DevicesTaintedAt).To(BeZero())
			g.Expect(cluster.writes["action.DeletePod"]).To(BeZero())
		})
	}
}

func TestAFeatureGateThatDropsTheResourceIsNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.dropsNames, c.Repeats = true, &action.Repeats{}
	var d rollout.Decision
	for range 60 {
		d = c.noted(10 * time.Second)
	}
	hasReason(g, d, v1alpha1.ReasonDRAUnavailable)
	hasMessage(g, d, "DRAExtendedResource")
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(c.writes["action.WriteClass"]).To(BeNumerically("<", 10))
	g.Expect(c.writes).NotTo(HaveKey("action.DeleteClass"))
	c.dropsNames = false
	c.Policies = nil
	c.run(300)
	g.Expect(c.classes()).NotTo(HaveKey("gpusharing-mig-1g.5gb"))
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
}

// TestAClassOfTheAdministratorIsUsed, since two classes with one resource make the scheduler forget it.
func TestAClassOfTheAdministratorIsUsed(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.setClass(dra.Class{Name: "small", Resource: "nvidia.com/mig-1g.5gb"})
	c.settles(g, 120)
	g.Expect(c.classes()).To(HaveLen(2))
	g.Expect(c.allocate(h, "train", "nvidia.com/mig-1g.5gb")).NotTo(BeEmpty())
	c.end(h, "train")
	c.Policies = nil
	c.run(120)
	g.Expect(c.classes()).To(HaveKey("small"))
}

// TestTheSchedulerKnowsTheResourceAfterAnAdministratorsClassWent: the class of the operator, which is left, is written
// again.
func TestTheSchedulerKnowsTheResourceAfterAnAdministratorsClassWent(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.run(120)
	c.setClass(dra.Class{Name: "theirs", Resource: "nvidia.com/mig-1g.5gb", Age: 1 << 40})
	d, _ := c.run(10)
	hasReason(g, d, v1alpha1.ReasonDeviceClassConflict)
	c.dropClass("theirs")
	g.Expect(c.allocate(h, "early", "nvidia.com/mig-1g.5gb")).To(BeEmpty(), "the scheduler has forgotten it")
	d, _ = c.run(10)
	hasReason(g, d, v1alpha1.ReasonReady)
	g.Expect(c.allocate(h, "train", "nvidia.com/mig-1g.5gb")).NotTo(BeEmpty())
	clear(c.writes)
	c.during(time.Minute, time.Second)
	g.Expect(c.writes).NotTo(HaveKey("action.WriteClass"), "once")
}

// TestAClassStaysBesideAnAdministrators: the scheduler would forget the resource of both.
func TestAClassStaysBesideAnAdministrators(t *testing.T) {
	g := NewWithT(t)
	c, _ := evictingOnDRA()
	c.run(120)
	c.setClass(dra.Class{Name: "theirs", Resource: "nvidia.com/mig-1g.5gb", Age: 1 << 40})
	c.Policies = nil
	c.run(300)
	g.Expect(c.scheduler).To(HaveKeyWithValue("nvidia.com/mig-1g.5gb", HaveField("Name", "theirs")))
	c.dropClass("theirs")
	c.run(10)
	g.Expect(c.classes()).To(Equal(map[string]string{"gpu.nvidia.com": "nvidia.com/gpu"}))
}

// TestAClassThatLostItsResourceBeforeTheFirstChangeIsWrittenAgain: its policy names it, and no node has anything of the
// operator's yet.
func TestAClassThatLostItsResourceBeforeTheFirstChangeIsWrittenAgain(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.setClass(dra.Class{Name: "gpusharing-mig-1g.5gb", Own: true, Selector: dra.ForInstances("1g.5gb").Selector})
	c.settles(g, 120)
	g.Expect(c.allocate(h, "train", "nvidia.com/mig-1g.5gb")).NotTo(BeEmpty())
}

// TestTwoClassesForOneResourceAreNamed, also those of others that come later: when one of them goes, the scheduler
// forgets the resource.
func TestTwoClassesForOneResourceAreNamed(t *testing.T) {
	g := NewWithT(t)
	c, _ := onDRA(v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive})
	d, _ := c.run(120)
	hasReason(g, d, v1alpha1.ReasonReady)
	c.DRA.Classes = append(c.DRA.Classes, dra.Class{Name: "mine", Resource: "nvidia.com/gpu", Age: 1 << 40}, dra.Class{Name: "small", Resource: "nvidia.com/mig-1g.5gb"})
	d = c.reconcile()
	isUpToDate(g, one(d))
	hasReason(g, d, v1alpha1.ReasonDeviceClassConflict)
	g.Expect(one(d).Message).To(And(ContainSubstring("DeviceClasses gpu.nvidia.com, mine all serve nvidia.com/gpu; when one is deleted"),
		ContainSubstring("kubectl annotate deviceclass mine"), Not(ContainSubstring("mig-1g.5gb"))))
	c.DRA.Classes = slices.DeleteFunc(c.DRA.Classes, func(c dra.Class) bool { return c.Name == "mine" })
	g.Expect(one(c.reconcile()).Reason).To(Equal(v1alpha1.ReasonReady))
}

// TestAClassStaysWhileAPodOrClaimNamesIt, a pod also by deviceclass.resource.kubernetes.io/<class>, which each class serves too. Those that wait keep
// none once no policy is left: a tenant keeps nobody from restoring a cluster.
func TestAClassStaysWhileAPodOrClaimNamesIt(t *testing.T) {
	g := NewWithT(t)
	const class = "gpusharing-mig-1g.5gb"
	c, h := evictingOnDRA()
	c.run(120)
	c.Unscheduled = []cluster.Pod{{Namespace: "user", Name: "waits", Requests: map[string]int64{"nvidia.com/mig-1g.5gb": 1}}}
	c.reshare(mig(count("2g", 3)))
	c.run(120)
	g.Expect(c.classes()).To(HaveKey(class))
	pod := cluster.PodOf(&corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{
		Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"deviceclass.resource.kubernetes.io/" + class: resource.MustParse("1")}},
	}}}}, &cluster.Programs{})
	g.Expect(pod.GPU).To(BeTrue())
	c.Unscheduled = []cluster.Pod{pod}
	c.run(10)
	g.Expect(c.classes()).To(HaveKey(class), "by its implicit resource")
	c.Unscheduled, h.Claims = nil, []dra.Claim{{Name: "team/waits", Classes: []string{class}}}
	c.run(10)
	g.Expect(c.classes()).To(HaveKey(class), "a claim that is not allocated names it")
	h.Claims[0].Devices = []dra.Allocated{{Pool: h.Name, Device: "gone"}}
	c.Policies = nil
	c.run(120)
	g.Expect(c.classes()).To(HaveKey(class), "an allocated one does")
	c.Unscheduled, h.Claims[0].Devices = []cluster.Pod{pod}, nil
	c.run(10)
	g.Expect(c.classes()).NotTo(HaveKey(class))
}

// TestAClassStaysWhileAPolicyNamesIt: a pool of nodes scales to zero. Without the class no autoscaler can tell that a
// new node would serve a pod, and nothing creates it before there is one.
func TestAClassStaysWhileAPolicyNamesIt(t *testing.T) {
	g := NewWithT(t)
	c, _ := evictingOnDRA()
	c.run(120)
	g.Expect(c.classes()).To(HaveKey("gpusharing-mig-1g.5gb"))
	c.hosts = map[string]*host{}
	c.run(10)
	g.Expect(c.classes()).To(HaveKey("gpusharing-mig-1g.5gb"))
	c.reshare(mig(count("2g", 3)))
	c.run(10)
	g.Expect(c.classes()).NotTo(HaveKey("gpusharing-mig-1g.5gb"))
}

func TestAPodThatHangsOnADeviceThatIsGoneIsNamed(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.run(120)
	c.claim(h, "stuck", "gpu-0-mig-7g40gb-0-0", "gpusharing-mig-7g.40gb", "nvidia.com/mig-7g.40gb")
	d := c.reconcile()
	isUpToDate(g, one(d))
	hasReason(g, d, v1alpha1.ReasonDeviceGone)
	g.Expect(one(d).Message).To(And(ContainSubstring("pod user/stuck (gpu-0-mig-7g40gb-0-0)"), ContainSubstring("Delete them")))
	c.end(h, "stuck")
	g.Expect(one(c.reconcile()).Reason).To(Equal(v1alpha1.ReasonReady))
}

// TestEachNodeByWhatServesIt: a policy for a node of the device plugin and one of the DRA driver, and what becomes of a
// node that moves.
func TestEachNodeByWhatServesIt(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.OtherControllers = &cluster.OtherControllers{}
	plugin, driver := c.add("a", sim.A100), c.addDRA("b", sim.A100)
	c.setPolicy("research", mig(count("1g", 7)), evicting)
	d, _ := c.run(240)
	for _, n := range d.Nodes {
		g.Expect(n.State).To(Equal(node.UpToDate), n.Message)
		g.Expect(n.Advertised).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7}))
	}
	g.Expect(plugin.Labels).To(HaveKey(v1alpha1.LabelConfig))
	g.Expect(driver.untouched()).To(BeEmpty())
	g.Expect(plugin.DevicesTaintedAt).To(BeZero())

	c.switchOver(plugin, true)
	isUpToDate(g, c.during(2*time.Minute, time.Second).Nodes[0])
	g.Expect(plugin.Labels).NotTo(HaveKey(v1alpha1.LabelConfig), "nothing reads it there any more")

	plugin.Labels[pluginLabel] = "true"
	d = c.during(time.Minute, time.Second)
	hasState(g, d, node.Unsupported)
	hasReason(g, d, v1alpha1.ReasonDRADriverActive)
	hasMessage(g, d, " of NVIDIA's DRA driver and the device plugin offer its GPUs. Drain it, then label it nvidia.com/gpu.deploy.device-plugin=false or ")

	c.switchOver(plugin, false)
	isUpToDate(g, c.during(10*time.Minute, time.Second).Nodes[0])
	g.Expect(plugin.Labels).To(HaveKey(v1alpha1.LabelConfig))

	c.Policies = nil
	c.run(240)
	for _, h := range []*host{plugin, driver} {
		g.Expect(h.Annotations).To(BeEmpty())
		g.Expect(h.devices()[0].State.MIG).To(BeFalse())
		g.Expect(h.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
	}
}

// TestARetainedNodeMovesToTheDriverAndBack: nothing reads the label of the node while NVIDIA's DRA driver serves it. Its
// config stays there all the same, so that NVIDIA's device plugin starts once the node moves back.
func TestARetainedNodeMovesToTheDriverAndBack(t *testing.T) {
	for name, ends := range map[string]func(*site){
		"the policy is deleted": func(c *site) { c.Policies = nil },
		"the policy is edited and paused": func(c *site) {
			c.reshare(timeSlicing(2))
			c.Policies[0].Spec.Rollout.Paused = true
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			c.setPolicy("research", timeSlicing(4), retaining)
			c.run(60)
			key := h.Labels[v1alpha1.LabelConfig]
			lasts := func(d time.Duration) {
				for end := c.Now.Add(d); c.Now.Before(end); c.tick(5 * time.Second) {
					if d := c.reconcile(); !d.ConfigurePlugin { // as the executor does
						c.Configs, c.ConfigsCopy = maps.Clone(c.Plugin.Configs), nil
					}
				}
			}
			c.switchOver(h, true)
			lasts(5 * time.Minute)
			ends(c)
			lasts(5 * time.Minute)
			c.crashes = nil
			c.switchOver(h, false)
			lasts(5 * time.Minute)
			g.Expect(c.crashes).To(BeEmpty())
			g.Expect(h.Labels).To(HaveKeyWithValue(v1alpha1.LabelConfig, key))
			isOffered(g, h, gpusOnly(4))
		})
	}
}

// TestADriverThatPublishesNothingKeepsNoNode: neither the change nor the way back is published. Pods may use the GPUs for
// a day before the change, but once it has come to them that is no time of its own.
func TestADriverThatPublishesNothingKeepsNoNode(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)), evicting, func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Drain.TimeoutSeconds = 86400 })
	c.run(240)
	h.driver.broken = true
	c.reshare(mig(count("2g", 3)))
	c.during(5*time.Minute, 5*time.Second)
	g.Expect(h.isKept()).To(BeTrue())
	d := c.during(mostInOneGo, 5*time.Second)
	g.Expect(h.isKept()).To(BeFalse(), one(d).Message)
	hasReason(g, d, v1alpha1.ReasonNotPublished)
}

// TestAClusterWithoutADevicePlugin: nodes of the driver are governed, and others report that there is none.
func TestAClusterWithoutADevicePlugin(t *testing.T) {
	g := NewWithT(t)
	c, _ := evictingOnDRA()
	bare := c.add("bare", sim.A100)
	d, _ := c.run(240)
	g.Expect(d.Nodes).To(HaveLen(1))
	isUpToDate(g, one(d))
	g.Expect(d.Policies["research"].Conditions).To(ContainElement(And(HaveField("Type", v1alpha1.ConditionAccepted), HaveField("Status", BeEquivalentTo("True")))))
	g.Expect(bare.waits()).To(HavePrefix(v1alpha1.ReasonNoDevicePlugin))
	c.hosts = map[string]*host{"bare": bare}
	d = c.reconcile()
	g.Expect(d.Policies["research"].Conditions).To(ContainElement(And(HaveField("Type", v1alpha1.ConditionAccepted), HaveField("Reason", v1alpha1.ReasonNoDevicePlugin))))
}

// TestAFightOverTheRecordOfRestartsKeepsNoNode, neither for a change nor for the way back: the DRA driver is not restarted meanwhile.
func TestAFightOverTheRecordOfRestartsKeepsNoNode(t *testing.T) {
	for _, partitioned := range []bool{false, true} { // the way back from there has instances that the driver has not seen
		g := NewWithT(t)
		c, h := evictingOnDRA()
		if partitioned {
			c.run(240)
			c.reshare(mig(count("2g", 3)))
		}
		c.Repeats = &action.Repeats{}
		kept := 0
		for range 3600 {
			h.Annotations[v1alpha1.AnnotationInstances] = "theirs"
			c.noted(time.Second)
			if h.isKept() {
				kept++
			}
		}
		g.Expect(h.isKept()).To(BeFalse())
		g.Expect(time.Duration(kept) * time.Second).To(And(BeNumerically(">", 4*time.Minute), BeNumerically("<", 30*time.Minute)))
	}
}

// TestANodeThatCannotBeWrittenIsNotKeptForEver: from the middle of a change on, an admission policy of the platform team refuses every write of the
// Node, and takes those of all other objects, such as the DeviceTaintRule that keeps pods off its GPUs.
func TestANodeThatCannotBeWrittenIsNotKeptForEver(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.Repeats = &action.Repeats{}
	for range 24 * 360 {
		d := c.memory.decide(c.world())
		for _, a := range d.Actions {
			if _, is := a.(action.PatchNode); is && len(h.devices()[0].State.Instances) > 0 {
				c.Repeats.Refuse(a, "admission webhook denied the request", c.Now)
				continue
			}
			c.do(a)
			c.Repeats.Note(a, c.Now)
		}
		for i := range c.Policies {
			c.Policies[i].Status = d.Policies[c.Policies[i].Name]
		}
		c.tick(10 * time.Second)
	}
	g.Expect(h.isKept()).To(BeFalse(), "after a day: %s", h.waits())
}

// TestARestartThatIsDueLateIsWaitedFor: the controller is away until the time for verifying is over, just before it has the DRA driver restarted.
func TestARestartThatIsDueLateIsWaitedFor(t *testing.T) {
	for _, away := range []time.Duration{4 * time.Minute, 6 * time.Minute, time.Hour} {
		g := NewWithT(t)
		c, h := evictingOnDRA()
		gone := false
		for range 120 {
			if d := c.during(time.Second, time.Second); !gone && len(h.devices()[0].State.Instances) == 7 && h.Annotations[v1alpha1.AnnotationSelected] != "" {
				gone = true
				c.tick(away)
			} else if gone {
				g.Expect(one(d).State).NotTo(Equal(node.Failed), "%s: %s", away, one(d).Message)
			}
		}
		g.Expect(gone).To(BeTrue())
		g.Expect(h.isKept()).To(BeFalse())
	}
}

// TestARefusedRestartGivesNobodyWhatIsGone: the DRA driver is not restarted when a webhook refuses to record that once, or another controller undoes
// that for ten minutes. A node that is retained is not looked at later.
func TestARefusedRestartGivesNobodyWhatIsGone(t *testing.T) {
	for _, fought := range []bool{false, true} {
		g := NewWithT(t)
		c, h := evictingOnDRA()
		retaining(&c.Policies[0])
		c.Repeats = &action.Repeats{}
		left, refused := false, fought
		for i := range 2 * 3600 {
			if !left && i > 0 && len(h.devices()[0].State.Instances) == 7 {
				left, c.Policies = true, nil
			}
			if fought && i < 600 {
				h.Annotations[v1alpha1.AnnotationInstances] = "theirs"
			}
			for _, a := range c.memory.decide(c.world()).Actions {
				if p, is := a.(action.PatchNode); is && left && !refused && p.Annotations[v1alpha1.AnnotationInstances] != nil {
					refused = true
					c.Repeats.Refuse(a, "failed calling webhook", c.Now)
					continue
				}
				c.do(a)
				c.Repeats.Note(a, c.Now)
			}
			if c.tick(time.Second); left && len(h.Claims) == 0 {
				c.allocate(h, "train", "nvidia.com/gpu")
			}
		}
		g.Expect(refused).To(BeTrue())
		g.Expect(h.isKept()).To(BeFalse())
		g.Expect(h.hanging()).To(BeEmpty(), "fought: %v", fought)
	}
}

// TestATaintRuleThatAnotherControllerEditedIsMadeAnew: it does not taint all devices of the node, so the node counts as
// not tainted.
func TestATaintRuleThatAnotherControllerEditedIsMadeAnew(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)))
	c.Repeats = &action.Repeats{}
	c.allocate(h, "train", "nvidia.com/gpu")
	for h.DevicesTaintedAt.IsZero() {
		c.reconcile()
	}
	h.DevicesTaintedAt, h.driver.edited = time.Time{}, true
	clear(c.writes)
	c.reconcile()
	g.Expect(h.DevicesTaintedAt).NotTo(BeZero())
	g.Expect(c.writes).To(And(HaveKeyWithValue("action.UntaintDevices", 1), HaveKeyWithValue("action.TaintDevices", 1)))
}

// TestAClassThatAnotherControllerEditsIsRepairedNotForEver.
func TestAClassThatAnotherControllerEditsIsRepairedNotForEver(t *testing.T) {
	g := NewWithT(t)
	c, _ := evictingOnDRA()
	c.run(120)
	c.Repeats = &action.Repeats{}
	for range 120 {
		for i := range c.DRA.Classes {
			if c.DRA.Classes[i].Own {
				c.DRA.Classes[i].Selector = dra.ForInstances("7g.40gb").Selector
			}
		}
		c.noted(10 * time.Second)
	}
	g.Expect(c.writes["action.WriteClass"]).To(And(BeNumerically(">", 3), BeNumerically("<", 10)))
}

func TestATaintRuleOfANodeThatIsGoneIsDeleted(t *testing.T) {
	g := NewWithT(t)
	c, _ := onDRA(mig(count("1g", 7)))
	c.orphans = []string{"gone"}
	c.run(10)
	g.Expect(c.orphans).To(BeEmpty())
}

// TestTheBudgetCountsTaintedDevices: a second node waits, and the first with a new layout goes alone.
func TestTheBudgetCountsTaintedDevices(t *testing.T) {
	g := NewWithT(t)
	c, a := evictingOnDRA()
	b := c.addDRA("b", sim.A100)
	most := 0
	for range 120 {
		c.reconcile()
		c.tick(time.Second)
		withTaintRule := 0
		for _, h := range []*host{a, b} {
			if !h.DevicesTaintedAt.IsZero() {
				withTaintRule++
			}
		}
		most = max(most, withTaintRule)
	}
	g.Expect(most).To(Equal(1))
	for _, n := range c.reconcile().Nodes {
		g.Expect(n.State).To(Equal(node.UpToDate), n.Message)
	}
}

// TestADrainThatEndsInVainLiftsTheTaintRule.
func TestADrainThatEndsInVainLiftsTheTaintRule(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(mig(count("1g", 7)))
	c.allocate(h, "train", "nvidia.com/gpu")
	c.during(time.Minute, time.Second)
	g.Expect(h.DevicesTaintedAt).NotTo(BeZero())
	d := c.during(11*time.Minute, time.Second)
	hasReason(g, d, v1alpha1.ReasonDrainTimedOut)
	g.Expect(h.DevicesTaintedAt).To(BeZero())
	g.Expect(c.evicted).To(BeEmpty())
	g.Expect(h.devices()[0].Holders).To(ContainElement(HaveField("Pod", "train")))
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	g.Expect(h.devices()[0].Holders[0].Instance).To(Equal(gpu.WholeGPU))
}

func (h *host) driverIsDynamic() {
	for i := range h.Pods {
		h.Pods[i].DynamicMIG = h.Pods[i].DRA
	}
}

func (h *host) losesInstances() {
	h.hardware.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			n.GPUs[i].Instances = nil
		}
	})
}

// TestTheDriversInstancesAreItsOwnOnceDynamicMIGIsOn: an administrator turns the gate on where a policy is in force.
// The driver destroys all instances when it starts and makes others later. The agent makes none and destroys none, also
// when the policy goes.
func TestTheDriversInstancesAreItsOwnOnceDynamicMIGIsOn(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.run(120)
	h.driverIsDynamic()
	g.Expect(one(c.reconcile()).Reason).To(Equal(v1alpha1.ReasonDynamicMIGActive))
	c.during(time.Minute, time.Second)
	g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
	g.Expect(h.GPU.Spec.Baseline).NotTo(BeNil())
	h.losesInstances()
	d := c.during(2*time.Minute, time.Second)
	hasReason(g, d, v1alpha1.ReasonDynamicMIGActive)
	g.Expect(h.instances()).To(BeEmpty(), "the agent has made them again: %v", h.done)
	g.Expect(c.classes()).To(HaveKey("gpusharing-mig-1g.5gb"))

	done := len(h.done)
	c.Policies = nil
	clear(c.writes)
	c.during(10*time.Minute, time.Second)
	g.Expect(h.done[done:]).To(BeEmpty())
	isForgotten(g, h)
	g.Expect(h.Annotations).To(BeEmpty())
	g.Expect(c.writes).NotTo(HaveKey("action.DeletePod"))
}

// TestANodeWhoseDriverMakesInstancesIsRestored: the driver could partition no GPU of our MPS daemon.
func TestANodeWhoseDriverMakesInstancesIsRestored(t *testing.T) {
	for _, sharing := range []v1alpha1.Sharing{mps(4), interval(v1alpha1.TimeSliceIntervalLong)} {
		t.Run(string(sharing.Strategy), func(t *testing.T) {
			g := NewWithT(t)
			c, h := withGPUs(sim.A100)
			c.setPolicy("research", sharing)
			c.run(120)
			if sharing.MPS != nil {
				g.Expect(h.daemons).NotTo(BeEmpty())
			}
			c.switchOver(h, true)
			h.driver.dynamic, h.DynamicMIG = true, true
			h.restartDriver()
			c.during(5*time.Minute, time.Second)
			c.Policies = nil
			c.during(10*time.Minute, time.Second)
			g.Expect(h.daemons).To(BeEmpty())
			g.Expect(h.slices()).To(HaveEach(gpu.TimeSliceDefault))
			g.Expect(h.devices()[0].State.ComputeMode).To(Equal(gpu.ComputeDefault))
			isForgotten(g, h)
			g.Expect(h.isKept()).To(BeFalse())
		})
	}
}

// TestTheDaemonSetTellsOfDynamicMIGWhileItsPodIsAway: the gate is turned on by an upgrade, and the image of the new pod
// takes minutes. The kubelet has deleted the slices, so that neither they nor a pod tell of the gate.
func TestTheDaemonSetTellsOfDynamicMIGWhileItsPodIsAway(t *testing.T) {
	for name, sharing := range map[string]v1alpha1.Sharing{"a layout in force": mig(count("1g", 7)), "another one": mig(count("3g", 2))} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := evictingOnDRA()
			c.run(120)
			done := len(h.done)
			h.DynamicMIG, h.driver.serves, h.Published = true, false, nil
			h.restartDriver()
			c.reshare(sharing)
			h.hardware.Update(func(n *sim.Node) { n.GPUs[0].Instances = nil }) // the driver has begun
			d := c.during(10*time.Minute, time.Second)
			hasReason(g, d, v1alpha1.ReasonDynamicMIGActive)
			hasMessage(g, d, "FEATURE_GATES of DaemonSet nvidia-dra/kubelet-plugin")
			g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
			g.Expect(h.done[done:]).To(BeEmpty())
			g.Expect(h.DevicesTaintedAt).To(BeZero())
		})
	}
}

// TestDynamicMIGThatIsOffAgainBringsThePolicyBack, with the baseline that was recorded before.
func TestDynamicMIGThatIsOffAgainBringsThePolicyBack(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.run(120)
	h.driverIsDynamic()
	c.during(time.Minute, time.Second)
	h.losesInstances()
	h.restartDriver()
	d := c.during(5*time.Minute, time.Second)
	isUpToDate(g, one(d))
	g.Expect(h.instances()).To(HaveLen(14))
	c.Policies = nil
	c.run(240)
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	isForgotten(g, h)
}

// TestTheTaintsOfAPolicyComeToNodesOfTheDriver, in a cluster without a device plugin: the pods of the driver tell what
// they tolerate.
func TestTheTaintsOfAPolicyComeToNodesOfTheDriver(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}, func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Taints = []v1alpha1.Taint{{Key: "nvidia.com/gpu", Value: "whole", Effect: "NoSchedule"}}
	})
	d := c.during(time.Minute, time.Second)
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(d.Policies["research"].Conditions).To(ContainElement(And(
		HaveField("Reason", v1alpha1.ReasonTolerationMissing), HaveField("Message", ContainSubstring("kubeletPlugin.tolerations")))))
	for i := range h.Pods {
		h.Pods[i].Tolerations = []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
	}
	d = c.during(time.Minute, time.Second)
	g.Expect(h.Taints).To(ContainElement(HaveField("Key", "nvidia.com/gpu")), "%v", d.Policies["research"].Conditions)
	g.Expect(d.Policies["research"].Conditions).To(ContainElement(And(HaveField("Type", v1alpha1.ConditionTainted), HaveField("Status", BeEquivalentTo("True")))))

	for i := range h.Pods {
		h.Pods[i].Tolerations = nil
	}
	c.during(time.Minute, time.Second)
	g.Expect(h.Taints).To(BeEmpty(), "the next pod of the driver could not come")
}

// TestADriverThatIsUpgradedIsNotRestarted: its pod is replaced and takes a minute to start, as an image does that is
// pulled. The kubelet deletes the slices meanwhile. Nothing of the GPUs has changed.
func TestADriverThatIsUpgradedIsNotRestarted(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive})
	d, _ := c.run(120)
	isUpToDate(g, one(d))
	clear(c.writes)
	h.replaceDriver(c)
	h.driver.serves = false // its container starts
	for i := range 90 {
		if i == 30 {
			h.Published = nil
		}
		if i == 60 {
			h.driver.serves = true
		}
		c.reconcile()
		c.tick(time.Second)
	}
	d, _ = c.run(60)
	isUpToDate(g, one(d))
	g.Expect(c.writes).NotTo(HaveKey("action.DeletePod"), "%v", c.writes)
}

// replaceDriver is an upgrade of the driver: another pod, which has not started yet.
func (h *host) replaceDriver(c *site) {
	h.restartDriver()
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "nvidia-dra", Name: "new", UID: "dra-new", Controller: "DaemonSet", DRA: true, Serves: true, Scheduled: c.Now})
}

// TestADriverThatStartsAfterARebootIsNotRestarted: the agent reports before the driver has started, which waits for the
// GPU driver. It sees the GPUs that are there when it starts.
func TestADriverThatStartsAfterARebootIsNotRestarted(t *testing.T) {
	g := NewWithT(t)
	c, h := evictingOnDRA()
	c.run(120)
	clear(c.writes)
	h.hardware.Reboot()
	c.tick(time.Second)
	h.replaceDriver(c)
	h.driver.serves, h.driver.boot, h.Published = false, h.bootID(), nil // the kubelet has deleted the slices, and its container starts
	c.during(time.Minute, time.Second)
	h.driver.serves = true
	d := c.during(5*time.Minute, time.Second)
	isUpToDate(g, one(d))
	g.Expect(c.writes["action.DeletePod"]).To(BeZero(), "%v", c.writes)
}

// TestAGPUThatIsLostRestartsNoDriver: a GPU falls off the bus, in the same boot. The driver has tainted it (GPU_LOST)
// and serves the others. A driver that starts anew enumerates all GPUs, and ends if one of them answers with an error
// (cmd/gpu-kubelet-plugin/nvlib.go). docs/dev/faults.md: "does not restart the plugin, because that would offer the GPU
// again".
func TestAGPUThatIsLostRestartsNoDriver(t *testing.T) {
	g := NewWithT(t)
	c, h := onDRA(v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive})
	c.run(120)
	clear(c.writes)
	h.hardware.Update(func(n *sim.Node) { n.GPUs = n.GPUs[:1] })
	c.during(10*time.Minute, time.Second)
	g.Expect(h.GPU.Status.Devices).To(HaveLen(1))
	g.Expect(c.writes["action.DeletePod"]).To(BeZero(), "%v", c.writes)
}
