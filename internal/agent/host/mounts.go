// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"io"
	"os"
	"path"
	"strings"
)

// Mounts tells which processes have folders of the node mounted.
type Mounts interface {
	// Mounted returns, by folder, the PIDs of the processes that have it mounted: it itself, not a folder above it. Only
	// who makes a container can give it a folder of the node.
	Mounted(folders ...string) (map[string][]int, error)
}

// mount is a line of mountinfo: which folder of which file system is mounted where (proc_pid_mountinfo(5)).
type mount struct{ id, device, root, point string }

func parseMounts(mountinfo string) []mount {
	var mounts []mount
	for line := range strings.Lines(mountinfo) {
		if fields := strings.Fields(line); len(fields) > 4 {
			mounts = append(mounts, mount{id: fields[0], device: fields[2], root: unescaped(fields[3]), point: unescaped(fields[4])})
		}
	}
	return mounts
}

// maxMountinfo is how much is read of the mounts of a process, in bytes. Those that its container was made with come
// first; it may add a hundred thousand.
const maxMountinfo = 1 << 20

func (p *Proc) mountsOf(dir string) ([]mount, error) {
	mountinfo, err := p.read(path.Join(dir, "mountinfo"), maxMountinfo)
	return parseMounts(string(mountinfo)), err
}

// unescaped undoes what the kernel does to the characters that end a field.
func unescaped(field string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(field)
}

// source is the folder of a file system that is seen at a path: that of the last mount at or above it.
func source(mounts []mount, folder string) (mount, bool) {
	var found mount
	for _, m := range mounts {
		if len(m.point) >= len(found.point) && (folder == m.point || strings.HasPrefix(folder, strings.TrimSuffix(m.point, "/")+"/")) {
			found = m
		}
	}
	return mount{device: found.device, root: path.Join(found.root, strings.TrimPrefix(folder, found.point))}, found.point != ""
}

// Mounted implements Mounts. It reads no file system but proc, so that none that a container has mounted keeps it
// waiting. Processes that share their mounts are looked at once.
func (p *Proc) Mounted(folders ...string) (map[string][]int, error) {
	if len(folders) == 0 {
		return nil, nil
	}
	own, err := p.mountsOf("self")
	if err != nil {
		return nil, fmt.Errorf("reading the own mounts: %w", err)
	}
	wanted := map[mount]string{}
	for _, folder := range folders {
		if m, ok := source(own, folder); ok {
			wanted[m] = folder
		}
	}
	found, seen := map[string][]int{}, map[string][]string{}
	err = p.each(func(dir string, pid int) {
		for _, folder := range p.mountedBy(dir, wanted, seen) {
			found[folder] = append(found[folder], pid)
		}
	})
	return found, err
}

// mountedBy are the wanted folders that a process has mounted. A process that is gone has none. seen holds what was
// found by how mountinfo begins: with the number of a mount, which no other mount has, and where it is below the root of
// the process. The links that name namespace and root might not come (look).
func (p *Proc) mountedBy(dir string, wanted map[mount]string, seen map[string][]string) []string {
	mountinfo, err := p.root.Open(path.Join(dir, "mountinfo"))
	if err != nil {
		return nil
	}
	defer mountinfo.Close() //nolint:errcheck // only read
	begins := make([]byte, os.Getpagesize())
	n, _ := mountinfo.Read(begins) // the kernel gives no more at a time
	begins = begins[:n]
	if known, is := seen[string(begins)]; is {
		return known
	}
	rest, err := io.ReadAll(io.LimitReader(mountinfo, maxMountinfo))
	if err != nil {
		return nil
	}
	var folders []string
	for _, m := range parseMounts(string(begins) + string(rest)) {
		if folder, is := wanted[mount{device: m.device, root: m.root}]; is {
			folders = append(folders, folder)
		}
	}
	seen[string(begins)] = folders
	return folders
}
