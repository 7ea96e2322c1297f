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

// runKubectl runs kubectl as a user would, and shows the command.
func (u *user) runKubectl(ctx context.Context, args ...string) error {
	return u.showKubectl(ctx, func(string) string { return "" }, args...)
}

// showKubectl runs kubectl, and shows the command and the part of its output that matters here.
func (u *user) showKubectl(ctx context.Context, part func(string) string, args ...string) error {
	u.narration.show("$ kubectl " + strings.Join(args, " "))
	out, err := u.askKubectl(ctx, args...)
	if err != nil {
		return err
	}
	if shown := part(out); shown != "" {
		u.narration.show(shown)
	}
	return nil
}

// askKubectl runs kubectl, which finds our plugin in the path.
func (u *user) askKubectl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, u.kubectl, args...)
	cmd.Env = append(os.Environ(), u.environment()...)
	out, err := cmd.CombinedOutput()
	if err != nil && !foretold(cmd) {
		return "", fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// environment lets kubectl find the cluster and the plugin.
func (u *user) environment() []string {
	programs, err := filepath.Abs(u.plugins)
	if err != nil {
		programs = u.plugins
	}
	return []string{"KUBECONFIG=" + u.kubeconfig, "PATH=" + programs + ":" + os.Getenv("PATH"), "HOME=" + filepath.Dir(u.kubeconfig)}
}

// foretold reports whether a command has ended as plan does that finds a change: with 2, 3 or 4.
func foretold(cmd *exec.Cmd) bool {
	return slices.Contains(cmd.Args, "plan") && cmd.ProcessState != nil && cmd.ProcessState.ExitCode() >= 2
}

// all is the whole of an output, without its empty lines.
func all(out string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(out, "\n"), func(line string) bool { return strings.TrimSpace(line) == "" }), "\n")
}

// ends are the first and the last paragraph of an output that has several, and a mark for what is left out.
func ends(out string) string {
	paragraphs := strings.Split(out, "\n\n")
	if len(paragraphs) < 3 {
		return all(out)
	}
	return paragraphs[0] + "\n[…]\n" + paragraphs[len(paragraphs)-1]
}

// answer is the first paragraph of an output, as why gives its answer.
func answer(out string) string {
	first, _, _ := strings.Cut(out, "\n\n")
	return first
}
