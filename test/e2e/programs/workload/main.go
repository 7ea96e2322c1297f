// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command workload stands for a user's program on a GPU: it says what it was given and waits until it is told to end.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

// given is what a container got from NVIDIA's device plugin.
type given struct {
	// Visible is the UUID of a GPU or of a MIG instance.
	Visible string `json:"visible"`
	// PipeDirectory is where an MPS client finds the control daemon; Pipes are the files in it.
	PipeDirectory string   `json:"pipeDirectory,omitempty"`
	Pipes         []string `json:"pipes,omitempty"`
	// Devices are the device files of GPUs.
	Devices []string `json:"devices"`
}

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	g := given{Visible: os.Getenv("NVIDIA_VISIBLE_DEVICES"), PipeDirectory: os.Getenv("CUDA_MPS_PIPE_DIRECTORY")}
	if g.PipeDirectory != "" {
		g.Pipes, _ = filepath.Glob(g.PipeDirectory + "/*") // the pattern is not malformed
	}
	g.Devices, _ = filepath.Glob("/dev/nvidia[0-9]*")
	if err := json.NewEncoder(os.Stdout).Encode(g); err != nil {
		fmt.Fprintln(os.Stderr, "saying what was given:", err)
		os.Exit(1)
	}
	<-signals
}
