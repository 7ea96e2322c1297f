// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// nvidia-smi of the simulated driver: what the agent and NVIDIA's programs call, with NVIDIA's output and exit status,
// and a table for people.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// The exit statuses of nvidia-smi (its manual, "RETURN VALUE").
const (
	done           = 0
	badArgument    = 2
	notSupported   = 3
	noPermission   = 4
	notFound       = 6
	noDriver       = 9
	mismatch       = 18
	otherwiseWrong = 255
)

func main() {
	d, err := simdriver.Here()
	if err != nil {
		fmt.Println("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver:", err)
		os.Exit(noDriver)
	}
	if status := initialise(d, os.Stdout); status != done {
		os.Exit(status)
	}
	os.Exit(run(d, os.Args[1:], os.Stdout))
}

// initialise does what NVML's initialisation does in every run of the program: it talks to the kernel module and makes
// missing device nodes.
func initialise(d *simdriver.Driver, out io.Writer) int {
	s, err := d.Read()
	if err != nil || s.Unloaded {
		//nolint:errcheck // the terminal
		fmt.Fprintln(out, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "+
			"Make sure that the latest NVIDIA driver is installed and running.")
		return noDriver
	}
	if version := simdriver.OwnVersion(); version != s.Node.DriverVersion {
		//nolint:errcheck // the terminal
		fmt.Fprintf(out, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: %s\n", version)
		return mismatch
	}
	makeNodes(len(s.Node.GPUs))
	return done
}

// smi is one run of the program.
type smi struct {
	driver  *simdriver.Driver
	out     io.Writer
	options options
}

func run(d *simdriver.Driver, args []string, out io.Writer) int {
	command := ""
	if len(args) > 0 && (args[0] == "mig" || args[0] == "compute-policy") {
		command, args = args[0], args[1:]
	}
	o, err := parse(args)
	if err != nil {
		fmt.Fprintf(out, "%v\nRun 'nvidia-smi -h' for help.\n", err) //nolint:errcheck // the terminal
		return badArgument
	}
	s := smi{driver: d, out: out, options: o}
	if err := s.do(command); err != nil {
		s.say("%s", said(err))
		return status(err)
	}
	return done
}

func (s smi) do(command string) error {
	has := s.options.has
	switch {
	case command == "mig":
		return migCommand{s}.do()
	case command == "compute-policy":
		return s.computePolicy()
	case has("-r"):
		return s.reset()
	case has("-c"):
		return s.computeMode()
	case has("-mig"):
		return s.migMode()
	case has("-pm"):
		return s.persistenceMode()
	case has("-L"):
		return s.list()
	case has("--query-gpu"):
		return s.query()
	case has("--version"):
		return s.version()
	case has("-h"):
		s.say("nvidia-smi of the simulated driver: -L, -r, -c, -mig, -pm, -q, --query-gpu, each with -i; mig; compute-policy; --version.")
		return nil
	case has("-q"):
		return s.details()
	}
	return s.table()
}

func (s smi) say(format string, args ...any) {
	fmt.Fprintf(s.out, format+"\n", args...) //nolint:errcheck // the terminal
}

// said is an error in the words of nvidia-smi.
func said(err error) string {
	var refusal *sim.Error
	if !errors.As(err, &refusal) {
		return err.Error()
	}
	return refusal.Why + ": " + words(refusal.Return)
}

func words(r sim.Return) string {
	switch r { //nolint:exhaustive // the others do not occur here
	case sim.InUse:
		return "In use by another client"
	case sim.NotSupported:
		return "Not Supported"
	case sim.InsufficientResources:
		return "Insufficient Resources"
	case sim.NotFound:
		return "Not Found"
	case sim.InvalidArgument:
		return "Invalid Argument"
	case sim.ResetRequired:
		return "GPU requires reset"
	case sim.GPUIsLost:
		return "GPU is lost"
	}
	return "Unknown Error"
}

func status(err error) int {
	var refusal *sim.Error
	if !errors.As(err, &refusal) {
		return otherwiseWrong
	}
	switch refusal.Return { //nolint:exhaustive // nvidia-smi has no status for the others
	case sim.InvalidArgument:
		return badArgument
	case sim.NotSupported:
		return notSupported
	case sim.NoPermission:
		return noPermission
	case sim.NotFound:
		return notFound
	}
	return otherwiseWrong
}

// options are the options given, by their shortest names.
type options map[string]string

func (o options) has(name string) bool {
	_, ok := o[name]
	return ok
}

// known maps each option to its short name; those that take a value end in =.
func known() map[string]string {
	return map[string]string{
		"-L": "-L", "--list-gpus": "-L", "-q": "-q", "--query": "-q", "-h": "-h", "--help": "-h", "--version": "--version",
		"-i": "-i=", "--id": "-i=", "-r": "-r", "--gpu-reset": "-r", "-c": "-c=", "--compute-mode": "-c=",
		"-mig": "-mig=", "--multi-instance-gpu": "-mig=", "-pm": "-pm=", "--persistence-mode": "-pm=",
		"--query-gpu": "--query-gpu=", "--format": "--format=",
		"-lgi": "-lgi", "--list-gpu-instances": "-lgi", "-lgip": "-lgip", "--list-gpu-instance-profiles": "-lgip",
		"-lgipp": "-lgipp", "--list-gpu-instance-possible-placements": "-lgipp",
		"-lci": "-lci", "--list-compute-instances": "-lci",
		"-cgi": "-cgi=", "--create-gpu-instance": "-cgi=", "-C": "-C", "--default-compute-instance": "-C",
		"-dgi": "-dgi", "--destroy-gpu-instance": "-dgi", "-dci": "-dci", "--destroy-compute-instance": "-dci",
		"-gi": "-gi=", "--gpu-instance-id": "-gi=", "-ci": "-ci=", "--compute-instance-id": "-ci=",
		"-l": "-l", "--list": "-l", "--set-timeslice": "--set-timeslice=",
	}
}

func parse(args []string) (options, error) {
	o := options{}
	for len(args) > 0 {
		name, value, inline := strings.Cut(args[0], "=")
		args = args[1:]
		short, ok := known()[name]
		if !ok {
			return nil, fmt.Errorf("Invalid combination of input arguments: unknown option %s.", name) //nolint:revive,staticcheck // NVIDIA's words
		}
		short, takes := strings.CutSuffix(short, "=")
		if takes && !inline {
			if len(args) == 0 {
				return nil, fmt.Errorf("Option %s takes a value.", name) //nolint:revive,staticcheck // NVIDIA's words
			}
			value, args = args[0], args[1:]
		}
		o[short] = value
	}
	return o, nil
}
