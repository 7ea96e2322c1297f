// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

const (
	// ToolkitFolder is where the GPU Operator installs NVIDIA's container toolkit on the node.
	ToolkitFolder = "/usr/local/nvidia/toolkit"
	// HookPath is the program that CDI specifications name as their hook.
	HookPath = ToolkitFolder + "/nvidia-cdi-hook"
	// RuntimePath is the program that stands before runc for pods of the runtime class nvidia.
	RuntimePath = ToolkitFolder + "/nvidia-container-runtime"
	// ManagementSpec gives NVIDIA's own pods all device files.
	ManagementSpec = "/var/run/cdi/management.nvidia.com-gpu.yaml"

	toolkitConfig = ToolkitFolder + "/.config/nvidia-container-runtime/config.toml"
	toolkitReady  = validations + "/toolkit-ready"
)

// Toolkit is NVIDIA's container toolkit on the node.
type Toolkit struct {
	// Bin is the folder with its programs, with the one that stands for its legacy runtime, and with the runtime below
	// it.
	Bin string
	// CDI reports whether it works by CDI specifications; otherwise it is the legacy runtime.
	CDI bool
}

// Install installs the toolkit as NVIDIA's toolkit container does at its start, for a driver that is there, and then
// says that it is ready. It generates the CDI specification of NVIDIA's own pods from the device files that exist at
// that moment.
func (t Toolkit) Install(ctx context.Context, d *Driver) error {
	if err := remove(toolkitReady); err != nil {
		return err
	}
	for _, program := range []string{"nvidia-ctk", "nvidia-cdi-hook"} {
		if err := link(filepath.Join(t.Bin, program), filepath.Join(ToolkitFolder, program)); err != nil {
			return err
		}
	}
	if err := t.writeRuntime(); err != nil {
		return err
	}
	if !t.CDI {
		if err := remove(ManagementSpec); err != nil {
			return err
		}
		return write(toolkitReady, "")
	}
	if err := t.generateManagement(ctx, d); err != nil {
		return err
	}
	return write(toolkitReady, "")
}

// writeRuntime writes the script that becomes the runtime, as the toolkit container wraps its programs, and what the
// runtime reads.
func (t Toolkit) writeRuntime() error {
	program := "nvidia-container-runtime.legacy"
	if t.CDI {
		program = "nvidia-container-runtime"
	}
	script := fmt.Sprintf("#!/bin/sh\nNVIDIA_CTK_CONFIG_FILE_PATH=%s exec %s \"$@\"\n", toolkitConfig, filepath.Join(t.Bin, program))
	if err := write(RuntimePath+".new", script); err != nil {
		return err
	}
	if err := errors.Join(os.Chmod(RuntimePath+".new", 0o755), os.Rename(RuntimePath+".new", RuntimePath)); err != nil {
		return fmt.Errorf("installing the container toolkit: %w", err)
	}
	return write(toolkitConfig, fmt.Sprintf(`[nvidia-container-runtime]
log-level = "info"
mode = "cdi"
runtimes = [%q]
[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["nvidia.cdi.k8s.io/"]
default-kind = "management.nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]
`, filepath.Join(t.Bin, "machine-runtime")))
}

// generateManagement writes ManagementSpec by NVIDIA's own program.
func (t Toolkit) generateManagement(ctx context.Context, d *Driver) error {
	var said bytes.Buffer
	generate := exec.CommandContext(ctx, filepath.Join(t.Bin, "nvidia-ctk"), "cdi", "generate", "--mode=management",
		"--driver-root="+d.Root(), "--dev-root="+d.Root(), "--vendor=management.nvidia.com", "--class=gpu",
		"--nvidia-cdi-hook-path="+HookPath, "--output="+ManagementSpec)
	generate.Stdout, generate.Stderr = &said, &said
	if err := generate.Run(); err != nil {
		return fmt.Errorf("generating the CDI specification of NVIDIA's own pods: %w\n%s", err, said.Bytes())
	}
	return nil
}

func link(from, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return fmt.Errorf("installing the container toolkit: %w", err)
	}
	if err := os.Symlink(from, to); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("installing the container toolkit: %w", err)
	}
	return nil
}
