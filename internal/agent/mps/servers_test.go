// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/mps/sim"
)

// client starts a process of a pod and connects it, and returns its PID and the limits that it got.
func (n *node) client(t *testing.T, pod string, uid int) (pid int, got sim.Limits) {
	t.Helper()
	pid = n.daemons.Run(n.pipe(), pod, uid)
	got, served, err := n.daemons.Connect(pid)
	if err != nil || !served {
		t.Fatalf("the client of %s is not served: %v", pod, err)
	}
	return pid, got
}

// look lets the MPS pod look at its daemons, and returns what the agent then sees.
func (n *node) look(t *testing.T) mps.Use {
	t.Helper()
	g := NewWithT(t)
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	serving, err := n.view.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(serving).NotTo(BeEmpty())
	return serving[0].Use
}

func TestNewLimitsReachTheNextClientOfARunningServer(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510, 1510))).To(Succeed())
	before, got := n.client(t, "pod-a", 1000)
	g.Expect(got).To(Equal(sim.Limits{Percentage: 10, Memory: map[int]int64{0: 1510, 1: 1510}}))
	g.Expect(n.look(t).Outdated).To(BeEmpty())

	g.Expect(n.view.Start(t.Context(), daemon(25, 4056, 4056))).To(Succeed())
	g.Expect(count(n.runner.Lines(), "nvidia-cuda-mps-control -d")).To(Equal(1), "running clients are not disturbed")
	wanted := sim.Limits{Percentage: 25, Memory: map[int]int64{0: 4056, 1: 4056}}
	after, got := n.client(t, "pod-b", 1000)
	g.Expect(got).To(Equal(wanted))

	use := n.look(t)
	g.Expect(use.Outdated).To(Equal([]int{before}), "a connected client keeps its limits")
	g.Expect(use.OutdatedPods).To(Equal([]string{"pod-a"}))
	g.Expect(use.Clients).To(Equal([]int{before, after}))

	n.daemons.End(before)
	g.Expect(n.look(t).Outdated).To(BeEmpty())
	n.daemons.End(after)
	_, got = n.client(t, "pod-c", 2000)
	g.Expect(got).To(Equal(wanted), "the next server has them as defaults")
}

func TestALimitThatIsNotTakenIsAnError(t *testing.T) {
	tests := map[string]struct {
		wanted plan.Daemon
		swaps  string // the command that is lost on the way
		says   string
	}{
		"the daemon refuses a memory limit": {
			wanted: plan.Daemon{Resource: resource, ActiveThreadPercentage: 10, Devices: []plan.DaemonDevice{{UUID: "GPU-z", Index: 9, PinnedMemoryLimitMiB: 1}}},
			swaps:  "set_default_device_pinned_mem_limit 9 1M",
			says: `"set_default_device_pinned_mem_limit 9 1M": it answered "5002", and "get_default_device_pinned_mem_limit 9" ` +
				`still answers ""`,
		},
		"the daemon does not take a percentage": {
			wanted: daemon(25, 1510), swaps: "set_default_active_thread_percentage 25", says: `still answers "10.0"`,
		},
		"a server does not take a memory limit": {
			wanted: daemon(10, 4056), swaps: "set_device_pinned_mem_limit 5002 0 4056M", says: `"get_device_pinned_mem_limit 5002 0" still answers "1G"`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g, n := served(t)
			n.client(t, "pod-a", 1000)
			n.runner.Swap(func(c host.Command) host.Command {
				if strings.TrimSpace(c.Stdin) == tc.swaps {
					c.Stdin = "get_server_list\n"
				}
				return c
			})
			g.Expect(n.view.Start(t.Context(), tc.wanted)).To(aboutDaemon(tc.says))
		})
	}
}

// A daemon takes the index of a GPU. When one falls off the bus (Xid 79) the driver counts the others anew, and the daemon
// may not.
func TestLimitsAreSetForNoOtherGPUOnceOneIsGone(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510, 1510))).To(Succeed())
	client, _ := n.client(t, "pod-a", 1000)
	second := plan.Daemon{Resource: resource, ActiveThreadPercentage: 10, Devices: []plan.DaemonDevice{{UUID: "GPU-b", Index: 0, PinnedMemoryLimitMiB: 700}}}
	g.Expect(n.view.Start(t.Context(), second)).To(aboutDaemon("it started when the node had other GPUs"))
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Memory).To(Equal(map[int]int64{0: 1510, 1: 1510}), "a client is connected")
	g.Expect(n.starts()).To(Equal(1))

	n.daemons.End(client)
	g.Expect(n.view.Start(t.Context(), second)).To(Succeed())
	g.Expect(n.starts()).To(Equal(2))
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Memory).To(Equal(map[int]int64{0: 700}))
}

func TestMemoryIsReadBackInTheUnitsOfTheDaemon(t *testing.T) {
	for answer, holds := range map[string]bool{
		"1510M": true, "1G": true, "1510MB\n": true, "1546240K": true, "1583349760": true,
		"2G": false, "1511M": false, "0": false, "": false, "Invalid device 0": false, "512M": false,
	} {
		t.Run(answer, func(t *testing.T) {
			g, n := NewWithT(t), newNode(t)
			n.runner.Add("nvidia-cuda-mps-control", n.daemons.Answering("get_default_device_pinned_mem_limit 0", answer))
			err := n.view.Start(t.Context(), daemon(10, 1510))
			g.Expect(err == nil).To(Equal(holds), "%v", err)
		})
	}
}

func TestADaemonThatForgotItsMemoryLimitsGetsThemAgain(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	g.Expect(n.view.Start(t.Context(), daemon(100, 1510))).To(Succeed())
	n.daemons.Crash(n.pipe())
	g.Expect(n.daemons.Start(n.pipe(), n.path(resource, "log"))).To(Succeed())
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Memory).To(Equal(map[int]int64{0: 1510}), "its percentage alone is as before")
}

func TestAGPUWithUnknownMemoryGetsNoMemoryLimit(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	g.Expect(n.view.Start(t.Context(), daemon(10, 0))).To(Succeed())
	_, got := n.client(t, "pod-a", 1000)
	g.Expect(got).To(Equal(sim.Limits{Percentage: 10, Memory: map[int]int64{}}))
}

func TestAClientOfAnotherUserWaitsAndIsNamed(t *testing.T) {
	g, n := served(t)
	first, _ := n.client(t, "pod-a", 1000650000)
	second := n.daemons.Run(n.pipe(), "pod-b", 1000660000)
	g.Expect(n.look(t).Waiting()).To(Equal([]mps.PodUsers{{UID: "pod-b", Users: []int64{1000660000}}}), "it will wait")
	_, served, err := n.daemons.Connect(second)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(served).To(BeFalse())

	use := n.look(t)
	g.Expect(use.User).To(HaveValue(Equal(int64(1000650000))))
	g.Expect(use.Waiting()).To(Equal([]mps.PodUsers{{UID: "pod-b", Users: []int64{1000660000}}}))
	n.daemons.End(first)
	use = n.look(t)
	g.Expect(use.User).To(HaveValue(Equal(int64(1000660000))))
	g.Expect(use.Waiting()).To(BeEmpty())
}

func TestOneServerForAllUsers(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	shared := daemon(10, 1510)
	shared.MultiUser = true
	g.Expect(n.view.Start(t.Context(), shared)).To(Succeed())
	n.client(t, "pod-a", 1000)
	n.client(t, "pod-b", 2000)
	use := n.look(t)
	g.Expect(use.User).To(BeNil())
	g.Expect(use.Waiting()).To(BeEmpty())
	serving, err := n.view.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(serving[0].MultiUser).To(BeTrue())
}

func TestTheUsersOfADaemonChangeOnlyWithARestart(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	shared := daemon(10, 1510)
	shared.MultiUser = true
	g.Expect(n.view.Start(t.Context(), shared)).To(aboutDaemon("has clients: waiting until they have ended"))
	g.Expect(n.host.Converge(t.Context(), true)).To(MatchError(mps.ErrDaemon))
	g.Expect(n.daemons.Get(n.pipe()).MultiUser).To(BeFalse())
	second, _ := n.client(t, "pod-a", 1000) // a daemon that was told to quit would serve it no more
	g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(2), "and no client is lost")

	n.daemons.End(pid)
	n.daemons.End(second)
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.view.Start(t.Context(), shared)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe()).MultiUser).To(BeTrue())
}

func TestAnIdleServerIsEnded(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	n.look(t)
	n.clock.Step(time.Hour)
	n.look(t)
	g.Expect(n.daemons.Get(n.pipe()).Servers).To(HaveLen(1), "it has a client")

	n.daemons.End(pid)
	n.look(t)
	n.clock.Step(5 * time.Second)
	n.look(t)
	g.Expect(n.daemons.Get(n.pipe()).Servers).To(HaveLen(1), "the next one may come at once")
	n.clock.Step(5 * time.Second)
	n.look(t)
	g.Expect(n.daemons.Get(n.pipe()).Servers).To(BeEmpty())
	n.client(t, "pod-b", 1000)
}

func TestADaemonMakesWayForANewDriver(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	n.leaves = true
	n.look(t)
	g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(1), "a client is never lost")

	n.daemons.End(pid)
	waits := n.daemons.Run(n.pipe(), "pod-b", 1000)
	n.look(t)
	n.look(t)
	got := n.daemons.Get(n.pipe())
	g.Expect(got).NotTo(BeNil(), "the pod may connect at any time")
	g.Expect(got.Servers).To(BeEmpty())

	n.daemons.End(waits)
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed(), "that is no error")
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(aboutDaemon("the NVIDIA driver of the node is about to change"))
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil())

	n.leaves = false
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Percentage).To(Equal(10.0))
}

// NVIDIA's MPS DaemonSet mounts other shared memory when it starts. A process cannot follow that, so it ends, and the
// next one starts the daemons again.
func TestSharedMemoryThatWasReplacedEndsTheProcess(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	n.unmount = true
	rounds := 0
	n.clock.Meanwhile = func() {
		if rounds++; rounds == 30 {
			g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(1), "a client is never lost")
			serving, err := n.view.Recorded()
			g.Expect(serving, err).To(ConsistOf(HaveField("Use.Unreachable", true)))
			n.daemons.End(pid)
		}
	}
	g.Expect(n.look(t).Unreachable).To(BeTrue())
	g.Expect(n.host.Run(t.Context())).To(MatchError(ContainSubstring("replaced the shared memory of MPS")))
	g.Expect(rounds).To(BeNumerically(">=", 30))
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil())

	n.unmount = false
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Percentage).To(Equal(10.0))
}

// The clients of all daemons are looked at before any is told to quit, and one may connect between: from a pod that has the former shared memory.
func TestSharedMemoryThatWasReplacedEndsNoClientThatHasJustConnected(t *testing.T) {
	g, n := served(t)
	other := daemon(10, 1510)
	other.Resource = "nvidia.com/gpu.shared"
	g.Expect(n.view.Start(t.Context(), other)).To(Succeed())
	pid := 0
	n.runner.Fail(func(c host.Command) error {
		if pid == 0 && strings.HasPrefix(c.Stdin, "quit") {
			pid = n.daemons.Run(n.path(other.Resource, "pipe"), "pod-a", 1000)
			_, _, err := n.daemons.Connect(pid)
			return err
		}
		return nil
	})
	n.unmount = true
	rounds := 0
	n.clock.Meanwhile = func() {
		if rounds++; rounds == 30 {
			g.Expect(n.daemons.Get(n.path(other.Resource, "pipe")).Clients()).To(Equal(1))
			n.daemons.End(pid)
		}
	}
	g.Expect(n.host.Run(t.Context())).To(MatchError(ContainSubstring("replaced the shared memory of MPS")))
	g.Expect(rounds).To(BeNumerically(">=", 30), "the end of the process would end the client")
}

// The control daemon hands clients to its server, and serves none of them: that it hangs, or cannot be asked while the
// driver's root is replaced, ends no client. The end of the process would.
func TestSharedMemoryThatWasReplacedEndsNoClientOfADaemonThatHangs(t *testing.T) {
	g, n := served(t)
	other := daemon(10, 1510)
	other.Resource = "nvidia.com/gpu.shared"
	g.Expect(n.view.Start(t.Context(), other)).To(Succeed())
	pid, _ := n.client(t, "pod-a", 1000)
	n.look(t)
	n.runner.Fail(func(c host.Command) error {
		if slices.Contains(c.Env, "CUDA_MPS_PIPE_DIRECTORY="+n.pipe()) {
			return errors.New("killed")
		}
		return nil
	})
	n.unmount = true
	rounds := 0
	n.clock.Meanwhile = func() {
		if rounds++; rounds == 30 {
			g.Expect(n.daemons.Get(n.path(other.Resource, "pipe")).Commands).NotTo(ContainElement("quit"), "not before it helps")
			n.daemons.End(pid)
		}
	}
	g.Expect(n.host.Run(t.Context())).To(MatchError(ContainSubstring("replaced the shared memory of MPS")))
	g.Expect(rounds).To(BeNumerically(">=", 30), "a client is never lost")
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
	g.Expect(n.daemons.Get(n.path(other.Resource, "pipe"))).To(BeNil())
}

// idleAndFound is how long a server stays that no client uses while no driver changes: its idle time, and until it is
// looked at.
const idleAndFound = 10*time.Second + 2*5*time.Second

// NVIDIA's driver manager takes the mark of the driver away, evicts pods, and unloads the module at once when the last
// is gone.
func TestADaemonStopsAtOnceWhenTheDriverLeaves(t *testing.T) {
	tests := map[string]struct {
		pods   bool // another pod has the pipe directory, and is no client
		later  int  // looks between the moment when the driver begins to leave and the end of the last client
		within time.Duration
	}{
		"one that no pod uses ends":                                      {within: 500 * time.Millisecond},
		"the idle server of one that pods have ends":                     {pods: true, within: time.Second},
		"one whose last pod is evicted meanwhile ends":                   {later: 3, within: 500 * time.Millisecond},
		"one whose last pod is evicted long after ends":                  {later: 117, within: 500 * time.Millisecond},
		"the server ends of one whose last client is evicted meanwhile":  {pods: true, later: 3, within: time.Second},
		"the server ends of one whose last client is evicted long after": {pods: true, later: 117, within: time.Second},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g, n := served(t)
			pid, _ := n.client(t, "pod-a", 1000)
			if tc.pods {
				n.daemons.Run(n.pipe(), "pod-b", 1000)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			held := func() bool { // the module is in use
				d := n.daemons.Get(n.pipe())
				return d != nil && len(d.Servers) > 0
			}
			const leaves = 12 // in the middle between two looks at the daemons' health
			rounds := 0
			var left, ended time.Time
			n.clock.Meanwhile = func() {
				rounds++
				n.leaves = rounds >= leaves
				switch {
				case rounds < leaves+tc.later:
				case rounds == leaves+tc.later:
					g.Expect(held()).To(BeTrue(), "a client is never lost")
					n.daemons.End(pid)
					left = n.clock.Now()
				case ended.IsZero() && (!held() || n.clock.Since(left) > time.Minute):
					ended = n.clock.Now()
					cancel()
				}
			}
			g.Expect(n.host.Run(ctx)).To(Succeed())
			g.Expect(held()).To(BeFalse())
			g.Expect(ended.Sub(left)).To(BeNumerically("<=", tc.within))
		})
	}
}

// The pod of the driver is deleted long before the module is unloaded. Until NVIDIA's device plugin stops, pods can
// start.
func TestAServerThatNoPodUsesEndsWithTheDriversContainer(t *testing.T) {
	tests := map[string]struct {
		fresh   bool // it started after the last look at its daemon
		pod     bool // another pod has the pipe directory, and is no client
		never   bool // the container was never ready while this process ran
		evicted int  // looks between the end of the container and that of the other pod
		within  time.Duration
	}{
		"one that no pod uses":                     {within: 500 * time.Millisecond},
		"one that started a moment ago":            {fresh: true, within: time.Second},
		"one whose last pod is evicted meanwhile":  {pod: true, evicted: 3, within: 100 * time.Millisecond},
		"one whose last pod is evicted long after": {pod: true, evicted: 63, within: 100 * time.Millisecond},
		"one on a node without a driver container": {never: true, within: idleAndFound},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g, n := NewWithT(t), newNode(t)
			n.ended = tc.never
			g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(Succeed())
			pid, waits := 0, 0
			if !tc.fresh {
				pid, _ = n.client(t, "pod-a", 1000)
			}
			if tc.pod {
				waits = n.daemons.Run(n.pipe(), "pod-b", 1000)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			const ends = 12 // in the middle between two looks at the daemons' health
			rounds := 0
			var left, ended time.Time
			n.clock.Meanwhile = func() {
				rounds++
				serves := len(n.daemons.Get(n.pipe()).Servers) > 0
				switch {
				case rounds == ends-1 && tc.fresh:
					pid, _ = n.client(t, "pod-a", 1000)
				case rounds < ends:
				case rounds == ends:
					n.ended, left = true, n.clock.Now()
					n.daemons.End(pid)
				case rounds < ends+tc.evicted:
					g.Expect(serves).To(BeTrue(), "a pod may connect at any time")
				case tc.pod && rounds == ends+tc.evicted:
					n.daemons.End(waits)
					left = n.clock.Now()
				case ended.IsZero() && (!serves || n.clock.Since(left) > time.Minute):
					ended = n.clock.Now()
					cancel()
				}
			}
			g.Expect(n.host.Run(ctx)).To(Succeed())
			g.Expect(ended.Sub(left)).To(BeNumerically("<=", tc.within))
			g.Expect(tc.never && ended.Sub(left) < 10*time.Second).To(BeFalse(), "no driver is about to change")
			n.client(t, "pod-c", 1000) // the daemon serves on
		})
	}
}

// Building a driver takes minutes.
func TestADaemonWithoutAServerIsNotAskedMoreOftenWhileTheDriversContainerEnds(t *testing.T) {
	g, n := served(t)
	n.look(t)
	n.ended = true
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	began, asked := n.clock.Now(), count(n.runner.Lines(), "nvidia-cuda-mps-control < get_server_list")
	n.clock.Meanwhile = func() {
		if n.clock.Since(began) >= 10*time.Second {
			cancel()
		}
	}
	g.Expect(n.host.Run(ctx)).To(Succeed())
	asked = count(n.runner.Lines(), "nvidia-cuda-mps-control < get_server_list") - asked
	g.Expect(asked).To(BeNumerically("~", 20, 5), "twice a second")
}

func TestAServerWithClientsOutlivesTheDriversContainer(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "", 1000) // a program on the node, in no pod
	n.look(t)
	n.ended = true
	n.look(t)
	n.look(t)
	g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(1), "a client is never lost")

	n.ended = false
	n.look(t)
	n.daemons.End(pid)
	n.look(t)
	g.Expect(n.daemons.Get(n.pipe()).Servers).To(HaveLen(1), "the container is ready again: the next client may come at once")
}

func TestADaemonOfTheFormerDriverStartsAgainWithTheNewOne(t *testing.T) {
	g, n := served(t)
	idle := n.daemons.Run(n.pipe(), "pod-a", 1000) // stays over the upgrade, as the pod of a DaemonSet does
	started := func() int { return count(n.runner.Lines(), "nvidia-cuda-mps-control -d") }
	n.leaves = true
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(started()).To(Equal(1), "a pod may connect at any time")

	n.leaves, n.version = false, ""
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(started()).To(Equal(1), "nobody knows of another driver")
	n.version = "600.10.02"
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(started()).To(Equal(2))
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Memory).To(Equal(map[int]int64{0: 1510}))
	_, served, err := n.daemons.Connect(idle)
	g.Expect(served, err).To(BeTrue(), "the pod goes on with the new daemon")

	g.Expect(n.view.Start(t.Context(), daemon(25, 1510))).To(Succeed())
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(started()).To(Equal(2), "once is enough")
	n.version = "600.20.01"
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(1), "a client is never lost")
}

func TestAFaultClosesTheServerUntilItsClientsAreGone(t *testing.T) {
	g, n := served(t)
	a, _ := n.client(t, "pod-a", 1000)
	b, _ := n.client(t, "pod-b", 1000)
	n.daemons.Fault(a)
	_, _, err := n.daemons.Connect(n.daemons.Run(n.pipe(), "pod-c", 1000))
	g.Expect(err).To(MatchError(sim.ErrNotReady))
	n.daemons.End(a)
	n.daemons.End(b)
	n.client(t, "pod-c", 1000)
}

func TestAServerThatEndsMeanwhileNeedsNoLimits(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	n.runner.Fail(func(c host.Command) error {
		if !strings.HasPrefix(c.Stdin, "set_device_pinned_mem_limit") {
			return nil
		}
		n.daemons.End(pid)
		other := n.daemons.Run(n.pipe(), "pod-b", 2000)
		_, _, err := n.daemons.Connect(other) // ends the server of the first user
		return errors.Join(err, errors.New("the server is gone"))
	})
	g.Expect(n.view.Start(t.Context(), daemon(25, 4056))).To(Succeed())
}

// Two MPS pods that write side by side, or a full disk, can leave such a record.
func TestARecordThatCannotBeReadIsWrittenAgainAndDisturbsNoClient(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	shared := daemon(10, 1510)
	shared.MultiUser = true
	g.Expect(n.view.Start(t.Context(), shared)).To(Succeed())
	client := n.daemons.Run(n.pipe(), "pod-a", 1000)
	_, served, err := n.daemons.Connect(client)
	g.Expect(served, err).To(BeTrue())
	g.Expect(os.WriteFile(n.path(resource, ".gpusharing.json"), nil, 0o600)).To(Succeed())

	g.Expect(n.host.Converge(t.Context(), false)).To(Succeed())
	_, connected := n.daemons.Get(n.pipe()).Client(client)
	g.Expect(connected).To(BeTrue(), "the daemon is limited again, and not started again")
	serving, err := n.view.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(serving).To(HaveLen(1))
	g.Expect(serving[0].Daemon.MultiUser).To(BeTrue())
	n.daemons.End(client)
	g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
}

// A daemon that was told to end a server lets it serve the clients that it has, and no others: they would wait without
// an error.
func TestAPodThatStartsWhileItsServerIsLookedAtKeepsIt(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	n.daemons.End(pid)
	starts := 0
	n.runner.Add("nvidia-cuda-mps-control", func(ctx context.Context, c host.Command) (string, error) {
		if starts != 0 && strings.HasPrefix(c.Stdin, "shutdown_server") {
			_, _, err := n.daemons.Connect(starts)
			g.Expect(err).NotTo(HaveOccurred())
		}
		answer, err := n.daemons.Program(ctx, c)
		if starts == 0 && strings.HasPrefix(c.Stdin, "get_server_list") {
			starts = n.daemons.Run(n.pipe(), "pod-b", 1000)
		}
		return answer, err
	})
	n.ended = true
	_ = n.host.Converge(t.Context(), false)
	_, _, err := n.daemons.Connect(starts)
	g.Expect(err).NotTo(HaveOccurred())
	n.client(t, "pod-c", 1000)
}

// The next server starts for a client that waited, as another user, and is in no record yet.
func TestTheServerOfAnotherUserEndsAsSoonAsItsLastPod(t *testing.T) {
	g, n := served(t)
	first, _ := n.client(t, "pod-a", 1000)
	second := n.daemons.Run(n.pipe(), "pod-b", 2000)
	_, served, err := n.daemons.Connect(second)
	g.Expect(served, err).To(BeFalse())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	began := n.clock.Now()
	var left, ended time.Time
	n.clock.Meanwhile = func() {
		passed := n.clock.Since(began)
		switch {
		case left.IsZero() && passed >= 7200*time.Millisecond:
			n.daemons.End(second)
			left = n.clock.Now()
		case passed >= 6200*time.Millisecond && left.IsZero():
			n.daemons.End(first)
		case passed >= 6*time.Second && left.IsZero():
			n.ended = true
		case !left.IsZero() && ended.IsZero() && (len(n.daemons.Get(n.pipe()).Servers) == 0 || n.clock.Since(left) > time.Minute):
			ended = n.clock.Now()
			cancel()
		}
	}
	g.Expect(n.host.Run(ctx)).To(Succeed())
	g.Expect(ended.Sub(left)).To(BeNumerically("<=", 100*time.Millisecond))
}

// A client that asks a daemon that hangs waits for three seconds each time.
func TestADaemonThatHangsBlocksNothingWhileTheDriversContainerEnds(t *testing.T) {
	hangs := func(t *testing.T) (*node, string) {
		g, n := served(t)
		other := daemon(10, 1510)
		other.Resource = "nvidia.com/gpu.shared"
		g.Expect(n.view.Start(t.Context(), other)).To(Succeed())
		pipe := n.path(other.Resource, "pipe")
		return n, pipe
	}
	hang := func(n *node) {
		n.ended = true
		n.runner.Fail(func(c host.Command) error {
			if !slices.Contains(c.Env, "CUDA_MPS_PIPE_DIRECTORY="+n.pipe()) {
				return nil
			}
			n.clock.Step(3 * time.Second)
			return errors.New("killed")
		})
	}
	run := func(t *testing.T, n *node, meanwhile func() bool) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := n.clock.Now()
		n.clock.Meanwhile = func() {
			if meanwhile() || n.clock.Since(began) > 5*time.Minute {
				cancel()
			}
		}
		_ = n.host.Run(ctx)
	}
	t.Run("it is ended itself", func(t *testing.T) {
		g := NewWithT(t)
		n, _ := hangs(t)
		pid, _ := n.client(t, "pod-a", 1000)
		n.look(t)
		began, hung := n.clock.Now(), time.Time{}
		var took time.Duration
		run(t, n, func() bool {
			switch {
			case hung.IsZero() && n.clock.Since(began) >= 6*time.Second:
				n.daemons.End(pid)
				hang(n)
				hung = n.clock.Now()
			case !hung.IsZero() && n.daemons.Get(n.pipe()) == nil:
				took = n.clock.Since(hung)
				return true
			}
			return false
		})
		g.Expect(took).To(BeNumerically("<=", 12*time.Second), "until its health is looked at, and two questions")
	})
	t.Run("a desired state for another daemon is fulfilled", func(t *testing.T) {
		g := NewWithT(t)
		n, other := hangs(t)
		n.client(t, "", 1000) // a program on the node, in no pod, keeps it
		n.look(t)
		desired, began := time.Time{}, n.clock.Now()
		var took time.Duration
		run(t, n, func() bool {
			switch {
			case n.clock.Since(began) < 6*time.Second:
			case !n.ended:
				hang(n)
			case desired.IsZero() && n.clock.Since(began) > time.Minute:
				g.Expect(os.Remove(n.path("gpusharing", "nvidia.com_gpu.shared.json"))).To(Succeed())
				desired = n.clock.Now()
			case !desired.IsZero() && n.daemons.Get(other) == nil:
				took = n.clock.Since(desired)
				return true
			}
			return false
		})
		g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(1), "a client is never lost")
		g.Expect(took).To(And(BeNumerically(">", 0), BeNumerically("<=", 8*time.Second)))
	})
}

// looking counts how often all processes of the node are looked through, which takes a hundredth of a second for a
// thousand of them.
type looking struct {
	mps.Processes
	times int
}

func (l *looking) WithVariable(name string) (map[int]string, error) {
	l.times++
	return l.Processes.WithVariable(name) //nolint:wrapcheck // a fake
}

func (l *looking) Mounted(folders ...string) (map[string][]int, error) {
	l.times++
	return l.Processes.Mounted(folders...) //nolint:wrapcheck // a fake
}

// The driver's container may be away for days, if it cannot be built, and the pods go on with the old driver.
func TestTheProcessesAreLookedThroughOnceForAllDaemonsWhileTheDriversContainerEnds(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	root, err := os.OpenRoot(n.dir)
	g.Expect(err).NotTo(HaveOccurred())
	defer root.Close() //nolint:errcheck // only read
	processes := &looking{Processes: n.daemons}
	pod := mps.NewHost(mps.NewControl(n.runner, root, n.clock), mps.Node{
		Processes: processes, DriverContainerReady: func() bool { return !n.ended }, DriverLeaves: func() bool { return false },
		DriverVersion: func() string { return n.version }, SharesMemory: func() bool { return true },
	})
	for _, suffix := range []string{"", ".a", ".b", ".c"} {
		d := daemon(10, 1510)
		d.Resource += suffix
		g.Expect(n.view.Start(t.Context(), d)).To(Succeed())
		_, served, err := n.daemons.Connect(n.daemons.Run(n.path(d.Resource, "pipe"), "pod"+suffix, 1000))
		g.Expect(served, err).To(BeTrue())
	}
	g.Expect(pod.Converge(t.Context(), true)).To(Succeed())
	n.ended = true
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	began := n.clock.Now()
	processes.times = 0
	n.clock.Meanwhile = func() {
		if n.clock.Since(began) >= 10*time.Second {
			cancel()
		}
	}
	g.Expect(pod.Run(ctx)).To(Succeed())
	g.Expect(processes.times).To(BeNumerically("<=", 10*10+4*4), "ten times a second, and for each daemon when its health is looked at")
}
