// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// The agent runs on each GPU node. It brings the node's GPUs to the spec of the GPUNode of that name and reports what
// it sees. Run as `agent mps-host` it is the one program of the MPS pod, which keeps the node's MPS control daemons,
// and as `agent mps-prepare` what that pod runs first.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/gpusharing/gpu-sharing-operator/internal/kube/version"
)

// garbage is how much more memory than it holds the program takes before it collects garbage, in percent, unless GOGC
// says so. It runs on every node with GPUs and mostly waits, so memory counts for more than the processor.
const garbage = 25

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(garbage)
	}
	runtime.MemProfileRate = 0 // a profile of the memory, which nobody can read here, takes memory
	if err := run(ctrl.SetupSignalHandler(), os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	switch {
	case version.Requested(args):
		fmt.Println("gpu-sharing-agent", version.String())
		return nil
	case len(args) > 0 && args[0] == "mps-host":
		return runMPSHost(ctx, args[1:])
	case len(args) > 0 && args[0] == "mps-prepare":
		return runMPSPrepare(args[1:])
	default:
		return runAgent(ctx, args)
	}
}
