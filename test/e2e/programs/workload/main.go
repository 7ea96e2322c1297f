// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command workload stands for a user's program on a GPU: it reports what it was given and waits until it is told to
// end.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// probeVariable lists device numbers, as in "195:1 241:12": the program makes a device file of each, which needs the
// capability for it, and reports whether it could open it.
const probeVariable = "PROBE_DEVICES"

// given is what a container got from NVIDIA's device plugin.
type given struct {
	// Visible is the UUID of a GPU or of a MIG instance; where devices come by CDI it is "void".
	Visible string `json:"visible"`
	// PipeDirectory is where an MPS client finds the control daemon; Pipes are the files in it.
	PipeDirectory string   `json:"pipeDirectory,omitempty"`
	Pipes         []string `json:"pipes,omitempty"`
	// Devices are NVIDIA's files in /dev.
	Devices []device `json:"devices"`
	// Drivers are the versions of the driver whose CUDA library it got.
	Drivers []string `json:"drivers,omitempty"`
	// Began is when the program began.
	Began time.Time `json:"began"`
	// Probes are the outcomes of opening device files that the program has made, by number.
	Probes map[string]string `json:"probes,omitempty"`
}

// device is a file in /dev.
type device struct {
	// Path below /dev.
	Path         string `json:"path"`
	Type         string `json:"type"`
	Major, Minor uint32
	// Open is the name of the error of opening it, such as ENXIO: no driver answers. Empty: it could be opened.
	Open string `json:"open"`
}

func main() {
	began := time.Now()
	if len(os.Args) > 1 && os.Args[1] == "allocate" {
		allocate(os.Args[2:])
		return
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if err := report(began); err != nil {
		fmt.Fprintln(os.Stderr, "reporting what was given:", err)
		os.Exit(1)
	}
	pipe := os.Getenv("CUDA_MPS_PIPE_DIRECTORY")
	if isMischief(pipe) {
		select {}
	}
	if pipe != "" {
		go useMPS(pipe)
	}
	if want := strings.Fields(os.Getenv(allocateVariable)); len(want) > 0 {
		defer allocate(want)()
	}
	<-signals
}

func report(began time.Time) error {
	g := given{Began: began, Visible: os.Getenv("NVIDIA_VISIBLE_DEVICES"), PipeDirectory: os.Getenv("CUDA_MPS_PIPE_DIRECTORY")}
	if g.PipeDirectory != "" {
		g.Pipes, _ = filepath.Glob(g.PipeDirectory + "/*") // the pattern is not malformed
	}
	var err error
	if g.Drivers, err = drivers(); err != nil {
		return err
	}
	if g.Devices, err = devices(); err != nil {
		return err
	}
	if g.Probes, err = probe(strings.Fields(os.Getenv(probeVariable))); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(g)
}

// drivers finds CUDA libraries by the version in their name.
func drivers() ([]string, error) {
	found, err := filepath.Glob("/usr/lib*/libcuda.so.*.*")
	for i := range found {
		_, found[i], _ = strings.Cut(found[i], "libcuda.so.")
	}
	return found, err
}

// devices looks at NVIDIA's files in /dev.
func devices() ([]device, error) {
	var found []device
	err := filepath.WalkDir("/dev", func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == "/dev" {
			return err
		}
		if !strings.HasPrefix(path, "/dev/nvidia") {
			if e.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if e.IsDir() {
			return nil
		}
		d, err := look(path)
		found = append(found, d)
		return err
	})
	return found, err
}

func look(path string) (device, error) {
	var info unix.Stat_t
	if err := unix.Stat(path, &info); err != nil {
		return device{}, fmt.Errorf("looking at %s: %w", path, err)
	}
	kind := map[uint32]string{unix.S_IFCHR: "c", unix.S_IFBLK: "b"}[info.Mode&unix.S_IFMT]
	return device{
		Path: strings.TrimPrefix(path, "/dev/"), Type: kind, Major: unix.Major(info.Rdev), Minor: unix.Minor(info.Rdev), Open: open(path),
	}, nil
}

// open is the name of the error of opening a file.
func open(path string) string {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd) // it was only opened
		return ""
	}
	if number, is := errors.AsType[unix.Errno](err); is {
		return unix.ErrnoName(number)
	}
	return err.Error()
}

// probe makes device files of numbers and opens them.
func probe(numbers []string) (map[string]string, error) {
	outcomes := map[string]string{}
	for _, n := range numbers {
		var major, minor uint32
		if _, err := fmt.Sscanf(n, "%d:%d", &major, &minor); err != nil {
			return nil, fmt.Errorf("reading the device number %q: %w", n, err)
		}
		path := "/dev/probe-" + strings.ReplaceAll(n, ":", "-")
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))); err != nil {
			return nil, fmt.Errorf("making %s: %w", path, err)
		}
		outcomes[n] = open(path)
	}
	return outcomes, nil
}
