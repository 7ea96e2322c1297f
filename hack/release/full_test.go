// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// With FULL set this builds our programs twice, from two folders, the second time with an empty build cache.
func TestTwoBuildsOfACommitAreTheSame(t *testing.T) {
	if os.Getenv("FULL") == "" {
		t.Skip("FULL=1 make release-test builds our programs twice")
	}
	g := NewWithT(t)
	_, key := newKey(t)
	registry := newRegistry(t)
	var sums []string
	for _, folder := range []string{"a", "another/folder"} {
		folder = filepath.Join(t.TempDir(), folder)
		_, err := output(t.Context(), "../..", nil, "git", "clone", "--quiet", ".", folder)
		g.Expect(err).NotTo(HaveOccurred())
		if len(sums) > 0 {
			t.Setenv("GOCACHE", t.TempDir())
		}
		set := settings{root: folder, out: filepath.Join(folder, "dist"), registry: registry.host + "/gpu-sharing", key: key}
		begin := time.Now()
		g.Expect(run(t.Context(), set)).To(Succeed())
		content, err := os.ReadFile(filepath.Join(set.out, checksums))
		g.Expect(err).NotTo(HaveOccurred())
		sums = append(sums, string(content))
		t.Logf("built and pushed from %s in %s:\n%s", folder, time.Since(begin).Round(time.Second), content)
	}
	g.Expect(sums[1]).To(Equal(sums[0]))
}

// With FULL set the programs of the images for arm64, and what reads GPUs, run in an emulator with the C library of the
// agent's image.
func TestProgramsForArm64Run(t *testing.T) {
	if os.Getenv("FULL") == "" {
		t.Skip("FULL=1 make release-test runs the programs for arm64 in an emulator")
	}
	g := NewWithT(t)
	const emulator = "qemu-aarch64-static"
	_, err := exec.LookPath(emulator)
	g.Expect(err).NotTo(HaveOccurred(), "on Debian 12, apt-get install --no-install-recommends qemu-user-static")
	source, err := filepath.Abs("../..")
	g.Expect(err).NotTo(HaveOccurred())
	root, err := unpackDebian(t.Context(), source, t.TempDir(), "arm64")
	g.Expect(err).NotTo(HaveOccurred())
	for _, p := range programs() {
		if p.Arch != "arm64" || p.Name != "controller" && p.Name != "agent" {
			continue
		}
		built, err := build(t.Context(), someSource(), source, t.TempDir(), p)
		g.Expect(err).NotTo(HaveOccurred())
		version, err := output(t.Context(), "", nil, emulator, "-L", root, built.File, "--version")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(version).To(ContainSubstring("gpu-sharing-" + p.Name + " " + someSource().Version))
	}
	env := []string{"GOARCH=arm64", "CGO_ENABLED=1", "CC=" + compiler("arm64"), "GOFLAGS="}
	const needsSMI = "^TestContract$/(reset|reboot_helps|time_slice|another_program|other_GPUs_alone)" // whose programs the emulator does not start
	out, err := output(t.Context(), source, env, "go", "test", "-count=1", "-v", "-exec="+emulator+" -L "+root,
		"-run=^TestContract$", "-skip="+needsSMI, "./internal/agent/nvml")
	g.Expect(err).NotTo(HaveOccurred(), out)
	g.Expect(strings.Count(out, "--- PASS: TestContract/")).To(BeNumerically(">", 40), "against a driver that is simulated")
}

func TestAProgramThatNeedsANewerLibcIsRefused(t *testing.T) {
	g := NewWithT(t)
	file := filepath.Join(t.TempDir(), "program")
	source := file + ".c"
	g.Expect(os.WriteFile(source, []byte("#include <stdio.h>\nint main(void) { return puts(\"\"); }\n"), 0o600)).To(Succeed())
	_, err := output(t.Context(), "", nil, compiler("arm64"), "-o", file, source)
	g.Expect(err).NotTo(HaveOccurred())
	built, err := elf.Open(file)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(built.Machine).To(Equal(elf.EM_AARCH64))
	g.Expect(built.Close()).To(Succeed())
	g.Expect(checkLibc(file, "2.36")).To(Succeed())
	g.Expect(checkLibc(file, "2.16")).To(MatchError(ContainSubstring("build on Debian 12")))
}
