// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const capabilities = "proc/driver/nvidia/capabilities"

// inRoot runs a program of the driver root under chroot, where the folder dev of the root is /dev.
func inRoot(t *testing.T, d *simdriver.Driver, asUser uint32, program string, args ...string) (string, int) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, for chroot and mknod")
	}
	c := exec.CommandContext(t.Context(), "/usr/bin/"+program, args...)
	c.Env, c.Dir = []string{"PATH=/usr/bin"}, "/"
	c.SysProcAttr = &syscall.SysProcAttr{Chroot: d.Root(), Credential: &syscall.Credential{Uid: asUser, Gid: asUser}}
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out), c.ProcessState.ExitCode()
}

// nodes lists the device nodes in the folder dev of the root, with their numbers.
func nodes(t *testing.T, d *simdriver.Driver) map[string][2]uint32 {
	t.Helper()
	found := map[string][2]uint32{}
	dev := filepath.Join(d.Root(), "dev")
	for _, pattern := range []string{"*", "nvidia-caps/*"} {
		files, err := filepath.Glob(filepath.Join(dev, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			var info unix.Stat_t
			if err := unix.Stat(f, &info); err != nil {
				t.Fatal(err)
			}
			if info.Mode&unix.S_IFMT == unix.S_IFCHR {
				found[strings.TrimPrefix(f, dev+"/")] = [2]uint32{unix.Major(info.Rdev), unix.Minor(info.Rdev)}
			}
		}
	}
	return found
}

func partition(t *testing.T, d *simdriver.Driver, index int, profile string, start, size int) {
	t.Helper()
	NewWithT(t).Expect(d.Update(func(s *simdriver.State) error {
		uuid := s.Node.GPUs[index].UUID
		if _, err := s.Node.SetMIG(uuid, true, 0); err != nil {
			return err
		}
		return s.Node.CreatePartial(uuid, profile, gpu.Placement{Start: start, Size: size}, size)
	})).To(Succeed())
}

func TestTheKernelShowsInstancesThatExist(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.T4, sim.A100)
	show := func() []string {
		var shown []string
		files, err := filepath.Glob(filepath.Join(d.Root(), capabilities, "gpu*", "mig", "gi*", "*"))
		g.Expect(err).NotTo(HaveOccurred())
		for _, f := range files {
			shown = append(shown, strings.TrimPrefix(f, filepath.Join(d.Root(), capabilities)+"/"))
		}
		return shown
	}
	g.Expect(show()).To(BeEmpty())
	g.Expect(filepath.Join(d.Root(), capabilities, "mig", "config")).To(BeAnExistingFile())

	partition(t, d, 1, "2g.10gb", 2, 2)
	g.Expect(show()).To(Equal([]string{"gpu1/mig/gi4/access", "gpu1/mig/gi4/ci0"}))
	raw, err := os.ReadFile(filepath.Join(d.Root(), capabilities, "gpu1/mig/gi4/ci0/access"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(raw)).To(Equal("DeviceFileMinor: 175\nDeviceFileMode: 292\nDeviceFileModify: 1\n"), "3 + 135×1 + 9×4 + 1 + 0")

	minors, err := os.ReadFile(filepath.Join(d.Root(), "proc/driver/nvidia-caps/mig-minors"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(minors)).To(ContainSubstring("\ngpu1/gi4/access 174\ngpu1/gi4/ci0/access 175\n"))
	g.Expect(string(minors)).To(HavePrefix("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n"))
	g.Expect(strings.Count(string(minors), "\n")).To(Equal(2 + 32*15*9))

	g.Expect(d.Reboot()).To(Succeed())
	g.Expect(show()).To(BeEmpty())
	g.Expect(filepath.Join(d.Root(), capabilities, "gpu1")).NotTo(BeADirectory())
}

func TestSMIMakesDeviceNodesInItsOwnRoot(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.T4, sim.A100)
	g.Expect(os.Mkdir(filepath.Join(d.Root(), "dev"), 0o755)).To(Succeed())
	partition(t, d, 1, "2g.10gb", 2, 2)
	g.Expect(nodes(t, d)).To(BeEmpty(), "the kernel makes none")

	out, status := smi(t, d, "-L")
	g.Expect(status).To(Equal(0), out)
	g.Expect(nodes(t, d)).To(BeEmpty(), "outside of the root it makes none in the root")

	out, status = inRoot(t, d, 0, "nvidia-smi", "-L")
	g.Expect(status).To(Equal(0), out)
	all := map[string][2]uint32{
		"nvidiactl": {195, 255}, "nvidia0": {195, 0}, "nvidia1": {195, 1}, "nvidia-uvm": {240, 0}, "nvidia-uvm-tools": {240, 1},
		"nvidia-caps/nvidia-cap1": {241, 1}, "nvidia-caps/nvidia-cap2": {241, 2},
		"nvidia-caps/nvidia-cap174": {241, 174}, "nvidia-caps/nvidia-cap175": {241, 175},
	}
	g.Expect(nodes(t, d)).To(Equal(all))
	to, err := os.Readlink(filepath.Join(d.Root(), "dev/char/241:175"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(to).To(Equal("../nvidia-caps/nvidia-cap175"))
	info, err := os.Stat(filepath.Join(d.Root(), "dev/nvidia-caps/nvidia-cap1"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(info.Mode().Perm()).To(Equal(os.FileMode(0o400)))

	g.Expect(d.Reboot()).To(Succeed())
	_, status = inRoot(t, d, 0, "nvidia-smi")
	g.Expect(status).To(Equal(0))
	g.Expect(nodes(t, d)).To(Equal(all), "nodes of instances that are gone stay")
}

func TestSMIWorksWhereItMayNotMakeDeviceNodes(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	g.Expect(os.Mkdir(filepath.Join(d.Root(), "dev"), 0o755)).To(Succeed())
	for folder := d.Root(); folder != "/"; folder = filepath.Dir(folder) { // folders of tests are private
		g.Expect(os.Chmod(folder, 0o755)).To(Succeed())
		if strings.HasPrefix(filepath.Base(folder), "Test") {
			break
		}
	}
	out, status := inRoot(t, d, 1000, "nvidia-smi", "-L")
	g.Expect(status).To(Equal(0), out)
	g.Expect(out).To(HavePrefix("GPU 0: "))
	g.Expect(nodes(t, d)).To(BeEmpty())
}

func TestSMIMakesNoDeviceNodesOfAKernelThatShowsNone(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	g.Expect(os.Mkdir(filepath.Join(d.Root(), "dev"), 0o755)).To(Succeed())
	g.Expect(os.RemoveAll(filepath.Join(d.Root(), "proc"))).To(Succeed())
	out, status := inRoot(t, d, 0, "nvidia-smi", "-L")
	g.Expect(status).To(Equal(0), out)
	g.Expect(nodes(t, d)).To(BeEmpty())
}

func TestEachLayoutOfADriver(t *testing.T) {
	library := map[simdriver.Layout]string{
		simdriver.RPM: "usr/lib64", simdriver.Multiarch: "usr/lib/*-linux-gnu", simdriver.Alternatives: "usr/lib/*-linux-gnu/nvidia/current",
	}
	for layout, folder := range library {
		t.Run(folder, func(t *testing.T) {
			g := NewWithT(t)
			d := rootOf(t, simdriver.Spec{Name: "n", Models: []sim.Model{sim.T4}, DriverVersion: "570.172.08", Layout: layout})
			for _, name := range []string{"libnvidia-ml.so.570.172.08", "libcuda.so.570.172.08", "libnvidia-ml.so.1", "libcuda.so.1"} {
				files, err := filepath.Glob(filepath.Join(d.Root(), folder, name))
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(files).To(HaveLen(1), name)
			}
			out, status := inRoot(t, d, 0, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
			g.Expect(status).To(Equal(0), out)
			g.Expect(out).To(Equal("570.172.08\n"))
		})
	}
}

func TestTheKernelModuleIsReplaced(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.H100)
	g.Expect(d.Update(func(s *simdriver.State) error {
		_, err := s.Node.SetMIG(s.Node.GPUs[0].UUID, true, 0)
		return err
	})).To(Succeed())
	client, err := d.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(d.UnloadModule()).To(MatchError(ContainSubstring("Module nvidia is in use")))
	g.Expect(client.Disconnect()).To(Succeed())

	g.Expect(d.UnloadModule()).To(Succeed())
	g.Expect(filepath.Join(d.Root(), "proc/driver/nvidia")).NotTo(BeADirectory())
	out, status := smi(t, d)
	g.Expect(status).To(Equal(9))
	g.Expect(out).To(ContainSubstring("couldn't communicate with the NVIDIA driver"))

	g.Expect(d.LoadModule("999.01")).To(Succeed())
	out, status = smi(t, d)
	g.Expect(status).To(Equal(18))
	g.Expect(out).To(ContainSubstring("Driver/library version mismatch"))
	n, err := d.Node()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(n.GPUs[0].MIG).To(BeFalse(), "Hopper keeps the mode in the module")
}
