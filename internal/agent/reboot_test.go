// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"errors"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// inVM is a node of two A100s that cannot be reset, whose first one waits for a reboot to be in MIG mode.
func inVM(s scenario) *node {
	s.Helper()
	n := s.node("", sim.A100, sim.A100)
	n.hardware.Update(func(h *sim.Node) { h.GPUs[0].NoReset, h.GPUs[1].NoReset = true, true })
	n.specify(mig(n.uuid(0), instances("1g.5gb", 7)))
	n.reconciled()
	n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootRequired)
	n.Expect(n.get().Status.CanReboot).To(BeTrue())
	n.again()
	n.Expect(n.rebooter.Requested()).To(BeZero(), "nothing is rebooted unasked")
	return n
}

// again makes a reconcile that reports nothing new, though it may have tried to reset the GPU.
func (n *node) again() {
	n.Helper()
	writes := n.writes
	n.reconciled()
	n.Expect(n.writes - writes).To(BeZero())
}

// permit lets the agent end a boot, for the same desired state.
func (n *node) permit(bootID string) {
	n.Helper()
	n.setSpec(v1alpha1.GPUNodeSpec{
		PolicyName: "research", Devices: []v1alpha1.DeviceSpec{mig(n.uuid(0), instances("1g.5gb", 7))},
		Reboot: &v1alpha1.RebootPermission{Hash: "5f3a1c", BootID: bootID},
	})
}

func rebootsOnce(s scenario) {
	n := inVM(s)
	boot := n.rebooter.Boot
	var before *v1alpha1.GPUNode
	n.rebooter.Boot = func() {
		before = n.get()
		boot()
	}
	n.permit("boot-1")
	n.reconciled()
	n.Expect(n.rebooter.Requested()).To(Equal(1))
	c, _ := condition.Find(before.Status.Conditions, v1alpha1.ConditionApplied)
	n.Expect(c.Reason).To(Equal(v1alpha1.ReasonRebooting), "written before the node went down")
	n.Expect(c.Message).To(ContainSubstring("it is being rebooted"))
	n.Expect(before.Status.BootID).To(Equal("boot-1"))

	n.restartAgent()
	n.settle()
	n.expectReady()
	n.Expect(n.profiles(0)).To(HaveLen(7))
	n.Expect(n.get().Status.BootID).To(Equal("boot-2"))
	n.expectNoCondition(v1alpha1.ConditionRebootRequired)
	n.Expect(n.rebooter.Requested()).To(Equal(1))
}

// rebootFails also is the crash after the status was written and before the node went down: the boot is the same.
func rebootFails(s scenario) {
	n := inVM(s)
	n.permit("boot-1")
	n.rebooter.Fail(errors.New("operation not permitted"))
	_, err := n.reconcile()
	n.Expect(err).To(MatchError(ContainSubstring("operation not permitted")))
	message := n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebooting)
	n.Expect(message).To(ContainSubstring("it could not be rebooted: operation not permitted; it is tried again"))

	n.restartAgent()
	n.rebooter.Fail(nil)
	n.reconciled()
	n.Expect(n.rebooter.Requested()).To(Equal(2))
	n.restartAgent()
	n.settle()
	n.expectReady()
}

func rebootInVain(s scenario) {
	n := inVM(s)
	boot := n.rebooter.Boot
	n.rebooter.Boot = func() {
		n.hardware.Update(func(h *sim.Node) { h.GPUs[0].PendingMIG = false }) // a machine that loses what it was told
		boot()
	}
	n.permit("boot-1")
	n.reconciled()
	n.restartAgent()
	n.reconciled()
	message := n.expectCondition(v1alpha1.ConditionApplyStalled, metav1.ConditionTrue, v1alpha1.ReasonRebootInVain)
	n.Expect(message).To(ContainSubstring("it was rebooted, and the MIG mode has not changed all the same"))
	n.again()
	n.Expect(n.rebooter.Requested()).To(Equal(1), "not again, however often it looks")
	n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootInVain)
}

func rebootWaits(s scenario) {
	n := inVM(s)
	n.hardware.Update(func(h *sim.Node) {
		h.GPUs[0].Processes = []gpu.Process{{PID: 7, Name: gpu.MPSServer, Instance: gpu.WholeGPU}}
	})
	n.processes.Set(7, host.Process{Name: gpu.MPSServer, HostPIDs: true})
	n.allocations.hold("train-0", n.uuid(1))
	n.permit("boot-1")
	result := n.reconciled()
	n.Expect(n.rebooter.Requested()).To(BeZero())
	message := n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootRequired)
	n.Expect(message).To(And(
		ContainSubstring("it is rebooted once nobody uses its GPUs, now: container main of pod ml/train-0 on GPU 1"),
		Not(ContainSubstring("mps-server"))), "an MPS server goes with its clients")
	n.Expect(result.RequeueAfter).To(BeNumerically("<", resync))

	n.allocations.hold("train-1", n.uuid(0))
	n.reconciled()
	message = n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootRequired)
	n.Expect(message).To(ContainSubstring("pod ml/train-1 on GPU 0"), "the mode waits for the reboot as before")

	n.allocations.free()
	n.inits = []host.HeldDevice{{ContainerName: host.ContainerName{Namespace: "ml", Pod: "train-2", Container: "fetch"}, Device: n.uuid(1)}}
	n.reconciled()
	message = n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootRequired)
	n.Expect(message).To(ContainSubstring("container fetch of pod ml/train-2 on GPU 1"), "which the kubelet lists for nobody")

	n.inits = nil
	n.reconciled()
	n.Expect(n.rebooter.Requested()).To(Equal(1))
}

func rebootNotAllowed(s scenario) {
	n := inVM(s)
	n.rebooter.Refuse(errors.New("it was started without --allow-reboot"))
	n.permit("boot-1")
	n.reconciled()
	n.again()
	n.Expect(n.get().Status.CanReboot).To(BeFalse())
	message := n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootRequired)
	n.Expect(message).To(HaveSuffix("the agent cannot do it: it was started without --allow-reboot"))
	n.Expect(n.rebooter.Requested()).To(BeZero())
}

func rebootStale(s scenario) {
	n := inVM(s)
	n.permit("boot-1")
	permitted := n.get()
	n.specify(whole(n.uuid(0)))
	_, err := n.controller.Reconcile(n.Context(), permitted)
	n.Expect(err).NotTo(HaveOccurred())
	n.Expect(n.rebooter.Requested()).To(BeZero(), "the cache was late")
	n.settle()
	n.expectReady()
}
