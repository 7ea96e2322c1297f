// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nvidia-operand stands for those of the GPU Operator's programs whose only effect on GPUs is that they have
// them open:
//
//	nvidia-operand dcgm      nv-hostengine: holds a handle of each MIG device that was there when it started (NVIDIA/DCGM 276)
//	nvidia-operand exporter  dcgm-exporter beside an nv-hostengine in another pod: holds nothing
//	nvidia-operand status    node-status-exporter: opens every GPU for half a second once a minute
//	nvidia-operand cuda      the validator's step that starts a workload on the node's GPUs and waits for its end
//	nvidia-operand workload  that workload, nvidia-cuda-validator: opens every GPU for a moment
//	nvidia-operand done      its last container, which does nothing
//	nvidia-operand rest      the validator once all its steps have passed
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const (
	// intervalVariable changes how often node-status-exporter looks.
	intervalVariable = "STATUS_INTERVAL"
	interval         = time.Minute
	// look is how long nvidia-smi has the GPUs open.
	look = 500 * time.Millisecond
	// compute is how long the validator's workload has.
	compute = 300 * time.Millisecond
)

// Where the driver lies: for a container of the NVIDIA runtime, and on a node with a driver container or a driver of
// its own.
const driverRoot, containerRoot, hostRoot = "/", "/run/nvidia/driver", "/host"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "nvidia-operand:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if len(args) != 1 {
		return errors.New("name one operand")
	}
	switch args[0] {
	case "dcgm":
		return hold(ctx)
	case "exporter", "rest":
		<-ctx.Done()
		return nil
	case "status":
		return lookAgain(ctx)
	case "cuda":
		return validate(ctx)
	case "workload":
		return open(ctx, driverRoot, compute)
	case "done":
		return nil
	}
	return fmt.Errorf("%q is no operand", args[0])
}

// hold has every GPU open, and every MIG device that is there now, until the program ends.
func hold(ctx context.Context) error {
	d, err := simdriver.Open(driverRoot)
	if err != nil {
		return err
	}
	c, err := d.Connect()
	if err != nil {
		return err
	}
	if err := c.HoldInstances(); err != nil {
		return err
	}
	<-ctx.Done()
	return c.Disconnect()
}

// lookAgain opens every GPU for a moment, again and again. While there is no driver there is nothing to open.
func lookAgain(ctx context.Context) error {
	every := interval
	if set := os.Getenv(intervalVariable); set != "" {
		var err error
		if every, err = time.ParseDuration(set); err != nil {
			return fmt.Errorf("reading %s: %w", intervalVariable, err)
		}
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		root := containerRoot
		if _, err := os.Stat(hostRoot + "/usr/bin/nvidia-smi"); err == nil {
			root = hostRoot
		}
		if err := open(ctx, root, look); err != nil {
			fmt.Fprintln(os.Stderr, "nvidia-operand:", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func open(ctx context.Context, root string, duration time.Duration) error {
	d, err := simdriver.Open(root)
	if err != nil {
		return err
	}
	return d.OpenFor(ctx, duration)
}
