// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/test/host/fake"
)

const (
	containerRoot = "run/nvidia/driver"
	driverReady   = "run/nvidia/validations/driver-ready"
	inContainer   = "NVIDIA_DRIVER_ROOT=/run/nvidia/driver\nNVIDIA_DEV_ROOT=/run/nvidia/driver\n"
	onHost        = "NVIDIA_DRIVER_ROOT=/\nNVIDIA_DEV_ROOT=/\n"
	major         = 241 // of nvidia-caps
)

// machine is a node in a folder, as a container that mounts it at /host sees it.
type machine struct {
	*testing.T
	Gomega

	root, container string
	runner          *fake.Runner
	broken          error // why nvidia-smi fails
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{T: t, Gomega: NewWithT(t), root: t.TempDir(), container: t.TempDir(), runner: fake.NewRunner()}
	for _, folder := range []string{m.path("dev"), m.path("proc"), filepath.Join(m.container, "dev"), filepath.Join(m.container, "run")} {
		m.Expect(os.MkdirAll(folder, 0o755)).To(Succeed())
	}
	m.runner.Add("nvidia-smi", m.smi)
	return m
}

func (m *machine) node() driver.Node {
	return driver.Node{Host: m.root, Root: driver.Auto, Container: m.container}
}

func (m *machine) path(elements ...string) string {
	return filepath.Join(append([]string{m.root}, elements...)...)
}

func (m *machine) write(name, content string) {
	m.Helper()
	m.Expect(os.MkdirAll(filepath.Dir(m.path(name)), 0o755)).To(Succeed())
	m.Expect(os.WriteFile(m.path(name), []byte(content), 0o755)).To(Succeed())
}

func (m *machine) link(name, target string) {
	m.Helper()
	m.Expect(os.MkdirAll(filepath.Dir(m.path(name)), 0o755)).To(Succeed())
	m.Expect(os.Symlink(target, m.path(name))).To(Succeed())
}

// install installs a driver below a root of the node, as an RPM lays it out, with a dev, proc and run of its own.
func (m *machine) install(root string) {
	m.Helper()
	m.write(root+"/usr/lib64/libnvidia-ml.so.595.45.04", "library")
	m.link(root+"/usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.595.45.04")
	m.write(root+"/usr/bin/nvidia-smi", "program")
	m.write(root+"/usr/bin/nvidia-cuda-mps-control", "program")
	m.write(root+"/proc/devices", fmt.Sprintf("Character devices:\n  1 mem\n195 nvidia\n%d nvidia-caps\n\nBlock devices:\n%d nvidia-uvm\n", major, major))
	m.write(root+"/proc/driver/nvidia/capabilities/mig/config", access(1, 1))
	m.Expect(os.MkdirAll(m.path(root, "dev"), 0o755)).To(Succeed())
}

// instance makes the kernel show a GPU instance and its compute instance.
func (m *machine) instance(root string, gpu, gi int) {
	m.Helper()
	folder := fmt.Sprintf("%s/proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", root, gpu, gi)
	m.write(folder+"/access", access(3+135*gpu+9*gi, 1))
	m.write(folder+"/ci0/access", access(4+135*gpu+9*gi, 1))
}

func access(minor, modify int) string {
	return fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: %d\n", minor, modify)
}

// smi is nvidia-smi: it makes the nodes of what the kernel shows, in the root in which it runs.
func (m *machine) smi(_ context.Context, c host.Command) (string, error) {
	if m.broken != nil {
		return "", m.broken
	}
	files, err := filepath.Glob(filepath.Join(c.Root, "proc/driver/nvidia/capabilities/gpu*/mig/gi*/access"))
	if err != nil {
		return "", err
	}
	more, err := filepath.Glob(filepath.Join(c.Root, "proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*/access"))
	if err != nil {
		return "", err
	}
	for _, file := range append(files, more...) {
		content, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		var minor uint32
		if _, err := fmt.Sscanf(string(content), "DeviceFileMinor: %d", &minor); err != nil {
			return "", err
		}
		node := filepath.Join(c.Root, fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", minor))
		if err := host.MakeDevice(node, host.Device{Major: major, Minor: minor, Mode: 0o444}); err != nil {
			return "", err
		}
	}
	return "GPU 0: NVIDIA H100", host.MakeDevice(filepath.Join(c.Root, "dev/nvidiactl"), host.Device{Major: 195, Minor: 255, Mode: 0o666})
}

// needsRoot skips a test that makes device nodes or changes the root of a program.
func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, for mknod and chroot")
	}
}

func (m *machine) find() driver.Driver {
	m.Helper()
	d, err := m.node().Find()
	m.Expect(err).NotTo(HaveOccurred())
	return d
}

func TestDebiansLinksAreFollowedInsideTheNode(t *testing.T) {
	m := newMachine(t)
	const folder = "usr/lib/x86_64-linux-gnu"
	m.write(folder+"/nvidia/current/libnvidia-ml.so.535.261.03", "library")
	m.link(folder+"/nvidia/current/libnvidia-ml.so.1", "libnvidia-ml.so.535.261.03")
	m.link("etc/alternatives/nvidia--libnvidia-ml.so.1-x86_64-linux-gnu", "/"+folder+"/nvidia/current/libnvidia-ml.so.1")
	m.link(folder+"/libnvidia-ml.so.1", "/etc/alternatives/nvidia--libnvidia-ml.so.1-x86_64-linux-gnu")
	m.write("usr/lib/nvidia/current/nvidia-smi", "program")
	m.link("etc/alternatives/nvidia--nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi")
	m.link("usr/bin/nvidia-smi", "/etc/alternatives/nvidia--nvidia-smi")

	d := m.find()
	m.Expect(d.Roots).To(Equal(driver.Roots{Driver: "/", Dev: "/"}))
	m.Expect(d.Library).To(Equal(m.path(folder, "nvidia/current/libnvidia-ml.so.535.261.03")))
	m.Expect(m.node().Version()).To(Equal("535.261.03"))
	outside, err := d.Outside("nvidia-smi", "-L")
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(outside.Path).To(Equal(m.path("usr/lib/nvidia/current/nvidia-smi")))
	m.Expect(outside.Env).To(ContainElement(ContainSubstring(m.path(folder, "nvidia/current"))), "where the libraries are, not the links")

	needsRoot(t)
	inside, err := d.Inside("nvidia-smi", "-L")
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(inside.Root).To(Equal(m.root))
	m.Expect(inside.Path).To(Equal("/usr/lib/nvidia/current/nvidia-smi"))
}

func TestLinksThatLeadOutOfADriverContainerAreOfItsRoot(t *testing.T) {
	m := newMachine(t)
	m.install(containerRoot)
	m.write("outside/libnvidia-ml.so.1", "of the node")
	m.Expect(os.Remove(m.path(containerRoot, "usr/lib64/libnvidia-ml.so.1"))).To(Succeed())
	m.link(containerRoot+"/usr/lib64/libnvidia-ml.so.1", "/../../../../outside/libnvidia-ml.so.1")
	_, err := m.node().Find()
	m.Expect(err).To(MatchError(ContainSubstring("No NVIDIA driver on this node")))
}

func TestProgramsRunInTheRootWithTheDeviceNodes(t *testing.T) {
	needsRoot(t)
	m := newMachine(t)
	m.install(containerRoot)
	m.write(driverReady, inContainer)
	inside, err := m.find().Inside("nvidia-smi", "-L")
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(inside.Root).To(Equal(m.path(containerRoot)))
	m.Expect(inside.Path).To(Equal("/usr/bin/nvidia-smi"))
	m.Expect(inside.Env).To(ConsistOf(HavePrefix("PATH=")))

	m.write(driverReady, "NVIDIA_DRIVER_ROOT=/run/nvidia/driver\nNVIDIA_DEV_ROOT=/\n")
	inside, err = m.find().Inside("nvidia-smi", "-L")
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(inside.Root).To(Equal(m.root), "the root with the device nodes, even where the driver lies elsewhere")
	m.Expect(inside.Path).To(Equal("/run/nvidia/driver/usr/bin/nvidia-smi"))
	m.Expect(inside.Env).To(ContainElement(MatchRegexp("^LD_LIBRARY_PATH=/lib64:.*:/run/nvidia/driver/usr/lib64:")))

	_, err = m.find().Inside("nvidia-modprobe")
	m.Expect(err).To(MatchError(ContainSubstring("The driver in /run/nvidia/driver has no nvidia-modprobe")))
}

func TestAnInstallationIsToldFromTheNextAtTheSamePath(t *testing.T) {
	m := newMachine(t)
	m.install(containerRoot)
	m.write(driverReady, inContainer)
	first := m.find().Identity
	m.Expect(m.find().Identity).To(Equal(first))
	m.Expect(m.node().Version()).To(Equal("595.45.04"))

	m.Expect(os.Remove(m.path(driverReady))).To(Succeed())
	_, err := m.node().Find()
	none, is := errors.AsType[*driver.Missing](err)
	m.Expect(is).To(BeTrue(), "%v", err)
	m.Expect(none.State).To(Equal(driver.NotReady), "the operator removes its mark before the driver changes")

	m.Expect(os.Rename(m.path(containerRoot), m.path("old"))).To(Succeed())
	m.Expect(m.node().Version()).To(BeEmpty())
	m.install(containerRoot)
	m.write(driverReady, inContainer)
	second := m.find().Identity
	m.Expect(second.Root).NotTo(Equal(first.Root))

	m.Expect(os.Rename(m.path(containerRoot, "usr/lib64/libnvidia-ml.so.595.45.04"), m.path("old-library"))).To(Succeed())
	m.write(containerRoot+"/usr/lib64/libnvidia-ml.so.595.45.04", "of another version")
	m.Expect(m.find().Identity.Root).To(Equal(second.Root))
	m.Expect(m.find().Identity.Library).NotTo(Equal(second.Library), "a package of the host replaces the library alone")
}

func TestTheVersionIsThatOfTheDriverThatIsReady(t *testing.T) {
	const elsewhere = "home/kubernetes/bin/nvidia" // as on Google's Container-Optimized OS
	m := newMachine(t)
	m.install(elsewhere)
	m.Expect(os.MkdirAll(m.path("dev"), 0o755)).To(Succeed())
	m.Expect(m.node().Version()).To(BeEmpty(), "nobody says where it is")
	m.write(driverReady, "NVIDIA_DRIVER_ROOT=/"+elsewhere+"\nNVIDIA_DEV_ROOT=/\n")
	m.Expect(m.node().Version()).To(Equal("595.45.04"))
	for name, content := range map[string]string{
		"is empty": "", "is half written": "NVIDIA_DRIVER_ROOT=/home/kuber", "lacks its end": "NVIDIA_DEV_ROOT=/\nNVIDIA_DRIVER_RO",
	} {
		m.write(driverReady, content)
		m.Expect(m.node().Version()).To(BeEmpty(), "the mark %s", name)
	}
	m.Expect(os.Remove(m.path(driverReady))).To(Succeed())
	m.Expect(m.node().Version()).To(BeEmpty(), "the driver is about to change")
}

// A package manager replaces the libraries of a host's driver. The kernel keeps the module until the next reboot.
func TestALibraryOfAnotherVersionThanTheLoadedModuleHasNone(t *testing.T) {
	m := newMachine(t)
	m.install("")
	m.Expect(m.node().Version()).To(Equal("595.45.04"), "a kernel that does not tell")
	m.write("sys/module/nvidia/version", "595.45.04\n")
	m.Expect(m.node().Version()).To(Equal("595.45.04"))
	m.write("sys/module/nvidia/version", "580.95.05\n")
	m.Expect(m.node().Version()).To(BeEmpty())
}

func TestTheContainerIsShownTheDriversNodesAndSockets(t *testing.T) {
	needsRoot(t)
	m := newMachine(t)
	m.install(containerRoot)
	m.write(driverReady, inContainer)
	m.instance(containerRoot, 0, 1)
	m.write(containerRoot+"/run/nvidia-persistenced/socket", "")
	m.Expect(m.find().Prepare(t.Context(), m.runner)).To(Succeed())
	m.Expect(m.runner.Lines()).To(Equal([]string{"nvidia-smi -L"}), "the driver's dev was empty")
	for name, want := range map[string]host.Device{
		"dev/nvidiactl":                {Major: 195, Minor: 255, Mode: 0o666},
		"dev/nvidia-caps/nvidia-cap12": {Major: major, Minor: 12, Mode: 0o444},
	} {
		shown, ok := host.DeviceAt(filepath.Join(m.container, name))
		m.Expect(ok).To(BeTrue(), name)
		m.Expect(shown).To(Equal(want), name)
	}
	m.Expect(filepath.Join(m.container, "run/nvidia-persistenced/socket")).To(BeAnExistingFile())
	m.Expect(os.ReadDir(m.path("dev"))).To(BeEmpty(), "the node's own dev is left alone")

	m.Expect(os.Rename(m.path(containerRoot), m.path("old"))).To(Succeed())
	m.Expect(os.RemoveAll(m.path(containerRoot))).To(Succeed())
	m.install("")
	m.write(driverReady, onHost)
	m.write("run/nvidia-persistenced/socket", "of the host")
	m.Expect(host.MakeDevice(m.path("dev/nvidiactl"), host.Device{Major: 196, Minor: 255, Mode: 0o600})).To(Succeed())
	m.Expect(m.find().Prepare(t.Context(), m.runner)).To(Succeed())
	shown, _ := host.DeviceAt(filepath.Join(m.container, "dev/nvidiactl"))
	m.Expect(shown).To(Equal(host.Device{Major: 196, Minor: 255, Mode: 0o600}), "a node of an earlier driver is replaced")
	m.Expect(os.ReadFile(filepath.Join(m.container, "run/nvidia-persistenced/socket"))).To(BeEquivalentTo("of the host"))
	m.Expect(m.runner.Lines()).To(HaveLen(1), "there were nodes")
}

func TestNothingIsShownOutsideOfAContainer(t *testing.T) {
	m := newMachine(t)
	m.install(containerRoot)
	node := m.node()
	node.Container = ""
	d, err := node.Find()
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(d.Prepare(t.Context(), m.runner)).To(Succeed())
	m.Expect(d.Show()).To(Succeed())
	m.Expect(m.runner.Lines()).To(BeEmpty())
}

func TestProgramsOfTheDriverThatIsThereNow(t *testing.T) {
	m := newMachine(t)
	ran := ""
	m.runner.Add("nvidia-cuda-mps-control", func(_ context.Context, c host.Command) (string, error) {
		ran = c.Path
		m.Expect(c.Env).To(ContainElements("CUDA_MPS_PIPE_DIRECTORY=/pipe", HavePrefix("LD_LIBRARY_PATH=")))
		return "", nil
	})
	runner := driver.NewRunner(m.node(), m.runner)
	command := host.Command{Path: "/usr/bin/nvidia-cuda-mps-control", Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/pipe"}}
	_, err := runner.Run(t.Context(), command)
	m.Expect(err).To(MatchError(ContainSubstring("No NVIDIA driver on this node")))

	m.install(containerRoot)
	_, err = runner.Run(t.Context(), command)
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(ran).To(Equal(m.path(containerRoot, "usr/bin/nvidia-cuda-mps-control")))

	m.Expect(os.RemoveAll(m.path(containerRoot))).To(Succeed())
	m.install("")
	_, err = runner.Run(t.Context(), command)
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(ran).To(Equal(m.path("usr/bin/nvidia-cuda-mps-control")))
}

// A reload of the kernel module may give nvidia-uvm and nvidia-caps other numbers. A daemon that stayed starts its next
// server with them.
func TestADaemonIsShownTheDeviceNodesOfTheDriverThatIsThereNow(t *testing.T) {
	needsRoot(t)
	m := newMachine(t)
	m.install(containerRoot)
	m.write(driverReady, inContainer)
	m.runner.Add("nvidia-cuda-mps-control", func(context.Context, host.Command) (string, error) { return "", nil })
	speak := func(daemon bool) host.Device {
		command := host.Command{Path: "nvidia-cuda-mps-control", Daemon: daemon}
		_, err := driver.NewRunner(m.node(), m.runner).Run(t.Context(), command)
		m.Expect(err).NotTo(HaveOccurred())
		shown, _ := host.DeviceAt(filepath.Join(m.container, "dev/nvidia-uvm"))
		return shown
	}
	before, after := host.Device{Major: 235, Mode: 0o666}, host.Device{Major: 236, Mode: 0o666}
	m.Expect(host.MakeDevice(m.path(containerRoot, "dev/nvidia-uvm"), before)).To(Succeed())
	m.Expect(speak(true)).To(Equal(before))
	m.Expect(host.MakeDevice(m.path(containerRoot, "dev/nvidia-uvm"), after)).To(Succeed())
	m.Expect(speak(false)).To(Equal(after))

	m.Expect(host.MakeDevice(m.path(containerRoot, "dev/nvidia-uvm"), before)).To(Succeed())
	m.Expect(os.Remove(m.path(driverReady))).To(Succeed())
	m.Expect(os.MkdirAll(m.path("run/nvidia/validations"), 0o755)).To(Succeed())
	m.Expect(speak(false)).To(Equal(after), "a driver that leaves has nothing to show")
}

// caps lists the capability nodes below a root, without those of earlier tests.
func (m *machine) caps(root string) []string {
	m.Helper()
	entries, err := os.ReadDir(m.path(root, "dev/nvidia-caps"))
	if !errors.Is(err, fs.ErrNotExist) {
		m.Expect(err).NotTo(HaveOccurred())
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimPrefix(e.Name(), "nvidia-"))
	}
	return names
}

func TestTheContainerOfTheDriverIsReadyUntilItsPodIsDeleted(t *testing.T) {
	m := newMachine(t)
	m.install(containerRoot)
	m.write(driverReady, inContainer)
	m.Expect(m.node().ContainerReady()).To(BeFalse(), "it starts, or is not the GPU Operator's")
	m.write("run/nvidia/validations/.driver-ctr-ready", "GDS_ENABLED: false\n")
	m.Expect(m.node().ContainerReady()).To(BeTrue())
	m.Expect(os.Remove(m.path("run/nvidia/validations/.driver-ctr-ready"))).To(Succeed())
	m.Expect(m.node().ContainerReady()).To(BeFalse())
	m.Expect(m.node().Leaving()).To(BeFalse(), "the device plugin still runs")
}

// The operator's validator removes its mark before a driver is replaced: a daemon must be ended then, and none be
// started.
func TestAProgramThatSpeaksWithADaemonRunsWhileTheDriverLeaves(t *testing.T) {
	m := newMachine(t)
	ran := 0
	m.runner.Add("nvidia-cuda-mps-control", func(context.Context, host.Command) (string, error) {
		ran++
		return "", nil
	})
	m.install(containerRoot)
	m.write(driverReady, "")
	m.Expect(m.node().Leaving()).To(BeFalse())
	m.Expect(os.Remove(m.path(driverReady))).To(Succeed())
	m.Expect(m.node().Leaving()).To(BeTrue())

	runner := driver.NewRunner(m.node(), m.runner)
	_, err := runner.Run(t.Context(), host.Command{Path: "/usr/bin/nvidia-cuda-mps-control"})
	m.Expect(err).NotTo(HaveOccurred())
	_, err = runner.Run(t.Context(), host.Command{Path: "/usr/bin/nvidia-cuda-mps-control", Daemon: true})
	m.Expect(err).To(MatchError(ContainSubstring("Waiting for NVIDIA's driver")))
	m.Expect(ran).To(Equal(1))
}

// A driver container's root holds a whole distribution, whose C library need not be of the version that ours is.
func TestTheDriversProgramsDoNotTakeTheDriverRootsCLibrary(t *testing.T) {
	m := newMachine(t)
	m.install(containerRoot)
	program, err := os.ReadFile("/bin/echo")
	m.Expect(err).NotTo(HaveOccurred())
	m.write(containerRoot+"/usr/bin/nvidia-smi", string(program))
	m.write(containerRoot+"/usr/lib64/libc.so.6", "of another version")
	command, err := m.find().Outside("nvidia-smi", "ran")
	m.Expect(err).NotTo(HaveOccurred())
	stdout, err := host.Exec{}.Run(t.Context(), command)
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(stdout).To(Equal("ran\n"))
}
