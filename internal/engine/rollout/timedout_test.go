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

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// kept is how long a node was kept from its users.
type kept struct {
	stopped, tainted time.Duration // NVIDIA's device plugin, and the node
	longest          time.Duration // in one go
	times            int
	soonest          time.Duration // the shortest time between two
}

// keeps lets some hours pass, strikes in each step, and looks how long the node is kept from its users.
func (c *site) keeps(h *host, hours int, strike func()) (k kept) {
	const step = 15 * time.Second
	began, ended := time.Time{}, time.Time{}
	k.soonest = time.Duration(hours) * time.Hour
	for range time.Duration(hours) * time.Hour / step {
		strike()
		c.reconcile()
		c.tick(step)
		if h.Labels[pluginLabel] != "true" {
			k.stopped += step
		}
		if len(h.Taints) > 0 {
			k.tainted += step
		}
		switch is := h.isKept(); {
		case is && began.IsZero():
			if began = c.Now; !ended.IsZero() {
				k.soonest = min(k.soonest, c.Now.Sub(ended))
			}
			k.times++
		case !is && !began.IsZero():
			began, ended = time.Time{}, c.Now
		}
		if !began.IsZero() {
			k.longest = max(k.longest, c.Now.Sub(began)+step)
		}
	}
	return k
}

const validatorsPod = "nvidia-cuda-validator-x"

// stays lets a test workload of NVIDIA's validator stay on a node, also if it is deleted.
func (c *site) stays(h *host) {
	if h.stuck["validator"] {
		return
	}
	h.stuck = map[string]bool{"validator": true}
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "gpu-operator", Name: validatorsPod, UID: "validator", Controller: "ClusterPolicy", Validator: true,
		Scheduled: c.Now,
	})
}

// TestWhatDoesNotEndKeepsNoNodeFromItsUsers: a stage that does not end in time, of a change, of the way back or of a
// release, restores scheduling once, and the next attempt is an hour later at the soonest.
func TestWhatDoesNotEndKeepsNoNodeFromItsUsers(t *testing.T) {
	pluginStays := func(_ *site, h *host) {
		at := slices.IndexFunc(h.Pods, func(p cluster.Pod) bool { return p.NodeSelector[pluginLabel] != "" })
		if h.stuck == nil && at >= 0 {
			h.stuck = map[string]bool{h.Pods[at].UID: true}
		}
	}
	agentLags := func(_ *site, h *host) { h.lags = true }
	failing := func(_ *site, h *host) {
		h.hardware.Fail = func(op sim.Op, _ string) error {
			if op == sim.OpCreateInstance {
				return gpu.ErrBusy
			}
			return nil
		}
	}
	refusing := func(_ *site, h *host) {
		h.hardware.Fail = func(op sim.Op, _ string) error {
			if op == sim.OpObserve {
				return nil
			}
			return gpu.ErrBusy
		}
	}
	released := func(c *site, _ *host) { c.run(90); c.Policies = nil }
	wayBack := func(c *site, h *host) {
		failing(c, h)
		for range 2000 {
			if h.GPU.Status.Rollout.Failed != nil {
				return
			}
			c.reconcile()
			c.tick(time.Second)
		}
		t.Fatal("the change did not fail")
	}
	lost := func(c *site, h *host) { // the mode and the instances of a verified node
		c.run(90)
		h.hardware.Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].MIG, n.GPUs[i].PendingMIG, n.GPUs[i].Instances = false, false, nil
			}
		})
		h.report()
	}
	whileStopped := func(strike func(*site, *host)) func(*site, *host) {
		return func(c *site, h *host) {
			if h.Labels[pluginLabel] != "true" {
				strike(c, h)
			}
		}
	}
	stays := (*site).stays
	nothing := func(*site, *host) {}
	staysAndEdits := func(c *site, h *host) {
		stays(c, h)
		c.Policies[0].Spec.Taints = []v1alpha1.Taint{{Key: "team", Value: fmt.Sprint("at-", c.Now.Unix()/60), Effect: v1alpha1.TaintEffectPreferNoSchedule}}
	}
	staysUnanswered := func(c *site, h *host) { stays(c, h); agentLags(c, h) }
	const stop, apply = timing.StopTimeout, timing.ApplyTimeout
	for name, test := range map[string]struct {
		begin, strike func(*site, *host)
		longest       time.Duration
		waits         string // begins what the node reports
		says          string
	}{
		"a validator's pod stays, in a change":     {nothing, stays, stop, "OperandsNotEnding:", validatorsPod},
		"a validator's pod stays, on the way back": {wayBack, stays, stop, "ApplyTimedOut:", validatorsPod},
		"a validator's pod stays, in a release":    {released, stays, stop, "OperandsNotEnding:", validatorsPod},
		"a validator's pod stays and the agent never answers, after a loss": {
			lost, staysUnanswered, apply, "OperandsNotEnding:", validatorsPod,
		},
		"a validator's pod stays, and the taints of the policy are edited each minute": {
			nothing, staysAndEdits, stop, "OperandsNotEnding:", validatorsPod,
		},
		"the plugin's pod does not end, in a change":  {nothing, pluginStays, stop, "OperandsNotEnding:", "nvidia-1"},
		"the plugin's pod does not end, in a release": {released, pluginStays, stop, "OperandsNotEnding:", "/nvidia-"},
		"the agent never answers, in a change": {
			nothing, whileStopped(agentLags), apply, "ApplyTimedOut:", "within 15m0s",
		},
		"the agent never answers, on the way back": {wayBack, agentLags, apply, "ApplyTimedOut:", "tries again at"},
		"the agent never answers, in a release": {
			released, whileStopped(agentLags), apply, "ApplyTimedOut:", "tries again at",
		},
		"the agent never answers, after a loss": {lost, agentLags, apply, "ApplyTimedOut:", "tries again at"},
		"NVML refuses each step, after a loss":  {lost, refusing, apply, "ApplyTimedOut:", "the agent says StepFailed"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			c.tick(time.Minute)
			test.begin(c, h)
			const hours, moment = 6, 2 * time.Minute
			k := c.keeps(h, hours, func() { test.strike(c, h) })
			t.Logf("in %d h: %+v; %s", hours, k, h.waits())
			g.Expect(k.longest).To(BeNumerically("<=", test.longest+moment), "in one go")
			g.Expect(k.soonest).To(BeNumerically(">=", timing.Patience-moment), "until it begins again")
			g.Expect(k.times).To(BeNumerically("<=", 4), "an hour later, then two hours, then four")
			g.Expect(h.waits()).To(And(HavePrefix(test.waits), ContainSubstring(test.says)))
		})
	}
}

// TestAValidatorThatStaysDelaysARelease: NVIDIA's validator is in ImagePullBackOff, and the deletion of its pod is
// refused.
func TestAValidatorThatStaysDelaysARelease(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	h.monitored()
	c.run(90)
	c.Policies = nil
	k := c.keeps(h, 6, func() { c.stays(h) })
	g.Expect(k.stopped).To(BeNumerically("<", 30*time.Minute), "without GPUs on the node")
	g.Expect(k.tainted).To(BeNumerically("<", 30*time.Minute))
	g.Expect(h.waits()).To(HavePrefix("OperandsNotEnding:"))
	g.Expect(h.waits()).To(And(ContainSubstring(validatorsPod), ContainSubstring("tries again at")))
	g.Expect(h.devices()[0].State.MIG).To(BeTrue())
	h.stuck = nil
	c.keeps(h, 6, func() {})
	g.Expect(h.GPU.Spec).To(BeZero(), "restored")
	g.Expect(h.Annotations).To(BeEmpty())
}

// TestARetryEndsTheRest: who annotates the GPUNode does not wait for the next attempt.
func TestARetryEndsTheRest(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(90)
	c.Policies = nil
	c.keeps(h, 1, func() { c.stays(h) })
	g.Expect(h.GPU.Spec).NotTo(BeZero())
	c.deletePod(h, "validator")
	h.stuck = nil
	h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.Validator })
	h.annotate(v1alpha1.AnnotationRetry, "now")
	c.run(90)
	isForgotten(g, h)
}

func TestEachTimeoutInSuccessionLeavesTheNodeAloneForLonger(t *testing.T) {
	for times, rest := range map[int]int{1: 1, 2: 2, 3: 4, 4: 8, 5: 8, 1000: 8} {
		NewWithT(t).Expect(timing.Backoff(times)).To(Equal(time.Duration(rest) * time.Hour))
	}
}

// timedOutRelease is a release that has timed out.
func timedOutRelease(g Gomega) (*site, *host) {
	c, h := toMIG()
	c.run(90)
	c.Policies = nil
	for range 2000 {
		c.stays(h)
		c.reconcile()
		c.tick(time.Second)
		if h.Annotations[v1alpha1.AnnotationTimedOut] != "" {
			break
		}
	}
	g.Expect(h.Annotations).To(HaveKey(v1alpha1.AnnotationTimedOut))
	return c, h
}

// TestAnEditedRecordHangsNoController: each kubelet may write the annotations of its Node. One number there must not
// stop the decisions for all nodes.
func TestAnEditedRecordHangsNoController(t *testing.T) {
	g := NewWithT(t)
	c, h := timedOutRelease(g)
	value := h.Annotations[v1alpha1.AnnotationTimedOut]
	h.Annotations[v1alpha1.AnnotationTimedOut] = strings.Replace(value, ".1@", ".9000000000000000000@", 1)
	g.Expect(h.Annotations[v1alpha1.AnnotationTimedOut]).NotTo(Equal(value))
	done := make(chan struct{})
	go func() { c.reconcile(); close(done) }()
	g.Eventually(done, 30*time.Second).Should(BeClosed(), "one reconcile")
}

// TestARecordFromTheFutureHoldsNoNode: the clock of the controller was wrong when it wrote, or another controller
// wrote.
func TestARecordFromTheFutureHoldsNoNode(t *testing.T) {
	g := NewWithT(t)
	c, h := timedOutRelease(g)
	key, _, _ := strings.Cut(h.Annotations[v1alpha1.AnnotationTimedOut], "@")
	h.Annotations[v1alpha1.AnnotationTimedOut] = timing.Stamp(key, c.Now.AddDate(10, 0, 0))
	h.stuck = nil
	c.deletePod(h, "validator")
	c.keeps(h, 24, func() {})
	g.Expect(h.GPU.Spec).To(BeZero(), "restored")
}

// TestWhatInterruptsAChangeBeginsNoDeadlineAnew: an agent that comes and goes, and a driver that is replaced again and
// again. Each interruption begins the time of the agent anew, and the node takes pods again all the same.
func TestWhatInterruptsAChangeBeginsNoDeadlineAnew(t *testing.T) {
	const hours = 8
	for name, test := range map[string]struct {
		strike func(c *site, h *host, since time.Duration)
		most   time.Duration // in all
	}{
		"the agent comes for two minutes, and goes for longer than a change keeps its slot": {
			strike: func(_ *site, h *host, since time.Duration) { h.AgentReady = since%(33*time.Minute) >= 31*time.Minute },
			most:   hours * time.Hour / 4,
		},
		"the agent comes for two minutes, and goes for 20": {
			strike: func(_ *site, h *host, since time.Duration) { h.AgentReady = since%(22*time.Minute) >= 20*time.Minute },
			most:   hours * time.Hour / 4,
		},
		"the driver is replaced every six minutes": {
			strike: func(c *site, h *host, since time.Duration) {
				h.Labels[upgradeLabel] = "pod-restart-required"
				if since%(6*time.Minute) >= 4*time.Minute {
					h.Labels[upgradeLabel] = "upgrade-done"
				}
				c.held(h)
			},
			most: 3 * mostInOneGo,
		},
	} {
		for _, released := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, the policy is deleted: %v", name, released), func(t *testing.T) {
				g := NewWithT(t)
				c, h := toMIG()
				if released {
					c.run(60)
					c.Policies = nil
				}
				h.hardware.Fail = func(op sim.Op, _ string) error { // the agent does not come far
					if op == sim.OpObserve {
						return nil
					}
					return sim.ErrCrash
				}
				began := c.Now
				k := c.keeps(h, hours, func() {
					test.strike(c, h, c.Now.Sub(began))
					c.version[h.Name]++
				})
				g.Expect(k.tainted).To(BeNumerically(">", 0))
				g.Expect(k.longest).To(BeNumerically("<=", mostInOneGo+time.Minute))
				g.Expect(k.tainted).To(BeNumerically("<=", test.most+time.Minute), "%+v", k)
			})
		}
	}
}

// TestAReleaseUnderMaintenanceLetsTheNodeTakePods: the upgrade of the driver fails in the middle of it.
func TestAReleaseUnderMaintenanceLetsTheNodeTakePods(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(60)
	c.Policies, h.lags = nil, true
	c.steps(6)
	g.Expect(h.isTainted()).To(BeTrue())
	h.Labels[upgradeLabel] = "upgrade-failed"
	c.version[h.Name]++
	c.during(40*time.Minute, 10*time.Second)
	g.Expect(h.isKept()).To(BeFalse())
	g.Expect(h.waits()).To(ContainSubstring("The upgrade of NVIDIA's driver failed on the node"))
	h.Labels[upgradeLabel], h.lags = "upgrade-done", false
	c.version[h.Name]++
	c.during(time.Hour, 10*time.Second)
	g.Expect(h.Annotations).To(BeEmpty())
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
}

// TestWhatInterruptsAChangeGivesNobodyWhatIsGone: the agent has destroyed what the device plugin lists, and reports later.
func TestWhatInterruptsAChangeGivesNobodyWhatIsGone(t *testing.T) {
	for name, happens := range map[string]func(c *applied, h *host){
		"nothing":                           func(*applied, *host) {},
		"the policy is deleted and retains": func(c *applied, _ *host) { c.Policies = nil },
		"the policy is deleted":             func(c *applied, _ *host) { c.Policies = nil },
		"the policy is paused":              func(c *applied, _ *host) { c.Policies[0].Spec.Rollout.Paused = true; c.Policies[0].Generation++ },
		"the GPUNode is made anew":          func(c *applied, h *host) { c.makeGPUNode(h) },
		"the node opts out":                 func(_ *applied, h *host) { h.Labels["nvidia.com/gpu.deploy.operands"] = "false" },
		"the plugin restarts":               func(c *applied, h *host) { c.deletePod(h, h.of(pluginLabel).UID) },
		"the driver fails":                  func(c *applied, h *host) { c.fails(h); c.fails(h); c.fails(h) },
		"another leads":                     func(c *applied, _ *host) { c.leads() },
		"a GPU is unhealthy": func(_ *applied, h *host) {
			h.sick, h.Allocatable["nvidia.com/mig-3g.20gb"] = map[string]bool{h.devices()[0].UUID: true}, 0
			h.unallocatable("nvidia.com/mig-3g.20gb", 2)
		},
	} {
		for _, monitors := range []bool{false, true} {
			for _, agent := range []string{"late", "away"} {
				t.Run(fmt.Sprint(name, monitors, agent), func(t *testing.T) {
					c := largeOn(t, "n0")
					h := c.hosts["n0"]
					if name == "the policy is deleted and retains" {
						retaining(&c.Policies[0])
						c.Policies[0].Generation++
					}
					c.makesLarge(h, monitors)
					h.lags, h.AgentReady = agent == "late", agent == "late"
					c.waiting = nil
					happens(c, h)
					c.version["n0"]++
					c.serves(h, 8, time.Second)
					if agent == "away" {
						c.serves(h, 600, 5*time.Second)
					}
					h.lags, h.AgentReady = false, true
					c.serves(h, 300, 2*time.Second)
					if c.broken != "" {
						t.Error(c.broken, "\n", strings.Join(c.told[8:min(len(c.told), 60)], "\n"))
					}
				})
			}
		}
	}
}

// serves lets time pass in which another pod always waits.
func (c *applied) serves(h *host, steps int, d time.Duration) {
	for range steps {
		if c.users() == 0 && len(c.bound) == 0 && len(c.late) == 0 {
			for _, p := range h.Pods {
				if p.Namespace == "user" {
					c.end(h, p.Name)
				}
			}
			c.waits("3g.20gb", 0)
		}
		c.steps(d)
	}
}

// Without a fabric manager, the GPUs behind NVSwitches are reset together, which the agent learns from a reset.
func TestGPUsThatAreResetTogetherAreDrainedTogether(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.A100, sim.A100)
	h.hardware.Update(func(n *sim.Node) { n.NVSwitch = true })
	h.report()
	c.hold(h, "train", 1, gpu.WholeGPU)
	c.setPolicy("research", firstGPU(), func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.Rollout.Drain.Mode = v1alpha1.DrainModeEvict
	})
	for range 60 {
		c.reconcile()
		c.tick(time.Second)
		if len(h.devices()[0].ResetPeers) > 0 {
			break
		}
		g.Expect(c.evicted).To(BeEmpty(), "the other GPU is not concerned before a reset has told")
	}
	d, _ := c.run(400)
	g.Expect(c.evicted).To(Equal([]string{"train"}))
	isUpToDate(g, one(d))
	isOffered(g, h, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-1g.5gb": 7})
}
