// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// Cgroup is a control group.
type Cgroup struct {
	Path string // full, of its directory
	// ID tells it from another one that has its path later.
	ID string
	// Controllers are those of dmem and misc of which it has files.
	Controllers []string
}

// PodCgroup is the control group that the kubelet has made for a pod, with those of its containers and its sandbox.
type PodCgroup struct {
	Cgroup

	UID        string
	Containers []Cgroup // also the sandbox, of which CRI-O makes none for most pods
	Inner      []Cgroup // those below a container's in which crun puts its processes, or a tenant makes
}

// Inside are the cgroups of containers, and those below.
func (p PodCgroup) Inside() []Cgroup { return slices.Concat(p.Containers, p.Inner) }

// All are these and the pod's own.
func (p PodCgroup) All() []Cgroup { return append(p.Inside(), p.Cgroup) }

// Begun reports whether a container may have begun, beside the sandbox.
func (p PodCgroup) Begun() bool {
	return len(p.Containers) > 1 || len(p.Containers) == 1 && strings.HasPrefix(filepath.Base(p.Containers[0].Path), "crio-")
}

// innerFolder is what crun calls it (crun.1, run.oci.systemd.subgroup), and conmonFolder how CRI-O's that of the monitor of a container begins.
const innerFolder, conmonFolder = "container", "crio-conmon-"

// CgroupFacts are what the tree of control groups says of itself.
type CgroupFacts struct {
	Unified     bool     // it is cgroup v2
	HostRooted  bool     // its root is that of the node, not of a namespace
	Writable    bool     // by this process
	Controllers []string // that the kernel has
	Delegated   []string // those that the root passes on
}

// Cgroups is the tree of control groups of the node. It goes into no directory but those whose names are the kubelet's
// and the container runtimes', and follows no link.
type Cgroups struct {
	// Folder is where the tree is mounted, by the path that it has on the node: /sys/fs/cgroup.
	Folder string
	// Unified reports whether the file system there is cgroup v2. Nil: the kernel is asked.
	Unified func(folder string) bool
	// Stand is which controllers a directory has, where the kernel has none of them: for tests. Nil: its files tell.
	Stand func(dir string) []string
}

// podLevels are the directories in which kubelets make the control groups of pods, by cgroup driver: cgroupfs, systemd.
var podLevels = [][]string{
	{"kubepods", "kubepods/burstable", "kubepods/besteffort"},
	{"kubepods.slice", "kubepods.slice/kubepods-burstable.slice", "kubepods.slice/kubepods-besteffort.slice"},
}

// podFolder is the name of a pod's directory there. The UID of a static pod is a hash.
var podFolder = regexp.MustCompile(`^(?:pod|kubepods(?:-burstable|-besteffort)?-pod)([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$`)

// limiters are the controllers by which GPU memory is charged.
func limiters() []string { return []string{"dmem", "misc"} }

// Facts reads what the tree says of itself. What cannot be read is not so.
func (c Cgroups) Facts() (f CgroupFacts) {
	unified := c.Unified
	if unified == nil {
		unified = isUnified
	}
	if f.Unified = unified(c.Folder); !f.Unified {
		return f
	}
	_, err := os.Lstat(filepath.Join(c.Folder, "cgroup.type"))
	f.HostRooted = errors.Is(err, fs.ErrNotExist) // every cgroup but the root has it
	f.Writable = unix.Access(c.Folder, unix.W_OK) == nil && !readOnly(c.Folder)
	f.Controllers = words(filepath.Join(c.Folder, "cgroup.controllers"))
	f.Delegated = words(filepath.Join(c.Folder, "cgroup.subtree_control"))
	if c.Stand != nil {
		f.Controllers = c.Stand(c.Folder)
		f.Delegated = f.Controllers
	}
	return f
}

func isUnified(folder string) bool {
	var s unix.Statfs_t
	return unix.Statfs(folder, &s) == nil && s.Type == unix.CGROUP2_SUPER_MAGIC
}

func readOnly(folder string) bool {
	var s unix.Statfs_t
	return unix.Statfs(folder, &s) == nil && s.Flags&unix.ST_RDONLY != 0
}

func words(file string) []string {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	return strings.Fields(string(content))
}

// levels are the directories of podLevels that are there.
func (c Cgroups) levels() (there []string) {
	for _, dir := range slices.Concat(podLevels...) {
		if info, err := os.Lstat(filepath.Join(c.Folder, dir)); err == nil && info.IsDir() {
			there = append(there, dir)
		}
	}
	return there
}

// Pods lists the control groups of pods. One that goes meanwhile is left out.
func (c Cgroups) Pods() ([]PodCgroup, error) {
	root, err := os.OpenRoot(c.Folder)
	if err != nil {
		return nil, fmt.Errorf("opening the tree of control groups: %w", err)
	}
	defer root.Close() //nolint:errcheck // only looked into
	var pods []PodCgroup
	for _, level := range c.levels() {
		for _, name := range folders(root, level) {
			m := podFolder.FindStringSubmatch(name)
			if m == nil {
				continue
			}
			dir := path.Join(level, name)
			pod := PodCgroup{UID: strings.ReplaceAll(m[1], "_", "-")}
			if pod.Cgroup, err = c.describe(dir); err != nil {
				continue
			}
			c.addContainers(root, dir, &pod)
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

func (c Cgroups) addContainers(root *os.Root, dir string, pod *PodCgroup) {
	for _, container := range folders(root, dir) {
		if !containerSegment.MatchString(container) || strings.HasPrefix(container, conmonFolder) {
			continue
		}
		if found, err := c.describe(path.Join(dir, container)); err == nil {
			pod.Containers = append(pod.Containers, found)
		}
		if found, err := c.describe(path.Join(dir, container, innerFolder)); err == nil {
			pod.Inner = append(pod.Inner, found)
		}
	}
}

// folders are the directories in a directory, links not followed.
func folders(root *os.Root, dir string) (names []string) {
	entries, err := fs.ReadDir(root.FS(), dir)
	if err != nil {
		return nil
	}
	for _, entry := range entries {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names
}

func (c Cgroups) describe(dir string) (Cgroup, error) {
	g := Cgroup{Path: filepath.Join(c.Folder, dir)}
	var err error
	if g.ID, err = cgroupID(g.Path); err != nil {
		return g, err
	}
	if c.Stand != nil {
		g.Controllers = c.Stand(g.Path)
		return g, nil
	}
	for _, controller := range limiters() {
		if _, err := os.Lstat(filepath.Join(g.Path, controller+".max")); err == nil {
			g.Controllers = append(g.Controllers, controller)
		}
	}
	return g, nil
}

// At is the control group that has a path now, without its controllers.
func (Cgroups) At(dir string) (Cgroup, error) {
	id, err := cgroupID(dir)
	return Cgroup{Path: dir, ID: id}, err
}

// Is reports whether the control group is still the one that was found.
func (Cgroups) Is(g Cgroup) bool {
	id, err := cgroupID(g.Path)
	return err == nil && id == g.ID
}

// cgroupID is the inode, which the kernel gives to one control group only, and the birth for other file systems.
func cgroupID(dir string) (string, error) {
	var s unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO|unix.STATX_TYPE|unix.STATX_BTIME, &s); err != nil {
		return "", fmt.Errorf("looking at %s: %w", dir, err)
	}
	if s.Mode&unix.S_IFMT != unix.S_IFDIR {
		return "", fmt.Errorf("%s is no directory", dir)
	}
	return fmt.Sprintf("%d.%d.%d", s.Ino, s.Btime.Sec, s.Btime.Nsec), nil
}

// Watch calls changed whenever a control group of a pod, or one of the further directories, comes or goes, until the context ends. Again is
// when it looks for directories that it does not watch yet.
func (c Cgroups) Watch(ctx context.Context, further []string, again <-chan struct{}, changed func()) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watching control groups: %w", err)
	}
	defer w.Close() //nolint:errcheck // nothing is lost
	for {
		for _, dir := range c.levels() {
			_ = w.Add(filepath.Join(c.Folder, dir)) // what cannot be watched is seen by the next look
		}
		for _, dir := range further {
			_ = w.Add(dir)
		}
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-w.Errors:
			if !open {
				return nil
			}
			changed() // events were lost
		case e, open := <-w.Events:
			if !open {
				return nil
			}
			if e.Has(fsnotify.Create) || e.Has(fsnotify.Remove) || e.Has(fsnotify.Rename) {
				changed()
			}
		case <-again:
		}
	}
}

// podLogFolder is where the kubelet makes a directory for the logs of each pod, before the pod's first container.
const podLogFolder = "var/log/pods"

// PodLogFolder is that below the root of the node's file system.
func PodLogFolder(hostRoot string) string { return filepath.Join(hostRoot, podLogFolder) }

// podLog is the name of such a directory: <namespace>_<pod>_<uid> (kubernetes/kubernetes pkg/kubelet/kuberuntime/helpers.go).
var podLog = regexp.MustCompile(`^([^_/]+)_([^_/]+)_([0-9a-f-]+)$`)

// Pods are the names of pods by UID, also of those that have ended a while ago.
func (l *ContainerLogs) Pods() (map[string]ContainerName, error) {
	entries, err := fs.ReadDir(l.root.FS(), podLogFolder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listing the logs of pods: %w", err)
	}
	names := map[string]ContainerName{}
	for _, entry := range entries {
		if m := podLog.FindStringSubmatch(entry.Name()); m != nil && entry.IsDir() {
			names[m[3]] = ContainerName{Namespace: m[1], Pod: m[2]}
		}
	}
	return names, nil
}

// driverParameters is where NVIDIA's kernel module lists what it was loaded with.
const driverParameters = "driver/nvidia/params"

var memacctMode = regexp.MustCompile(`RmMemacctMode=(\d)`)

// MemacctMode is what the kernel module was told of how to charge the memory of control groups (RmMemacctMode); empty:
// nothing.
func (p *Proc) MemacctMode() string {
	content, err := p.root.ReadFile(driverParameters)
	if m := memacctMode.FindStringSubmatch(string(content)); err == nil && m != nil {
		return m[1]
	}
	return ""
}

// ErrLocked says that another process has the record.
var ErrLocked = errors.New("another agent is at work on this node")

// RecordFile is a small file in a folder of its own, which one process at a time reads and replaces.
type RecordFile struct{ Path string }

// Lock keeps other processes out until it is unlocked. ErrLocked: one is in.
func (f RecordFile) Lock() (unlock func(), err error) {
	dir := filepath.Dir(f.Path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of %s: %w", f.Path, err)
	}
	folder, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("locking: %w", err)
	}
	if err := unix.Flock(int(folder.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = folder.Close() // only read
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("locking %s: %w", dir, ErrLocked)
		}
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	}
	mine, err := folder.Stat()
	if now, gone := os.Stat(dir); err != nil || gone != nil || !os.SameFile(mine, now) {
		_ = folder.Close()
		return nil, fmt.Errorf("locking %s: %w", dir, ErrLocked) // it was removed meanwhile, by one that was in
	}
	return func() {
		_ = os.Remove(dir) // if nothing is left in it
		_ = folder.Close()
	}, nil
}

// There reports whether there is one.
func (f RecordFile) There() (bool, error) {
	_, err := os.Lstat(f.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("looking for %s: %w", f.Path, err)
	}
	return err == nil, nil
}

// Read is the content; nil: there is none.
func (f RecordFile) Read() ([]byte, error) {
	content, err := os.ReadFile(f.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading %s: %w", f.Path, err)
	}
	return content, nil
}

// Write replaces the content as a whole; nil removes the file. Its folder goes when it is unlocked.
func (f RecordFile) Write(content []byte) error {
	if content == nil {
		for _, name := range []string{f.Path + ".new", f.Path} {
			if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("removing %s: %w", name, err)
			}
		}
		return nil
	}
	temporary := f.Path + ".new"
	if err := os.MkdirAll(filepath.Dir(f.Path), 0o700); err != nil {
		return fmt.Errorf("making the folder of %s: %w", f.Path, err)
	}
	if err := os.WriteFile(temporary, content, 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", temporary, err)
	}
	if err := os.Rename(temporary, f.Path); err != nil {
		return fmt.Errorf("writing %s: %w", f.Path, err)
	}
	return nil
}
