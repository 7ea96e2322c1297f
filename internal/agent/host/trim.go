// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Trimmer keeps small what the containers that have a folder of the node mounted put into it.
type Trimmer interface {
	// Trim empties the folder of files and folders if it holds more than so many bytes or entries, and returns how many
	// bytes it held. Sockets and named pipes stay, and so do small files unless there are too many entries. Thorough: also
	// of files that were removed and that a process still has open, for which it looks through all processes.
	Trim(folder string, bytes int64, entries int, thorough bool) (held int64, err error)
}

// Trim implements Trimmer. Of files that were removed only the kernel knows, by the mount of the process.
func (p *Proc) Trim(folder string, bytes int64, entries int, thorough bool) (held int64, err error) {
	root, err := os.OpenRoot(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("looking into %s: %w", folder, err)
	}
	defer root.Close() //nolint:errcheck // only looked into
	there := weigh(root, ".", entries+1)
	var removed []removedFile
	if thorough {
		if removed, err = p.removed(folder); err != nil {
			return 0, err
		}
	}
	held = there.bytes
	defer closeAll(removed)
	for _, f := range removed {
		held += f.bytes
	}
	if held <= bytes && there.entries <= entries {
		return held, nil
	}
	var errs []error
	for _, f := range removed {
		errs = append(errs, f.empty(p.root.Name()))
	}
	errs = append(errs, empty(root, trimmed(there.entries > entries)))
	return held, errors.Join(errs...)
}

func closeAll(files []removedFile) {
	for _, f := range files {
		_ = unix.Close(f.fd) // emptied, or left
	}
}

// weight is what a folder holds.
type weight struct {
	bytes   int64
	entries int
}

// weigh adds up a folder, and stops after so many entries. It waits for nothing: what was a folder may be a named pipe by
// now.
func weigh(root *os.Root, folder string, most int) weight {
	var sum weight
	f, err := root.OpenFile(folder, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		return sum
	}
	defer f.Close() //nolint:errcheck // only read
	for sum.entries < most {
		found, err := f.ReadDir(min(most-sum.entries, 256))
		for _, entry := range found {
			sum.entries++
			if entry.IsDir() {
				below := weigh(root, path.Join(folder, entry.Name()), most-sum.entries)
				sum.bytes, sum.entries = sum.bytes+below.bytes, sum.entries+below.entries
				continue
			}
			if info, err := entry.Info(); err == nil && info.Mode().IsRegular() {
				sum.bytes += taken(info)
			}
		}
		if err != nil || len(found) == 0 {
			break
		}
	}
	return sum
}

// taken is what a file takes of the node's memory, in bytes. It may be more than its size (fallocate).
func taken(info fs.FileInfo) int64 {
	return takenBy(info.Size(), info.Sys().(*syscall.Stat_t).Blocks) //nolint:forcetypeassert // it is of Linux
}

func takenBy(size, blocks int64) int64 {
	const block, page = 512, 4096 // stat counts in blocks
	if blocks*block < size+page {
		return size
	}
	return blocks * block
}

// maxRemoved bounds how many removed files are held at once, and maxClosing how many descriptors may be on their way to
// be closed: to close one waits for the file system behind it.
const maxRemoved, maxClosing = 256, 16

// removedFile is a file that was removed and that a process has open, or in its memory. It is held by a descriptor of this process, so that
// it stays the same whatever that process does.
type removedFile struct {
	fd    int
	bytes int64
}

func (f removedFile) empty(proc string) error {
	again, err := os.OpenFile(filepath.Join(proc, "self/fd", strconv.Itoa(f.fd)), os.O_WRONLY|os.O_TRUNC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("emptying a file that was removed: %w", err)
	}
	return again.Close()
}

// removed finds the files that were removed from a folder and that processes which have it mounted keep open.
func (p *Proc) removed(folder string) ([]removedFile, error) {
	mounted, err := p.Mounted(folder)
	if err != nil {
		return nil, err
	}
	var files []removedFile
	for _, pid := range mounted[folder] {
		files = append(files, p.removedOf(pid, folder, maxRemoved-len(files))...)
	}
	return files, nil
}

func (p *Proc) removedOf(pid int, folder string, most int) (files []removedFile) {
	dir := strconv.Itoa(pid)
	ids := p.mountIDs(dir, folder)
	take := func(names []string, of func(pid int, name string) (int, error)) (waits bool) {
		for _, name := range names {
			if p.closing.Load() >= maxClosing || len(files) >= most {
				continue
			}
			fd, err := p.descriptor(pid, name, of)
			if errors.Is(err, errWaits) {
				return true
			}
			if err != nil {
				continue
			}
			if f, ok := p.held(fd, ids); ok {
				files = append(files, f)
			}
		}
		return false
	}
	descriptors, err := p.root.Open(path.Join(dir, "fd"))
	if err != nil {
		return nil // the process is gone
	}
	defer descriptors.Close() //nolint:errcheck // only read
	for len(files) < most {
		names, _ := descriptors.Readdirnames(1024) // a process may have a million
		if waits := take(names, p.descriptorOf); waits {
			return files
		}
		if len(names) == 0 {
			break
		}
	}
	take(p.mapped(dir, folder), p.mappedFile)
	return files
}

// maxMaps is how much is read of the list of what a process has in its memory.
const maxMaps = 8 << 20

// mapped are the parts of a process's memory that are removed files, by the kernel's names. Of other file systems than the
// folder's nothing is asked: they may answer to nobody.
func (p *Proc) mapped(dir, folder string) (names []string) {
	var stat unix.Stat_t
	if unix.Stat(folder, &stat) != nil {
		return nil
	}
	wanted := fmt.Sprintf("%02x:%02x", unix.Major(stat.Dev), unix.Minor(stat.Dev))
	maps, _ := p.look(path.Join(dir, "maps"), func() ([]byte, error) { return p.read(path.Join(dir, "maps"), maxMaps) })
	last := ""
	for line := range strings.Lines(string(maps)) {
		fields := strings.Fields(line)
		const device, inode, name = 3, 4, 5
		if len(fields) <= name || fields[device] != wanted || !strings.HasSuffix(line, " (deleted)\n") || fields[inode] == last {
			continue
		}
		names, last = append(names, fields[0]), fields[inode]
	}
	return names
}

func (p *Proc) mappedFile(pid int, name string) (fd int, err error) {
	from, to, _ := strings.Cut(name, "-")
	name = strings.TrimLeft(from, "0") + "-" + strings.TrimLeft(to, "0") // as the kernel calls the same there
	at := filepath.Join(p.root.Name(), strconv.Itoa(pid), "map_files", name)
	return unix.Open(at, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0) //nolint:wrapcheck // it is gone
}

// descriptor takes a descriptor of what a process has, if that was removed. It is waited for as look does, and a process that
// is waited for is not asked again.
func (p *Proc) descriptor(pid int, name string, of func(pid int, name string) (int, error)) (fd int, err error) {
	at := path.Join(strconv.Itoa(pid), "fd")
	if _, waits := p.waits.LoadOrStore(at, &looking{}); waits {
		return -1, errWaits
	}
	type result struct {
		fd  int
		err error
	}
	taken, began := make(chan result, 1), time.Now() //nolint:forbidigo // of the machine, as in look
	defer func() { p.spend(time.Since(began)) }()    //nolint:forbidigo // likewise
	go func() {
		r := result{fd: -1, err: errWaits}
		if p.waiting.Add(1) <= maxWaiting {
			r.fd, r.err = of(pid, name)
		}
		p.waiting.Add(-1)
		p.waits.Delete(at)
		taken <- r
	}()
	select {
	case r := <-taken:
		return r.fd, r.err
	case <-time.After(p.left(began)): //nolint:forbidigo // likewise
		go func() {
			if r := <-taken; r.err == nil {
				p.closing.Add(1)
				p.close(r.fd)
			}
		}()
		return -1, errWaits
	}
}

func (p *Proc) descriptorOf(pid int, name string) (fd int, err error) {
	target, err := p.root.Readlink(path.Join(strconv.Itoa(pid), "fd", name))
	if err == nil && !strings.HasSuffix(target, " (deleted)") {
		err = fs.ErrExist
	}
	number, notNumber := strconv.Atoi(name)
	if err := errors.Join(err, notNumber); err != nil {
		return -1, err
	}
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, err //nolint:wrapcheck // the process is gone
	}
	defer unix.Close(process)                  //nolint:errcheck // only looked at
	return unix.PidfdGetfd(process, number, 0) //nolint:wrapcheck // the descriptor is gone
}

// held keeps a descriptor, if its file is a regular one on one of these mounts. Until that is known nothing is asked of
// the file system behind it, which may be another one by now.
func (p *Proc) held(fd int, ids map[string]bool) (removedFile, bool) {
	if !ids[p.mountOf("self", strconv.Itoa(fd))] {
		p.closing.Add(1)
		go p.close(fd)
		return removedFile{}, false
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFREG {
		_ = unix.Close(fd)
		return removedFile{}, false
	}
	f := removedFile{fd: fd, bytes: takenBy(stat.Size, stat.Blocks)}
	if f.bytes == 0 {
		_ = unix.Close(fd)
	}
	return f, f.bytes > 0
}

// close closes a descriptor whose file system may answer to nobody.
func (p *Proc) close(fd int) {
	_ = unix.Close(fd)
	p.closing.Add(-1)
}

// mountIDs are the numbers of the mounts of a folder in a process.
func (p *Proc) mountIDs(dir, folder string) map[string]bool {
	ids := map[string]bool{}
	own, ownErr := p.mountsOf("self")
	its, itsErr := p.mountsOf(dir)
	wanted, ok := source(own, folder)
	if ownErr != nil || itsErr != nil || !ok {
		return ids
	}
	for _, m := range its {
		if m.device == wanted.device && m.root == wanted.root {
			ids[m.id] = true
		}
	}
	return ids
}

// mountOf is the number of the mount through which a process has opened a file; empty if it is not known.
func (p *Proc) mountOf(dir, fd string) string {
	info, err := p.read(path.Join(dir, "fdinfo", fd), maxStatus)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(info)) {
		if id, is := strings.CutPrefix(line, "mnt_id:"); is {
			return strings.TrimSpace(id)
		}
	}
	return ""
}
