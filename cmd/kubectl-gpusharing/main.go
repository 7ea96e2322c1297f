// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// kubectl-gpusharing is a plugin of kubectl: in the PATH, it is `kubectl gpusharing`. It exits with 0, or with an error
// on stderr that says what to do: with 2 where restore ends before everything is restored, with 3 where doctor finds
// errors, otherwise with 1. plan exits with what it finds (cli.OutcomeError).
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	_ "time/tzdata" // the image of the controller has no time zones, and neither has every machine

	"github.com/go-logr/logr"
	"golang.org/x/term"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/version"
)

func main() {
	quiet()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	program := &cli.Program{
		In: os.Stdin, Out: os.Stdout, Interactive: term.IsTerminal(int(os.Stdin.Fd())), Clock: clock.RealClock{}, Width: width(),
		Version: version.String(),
	}
	err := program.Run(ctx, os.Args[1:])
	stop()
	if outcome := cli.NoChange; errors.As(err, &outcome) {
		os.Exit(int(outcome))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(exitCode(err))
	}
}

// quiet keeps what the libraries log off the terminal: they warn of a watch that ends, and of a logger that was not
// set. What the user must know is in the output or in the error.
func quiet() {
	log.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
}

func exitCode(err error) int {
	if errors.Is(err, cli.ErrNotRestored) {
		return 2
	}
	if errors.Is(err, cli.ErrUnhealthy) {
		return 3
	}
	return 1
}

// width is the number of columns of the terminal; 0 if the output goes elsewhere.
func width() int {
	columns, _, err := term.GetSize(int(os.Stdout.Fd()))
	if err != nil {
		return 0
	}
	return columns
}
