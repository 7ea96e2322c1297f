// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	drivers "github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// resets is a node whose resets a test watches. Time passes only while a reset waits.
type resets struct {
	*nvml.Hardware

	driver *simdriver.Driver
	uuids  []string
	runs   []string        // of nvidia-smi, by arguments
	waits  []time.Duration // between them
	wait   func(waited time.Duration)
}

func newResets(t *testing.T, models ...sim.Model) *resets {
	t.Helper()
	g := NewWithT(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root, for chroot")
	}
	r := &resets{driver: driver(t), wait: func(time.Duration) {}}
	g.Expect(r.driver.Replace(simdriver.Spec{Name: t.Name(), Models: models})).To(Succeed())
	library, err := drivers.Node{Host: "/"}.Library(r.driver.Root())
	g.Expect(err).NotTo(HaveOccurred())
	r.Hardware = nvml.New(nvml.Options{
		Library: library, SMI: r.smi, After: r.after, Module: moduleOf(r.driver), Gather: time.Millisecond,
	})
	t.Cleanup(func() { g.Expect(r.Close()).To(Succeed()) })
	inv, err := r.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	for _, d := range inv.Devices {
		r.uuids = append(r.uuids, d.UUID)
	}
	return r
}

// smi runs nvidia-smi in the driver's root, as the agent does.
func (r *resets) smi(ctx context.Context, args ...string) (string, error) {
	r.runs = append(r.runs, strings.Join(args, " "))
	c := exec.CommandContext(ctx, "/usr/bin/nvidia-smi", args...)
	c.SysProcAttr, c.Dir = &unix.SysProcAttr{Chroot: r.driver.Root()}, "/"
	out, err := c.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("running nvidia-smi: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

func (r *resets) after(d time.Duration) <-chan time.Time {
	r.waits = append(r.waits, d)
	r.wait(r.waited())
	return atOnce(d)
}

func (r *resets) waited() (sum time.Duration) {
	for _, w := range r.waits {
		sum += w
	}
	return sum
}

// persistenced starts nvidia-persistenced in the driver's root, until the test ends.
func (r *resets) persistenced(t *testing.T) {
	t.Helper()
	g := NewWithT(t)
	c := exec.CommandContext(t.Context(), "/usr/bin/nvidia-persistenced", "--persistence-mode")
	c.SysProcAttr, c.Dir = &unix.SysProcAttr{Chroot: r.driver.Root()}, "/"
	out, err := c.CombinedOutput()
	g.Expect(err).NotTo(HaveOccurred(), string(out))
	t.Cleanup(func() {
		g.Eventually(func() []sim.Client {
			clients, err := r.driver.Connected()
			g.Expect(err).NotTo(HaveOccurred())
			for _, c := range clients {
				if c.Program == "nvidia-persistenced" {
					_ = unix.Kill(c.PID, unix.SIGTERM) // it is gone soon
				}
			}
			return slices.DeleteFunc(clients, func(c sim.Client) bool { return c.Program == "" })
		}, "10s").Should(BeEmpty())
	})
}

// calls are the calls that changed the hardware.
func (r *resets) calls(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(r.driver.Root(), "var/lib/simdriver/calls.log"))
	if !errors.Is(err, os.ErrNotExist) {
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
	}
	return string(raw)
}

func TestAResetLetsTheDriversProgramDealWithPersistenced(t *testing.T) {
	g := NewWithT(t)
	r := newResets(t, sim.A100)
	r.persistenced(t)
	before := len(r.calls(t))
	g.Expect(r.SetMIG(t.Context(), r.uuids[0], true)).To(MatchError(gpu.ErrResetRequired))
	g.Expect(r.Reset(t.Context(), r.uuids[0])).To(Succeed())
	g.Expect(r.runs).To(Equal([]string{"--gpu-reset -i 0000:07:00.0"}))
	g.Expect(r.calls(t)[before:]).NotTo(ContainSubstring("nvmlDeviceSetPersistenceMode"), "NVML does not reach the daemon")
	g.Eventually(func() bool { return r.driver.Persistent(r.uuids[0]) }).Should(BeTrue())
}

func TestAResetTurnsPersistenceModeOffIfPersistencedKeepsTheGPUs(t *testing.T) {
	g := NewWithT(t)
	r := newResets(t, sim.A100, sim.A100)
	r.persistenced(t)
	g.Expect(r.driver.AddFault(simdriver.Fault{Call: simdriver.PersistencedReleases, Return: sim.Unknown})).To(Succeed())
	g.Expect(r.Reset(t.Context(), r.uuids[1])).To(Succeed())
	g.Expect(r.runs).To(ContainElement("-i 0000:0f:00.0 -pm 0"))
	n, err := r.driver.Node()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(n.GPUs[1].Persistence).To(BeTrue(), "the mode is on again, in its legacy form")
	g.Expect(r.driver.Persistent(r.uuids[0])).To(BeTrue(), "the other GPU is left alone")
}

func TestAResetWaitsForAProgramThatOpensTheGPUForAMoment(t *testing.T) {
	g := NewWithT(t)
	r := newResets(t, sim.A100)
	exporter, err := r.driver.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	r.wait = func(waited time.Duration) {
		if waited > 5*time.Second && exporter != nil {
			g.Expect(exporter.Disconnect()).To(Succeed())
			exporter = nil
		}
	}
	g.Expect(r.Reset(t.Context(), r.uuids[0])).To(Succeed())
	g.Expect(r.runs).NotTo(ContainElement(ContainSubstring("-pm")), "the GPU is not in persistence mode")
}

func TestAResetGivesUpOnAProgramThatStays(t *testing.T) {
	g := NewWithT(t)
	r := newResets(t, sim.A100)
	holder, err := r.driver.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	err = r.Reset(t.Context(), r.uuids[0])
	g.Expect(err).To(MatchError(gpu.ErrBusy))
	g.Expect(err).To(MatchError(ContainSubstring("find it on the node with fuser -v /dev/nvidia*")))
	g.Expect(r.waited()).To(And(BeNumerically(">=", 70*time.Second), BeNumerically("<=", 80*time.Second)))
	g.Expect(len(r.runs)).To(BeNumerically("<", 15))
	g.Expect(holder.Disconnect()).To(Succeed())
}

func TestAResetDoesNotWaitForAProcessThatIsKnown(t *testing.T) {
	g := NewWithT(t)
	r := newResets(t, sim.A100)
	g.Expect(r.driver.AddProcess(r.uuids[0], gpu.Process{PID: 900001, Name: "python3", Instance: gpu.WholeGPU})).To(Succeed())
	err := r.Reset(t.Context(), r.uuids[0])
	g.Expect(err).To(MatchError(gpu.ErrBusy))
	g.Expect(err).To(MatchError(ContainSubstring("process 900001 uses GPU 0000:07:00.0")))
	g.Expect(r.runs).To(BeEmpty())
	g.Expect(r.waits).To(BeEmpty())
}

func TestAResetSaysThatNvidiaDRMKeepsTheGPU(t *testing.T) {
	g := NewWithT(t)
	r := newResets(t, sim.A100)
	g.Expect(r.driver.Update(func(s *simdriver.State) error {
		s.Node.DRM = true
		return nil
	})).To(Succeed())
	err := r.Reset(t.Context(), r.uuids[0])
	g.Expect(err).To(MatchError(gpu.ErrNotSupported), "which asks for a reboot")
	g.Expect(err).NotTo(MatchError(gpu.ErrBusy), "which is tried again")
	g.Expect(err).To(MatchError(ContainSubstring("unload it on the node (modprobe -r nvidia_drm), or reboot the node")))
}

func TestGPUsThatMustBeResetTogether(t *testing.T) {
	g := NewWithT(t)
	r := newResets(t, sim.A100, sim.A100, sim.T4, sim.A100)
	g.Expect(r.driver.Update(func(s *simdriver.State) error {
		s.Node.NVSwitch = true
		return nil
	})).To(Succeed())
	err := r.Reset(t.Context(), r.uuids[1])
	peers, ok := errors.AsType[*gpu.PeersError](err)
	g.Expect(ok).To(BeTrue(), fmt.Sprint(err))
	g.Expect(peers.PCIBusIDs).To(Equal([]string{"0000:07:00.0", "0000:1f:00.0"}))

	inv, err := r.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(inv.Devices[1].ResetPeers).To(Equal([]string{r.uuids[0], r.uuids[3]}))
	g.Expect(inv.Devices[2].ResetPeers).To(BeEmpty())
	r.runs = nil
	g.Expect(r.Reset(t.Context(), append([]string{r.uuids[1]}, inv.Devices[1].ResetPeers...)...)).To(Succeed())
	g.Expect(r.runs).To(Equal([]string{"--gpu-reset -i 0000:0f:00.0,0000:07:00.0,0000:1f:00.0"}))
}

// sideBySide does the same to all GPUs at once.
func sideBySide(inv gpu.Inventory, do func(uuid string) error) error {
	errs := make([]error, len(inv.Devices))
	var running sync.WaitGroup
	for i, d := range inv.Devices {
		running.Go(func() { errs[i] = do(d.UUID) })
	}
	running.Wait()
	return errors.Join(errs...)
}

func TestGPUsAreChangedSideBySide(t *testing.T) {
	g := NewWithT(t)
	h := on(t, slices.Repeat([]sim.Model{sim.H100}, 8)...)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	const each = time.Second
	g.Expect(driver(t).SetLatency("nvmlDeviceSetMigMode", each)).To(Succeed())
	start := time.Now()
	g.Expect(sideBySide(inv, func(uuid string) error { return h.SetMIG(t.Context(), uuid, true) })).To(Succeed())
	g.Expect(time.Since(start)).To(BeNumerically("<", 4*each), "one after the other they take eight times as long as one")
	expectSame(t, h)
}

// What vanishes while it is looked at does not fail the observation, though NVML says that it is not there.
func TestGPUsAreObservedWhileTheyAreChanged(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.H100, sim.H100)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(sideBySide(inv, func(uuid string) error { return h.SetMIG(t.Context(), uuid, true) })).To(Succeed())
	g.Expect(driver(t).SetLatency("nvmlGpuInstanceGetComputeInstances", time.Millisecond)).To(Succeed())
	ended := make(chan struct{})
	var changing sync.WaitGroup
	t.Cleanup(changing.Wait)
	changing.Go(func() {
		defer close(ended)
		for range 20 {
			g.Expect(h.CreateInstance(t.Context(), inv.Devices[0].UUID, "1g.10gb", gpu.Placement{Start: 2, Size: 1})).To(Succeed())
			g.Expect(h.DestroyInstance(t.Context(), inv.Devices[0].UUID, 9)).To(Succeed())
		}
	})
	for looks := 0; ; looks++ {
		_, err := h.Observe(t.Context())
		g.Expect(err).NotTo(HaveOccurred())
		select {
		case <-ended:
			changing.Wait()
			g.Expect(looks).To(BeNumerically(">", 0))
			return
		default:
		}
	}
}

func TestAHangOnOneGPUDoesNotHoldAnother(t *testing.T) {
	g := NewWithT(t)
	h := on(t, sim.H100, sim.H100)
	inv, err := h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	hang := simdriver.Fault{Call: "nvmlDeviceSetMigMode", GPU: inv.Devices[0].UUID, Hang: 5 * time.Second, Times: 1}
	g.Expect(driver(t).AddFault(hang)).To(Succeed())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	g.Expect(h.SetMIG(ctx, inv.Devices[0].UUID, true)).To(MatchError(ContainSubstring("NVML has not returned")))

	ctx, cancel = context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	g.Expect(h.SetMIG(ctx, inv.Devices[1].UUID, true)).To(Succeed())

	ctx, cancel = context.WithTimeout(t.Context(), 500*time.Millisecond) // longer than a reset waits for others
	defer cancel()
	err = h.Reset(ctx, inv.Devices[1].UUID)
	g.Expect(err).To(MatchError(context.DeadlineExceeded), "the call that hangs has handles open")
	_, err = h.Observe(t.Context())
	g.Expect(err).NotTo(HaveOccurred(), "once it has returned")
}

// resetter is the program that resets, and how many of it run.
type resetter struct {
	smi func(context.Context, ...string) (string, error)
	shy bool          // finds the GPU in use while another resets
	met chan struct{} // closed once two have run at the same time, for which each waits

	once          sync.Once
	mu            sync.Mutex
	running, most int
	calls         []string
}

func (r *resetter) SMI(ctx context.Context, args ...string) (string, error) {
	if args[0] != "--gpu-reset" {
		return r.smi(ctx, args...)
	}
	r.mu.Lock()
	r.running++
	r.most = max(r.most, r.running)
	r.calls = append(r.calls, args...)
	met := r.running > 1
	if met {
		r.once.Do(func() { close(r.met) })
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running--
	}()
	if r.shy && met {
		return "", errors.New("nvidia-smi: exit status 255: GPU 0000" + args[2] + " is currently being used by one or more other processes")
	}
	select {
	case <-r.met:
	case <-time.After(10 * time.Second):
	}
	return r.smi(ctx, args...)
}

func TestGPUsAreResetSideBySide(t *testing.T) {
	cases := map[string]struct{ persistent, shy bool }{
		"each by itself": {},
		"with persistence mode, which is restored":     {persistent: true},
		"by a program that bears no other beside it":   {shy: true},
		"by such a program, and with persistence mode": {shy: true, persistent: true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			closed := on(t, slices.Repeat([]sim.Model{sim.A100}, 4)...)
			inv, err := closed.Observe(t.Context())
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(closed.Close()).To(Succeed())
			r := &resetter{smi: smiOf(driver(t)), shy: c.shy, met: make(chan struct{})}
			library, err := drivers.Node{Host: "/"}.Library(driver(t).Root())
			g.Expect(err).NotTo(HaveOccurred())
			h := nvml.New(nvml.Options{Library: library, SMI: r.SMI, Gather: time.Second, After: atOnce, Module: moduleOf(driver(t))})
			if c.persistent {
				for _, d := range inv.Devices {
					rig{t, driver(t)}.SetPersistence(d.UUID, true)
				}
			}
			g.Expect(sideBySide(inv, func(uuid string) error { return h.Reset(t.Context(), uuid) })).To(Succeed())
			g.Expect(r.most).To(BeNumerically(">", 1), strings.Join(r.calls, " "))
			for _, d := range inv.Devices {
				g.Expect(rig{t, driver(t)}.Persistence(d.UUID)).To(Equal(c.persistent))
			}
			g.Expect(h.Close()).To(Succeed())
		})
	}
}
