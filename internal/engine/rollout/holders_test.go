// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math"
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
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestAPodThatComesInSpiteOfTheTaintIsNotEvictedForEver: its workload would bring it back each time.
func TestAPodThatComesInSpiteOfTheTaintIsNotEvictedForEver(t *testing.T) {
	for name, test := range map[string]struct {
		tolerates bool
		evictions int // at most
	}{
		"a pod that tolerates every taint":  {true, 2},
		"a pod whose author names the node": {false, 4}, // as many as come while a scheduler may not have seen the taint
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting)
			comes := func() {
				c.hold(h, fmt.Sprintf("web-%d", len(c.evicted)), 0, gpu.WholeGPU)
				h.Pods[len(h.Pods)-1].Tolerates = test.tolerates
			}
			comes()
			c.tick(time.Minute)
			var d rollout.Decision
			for range 700 {
				before := len(c.evicted)
				if d = c.reconcile(); len(c.evicted) > before {
					comes()
				}
				c.tick(time.Second)
			}
			g.Expect(len(c.evicted)).To(BeNumerically("<=", test.evictions))
			g.Expect(c.evicted).NotTo(BeEmpty())
			isFailed(g, d)
			hasReason(g, d, v1alpha1.ReasonDrainTimedOut)
			g.Expect(one(d).Message).To(MatchRegexp("^not idle within 10m0s; tried again once the node is idle; pod user/web-[0-9] is not evicted, since it came in spite of the taint, " +
				"as another would after it; scale its workload down$"))
			g.Expect(h.Taints).To(BeEmpty())
		})
	}
}

// TestAReleaseKeepsTheBudgetOfItsPolicy: that another policy was careless does not make this one so.
func TestAReleaseKeepsTheBudgetOfItsPolicy(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	for _, n := range []string{"a0", "a1", "a2", "b0", "b1"} {
		c.add(n, sim.A100).Labels["pool"] = n[:1]
	}
	c.Policies = []v1alpha1.GPUSharingPolicy{
		policyOf("careful", mig(count("3g", 2)), ofPool("a"), unavailable("1")),
		policyOf("test", mig(count("1g", 7)), ofPool("b"), unavailable("100%")),
	}
	c.run(400)
	g.Expect(c.ready()).To(Equal(5))
	c.Policies = nil
	most := map[string]int{}
	for range 60 {
		c.reconcile()
		tainted := map[string]int{}
		for name, h := range c.hosts {
			if len(h.Taints) > 0 {
				tainted[name[:1]]++
			}
		}
		most["a"], most["b"] = max(most["a"], tainted["a"]), max(most["b"], tainted["b"])
		most["together"] = max(most["together"], tainted["a"]+tainted["b"])
		c.tick(time.Second)
	}
	g.Expect(most).To(Equal(map[string]int{"a": 1, "b": 2, "together": 3}))
	g.Expect(c.ready()).To(BeZero())
}

func ofPool(pool string) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": pool}}
	}
}

// TestReleasedNodesCountInTheBudgetOfTheirPolicy: a node that a policy no longer selects, or that another policy
// selects now, is in the middle of a change. Until it is schedulable again the policy disturbs no other node, whatever
// was written when it lost that one.
func TestReleasedNodesCountInTheBudgetOfTheirPolicy(t *testing.T) {
	for name, test := range map[string]struct {
		reconciles int  // before the node is lost
		taint      bool // of the writes to the node only that fails which removes the taint; otherwise each does
		before     []v1alpha1.GPUSharingPolicy
		pool       string // to which the node moves
	}{
		"tainted, nothing else recorded":                    {reconciles: 2, pool: "none"},
		"back at its baseline, but for the taint":           {reconciles: 1, pool: "none", taint: true},
		"the agent is at work":                              {reconciles: 4, pool: "none"},
		"another policy governs it":                         {reconciles: 2, pool: "b"},
		"another policy governed it before, and is deleted": {reconciles: 2, pool: "none", before: []v1alpha1.GPUSharingPolicy{policyOf("former", timeSlicing(2), unavailable("100%"))}},
		"another policy left it as it is":                   {reconciles: 2, pool: "none", before: []v1alpha1.GPUSharingPolicy{policyOf("former", timeSlicing(2), retaining)}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			lost, next := c.add("n0", sim.A100), c.add("n1", sim.A100)
			lost.Labels["pool"], next.Labels["pool"] = "a", "a"
			c.Policies = test.before
			c.run(100)
			c.Policies = []v1alpha1.GPUSharingPolicy{
				policyOf("careful", mig(count("1g", 7)), ofPool("a"), unavailable("1")), policyOf("other", mig(count("3g", 2)), ofPool("b"), paused),
			}
			c.steps(test.reconciles)
			g.Expect(c.changing()).To(Equal([]string{"n0"}))
			lost.Labels["pool"] = test.pool
			for range 120 {
				for _, a := range rollout.Decide(c.world()).Actions {
					if _, frees := a.(action.Untaint); a.NodeName() != "n0" || test.taint && !frees {
						c.do(a)
					}
				}
				c.tick(time.Second)
				g.Expect(c.changing()).To(Equal([]string{"n0"}))
			}
			for range 100 {
				c.reconcile()
				g.Expect(len(c.changing())).To(BeNumerically("<=", 1))
				c.tick(time.Second)
			}
			g.Expect(next.devices()[0].State.MIG).To(BeTrue(), "it is its turn in the end")
		})
	}
}

// TestANodeThatComesInTheMiddleOfAChangeNeedsASlot: it moves to a policy whose only slot is taken, and is schedulable
// until it has one.
func TestANodeThatComesInTheMiddleOfAChangeNeedsASlot(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	comes, there := c.add("n0", sim.A100), c.add("n1", sim.A100)
	comes.Labels["pool"], there.Labels["pool"] = "a", "b"
	c.Policies = []v1alpha1.GPUSharingPolicy{
		policyOf("research", mig(count("1g", 7)), ofPool("a"), unavailable("1")), policyOf("test", mig(count("3g", 2)), ofPool("b"), unavailable("1")),
	}
	c.steps(1)
	g.Expect(c.changing()).To(Equal([]string{"n0", "n1"}))
	comes.Labels["pool"] = "b"
	for range 100 {
		c.reconcile()
		g.Expect(len(c.changing())).To(BeNumerically("<=", 1))
		c.tick(time.Second)
	}
	g.Expect(c.ready()).To(Equal(2))
}

// TestARecordThatFailsTaintsNoDevices: devices that were tainted while the Node's record still named the former policy
// would count in the budget of that one.
func TestARecordThatFailsTaintsNoDevices(t *testing.T) {
	g := NewWithT(t)
	c, a := onDRA(mig(count("1g", 7)), unavailable("100%"))
	b := c.addDRA("b", sim.A100)
	c.run(240)
	g.Expect(c.ready()).To(Equal(2))
	c.Policies = append(c.Policies, policyOf("next", mig(count("3g", 2)), unavailable("1"), func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Priority = 1 }))
	for round := range 240 {
		for _, act := range rollout.Decide(c.world()).Actions {
			if patch, is := act.(action.PatchNode); round < 3 && is && patch.Annotations[v1alpha1.AnnotationBaseline] != nil {
				continue
			}
			c.do(act)
			g.Expect(a.isTainted() && b.isTainted()).To(BeFalse(), "after: %s", act)
		}
		g.Expect(round > 2 || !a.isTainted() && !b.isTainted()).To(BeTrue())
		c.tick(time.Second)
	}
	g.Expect(a.GPU.Status.Rollout.LastGood.PolicyName + b.GPU.Status.Rollout.LastGood.PolicyName).To(Equal("nextnext"))
}

// TestANodeThatComesBackInTheMiddleOfAChangeTakesNoSlot: it left a policy, and returns while the policy that it came to
// has tainted it and changed nothing yet. To restore its scheduling needs no slot of the former policy, where another
// node is changed. Until then it counts for the policy that has tainted it.
func TestANodeThatComesBackInTheMiddleOfAChangeTakesNoSlot(t *testing.T) {
	for name, verified := range map[string]bool{"verified before": true, "not verified yet": false} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			returns, there := c.add("n0", sim.A100), c.add("n1", sim.A100)
			there.byHand(0, "2g.10gb")
			returns.Labels["pool"], there.Labels["pool"] = "b", "none"
			c.Policies = []v1alpha1.GPUSharingPolicy{
				policyOf("research", mig(count("1g", 7)), ofPool("a"), unavailable("1")), policyOf("test", timeSlicing(2), ofPool("b"), unavailable("1")),
			}
			for returns.Labels[v1alpha1.LabelConfig] == "" || verified && c.ready() == 0 {
				c.steps(1)
			}
			returns.Labels["pool"] = "a"
			c.steps(1)
			there.Labels["pool"] = "b"
			c.steps(1)
			g.Expect(c.changing()).To(ConsistOf("n0", "n1"))
			g.Expect(returns.Annotations).To(HaveKey(v1alpha1.AnnotationStopped))
			returns.Labels["pool"] = "b"
			for round := range 100 {
				there.lags = round < 20
				for _, a := range c.memory.decide(c.world()).Actions {
					if frees(a) && round < 10 {
						continue // the write fails
					}
					c.do(a)
					of := 0
					for _, h := range c.hosts {
						if n := h.copied(); n.ChangedFor == "test" && (slices.Contains(c.changing(), n.Name) || n.Annotations[v1alpha1.AnnotationStopped] != "") {
							of++
						}
					}
					g.Expect(of).To(BeNumerically("<=", 1), "after: %s", a)
				}
				c.tick(time.Second)
			}
			g.Expect(c.ready()).To(Equal(2))
			g.Expect(returns.copied().ChangedFor).To(Equal("test"))
		})
	}
}

// changing are the nodes with the operator's taint.
func (c *site) changing() []string {
	var nodes []string
	for name, h := range c.hosts {
		if slices.ContainsFunc(h.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }) {
			nodes = append(nodes, name)
		}
	}
	slices.Sort(nodes)
	return nodes
}

func TestNetworkCardsAreNoGPUs(t *testing.T) {
	g := NewWithT(t)
	of := func(name corev1.ResourceName) *corev1.PodSpec {
		return &corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{name: resource.MustParse("1")},
		}}}}
	}
	g.Expect(cluster.RequestsGPU(of("nvidia.com/hostdev"))).To(BeFalse(), "NVIDIA Network Operator")
	g.Expect(cluster.RequestsGPU(of("nvidia.com/gpu.shared"))).To(BeTrue())
	g.Expect(cluster.RequestsGPU(of("nvidia.com/mig-1g.5gb"))).To(BeTrue())
}

// TestWhatAPodRequestsIsCountedAsTheSchedulerDoes: in the order in which init containers and sidecars start.
func TestWhatAPodRequestsIsCountedAsTheSchedulerDoes(t *testing.T) {
	gpus := func(n int64, restarts ...corev1.ContainerRestartPolicy) corev1.Container {
		c := corev1.Container{Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(n, resource.DecimalSI)},
		}}
		if len(restarts) > 0 {
			c.RestartPolicy = &restarts[0]
		}
		return c
	}
	const always = corev1.ContainerRestartPolicyAlways
	for name, test := range map[string]struct {
		init []corev1.Container
		main int64
		want int64
	}{
		"containers only":                    {nil, 2, 2},
		"a larger init container":            {[]corev1.Container{gpus(3)}, 1, 3},
		"an init container before a sidecar": {[]corev1.Container{gpus(2), gpus(1, always)}, 1, 2},
		"an init container after a sidecar":  {[]corev1.Container{gpus(1, always), gpus(2)}, 1, 3},
		"two sidecars":                       {[]corev1.Container{gpus(1, always), gpus(1, always)}, 1, 3},
		"more than can be counted":           {[]corev1.Container{gpus(math.MaxInt64, always), gpus(math.MaxInt64)}, 2, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			spec := &corev1.PodSpec{InitContainers: test.init, Containers: []corev1.Container{gpus(test.main)}}
			NewWithT(t).Expect(cluster.GPURequests(spec)).To(Equal(map[string]int64{"nvidia.com/gpu": test.want}))
		})
	}
}

func TestTheSoonerOfTwoTimesIsNeverNever(t *testing.T) {
	g := NewWithT(t)
	g.Expect(timing.Sooner(0, 0)).To(BeZero())
	g.Expect(timing.Sooner(time.Minute, 0)).To(Equal(time.Minute))
	g.Expect(timing.Sooner(0, time.Minute)).To(Equal(time.Minute))
	g.Expect(timing.Sooner(time.Minute, time.Second)).To(Equal(time.Second))
	g.Expect(timing.Sooner(-time.Second, time.Minute)).To(Equal(time.Minute))
}

// TestAGPUThatAnInitContainerHoldsIsInUse however long it runs, though no agent reports it.
func TestAGPUThatAnInitContainerHoldsIsInUse(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: "warm-up", UID: "warm-up", GPU: true, InitHolds: true, Scheduled: c.Now})
	c.tick(time.Minute)
	d := c.during(5*time.Minute, 10*time.Second)
	g.Expect(h.done).To(BeEmpty())
	hasState(g, d, node.Draining)
	hasMessage(g, d, "pod user/warm-up (a GPU, by an init container)")
	h.Pods[len(h.Pods)-1].InitHolds = false
	c.settles(g, 60)
}

// TestTheSuccessorOfAPodIsNotEvictedForWhatThatHolds: the kubelet, and so the agent, tells pods by name.
func TestTheSuccessorOfAPodIsNotEvictedForWhatThatHolds(t *testing.T) {
	for name, lingers := range map[string]bool{"that is gone from the kubelet": false, "on which the kubelet still works": true} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting, onGPUs(0))
			c.hold(h, "web-0", 0, gpu.WholeGPU)
			c.tick(time.Minute)
			h.succeeded(c, gpusOnly(1))
			c.steps(5)
			if !lingers {
				h.frees("web-0")
			}
			h.holds(h.devices()[1].UUID, gpu.WholeGPU, "web-0")
			h.report()
			c.steps(60)
			if lingers {
				g.Expect(h.waits()).To(ContainSubstring("until it is known that no former pod of its name holds that GPU"))
				h.frees("web-0")
				h.holds(h.devices()[1].UUID, gpu.WholeGPU, "web-0")
				h.report()
			}
			c.settles(g, 60)
			g.Expect(c.evicted).To(BeEmpty())
		})
	}
}

// succeeded gives the name of the last pod to another one, as after kubectl delete --force of a StatefulSet's.
func (h *host) succeeded(c *site, asks map[string]int64) {
	p := &h.Pods[len(h.Pods)-1]
	p.UID, p.Controller, p.Scheduled, p.Requests = "successor", "StatefulSet", c.Now, asks
}

// TestWhatAnInitContainerHasBesideAReportedContainerIsInUse: the kubelet does not report it. Where all that the pod asks for is reported, nothing else is.
func TestWhatAnInitContainerHasBesideAReportedContainerIsInUse(t *testing.T) {
	for asks, inUse := range map[int64]bool{2: true, 1: false} {
		t.Run(fmt.Sprint(asks), func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(onGPUs(0))
			c.hold(h, "train", 1, gpu.WholeGPU)
			p := &h.Pods[len(h.Pods)-1]
			p.InitHolds, p.Requests = true, map[string]int64{"nvidia.com/gpu": asks}
			c.tick(time.Minute)
			if inUse {
				d := c.during(5*time.Minute, 10*time.Second)
				g.Expect(h.done).To(BeEmpty())
				hasState(g, d, node.Draining)
				h.Pods[len(h.Pods)-1].InitHolds = false
			}
			d, _ := c.run(60)
			isUpToDate(g, one(d))
		})
	}
}

// TestAPodWhoseGPUsAreNotReportedIsEvictedOnlyIfItBlocksForSure: it may use a GPU that the policy does not select.
func TestAPodWhoseGPUsAreNotReportedIsEvictedOnlyIfItBlocksForSure(t *testing.T) {
	for name, test := range map[string]struct {
		with    func(*v1alpha1.GPUSharingPolicy)
		evicted []string
		says    string
	}{
		"every GPU is needed": {func(*v1alpha1.GPUSharingPolicy) {}, []string{"warm-up"}, "is evicted"},
		"one GPU is needed":   {onGPUs(0), nil, "is not evicted, because nobody reports which GPU it holds"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting, test.with)
			h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: "warm-up", UID: "warm-up", GPU: true, InitHolds: true, Scheduled: c.Now})
			c.tick(time.Minute)
			g.Expect(rollout.Decide(c.world()).Nodes[0].Blockers[0].Handling).To(HavePrefix(test.says))
			d := c.during(5*time.Minute, 10*time.Second)
			g.Expect(c.evicted).To(Equal(test.evicted))
			if test.evicted == nil {
				hasState(g, d, node.Draining)
				hasMessage(g, d, "because nobody reports which GPU it holds")
				h.Pods[len(h.Pods)-1].InitHolds = false
				d, _ = c.run(60)
			}
			isUpToDate(g, one(d))
		})
	}
}

// TestAGPUThatAClaimHoldsIsInUse though the agent reports nobody: NVIDIA's DRA driver was uninstalled under its pods.
func TestAGPUThatAClaimHoldsIsInUse(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: "train", UID: "train", Claim: "user/one-gpu", Scheduled: c.Now})
	c.tick(time.Minute)
	d := c.during(5*time.Minute, 10*time.Second)
	g.Expect(h.done).To(BeEmpty())
	hasState(g, d, node.Draining)
	hasMessage(g, d, "pod user/train (GPUs, by ResourceClaim user/one-gpu)")
	h.Pods[len(h.Pods)-1].Claim = ""
	c.version[h.Name]++
	c.settles(g, 60)
}

func TestOnlyInitContainersBeforeTheirEndHoldUnreportedGPUs(t *testing.T) {
	g := NewWithT(t)
	always := corev1.ContainerRestartPolicyAlways
	pod := &corev1.Pod{Spec: corev1.PodSpec{InitContainers: []corev1.Container{{Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")},
	}}}}}
	g.Expect(cluster.HoldsByInit(pod)).To(BeTrue())
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodInitialized, Status: corev1.ConditionTrue}}
	g.Expect(cluster.HoldsByInit(pod)).To(BeFalse())
	pod.Status.Conditions[0].Status = corev1.ConditionFalse
	g.Expect(cluster.HoldsByInit(pod)).To(BeTrue())
	pod.Spec.InitContainers[0].RestartPolicy = &always
	g.Expect(cluster.HoldsByInit(pod)).To(BeFalse(), "the kubelet reports what sidecars hold")
}
