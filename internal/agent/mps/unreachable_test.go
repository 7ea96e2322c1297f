// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
)

// programsAreAway lets no program of the driver run, as between the unmounting of the driver's root and the next
// driver.
func (n *node) programsAreAway() {
	n.runner.Fail(func(host.Command) error { return errors.New("no libnvidia-ml.so.1 below /run/nvidia/driver") })
}

func TestADaemonThatDoesNotAnswerEndsByItsProcess(t *testing.T) {
	t.Run("where it is not desired any more", func(t *testing.T) {
		g, n := served(t)
		n.programsAreAway()
		g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		g.Expect(n.daemons.Get(n.pipe())).To(BeNil())

		n.runner.Fail(nil)
		g.Expect(n.view.Start(t.Context(), daemon(25, 1510))).To(Succeed(), "none is left that would count as NVIDIA's")
	})
	t.Run("where the driver leaves", func(t *testing.T) {
		g, n := served(t)
		n.leaves = true
		n.programsAreAway()
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		g.Expect(n.daemons.Get(n.pipe())).To(BeNil(), "it would keep the kernel module from being unloaded")
	})
}

func TestADaemonThatDoesNotAnswerStaysWhilePodsUseIt(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	before := n.look(t)

	n.programsAreAway() // and the module stays: only the driver's pod is restarted
	n.leaves = true
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	n.leaves = false
	g.Expect(n.host.Converge(t.Context(), true)).To(aboutDaemon("does not answer, and pods use it"))
	g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(1), "a client is never lost")

	n.runner.Fail(nil)
	use := n.look(t)
	g.Expect(use).To(Equal(before), "the limits did not change, so no client has former ones")

	n.programsAreAway()
	g.Expect(n.view.Stop(t.Context(), resource)).To(aboutDaemon("did not stop the MPS control daemon"))
	g.Expect(n.host.Converge(t.Context(), true)).To(aboutDaemon("does not answer, and pods use it"))
	n.daemons.End(pid)
	n.runner.Fail(nil)
	n.clock.Step(time.Minute)
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
}

func TestAProgramThatAsksIsNoDaemon(t *testing.T) {
	g, n := served(t)
	n.daemons.Crash(n.pipe())
	pid := n.daemons.Ask(n.pipe()) // of the agent, at this moment
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	_, runs := n.daemons.User(pid)
	g.Expect(runs).To(BeTrue())
	g.Expect(n.daemons.Get(n.pipe())).NotTo(BeNil())
}

func TestADaemonThatHangsIsNotStopped(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	n.look(t)
	n.runner.Fail(func(host.Command) error { return errors.New("killed") })
	g.Expect(n.view.Stop(t.Context(), resource)).To(aboutDaemon("did not stop the MPS control daemon"))
	g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(1), "a client is never lost")
	n.daemons.End(pid)
	g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed(), "the MPS pod ends its process")
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
}

func TestADaemonThatDoesNotAnswerIsNotStartedTwice(t *testing.T) {
	g, n := served(t)
	n.runner.Fail(func(c host.Command) error { // it hangs
		if c.Stdin != "" {
			return errors.New("killed")
		}
		return nil
	})
	g.Expect(n.host.Converge(t.Context(), true)).To(MatchError(mps.ErrDaemon))
	g.Expect(n.daemons.Get(n.pipe())).NotTo(BeNil())
	n.runner.Fail(nil)
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.view.Observe(t.Context())).To(HaveLen(1))
}

// doesNotQuit makes the daemon answer questions, and take no notice of quit.
func (n *node) doesNotQuit() {
	n.runner.Fail(func(c host.Command) error {
		if strings.HasPrefix(c.Stdin, "quit") {
			return context.DeadlineExceeded
		}
		return nil
	})
}

func TestADaemonThatDoesNotQuitEndsByItsProcess(t *testing.T) {
	t.Run("where it is not desired any more", func(t *testing.T) {
		g, n := served(t)
		n.doesNotQuit()
		g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
		g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
		g.Expect(n.files(t)).NotTo(ContainElements("nvidia.com/gpu/.started", "nvidia.com/gpu/log/"))
	})
	t.Run("where the driver leaves", func(t *testing.T) {
		g, n := served(t)
		n.leaves = true
		n.doesNotQuit()
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		g.Expect(n.daemons.Get(n.pipe())).To(BeNil(), "it would keep the kernel module from being unloaded")
	})
	t.Run("where it is of the former driver", func(t *testing.T) {
		g, n := served(t)
		n.version = "600.10.02"
		n.doesNotQuit()
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		g.Expect(n.daemons.Get(n.pipe()).Commands).NotTo(ContainElement("quit"), "it is another one")
		g.Expect(n.daemons.Get(n.pipe()).Defaults.Percentage).To(Equal(10.0))
	})
	t.Run("where it is to serve other users", func(t *testing.T) {
		g, n := served(t)
		n.doesNotQuit()
		shared := daemon(10, 1510)
		shared.MultiUser = true
		g.Expect(n.view.Start(t.Context(), shared)).To(Succeed())
		g.Expect(n.daemons.Get(n.pipe()).MultiUser).To(BeTrue())
	})
	t.Run("unless it is used", func(t *testing.T) {
		for name, use := range map[string]func(*node) (pid int){
			"by a client that no look has seen": func(n *node) int { pid, _ := n.client(t, "pod-a", 1000); return pid },
			"by a client on the node itself":    func(n *node) int { pid, _ := n.client(t, "", 1000); return pid },
			"by a pod that may connect":         func(n *node) int { return n.daemons.Run(n.pipe(), "pod-a", 1000) },
		} {
			t.Run(name, func(t *testing.T) {
				g, n := served(t)
				pid := use(n)
				n.doesNotQuit()
				g.Expect(n.view.Stop(t.Context(), resource)).To(aboutDaemon("stopping MPS control daemon for nvidia.com/gpu: "))
				g.Expect(n.daemons.Get(n.pipe())).NotTo(BeNil())
				_, runs := n.daemons.User(pid)
				g.Expect(runs).To(BeTrue())
				n.daemons.End(pid)
				g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
			})
		}
	})
}

func TestTheAgentReportsWhyADaemonThatHangsIsLeft(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	before := n.look(t)
	n.programsAreAway()
	const why = "MPS control daemon does not answer, and pods use it"
	g.Expect(n.host.Converge(t.Context(), true)).To(aboutDaemon(why))
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(aboutDaemon(why))
	g.Expect(n.view.Start(t.Context(), daemon(25, 1510))).To(aboutDaemon(why), "with other limits too")
	g.Expect(n.view.Stop(t.Context(), resource)).To(aboutDaemon(why))

	n.runner.Fail(nil)
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(Succeed())
	g.Expect(n.look(t)).To(Equal(before), "no client lost its limits")
	n.programsAreAway()
	g.Expect(n.host.Converge(t.Context(), true)).To(aboutDaemon(why))
	rounds, pod := 0, n.clock.Meanwhile
	n.clock.Meanwhile = func() { // the container of the driver restarts
		if rounds++; rounds == 10 {
			n.runner.Fail(nil)
		}
		pod()
	}
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(Succeed(), "a daemon that answers again in time is none that failed")
	n.daemons.End(pid)
}

func TestADaemonThatFailedToStartHasNoUse(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	n.look(t)
	n.daemons.End(pid)
	n.daemons.Crash(n.pipe())
	n.runner.Fail(func(c host.Command) error {
		if len(c.Args) > 0 {
			return errors.New("exit status 1: no CUDA device")
		}
		return nil
	})
	g.Expect(n.host.Converge(t.Context(), true)).To(aboutDaemon("no CUDA device"))
	recorded, err := n.view.Recorded()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(recorded).To(ConsistOf(HaveField("Use", mps.Use{})))
}
