// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/host"
)

// While the driver's container restarts, no program can tell a daemon to quit, and the daemon keeps the old driver.
func TestTheMPSHostEndsADaemonWithoutTheDriversPrograms(t *testing.T) {
	g := gomega.NewWithT(t)
	driver, mpsRoot := newDriver(t, sim.A100), filepath.Join(t.TempDir(), "mps")
	wish := filepath.Join(mpsRoot, "gpusharing", "nvidia.com_gpu.json")
	g.Expect(os.MkdirAll(filepath.Dir(wish), 0o755)).To(gomega.Succeed())
	g.Expect(os.WriteFile(wish, []byte(`{"Resource": "nvidia.com/gpu", "ActiveThreadPercentage": 25}`), 0o600)).To(gomega.Succeed())
	start(t, "mps-host", "--driver-root="+driver, "--mps-root="+mpsRoot)
	daemon := filepath.Join(mpsRoot, "nvidia.com", "gpu")
	started, record := filepath.Join(daemon, ".started"), filepath.Join(daemon, ".gpusharing.json")
	g.Eventually(started, "30s", "100ms").Should(gomega.BeAnExistingFile())
	g.Expect(processesWith(t, filepath.Join(daemon, "pipe"))).NotTo(gomega.BeEmpty())

	g.Expect(os.Rename(filepath.Join(driver, "usr"), filepath.Join(driver, "away"))).To(gomega.Succeed())
	g.Expect(os.Remove(wish)).To(gomega.Succeed())
	g.Eventually(func() []int { return processesWith(t, filepath.Join(daemon, "pipe")) }, "30s", "100ms").Should(gomega.BeEmpty())
	g.Eventually(record, "30s", "100ms").ShouldNot(gomega.BeAnExistingFile())
}

// processesWith finds the processes of the daemon at a pipe directory.
func processesWith(t *testing.T, pipe string) []int {
	t.Helper()
	root, err := os.OpenRoot("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close() //nolint:errcheck // only read
	given, err := host.NewProc(root).WithVariable("CUDA_MPS_PIPE_DIRECTORY")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for pid, value := range given {
		if value == pipe {
			pids = append(pids, pid)
		}
	}
	return pids
}
