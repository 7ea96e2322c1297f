// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Bundle makes the bundle with which the Operator Lifecycle Manager installs the operator, from the same sources as the
// chart and kustomize, and checks it with the operator-framework's own validation library.
//
//	go run . -root ../.. generate   writes config/bundle
//	go run . -root ../.. validate   fails if the library finds an error, or anything that it warns of; with -released also
//	                                in what `docker manifest inspect` says of the images
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	root := flag.String("root", "../..", "top folder of the repository")
	out := flag.String("bundle", "", "folder of the bundle; default: config/bundle below the root")
	released := flag.Bool("released", false, "of validate: the images can be looked at")
	flag.Parse()
	if *out == "" {
		*out = filepath.Join(*root, "config", "bundle")
	}
	if err := run(flag.Arg(0), *root, *out, *released); err != nil {
		fmt.Fprintln(os.Stderr, "bundle:", err)
		os.Exit(1)
	}
}

func run(command, root, out string, released bool) error {
	switch command {
	case "generate":
		s, err := readSources(os.DirFS(root))
		if err != nil {
			return err
		}
		files, err := s.bundle()
		if err != nil {
			return err
		}
		return write(out, files)
	case "validate":
		return validate(out, released)
	default:
		return fmt.Errorf("unknown command %q: give generate or validate", command)
	}
}

// write replaces a folder by files, which are given by their paths.
func write(folder string, files map[string][]byte) error {
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("removing the old bundle: %w", err)
	}
	for path, content := range files {
		path = filepath.Join(folder, filepath.FromSlash(path))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // for everybody to read
			return fmt.Errorf("writing the bundle: %w", err)
		}
		if err := os.WriteFile(path, content, 0o644); err != nil { //nolint:gosec // for everybody to read
			return fmt.Errorf("writing the bundle: %w", err)
		}
	}
	return nil
}
