// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// nvidia-cuda-mps-control of the simulated driver. With -d it starts the MPS control daemon of a pipe directory, which
// leaves its parent's session and outlives it; otherwise it passes the commands on its standard input to that daemon.
//
// The daemon ends when told to quit, when its pipe directory is removed and when the simulated node reboots.
package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const (
	program    = "nvidia-cuda-mps-control"
	socketName = "control" // within the pipe directory, as are these two
	lockName   = "control_lock"
	pidName    = program + ".pid"

	// startTime is how long a daemon may take to answer for the first time.
	startTime = time.Minute
	pollTime  = 10 * time.Millisecond
)

var (
	errRunning  = errors.New("An instance of this daemon is already running") //nolint:staticcheck // NVIDIA's words
	errUsage    = errors.New("usage: " + program + " [-d | -f] [-multiuser-server]")
	errNoDaemon = errors.New("Cannot find MPS control daemon process")            //nolint:staticcheck // NVIDIA's words
	errNoAnswer = errors.New("Cannot send command to MPS control daemon process") //nolint:staticcheck // NVIDIA's words
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if filepath.Base(os.Args[0]) == simdriver.MPSServerName {
		return runServer(args)
	}
	pipe, err := filepath.Abs(cmp.Or(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "/tmp/nvidia-mps"))
	if err != nil {
		return err
	}
	if len(args) == 0 { // as in a user's container, which has the pipe and not the driver's root
		return talk(pipe)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	driver, err := simdriver.Here()
	if err != nil {
		return err
	}
	logs, err := filepath.Abs(cmp.Or(os.Getenv("CUDA_MPS_LOG_DIRECTORY"), "/var/log/nvidia-mps"))
	if err != nil {
		return err
	}
	switch args[0] {
	case "-d":
		return start(self, driver, pipe, args[1:])
	case "-f":
		return serve(self, driver, pipe, logs, isMultiUser(args[1:]))
	}
	return errUsage
}

func isMultiUser(options []string) bool {
	return slices.Equal(options, []string{"-multiuser-server"}) || slices.Equal(options, []string{"-M"})
}

// start starts the daemon in a session of its own and waits until it answers.
func start(self string, driver *simdriver.Driver, pipe string, options []string) error {
	if len(options) > 0 && !isMultiUser(options) {
		return errUsage
	}
	if err := meet(driver, "-d"); err != nil {
		return err
	}
	if _, err := os.Stat(pipe); err != nil {
		return fmt.Errorf("Cannot access %s: %w", pipe, err) //nolint:staticcheck // NVIDIA's words
	}
	if c, err := dial(pipe); err == nil {
		_ = c.Close()
		return errRunning
	}
	daemon := exec.Command(self, append([]string{"-f"}, options...)...)
	daemon.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := daemon.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	deadline := time.After(startTime)
	for {
		select {
		case err := <-ended:
			return fmt.Errorf("the daemon ended at once: %w", errors.Join(err, errRunning))
		case <-deadline:
			return errors.Join(errNoDaemon, daemon.Process.Kill())
		case <-time.After(pollTime):
			if c, err := dial(pipe); err == nil {
				return c.Close()
			}
		}
	}
}

// meet lets a command run into its fault, if it has one; the fault's call is the program's name and the command.
func meet(driver *simdriver.Driver, command string) error {
	fault, latency, err := driver.Take(program+" "+command, "")
	time.Sleep(latency + fault.Hang)
	if err == nil && fault.Return != sim.Success {
		err = &sim.Error{Return: fault.Return, Why: program + " " + command}
	}
	return err
}

// dial connects to the daemon of a pipe directory. The socket is named relative to it, since its path may be longer
// than the 107 bytes that an address has room for.
func dial(pipe string) (net.Conn, error) {
	if err := os.Chdir(pipe); err != nil {
		return nil, err
	}
	return net.Dial("unix", socketName)
}

// talk passes on the commands of standard input, a line each, and prints the answers.
func talk(pipe string) error {
	c, err := dial(pipe)
	if err != nil {
		return errNoDaemon
	}
	defer c.Close() //nolint:errcheck // the answers are here
	answers := bufio.NewReader(c)
	commands := bufio.NewScanner(os.Stdin)
	for commands.Scan() {
		if _, err := fmt.Fprintln(c, commands.Text()); err != nil {
			return errNoAnswer
		}
		answer, err := answers.ReadString(endOfAnswer)
		if err != nil {
			return errNoAnswer
		}
		fmt.Print(answer[:len(answer)-1])
	}
	return commands.Err()
}
