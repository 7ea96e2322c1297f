// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command e2e runs the specs of test/e2e on several machines side by side. Each machine is a process of its own: it has
// a kubelet, a containerd and NVIDIA's programs in namespaces that no other sees (test/e2e/sandbox), so nothing is
// shared but the processors. Specs that build on each other stay together, on one machine.
//
//	e2e -test bin/e2e/e2e.test -last bin/e2e/last [-machines N] [-focus REGEXP | -failed] [-labels FILTER] [-within DURATION]
//	    [-turn N] [-logs] [-record FILE]
//
// It prints a line for each spec as it ends, what is known of each that fails, and at the end how long each machine
// took. The whole output of a machine is in LAST/N/log, and the report of all in LAST/report.json.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/onsi/ginkgo/v2/types"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/turns"
)

type options struct {
	test, last, focus, labels, record string
	machines                          int
	turn                              uint
	within                            time.Duration
	failed, logs                      bool
}

func main() {
	var o options
	flag.StringVar(&o.test, "test", "", "the program of the specs")
	flag.StringVar(&o.last, "last", "", "the folder for reports and logs; what it has of the run before is removed")
	flag.StringVar(&o.focus, "focus", "", "run the specs of whose names this matches a part")
	flag.StringVar(&o.labels, "labels", "", "run the specs with these labels, as Ginkgo filters them")
	flag.StringVar(&o.record, "record", "", "write to this file how many seconds each container took")
	flag.IntVar(&o.machines, "machines", runtime.NumCPU()+1, "how many machines run side by side, at most")
	flag.UintVar(&o.turn, "turn", 0, "which container of the program -within leaves out last, counted on from the first again; then those after it")
	flag.DurationVar(&o.within, "within", 0, "leave containers out that are expected to end after this time, at the pace of the machine; 0: none")
	flag.BoolVar(&o.failed, "failed", false, "run what failed in the run before")
	flag.BoolVar(&o.logs, "logs", false, "keep the logs of every program and pod")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP) //nolint:forbidigo // there is no caller
	passed, err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
	}
	if !passed || err != nil {
		os.Exit(1)
	}
}

// run runs the specs, and reports whether all passed.
func run(ctx context.Context, o options) (passed bool, err error) {
	if o.failed {
		before, err := read(filepath.Join(o.last, "report.json"))
		if err != nil {
			return false, err
		}
		o.focus = focus(before)
	}
	if err := os.RemoveAll(o.last); err != nil {
		return false, fmt.Errorf("removing what is left of the run before: %w", err)
	}
	now := clock.RealClock{}
	began := now.Now()
	specs, err := listed(ctx, o)
	if err != nil {
		return false, err
	}
	took, err := seconds()
	if err != nil {
		return false, err
	}
	units := unitsOf(specs, took)
	if len(units) == 0 {
		return false, fmt.Errorf("no spec matches focus %q and labels %q", o.focus, o.labels)
	}
	hands := deal(units, o.machines)
	var until time.Time
	if o.within > 0 {
		until = began.Add(o.within)
	}
	for i := range hands {
		hands[i].turns = turns.Turns{Until: until, Units: inTurn(hands[i].units, units, o.turn)}
	}
	reports, err := play(ctx, o, hands)
	if err != nil {
		return false, err
	}
	if err := write(filepath.Join(o.last, "report.json"), reports); err != nil {
		return false, err
	}
	if o.record != "" {
		if err := write(o.record, secondsOf(reports)); err != nil {
			return false, err
		}
	}
	var told strings.Builder
	passed = tell(&told, reports, hands, now.Since(began))
	say(told.String())
	return passed, nil
}

// say prints for the user.
func say(text string) { _, _ = os.Stdout.WriteString(text) }

// listed returns the specs that are to run, in the order in which they stand in the program.
func listed(ctx context.Context, o options) ([]types.SpecReport, error) {
	m := machine{options: o, name: "list", focus: o.focus, arguments: []string{"-ginkgo.dry-run"}}
	if err := m.run(ctx, nil); err != nil {
		return nil, fmt.Errorf("listing the specs: %w", err)
	}
	reports, err := read(m.report())
	if err != nil {
		return nil, err
	}
	var specs []types.SpecReport
	for _, r := range reports {
		for _, s := range r.SpecReports {
			if s.LeafNodeType == types.NodeTypeIt && s.State != types.SpecStateSkipped {
				specs = append(specs, s)
			}
		}
	}
	return specs, nil
}

func write(path string, value any) error {
	raw, err := json.MarshalIndent(value, "", "\t")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if err := os.WriteFile(path, append(raw, '\n'), 0o644); err != nil { //nolint:gosec // for everybody to read
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

// lastLines returns the last lines of a text, and how many it left out.
func lastLines(text string, many int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if len(lines) <= many {
		return strings.Join(lines, "\n")
	}
	return fmt.Sprintf("… %d lines before\n%s", len(lines)-many, strings.Join(lines[len(lines)-many:], "\n"))
}
