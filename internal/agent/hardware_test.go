// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
)

// installation is the driver of a node: absent, there, or another one.
type installation struct {
	*sim.Hardware

	found    driver.Driver
	missing  error
	fault    error // of an observation
	opened   int
	prepared int
	closed   int
	replaced int
}

func (i *installation) Observe(ctx context.Context) (gpu.Inventory, error) {
	if i.fault != nil {
		return gpu.Inventory{}, i.fault
	}
	return i.Hardware.Observe(ctx)
}

func (i *installation) Close() error {
	i.closed++
	return i.Hardware.Close()
}

func (i *installation) late(clk *testclock.FakePassiveClock) *agent.LazyHardware {
	return agent.NewLazyHardware(agent.Source{
		Find: func() (driver.Driver, error) { return i.found, i.missing },
		Open: func(driver.Driver) gpu.Hardware {
			i.opened++
			return i
		},
		Prepare: func(context.Context, driver.Driver) error {
			i.prepared++
			return nil
		},
		Replaced: func() { i.replaced++ },
	}, clk)
}

func TestHardwareComesWithTheDriver(t *testing.T) {
	g := NewWithT(t)
	missing := &driver.Missing{State: driver.NotReady, Message: "no driver yet"}
	i := &installation{Hardware: sim.New(sim.A100), missing: missing}
	late := i.late(testclock.NewFakePassiveClock(time.Unix(1_800_000_000, 0)))
	_, err := late.Observe(t.Context())
	g.Expect(err).To(MatchError(missing))
	g.Expect(late.SetMIG(t.Context(), "GPU-1", true)).To(MatchError(missing))
	g.Expect(late.Close()).To(Succeed(), "what was never opened needs no closing")
	g.Expect(i.prepared).To(BeZero())

	i.missing = nil
	inventory, err := late.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	uuid := inventory.Devices[0].UUID
	g.Expect(late.SetMIG(t.Context(), uuid, true)).To(Succeed())
	g.Expect(late.CreateInstance(t.Context(), uuid, "7g.40gb", gpu.Placement{Size: 8})).To(Succeed())
	inventory, err = late.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(late.DestroyInstance(t.Context(), uuid, inventory.Devices[0].State.Instances[0].ID)).To(Succeed())
	g.Expect(late.SetMIG(t.Context(), uuid, false)).To(Succeed())
	g.Expect(late.SetComputeMode(t.Context(), uuid, gpu.ComputeExclusiveProcess)).To(Succeed())
	g.Expect(late.Reset(t.Context(), uuid)).To(Succeed())
	g.Expect(late.Close()).To(Succeed())
	g.Expect(i.Writes()).To(HaveLen(6), "each call arrives once")
	g.Expect(i.opened).To(Equal(1))
	g.Expect(i.prepared).To(Equal(2), "before each look")
}

func TestADriverThatGoesIsClosedAndOneThatIsReplacedEndsTheProcess(t *testing.T) {
	g := NewWithT(t)
	i := &installation{Hardware: sim.New(sim.A100), found: driver.Driver{Identity: driver.Identity{Root: host.FileID{Inode: 1}}}}
	late := i.late(testclock.NewFakePassiveClock(time.Unix(1_800_000_000, 0)))
	_, err := late.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())

	i.missing = errors.New("driver-ready is absent")
	_, err = late.Observe(t.Context())
	g.Expect(err).To(MatchError(i.missing))
	g.Expect(i.closed).To(Equal(1))
	g.Expect(i.replaced).To(BeZero(), "the process waits: a new one would wait as well")

	i.missing = nil
	_, err = late.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred(), "the same driver is used again")
	g.Expect(i.opened).To(Equal(1))

	i.found.Identity.Root.Inode = 2
	g.Expect(late.SetMIG(t.Context(), "GPU-1", true)).To(MatchError(ContainSubstring("the NVIDIA driver was replaced")))
	g.Expect(i.replaced).To(Equal(1))
	g.Expect(i.closed).To(Equal(2))
	g.Expect(i.Writes()).To(BeEmpty(), "nothing is changed through the library of another driver")
}

func TestALastingMismatchEndsTheProcessByItsLiveness(t *testing.T) {
	g := NewWithT(t)
	i := &installation{Hardware: sim.New(sim.A100), fault: gpu.ErrDriverMismatch}
	clk := testclock.NewFakePassiveClock(time.Unix(1_800_000_000, 0))
	late := i.late(clk)
	look := func(after time.Duration) error {
		clk.SetTime(clk.Now().Add(after))
		_, err := late.Observe(t.Context())
		g.Expect(err != nil).To(Equal(i.fault != nil))
		return late.Alive(nil)
	}
	g.Expect(look(0)).To(Succeed())
	g.Expect(look(2 * time.Minute)).To(Succeed())
	i.fault = nil
	g.Expect(look(time.Second)).To(Succeed())
	i.fault = gpu.ErrDriverMismatch
	g.Expect(look(time.Second)).To(Succeed(), "the time counts anew")
	g.Expect(look(2*time.Minute + time.Second)).To(MatchError("driver and library versions differ for 2m1s"))
}

func TestSMI(t *testing.T) {
	g := NewWithT(t)
	var result error
	runner := hostfake.NewRunner().Add("nvidia-smi", func(context.Context, host.Command) (string, error) { return "", result })
	node := driver.Node{Host: t.TempDir(), Root: driver.Auto}
	smi := agent.SMI(runner, node.Find)
	_, err := smi(t.Context(), "-L")
	g.Expect(err).To(MatchError(ContainSubstring("No NVIDIA driver on this node")))

	root := filepath.Join(node.Host, "run/nvidia/driver")
	for _, file := range []string{"usr/lib64/libnvidia-ml.so.1", "usr/bin/nvidia-smi", "dev/null"} {
		g.Expect(os.MkdirAll(filepath.Dir(filepath.Join(root, file)), 0o755)).To(Succeed())
		g.Expect(os.WriteFile(filepath.Join(root, file), nil, 0o755)).To(Succeed())
	}
	_, err = smi(t.Context(), "--gpu-reset", "-i", "0000:07:00.0")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(runner.Lines()).To(Equal([]string{"nvidia-smi --gpu-reset -i 0000:07:00.0"}))
	if os.Geteuid() == 0 {
		g.Expect(runner.Commands()[0].Root).To(Equal(root), "where the sockets of the driver's daemons are")
	}

	result = errors.New("exit status 255: GPU 00000000:07:00.0: In use by another client")
	_, err = smi(t.Context(), "--gpu-reset", "-i", "0000:07:00.0")
	g.Expect(err).To(MatchError(
		"running nvidia-smi: exit status 255: GPU 00000000:07:00.0: In use by another client"))
}
