// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/elf"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
)

// program is one of ours, built for an operating system and an architecture.
type program struct {
	Name, OS, Arch string
	// CC is the C compiler, which the agent needs.
	CC string
	// File is where it lies.
	File string
}

func (p program) platform() string { return p.OS + "_" + p.Arch }

// nodes are the architectures of which the images are.
func nodes() []string { return []string{"amd64", "arm64"} }

// programs are all that a release has.
func programs() []program {
	var all []program
	for _, arch := range nodes() {
		all = append(all, program{Name: "controller", OS: "linux", Arch: arch}, program{Name: "agent", OS: "linux", Arch: arch, CC: compiler(arch)})
	}
	for _, system := range []string{"linux", "darwin", windows} {
		for _, arch := range nodes() {
			all = append(all, program{Name: plugin, OS: system, Arch: arch})
			if system == windows {
				all = append(all, program{Name: completion, OS: system, Arch: arch})
			}
		}
	}
	return all
}

// compiler is Debian's C compiler for an architecture.
func compiler(arch string) string {
	return map[string]string{"amd64": "x86_64-linux-gnu-gcc", "arm64": "aarch64-linux-gnu-gcc"}[arch]
}

// checkCompilers reports which C compilers are missing, before anything is built.
func checkCompilers() error {
	for arch, packages := range map[string]string{"amd64": "gcc-x86-64-linux-gnu libc6-dev-amd64-cross", "arm64": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"} {
		if _, err := exec.LookPath(compiler(arch)); err != nil {
			return fmt.Errorf("the agent for %s needs %s: on Debian 12, apt-get install --no-install-recommends %s: %w", arch, compiler(arch), packages, err)
		}
	}
	return nil
}

// build builds a program of the source that lies in a folder. The same source, Go and C compiler make the same bytes.
func build(ctx context.Context, s source, folder, to string, p program) (program, error) {
	p.File = filepath.Join(to, p.platform(), p.Name)
	if p.OS == windows {
		p.File += ".exe"
	}
	const symbols = "github.com/gpusharing/gpu-sharing-operator/internal/kube/version"
	env := []string{
		"GOOS=" + p.OS, "GOARCH=" + p.Arch, "CGO_ENABLED=0", "GOFLAGS=", "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOWORK=off",
	}
	var tags []string
	if p.Name == "agent" {
		tags = []string{"-tags", "grpcnotrace"} // as in the Dockerfile
		env = append(env, "CGO_ENABLED=1", "CC="+p.CC, "CGO_CFLAGS=-O2 -Wno-deprecated-declarations", "CGO_LDFLAGS=")
	}
	args := slices.Concat([]string{"build", "-trimpath", "-buildvcs=false"}, tags, []string{
		"-ldflags", fmt.Sprintf("-s -w -X %s.version=%s -X %s.commit=%s", symbols, s.Version, symbols, s.Commit),
		"-o", p.File, "./cmd/" + p.Name,
	})
	_, err := output(ctx, folder, env, "go", args...)
	return p, err
}

// checkLibc fails if a program asks for a newer C library than the image has, as one that was built on a newer Debian
// does.
func checkLibc(file, has string) error {
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("reading the program %s: %w", file, err)
	}
	defer f.Close() //nolint:errcheck // it is only read
	symbols, err := f.ImportedSymbols()
	if err != nil {
		return fmt.Errorf("reading the symbols of %s: %w", file, err)
	}
	for _, symbol := range symbols {
		needs, isLibc := strings.CutPrefix(symbol.Version, "GLIBC_")
		if isLibc && semver.Compare("v"+needs, "v"+has) > 0 {
			return fmt.Errorf("%s needs %s of glibc %s, but the image has glibc %s: build on Debian 12, as the Dockerfile does", file, symbol.Name, needs, has)
		}
	}
	return nil
}
