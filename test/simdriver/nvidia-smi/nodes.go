// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Where NVIDIA's programs look and what they make, in the root that they run in.
const (
	procDevices  = "/proc/devices"
	capabilities = "/proc/driver/nvidia/capabilities"
	dev          = "/dev"
)

// makeNodes makes the device nodes that are missing, in the /dev of this program, as nvidia-modprobe and all programs
// with its code do: those of the GPUs and of the capabilities of instances that exist. It makes none where the kernel
// shows no such device, and what it may not make it leaves.
func makeNodes(gpus int) {
	majors := readMajors()
	if major, ok := majors["nvidia"]; ok {
		node("nvidiactl", major, 255, 0o666)
		for minor := range gpus {
			node(fmt.Sprintf("nvidia%d", minor), major, minor, 0o666)
		}
	}
	if major, ok := majors["nvidia-uvm"]; ok {
		node("nvidia-uvm", major, 0, 0o666)
		node("nvidia-uvm-tools", major, 1, 0o666)
	}
	if major, ok := majors["nvidia-caps"]; ok {
		makeCapabilities(major)
	}
}

// readMajors is the major number of each character device that has a driver.
func readMajors() map[string]int {
	raw, err := os.ReadFile(procDevices)
	if err != nil {
		return nil
	}
	majors := map[string]int{}
	characters, _, _ := strings.Cut(string(raw), "Block devices:")
	for line := range strings.Lines(characters) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		if major, err := strconv.Atoi(fields[0]); err == nil {
			majors[fields[1]] = major
		}
	}
	return majors
}

func makeCapabilities(major int) {
	for _, pattern := range []string{"mig/config", "mig/monitor", "gpu*/mig/gi*/access", "gpu*/mig/gi*/ci*/access"} {
		files, _ := filepath.Glob(filepath.Join(capabilities, pattern)) // the patterns are fine
		for _, file := range files {
			makeCapability(major, file)
		}
	}
}

func makeCapability(major int, file string) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return
	}
	var minor, mode, modify int
	format := "DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: %d"
	if _, err := fmt.Sscanf(string(raw), format, &minor, &mode, &modify); err != nil || modify != 1 {
		return
	}
	name := fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor)
	_ = os.MkdirAll(filepath.Join(dev, "nvidia-caps"), 0o755) // without the folder the node fails too
	node(name, major, minor, uint32(mode))
	_ = os.MkdirAll(filepath.Join(dev, "char"), 0o755) // the same
	_ = os.Symlink("../"+name, filepath.Join(dev, "char", fmt.Sprintf("%d:%d", major, minor)))
}

// node makes a device node unless it is there; one with another number is replaced.
func node(name string, major, minor int, mode uint32) {
	path, number := filepath.Join(dev, name), unix.Mkdev(uint32(major), uint32(minor))
	var info unix.Stat_t
	if unix.Stat(path, &info) == nil {
		if info.Mode&unix.S_IFMT == unix.S_IFCHR && info.Rdev == number {
			return
		}
		_ = os.Remove(path)
	}
	if unix.Mknod(path, unix.S_IFCHR|mode, int(number)) == nil {
		_ = unix.Chmod(path, mode) // in spite of the umask
	}
}
