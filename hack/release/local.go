// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

// local builds controller and agent of the commit for this machine's architecture, with its own C compiler, and pushes
// them with the chart that names them by digest, unsigned: all that `helm install` takes from a registry of one's own.
// It needs no compiler of another architecture, since it makes nothing else of a release.
func local(ctx context.Context, set settings) error {
	if set.registry == "" {
		return errors.New("say where to push to: make publish REGISTRY=registry.example.com/gpu-sharing")
	}
	root, err := filepath.Abs(set.root)
	if err != nil {
		return fmt.Errorf("finding %s: %w", set.root, err)
	}
	set.root, set.unsigned = root, true
	s, err := readSource(ctx, set.root, set.tag)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "release-")
	if err != nil {
		return fmt.Errorf("making a folder to work in: %w", err)
	}
	defer os.RemoveAll(work) //nolint:errcheck // what stays is in the system's folder for temporary files
	set.out = filepath.Join(work, "dist")
	r, err := newRelease(ctx, set, s, work, []program{
		{Name: "controller", OS: "linux", Arch: runtime.GOARCH}, {Name: "agent", OS: "linux", Arch: runtime.GOARCH, CC: cmp.Or(os.Getenv("CC"), "cc")},
	})
	if err != nil {
		return err
	}
	if err := r.images(); err != nil {
		return err
	}
	if err := r.chart(ctx, work); err != nil {
		return err
	}
	if err := publish(ctx, set, r); err != nil {
		return err
	}
	progress("install it: helm install %[1]s oci://%[2]s/charts/%[1]s --version %[3]s --namespace %[1]s --create-namespace", chartName, r.registry, s.number())
	return nil
}
