// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"maps"
	"path"
	"slices"
	"time"
)

// files are those of an archive, by their path in it. They have at most so many bytes together.
type files struct {
	content map[string][]byte
	size    int
	most    int
}

// add adds a file. It reports whether there was room for it.
func (f *files) add(name string, content []byte) bool {
	if f.size+len(content) > f.most {
		return false
	}
	if f.content == nil {
		f.content = map[string][]byte{}
	}
	f.size += len(content) - len(f.content[name])
	f.content[name] = content
	return true
}

// archive is a tar.gz with the files in a folder, sorted by name: the same files and time make the same bytes.
func (f *files) archive(folder string, at time.Time) ([]byte, error) {
	var buffer bytes.Buffer
	compressed := gzip.NewWriter(&buffer)
	w := tar.NewWriter(compressed)
	for _, name := range slices.Sorted(maps.Keys(f.content)) {
		content := f.content[name]
		header := &tar.Header{Name: path.Join(folder, name), Mode: 0o644, Size: int64(len(content)), ModTime: at, Format: tar.FormatPAX}
		if err := w.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("writing %s into the archive: %w", name, err)
		}
		if _, err := w.Write(content); err != nil {
			return nil, fmt.Errorf("writing %s into the archive: %w", name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("writing the archive: %w", err)
	}
	if err := compressed.Close(); err != nil {
		return nil, fmt.Errorf("compressing the archive: %w", err)
	}
	return buffer.Bytes(), nil
}
