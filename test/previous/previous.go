// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package previous knows the previous version: the operator as it was at an earlier commit of this repository. Tests
// upgrade from it, and run its parts beside those of today. hack/previous/build.sh builds its programs from a git
// worktree.
package previous

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Commit is the commit of the previous version. It is the first one with today's names and schema: nothing converts the policies of an earlier one,
// and under OLM, which deletes no object that is renamed, an admission policy of before would deny what the controller writes today. No version is
// tagged before it.
const Commit = "76bb5a2d1030c6c6141eb2cc0cb740ea1ab479f9"

// objects is the commit of chart and CRDs that tests install and upgrade without its programs. It is the first one whose objects today's
// API stores without any loss: since then, the CRDs have only gained fields. Its parent's policies may have more labels in nodeSelector.
const objects = "963394315bdc0638c7f66ada07b5cfea5eedc200"

// former is a commit whose policies have the schema before docs/dev/api.md, so that they would lose fields today, and whose chart lacks a value
// that today's has.
const former = "282d74a8e7c5462360cbbe3a8051cc6cea834a1d"

// Version is the number that tests give the previous version.
const Version = "0.0.9"

// File returns a file of the commit of objects, by its path from the top of the repository, whose checkout is the
// working directory or is above it. It fails where the history lacks the commit, as in a shallow clone.
func File(ctx context.Context, path string) ([]byte, error) { return file(ctx, objects, path) }

// FileBefore is File for the parent of the commit, of which today's API loses something.
func FileBefore(ctx context.Context, path string) ([]byte, error) {
	return file(ctx, objects+"^", path)
}

// Folder writes the files below a folder of that commit to another folder, which need not exist.
func Folder(ctx context.Context, path, to string) error { return folder(ctx, objects, path, to) }

// FormerFolder is Folder for a commit with the schema of which nothing is converted.
func FormerFolder(ctx context.Context, path, to string) error {
	return folder(ctx, former, path, to)
}

// ProgramsFolder is Folder for the commit of the previous version's programs.
func ProgramsFolder(ctx context.Context, path, to string) error { return folder(ctx, Commit, path, to) }

func folder(ctx context.Context, commit, path, to string) error {
	names, err := git(ctx, commit, path, "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, path)
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		content, err := file(ctx, commit, name)
		if err != nil {
			return err
		}
		at := filepath.Join(to, strings.TrimPrefix(name, path))
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return fmt.Errorf("writing a file of the previous version: %w", err)
		}
		if err := os.WriteFile(at, content, 0o644); err != nil {
			return fmt.Errorf("writing a file of the previous version: %w", err)
		}
	}
	return nil
}

func file(ctx context.Context, commit, path string) ([]byte, error) {
	return git(ctx, commit, path, "show", commit+":"+path)
}

func git(ctx context.Context, commit, path string, args ...string) ([]byte, error) {
	var stderr bytes.Buffer
	command := exec.CommandContext(ctx, "git", args...)
	command.Stderr = &stderr
	content, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("reading %s of the previous version, commit %s (if the clone is shallow, run git fetch --unshallow): %w: %s",
			path, commit, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return content, nil
}
