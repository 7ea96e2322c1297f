// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// smallFile is how large a file may be, in bytes, to stay in a folder that is trimmed: one with a PID, or a lock.
const smallFile = 4 << 10

// maxEmptied bounds how many entries one call removes: a container may make new ones all the time.
const maxEmptied = 1 << 14

// Clear removes all that is in a folder. One that is not there is empty.
func Clear(folder string) error {
	root, err := os.OpenRoot(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking into %s: %w", folder, err)
	}
	defer root.Close() //nolint:errcheck // only looked into
	return empty(root, func(fs.FileInfo) bool { return false })
}

// trimmed is what stays in a folder that is trimmed: sockets, named pipes and, unless there are too many entries, small
// files.
func trimmed(tooMany bool) (stays func(fs.FileInfo) bool) {
	return func(info fs.FileInfo) bool {
		special := info.Mode()&(fs.ModeSocket|fs.ModeNamedPipe) != 0
		return special || info.Mode().IsRegular() && taken(info) <= smallFile && !tooMany
	}
}

// empty removes what is in a folder, but for files that stay. Who fills it may nest folders without end. So none is gone
// into: the folders in a folder are moved up, and what is in them is removed in its turn.
func empty(root *os.Root, stays func(fs.FileInfo) bool) error {
	e := &emptying{root: root, remaining: maxEmptied}
	for before := -1; e.remaining > 0 && e.remaining != before; { // again: what was moved up, and what came meanwhile
		before, e.errs = e.remaining, nil
		e.each(".", func(info fs.FileInfo) {
			switch {
			case info.IsDir():
				e.flatten(info.Name())
			case !stays(info):
				e.remove(info.Name(), info)
			}
		})
	}
	return errors.Join(e.errs...)
}

// emptying is one call of empty.
type emptying struct {
	root      *os.Root
	remaining int     // entries that may still be removed
	errs      []error // of the last look
}

// each calls do for each entry of a folder, until as many were removed as may be. It waits for nothing: what was a folder
// may be a named pipe by now.
func (e *emptying) each(folder string, do func(fs.FileInfo)) {
	f, err := e.root.OpenFile(folder, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		e.failed(folder, err)
		return
	}
	defer f.Close() //nolint:errcheck // only read
	for e.remaining > 0 {
		found, err := f.ReadDir(256)
		for _, entry := range found {
			if info, err := entry.Info(); err == nil && e.remaining > 0 {
				do(info)
			}
		}
		if errors.Is(err, io.EOF) || len(found) == 0 {
			return
		}
	}
}

// flatten removes a folder: its files, and its folders once they are beside it.
func (e *emptying) flatten(folder string) {
	e.each(folder, func(info fs.FileInfo) {
		name := path.Join(folder, info.Name())
		if !info.IsDir() {
			e.remove(name, info)
			return
		}
		e.did(name, e.root.Rename(name, "emptied-"+strconv.FormatUint(rand.Uint64(), 16))) //nolint:gosec // no secret, only another name
	})
	e.did(folder, e.root.Remove(folder))
}

// remove removes a file. A process may have it open, so it is emptied first.
func (e *emptying) remove(name string, info fs.FileInfo) {
	if info.Mode().IsRegular() && info.Size() > 0 {
		if f, err := e.root.OpenFile(name, os.O_WRONLY|os.O_TRUNC|unix.O_NONBLOCK, 0); err == nil {
			_ = f.Close() // nothing was written
		}
	}
	e.did(name, e.root.Remove(name))
}

// did counts an entry that is gone or was moved.
func (e *emptying) did(name string, err error) {
	if err != nil {
		e.failed(name, err)
		return
	}
	e.remaining--
}

func (e *emptying) failed(name string, err error) {
	if !errors.Is(err, fs.ErrNotExist) {
		e.errs = append(e.errs, fmt.Errorf("emptying %s: %w", filepath.Join(e.root.Name(), name), err))
	}
}
