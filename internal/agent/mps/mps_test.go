// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/mps/fake"
)

const resource = "nvidia.com/gpu"

// node is a node with an MPS root, on which an MPS pod may run.
type node struct {
	dir     string
	runner  *hostfake.Runner
	daemons *fake.Daemons
	clock   *fake.Clock
	control mps.Control
	host    *mps.Host
	view    *mps.View
	ended   bool   // the container of the driver is not ready
	leaves  bool   // the driver is about to change
	version string // of the driver
	unmount bool   // NVIDIA's DaemonSet has replaced the shared memory
}

// newNode makes a node whose MPS pod converges while the agent waits.
func newNode(t *testing.T) *node {
	t.Helper()
	return newNodeWith(t, nil)
}

// newNodeWith makes a node on which it is looked who listens at the daemon's socket.
func newNodeWith(t *testing.T, listeners mps.Listeners) *node {
	t.Helper()
	n := &node{dir: t.TempDir(), daemons: fake.NewDaemons(), version: "595.45.04", clock: fake.NewClock(time.Unix(1_800_000_000, 0))}
	n.runner = hostfake.NewRunner().Add("nvidia-cuda-mps-control", n.daemons.Program)
	root, err := os.OpenRoot(n.dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	control := mps.NewControl(n.runner, root, n.clock).By(listeners)
	n.control = control
	n.host, n.view = mps.NewHost(control, mps.Node{
		Processes: n.daemons, DriverContainerReady: func() bool { return !n.ended }, DriverLeaves: func() bool { return n.leaves },
		DriverVersion: func() string { return n.version }, SharesMemory: func() bool { return !n.unmount },
	}), mps.NewView(control)
	n.podRuns(t)
	return n
}

func (n *node) podRuns(t *testing.T) {
	t.Helper()
	converges := false // the pod has one thread: what it waits for itself it does not do meanwhile
	n.clock.Meanwhile = func() {
		if converges {
			return
		}
		converges = true
		defer func() { converges = false }()
		_ = n.host.Converge(t.Context(), true)
	}
}

func (n *node) podIsGone() { n.clock.Meanwhile = nil }

func (n *node) pipe() string { return filepath.Join(n.dir, resource, "pipe") }

func (n *node) path(elements ...string) string {
	return filepath.Join(append([]string{n.dir}, elements...)...)
}

func (n *node) files(t *testing.T) []string {
	t.Helper()
	var files []string
	err := filepath.WalkDir(n.dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && path != n.dir {
			name, _ := filepath.Rel(n.dir, path)
			if d.IsDir() {
				name += "/"
			}
			files = append(files, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func daemon(percentage int, limits ...int64) plan.Daemon {
	d := plan.Daemon{Resource: resource, ActiveThreadPercentage: percentage}
	for i, limit := range limits {
		d.Devices = append(d.Devices, plan.DaemonDevice{UUID: "GPU-" + string(rune('a'+i)), Index: i, PinnedMemoryLimitMiB: limit})
	}
	return d
}

// served is a node whose daemon gives each client a tenth of the threads of GPU-a, and 1510 MiB.
func served(t *testing.T) (*WithT, *node) {
	t.Helper()
	g, n := NewWithT(t), newNode(t)
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(Succeed())
	return g, n
}

func TestStartIsNVIDIAs(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510, 4056))).To(Succeed())

	g.Expect(withoutQuestions(n.runner.Lines())).To(Equal([]string{
		"nvidia-cuda-mps-control -d",
		"nvidia-cuda-mps-control < set_default_device_pinned_mem_limit 0 1510M",
		"nvidia-cuda-mps-control < set_default_device_pinned_mem_limit 1 4056M",
		"nvidia-cuda-mps-control < set_default_active_thread_percentage 10",
	}))
	for _, c := range n.runner.Commands() {
		g.Expect(c.Path).To(Equal("nvidia-cuda-mps-control"), "which is found where the driver is now")
		g.Expect(c.Env).To(Equal([]string{
			"CUDA_MPS_PIPE_DIRECTORY=" + n.pipe(), "CUDA_MPS_LOG_DIRECTORY=" + n.path(resource, "log"),
		}), "NVIDIA's environment, and nothing else")
	}
	g.Expect(n.files(t)).To(ConsistOf(
		".ready", "gpusharing/", "gpusharing/nvidia.com_gpu.json", "nvidia.com/", "nvidia.com/gpu/", "nvidia.com/gpu/.gpusharing.json",
		"nvidia.com/gpu/.started", "nvidia.com/gpu/log/", "nvidia.com/gpu/pipe/",
	))
	info, err := os.Stat(n.pipe())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(info.Mode().Perm()).To(Equal(os.FileMode(0o755)), "clients of any user reach the pipe")
}

func TestStopIsNVIDIAs(t *testing.T) {
	g, n := served(t)
	g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
	n.clock.Meanwhile()
	g.Expect(n.files(t)).To(ConsistOf("gpusharing/", "nvidia.com/", "nvidia.com/gpu/", "nvidia.com/gpu/pipe/"),
		"markers, log and record are gone; the pipe directory stays for pods that still mount it")
	g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed(), "stopping twice is no error")
}

func TestADaemonThatDiedComesBackWithItsLimits(t *testing.T) {
	g, n := served(t)
	n.daemons.Crash(n.pipe())
	g.Expect(n.view.Observe(t.Context())).To(BeEmpty(), "one that does not answer serves nobody")

	g.Expect(n.host.Converge(t.Context(), false)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe())).To(BeNil(), "between two looks at its health it is believed in")
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Memory).To(Equal(map[int]int64{0: 1510}))
	g.Expect(n.view.Observe(t.Context())).To(HaveLen(1))
}

func TestADaemonThatAnotherProgramRestartedIsLimitedAgain(t *testing.T) {
	g, n := served(t)
	n.daemons.Crash(n.pipe())
	g.Expect(n.daemons.Start(n.pipe(), n.path(resource, "log"))).To(Succeed())

	serving, err := n.view.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(serving[0].ActiveThreadPercentage).To(Equal(100), "what it answers counts, not what was once applied")
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe()).Defaults.Percentage).To(Equal(10.0))
}

func TestTheHostLeavesWhatIsAsDesired(t *testing.T) {
	g, n := served(t)
	before := len(withoutQuestions(n.runner.Lines()))
	for range 3 {
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	}
	g.Expect(withoutQuestions(n.runner.Lines())).To(HaveLen(before))
	asked := len(n.runner.Lines())
	g.Expect(n.host.Converge(t.Context(), false)).To(Succeed())
	g.Expect(n.runner.Lines()).To(HaveLen(asked), "between two looks at its health nothing is run at all")
}

func TestAnExternalDaemonIsNeverTouched(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	for _, dir := range []string{"pipe", "log"} {
		g.Expect(os.MkdirAll(n.path(resource, dir), 0o755)).To(Succeed())
	}
	g.Expect(os.WriteFile(n.path(resource, ".started"), nil, 0o600)).To(Succeed())
	g.Expect(os.WriteFile(n.path(".ready"), nil, 0o600)).To(Succeed())
	g.Expect(n.daemons.Start(n.pipe(), n.path(resource, "log"))).To(Succeed())

	serving, err := n.view.Observe(t.Context())
	g.Expect(serving, err).To(ConsistOf(mps.Serving{
		Daemon: plan.Daemon{Resource: resource, ActiveThreadPercentage: 100}, External: true,
	}))
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(aboutDaemon("NVIDIA's own MPS DaemonSet serves this resource; waiting until it has ended"))

	g.Expect(os.MkdirAll(n.path("gpusharing"), 0o755)).To(Succeed())
	desired := `{"Resource":"nvidia.com/gpu","ActiveThreadPercentage":10}`
	g.Expect(os.WriteFile(n.path("gpusharing", "nvidia.com_gpu.json"), []byte(desired), 0o600)).To(Succeed())
	g.Expect(n.host.Converge(t.Context(), true)).To(MatchError(mps.ErrDaemon), "not even where it is desired")
	g.Expect(withoutQuestions(n.runner.Lines())).To(BeEmpty())
	g.Expect(os.Remove(n.path("gpusharing", "nvidia.com_gpu.json"))).To(Succeed())
	g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
	g.Expect(n.daemons.Get(n.pipe()).Commands).NotTo(ContainElement("quit"))
	g.Expect(n.files(t)).To(ContainElements("nvidia.com/gpu/.started"))
}

func TestStartSaysWhyTheDaemonDoesNotRun(t *testing.T) {
	tests := map[string]struct {
		broken func(*node)
		says   string
	}{
		"the program fails": {
			broken: func(n *node) {
				n.runner.Fail(func(c host.Command) error {
					if len(c.Args) > 0 {
						return errors.New("exit status 1: no CUDA device")
					}
					return nil
				})
			},
			says: "starting MPS control daemon for nvidia.com/gpu: running nvidia-cuda-mps-control: exit status 1: no CUDA device",
		},
		"a limit is refused": {
			broken: func(n *node) {
				n.runner.Fail(func(c host.Command) error {
					if strings.Contains(c.Stdin, "pinned") {
						return errors.New("exit status 1: invalid device")
					}
					return nil
				})
			},
			says: `limiting the daemon with "set_default_device_pinned_mem_limit 0 1510M": running nvidia-cuda-mps-control: exit status 1`,
		},
		"it never answers": {
			broken: func(n *node) {
				n.runner.Fail(func(c host.Command) error {
					if strings.HasPrefix(c.Stdin, "get") {
						return errors.New("no answer")
					}
					return nil
				})
			},
			says: "waiting until the daemon answers: waited 15s",
		},
		"no MPS pod runs": {
			broken: (*node).podIsGone,
			says:   "the MPS pod of this node did not start the MPS control daemon, does the pod run? waited 30s",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g, n := NewWithT(t), newNode(t)
			tc.broken(n)
			g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(aboutDaemon(tc.says))
			g.Expect(n.files(t)).NotTo(ContainElement(".ready"))

			n.runner.Fail(nil)
			n.podRuns(t)
			n.clock.Meanwhile()
			g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(Succeed(), "mended, it starts without further ado")
			g.Expect(n.files(t)).To(ContainElement(".ready"))
		})
	}
}

func TestStopSaysWhyTheDaemonStillRuns(t *testing.T) {
	g, n := served(t)
	n.podIsGone()
	g.Expect(n.view.Stop(t.Context(), resource)).To(aboutDaemon("the MPS pod of this node did not stop the MPS control daemon, does the pod run?"))
}

func TestACancelledContextIsNoSignOfDeath(t *testing.T) {
	g, n := served(t)
	files := n.files(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	_, err := n.view.Observe(ctx)
	g.Expect(err).To(MatchError(context.Canceled), "an observation without the daemon would start it again")
	g.Expect(n.view.Prune(ctx, func(plan.Daemon) bool { return false })).To(MatchError(context.Canceled))
	g.Expect(n.host.Converge(ctx, true)).To(MatchError(context.Canceled))
	g.Expect(n.files(t)).To(Equal(files))
	g.Expect(n.view.Stop(ctx, resource)).To(MatchError(context.Canceled))
}

func TestAPodThatComesBackFindsItsDaemon(t *testing.T) {
	g, n := served(t)

	ctx, cancel := context.WithCancel(t.Context())
	rounds := 0
	n.clock.Meanwhile = func() {
		if rounds++; rounds == 3 {
			cancel()
		}
	}
	g.Expect(n.host.Run(ctx)).To(Succeed(), "told to end it ends")
	g.Expect(n.daemons.Get(n.pipe())).NotTo(BeNil(), "and leaves the daemons to their clients")
	g.Expect(count(n.runner.Lines(), "nvidia-cuda-mps-control -d")).To(Equal(1))
}

func TestMPSIsInUseAsLongAsAnybodyMayUseIt(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	g.Expect(n.host.Unused()).To(BeTrue())
	g.Expect(n.view.Start(t.Context(), daemon(10, 1510))).To(Succeed())
	g.Expect(n.host.Unused()).To(BeFalse())
	pid := n.daemons.Run(n.pipe(), "pod-a", 1000)
	g.Expect(n.view.Stop(t.Context(), resource)).To(Succeed())
	g.Expect(n.host.Unused()).To(BeFalse(), "a pod has the pipe directory")
	n.daemons.End(pid)
	g.Expect(n.host.Unused()).To(BeTrue())
}

func TestPrune(t *testing.T) {
	nobody := func(plan.Daemon) bool { return false }
	desired := "gpusharing/nvidia.com_gpu.json"
	t.Run("takes back the desired state for a daemon that is gone", func(t *testing.T) {
		g, n := served(t)
		n.daemons.Crash(n.pipe())
		g.Expect(n.view.Prune(t.Context(), func(plan.Daemon) bool { return true })).To(Succeed())
		g.Expect(n.files(t)).To(ContainElement(desired), "unless it is to be kept")
		g.Expect(n.view.Prune(t.Context(), nobody)).To(Succeed())
		g.Expect(n.files(t)).NotTo(ContainElement(desired))
		g.Expect(n.host.Converge(t.Context(), true)).To(Succeed())
		g.Expect(n.daemons.Get(n.pipe())).To(BeNil())
	})
	t.Run("leaves the desired state for a daemon that answers, which a plan stops", func(t *testing.T) {
		g, n := served(t)
		g.Expect(n.view.Prune(t.Context(), nobody)).To(Succeed())
		g.Expect(n.files(t)).To(ContainElement(desired))
	})
}

func TestResourcesThatAreNone(t *testing.T) {
	for _, name := range []string{"", "gpu", "../../etc", "a/../b", "a/b/c", "gpusharing/gpu", "shm/gpu", "/gpu", "nvidia.com/"} {
		t.Run(name, func(t *testing.T) {
			g, n := NewWithT(t), newNode(t)
			d := daemon(10, 1510)
			d.Resource = name
			g.Expect(n.view.Start(t.Context(), d)).To(MatchError(ContainSubstring("is not the name of an extended resource")))
			g.Expect(n.view.Stop(t.Context(), name)).To(MatchError(mps.ErrDaemon))
			g.Expect(n.files(t)).To(BeEmpty())
		})
	}
}

func TestAssign(t *testing.T) {
	ours := mps.Serving{Daemon: daemon(10, 1510)}
	external := mps.Serving{Daemon: plan.Daemon{Resource: "nvidia.com/gpu.shared", ActiveThreadPercentage: 50}, External: true}
	listed, other := gpu.Device{UUID: "GPU-a"}, gpu.Device{UUID: "GPU-z", State: gpu.State{MPS: &gpu.MPSDaemon{Resource: "stale"}}}
	inMIG := gpu.Device{UUID: "GPU-m", State: gpu.State{MIG: true}}
	ofOurs := &gpu.MPSDaemon{Resource: resource, ActiveThreadPercentage: 10, PinnedMemoryLimitMiB: 1510}
	ofNVIDIA := &gpu.MPSDaemon{Resource: "nvidia.com/gpu.shared", External: true, ActiveThreadPercentage: 50}
	tests := map[string]struct {
		serving []mps.Serving
		want    []*gpu.MPSDaemon // of listed, other and inMIG
	}{
		"no daemon": {want: []*gpu.MPSDaemon{nil, nil, nil}},
		"ours serves what it lists, and nothing else":        {serving: []mps.Serving{ours}, want: []*gpu.MPSDaemon{ofOurs, nil, nil}},
		"NVIDIA's serves every GPU that is not in MIG mode":  {serving: []mps.Serving{external}, want: []*gpu.MPSDaemon{ofNVIDIA, ofNVIDIA, nil}},
		"where both run, ours counts for the GPUs it lists":  {serving: []mps.Serving{ours, external}, want: []*gpu.MPSDaemon{ofOurs, ofNVIDIA, nil}},
		"the order in which daemons are found is irrelevant": {serving: []mps.Serving{external, ours}, want: []*gpu.MPSDaemon{ofOurs, ofNVIDIA, nil}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			devices := []gpu.Device{listed, other, inMIG}
			assigned := mps.Assign(devices, tc.serving)
			for i, want := range tc.want {
				g.Expect(assigned[i].State.MPS).To(Equal(want), assigned[i].UUID)
			}
			g.Expect(devices[1].State.MPS.Resource).To(Equal("stale"), "the argument is left alone")
		})
	}
}

// aboutDaemon matches an error about a daemon that says something.
func aboutDaemon(says string) types.GomegaMatcher {
	return And(MatchError(mps.ErrDaemon), MatchError(ContainSubstring(says)))
}

// withoutQuestions leaves out what changes nothing.
func withoutQuestions(lines []string) []string {
	var kept []string
	for _, line := range lines {
		if !strings.Contains(line, "< get_") {
			kept = append(kept, line)
		}
	}
	return kept
}

func count(lines []string, line string) int {
	n := 0
	for _, l := range lines {
		if l == line {
			n++
		}
	}
	return n
}

// TestAnAgentThatCannotReadTheRecordReportsNoGPUWithoutItsDaemon: the daemon runs.
func TestAnAgentThatCannotReadTheRecordReportsNoGPUWithoutItsDaemon(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	shared := daemon(10, 1510)
	g.Expect(n.view.Start(t.Context(), shared)).To(Succeed())
	g.Expect(os.WriteFile(n.path(resource, ".gpusharing.json"), nil, 0o600)).To(Succeed())

	serving, err := n.view.Observe(t.Context())
	if err != nil {
		return // nothing is reported
	}
	devices := mps.Assign([]gpu.Device{{UUID: shared.Devices[0].UUID}}, serving)
	g.Expect(devices[0].State.MPS).NotTo(BeNil())
}

// TestARecordThatCannotBeReadHidesNoChangeOfUsers: the daemon that runs serves one user.
func TestARecordThatCannotBeReadHidesNoChangeOfUsers(t *testing.T) {
	g, n := NewWithT(t), newNode(t)
	shared := daemon(10, 1510)
	g.Expect(n.view.Start(t.Context(), shared)).To(Succeed())
	g.Expect(os.WriteFile(n.path(resource, ".gpusharing.json"), nil, 0o600)).To(Succeed())
	shared.MultiUser = true
	g.Expect(n.view.Start(t.Context(), shared)).To(Succeed())
	a, b := n.daemons.Run(n.pipe(), "pod-a", 1000), n.daemons.Run(n.pipe(), "pod-b", 2000)
	_, served, err := n.daemons.Connect(a)
	g.Expect(served, err).To(BeTrue())
	_, served, err = n.daemons.Connect(b)
	g.Expect(served, err).To(BeTrue())
}
