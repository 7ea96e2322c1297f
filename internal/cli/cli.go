// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cli is the kubectl plugin `kubectl gpusharing`. It asks the API server for what is there, decides with the
// same pure packages as the controller, and prints. Only restore changes something: it deletes policies. What it prints
// is plain text: pure functions over values, of which each line fits into the terminal and is not broken where there is
// none.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/utils/clock"
)

// Program is the plugin, with what it needs of its surroundings.
type Program struct {
	In  io.Reader
	Out io.Writer
	// Interactive says that In is a terminal, at which a user can confirm.
	Interactive bool
	// Clock tells the time, from which what has run out is told.
	Clock clock.Clock
	// Width is the number of columns of the terminal; 0: the output goes elsewhere, and lines of text are not broken.
	Width int
	// Version of the plugin.
	Version string
}

const help = `kubectl gpusharing shows how the GPUs of a cluster are shared, and what a policy would change. Only restore changes something.

Usage:
  kubectl gpusharing status [NODE...]          the GPUs of the nodes as a picture, and why something is not ready; of more than ten
                                               nodes a summary, and in detail ten that are not ready
  kubectl gpusharing top [node|policy|pod] [NAME...]
                                               who uses the GPUs now: memory beside the share of each container, utilization
  kubectl gpusharing dashboard                 serves both as a page for your browser, on this machine alone and with your rights, until it is interrupted
  kubectl gpusharing advise [policy|node|namespace NAME]
                                               which ways to share the GPUs fit what the containers on them used, a policy for the best one,
                                               and what it would change
  kubectl gpusharing plan -f POLICY.yaml       what a policy would do to each node, without creating it; -f - reads stdin
  kubectl gpusharing plan --delete NAME        what would become of each node if a policy were deleted, without deleting it
  kubectl gpusharing import                    policies that describe how the GPUs are shared already, for kubectl apply
  kubectl gpusharing doctor                    checks the operator and NVIDIA's programs that it needs, and prints what to do; exits with 3
                                               if there are errors
  kubectl gpusharing must-gather               writes an archive for a bug report, without Secrets; it leaves out, and lists, what you may not read
  kubectl gpusharing restore                   delete all policies, and wait until every node and NVIDIA's ClusterPolicy are
                                               as they were before the operator; exits with 2 if they are not in time
  kubectl gpusharing completion                the program kubectl_complete-gpusharing, by which kubectl completes commands, flags and names
  kubectl gpusharing version                   the version and the commit of this program
  kubectl gpusharing help                      this text

Flags:
`

// Run carries out one command. An error says what to do about it.
func (p *Program) Run(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == "__complete" { // what follows may be half a flag
		return p.completions(ctx, args[1:])
	}
	f := newFlags()
	if err := f.set.Parse(args); err != nil {
		return hint(err)
	}
	rest := f.set.Args()
	switch {
	case f.version:
		rest = []string{"version"}
	case len(rest) == 0, f.help:
		rest = []string{"help"}
	}
	command, rest := rest[0], rest[1:]
	if err := f.check(command); err != nil {
		return hint(err)
	}
	if run, reads := p.onClusters()[command]; reads {
		return run(ctx, f, rest)
	}
	switch command {
	case "completion":
		return p.write(completionScript)
	case "version":
		return p.write("kubectl-gpusharing " + p.Version + "\n")
	case "help":
		return p.write(help + f.set.FlagUsages())
	default:
		return hint(fmt.Errorf("unknown command %q", command))
	}
}

// onClusters are the commands that need a cluster.
func (p *Program) onClusters() map[string]func(context.Context, *flags, []string) error {
	return map[string]func(context.Context, *flags, []string) error{
		"status": p.status, "top": p.top, "dashboard": p.dashboard, "advise": p.adviseSharing, "plan": p.plan, "import": p.importPolicies, "doctor": p.doctor, "must-gather": p.mustGather, "restore": p.restore,
	}
}

func hint(err error) error {
	return fmt.Errorf("%w; `kubectl gpusharing help` lists commands and flags", err)
}

func (p *Program) write(text string) error {
	if _, err := io.WriteString(p.Out, text); err != nil {
		return fmt.Errorf("writing the result: %w", err)
	}
	return nil
}

// flags are those of all commands.
type flags struct {
	set                 *pflag.FlagSet
	help, version       bool
	kubeconfig, context string
	files, deleted      []string
	configMap           string
	wait, yes           bool
	policy, product     string
	notReady, watch     bool
	output              string
	nodes               []string
	timeout             time.Duration
	prometheus          string
	window, minAge      time.Duration
	port                uint16
	namespace           string
}

func newFlags() *flags {
	f := &flags{set: pflag.NewFlagSet("gpusharing", pflag.ContinueOnError)}
	f.set.SortFlags = false
	f.set.Usage = func() {}
	f.set.StringVar(&f.policy, "policy", "", "of status: only nodes that this policy governs")
	f.set.StringVar(&f.product, "product", "", "of status: only nodes with GPUs of this product, such as NVIDIA-A100-SXM4-40GB")
	f.set.BoolVar(&f.notReady, "not-ready", false, "of status: only nodes that are not ready")
	f.set.StringVarP(&f.output, "output", "o", "",
		"of status: wide (every node in detail), json or yaml; of top, plan and doctor: json or yaml; of must-gather: the file to write")
	f.set.StringSliceVar(&f.nodes, "nodes", nil, "of must-gather: only these nodes; default: 50 with GPUs, first those that are not ready")
	f.set.BoolVarP(&f.watch, "watch", "w", false, "of status: print it again whenever it changes; of top: measure again every 5 seconds")
	f.set.Uint16Var(&f.port, "port", 0, "of dashboard: port on 127.0.0.1; default: one that is free")
	f.set.StringSliceVarP(&f.files, "filename", "f", nil, "of plan: file with one or several policies")
	f.set.StringSliceVar(&f.deleted, "delete", nil, "of plan: name of a policy as if it were deleted")
	f.set.StringVar(&f.configMap, "configmap", "", "of import: NAMESPACE/NAME of the ConfigMap that a device plugin without the GPU Operator reads")
	f.set.BoolVar(&f.wait, "wait", true, "of restore: wait until everything is as before")
	f.set.DurationVar(&f.timeout, "timeout", restoreTimeout, "of restore: how long to wait")
	f.set.BoolVarP(&f.yes, "yes", "y", false, "of restore: delete the policies without asking")
	f.set.StringVar(&f.prometheus, "prometheus", "", "of advise: URL of a Prometheus that reads the agents; default: what the agents keep in memory")
	f.set.DurationVar(&f.window, "window", adviseWindow, "of advise: how far back Prometheus is asked")
	f.set.DurationVar(&f.minAge, "min-age", adviseMinAge, "of advise: how long a node must have been observed at the least")
	f.set.StringVar(&f.namespace, "namespace", "",
		"of status, dashboard, doctor and restore: namespace of the controller; default: that of its ClusterRoleBinding")
	f.set.StringVar(&f.context, "context", "", "context of the kubeconfig to use; default: the current one")
	f.set.StringVar(&f.kubeconfig, "kubeconfig", "", "kubeconfig to use; default: the environment variable KUBECONFIG, then ~/.kube/config")
	f.set.BoolVarP(&f.help, "help", "h", false, "show the help")
	f.set.BoolVar(&f.version, "version", false, "show the version and the commit of this program")
	return f
}

// takenBy are the commands that take a flag. All take one that is not here.
var takenBy = map[string][]string{
	"policy": {"status"}, "product": {"status"}, "not-ready": {"status"}, "watch": {"status", "top"},
	"output": {"status", "top", "plan", "doctor", "must-gather"}, "nodes": {"must-gather"}, "port": {"dashboard"},
	"filename": {"plan"}, "delete": {"plan"}, "configmap": {"import"}, "wait": {"restore"}, "timeout": {"restore"}, "yes": {"restore"},
	"prometheus": {"advise"}, "window": {"advise"}, "min-age": {"advise"},
	"namespace": {"status", "dashboard", "doctor", "restore"},
}

// takes reports whether a command takes a flag.
func takes(command, flag string) bool {
	commands, limited := takenBy[flag]
	return !limited || slices.Contains(commands, command)
}

// check returns an error if a flag is given that the command does not take, or a format in which it does not print.
func (f *flags) check(command string) error {
	if !slices.Contains(commands, command) || command == "help" {
		return nil
	}
	var err error
	f.set.Visit(func(flag *pflag.Flag) {
		if !takes(command, flag.Name) {
			err = fmt.Errorf("%s does not take --%s, which is a flag of %s", command, flag.Name, strings.Join(takenBy[flag.Name], ", "))
		}
	})
	formats, limited := formatsOf[command]
	if err == nil && limited && f.output != "" && !slices.Contains(formats, f.output) {
		return fmt.Errorf("--output %q of %s is not one of %s", f.output, command, strings.Join(formats, ", "))
	}
	return err
}

// restoreTimeout is how long restore waits unless --timeout says otherwise: long enough for a drain and a reboot.
const restoreTimeout = 30 * time.Minute

// The defaults of advise: work repeats by the day or by the week.
const (
	adviseWindow = 7 * 24 * time.Hour
	adviseMinAge = 24 * time.Hour
)

var errNoFile = errors.New("plan needs a policy: -f POLICY.yaml, -f - for stdin, or --delete NAME")
