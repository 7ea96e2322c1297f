// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"os"
	"testing"

	. "github.com/onsi/gomega"
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
