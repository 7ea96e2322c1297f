// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client/config"

	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/connection"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/version"
)

type checkFlags struct {
	rights   string
	patience cli.Patience
}

func parseCheckFlags(args []string) (checkFlags, error) {
	var f checkFlags
	set := flag.NewFlagSet("controller check", flag.ContinueOnError)
	config.RegisterFlags(set)
	set.StringVar(&f.rights, "rights", "/rights/rbac.yaml", "file with the Roles, ClusterRoles and bindings that the operator's accounts must have")
	set.DurationVar(&f.patience.Timeout, "timeout", 2*time.Minute, "how long to look again while there are errors")
	set.DurationVar(&f.patience.Update, "update-timeout", 4*time.Minute, "how long to look again while an update of the agents goes on")
	if err := set.Parse(args); err != nil {
		return f, err
	}
	if set.NArg() > 0 {
		return f, fmt.Errorf("unknown argument %q; see check --help", set.Arg(0))
	}
	return f, nil
}

// runCheck prints what is missing for the operator to work. It is what the pod of `helm test` runs, and writes nothing.
func runCheck(ctx context.Context, args []string, out io.Writer) error {
	f, err := parseCheckFlags(args)
	if err != nil {
		return err
	}
	rights, err := os.ReadFile(f.rights)
	if err != nil {
		return fmt.Errorf("reading --rights: %w", err)
	}
	config, err := connection.Config("gpu-sharing-check")
	if err != nil {
		return err
	}
	config.QPS = -1 // the API server's priority and fairness paces clients
	program := &cli.Program{Out: out, Clock: clock.RealClock{}, Version: version.String()}
	return program.Check(ctx, config, rights, f.patience)
}
