// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// Behind NVSwitches an A100 is reset alone only while the fabric manager runs, which the driver container starts or
// not.
func switchSpecs() {
	Describe("GPUs that NVSwitches connect", Ordered, Offset(1), func() {
		whole := map[string]int64{"nvidia.com/gpu": 2}

		BeforeAll(func(ctx SpecContext) {
			begin(ctx, fitted...)
			putIn(sim.A100, sim.A100)
			Expect(gpus.Update(func(s *simdriver.State) error {
				s.Node.NVSwitch = true
				return nil
			})).To(Succeed())
			startDriverAs(ctx, driver.Options{FabricManager: true})
			restartClients(ctx)
			expectAllocatable(ctx, whole)
		})
		AfterAll(func() { fitted = nil }) // no other container of specs has NVSwitches

		It("are reset one by one with the fabric manager, and a pod on the other GPU goes on", func(ctx SpecContext) {
			startPod(ctx, "neighbour", "nvidia.com/gpu", 1)
			other, neighbour := otherThan(ctx, "neighbour")
			stays := expectSameContainer(ctx, users, "neighbour")
			share(ctx, fmt.Sprintf(oneSplit, other))
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-3g.20gb": 2})
			expectReady(ctx, "shared")
			stays()
			Expect(resets()).NotTo(ContainElement(ContainSubstring(neighbour)))
			unshare(ctx, whole)
		})

		It("wait for pods on all of them without the fabric manager, and are then reset together", func(ctx SpecContext) {
			stopDriver()
			startDriverAs(ctx, driver.Options{})
			restartClients(ctx)
			expectAllocatable(ctx, whole)
			startPod(ctx, "neighbour", "nvidia.com/gpu", 1)
			other, neighbour := otherThan(ctx, "neighbour")
			stays := expectSameContainer(ctx, users, "neighbour")
			share(ctx, fmt.Sprintf(oneSplit, other))
			Eventually(func() error { return ready(ctx, "shared") }).WithContext(ctx).
				Should(MatchError(And(ContainSubstring("GPUInUse"), ContainSubstring("default/neighbour"))))
			stays()
			stopPod(ctx, "neighbour")
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 1, "nvidia.com/mig-3g.20gb": 2})
			expectReady(ctx, "shared")
			Expect(resets()).To(ContainElement(And(ContainSubstring(neighbour), HaveSuffix("SUCCESS"))))
			unshare(ctx, whole)
		})
	})
}

// oneSplit shares the GPU with an index by MIG, and no other.
const oneSplit = `{strategy: MIG, mig: {layouts: [{gpus: {indexes: [%d]}, fill: 3g.20gb}]}}`

// otherThan waits until a pod that got one of two GPUs runs, and returns the index of the other GPU and the UUID of the
// pod's. From then on, the log of the driver's calls is empty.
func otherThan(ctx context.Context, pod string) (other int, uuid string) {
	GinkgoHelper()
	uuid = expectRunning(ctx, pod).uuid()
	n, err := gpus.Node()
	Expect(err).NotTo(HaveOccurred())
	index := slices.IndexFunc(n.GPUs, func(g sim.GPU) bool { return g.UUID == uuid })
	Expect(index).To(BeElementOf(0, 1))
	Expect(os.RemoveAll(callsLog())).To(Succeed())
	return 1 - index, uuid
}

func callsLog() string { return filepath.Join(driver.Hardware, "calls.log") }

// resets are the lines of the driver's log about resets, each of one GPU.
func resets() ([]string, error) {
	raw, err := os.ReadFile(callsLog())
	var found []string
	for line := range strings.Lines(string(raw)) {
		if strings.Contains(line, simdriver.GPUReset) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found, err
}
