// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nvidia-container-runtime stands for NVIDIA's container toolkit: a container that asks for a driver through
// NVIDIA_VISIBLE_DEVICES gets the files of the driver root, as if its image had them; all the rest is runc's.
//
// It injects what NVIDIA's toolkit injects and the simulated driver has: the library, nvidia-smi, the MPS control
// program, and /proc/driver with the minor numbers of MIG capabilities. The simulated driver's state comes along.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// driver is the root of the driver on the node.
	driver = "/run/nvidia/driver"
	// procDriver is what the kernel module of a real driver would show below /proc/driver.
	procDriver = driver + "/proc/driver"
	// hookArgument makes this program the hook that mounts procDriver.
	hookArgument = "mount-proc-driver"
)

// injected maps files of the driver root to where containers look for them.
func injected() map[string]string {
	return map[string]string{
		"usr/lib64/libnvidia-ml.so.1":     "/usr/lib/libnvidia-ml.so.1",
		"usr/bin/nvidia-smi":              "/usr/bin/nvidia-smi",
		"usr/bin/nvidia-cuda-mps-control": "/usr/bin/nvidia-cuda-mps-control",
		"var/lib/simdriver":               "/var/lib/simdriver",
	}
}

func main() {
	err := run(os.Args)
	fmt.Fprintln(os.Stderr, "nvidia-container-runtime:", err)
	os.Exit(1)
}

// run ends only with an error, or by becoming runc.
func run(args []string) error {
	if len(args) == 2 && args[1] == hookArgument {
		if err := mountProcDriver(os.Stdin); err != nil {
			return err
		}
		os.Exit(0)
	}
	if bundle, ok := created(args); ok {
		if err := amend(filepath.Join(bundle, "config.json")); err != nil {
			return err
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return fmt.Errorf("finding runc: %w", err)
	}
	return unix.Exec(runc, append([]string{runc}, args[1:]...), os.Environ())
}

// created is the bundle of the container that the arguments say is to be created.
func created(args []string) (bundle string, ok bool) {
	for i, a := range args {
		if a == "create" {
			ok = true
		}
		if (a == "--bundle" || a == "-b") && i+1 < len(args) {
			bundle = args[i+1]
		}
	}
	return bundle, ok && bundle != ""
}

// amend adds the driver to a container's configuration, as far as the container asks for one.
func amend(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the container's configuration: %w", err)
	}
	var config map[string]any
	if err := json.Unmarshal(raw, &config); err != nil {
		return fmt.Errorf("reading the container's configuration: %w", err)
	}
	if !asksForDriver(config) {
		return nil
	}
	for from, to := range injected() {
		config["mounts"] = append(list(config["mounts"]), map[string]any{
			"source": filepath.Join(driver, from), "destination": to, "type": "bind", "options": []string{"rbind", "nosuid", "nodev"},
		})
	}
	hooks, _ := config["hooks"].(map[string]any)
	if hooks == nil {
		hooks = map[string]any{}
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	hooks["createContainer"] = append(list(hooks["createContainer"]), map[string]any{"path": self, "args": []string{self, hookArgument}})
	config["hooks"] = hooks
	raw, err = json.Marshal(config)
	if err != nil {
		return fmt.Errorf("writing the container's configuration: %w", err)
	}
	return os.WriteFile(path, raw, 0o600)
}

func list(v any) []any {
	l, _ := v.([]any)
	return l
}

// asksForDriver says whether NVIDIA_VISIBLE_DEVICES names any device.
func asksForDriver(config map[string]any) bool {
	process, _ := config["process"].(map[string]any)
	asks := false
	for _, e := range list(process["env"]) {
		if value, ok := strings.CutPrefix(fmt.Sprint(e), "NVIDIA_VISIBLE_DEVICES="); ok {
			asks = value != "" && value != "void" && value != "none" // the last one counts
		}
	}
	return asks
}

// mountProcDriver mounts, in the container's mount namespace and before its root is entered, what runc refuses to mount
// itself, since it lies below /proc.
func mountProcDriver(state io.Reader) error {
	var container struct {
		Bundle string `json:"bundle"`
	}
	if err := json.NewDecoder(state).Decode(&container); err != nil {
		return fmt.Errorf("reading the container's state: %w", err)
	}
	raw, err := os.ReadFile(filepath.Join(container.Bundle, "config.json"))
	if err != nil {
		return fmt.Errorf("reading the container's configuration: %w", err)
	}
	var config struct {
		Root struct {
			Path string `json:"path"`
		} `json:"root"`
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		return fmt.Errorf("reading the container's configuration: %w", err)
	}
	root := config.Root.Path
	if !filepath.IsAbs(root) {
		root = filepath.Join(container.Bundle, root)
	}
	if _, err := os.Stat(procDriver); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := unix.Mount(procDriver, filepath.Join(root, "proc/driver"), "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting /proc/driver: %w", err)
	}
	return nil
}
