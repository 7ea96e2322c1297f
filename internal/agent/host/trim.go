// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
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
	held = there.bytes
	if thorough {
		if err := p.removed(folder, func(f removedFile) { held += f.bytes }); err != nil {
			return 0, err
		}
	}
	if held <= bytes && there.entries <= entries {
		return held, nil
	}
	var last error // of as many as a tenant likes
	if thorough {
		err = p.removed(folder, func(f removedFile) { last = cmp.Or(p.empty(f), last) })
	}
	return held, errors.Join(err, last, empty(root, trimmed(there.entries > entries)))
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

const block = 512 // in which stat counts

// taken is what a file takes of the node's memory, in bytes: more than its size after fallocate, and less where it has holes, whose sizes may add
// up to less than nothing. The rest of its last page does not count.
func taken(info fs.FileInfo) int64 {
	const page = 4096
	by := info.Sys().(*syscall.Stat_t).Blocks * block //nolint:forcetypeassert // it is of Linux
	if more := by - info.Size(); more >= 0 && more < page {
		return info.Size()
	}
	return by
}

// maxClosing bounds how many descriptors may be on their way to be closed, and maxLeased how many files may wait for a lease: both wait for
// others.
const maxClosing, maxLeased = 16, 64

// removedFile is a file that was removed and that a process has open, or in its memory. It is held by a descriptor of this process, so that
// it stays the same whatever that process does.
type removedFile struct {
	fd    int
	inode uint64
	bytes int64
}

func (p *Proc) emptyNow(fd, flags int) error {
	again, err := os.OpenFile(filepath.Join(p.root.Name(), "self/fd", strconv.Itoa(fd)), os.O_WRONLY|os.O_TRUNC|flags, 0)
	if err != nil {
		return fmt.Errorf("emptying a file that was removed: %w", err)
	}
	return again.Close()
}

// empty waits for no lease. The goroutine that does is left behind: who asks without waiting finds one whenever its owner takes it anew once
// it has given it back, as it cannot while another waits.
func (p *Proc) empty(f removedFile) error {
	err, at := p.emptyNow(f.fd, unix.O_NONBLOCK), fmt.Sprint("lease/", f.inode)
	if !errors.Is(err, unix.EWOULDBLOCK) || p.leased.Load() >= maxLeased {
		return err
	}
	if _, waits := p.waits.LoadOrStore(at, &looking{}); waits {
		return err
	}
	fd, err := unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		p.waits.Delete(at)
		return fmt.Errorf("keeping a file that was removed: %w", err)
	}
	p.leased.Add(1)
	go func() {
		_ = p.emptyNow(fd, 0) // else at the next look
		_ = unix.Close(fd)
		p.leased.Add(-1)
		p.waits.Delete(at)
	}()
	return nil
}

// removed finds the files that were removed from a folder and that processes which have it mounted keep open. However many there are, each
// has its turn: one that is not looked at would hide behind the others.
func (p *Proc) removed(folder string, do func(removedFile)) error {
	mounted, err := p.Mounted(folder)
	if err != nil {
		return err
	}
	ids := map[string]bool{} // in all of them: one may have got the file from another
	for _, pid := range mounted[folder] {
		maps.Copy(ids, p.mountIDs(strconv.Itoa(pid), folder))
	}
	for _, pid := range mounted[folder] {
		p.removedOf(pid, folder, ids, do)
	}
	return nil
}

func (p *Proc) removedOf(pid int, folder string, ids map[string]bool, do func(removedFile)) {
	dir := strconv.Itoa(pid)
	take := func(names []string, of func(pid int, name string) (int, error)) (waits bool) {
		for _, name := range names {
			if p.closing.Load() >= maxClosing {
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
				do(f)
				_ = unix.Close(fd) // emptied, or left
			}
		}
		return false
	}
	descriptors, err := p.root.Open(path.Join(dir, "fd"))
	if err != nil {
		return // the process is gone
	}
	defer descriptors.Close() //nolint:errcheck // only read
	for {
		names, _ := descriptors.Readdirnames(1024) // a process may have a million
		if waits := take(names, p.descriptorOf); waits {
			return
		}
		if len(names) == 0 {
			break
		}
	}
	take(p.mapped(dir, folder), p.mappedFile)
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
	f := removedFile{fd: fd, inode: stat.Ino, bytes: stat.Blocks * block} // a small one takes a page: there may be a million
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
