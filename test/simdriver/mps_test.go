// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver/mpsclient"
)

// clientUser is the variable that makes this test program an MPS client of that user.
const clientUser = "TEST_MPS_CLIENT_USER"

func TestMain(m *testing.M) {
	if user := os.Getenv(clientUser); user != "" {
		fmt.Fprintln(os.Stderr, beClient(user))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func beClient(user string) error {
	uid, err := strconv.Atoi(user)
	if err != nil {
		return err
	}
	dir, err := os.Open(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"))
	if err != nil {
		return err
	}
	if err := unix.Setuid(uid); err != nil {
		return err
	}
	c, err := mpsclient.ConnectAt(dir, "0")
	if err != nil {
		return err
	}
	a, err := c.Wait()
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		return err
	}
	c.Lost()
	return nil
}

// mpsClient is a running client.
type mpsClient struct {
	*exec.Cmd

	answers chan mpsclient.Answer
}

func startClient(t *testing.T, dir string, uid int) mpsClient {
	t.Helper()
	c := mpsClient{Cmd: exec.Command(os.Args[0]), answers: make(chan mpsclient.Answer, 1)}
	c.Env = []string{clientUser + "=" + strconv.Itoa(uid), "CUDA_MPS_PIPE_DIRECTORY=" + dir + "/pipe"}
	out, err := c.StdoutPipe()
	g := NewWithT(t)
	g.Expect(err).NotTo(HaveOccurred())
	c.Stderr = os.Stderr
	g.Expect(c.Start()).To(Succeed())
	go func() {
		if line, err := bufio.NewReader(out).ReadBytes('\n'); err == nil {
			var a mpsclient.Answer
			_ = json.Unmarshal(line, &a)
			c.answers <- a
		}
	}()
	t.Cleanup(c.end)
	return c
}

func (c mpsClient) end() {
	_ = c.Process.Kill()
	_ = c.Wait()
}

func (c mpsClient) expectServed(t *testing.T) mpsclient.Answer {
	t.Helper()
	var a mpsclient.Answer
	NewWithT(t).Eventually(c.answers, 20*time.Second).Should(Receive(&a))
	return a
}

// startMPS starts a daemon, and ends it with the test.
func startMPS(t *testing.T, d *simdriver.Driver, args ...string) (dir string) {
	t.Helper()
	dir = mpsDir(t)
	out, status := mps(t, d, dir, "", append([]string{"-d"}, args...)...)
	NewWithT(t).Expect(status).To(Equal(0), out)
	t.Cleanup(func() {
		quit := exec.Command(filepath.Join(d.Root(), "usr/bin/nvidia-cuda-mps-control"))
		quit.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + dir + "/pipe"}
		quit.Stdin = strings.NewReader("quit -t 0\n")
		lock, err := os.Open(dir + "/pipe/control_lock")
		_ = quit.Run()
		if err == nil { // the daemon holds it until its process ends, and with it the last write to the folder of the test
			_ = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
			_ = lock.Close()
		}
	})
	return dir
}

func TestAnMPSServerServesOneUserAtATime(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root starts programs of other users")
	}
	g, d := NewWithT(t), root(t, sim.T4)
	dir := startMPS(t, d)
	out, _ := mps(t, d, dir, "set_default_device_pinned_mem_limit 0 512M\nset_default_active_thread_percentage 25\nget_server_list\n")
	g.Expect(out).To(Equal("25.0\n"), "no server before the first client")

	first := startClient(t, dir, 1001)
	got := first.expectServed(t)
	g.Expect(got).To(Equal(mpsclient.Answer{Server: got.Server, User: 1001, Percentage: 25, MemoryMiB: map[int]int64{0: 512}}))
	out, _ = mps(t, d, dir, fmt.Sprintf("get_server_list\nget_client_list %d\n", got.Server))
	g.Expect(out).To(Equal(fmt.Sprintf("%d\n%d\n", got.Server, first.Process.Pid)))
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", got.Server))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(status)).To(MatchRegexp(`Uid:\s+1001\s+1001`))
	g.Expect(filepath.Join(dir, "log", "server.log")).To(BeAnExistingFile())

	second := startClient(t, dir, 1002)
	g.Consistently(second.answers, time.Second).ShouldNot(Receive(), "it waits without an error")
	first.end()
	other := second.expectServed(t)
	g.Expect(other.Server).NotTo(Equal(got.Server))
	second.end()

	g.Eventually(func() []string { return names(t, d) }, time.Minute, 10*time.Millisecond).Should(Equal([]string{simdriver.MPSServerName}), "an idle server holds the GPU")
	mps(t, d, dir, fmt.Sprintf("shutdown_server %d\n", other.Server))
	g.Eventually(func() []string { return names(t, d) }, time.Minute, 10*time.Millisecond).Should(BeEmpty())
}

func TestOneMPSServerServesAllUsers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root starts programs of other users")
	}
	g, d := NewWithT(t), root(t, sim.T4)
	dir := startMPS(t, d, "-multiuser-server")
	first, second := startClient(t, dir, 1001), startClient(t, dir, 1002)
	server := first.expectServed(t).Server
	g.Expect(second.expectServed(t).Server).To(Equal(server))
}

func TestLimitsReachMPSClientsThatConnectLater(t *testing.T) {
	g, d := NewWithT(t), root(t, sim.T4)
	dir, uid := startMPS(t, d), os.Getuid()
	first := startClient(t, dir, uid).expectServed(t)
	g.Expect(first.Percentage).To(Equal(100.0))
	mps(t, d, dir, "set_default_active_thread_percentage 10\n")
	g.Expect(startClient(t, dir, uid).expectServed(t).Percentage).To(Equal(100.0), "defaults are for the next server")
	mps(t, d, dir, fmt.Sprintf("set_active_thread_percentage %d 20\n", first.Server))
	g.Expect(startClient(t, dir, uid).expectServed(t).Percentage).To(Equal(20.0))
}

func TestMPSClientsFailWithTheirServer(t *testing.T) {
	g, d := NewWithT(t), root(t, sim.T4)
	dir := startMPS(t, d)
	c := startClient(t, dir, os.Getuid())
	server := c.expectServed(t).Server
	g.Expect(unix.Kill(server, unix.SIGKILL)).To(Succeed())
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	g.Eventually(ended, 20*time.Second).Should(Receive(HaveOccurred()))
	g.Eventually(func() []string { return names(t, d) }, time.Minute, 10*time.Millisecond).Should(BeEmpty())
	g.Expect(startClient(t, dir, os.Getuid()).expectServed(t).Server).NotTo(Equal(server))
}

// names are those of the processes on the first GPU.
func names(t *testing.T, d *simdriver.Driver) []string {
	t.Helper()
	n, err := d.Node()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	var names []string
	for _, p := range n.GPUs[0].Processes {
		names = append(names, p.Name)
	}
	return names
}
