// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// service starts a service of the driver under chroot, until the test ends.
func service(t *testing.T, d *simdriver.Driver, program string) {
	t.Helper()
	g := NewWithT(t)
	out, status := inRoot(t, d, 0, program)
	g.Expect(status).To(Equal(0), out)
	t.Cleanup(func() { stop(t, d, program) })
}

func stop(t *testing.T, d *simdriver.Driver, program string) {
	t.Helper()
	g := NewWithT(t)
	for _, c := range running(t, d, program) {
		g.Expect(unix.Kill(c.PID, unix.SIGTERM)).To(Succeed())
	}
	g.Eventually(func() []sim.Client { return running(t, d, program) }, 10*time.Second).Should(BeEmpty())
}

func running(t *testing.T, d *simdriver.Driver, program string) (found []sim.Client) {
	t.Helper()
	clients, err := d.Connected()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	for _, c := range clients {
		if c.Program == program {
			found = append(found, c)
		}
	}
	return found
}

func TestPersistencedLetsGoOnlyForProgramsThatReachIt(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100, sim.A100)
	service(t, d, "nvidia-persistenced")
	uuid := uuidOf(t, d, 0)
	g.Expect(d.Persistent(uuid)).To(BeTrue())

	out, status := smi(t, d, "--gpu-reset", "-i", uuid)
	g.Expect(status).To(Equal(255), "outside of the root the socket is not at /var/run")
	g.Expect(out).To(ContainSubstring("GPU 00000000:07:00.0: In use by another client"))
	out, _ = smi(t, d, "-i", uuid, "-mig", "1")
	g.Expect(out).To(ContainSubstring("pending enable state for GPU 00000000:07:00.0:In use by another client"))

	out, status = inRoot(t, d, 0, "nvidia-smi", "--gpu-reset", "-i", uuid)
	g.Expect(status).To(Equal(0), out)
	g.Eventually(func() bool { return d.Persistent(uuid) }, time.Minute, 10*time.Millisecond).Should(BeTrue(), "it takes the GPU back")

	g.Expect(d.AddFault(simdriver.Fault{Call: simdriver.PersistencedReleases, Return: sim.Unknown})).To(Succeed())
	_, status = inRoot(t, d, 0, "nvidia-smi", "--gpu-reset", "-i", uuid)
	g.Expect(status).To(Equal(255), "it does not always let go")
	_, status = inRoot(t, d, 0, "nvidia-smi", "-i", uuid, "-pm", "0")
	g.Expect(status).To(Equal(0))
	out, status = inRoot(t, d, 0, "nvidia-smi", "--gpu-reset", "-i", uuid)
	g.Expect(status).To(Equal(0), out)

	second := uuidOf(t, d, 1)
	_, status = inRoot(t, d, 0, "nvidia-smi", "-i", second, "-pm", "0")
	g.Expect(status).To(Equal(0))
	_, status = inRoot(t, d, 0, "nvidia-smi", "-i", second, "-pm", "1")
	g.Expect(status).To(Equal(255), "it takes back no GPU but the first")
	g.Expect(d.Persistent(second)).To(BeFalse())
}

func TestLegacyPersistenceModeLeavesPersistencedAlone(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	service(t, d, "nvidia-persistenced")
	_, status := smi(t, d, "-pm", "0") // does not reach the daemon, as NVML does not
	g.Expect(status).To(Equal(0))
	g.Expect(d.Persistent(uuidOf(t, d, 0))).To(BeTrue())
	_, status = smi(t, d, "--gpu-reset")
	g.Expect(status).To(Equal(255))
}

func TestGPUsBehindNVSwitchesAreResetTogetherWithoutFabricManager(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100, sim.A100, sim.A100)
	g.Expect(d.Update(func(s *simdriver.State) error {
		s.Node.NVSwitch = true
		return nil
	})).To(Succeed())
	out, status := smi(t, d, "--gpu-reset", "-i", "0")
	g.Expect(status).To(Equal(255))
	g.Expect(out).To(ContainSubstring("\n  GPU 00000000:0F:00.0\n  GPU 00000000:17:00.0"))
	g.Expect(out).NotTo(ContainSubstring("successfully"))

	client, err := d.ConnectAs(sim.Client{Only: []string{uuidOf(t, d, 2)}})
	g.Expect(err).NotTo(HaveOccurred())
	out, status = smi(t, d, "--gpu-reset", "-i", "0,1,2")
	g.Expect(status).To(Equal(255), "one of them is in use")
	g.Expect(out).NotTo(ContainSubstring("successfully"))
	g.Expect(client.Disconnect()).To(Succeed())
	out, status = smi(t, d, "--gpu-reset", "-i", "0,1,2")
	g.Expect(status).To(Equal(0), out)

	service(t, d, "nv-fabricmanager")
	out, status = smi(t, d, "--gpu-reset", "-i", "0")
	g.Expect(status).To(Equal(0), out)
}

func TestNvidiaDRMHoldsEveryGPU(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	g.Expect(d.Update(func(s *simdriver.State) error {
		s.Node.DRM = true
		return nil
	})).To(Succeed())
	out, status := smi(t, d, "--gpu-reset")
	g.Expect(status).To(Equal(255))
	g.Expect(out).To(ContainSubstring("In use by another client"))
	g.Expect(d.UnloadModule()).To(MatchError(ContainSubstring("Module nvidia is in use by nvidia_drm")))
}

func TestDCGMHoldsTheInstancesThatItSaw(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.H100)
	partition(t, d, 0, "1g.10gb", 0, 1)
	dcgm, err := d.Connect()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(dcgm.HoldInstances()).To(Succeed())
	partition(t, d, 0, "1g.10gb", 1, 1)

	_, status := smi(t, d, "mig", "-dci", "-gi", "7")
	g.Expect(status).To(Equal(255))
	n, err := d.Node()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(n.GPUs[0].Processes).To(BeEmpty())
	_, status = smi(t, d, "mig", "-dci", "-gi", "8")
	g.Expect(status).To(Equal(0), "one that it did not see")

	g.Expect(dcgm.Disconnect()).To(Succeed())
	_, status = smi(t, d, "mig", "-dci", "-gi", "7")
	g.Expect(status).To(Equal(0))
}

func TestAProgramOpensTheGPUsForAWhile(t *testing.T) {
	g := NewWithT(t)
	d := root(t, sim.A100)
	ended := make(chan error)
	go func() { ended <- d.OpenFor(t.Context(), 300*time.Millisecond) }()
	g.Eventually(func() ([]sim.Client, error) { return d.Connected() }, "10s", "1ms").Should(HaveLen(1))
	g.Eventually(ended, "10s").Should(Receive(BeNil()))
	g.Expect(d.Connected()).To(BeEmpty())
}
