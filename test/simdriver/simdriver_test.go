// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

func root(t *testing.T, models ...sim.Model) *simdriver.Driver {
	t.Helper()
	return rootOf(t, simdriver.Spec{Name: t.Name(), Models: models})
}

func rootOf(t *testing.T, spec simdriver.Spec) *simdriver.Driver {
	t.Helper()
	g := NewWithT(t)
	cache, err := simdriver.CacheDir()
	g.Expect(err).NotTo(HaveOccurred())
	programs, err := simdriver.Build(t.Context(), cache)
	g.Expect(err).NotTo(HaveOccurred())
	d, err := simdriver.New(filepath.Join(t.TempDir(), "root"), programs, spec)
	g.Expect(err).NotTo(HaveOccurred())
	return d
}

// command runs a program of the root and returns what it wrote and its exit status.
func command(t *testing.T, d *simdriver.Driver, stdin string, env []string, program string, args ...string) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, filepath.Join(d.Root(), "usr", "bin", program), args...)
	c.Stdin, c.Env = strings.NewReader(stdin), env
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), c.ProcessState.ExitCode()
}

func smi(t *testing.T, d *simdriver.Driver, args ...string) (string, int) {
	t.Helper()
	return command(t, d, "", nil, "nvidia-smi", args...)
}

func uuidOf(t *testing.T, d *simdriver.Driver, index int) string {
	t.Helper()
	n, err := d.Node()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return n.GPUs[index].UUID
}

func TestADriverThatIsOpenStaysOpenWithoutItsRoot(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.T4)
	g.Expect(os.Rename(d.Root(), d.Root()+".old")).To(Succeed())
	c, err := d.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(d.Connected()).To(ConsistOf(HaveField("PID", os.Getpid())))
	g.Expect(d.UnloadModule()).To(MatchError(simdriver.ErrModuleInUse))
	g.Expect(c.Disconnect()).To(Succeed())
	g.Expect(d.UnloadModule()).To(Succeed())
	moved, err := simdriver.Open(d.Root() + ".old")
	g.Expect(err).NotTo(HaveOccurred())
	s, err := moved.Read()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(s.Unloaded).To(BeTrue())
	g.Expect(moved.Connected()).To(BeEmpty())
	g.Expect(filepath.Join(moved.Root(), "proc/driver/nvidia")).NotTo(BeADirectory())
}

func TestSMIListsGPUsAndMIGDevices(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100, sim.T4)
	_, status := smi(t, d, "-i", "0", "-mig", "1")
	g.Expect(status).To(Equal(0))
	_, status = smi(t, d, "mig", "-i", "0", "-cgi", "9:0,14:4", "-C")
	g.Expect(status).To(Equal(0))
	n, _ := d.Node()
	out, status := smi(t, d, "-L")
	g.Expect(status).To(Equal(0))
	g.Expect(out).To(Equal(strings.Join([]string{
		"GPU 0: NVIDIA A100-SXM4-40GB (UUID: " + n.GPUs[0].UUID + ")",
		"  MIG 3g.20gb         Device  0: (UUID: " + n.GPUs[0].Instances[0].Compute[0].UUID + ")",
		"  MIG 2g.10gb         Device  1: (UUID: " + n.GPUs[0].Instances[1].Compute[0].UUID + ")",
		"GPU 1: Tesla T4 (UUID: " + n.GPUs[1].UUID + ")",
		"",
	}, "\n")))
	out, _ = smi(t, d, "mig", "-lgipp", "-i", "0")
	g.Expect(out).To(ContainSubstring("GPU  0 Profile ID 19 Placements: {0,1,2,3,4,5,6}:1\n"))
	out, _ = smi(t, d, "--query-gpu=index,name,mig.mode.current", "--format=csv,noheader")
	g.Expect(out).To(Equal("0, NVIDIA A100-SXM4-40GB, Enabled\n1, Tesla T4, [N/A]\n"))
}

func TestSMISaysItsVersionAsLongAsTheDriverIsLoaded(t *testing.T) {
	g := NewWithT(t)
	d := root(t)
	n, err := d.Node()
	g.Expect(err).NotTo(HaveOccurred())
	out, status := smi(t, d, "--version")
	g.Expect(status).To(BeZero(), out)
	g.Expect(out).To(ContainSubstring("NVIDIA-SMI version  : "+n.DriverVersion), "also on a node whose GPUs have all been passed to virtual machines")
	g.Expect(d.UnloadModule()).To(Succeed())
	out, status = smi(t, d, "--version")
	g.Expect(status).To(Equal(9), out)
}

func TestSMIResets(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	uuid := uuidOf(t, d, 0)
	client, err := d.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	out, status := smi(t, d, "-mig", "1")
	g.Expect(status).To(Equal(0), "the mode is pending, which is no error")
	g.Expect(out).To(ContainSubstring("Warning: MIG mode is in pending enable state for GPU 00000000:07:00.0:In use by another client"))
	out, status = smi(t, d, "-r", "-i", "0000:07:00.0")
	g.Expect(status).To(Equal(255))
	g.Expect(out).To(ContainSubstring("The following GPUs could not be reset:\n  GPU 00000000:07:00.0: In use by another client"))
	g.Expect(client.Disconnect()).To(Succeed())
	g.Expect(d.AddProcess(uuid, gpu.Process{PID: 4711, Name: "python", Instance: gpu.WholeGPU})).To(Succeed())
	_, status = smi(t, d, "--gpu-reset", "-i", uuid)
	g.Expect(status).To(Equal(255))
	g.Expect(d.RemoveProcess(4711)).To(Succeed())
	out, status = smi(t, d, "--gpu-reset", "-i", uuid)
	g.Expect(status).To(Equal(0), out)
	g.Expect(out).To(Equal("GPU 00000000:07:00.0 was successfully reset.\n"))
	n, _ := d.Node()
	g.Expect(n.GPUs[0].MIG).To(BeTrue())
}

func TestSMISetsComputeModeAndTimeSlice(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.T4, sim.T4)
	uuid := uuidOf(t, d, 1)
	_, status := smi(t, d, "-i", uuid, "-c", "EXCLUSIVE_PROCESS")
	g.Expect(status).To(Equal(0))
	_, status = smi(t, d, "compute-policy", "-i", uuid, "--set-timeslice", "3")
	g.Expect(status).To(Equal(0))
	out, status := smi(t, d, "compute-policy", "--list")
	g.Expect(status).To(Equal(0))
	g.Expect(out).To(And(MatchRegexp(`0 +Timeslice +Default`), MatchRegexp(`1 +Timeslice +Long`)))
	s, err := d.Read()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(s.Node.GPUs[0].ComputeMode).To(Equal(gpu.ComputeDefault))
	g.Expect(s.Node.GPUs[1].ComputeMode).To(Equal(gpu.ComputeExclusiveProcess))
	out, status = smi(t, d, "-i", "7", "-c", "DEFAULT")
	g.Expect(status).To(Equal(6), out)
	out, status = smi(t, d, "--frobnicate")
	g.Expect(status).To(Equal(2), out)
}

// mps runs nvidia-cuda-mps-control for a pipe directory.
func mps(t *testing.T, d *simdriver.Driver, dir, stdin string, args ...string) (string, int) {
	t.Helper()
	env := []string{"CUDA_MPS_PIPE_DIRECTORY=" + dir + "/pipe", "CUDA_MPS_LOG_DIRECTORY=" + dir + "/log"}
	return command(t, d, stdin, env, "nvidia-cuda-mps-control", args...)
}

func mpsDir(t *testing.T) string {
	t.Helper()
	// longer than the address of a socket may be
	dir := filepath.Join(t.TempDir(), "nvidia.com", strings.Repeat("gpu.shared.", 8))
	NewWithT(t).Expect(os.MkdirAll(dir+"/pipe", 0o755)).To(Succeed())
	return dir
}

func TestMPSControlDaemon(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.T4)
	dir := mpsDir(t)
	out, status := mps(t, d, dir, "get_default_active_thread_percentage\n")
	g.Expect(status).To(Equal(1))
	g.Expect(out).To(Equal("Cannot find MPS control daemon process\n"))

	out, status = mps(t, d, dir, "", "-d")
	g.Expect(status).To(Equal(0), out)
	out, status = mps(t, d, dir, "", "-d")
	g.Expect(status).To(Equal(1))
	g.Expect(out).To(Equal("An instance of this daemon is already running\n"))

	out, _ = mps(t, d, dir, "get_default_active_thread_percentage\n")
	g.Expect(out).To(Equal("100.0\n"))
	out, _ = mps(t, d, dir, "set_default_device_pinned_mem_limit 0 1536M\nset_default_active_thread_percentage 10\n")
	g.Expect(out).To(Equal("10.0\n"))
	out, _ = mps(t, d, dir, "get_default_device_pinned_mem_limit 0\nget_default_active_thread_percentage")
	g.Expect(out).To(Equal("1G\n10.0\n"))
	g.Expect(filepath.Join(dir, "log", "control.log")).To(BeAnExistingFile())

	out, status = mps(t, d, dir, "quit\n")
	g.Expect(status).To(Equal(0), out)
	_, status = mps(t, d, dir, "get_server_list")
	g.Expect(status).To(Equal(1))
}

func TestMPSControlDaemonDiesWithTheNode(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.T4)
	dir := mpsDir(t)
	_, status := mps(t, d, dir, "", "-d")
	g.Expect(status).To(Equal(0))
	g.Expect(d.Reboot()).To(Succeed())
	g.Eventually(func() int {
		_, status := mps(t, d, dir, "get_server_list")
		return status
	}, 10*time.Second).Should(Equal(1))
}

func TestFaultsOfPrograms(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	g.Expect(d.AddFault(simdriver.Fault{Call: simdriver.GPUReset, Return: sim.Unknown, Times: 1})).To(Succeed())
	out, status := smi(t, d, "-r")
	g.Expect(status).To(Equal(255))
	g.Expect(out).To(ContainSubstring("Unknown Error"))
	_, status = smi(t, d, "-r")
	g.Expect(status).To(Equal(0))
	calls, err := os.ReadFile(filepath.Join(d.Root(), "var", "lib", "simdriver", "calls.log"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(calls)).To(MatchRegexp(`nvidia-smi\[\d+\] nvidia-smi --gpu-reset GPU-\S+ ERROR_UNKNOWN\n.* SUCCESS\n`))
}

func TestReadSeesEachChange(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	uuid := uuidOf(t, d, 0)
	other, err := simdriver.Open(d.Root())
	g.Expect(err).NotTo(HaveOccurred())
	for pid := range 200 {
		g.Expect(other.AddProcess(uuid, gpu.Process{PID: pid + 1, Instance: gpu.WholeGPU})).To(Succeed())
		s, err := d.Read()
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(s.Node.GPUs[0].Processes).To(HaveLen(1))
		g.Expect(s.Node.GPUs[0].Processes[0].PID).To(Equal(pid + 1))
		g.Expect(other.RemoveProcess(pid + 1)).To(Succeed())
	}
}

func TestAClientThatDiedHoldsNothing(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	client, err := d.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(d.Connected()).To(Equal([]sim.Client{{PID: os.Getpid()}}))
	g.Expect(client.Disconnect()).To(Succeed())
	left := filepath.Join(d.Root(), "var", "lib", "simdriver", "clients", "1-left")
	g.Expect(os.WriteFile(left, nil, 0o600)).To(Succeed())
	g.Expect(d.Connected()).To(BeEmpty())
	g.Expect(left).NotTo(BeAnExistingFile())
}

func TestTheCacheForgetsWhatIsNotUsed(t *testing.T) {
	g := NewWithT(t)
	cache := t.TempDir()
	shared, err := simdriver.CacheDir()
	g.Expect(err).NotTo(HaveOccurred())
	programs, err := simdriver.Build(t.Context(), shared)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(os.Symlink(programs, filepath.Join(cache, filepath.Base(programs)))).To(Succeed())
	old, young := filepath.Join(cache, "simdriver-0"), filepath.Join(cache, "simdriver-1")
	g.Expect(os.Mkdir(old, 0o750)).To(Succeed())
	g.Expect(os.Mkdir(young, 0o750)).To(Succeed())
	lastMonth := time.Now().AddDate(0, -1, 0)
	g.Expect(os.Chtimes(old, lastMonth, lastMonth)).To(Succeed())
	_, err = simdriver.Build(t.Context(), cache)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(old).NotTo(BeADirectory())
	g.Expect(young).To(BeADirectory())
}

func TestARootThatIsNone(t *testing.T) {
	g := NewWithT(t)
	_, err := simdriver.Open(t.TempDir())
	g.Expect(err).To(MatchError(ContainSubstring("opening the simulated driver")))
	_, err = simdriver.Around("/usr/bin/env")
	g.Expect(err).To(MatchError("/usr/bin/env lies in no simulated driver root: no folder above it has var/lib/simdriver/node.json"))
}
