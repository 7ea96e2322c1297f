// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

const (
	desiredDir    = "gpusharing"
	recordName    = ".gpusharing.json"
	startedMarker = ".started"
	readyMarker   = ".ready"

	dirMode  = 0o755 // NVIDIA's; clients of any user must reach the pipe
	fileMode = 0o644
)

// record is what the host did about a daemon. It is written before the daemon is started, so that a daemon of ours is
// never without one.
type record struct {
	Daemon plan.Daemon `json:"daemon"`
	// Applied says that the daemon was started and has the limits.
	Applied bool `json:"applied"`
	// Answered is the percentage that the daemon named after it was limited, in its own rounding: another answer later
	// means that another program limited it, or started it anew.
	Answered int `json:"answered,omitempty"`
	// MultiUser says that the daemon that runs was started to serve all users.
	MultiUser bool `json:"multiUser,omitempty"`
	// DriverVersion is the version of the driver with which the daemon that runs was started.
	DriverVersion string `json:"driverVersion,omitempty"`
	// Socket is the daemon's in its pipe directory, as it was once the daemon that runs had started.
	Socket host.FileID `json:"socket,omitzero"`
	// Error is why it does not run as desired.
	Error string `json:"error,omitempty"`
	// Use is how the daemon was used when the host last looked.
	Use Use `json:"use,omitzero"`

	unreadable bool // nothing is known but that the daemon is the operator's
}

// errContent means that a file does not hold what it should.
var errContent = errors.New("invalid content")

// inProgress says that the host is about to start the daemon.
func (r record) inProgress() bool { return !r.Applied && r.Error == "" }

// answers reports whether the host has done what it could for a desired daemon.
func (r record) answers(desired plan.Daemon) bool {
	return !r.inProgress() && sameDaemon(r.Daemon, desired)
}

// files are the files in the MPS root.
type files struct{ root *os.Root }

// path is the path of a file for programs, which do not know the root.
func (f files) path(elements ...string) string {
	return filepath.Join(append([]string{f.root.Name()}, elements...)...)
}

func desiredFile(resource string) string {
	return path.Join(desiredDir, strings.ReplaceAll(resource, "/", "_")+".json")
}

func recordFile(resource string) string { return path.Join(resource, recordName) }

// checkResource refuses what is not the name of an extended resource, and so would not be a directory of its own.
func checkResource(resource string) error {
	if strings.Count(resource, "/") != 1 || !fs.ValidPath(resource) || strings.HasPrefix(resource, desiredDir+"/") ||
		strings.HasPrefix(resource, SharedMemory+"/") {
		return fmt.Errorf("%w: %q is not the name of an extended resource", ErrDaemon, resource)
	}
	return nil
}

// desired lists the daemons that must run, by resource.
func (f files) desired() ([]plan.Daemon, error) {
	names, err := fs.Glob(f.root.FS(), desiredDir+"/*.json")
	if err != nil {
		return nil, fmt.Errorf("listing the desired MPS daemons: %w", err)
	}
	daemons := make([]plan.Daemon, 0, len(names))
	for _, name := range names {
		var d plan.Daemon
		found, err := f.read(name, &d)
		if err != nil {
			return nil, err
		}
		if found {
			daemons = append(daemons, d)
		}
	}
	return daemons, nil
}

// record reads the record of a daemon. A record that cannot be decoded still says that the daemon is the operator's,
// and nothing else.
func (f files) record(resource string) (record, bool, error) {
	var r record
	found, err := f.read(recordFile(resource), &r)
	if errors.Is(err, errContent) {
		return record{Daemon: plan.Daemon{Resource: resource}, unreadable: true}, true, nil
	}
	return r, found, err
}

// resources are those whose directory holds one of these files, sorted. It looks at nothing in the shared memory, where
// any pod that uses MPS can put records, links to other directories, and pipes on which a reader waits for ever.
func (f files) resources(names ...string) ([]string, error) {
	domains, err := f.folders(".")
	if err != nil {
		return nil, err
	}
	var resources []string
	for _, domain := range domains {
		if domain == SharedMemory {
			continue
		}
		found, err := f.folders(domain)
		if err != nil {
			return nil, err
		}
		for _, name := range found {
			resource := path.Join(domain, name)
			if slices.ContainsFunc(names, func(file string) bool { return f.has(path.Join(resource, file)) }) {
				resources = append(resources, resource)
			}
		}
	}
	slices.Sort(resources)
	return resources, nil
}

// folders are the names of the directories in a directory, links not followed. A directory that is gone has none.
func (f files) folders(dir string) ([]string, error) {
	entries, err := fs.ReadDir(f.root.FS(), dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listing the MPS daemons: %w", err)
	}
	var names []string
	for _, entry := range entries {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

func (f files) has(name string) bool {
	_, err := f.root.Lstat(name)
	return err == nil
}

func (f files) read(name string, into any) (bool, error) {
	data, err := f.root.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading %s: %w", f.path(name), err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return false, fmt.Errorf("reading %s: %w: %w", f.path(name), errContent, err)
	}
	return true, nil
}

// write replaces a file as a whole: a reader sees the old content or the new one. Two MPS pods may write side by side
// while one replaces the other, so each process has a temporary file of its own.
func (f files) write(name string, content any) error {
	data, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding %s: %w", name, err)
	}
	if err := f.root.MkdirAll(path.Dir(name), dirMode); err != nil {
		return fmt.Errorf("making the folder of %s: %w", f.path(name), err)
	}
	temporary := fmt.Sprintf("%s.%d.new", name, os.Getpid())
	if err := f.root.WriteFile(temporary, append(data, '\n'), fileMode); err != nil {
		return fmt.Errorf("writing %s: %w", f.path(temporary), err)
	}
	if err := f.root.Rename(temporary, name); err != nil {
		return fmt.Errorf("writing %s: %w", f.path(name), err)
	}
	return nil
}

func (f files) remove(name string) error {
	if err := f.root.RemoveAll(name); err != nil {
		return fmt.Errorf("removing %s: %w", f.path(name), err)
	}
	return nil
}

// mark sets or removes an empty file.
func (f files) mark(name string, present bool) error {
	if !present {
		return f.remove(name)
	}
	if err := f.root.WriteFile(name, nil, fileMode); err != nil {
		return fmt.Errorf("writing %s: %w", f.path(name), err)
	}
	return nil
}

func sameDaemon(a, b plan.Daemon) bool {
	return a.Resource == b.Resource && a.MultiUser == b.MultiUser && a.ActiveThreadPercentage == b.ActiveThreadPercentage &&
		slices.Equal(a.Devices, b.Devices)
}
