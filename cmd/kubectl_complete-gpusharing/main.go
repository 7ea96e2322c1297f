// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// kubectl_complete-gpusharing is the program that kubectl runs to complete the arguments of `kubectl gpusharing`, where
// no shell script can be one: on Windows. There kubectl calls the plugin gpusharing.exe, and looks for
// kubectl_complete-gpusharing.exe (k8s.io/kubectl pkg/cmd/plugin/plugin_completion.go). It does what the script
// internal/cli/kubectl_complete-gpusharing does.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
)

func main() {
	plugin := exec.Command("kubectl", append([]string{"gpusharing", "__complete"}, os.Args[1:]...)...) //nolint:gosec,noctx // no shell reads them
	plugin.Stdin, plugin.Stdout, plugin.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := plugin.Run()
	if ended, is := errors.AsType[*exec.ExitError](err); is {
		os.Exit(ended.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
