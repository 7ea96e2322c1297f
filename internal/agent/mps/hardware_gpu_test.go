// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build hardware

package mps_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/utils/clock"

	drivers "github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/gputest"
)

// The variables that make this test program a CUDA program: its library, and what it measures, if it does.
const (
	clientLibrary = "TEST_CUDA_LIBRARY"
	clientWork    = "TEST_CUDA_WORK"
)

func init() {
	library := os.Getenv(clientLibrary)
	if library == "" {
		return
	}
	if work := os.Getenv(clientWork); work != "" {
		fmt.Println(measure(library, work))
		os.Exit(0)
	}
	err := gputest.UseCUDA(library, func(multiprocessors int, availableMiB int64) { fmt.Println(multiprocessors, availableMiB) })
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// job is work from a moment on.
type job struct {
	gputest.Work
	From time.Time
}

// measure prints the number of kernels, and their median and 99th percentile in nanoseconds.
func measure(library, work string) string {
	var j job
	if err := json.Unmarshal([]byte(work), &j); err != nil {
		return err.Error()
	}
	took, err := gputest.MeasureCUDA(library, j.From, j.Work)
	if err != nil || len(took) == 0 {
		return fmt.Sprint(err)
	}
	slices.Sort(took)
	return fmt.Sprintln(len(took), int64(took[len(took)/2]), int64(took[len(took)*99/100]))
}

// realMPS is the MPS of the driver of this machine. Its compute mode stays as it is.
type realMPS struct {
	cuda            string // the driver's library
	multiprocessors int    // of the GPU
}

type realDaemon struct {
	realMPS
	dir string
}

// TestMPSOnRealGPUs needs a machine whose GPU nobody uses:
//
//	go test -tags hardware -run OnRealGPUs -v ./internal/agent/mps
func TestMPSOnRealGPUs(t *testing.T) {
	gputest.MPSContract(t, newRealMPS(t))
}

func newRealMPS(t *testing.T) realMPS {
	t.Helper()
	g := NewWithT(t)
	library, err := drivers.Node{Host: "/"}.Library("/")
	g.Expect(err).NotTo(HaveOccurred())
	m := realMPS{cuda: filepath.Join(filepath.Dir(library), "libcuda.so.1")}
	c := m.client(t, os.Getuid())
	var whole gputest.MPSShare
	g.Eventually(c.Served(), time.Minute).Should(Receive(&whole))
	c.End()
	m.multiprocessors = int(whole.Percentage)
	return m
}

func (realMPS) Users() [2]int { return gputest.TwoUsers() }

func (m realMPS) Start(t *testing.T, args ...string) gputest.MPSDaemon {
	t.Helper()
	g, d := NewWithT(t), realDaemon{realMPS: m}
	var err error
	d.dir, err = os.MkdirTemp("", "mps") // short, and open to other users
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = os.RemoveAll(d.dir) })
	for _, dir := range []string{"", "pipe", "log"} {
		g.Expect(os.MkdirAll(filepath.Join(d.dir, dir), 0o777)).To(Succeed())
		g.Expect(os.Chmod(filepath.Join(d.dir, dir), 0o777)).To(Succeed())
	}
	said, status := d.control("", append([]string{"-d"}, args...)...)
	g.Expect(status).To(Equal(0), said)
	t.Cleanup(func() { d.control("quit -t 0\n") })
	return d
}

func (d realDaemon) environment() []string {
	return append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+d.dir+"/pipe", "CUDA_MPS_LOG_DIRECTORY="+d.dir+"/log")
}

func (d realDaemon) control(stdin string, args ...string) (said string, status int) {
	var out bytes.Buffer
	c := exec.Command("nvidia-cuda-mps-control", args...)
	c.Env, c.Stdin = d.environment(), strings.NewReader(stdin)
	if len(args) == 0 { // the daemon would keep it open
		c.Stdout, c.Stderr = &out, &out
	}
	if err := c.Run(); err != nil && c.ProcessState == nil {
		return err.Error(), -1
	}
	return out.String(), c.ProcessState.ExitCode()
}

func (d realDaemon) Tell(_ *testing.T, line string) (string, int) { return d.control(line + "\n") }

func (d realDaemon) Client(t *testing.T, uid int) gputest.MPSClient {
	t.Helper()
	return d.client(t, uid, d.environment()...)
}

func (m realMPS) client(t *testing.T, uid int, environment ...string) *gputest.MPSProcess {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	if len(environment) == 0 {
		environment = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
	}
	c.Env = append(environment, clientLibrary+"="+m.cuda)
	if uid != os.Getuid() {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	}
	return gputest.StartMPSProcess(t, c, m.share)
}

// share reads what a client has printed. While the multiprocessors of the GPU are not known, they are the percentage.
func (m realMPS) share(line string) gputest.MPSShare {
	var s gputest.MPSShare
	_, _ = fmt.Sscan(line, &s.Percentage, &s.MemoryMiB)
	if m.multiprocessors > 0 {
		s.Percentage *= 100 / float64(m.multiprocessors)
	}
	return s
}

// TestControlOnRealGPUs is Control with the driver's program: what the agent does for a policy, but for the compute mode.
func TestControlOnRealGPUs(t *testing.T) {
	g, m := NewWithT(t), newRealMPS(t)
	dir, err := os.MkdirTemp("", "mps")
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	root, err := os.OpenRoot(dir)
	g.Expect(err).NotTo(HaveOccurred())
	proc, err := os.OpenRoot("/proc")
	g.Expect(err).NotTo(HaveOccurred())
	control := mps.NewControl(drivers.NewRunner(drivers.Node{Host: "/"}, host.Exec{}), root, clock.RealClock{}).By(host.NewProc(proc))

	const resource = "nvidia.com/gpu"
	d := plan.Daemon{Resource: resource, ActiveThreadPercentage: 25, Devices: []plan.DaemonDevice{{PinnedMemoryLimitMiB: 4000}}}
	_, err = control.Ask(t.Context(), resource)
	g.Expect(err).To(HaveOccurred(), "none runs")
	g.Expect(control.Start(t.Context(), d)).To(Succeed())
	t.Cleanup(func() { _ = control.Quit(context.Background(), resource) })
	listens, err := host.NewProc(proc).Listener(filepath.Join(dir, resource, "pipe/control"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(listens.Known && listens.Process.HostPIDs).To(BeTrue(), "the daemon is who listens: %+v", listens)
	g.Expect(control.Ask(t.Context(), resource)).To(Equal(25))
	g.Expect(control.Limited(t.Context(), d)).To(BeTrue())

	daemon := realDaemon{m, filepath.Join(dir, resource)}
	b := gputest.MPSShare{}
	first := daemon.Client(t, os.Getuid())
	g.Eventually(first.Served(), time.Minute).Should(Receive(&b))
	g.Expect(b.MemoryMiB).To(BeNumerically("<=", 4000))
	servers, err := control.Servers(t.Context(), resource)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(servers).To(HaveLen(1))
	g.Expect(servers[0].Clients).To(Equal([]int{first.PID()}))
	server, err := os.ReadFile("/proc/" + strconv.Itoa(servers[0].PID) + "/environ")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(server)).To(ContainSubstring("CUDA_MPS_PIPE_DIRECTORY="+dir), "by which an agent finds the servers of a daemon that hangs")

	d.ActiveThreadPercentage, d.Devices[0].PinnedMemoryLimitMiB = 50, 71577
	g.Expect(control.Limit(t.Context(), d)).To(Succeed())
	second := daemon.Client(t, os.Getuid())
	g.Eventually(second.Served(), time.Minute).Should(Receive(&b))
	g.Expect(b.MemoryMiB).To(And(BeNumerically(">", 4000), BeNumerically("<=", 71577)))
	first.End()
	second.End()
	g.Eventually(func() []int {
		servers, _ := control.Servers(t.Context(), resource)
		return servers[0].Clients
	}, time.Minute).Should(BeEmpty())
	g.Expect(control.EndServer(t.Context(), resource, servers[0].PID)).To(Succeed())
	g.Eventually(func() (int, error) {
		servers, err := control.Servers(t.Context(), resource)
		return len(servers), err
	}, time.Minute).Should(BeZero())
	g.Expect(control.Quit(t.Context(), resource)).To(Succeed())
	_, err = control.Ask(t.Context(), resource)
	g.Expect(err).To(HaveOccurred(), "it is gone")
}

// TestWhatSharingCostsOnRealGPUs prints what programs get of a GPU that they share. It asserts nothing about the times,
// which are the GPU's.
func TestWhatSharingCostsOnRealGPUs(t *testing.T) {
	m := newRealMPS(t)
	const each = 3 * time.Second
	small := gputest.Work{Blocks: m.multiprocessors / 8, Rounds: 800_000, For: each}
	full := gputest.Work{Blocks: m.multiprocessors * 8, Rounds: 800_000, For: each}
	long, quick := full, small
	long.Rounds, quick.Pause = 15*full.Rounds, 5*time.Millisecond

	t.Logf("an eighth of the multiprocessors, alone: %v", m.run(t, 0, small))
	t.Logf("all of the multiprocessors, alone: %v", m.run(t, 0, full))
	for _, n := range []int{2, 4, 8} {
		for name, w := range map[string]gputest.Work{"an eighth": small, "all": full} {
			programs := slices.Repeat([]gputest.Work{w}, n)
			t.Logf("%s of the multiprocessors, %d programs, time-slicing: %v", name, n, m.run(t, 0, programs...))
			t.Logf("%s of the multiprocessors, %d programs, MPS, %d %% each: %v", name, n, 100/n, m.run(t, 100/n, programs...))
		}
	}
	t.Logf("a short kernel each 5 ms, alone: %v", m.run(t, 0, quick))
	for _, percentage := range []int{0, 100, 50} {
		t.Logf("… beside long kernels on all multiprocessors, MPS at %d %% (0: time-slicing): %v", percentage, m.run(t, percentage, quick, long))
	}
}

// outcome is what one program got.
type outcome struct {
	PerSecond   float64
	Median, P99 time.Duration
}

// run lets programs compute beside each other, under MPS with a percentage of the threads for each; 0: time-sliced.
func (m realMPS) run(t *testing.T, percentage int, programs ...gputest.Work) []outcome {
	t.Helper()
	g := NewWithT(t)
	environment := append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
	if percentage > 0 {
		d := m.Start(t).(realDaemon) //nolint:forcetypeassert // it is one
		d.Tell(t, fmt.Sprintf("set_default_active_thread_percentage %d", percentage))
		defer d.Tell(t, "quit -t 0")
		environment = d.environment()
	}
	from := time.Now().Add(3 * time.Second) // until all have a context
	said := make([]bytes.Buffer, len(programs))
	running := make([]*exec.Cmd, len(programs))
	for i, w := range programs {
		work, err := json.Marshal(job{w, from})
		g.Expect(err).NotTo(HaveOccurred())
		running[i] = exec.Command("/proc/self/exe")
		running[i].Env = append(slices.Clone(environment), clientLibrary+"="+m.cuda, clientWork+"="+string(work))
		running[i].Stdout = &said[i]
		g.Expect(running[i].Start()).To(Succeed())
	}
	got := make([]outcome, len(programs))
	for i, c := range running {
		g.Expect(c.Wait()).To(Succeed())
		var n, median, p99 int64
		_, err := fmt.Sscan(said[i].String(), &n, &median, &p99)
		g.Expect(err).NotTo(HaveOccurred(), said[i].String())
		got[i] = outcome{float64(n) / programs[i].For.Seconds(), time.Duration(median), time.Duration(p99)}
	}
	return got
}
