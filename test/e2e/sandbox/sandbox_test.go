// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// insideVariable names what the inside of the machine does in a test.
const insideVariable = "GPUSHARING_SANDBOX_TEST"

func TestMain(m *testing.M) {
	if os.Getenv(insideVariable) == "" {
		os.Exit(m.Run())
	}
	os.Exit(Main(Options{Hostname: "inside", Addresses: []string{"10.99.0.1"}}, inside))
}

// inside does in the machine what a test asks for, and then waits or ends.
func inside() int {
	name, err := os.Hostname()
	if err != nil || name != "inside" {
		fmt.Println("hostname:", name, err)
		return 1
	}
	l, err := net.Listen("tcp", "10.99.0.1:443")
	if err != nil {
		fmt.Println("listening:", err)
		return 1
	}
	defer l.Close() //nolint:errcheck // it ends with the machine
	if err := os.WriteFile("/etc/gpusharing-sandbox-test", []byte("x"), 0o600); err != nil {
		fmt.Println("writing:", err)
		return 1
	}
	switch os.Getenv(insideVariable) {
	case "end":
		return 7
	case "reboot":
		return askToReboot()
	}
	orphan := exec.Command("sh", "-c", "mkdir /sys/fs/cgroup/memory/deeper && echo $$ >/sys/fs/cgroup/memory/deeper/cgroup.procs; exec setsid sleep 987654")
	if err := orphan.Start(); err != nil {
		fmt.Println("starting:", err)
		return 1
	}
	fmt.Println("ready", os.Getenv(boxVariable))
	time.Sleep(time.Hour)
	return 0
}

// askToReboot asks process 1 to reboot the machine, as a program on a real node does, and waits until it is passed on.
func askToReboot() int {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, RebootSignal)
	comm, err := os.ReadFile("/proc/1/comm")
	if err != nil || string(comm) != "systemd\n" {
		fmt.Printf("process 1: %s %v\n", comm, err)
		return 1
	}
	if err := syscall.Kill(1, RebootSignal); err != nil {
		fmt.Println("asking process 1:", err)
		return 1
	}
	<-asked
	return 8
}

func start(t *testing.T, what string) *exec.Cmd {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a machine inside this one needs root")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), insideVariable+"="+what)
	cmd.Stderr = os.Stderr
	return cmd
}

func TestTheMachineEndsWithTheStatusOfItsInside(t *testing.T) {
	g := NewWithT(t)
	out, err := start(t, "end").Output()
	g.Expect(err).To(MatchError("exit status 7"), string(out))
	g.Expect("/etc/gpusharing-sandbox-test").NotTo(BeAnExistingFile())
}

func TestProcess1IsToldToRebootTheMachineAsSystemdIs(t *testing.T) {
	g := NewWithT(t)
	out, err := start(t, "reboot").Output()
	g.Expect(err).To(MatchError("exit status 8"), string(out))
}

func TestNothingRemainsWhenTheMachineIsKilled(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{
		"by SIGKILL, when nobody can clear up": syscall.SIGKILL,
		"by SIGTERM":                           syscall.SIGTERM,
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cmd := start(t, "wait")
			stdout, err := cmd.StdoutPipe()
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(cmd.Start()).To(Succeed())
			line, err := bufio.NewReader(stdout).ReadString('\n')
			g.Expect(err).NotTo(HaveOccurred(), line)
			dir := strings.TrimSpace(strings.TrimPrefix(line, "ready "))
			g.Expect(dir).To(BeADirectory())
			g.Eventually(func() []string { return leftBehind(dir) }).WithTimeout(20 * time.Second).
				Should(ContainElement(ContainSubstring("sleep")))

			g.Expect(cmd.Process.Signal(signal)).To(Succeed())
			_ = cmd.Wait() // how it ended is not the question
			g.Eventually(func() []string { return leftBehind(dir) }).WithTimeout(20 * time.Second).Should(BeEmpty())
		})
	}
}

// leftBehind lists processes, mounts, control groups and files of a machine.
func leftBehind(dir string) []string {
	var left []string
	for _, pattern := range []string{"/sys/fs/cgroup/*/" + filepath.Base(dir), "/sys/fs/cgroup/*/*/*/" + filepath.Base(dir), dir, "/etc/gpusharing-sandbox-test"} {
		found, _ := filepath.Glob(pattern)
		left = append(left, found...)
	}
	mounts, _ := os.ReadFile("/proc/self/mounts")
	if strings.Contains(string(mounts), dir) {
		left = append(left, "a mount")
	}
	processes, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range processes {
		if data, _ := os.ReadFile(p); strings.Contains(string(data), "sleep\x00987654") {
			left = append(left, p+" sleep")
		}
	}
	return left
}
