// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/olm"
)

// snapshot is every object of the cluster.
func (s *site) snapshot() map[string]string {
	s.t.Helper()
	all, err := olm.Snapshot(s.t.Context(), s.cluster.Config)
	s.Expect(err).NotTo(HaveOccurred())
	return all
}

// sinceThen are the differences from a snapshot.
func (s *site) sinceThen(before map[string]string) func() []string {
	return func() []string { s.t.Helper(); return olm.Differences(before, s.snapshot()) }
}

// documented is the n-th block of commands, from 1, below a headline of docs/install.md.
func (s *site) documented(headline string, n int) string {
	s.t.Helper()
	commands, err := olm.Documented(headline, n)
	s.Expect(err).NotTo(HaveOccurred())
	return commands
}

// do runs commands as an administrator, who is in the folder of the release.
func (s *site) do(commands string) string {
	s.t.Helper()
	out, err := s.try(commands)
	s.Expect(err).NotTo(HaveOccurred(), "%s\n%s", commands, out)
	return out
}

func (s *site) try(commands string) (string, error) {
	s.t.Helper()
	root, err := env.Root()
	s.Expect(err).NotTo(HaveOccurred())
	assets, err := env.Assets(s.t.Context())
	s.Expect(err).NotTo(HaveOccurred())
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*wait)
	defer cancel()
	shell := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	shell.Dir = s.released
	shell.Env = []string{
		"PATH=" + strings.Join([]string{s.bin, assets, filepath.Join(root, "hack", "install"), os.Getenv("PATH")}, ":"), "HOME=" + s.dir,
		"KUBECONFIG=" + s.kubeconfig, "REGISTRY=" + s.registry,
	}
	out, err := shell.CombinedOutput()
	return string(out), err
}
