// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
)

// TestAPodThatOnlyNamesThePipeDirectoryUsesNothing: any pod may set CUDA_MPS_PIPE_DIRECTORY, on any node, without a GPU.
func TestAPodThatOnlyNamesThePipeDirectoryUsesNothing(t *testing.T) {
	t.Run("the daemon makes way for a new driver", func(t *testing.T) {
		g, n := served(t)
		n.daemons.Name(n.pipe(), "tenant", 4711)
		n.leaves = true
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
	})
	t.Run("a daemon that hangs is started again", func(t *testing.T) {
		g, n := served(t)
		n.daemons.Name(n.pipe(), "tenant", 4711)
		n.runner.Fail(func(c host.Command) error {
			if c.Stdin != "" {
				return errors.New("killed")
			}
			return nil
		})
		g.Expect(n.host.Converge(t.Context(), true)).NotTo(Succeed(), "it hangs")
		n.runner.Fail(nil)
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		g.Expect(count(n.runner.Lines(), "nvidia-cuda-mps-control -d")).To(BeNumerically(">", 1))
	})
	t.Run("it waits for no user, and keeps no shared memory", func(t *testing.T) {
		g, n := served(t)
		pid, _ := n.client(t, "pod-a", 1000)
		n.daemons.Name(n.pipe(), "tenant", 4711)
		g.Expect(n.look(t).Waiting()).To(BeEmpty())
		n.daemons.End(pid)
		g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
		g.Expect(n.host.Unused()).To(BeTrue())
	})
}

func TestAProcessOfAPodThatLooksLikeTheDaemonIsNotEndedAsIt(t *testing.T) {
	g, n := served(t)
	pid := n.daemons.Pretend(n.pipe(), "tenant")
	n.programsAreAway()
	g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed(), "one process of a tenant that starts again and again would keep it for ever")
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
	_, runs := n.daemons.User(pid)
	g.Expect(runs).To(BeTrue())
}

// listeners is who listens at the daemon's socket.
type listeners struct {
	is  host.Listener
	err error
}

func (l *listeners) Listener(string) (host.Listener, error) { return l.is, l.err }

func listens(p host.Process, known bool, inode uint64) listeners {
	return listeners{is: host.Listener{Process: p, Known: known, Socket: host.FileID{Device: 1, Inode: inode}}}
}

func TestASocketOfATenantIsNotTheDaemon(t *testing.T) {
	for name, planted := range map[string]listeners{
		"a process of a pod listens":                       listens(host.Process{Name: "nvidia-cuda-mps-control", PodUID: "tenant"}, true, 2),
		"a link is there, which may lead to what hangs":    {err: host.ErrNoSocket},
		"a process of a container that is in no known pod": listens(host.Process{Name: "nvidia-cuda-mps-control"}, true, 2),
		"a process that has ended made another socket":     listens(host.Process{}, false, 2),
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			ours := listens(host.Process{HostPIDs: true}, true, 1)
			who := &ours
			n := newNodeWith(t, who)
			g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(Succeed())
			pid, _ := n.client(t, "pod-a", 1000)
			n.look(t)
			*who = planted
			asked := len(n.runner.Lines())
			g.Expect(n.view.Observe(t.Context())).To(BeEmpty(), "it does not answer; the agent goes on reporting")
			g.Expect(n.host.Converge(t.Context(), true)).To(aboutDaemon("another process is in the place of the MPS control daemon"))
			g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(MatchError(MatchRegexp(`end the pods that use MPS on this node: [^:]{1,60}$`)),
				"its end says who does it, and is what a message of little room keeps")
			g.Expect(n.runner.Lines()[asked:]).To(BeEmpty(), "nobody is asked")
			g.Expect(n.daemons.Get(n.pipe()).Clients()).To(Equal(1), "and no client is lost")

			n.daemons.End(pid)
			n.clock.Meanwhile = nil
			*who = listens(host.Process{HostPIDs: true}, true, 3) // the tenant's pod has ended, and the daemon is started anew
			g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
			g.Expect(n.view.Observe(t.Context())).To(HaveLen(1))
		})
	}
}

// TestADaemonThatLeftTheProcessThatStartedItIsAsked: the kernel notes who began to listen, which may have ended.
func TestADaemonThatLeftTheProcessThatStartedItIsAsked(t *testing.T) {
	g := NewWithT(t)
	who := listens(host.Process{}, false, 1)
	n := newNodeWith(t, &who)
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(Succeed())
	g.Expect(n.view.Observe(t.Context())).To(HaveLen(1))
	g.Expect(n.view.Start(t.Context(), daemon(20, 1510))).To(Succeed())
	n.daemons.Crash(n.pipe())
	who = listens(host.Process{}, false, 2)
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed(), "the next one has another socket")
	g.Expect(n.view.Observe(t.Context())).To(HaveLen(1))
}

func TestNoAnswerIsBelievedBeyondItsRange(t *testing.T) {
	for _, answer := range []string{"1000.0", "0", "NaN", "1e300", "-5", "", "+Inf", strings.Repeat("9", 1<<20)} {
		t.Run(answer[:min(len(answer), 8)], func(t *testing.T) {
			g, n := served(t)
			n.runner.Add("nvidia-cuda-mps-control", n.daemons.Answering("get_default_active_thread_percentage", answer+"\n"))
			g.Expect(n.view.Observe(t.Context())).To(BeEmpty())
			err := n.view.Start(t.Context(), daemon(20, 1510))
			g.Expect(err).To(HaveOccurred())
			g.Expect(len(err.Error())).To(BeNumerically("<", 1024))
		})
	}
	t.Run("processes", func(t *testing.T) {
		g, n := served(t)
		var many strings.Builder
		for pid := range 5000 {
			many.WriteString(strconv.Itoa(pid+1) + "\n")
		}
		n.runner.Add("nvidia-cuda-mps-control", n.daemons.Answering("get_server_list", many.String()))
		g.Expect(n.host.Converge(t.Context(), true)).To(MatchError(ContainSubstring("more than 1024 processes")))
	})
}

// TestAProgramThatCannotBeEndedIsLeftBehind: a system call that waits for a file system of a tenant ends with nothing.
func TestAProgramThatCannotBeEndedIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, n := served(t)
		hangs, runs := make(chan struct{}), 0
		n.runner.Add("nvidia-cuda-mps-control", func(context.Context, host.Command) (string, error) {
			runs++
			<-hangs
			return "10.0\n", nil
		})
		_, err := n.control.Ask(t.Context(), resource)
		g.Expect(err).To(aboutDaemon("does not end"))
		for range 3 {
			g.Expect(n.view.Observe(t.Context())).To(BeEmpty(), "the agent goes on reporting")
		}
		g.Expect(runs).To(Equal(1), "no more than one is left behind")
		close(hangs)
		synctest.Wait()
		g.Expect(n.view.Observe(t.Context())).To(HaveLen(1))
	})
}

// plant puts into the pipe directory what root in a client's container can: a link through which a daemon that starts
// would write its PID into a file of the node, a named pipe at which it would wait for ever, and a folder.
func (n *node) plant(t *testing.T) (ofTheNode string) {
	t.Helper()
	g := NewWithT(t)
	ofTheNode = n.path("of-the-node")
	g.Expect(os.WriteFile(ofTheNode, []byte("kept"), 0o600)).To(Succeed())
	g.Expect(os.Symlink(ofTheNode, filepath.Join(n.pipe(), "nvidia-cuda-mps-control.pid"))).To(Succeed())
	g.Expect(syscall.Mkfifo(filepath.Join(n.pipe(), "log"), 0o666)).To(Succeed())
	g.Expect(os.MkdirAll(filepath.Join(n.pipe(), "control_lock", "full"), 0o755)).To(Succeed())
	return ofTheNode
}

// TestADaemonStartsInAPipeDirectoryThatNobodyHasPrepared: what a pod has left there would be followed, waited for or
// overwritten by a daemon that is root on the node.
func TestADaemonStartsInAPipeDirectoryThatNobodyHasPrepared(t *testing.T) {
	g, n := served(t)
	ofTheNode := n.plant(t)
	n.daemons.Crash(n.pipe())
	var found []os.DirEntry
	n.runner.Add("nvidia-cuda-mps-control", func(ctx context.Context, c host.Command) (string, error) {
		if len(c.Args) > 0 {
			found, _ = os.ReadDir(n.pipe()) // it is there
		}
		return n.daemons.Program(ctx, c)
	})
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe())).NotTo(BeNil(), "it was started again")
	g.Expect(found).To(BeEmpty())
	g.Expect(os.ReadFile(ofTheNode)).To(BeEquivalentTo("kept"))
}

// TestAPipeDirectoryIsEmptyOnceItsDaemonHasEnded: pods that were its clients may still have it mounted.
func TestAPipeDirectoryIsEmptyOnceItsDaemonHasEnded(t *testing.T) {
	g, n := served(t)
	ofTheNode := n.plant(t)
	g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
	g.Expect(os.ReadDir(n.pipe())).To(BeEmpty())
	g.Expect(os.ReadFile(ofTheNode)).To(BeEquivalentTo("kept"))
}

// filled is a node whose pipe directories hold so many bytes.
type filled struct {
	mps.Processes
	bytes int64
}

func (f filled) Trim(string, int64, int, bool) (int64, error) { return f.bytes, nil }

func TestAPipeDirectoryThatATenantFillsIsEmptiedAndThePodsAreNamed(t *testing.T) {
	g, n := served(t)
	pid, _ := n.client(t, "pod-a", 1000)
	pod := func(bytes int64) *mps.Host {
		return mps.NewHost(n.control, mps.Node{
			Processes: filled{n.daemons, bytes}, DriverContainerReady: func() bool { return true }, DriverLeaves: func() bool { return false },
			DriverVersion: func() string { return n.version }, SharesMemory: func() bool { return true },
		})
	}
	g.Expect(pod(4<<10).Converge(t.Context(), false)).To(Succeed())
	g.Expect(pod(16<<20).Converge(t.Context(), false)).To(aboutDaemon("held 16777216 bytes, which lie in the node's memory, and was emptied: " +
		"one of the pods with these UIDs has written there: pod-a"))
	g.Expect(n.view.Observe(t.Context())).To(HaveLen(1), "the daemon goes on")
	n.daemons.End(pid)
	g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
	g.Expect(pod(16<<20).Converge(t.Context(), false)).To(aboutDaemon("was emptied"), "pods that were its clients still have it")
	g.Expect(os.Mkdir(n.path(resource, "log"), 0o755)).To(Succeed())
	g.Expect(n.daemons.Start(n.pipe(), n.path(resource, "log"))).To(Succeed())
	g.Expect(os.WriteFile(n.path(resource, ".started"), nil, 0o600)).To(Succeed())
	g.Expect(pod(16<<20).Converge(t.Context(), false)).To(Succeed(), "that of NVIDIA's daemon is not ours")
}

// The shared memory below the MPS root is the /dev/shm of every pod that uses MPS on the node, and any user writes
// there.
func TestWhatPodsPutIntoTheSharedMemoryIsNoDaemon(t *testing.T) {
	tests := map[string]func(g *WithT, n *node){
		"a record that names the daemon of others": func(g *WithT, n *node) {
			content, err := json.Marshal(map[string]any{"daemon": daemon(10, 1510)})
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(os.Mkdir(n.path("shm", "of-a-pod"), 0o755)).To(Succeed())
			g.Expect(os.WriteFile(n.path("shm", "of-a-pod", ".gpusharing.json"), content, 0o600)).To(Succeed())
		},
		"a link to the folder of another daemon": func(g *WithT, n *node) {
			g.Expect(os.Symlink("../nvidia.com/gpu", n.path("shm", "of-a-pod"))).To(Succeed())
		},
		"a named pipe, as programs use it to speak with each other": func(g *WithT, n *node) {
			g.Expect(syscall.Mkfifo(n.path("shm", "of-a-pod"), 0o666)).To(Succeed())
		},
	}
	for name, plant := range tests {
		t.Run(name, func(t *testing.T) {
			g, n := served(t)
			g.Expect(os.Mkdir(n.path("shm"), 0o755)).To(Succeed())
			plant(g, n)
			done := make(chan error, 1)
			go func() { done <- n.host.Converge(t.Context(), false) }()
			g.Eventually(done, "5s").Should(Receive(Succeed()), "it looks at the daemons")
			g.Expect(n.runner.Lines()).NotTo(ContainElement("nvidia-cuda-mps-control < quit"), "the daemon serves others too")
			g.Expect(n.daemons.Get(n.pipe())).NotTo(BeNil())
			g.Expect(n.view.Recorded()).To(HaveLen(1))
			g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
			g.Expect(n.host.Unused()).To(BeTrue())
		})
	}
}

// A pod has the program of the driver, and can start a daemon of its own anywhere.
func TestADaemonOfAPodInTheSharedMemoryIsNotNVIDIAs(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	for _, folder := range []string{"pipe", "log"} {
		g.Expect(os.MkdirAll(n.path("shm", "of-a-pod", folder), 0o755)).To(Succeed())
	}
	g.Expect(os.WriteFile(n.path("shm", "of-a-pod", ".started"), nil, 0o600)).To(Succeed())
	g.Expect(n.daemons.Start(n.path("shm", "of-a-pod", "pipe"), n.path("shm", "of-a-pod", "log"))).To(Succeed())
	g.Expect(n.view.Observe(t.Context())).To(BeEmpty())
}
