// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// kubectl-gpusharing is a plugin of kubectl: in the PATH, it is `kubectl gpusharing`. It exits with 0, or with 1 and an
// error on stderr that says what to do.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	_ "time/tzdata" // the image of the controller has no time zones, and neither has every machine

	"golang.org/x/term"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	program := &cli.Program{In: os.Stdin, Out: os.Stdout, Clock: clock.RealClock{}, Width: width(), Version: version()}
	err := program.Run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// width is the number of columns of the terminal; 0 if the output goes elsewhere.
func width() int {
	columns, _, err := term.GetSize(int(os.Stdout.Fd()))
	if err != nil {
		return 0
	}
	return columns
}

func version() string {
	info, found := debug.ReadBuildInfo()
	if !found {
		return "unknown"
	}
	revision := ""
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			revision = " (" + s.Value + ")"
		}
	}
	return cmp.Or(info.Main.Version, "unknown") + revision
}
