// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Demo shows on one machine without a GPU what the operator does: a real API server, the controller and the agents that
// ship, with the rights that they ship with, on simulated drivers; what kubelet and NVIDIA's programs would do is
// played by test/nodesim. `make demo` builds what it needs and runs it.
//
// Everything it starts and writes lies in one temporary folder and is gone when it ends, also when it is killed: a
// second process waits for the end of the first and then sweeps up.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// deadline is how long the demo may take from the first process to the last policy being Ready.
const deadline = 4 * time.Minute

func main() {
	if len(os.Args) == 3 && os.Args[1] == sweeperCommand {
		sweep(os.Args[2])
		return
	}
	run := run
	if len(os.Args) == 2 && os.Args[1] == "build-driver" {
		run = func([]string) error { _, err := driverPrograms(context.Background()); return err }
	}
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	var o options
	set := flag.NewFlagSet("demo", flag.ContinueOnError)
	set.StringVar(&o.programs, "programs", "bin", "folder with controller and agent")
	set.BoolVar(&o.keep, "keep", os.Getenv("KEEP") == "1", "leave everything running until Ctrl-C")
	if err := set.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()

	driver, err := driverPrograms(ctx)
	if err != nil {
		return err
	}
	o.driver = driver
	dir, err := os.MkdirTemp("", "gpusharing-demo-")
	if err != nil {
		return fmt.Errorf("making a folder for the demo: %w", err)
	}
	sweeper, err := startSweeper(dir)
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	defer sweeper.finish()
	if err := os.Setenv(marker, dir); err != nil {
		return err
	}
	told := newNarration(os.Stdout)
	log, err := os.Create(filepath.Join(dir, "nodes.log"))
	if err != nil {
		return fmt.Errorf("making the log of the nodes: %w", err)
	}
	defer log.Close() //nolint:errcheck // it is for people
	told.log = log
	d := &demo{options: o, dir: dir, user: user{narration: told, plugins: o.programs}}
	err = d.play(ctx)
	if ctx.Err() != nil {
		d.narration.say("Stopped; cleaning up.")
		if err == nil || d.ready {
			return nil
		}
		return errors.New("interrupted")
	}
	return err
}

// driverPrograms builds the simulated driver, unless that was done before.
func driverPrograms(ctx context.Context) (string, error) {
	cache, err := simdriver.CacheDir()
	if err != nil {
		return "", err
	}
	return simdriver.Build(ctx, cache)
}
