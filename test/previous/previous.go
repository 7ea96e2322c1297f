// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package previous knows the previous release: the operator as it was at an earlier commit of this repository. Tests
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

// Commit is the commit of the previous release. It is the first one whose controller and agents understand those of today, and the other
// way round: an agent has left out MIG profiles that are known since then, and a controller of before would take such a GPU for one that
// has none. No release is tagged before it.
const Commit = "5c7f044b245ad6a1769f0a9a9d73ff6d2f8a04c6"

// objects is the commit of chart and CRDs that tests install and upgrade without its programs. It is the first one whose objects today's
// API stores without any loss: since then, the CRDs have only gained fields. Its parent's policies have fields in their status that are
// gone today.
const objects = "282d74a8e7c5462360cbbe3a8051cc6cea834a1d"

// former is the last commit whose policies have the schema before docs/dev/api.md: policies of it lose fields under today's.
const former = "f56c06bac7c9b46b6e85e419b19cb0dfe730c9e4"

// Version is the version as which tests publish the previous release.
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

// FormerSchemaFolder is Folder for the last commit of the schema of which nothing is converted.
func FormerSchemaFolder(ctx context.Context, path, to string) error {
	return folder(ctx, former, path, to)
}

// ReleaseFolder is Folder for the commit of the previous release's programs.
func ReleaseFolder(ctx context.Context, path, to string) error { return folder(ctx, Commit, path, to) }

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
			return fmt.Errorf("writing a file of the previous release: %w", err)
		}
		if err := os.WriteFile(at, content, 0o644); err != nil {
			return fmt.Errorf("writing a file of the previous release: %w", err)
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
		return nil, fmt.Errorf("reading %s of the previous release, commit %s (if the clone is shallow, run git fetch --unshallow): %w: %s",
			path, commit, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return content, nil
}
