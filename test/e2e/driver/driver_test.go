// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/sandbox"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// programsVariable tells the inside of the machine where the simulated driver's programs are.
const programsVariable = "GPUSHARING_DRIVER_TEST_PROGRAMS"

// These tests mount, so they run in a machine of their own.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Println("skipped: a machine inside this one needs root")
		return
	}
	if os.Getenv(programsVariable) == "" {
		if err := build(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(sandbox.Main(sandbox.Options{Hostname: "driver", Visible: []string{os.Getenv(programsVariable)}}, func() int {
		// The machine has a /tmp of its own, where the file does not exist that `go test` asks for.
		os.Args = slices.DeleteFunc(os.Args, func(a string) bool { return strings.HasPrefix(a, "-test.testlogfile") })
		return m.Run()
	}))
}

func build() error {
	cache, err := simdriver.CacheDir()
	if err != nil {
		return err
	}
	programs, err := simdriver.Build(context.Background(), cache)
	if err != nil {
		return err
	}
	return os.Setenv(programsVariable, programs)
}

func start(t *testing.T, layout Layout) (*simdriver.Driver, *Driver) {
	t.Helper()
	g := NewWithT(t)
	programs := os.Getenv(programsVariable)
	gpus, err := Fit(programs, simdriver.Times("node", sim.A100, 2))
	g.Expect(err).NotTo(HaveOccurred())
	d, err := Start(Options{Programs: programs, Layout: layout, Version: Version})
	g.Expect(err).NotTo(HaveOccurred())
	return gpus, d
}

// names are the device files of the driver in a /dev.
func names(dev string) []string {
	found, _ := filepath.Glob(dev + "/nvidia*") // the patterns are fine
	caps, _ := filepath.Glob(dev + "/nvidia-caps/*")
	var names []string
	for _, f := range append(found, caps...) {
		names = append(names, strings.TrimPrefix(f, dev+"/"))
	}
	return names
}

func withoutInstances() []string {
	return []string{
		"nvidia0", "nvidia1", "nvidia-caps", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl",
		"nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2",
	}
}

func TestADriverContainerHasItsDeviceFilesInItsOwnDev(t *testing.T) {
	g := NewWithT(t)
	gpus, d := start(t, Container)
	g.Expect(names("/dev")).To(BeEmpty())
	g.Expect(names(Root + "/dev")).To(ConsistOf(withoutInstances()))
	g.Expect(driverReady).To(BeAnExistingFile())

	a := splitOne(t, gpus)
	g.Expect(names(Root+"/dev")).To(ConsistOf(withoutInstances()), "nobody makes the device files of an instance by itself")
	smi := exec.Command("/usr/bin/nvidia-smi", "-L")
	smi.Dir, smi.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: Root}
	out, err := smi.CombinedOutput()
	g.Expect(err).NotTo(HaveOccurred(), "%s", out)
	g.Expect(names(Root + "/dev")).To(ConsistOf(append(withoutInstances(),
		Cap(simdriver.InstanceMinor(0, a)).Path, Cap(simdriver.ComputeMinor(0, a, 0)).Path)))

	uuid := uuidOf(t, gpus)
	g.Expect(Root + simdriver.PersistencedSocket).To(BeAnExistingFile())
	g.Expect(simdriver.PersistencedSocket).NotTo(BeAnExistingFile())
	g.Expect(gpus.Persistent(uuid)).To(BeTrue())

	g.Expect(d.Stop()).To(Succeed())
	g.Expect(gpus.Persistent(uuid)).To(BeFalse())
	g.Expect(driverReady).NotTo(BeAnExistingFile())
	g.Expect(os.ReadDir(Root)).To(BeEmpty())
}

func TestTheFabricManagersSocketIsOnTheNodeAndInTheDriversRoot(t *testing.T) {
	g := NewWithT(t)
	programs := os.Getenv(programsVariable)
	_, err := Fit(programs, simdriver.Times("node", sim.A100, 2))
	g.Expect(err).NotTo(HaveOccurred())
	d, err := Start(Options{Programs: programs, Version: Version, FabricManager: true})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(simdriver.FabricManagerSocket).To(BeAnExistingFile())
	g.Expect(Root + simdriver.FabricManagerSocket).To(BeAnExistingFile())
	g.Expect(d.Stop()).To(Succeed())
}

func uuidOf(t *testing.T, gpus *simdriver.Driver) string {
	t.Helper()
	n, err := gpus.Node()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return n.GPUs[0].UUID
}

// splitOne puts an instance on the first GPU and returns its id.
func splitOne(t *testing.T, gpus *simdriver.Driver) int {
	t.Helper()
	g := NewWithT(t)
	id := -1
	g.Expect(gpus.Update(func(s *simdriver.State) error {
		s.Node.GPUs[0].MIG = true
		p, ok := s.Node.GPUs[0].Profile(14)
		if !ok {
			return fmt.Errorf("no such profile")
		}
		i, err := s.Node.CreateGPUInstance(s.Node.GPUs[0].UUID, p.ID, nil)
		if err != nil {
			return err
		}
		id = i.ID
		_, err = s.Node.CreateComputeInstance(s.Node.GPUs[0].UUID, id, p.Slices)
		return err
	})).To(Succeed())
	return id
}

func TestAReplacedDriverIsNotSeenBelowAMountOfTheOldOne(t *testing.T) {
	g := NewWithT(t)
	gpus, d := start(t, Container)
	before := identity(t, Root)
	// As the runtime mounts for HostToContainer: the driver's root itself, and its parent.
	g.Expect(bindSlave(Root, "/tmp/itself")).To(Succeed())
	g.Expect(bindSlave("/run/nvidia", "/tmp/parent")).To(Succeed())
	g.Expect(names("/tmp/itself/dev")).NotTo(BeEmpty())

	next, err := d.Replace("595.50.01")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(identity(t, Root)).NotTo(Equal(before))
	g.Expect(identity(t, "/tmp/itself")).To(Equal(before))
	g.Expect(os.ReadDir("/tmp/itself/dev")).To(BeEmpty())
	g.Expect(identity(t, "/tmp/parent/driver")).To(Equal(identity(t, Root)))
	g.Expect(names("/tmp/parent/driver/dev")).To(ConsistOf(withoutInstances()))
	g.Expect(Root + "/usr/lib64/libnvidia-ml.so.595.50.01").To(BeAnExistingFile())
	g.Expect(gpus.Node()).To(HaveField("GPUs", HaveLen(2)), "the hardware is the same")
	g.Expect(next.Stop()).To(Succeed())
}

func bindSlave(from, to string) error {
	if err := bind(from, to, unix.MS_BIND|unix.MS_REC); err != nil {
		return err
	}
	return unix.Mount("", to, "", unix.MS_SLAVE|unix.MS_REC, "")
}

// identity is the file system and the inode of a folder.
func identity(t *testing.T, path string) string {
	t.Helper()
	var info unix.Stat_t
	NewWithT(t).Expect(unix.Stat(path, &info)).To(Succeed())
	return fmt.Sprintf("%d:%d", info.Dev, info.Ino)
}

func TestADriverOnTheNodeHasItsDeviceFilesInTheNodesDevAndLeavesNothing(t *testing.T) {
	for name, layout := range map[string]Layout{"in /usr": Host, "behind Debian's alternatives": Debian} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			_, d := start(t, layout)
			g.Expect(names("/dev")).To(ConsistOf(withoutInstances()))
			out, err := exec.Command("/usr/bin/nvidia-smi", "-L").CombinedOutput()
			g.Expect(err).NotTo(HaveOccurred(), "%s", out)
			g.Expect(os.ReadFile(driverReady)).To(ContainSubstring("IS_HOST_DRIVER=true"))

			g.Expect(d.Stop()).To(Succeed())
			g.Expect(names("/dev")).To(BeEmpty())
			g.Expect("/usr/bin/nvidia-smi").NotTo(BeAnExistingFile())
			g.Expect(filepath.Glob("/usr/lib*/libnvidia-ml*")).To(BeEmpty())
		})
	}
}
