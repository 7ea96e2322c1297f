// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"os"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

func TestTheModuleStaysLoadedWhileAProcessHasTheDriverOpenAndTheErrorNamesIt(t *testing.T) {
	g := NewWithT(t)
	gpus, d := start(t, Container)
	splitOne(t, gpus)
	c, err := gpus.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(d.Shutdown()).To(BeFalse())
	g.Expect(names(Root+"/dev")).NotTo(BeEmpty(), "the mount stays too")
	g.Expect(gpus.Persistent(uuidOf(t, gpus))).To(BeFalse(), "the daemons have ended")

	inUse, is := errors.AsType[*InUse](d.Unload())
	g.Expect(is).To(BeTrue())
	g.Expect(inUse.Holders).To(ConsistOf(HaveField("PID", os.Getpid())))
	g.Expect(inUse).To(MatchError(ContainSubstring(inUse.Holders[0].Program)))
	g.Expect(gpus.Node()).To(HaveField("GPUs", ContainElement(HaveField("Instances", HaveLen(1)))))

	g.Expect(c.Disconnect()).To(Succeed())
	g.Expect(d.Unload()).To(Succeed())
	g.Expect(gpus.Node()).To(HaveField("GPUs", HaveEach(HaveField("Instances", BeEmpty()))))
	g.Expect(d.Stop()).To(Succeed())
}

func TestADriverThatNothingHasOpenIsUnloadedWhenItsContainerEnds(t *testing.T) {
	g := NewWithT(t)
	_, d := start(t, Container)
	g.Expect(d.Shutdown()).To(BeTrue())
	g.Expect(os.ReadDir(Root)).To(BeEmpty())
	g.Expect(driverReady).To(BeAnExistingFile(), "which the validator removes, and it is not told")
	g.Expect(d.Stop()).To(Succeed())
}

func TestADriverContainerThatRestartsKeepsTheModuleThatIsInUse(t *testing.T) {
	g := NewWithT(t)
	gpus, d := start(t, Container)
	old := Root + "/etc/old"
	g.Expect(os.WriteFile(old, nil, 0o600)).To(Succeed())
	splitOne(t, gpus)
	c, err := gpus.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	next, err := d.Restart()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(old).NotTo(BeAnExistingFile(), "the root is another")
	g.Expect(names(Root + "/dev")).NotTo(BeEmpty())
	g.Expect(gpus.Node()).To(HaveField("GPUs", ContainElement(HaveField("Instances", HaveLen(1)))))
	g.Expect(c.Disconnect()).To(Succeed())
	g.Expect(next.Stop()).To(Succeed())
}

func TestAProgramThatHasNVMLOpenUsesTheHardwareAfterTheDriverContainerRestarted(t *testing.T) {
	g := NewWithT(t)
	gpus, d := start(t, Container)
	// As NVIDIA's device plugin has it, which mounts the driver's root itself.
	const itself = "/tmp/itself"
	g.Expect(bindSlave(Root, itself)).To(Succeed())
	library := nvml.New(nvml.WithLibraryPath(itself + "/usr/lib64/libnvidia-ml.so.1"))
	g.Expect(library.Init()).To(Equal(nvml.SUCCESS))
	next, err := d.Restart()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(os.ReadDir(itself+Hardware)).To(BeEmpty(), "the mounts of the old root are gone")

	device, ret := library.DeviceGetHandleByIndex(0)
	g.Expect(ret).To(Equal(nvml.SUCCESS))
	g.Expect(device.SetPersistenceMode(nvml.FEATURE_ENABLED)).To(Equal(nvml.SUCCESS))
	g.Expect(gpus.Node()).To(HaveField("GPUs", ContainElement(HaveField("Persistence", true))), "the hardware is the one of the machine")
	splitOne(t, gpus)
	current, _, ret := device.GetMigMode()
	g.Expect(ret).To(Equal(nvml.SUCCESS))
	g.Expect(current).To(Equal(nvml.DEVICE_MIG_ENABLE))

	g.Expect(next.Shutdown()).To(BeFalse(), "it still has the driver open")
	inUse, is := errors.AsType[*InUse](next.Unload())
	g.Expect(is).To(BeTrue())
	g.Expect(inUse.Holders).To(ConsistOf(HaveField("PID", os.Getpid())))
	g.Expect(library.Shutdown()).To(Equal(nvml.SUCCESS))
	g.Expect(next.Unload()).To(Succeed())
	g.Expect(next.Stop()).To(Succeed())
	g.Expect(unmountAll(itself)).To(Succeed())
}

func TestAProgramOpensNVMLOfADriverWhoseMountsAreGone(t *testing.T) {
	g := NewWithT(t)
	gpus, d := start(t, Container)
	g.Expect(bindSlave(Root, "/tmp/old")).To(Succeed())
	held, err := gpus.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	next, err := d.Restart()
	g.Expect(err).NotTo(HaveOccurred())

	old, err := simdriver.Around("/tmp/old/usr/lib64/libnvidia-ml.so.1")
	g.Expect(err).NotTo(HaveOccurred(), "the hardware is that of the machine, as every process sees it")
	g.Expect(old.Node()).To(HaveField("GPUs", HaveLen(2)))
	g.Expect(held.Disconnect()).To(Succeed())
	g.Expect(next.Stop()).To(Succeed())
	g.Expect(unmountAll("/tmp/old")).To(Succeed())
}
