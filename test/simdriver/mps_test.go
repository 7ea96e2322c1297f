// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver_test

import (
	"encoding/json"
	"errors"
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

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/gputest"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver/mpsclient"
)

// clientUser is the variable that makes this test program an MPS client of that user.
const clientUser = "TEST_MPS_CLIENT_USER"

var errServerEnded = errors.New("CUDA_ERROR_MPS_RPC_FAILURE")

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
	return errServerEnded
}

// TestMPS holds the simulated program to what NVIDIA's does.
func TestMPS(t *testing.T) {
	gputest.MPSContract(t, simulatedMPS{root(t, sim.T4)})
}

// simulatedMPS is the MPS of the simulated driver.
type simulatedMPS struct{ *simdriver.Driver }

type simulatedDaemon struct {
	simulatedMPS
	dir string
}

func (simulatedMPS) Users() [2]int { return gputest.TwoUsers() }

func (m simulatedMPS) Start(t *testing.T, args ...string) gputest.MPSDaemon {
	t.Helper()
	dir := mpsDir(t)
	out, status := mps(t, m.Driver, dir, "", append([]string{"-d"}, args...)...)
	NewWithT(t).Expect(status).To(Equal(0), out)
	t.Cleanup(func() {
		quit := exec.Command(filepath.Join(m.Root(), "usr/bin/nvidia-cuda-mps-control"))
		quit.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + dir + "/pipe"}
		quit.Stdin = strings.NewReader("quit -t 0\n")
		lock, err := os.Open(dir + "/pipe/control_lock")
		_ = quit.Run()
		if err == nil { // the daemon holds it until its process ends, and with it the last write to the folder of the test
			_ = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
			_ = lock.Close()
		}
	})
	return simulatedDaemon{m, dir}
}

func (d simulatedDaemon) Tell(t *testing.T, line string) (answer string, status int) {
	t.Helper()
	return mps(t, d.Driver, d.dir, line+"\n")
}

func (d simulatedDaemon) Client(t *testing.T, uid int) gputest.MPSClient {
	t.Helper()
	return d.client(t, uid)
}

// mpsClient is a running client, and what it was told.
type mpsClient struct {
	*gputest.MPSProcess

	answers chan mpsclient.Answer
}

func (d simulatedDaemon) client(t *testing.T, uid int) mpsClient {
	t.Helper()
	program := exec.Command(os.Args[0])
	program.Env = []string{clientUser + "=" + strconv.Itoa(uid), "CUDA_MPS_PIPE_DIRECTORY=" + d.dir + "/pipe"}
	answers := make(chan mpsclient.Answer, 1)
	return mpsClient{gputest.StartMPSProcess(t, program, func(line string) gputest.MPSShare {
		var a mpsclient.Answer
		_ = json.Unmarshal([]byte(line), &a)
		answers <- a
		return gputest.MPSShare{MemoryMiB: a.MemoryMiB[0], Percentage: a.Percentage}
	}), answers}
}

func TestAnMPSServerHoldsTheGPUAsTheUserOfItsClients(t *testing.T) {
	g, d := NewWithT(t), simulatedMPS{root(t, sim.T4)}
	users := d.Users()
	daemon := d.Start(t).(simulatedDaemon) //nolint:forcetypeassert // it is one
	c := daemon.client(t, users[0])
	var got mpsclient.Answer
	g.Eventually(c.answers, 20*time.Second).Should(Receive(&got))
	g.Expect(got.User).To(Equal(users[0]))
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", got.Server))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(status)).To(MatchRegexp(`Uid:\s+%[1]d\s+%[1]d`, users[0]))
	g.Expect(filepath.Join(daemon.dir, "log", "server.log")).To(BeAnExistingFile())
	c.End()

	g.Eventually(func() []string { return names(t, d.Driver) }, time.Minute, 10*time.Millisecond).
		Should(Equal([]string{simdriver.MPSServerName}), "an idle server holds the GPU")
	daemon.Tell(t, fmt.Sprintf("shutdown_server %d", got.Server))
	g.Eventually(func() []string { return names(t, d.Driver) }, time.Minute, 10*time.Millisecond).Should(BeEmpty())
}

func TestMPSClientsFailWithTheProcessOfTheirServer(t *testing.T) {
	g, d := NewWithT(t), simulatedMPS{root(t, sim.T4)}
	daemon := d.Start(t).(simulatedDaemon) //nolint:forcetypeassert // it is one
	c := daemon.client(t, os.Getuid())
	var got mpsclient.Answer
	g.Eventually(c.answers, 20*time.Second).Should(Receive(&got))
	g.Expect(unix.Kill(got.Server, unix.SIGKILL)).To(Succeed())
	g.Eventually(c.Error(), 20*time.Second).Should(Receive(ContainSubstring("CUDA_ERROR_MPS_RPC_FAILURE")))
	g.Eventually(func() []string { return names(t, d.Driver) }, time.Minute, 10*time.Millisecond).Should(BeEmpty())
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
