// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"strings"
)

// WithPrograms adds programs of this machine to the image's /usr/bin, and the libraries that they are linked with.
func (i Image) WithPrograms(ctx context.Context, programs ...string) (Image, error) {
	i.Files = maps.Clone(i.Files)
	for _, p := range programs {
		i.Files["/usr/bin/"+filepath.Base(p)] = p
	}
	return i.WithLibrariesOf(ctx, programs...)
}

// WithLibrariesOf adds the libraries that programs of this machine are linked with, where they look for them. Those
// that are linked statically need none.
func (i Image) WithLibrariesOf(ctx context.Context, programs ...string) (Image, error) {
	files := maps.Clone(i.Files)
	for _, p := range programs {
		libraries, err := linked(ctx, p)
		if err != nil {
			return Image{}, err
		}
		for _, l := range libraries {
			files[l] = l
		}
	}
	i.Files = files
	return i, nil
}

// linked lists the libraries, with the dynamic linker, that a program is linked with.
func linked(ctx context.Context, program string) ([]string, error) {
	out, err := exec.CommandContext(ctx, "ldd", program).CombinedOutput()
	if err != nil && !strings.Contains(string(out), "not a dynamic executable") {
		return nil, fmt.Errorf("finding the libraries of %s: %w: %s", program, err, out)
	}
	var found []string
	for line := range strings.Lines(string(out)) {
		for field := range strings.FieldsSeq(line) {
			if strings.HasPrefix(field, "/") {
				found = append(found, field)
				break
			}
		}
	}
	return found, nil
}
