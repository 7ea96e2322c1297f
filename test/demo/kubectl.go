// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// user is the administrator who tries the operator, at a terminal with kubectl and the operator's plugin for it.
type user struct {
	narration  *narration
	plugins    string // the folder of the operator's programs
	kubeconfig string
	kubectl    string
}

// runKubectl runs kubectl as a user would, and shows what it says.
func (u *user) runKubectl(ctx context.Context, args ...string) error {
	out, err := u.askKubectl(ctx, args...)
	if err != nil {
		return err
	}
	u.narration.say("you", "kubectl %s → %s", strings.Join(args, " "), out)
	return nil
}

// askKubectl runs kubectl, which finds our plugin in the path.
func (u *user) askKubectl(ctx context.Context, args ...string) (string, error) {
	programs, err := filepath.Abs(u.plugins)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, u.kubectl, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+u.kubeconfig, "PATH="+programs+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil && !foretold(cmd) {
		return "", fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// foretold reports whether a command has ended as plan does that finds a change: with 2, 3 or 4.
func foretold(cmd *exec.Cmd) bool {
	return slices.Contains(cmd.Args, "plan") && cmd.ProcessState != nil && cmd.ProcessState.ExitCode() >= 2
}

// showKubectl shows what kubectl says, as it is.
func (u *user) showKubectl(ctx context.Context, args ...string) error {
	out, err := u.askKubectl(ctx, args...)
	if err != nil {
		return err
	}
	u.narration.show("\n$ kubectl " + strings.Join(args, " ") + "\n" + out)
	return nil
}
