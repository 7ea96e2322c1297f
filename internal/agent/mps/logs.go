// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"

	"github.com/go-logr/logr"
)

const (
	// logStart is how much of a log that is there already the first look shows, in bytes.
	logStart = 16 << 10
	// logChunk is how much of one log a look shows at most, in bytes. What is beyond it the next looks show.
	logChunk = 64 << 10
	// logBehind is how far the looks may fall behind a log, in bytes, before they leave out what is in between.
	logBehind = 1 << 20
	// logLine is how much of a line is shown, in bytes.
	logLine = 2 << 10
	// logKept is the size of a log, in bytes, at which it is emptied once all of it is shown: it lies in the node's
	// memory.
	logKept = 8 << 20
)

// logs shows the logs of daemons and servers in the log of the MPS pod.
type logs struct {
	files files
	read  map[string]*logFile
}

// logFile is how far a log was read.
type logFile struct {
	info   fs.FileInfo // of the file that was read
	offset int64
	rest   []byte // a line whose end is not there yet
}

func newLogs(f files) *logs { return &logs{files: f, read: map[string]*logFile{}} }

// follow shows what was added to the logs of the daemons of these resources.
func (l *logs) follow(ctx context.Context, resources []string) error {
	var errs []error
	for _, resource := range resources {
		for _, name := range []string{"control.log", "server.log"} {
			log := logr.FromContextOrDiscard(ctx).WithValues("resource", resource, "file", name)
			if err := l.followFile(path.Join(resource, "log", name), log); err != nil {
				errs = append(errs, fmt.Errorf("following the %s of MPS for %s: %w", name, resource, err))
			}
		}
	}
	return errors.Join(errs...)
}

func (l *logs) followFile(name string, log logr.Logger) error {
	info, err := l.files.root.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		delete(l.read, name)
		return nil
	}
	if err != nil {
		return err //nolint:wrapcheck // the caller names the file
	}
	at := l.position(name, info)
	if info.Size() == at.offset {
		return nil
	}
	if remaining := info.Size() - at.offset - logBehind; remaining > 0 {
		log.Info("Leaving out a part of a log that grows too fast", "bytes", remaining)
		at.offset, at.rest = at.offset+remaining, nil
	}
	chunk, err := l.chunk(name, at.offset)
	if err != nil {
		return err
	}
	at.offset += int64(len(chunk))
	at.show(chunk, log)
	if at.offset >= logKept && at.offset == info.Size() {
		return l.empty(name)
	}
	return nil
}

// position is how far a log was read. One that was replaced, or emptied, is read from its beginning.
func (l *logs) position(name string, info fs.FileInfo) *logFile {
	at, known := l.read[name]
	switch {
	case !known:
		at = &logFile{offset: max(info.Size()-logStart, 0)}
		l.read[name] = at
	case !os.SameFile(at.info, info) || info.Size() < at.offset:
		at.offset, at.rest = 0, nil
	}
	at.info = info
	return at
}

func (l *logs) chunk(name string, offset int64) ([]byte, error) {
	f, err := l.files.root.Open(name)
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller names the file
	}
	defer f.Close()                                             //nolint:errcheck // only read
	return io.ReadAll(io.NewSectionReader(f, offset, logChunk)) //nolint:wrapcheck // likewise
}

// empty lets go of the memory of a log. A daemon that goes on writing at its old position leaves a hole, which takes
// none.
func (l *logs) empty(name string) error {
	f, err := l.files.root.OpenFile(name, os.O_WRONLY|os.O_TRUNC, fileMode)
	if err != nil {
		return err //nolint:wrapcheck // the caller names the file
	}
	return f.Close() //nolint:wrapcheck // likewise
}

// show logs the complete lines of a chunk, and keeps the rest for the next one.
func (at *logFile) show(chunk []byte, log logr.Logger) {
	text := slices.Concat(at.rest, bytes.Trim(chunk, "\x00")) // a hole
	for {
		line, rest, complete := bytes.Cut(text, []byte("\n"))
		if !complete {
			break
		}
		say(line, log)
		text = rest
	}
	if len(text) >= logLine { // it may never end
		say(text, log)
		text = nil
	}
	at.rest = bytes.Clone(text)
}

func say(line []byte, log logr.Logger) {
	line = bytes.TrimSpace(line)
	if len(line) == 0 {
		return
	}
	if len(line) > logLine {
		line = append(bytes.Clone(line[:logLine]), "…"...)
	}
	log.Info("MPS", "line", string(bytes.ToValidUTF8(line, nil)))
}
