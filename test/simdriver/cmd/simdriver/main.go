// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// simdriver makes a driver root without a GPU and lets a person play with it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const usage = `usage: simdriver <command> [flags] <driver root>

  create  -model a100-40gb,t4 [-name node-a]   make a driver root; run inside the repository, it builds what it needs
  show                                         the GPUs, their instances and who uses them
  process -gpu UUID [-instance 1] -pid 4711 [-name python]   put a process on a GPU
  kill    -pid 4711                            end a process
  fault   -call nvmlDeviceSetMigMode [-gpu UUID] [-return 19] [-hang 5s] [-times 1]   make a call fail or hang
  latency -call '*' -for 20ms                  make calls slow
  clear                                        no more faults
  reboot                                       boot the node anew
  open    -for 500ms                           open every GPU for a while, as an exporter does
  hold                                         take handles of all MIG instances, as DCGM does, until this program is ended
  unload                                       remove the kernel module, which fails while a program has the driver open
  load    -version 580.95.05                   load the kernel module of a driver version
  models                                       what -model takes`

var errUsage = errors.New(usage)

func main() {
	if err := run(context.Background(), os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, strings.TrimPrefix(err.Error(), "simdriver: "))
		os.Exit(1)
	}
}

// flags of all commands.
type flags struct {
	models, name, gpu, call string
	version                 string
	instance, pid           int
	result, times           int
	hang, latency           time.Duration
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errUsage
	}
	var f flags
	set := flag.NewFlagSet("simdriver", flag.ContinueOnError)
	set.SetOutput(io.Discard)
	set.StringVar(&f.models, "model", "a100-40gb", "")
	set.StringVar(&f.name, "name", "node", "")
	set.StringVar(&f.gpu, "gpu", "", "")
	set.StringVar(&f.call, "call", "", "")
	set.StringVar(&f.version, "version", "", "")
	set.IntVar(&f.instance, "instance", gpu.WholeGPU, "")
	set.IntVar(&f.pid, "pid", 0, "")
	set.IntVar(&f.result, "return", 0, "")
	set.IntVar(&f.times, "times", 1, "")
	set.DurationVar(&f.hang, "hang", 0, "")
	set.DurationVar(&f.latency, "for", 0, "")
	if err := set.Parse(args[1:]); err != nil {
		return fmt.Errorf("%w\n%s", err, usage)
	}
	if args[0] == "models" {
		return models(out)
	}
	if set.NArg() != 1 {
		return errUsage
	}
	if args[0] == "create" {
		return create(ctx, f, set.Arg(0), out)
	}
	d, err := simdriver.Open(set.Arg(0))
	if err != nil {
		return err
	}
	return act(ctx, d, args[0], f, out)
}

func models(out io.Writer) error {
	for _, m := range sim.Models() {
		s, err := sim.SpecOf(m)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "%-28s %s\n", m, s.Product); err != nil {
			return err
		}
	}
	return nil
}

func create(ctx context.Context, f flags, root string, out io.Writer) error {
	spec := simdriver.Spec{Name: f.name}
	for m := range strings.SplitSeq(f.models, ",") {
		spec.Models = append(spec.Models, sim.Model(m))
	}
	cache, err := simdriver.CacheDir()
	if err != nil {
		return err
	}
	programs, err := simdriver.Build(ctx, cache)
	if err != nil {
		return err
	}
	d, err := simdriver.New(root, programs, spec)
	if err != nil {
		return err
	}
	return show(d, out)
}

func act(ctx context.Context, d *simdriver.Driver, command string, f flags, out io.Writer) error {
	switch command {
	case "show":
		return show(d, out)
	case "process":
		return d.AddProcess(f.gpu, gpu.Process{PID: f.pid, Name: f.name, Instance: f.instance})
	case "kill":
		return d.RemoveProcess(f.pid)
	case "fault":
		return d.AddFault(simdriver.Fault{Call: f.call, GPU: f.gpu, Return: sim.Return(f.result), Hang: f.hang, Times: f.times})
	case "latency":
		return d.SetLatency(f.call, f.latency)
	case "clear":
		return d.ClearFaults()
	case "reboot":
		return d.Reboot()
	case "open":
		return d.OpenFor(ctx, f.latency)
	case "hold":
		return hold(ctx, d)
	case "unload":
		return d.UnloadModule()
	case "load":
		return d.LoadModule(f.version)
	}
	return errUsage
}

func hold(ctx context.Context, d *simdriver.Driver) error {
	c, err := d.Connect()
	if err != nil {
		return err
	}
	if err := c.HoldInstances(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer stop()
	<-ctx.Done()
	return c.Disconnect()
}

func show(d *simdriver.Driver, out io.Writer) error {
	n, err := d.Node()
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, device := range n.Observe().Devices {
		fmt.Fprintf(&b, "%s %s %s, MIG %t (pending %t), compute mode %s\n", device.UUID, device.PCIBusID, device.Product,
			device.State.MIG, device.PendingMIG, device.State.ComputeMode)
		for _, i := range device.State.Instances {
			fmt.Fprintf(&b, "  instance %d: %s at %s %s\n", i.ID, i.Profile, i.Placement, i.UUID)
		}
		for _, p := range device.Processes {
			fmt.Fprintf(&b, "  process %d: %s on instance %d\n", p.PID, p.Name, p.Instance)
		}
	}
	_, err = io.WriteString(out, b.String())
	return err
}
