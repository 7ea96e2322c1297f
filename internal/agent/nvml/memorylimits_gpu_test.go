// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build hardware

package nvml_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	drivers "github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/gputest"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// memoryLibrary is the variable that makes this test program a CUDA program: its library.
const memoryLibrary = "TEST_CUDA_MEMORY"

func init() {
	if library := os.Getenv(memoryLibrary); library != "" {
		if err := gputest.ServeMemory(library, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

const cgroups = "/sys/fs/cgroup"

// realLimits are the memory limits of the driver of this machine.
type realLimits struct {
	lib     nvml.Interface
	library string
	backend sim.Backend
	folder  string // the cgroup of the test
}

// TestMemoryLimitsOfRealGPUs needs root, a driver of 615 or later, and GPUs that nobody uses. It resets them and loads
// their driver anew:
//
//	go test -tags hardware -run MemoryLimits -v ./internal/agent/nvml
//
// What it logs as unknown or found belongs into docs/dev/hardware.md. Run it again with NVreg_RegistryDwords="RmMemacctMode=1".
func TestMemoryLimitsOfRealGPUs(t *testing.T) {
	l := newRealLimits(t)
	if l.lib.Init() != nvml.SUCCESS {
		t.Skip("NoDriver: NVML cannot be opened")
	}
	t.Cleanup(func() { _ = l.lib.Shutdown() })
	var reason string
	if l.backend, reason = l.detect(); reason != "" {
		t.Skip(reason)
	}
	gputest.MemoryLimitContract(t, func(t *testing.T, b sim.Backend) gputest.MemoryLimits {
		t.Helper()
		if b != l.backend {
			t.Skip("the kernel module has ", l.backend)
		}
		l := l
		l.folder = l.Cgroup(t, cgroups, true)
		if ret := l.Set(l.GPUs()[0], l.folder, 0, 1<<30); ret != sim.Success {
			t.Fatal("NotEnforced: ", ret)
		}
		l.Set(l.GPUs()[0], l.folder, 0, sim.NoLimit)
		return l
	})
}

// TestMemoryProgramOfRealGPUs is what the contract's programs do, where nothing is limited.
func TestMemoryProgramOfRealGPUs(t *testing.T) {
	g, l := NewWithT(t), newRealLimits(t)
	const size = 64 << 20
	p, owner := l.Program(t, "0", ""), l.Program(t, "0", "")
	total, before := p.Memory()
	g.Expect(total).To(BeNumerically(">", before))
	for _, kind := range []sim.MemoryKind{sim.DeviceMemory, sim.PoolMemory, sim.VirtualMemory, sim.ManagedMemory} {
		g.Expect(p.Allocate(kind, size)).To(BeEmpty(), string(kind))
		_, after := p.Memory()
		t.Logf("%d bytes of %s took %d", size, kind, int64(before)-int64(after))
		p.Free()
	}
	g.Expect(p.Import(owner.Export(size))).To(BeEmpty())
	g.Expect(p.Allocate(sim.DeviceMemory, total)).To(Equal("CUDA_ERROR_OUT_OF_MEMORY"))
	p.Free()
}

func newRealLimits(t *testing.T) realLimits {
	t.Helper()
	library, err := drivers.Node{Host: "/"}.Library("/")
	if err != nil {
		t.Skip("NoDriver: ", err)
	}
	return realLimits{lib: nvml.New(nvml.WithLibraryPath(library)), library: library}
}

// detect says what charges memory, or the first reason for which nothing does, or not for this test.
func (l realLimits) detect() (sim.Backend, string) {
	var fs unix.Statfs_t
	if err := unix.Statfs(cgroups, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return "", "CgroupV1: " + cgroups + " is no cgroup2"
	}
	version, _ := l.lib.SystemGetDriverVersion()
	branch, _, _ := strings.Cut(version, ".")
	if number, err := strconv.Atoi(branch); err != nil || number < 615 {
		return "", "DriverTooOld: " + version
	}
	if err := l.lib.Extensions().LookupSymbol("nvmlDeviceSetMemoryLimits_v1"); err != nil {
		return "", "DriverTooOld: " + err.Error()
	}
	for _, uuid := range l.GPUs() {
		if mode, _, ret := l.device(uuid).GetMigMode(); ret == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE {
			return "", "MIGActive: " + uuid
		}
	}
	backend := l.controller()
	if backend == "" {
		return "", "NoController or BackendOff: neither dmem nor misc, or RmMemacctMode=0"
	}
	enabled, _ := os.ReadFile(cgroups + "/cgroup.subtree_control")
	if !slices.Contains(strings.Fields(string(enabled)), string(backend)) {
		return "", fmt.Sprintf("NotDelegated: echo +%s >%s/cgroup.subtree_control", backend, cgroups)
	}
	if unix.Access(cgroups, unix.W_OK) != nil || os.Getuid() != 0 {
		return "", "NoPermission: only root sets limits"
	}
	for _, uuid := range l.GPUs() {
		if users, _ := l.device(uuid).GetComputeRunningProcesses(); len(users) > 0 {
			return "", "InUse: " + uuid
		}
	}
	return backend, ""
}

// controller is the back end that the kernel module picks.
func (realLimits) controller() sim.Backend {
	found, _ := os.ReadFile(cgroups + "/cgroup.controllers")
	parameters, _ := os.ReadFile("/proc/driver/nvidia/params")
	off := strings.Contains(string(parameters), "RmMemacctMode=0")
	for _, b := range []sim.Backend{sim.Dmem, sim.Misc} {
		miscOnly := b == sim.Dmem && strings.Contains(string(parameters), "RmMemacctMode=1")
		if !off && !miscOnly && slices.Contains(strings.Fields(string(found)), string(b)) {
			return b
		}
	}
	return ""
}

func (l realLimits) device(uuid string) nvml.Device {
	device, _ := l.lib.DeviceGetHandleByUUID(uuid)
	return device
}

func (l realLimits) GPUs() (uuids []string) {
	n, _ := l.lib.DeviceGetCount()
	for i := range n {
		device, _ := l.lib.DeviceGetHandleByIndex(i)
		uuid, _ := device.GetUUID()
		uuids = append(uuids, uuid)
	}
	return uuids
}

func (l realLimits) Backend() sim.Backend        { return l.backend }
func (realLimits) Simulated() bool               { return false }
func (realLimits) Root() string                  { return cgroups }
func (realLimits) MIGInstance(*testing.T) string { return "" }

func (l realLimits) Set(gpu, cgroup string, soft, hard uint64) sim.Return {
	return sim.Return(l.device(gpu).SetMemoryLimits_v1(cgroup, soft, hard))
}

func (l realLimits) SetByUser(gpu, cgroup string, soft, hard uint64) sim.Return {
	return gputest.ByUser(func() sim.Return { return l.Set(gpu, cgroup, soft, hard) })
}

func (l realLimits) Get(gpu, cgroup string) (sim.MemoryLimit, sim.Return) {
	got, ret := l.device(gpu).GetMemoryLimits_v1(cgroup)
	return sim.MemoryLimit{Soft: got.SoftLimit, Hard: got.HardLimit, Used: got.CurrentUsed}, sim.Return(ret)
}

func (l realLimits) Cgroup(t *testing.T, parent string, delegated bool) string {
	t.Helper()
	g := NewWithT(t)
	if parent == "" {
		parent = l.folder
	}
	if delegated {
		enable := []byte("+" + string(l.backend))
		g.Expect(os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), enable, 0)).To(Succeed())
	}
	path, err := os.MkdirTemp(parent, "gputest-") //nolint:usetesting // it is a cgroup
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = os.Remove(path) })
	return path
}

func (realLimits) Remove(t *testing.T, cgroup string) {
	t.Helper()
	NewWithT(t).Expect(os.Remove(cgroup)).To(Succeed())
}

func (realLimits) Remake(t *testing.T, cgroup string) {
	t.Helper()
	NewWithT(t).Expect(os.Mkdir(cgroup, 0o755)).To(Succeed())
}

// Program starts this program again, in the cgroup from its first moment.
func (l realLimits) Program(t *testing.T, gpu, cgroup string) gputest.LimitedProgram {
	t.Helper()
	g, c := NewWithT(t), exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY=/nowhere", "CUDA_VISIBLE_DEVICES="+gpu,
		memoryLibrary+"="+filepath.Join(filepath.Dir(l.library), "libcuda.so.1"))
	if cgroup != "" {
		folder, err := os.Open(cgroup)
		g.Expect(err).NotTo(HaveOccurred())
		defer folder.Close() //nolint:errcheck // only named
		c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(folder.Fd())}
	}
	in, err := c.StdinPipe()
	g.Expect(err).NotTo(HaveOccurred())
	out, err := c.StdoutPipe()
	g.Expect(err).NotTo(HaveOccurred())
	c.Stderr = os.Stderr
	g.Expect(c.Start()).To(Succeed())
	stop := func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	}
	t.Cleanup(stop)
	return gputest.CUDAProgram{In: in, Out: bufio.NewReader(out), Stop: stop}
}

func (l realLimits) Disturb(how gputest.Disturbance) error {
	if how == gputest.DaemonReload {
		return exec.Command("systemctl", "daemon-reload").Run()
	}
	if mode, _ := l.device(l.GPUs()[0]).GetPersistenceMode(); mode == nvml.FEATURE_ENABLED && how == gputest.LastClose {
		return errors.New("persistence mode is on")
	}
	if ret := l.lib.Shutdown(); ret != nvml.SUCCESS {
		return ret
	}
	var err error
	switch how {
	case gputest.Reset:
		err = exec.Command("nvidia-smi", "--gpu-reset").Run()
	case gputest.Reload:
		err = errors.Join(exec.Command("modprobe", "-r", "nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia").Run(),
			exec.Command("modprobe", "nvidia").Run(), exec.Command("modprobe", "nvidia_uvm").Run())
	case gputest.LastClose, gputest.DaemonReload:
	}
	if ret := l.lib.Init(); ret != nvml.SUCCESS {
		err = errors.Join(err, ret)
	}
	return err
}
