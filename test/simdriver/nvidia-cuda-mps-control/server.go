// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// server is an MPS server that the daemon has started: a process of its own, as a user of its own.
type server struct {
	command *exec.Cmd
	alive   io.Closer // the server ends when the daemon does, however it ends
}

// startServer returns once the server is what it will be: no client is served by one that is root still.
func startServer(self, logs string, uid int) (server, error) {
	command := exec.Command(self, strconv.Itoa(uid), logs)
	command.Args[0] = simdriver.MPSServerName // under which the kernel shows it
	alive, err := command.StdinPipe()
	if err != nil {
		return server{}, err
	}
	ready, err := command.StdoutPipe() // closed by the server when it is ready, or with its end
	if err != nil {
		return server{}, err
	}
	if err := command.Start(); err != nil {
		return server{}, err
	}
	if _, err := io.Copy(io.Discard, ready); err != nil {
		return server{}, errors.Join(err, alive.Close(), command.Wait())
	}
	return server{command: command, alive: alive}, nil
}

// runServer is the server. It does nothing but be there.
func runServer(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("%s is started by %s", simdriver.MPSServerName, program)
	}
	uid, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	logTo(filepath.Join(args[1], "server.log"), "[%5d] Server for user %d started", os.Getpid(), uid)
	if os.Getuid() == 0 {
		if err := unix.Setuid(uid); err != nil {
			return err
		}
	}
	if err := os.Stdout.Close(); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}
