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
)

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
