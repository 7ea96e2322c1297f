// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

const (
	serveTime = 30 * time.Second // a server starts within it, and a client that waits is served after another has ended
	waitTime  = time.Second      // for which a client that has to wait is looked at
)

// MPS starts MPS control daemons on a node with one GPU that nobody uses.
type MPS interface {
	// Start starts a daemon with a pipe directory of its own. It ends with the test.
	Start(t *testing.T, args ...string) MPSDaemon
	// Users are two users as whom programs can be started; the same one twice if only root could start those of others.
	Users() [2]int
}

// MPSDaemon is an MPS control daemon.
type MPSDaemon interface {
	// Tell runs the control program with one command, or waits for the end of one that quits.
	Tell(t *testing.T, line string) (answer string, status int)
	// Client starts a program of a user that uses the GPU through the daemon until it is ended.
	Client(t *testing.T, uid int) MPSClient
}

// MPSClient is a program that uses a GPU through MPS, or waits for it.
type MPSClient interface {
	// PID is its process.
	PID() int
	// Served receives what it got, once it is served.
	Served() <-chan MPSShare
	// Error receives the error with which the program ended: its first one with CUDA's name, if it was CUDA's.
	Error() <-chan string
	// End ends the program and waits until it is gone.
	End()
}

// TwoUsers are users as whom this program can start others: its own twice, unless it is root.
func TwoUsers() [2]int {
	if own := os.Getuid(); own != 0 {
		return [2]int{own, own}
	}
	return [2]int{1001, 1002}
}

// MPSProcess is an MPSClient that is a program. It prints a line once it is served, and its error to stderr.
type MPSProcess struct {
	command *exec.Cmd
	served  chan MPSShare
	failed  chan string
	ended   chan struct{}
}

var _ MPSClient = (*MPSProcess)(nil)

// StartMPSProcess starts a program and reads what it got from the line that it prints. It ends with the test.
func StartMPSProcess(t *testing.T, command *exec.Cmd, share func(line string) MPSShare) *MPSProcess {
	t.Helper()
	p := &MPSProcess{command, make(chan MPSShare, 1), make(chan string, 1), make(chan struct{})}
	var said bytes.Buffer
	command.Stderr = &said
	out, err := command.StdoutPipe()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(command.Start()).To(Succeed())
	go func() {
		if line, err := bufio.NewReader(out).ReadString('\n'); err == nil {
			p.served <- share(line)
		}
		_ = command.Wait()
		p.failed <- said.String()
		close(p.ended)
	}()
	t.Cleanup(p.End)
	return p
}

// PID implements MPSClient.
func (p *MPSProcess) PID() int { return p.command.Process.Pid }

// Served implements MPSClient.
func (p *MPSProcess) Served() <-chan MPSShare { return p.served }

// Error implements MPSClient.
func (p *MPSProcess) Error() <-chan string { return p.failed }

// End implements MPSClient.
func (p *MPSProcess) End() {
	_ = p.command.Process.Kill()
	<-p.ended
}

// MPSShare is what a client sees of a GPU.
type MPSShare struct {
	MemoryMiB  int64   // that it may take, less what its context takes
	Percentage float64 // of the multiprocessors, which the driver rounds
}

// MPSContract checks an MPS control daemon: the simulated one, and that of a driver. What it asks for was seen with
// driver 580.159.04 on an H200.
func MPSContract(t *testing.T, node MPS) {
	t.Helper()
	for name, check := range map[string]func(b mpsBench){
		"answers before there is a server":                       answersAlone,
		"shows memory limits without the fraction of a gibibyte": showsMemory,
		"takes what is no memory limit as none":                  takesNoMemory,
		"keeps its percentage when it is told one that is none":  keepsPercentage,
		"says nothing of a GPU that the node lacks":              takesAnyGPU,
		"gives clients the limits of their server":               givesLimits,
		"serves one user at a time":                              servesInTurn,
		"serves all users by one server":                         servesAll,
		"ends a server without clients":                          endsIdleServer,
		"serves on with a server that is told to end":            servesOn,
		"fails clients with their server":                        failsClients,
		"serves nobody any more once it is told to quit":         refusesOnceItQuits,
		"ends clients when it quits with a time":                 quitsInTime,
	} {
		t.Run(name, func(t *testing.T) { check(mpsBench{T: t, WithT: NewWithT(t), node: node}) })
	}
}

// mpsBench is what a case works with.
type mpsBench struct {
	*testing.T
	*WithT

	node MPS
	MPSDaemon
}

func (b mpsBench) start(args ...string) mpsBench {
	b.Helper()
	b.MPSDaemon = b.node.Start(b.T, args...)
	return b
}

// tells expects the answer to a command.
func (b mpsBench) tells(line, answer string) {
	b.Helper()
	said, status := b.Tell(b.T, line)
	b.Expect(status).To(Equal(0), said)
	b.Expect(strings.TrimSuffix(said, "\n")).To(Equal(answer), line)
}

// served expects a client to be served, and its share to be within limits.
func (b mpsBench) served(c MPSClient, percentage float64, memoryMiB int64) {
	b.Helper()
	var got MPSShare
	b.Eventually(c.Served(), serveTime).Should(Receive(&got))
	b.Expect(math.Abs(got.Percentage-percentage)).To(BeNumerically("<", 3), "%v %% of the multiprocessors", got.Percentage)
	if memoryMiB > 0 {
		b.Expect(got.MemoryMiB).To(And(BeNumerically("<=", memoryMiB), BeNumerically(">", memoryMiB-600)))
	}
}

func (b mpsBench) server() string {
	b.Helper()
	said, _ := b.Tell(b.T, "get_server_list")
	b.Expect(strings.Fields(said)).To(HaveLen(1))
	return strings.TrimSpace(said)
}

func answersAlone(b mpsBench) {
	b = b.start()
	b.tells("get_default_active_thread_percentage", "100.0")
	b.tells("get_default_device_pinned_mem_limit 0", "")
	b.tells("get_server_list", "")
	b.tells("get_client_list 1", "Server 1 not found")
	b.tells("get_server_status 1", "Server 1 not found")
	b.tells("set_active_thread_percentage 1 5", "Server 1 not found")
	b.tells("ps", "Server not found")
	b.tells("frobnicate", `Unknown command "frobnicate"`)
}

func showsMemory(b mpsBench) {
	b = b.start()
	for told, shown := range map[string]string{"512M": "512M", "1510M": "1G", "1536M": "1G", "20480M": "20G", "20G": "20G"} {
		b.tells("set_default_device_pinned_mem_limit 0 "+told, "")
		b.tells("get_default_device_pinned_mem_limit 0", shown)
	}
}

func takesNoMemory(b mpsBench) {
	b = b.start()
	for _, none := range []string{"bogus", "0"} {
		b.tells("set_default_device_pinned_mem_limit 0 1G", "")
		b.tells("set_default_device_pinned_mem_limit 0 "+none, "")
		b.tells("get_default_device_pinned_mem_limit 0", "")
	}
}

func keepsPercentage(b mpsBench) {
	b = b.start()
	b.tells("set_default_active_thread_percentage 25", "25.0")
	for _, none := range []string{"0", "101"} {
		b.tells("set_default_active_thread_percentage "+none, "25.0")
	}
	b.tells("get_default_active_thread_percentage", "25.0")
}

func takesAnyGPU(b mpsBench) {
	b = b.start()
	b.tells("set_default_device_pinned_mem_limit 9 1G", "")
	b.tells("get_default_device_pinned_mem_limit 9", "1G")
}

func givesLimits(b mpsBench) {
	b = b.start()
	uid := b.node.Users()[0]
	b.tells("set_default_device_pinned_mem_limit 0 4G", "")
	b.tells("set_default_active_thread_percentage 25", "25.0")
	first := b.Client(b.T, uid)
	b.served(first, 25, 4096)
	server := b.server()
	b.tells("get_client_list "+server, strconv.Itoa(first.PID()))
	b.tells("get_server_status "+server, "ACTIVE")
	b.tells("set_default_active_thread_percentage 50", "50.0")
	b.served(b.Client(b.T, uid), 25, 4096) // defaults are for the next server
	b.tells("set_active_thread_percentage "+server+" 75", "75.0")
	b.tells("set_device_pinned_mem_limit "+server+" 0 2G", "")
	b.tells("get_device_pinned_mem_limit "+server+" 0", "2G")
	b.served(b.Client(b.T, uid), 75, 2048)
}

func (b mpsBench) twoUsers() (first, second int) {
	b.Helper()
	users := b.node.Users()
	if users[0] == users[1] {
		b.Skip("only root starts programs of other users")
	}
	return users[0], users[1]
}

func servesInTurn(b mpsBench) {
	one, other := b.twoUsers()
	b = b.start()
	first := b.Client(b.T, one)
	b.served(first, 100, 0)
	server := b.server()
	second := b.Client(b.T, other)
	b.Consistently(second.Served(), waitTime).ShouldNot(Receive(), "it waits without an error")
	first.End()
	b.served(second, 100, 0)
	b.Expect(b.server()).NotTo(Equal(server))
}

func servesAll(b mpsBench) {
	one, other := b.twoUsers()
	b = b.start("-multiuser-server")
	first, second := b.Client(b.T, one), b.Client(b.T, other)
	b.served(first, 100, 0)
	b.served(second, 100, 0)
	said, _ := b.Tell(b.T, "get_client_list "+b.server())
	b.Expect(strings.Fields(said)).To(ConsistOf(strconv.Itoa(first.PID()), strconv.Itoa(second.PID())))
}

func (b mpsBench) servers() []string {
	b.Helper()
	said, _ := b.Tell(b.T, "get_server_list")
	return strings.Fields(said)
}

func endsIdleServer(b mpsBench) {
	b = b.start()
	c := b.Client(b.T, b.node.Users()[0])
	b.served(c, 100, 0)
	c.End()
	server := b.server() // it stays
	b.Eventually(func() string { said, _ := b.Tell(b.T, "get_client_list "+server); return said }, serveTime).Should(BeEmpty())
	b.tells("shutdown_server "+server, "")
	b.Eventually(b.servers, serveTime).Should(BeEmpty())
	b.served(b.Client(b.T, b.node.Users()[0]), 100, 0)
	b.Expect(b.server()).NotTo(Equal(server))
}

func servesOn(b mpsBench) {
	b = b.start()
	first := b.Client(b.T, b.node.Users()[0])
	b.served(first, 100, 0)
	server := b.server()
	b.tells("shutdown_server "+server, "")
	b.tells("get_server_status "+server, "ACTIVE")
	second := b.Client(b.T, b.node.Users()[0])
	b.served(second, 100, 0)
	b.Expect(b.server()).To(Equal(server))
	b.Expect(first.Error()).NotTo(Receive())
}

func failsClients(b mpsBench) {
	b = b.start()
	first := b.Client(b.T, b.node.Users()[0])
	b.served(first, 100, 0)
	server := b.server()
	b.tells(fmt.Sprintf("shutdown_server %s -f", server), "")
	b.Eventually(first.Error(), serveTime).Should(Receive(ContainSubstring("CUDA_ERROR_MPS_RPC_FAILURE")))
	b.served(b.Client(b.T, b.node.Users()[0]), 100, 0)
	b.Expect(b.server()).NotTo(Equal(server))
}

// quit tells the daemon to quit. It waits for its clients; whether it answers questions meanwhile is left to chance.
func (b mpsBench) quit(command string) (ended <-chan string) {
	b.Helper()
	done := make(chan string, 1)
	go func() {
		said, _ := b.Tell(b.T, command)
		done <- said
	}()
	return done
}

func refusesOnceItQuits(b mpsBench) {
	b = b.start()
	uid := b.node.Users()[0]
	first := b.Client(b.T, uid)
	b.served(first, 100, 0)
	ended := b.quit("quit")
	b.Consistently(ended, waitTime).ShouldNot(Receive(), "it waits for its clients")
	b.Eventually(b.Client(b.T, uid).Error(), serveTime).Should(Receive(ContainSubstring("CUDA_ERROR_MPS_CONNECTION_FAILED")))
	b.Expect(first.Error()).NotTo(Receive(), "who was served, is")
	b.Expect(ended).NotTo(Receive())
	first.End()
	b.Eventually(ended, serveTime).Should(Receive(BeEmpty()))
	b.Eventually(func() string { said, _ := b.Tell(b.T, "get_server_list"); return said }, serveTime).
		Should(Equal("Cannot find MPS control daemon process\n"))
}

func quitsInTime(b mpsBench) {
	b = b.start()
	first := b.Client(b.T, b.node.Users()[0])
	b.served(first, 100, 0)
	ended := b.quit("quit -t 1")
	b.Eventually(first.Error(), serveTime).Should(Receive(ContainSubstring("CUDA_ERROR_MPS_RPC_FAILURE")))
	b.Eventually(ended, serveTime).Should(Receive(BeEmpty()))
}
