// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// restMemory is what an agent may keep for itself, in KiB.
const restMemory = 40 << 10

func restSpecs() {
	Describe("An agent with nothing to do", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			resume(ctx, sim.A100, sim.A100)
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			expectReady(ctx, "shared")
		})

		It("has the driver closed", func(ctx SpecContext) {
			pid, err := agentPID()
			Expect(err).NotTo(HaveOccurred())
			const looks = 40
			// It opens the driver once a minute, for a moment, which is longer on a busy machine; and what the policy
			// brought about may cost it another look.
			Eventually(func() int {
				open := 0
				for range looks {
					if files, err := driverFiles(pid); err != nil || len(files) > 0 {
						open++
					}
					time.Sleep(50 * time.Millisecond) // the time between two looks, not a wait for anything
				}
				return open
			}, "30s").WithContext(ctx).Should(BeNumerically("<=", looks/10))
		})

		It("keeps little memory", func() {
			pid, err := agentPID()
			Expect(err).NotTo(HaveOccurred())
			own, err := memory(pid, "RssAnon")
			Expect(err).NotTo(HaveOccurred())
			resident, err := memory(pid, "VmRSS")
			Expect(err).NotTo(HaveOccurred())
			AddReportEntry("its own, with the simulated driver in it", fmt.Sprintf("%d MiB", own>>10))
			AddReportEntry("resident with the pages of its program file", fmt.Sprintf("%d MiB", resident>>10))
			Expect(own).To(BeNumerically("<=", restMemory))
		})
	})
}

// agentPID is the process of the agent, which is not that of the MPS pod.
func agentPID() (int, error) {
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	for _, path := range found {
		raw, _ := os.ReadFile(path) // it may have ended
		arguments := strings.Split(string(raw), "\x00")
		if arguments[0] == agentProgram && len(arguments) > 1 && strings.HasPrefix(arguments[1], "--") {
			return strconv.Atoi(filepath.Base(filepath.Dir(path)))
		}
	}
	return 0, fmt.Errorf("no process runs %s", agentProgram)
}

// driverFiles are the files by which a process has the driver open: device files and, of the simulated driver, the mark
// of a client.
func driverFiles(pid int) ([]string, error) {
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return nil, err
	}
	var open []string
	for _, link := range links {
		target, _ := os.Readlink(link) // it may have been closed
		if strings.HasPrefix(target, "/dev/nvidia") || strings.Contains(target, "/simdriver/clients/") {
			open = append(open, target)
		}
	}
	return open, nil
}

// memory reads a line of /proc/<pid>/status, in KiB.
func memory(pid int, line string) (int, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	defer f.Close() //nolint:errcheck // only read
	for s := bufio.NewScanner(f); s.Scan(); {
		if name, value, _ := strings.Cut(s.Text(), ":"); name == line {
			return strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		}
	}
	return 0, fmt.Errorf("process %d has no %s", pid, line)
}
