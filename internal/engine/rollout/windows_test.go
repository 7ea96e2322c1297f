// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func inWindows(windows ...v1alpha1.MaintenanceWindow) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Windows = windows }
}

func cancelsDrains(p *v1alpha1.GPUSharingPolicy) {
	p.Spec.Rollout.OnWindowEnd = v1alpha1.WindowEndCancelDrain
}

// window is a maintenance window: its schedule and duration, and perhaps its time zone.
func window(schedule, duration string, zone ...string) v1alpha1.MaintenanceWindow {
	w := v1alpha1.MaintenanceWindow{Schedule: schedule, Duration: duration, TimeZone: "UTC"}
	if len(zone) > 0 {
		w.TimeZone = zone[0]
	}
	return w
}

// at sets the time of a cluster.
func (c *site) at(text string) {
	now, err := time.Parse(time.RFC3339, text)
	if err != nil {
		panic(err)
	}
	c.tick(now.Sub(c.Now))
}

// tonight is a window of four hours from 22:00.
var tonight = window("0 22 * * *", "4h")

func TestADisruptiveChangeStartsInAMaintenanceWindowOnly(t *testing.T) {
	const berlin, newYork = "Europe/Berlin", "America/New_York"
	for name, c := range map[string]struct {
		windows []v1alpha1.MaintenanceWindow
		now     string
		next    string // empty: a window is open
	}{
		"none":                                {now: "2027-03-01T12:00:00Z"},
		"before it opens":                     {[]v1alpha1.MaintenanceWindow{tonight}, "2027-03-01T21:59:59Z", "2027-03-01T22:00:00Z"},
		"when it opens":                       {[]v1alpha1.MaintenanceWindow{tonight}, "2027-03-01T22:00:00Z", ""},
		"after midnight":                      {[]v1alpha1.MaintenanceWindow{tonight}, "2027-03-02T01:59:59Z", ""},
		"when it closes":                      {[]v1alpha1.MaintenanceWindow{tonight}, "2027-03-02T02:00:00Z", "2027-03-02T22:00:00Z"},
		"on another day of the week":          {[]v1alpha1.MaintenanceWindow{window("30 1 * * SAT", "1h")}, "2027-03-01T01:45:00Z", "2027-03-06T01:30:00Z"},
		"the next of two":                     {[]v1alpha1.MaintenanceWindow{window("0 22 * * FRI", "1h"), window("0 3 * * TUE", "1h")}, "2027-03-01T12:00:00Z", "2027-03-02T03:00:00Z"},
		"the second of two overlaps":          {[]v1alpha1.MaintenanceWindow{tonight, window("0 1 * * *", "3h")}, "2027-03-02T03:00:00Z", ""},
		"one that opens before it has closed": {[]v1alpha1.MaintenanceWindow{window("@hourly", "90m")}, "2027-03-02T03:59:00Z", ""},
		"one of a week":                       {[]v1alpha1.MaintenanceWindow{window("0 0 1 * *", "168h")}, "2027-03-07T23:59:00Z", ""},
		"of another time zone": {
			[]v1alpha1.MaintenanceWindow{window("0 22 * * *", "4h", berlin)}, "2027-01-15T20:59:00Z", "2027-01-15T22:00:00+01:00",
		},
		"of another time zone, in summer": {
			[]v1alpha1.MaintenanceWindow{window("0 22 * * *", "4h", berlin)}, "2027-07-15T19:59:00Z", "2027-07-15T22:00:00+02:00",
		},
		// 28 March 2027: 02:00 CET is followed by 03:00 CEST.
		"at a time that the clock skips": {
			[]v1alpha1.MaintenanceWindow{window("30 2 * * SUN", "1h", berlin)}, "2027-03-28T01:29:00Z", "2027-03-28T03:30:00+02:00",
		},
		"at a time that the clock skipped": {
			[]v1alpha1.MaintenanceWindow{window("30 2 * * SUN", "1h", berlin)}, "2027-03-28T01:30:00Z", "",
		},
		"shortly before a skipped time comes": {
			[]v1alpha1.MaintenanceWindow{window("30 2 * * SUN", "5m", berlin)}, "2027-03-28T01:10:00Z", "2027-03-28T03:30:00+02:00",
		},
		"on a day on which the clock skips an hour": {
			[]v1alpha1.MaintenanceWindow{window("0 12 * * SUN", "1h", berlin)}, "2027-03-28T09:59:00Z", "2027-03-28T12:00:00+02:00",
		},
		// 14 March 2027: 02:00 EST is followed by 03:00 EDT.
		"at a time that the clock skips west of Greenwich": {
			[]v1alpha1.MaintenanceWindow{window("30 2 * * SUN", "1h", newYork)}, "2027-03-14T07:29:00Z", "2027-03-14T03:30:00-04:00",
		},
		"across a skipped hour: its duration stays": {
			[]v1alpha1.MaintenanceWindow{window("0 1 * * SUN", "2h", berlin)}, "2027-03-28T01:59:00Z", "",
		},
		"across a skipped hour: it closes after its duration": {
			[]v1alpha1.MaintenanceWindow{window("0 1 * * SUN", "2h", berlin)}, "2027-03-28T02:00:00Z", "2027-04-04T01:00:00+02:00",
		},
		// 31 October 2027: 03:00 CEST is followed by 02:00 CET.
		"at a time that comes twice, the first time": {
			[]v1alpha1.MaintenanceWindow{window("30 2 * * SUN", "30m", berlin)}, "2027-10-31T00:30:00Z", "",
		},
		"at a time that comes twice, the second time": {
			[]v1alpha1.MaintenanceWindow{window("30 2 * * SUN", "30m", berlin)}, "2027-10-31T01:30:00Z", "2027-11-07T02:30:00+01:00",
		},
		"at a time that comes twice, a day before": {
			[]v1alpha1.MaintenanceWindow{window("30 2 * * SUN", "30m", berlin)}, "2027-10-30T12:00:00Z", "2027-10-31T02:30:00+02:00",
		},
		"at a time that comes twice west of Greenwich": {
			[]v1alpha1.MaintenanceWindow{window("30 1 * * SUN", "30m", newYork)}, "2027-11-07T05:00:00Z", "2027-11-07T01:30:00-04:00",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl, _ := toMIG(inWindows(c.windows...))
			cl.at(c.now)
			d := cl.reconcile()
			if c.next == "" {
				g.Expect(started(d)).To(Equal([]string{"a"}))
				g.Expect(d.Policies["research"].NextWindowTime).To(BeNil())
				return
			}
			next, err := time.Parse(time.RFC3339, c.next)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(started(d)).To(BeEmpty())
			hasReason(g, d, v1alpha1.ReasonOutsideWindow)
			hasMessage(g, d, "the next one opens at "+c.next)
			g.Expect(d.Policies["research"].NextWindowTime.Time).To(BeTemporally("==", next))
			g.Expect(d.Policies["research"].Pending[0].Reason).To(Equal(v1alpha1.ReasonOutsideWindow))
			g.Expect(d.After).To(Equal(next.Sub(cl.Now)), "the controller looks again when the window opens")
			cl.tick(d.After)
			g.Expect(started(cl.reconcile())).To(Equal([]string{"a"}))
		})
	}
}

func TestWhatDisruptsNothingWaitsForNoWindow(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.T4)
	c.setPolicy("research", timeSlicing(4), inWindows(tonight))
	c.at("2027-03-01T12:00:00Z")
	c.run(60)
	isOffered(g, h, gpusOnly(4))
}

func TestTheWayBackWaitsForNoWindow(t *testing.T) {
	t.Run("of a deleted policy", func(t *testing.T) {
		g := NewWithT(t)
		c, h := toMIG(inWindows(tonight))
		c.at("2027-03-01T23:00:00Z")
		c.run(200)
		g.Expect(c.ready()).To(Equal(1))
		c.at("2027-03-02T12:00:00Z")
		c.Policies = nil
		c.run(200)
		g.Expect(h.GPU.Spec.Baseline).To(BeNil(), "the node is as it was before the operator")
	})
	t.Run("of a change that failed", func(t *testing.T) {
		g := NewWithT(t)
		c, h := toMIG(inWindows(tonight))
		c.at("2027-03-02T01:59:00Z")
		h.broken = func(cluster.Snapshot) bool { return true }
		c.run(30)
		g.Expect(h.devices()[0].State.MIG).To(BeTrue(), "the change has reached the GPUs")
		c.during(10*time.Minute, 30*time.Second)
		h.broken = nil
		d, _ := c.run(200)
		isFailed(g, d)
		g.Expect(h.devices()[0].State.MIG).To(BeFalse(), "it is rolled back outside of every window")
	})
}

func TestANodeThatIsNotInServiceYetWaitsForNoWindow(t *testing.T) {
	g := NewWithT(t)
	c := joining(taintsNewNodes)
	c.Policies[0].Spec.Rollout.Windows, c.Policies[0].Generation = []v1alpha1.MaintenanceWindow{tonight}, 2
	c.at("2027-03-01T12:00:00Z")
	h := c.join("b", startup)
	c.run(200)
	g.Expect(c.ready()).To(Equal(2))
	g.Expect(h.Taints).To(BeEmpty())
}

// drainsAtTheEnd is a node that drains when its window closes a minute later.
func drainsAtTheEnd(with ...func(*v1alpha1.GPUSharingPolicy)) (*site, *host) {
	c, h := toMIG(append(with, inWindows(tonight))...)
	c.hold(h, "train", 0, gpu.WholeGPU)
	c.at("2027-03-02T01:59:00Z")
	c.reconcile()
	c.tick(time.Second)
	return c, h
}

func TestADrainContinuesWhenItsWindowCloses(t *testing.T) {
	g := NewWithT(t)
	c, h := drainsAtTheEnd()
	c.at("2027-03-02T02:01:00Z")
	d := c.reconcile()
	hasState(g, d, node.Draining)
	g.Expect(h.Taints).NotTo(BeEmpty())
	c.end(h, "train")
	c.run(200)
	g.Expect(c.ready()).To(Equal(1), "the change follows")
}

func TestADrainIsCanceledWhenItsWindowClosesIfThePolicyWantsThat(t *testing.T) {
	g := NewWithT(t)
	c, h := drainsAtTheEnd(cancelsDrains)
	d := c.reconcile()
	hasState(g, d, node.Draining)
	g.Expect(d.After).To(Equal(59*time.Second), "the controller looks again when the window closes")
	c.tick(d.After)
	d = c.reconcile()
	hasReason(g, d, v1alpha1.ReasonOutsideWindow)
	hasMessage(g, d, "2027-03-02T22:00:00Z")
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
	c.end(h, "train")
	c.run(60)
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
	c.at("2027-03-02T22:00:00Z")
	c.run(200)
	g.Expect(c.ready()).To(Equal(1))
}

func TestAChangeThatHasReachedTheGPUsIsFinishedAfterItsWindow(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(inWindows(tonight), cancelsDrains)
	c.at("2027-03-02T01:59:57Z")
	for h.GPU.Spec.ConfigName == "" {
		c.reconcile()
		c.tick(time.Second)
	}
	c.at("2027-03-02T02:00:30Z")
	c.run(200)
	g.Expect(c.ready()).To(Equal(1))
}

func TestARebootWaitsForAWindow(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100)
	h.virtual()
	p := rebooting(v1alpha1.DrainModeEvict)
	inWindows(tonight)(&p)
	c.Policies = []v1alpha1.GPUSharingPolicy{p}
	c.at("2027-03-02T01:59:00Z")
	for !h.required {
		c.reconcile()
		c.tick(time.Second)
	}
	c.at("2027-03-02T02:00:00Z")
	d, _ := c.run(60)
	g.Expect(one(d).Reason).To(Equal(v1alpha1.ReasonOutsideWindow), "%+v", one(d))
	g.Expect(h.reboots).To(BeEmpty())
	g.Expect(h.Taints).To(BeEmpty(), "the node takes pods meanwhile")
	c.at("2027-03-02T22:00:00Z")
	c.run(400)
	g.Expect(h.reboots).To(HaveLen(1))
	g.Expect(c.ready()).To(Equal(1))
}

// TestNodesThatWaitForAWindowTakeNoSlot: another policy's nodes are not concerned, and the budget is whole when it
// opens.
func TestNodesThatWaitForAWindowTakeNoSlot(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	for _, name := range []string{"a", "b", "c"} {
		c.add(name, sim.A100)
	}
	p := policyOf("research", mig(count("3g.20gb", 2)), inWindows(tonight), unavailable("2"))
	c.Policies = []v1alpha1.GPUSharingPolicy{p}
	c.at("2027-03-02T01:00:00Z")
	for c.ready() == 0 {
		c.reconcile()
		c.tick(time.Second)
	}
	c.run(200)
	g.Expect(c.ready()).To(Equal(3))
	c.at("2027-03-02T12:00:00Z")
	c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("1g.5gb", 7)), 2
	for _, h := range c.hosts {
		c.hold(h, "train-"+h.Name, 0, h.devices()[0].State.Instances[0].ID)
	}
	d := c.reconcile()
	g.Expect(d.Policies["research"].Nodes.Changing).To(BeZero())
	ready, _ := condition.Find(d.Policies["research"].Conditions, v1alpha1.ConditionReady)
	g.Expect(ready.Reason).To(Equal(v1alpha1.ReasonOutsideWindow))
	stalled, found := condition.Find(d.Policies["research"].Conditions, v1alpha1.ConditionStalled)
	g.Expect(found && stalled.Status == metav1.ConditionTrue).To(BeFalse(), "it goes on by itself")
	c.tick(d.After)
	g.Expect(started(c.reconcile())).To(Equal([]string{"a"}), "the first with the new configuration")
}

func TestAPolicyWithAnInvalidWindowChangesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		window v1alpha1.MaintenanceWindow
		says   string
	}{
		"a date that does not exist": {window("0 0 30 2 *", "1h"), `rollout.windows[1].schedule "0 0 30 2 *" names a date that does not exist`},
		"a range that ends before it begins": {
			window("5-1 * * * *", "1h"), `rollout.windows[1].schedule "5-1 * * * *" is no schedule: beginning of range (5) beyond end of range (1): 5-1`,
		},
		"an unknown time zone": {
			window("@daily", "1h", "Europe/Atlantis"), `rollout.windows[1].timeZone "Europe/Atlantis" is unknown: unknown time zone Europe/Atlantis`,
		},
		"no duration": {window("@daily", "an hour"), `rollout.windows[1].duration "an hour" is no duration`},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := newSite()
			h := cl.add("a", sim.T4)
			bad := inWindows(tonight, c.window)
			cl.setPolicy("research", timeSlicing(4), bad, tainting(corev1.Taint{
				Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoSchedule,
			}))
			cl.Policies[0].Spec.Rollout.MaxUnavailable = new(intstr.FromInt32(1))
			cl.at("2027-03-01T23:00:00Z")
			s := cl.world()
			d := rollout.Decide(s)
			g.Expect(s.Policies[0].Spec.Rollout.Paused).To(BeFalse(), "the policy itself stays as it is")
			g.Expect(changes(d.Actions)).To(BeEmpty())
			g.Expect(d.ConfigurePlugin).To(BeFalse())
			status := d.Policies["research"]
			for _, of := range []string{v1alpha1.ConditionAccepted, v1alpha1.ConditionReady, v1alpha1.ConditionTainted} {
				found, _ := condition.Find(status.Conditions, of)
				g.Expect(found.Status).To(Equal(metav1.ConditionFalse), of)
				g.Expect(found.Reason).To(Equal(v1alpha1.ReasonInvalidWindow), of)
				g.Expect(found.Message).To(And(ContainSubstring(c.says), ContainSubstring("Nothing changes until you correct it")), of)
			}
			stalled, _ := condition.Find(status.Conditions, v1alpha1.ConditionStalled)
			g.Expect(stalled.Status).To(Equal(metav1.ConditionTrue))

			cl.Policies[0].Spec.Rollout.Windows, cl.Policies[0].Generation = []v1alpha1.MaintenanceWindow{tonight}, 2
			cl.run(60)
			isOffered(g, h, gpusOnly(4))
		})
	}
}

// TestABusyNodeTakesNoWindowFromOthers: on the first node a pod runs for weeks, so that its drain ends with each window.
// The nodes that nobody uses are changed in the first window all the same. Of those that are used each has its turn.
func TestABusyNodeTakesNoWindowFromOthers(t *testing.T) {
	for _, budget := range []intstr.IntOrString{intstr.FromInt32(1), intstr.FromString("100%")} {
		t.Run(budget.String(), func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			for _, name := range []string{"a", "b", "c", "d"} {
				c.add(name, sim.A100)
			}
			c.hold(c.hosts["a"], "training", 0, gpu.WholeGPU)
			c.hold(c.hosts["b"], "notebook", 0, gpu.WholeGPU)
			c.setPolicy("research", mig(count("1g", 7)),
				inWindows(window("0 22 * * *", "4h")), cancelsDrains, func(p *v1alpha1.GPUSharingPolicy) {
					p.Spec.Rollout.MaxUnavailable = &budget
					p.Spec.Rollout.Drain = v1alpha1.Drain{Mode: v1alpha1.DrainModeWaitForIdle, TimeoutSeconds: 86400}
				})
			night := func(ends string) (d rollout.Decision) {
				drained := false
				for end := c.Now.Add(24 * time.Hour); c.Now.Before(end); c.tick(5 * time.Minute) {
					d = c.reconcile()
					if h := c.hosts[ends]; ends != "" && len(h.Taints) > 0 && !drained {
						drained = true
						c.end(h, "notebook")
					}
				}
				return d
			}
			d := night("")
			g.Expect(d.Nodes[2].State).To(Equal(node.UpToDate), d.Nodes[2].Message)
			g.Expect(d.Nodes[3].State).To(Equal(node.UpToDate), d.Nodes[3].Message)
			night("b") // its pod ends once nothing new comes to the node
			d = night("b")
			isUpToDate(g, d.Nodes[1])
			hasReason(g, d, v1alpha1.ReasonOutsideWindow)
		})
	}
}

// TestADrainEndsWithItsWindowThoughTheAgentIsLost: nothing tells any more who uses the GPUs.
func TestADrainEndsWithItsWindowThoughTheAgentIsLost(t *testing.T) {
	g := NewWithT(t)
	c, h := drainsAtTheEnd(cancelsDrains, func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Drain.TimeoutSeconds = 86400 })
	g.Expect(h.isKept()).To(BeTrue())
	h.AgentReady = false
	d := c.reconcile()
	g.Expect(h.isKept()).To(BeTrue())
	g.Expect(d.After).To(BeNumerically("<=", 4*time.Hour))
	c.tick(d.After)
	c.reconcile()
	g.Expect(h.isKept()).To(BeFalse())
}

// TestAnAgentThatDoesNotAnswerHoldsNoNodeUntilTheNextWindow: it was asked for a change just before the policy got windows
// and asks for something else. Once its time is over the node takes pods again.
func TestAnAgentThatDoesNotAnswerHoldsNoNodeUntilTheNextWindow(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	for h.GPU.Spec.PolicyName == "" {
		c.reconcile()
		c.tick(time.Second)
		h.lags = true
	}
	p := &c.Policies[0]
	p.Generation++
	p.Spec.Sharing, p.Spec.Rollout.Drain.TimeoutSeconds = mig(count("1g", 7)), 86400
	inWindows(tonight)(p)
	cancelsDrains(p)
	d := c.reconcile()
	for asked := h.GPU.Spec.ChangeTime.Time; h.isKept() && c.Now.Sub(asked) < 20*time.Minute; d = c.reconcile() {
		c.tick(max(d.After, time.Second)) // its deadline wakes the controller
	}
	g.Expect(h.isKept()).To(BeFalse())
	g.Expect(c.Now).To(BeTemporally("<", h.GPU.Spec.ChangeTime.Add(20*time.Minute)))
	hasReason(g, d, v1alpha1.ReasonOutsideWindow)
}
