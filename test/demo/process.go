// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// start starts a program of the demo. The environment is what env names and the demo's marker. What it writes goes to a file.
func start(logFile, path string, args, env []string) (*nodesim.Process, error) {
	cmd := exec.Command(path, args...)
	cmd.Env = slices.Concat(env, []string{marker + "=" + os.Getenv(marker)})
	return nodesim.StartProcess(cmd, logFile, 5*time.Second)
}
