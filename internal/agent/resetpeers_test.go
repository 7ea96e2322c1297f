// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"strings"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// resetsTogether: without a fabric manager the GPUs behind NVSwitches are reset in one command, once all of them are
// idle.
func resetsTogether(s scenario) {
	n := s.node("", sim.A100, sim.A100)
	n.hardware.Update(func(h *sim.Node) { h.NVSwitch = true })
	n.allocations.hold("train", n.uuid(1))
	n.specify(mig(n.uuid(0), instances("1g.5gb", 7)))
	_, err := n.reconcile()
	n.Expect(err).NotTo(HaveOccurred(), "it is no failure")
	n.Expect(n.get().Status.Devices[0].ResetPeers).To(Equal([]string{n.uuid(1)}), "which the controller drains")

	n.reconciled()
	message := n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)
	n.Expect(message).To(ContainSubstring("ml/train"), "a pod on the other GPU")

	n.allocations.free()
	n.settle()
	n.expectReady()
	n.Expect(n.profiles(0)).To(HaveLen(7))
	n.Expect(strings.Join(n.hardware.Writes(), "\n")).To(ContainSubstring("Reset " + n.uuid(0) + " " + n.uuid(1)))
}

// namesModule: nvidia_drm keeps a GPU open for good, so that trying again does not help.
func namesModule(s scenario) {
	n := s.node("", sim.A100)
	n.hardware.Update(func(h *sim.Node) { h.DRM = true })
	n.specify(mig(n.uuid(0), instances("1g.5gb", 7)))
	n.reconciled()
	message := n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootRequired)
	n.Expect(message).To(ContainSubstring("the kernel module nvidia_drm keeps the GPU open: unload it on the node (modprobe -r nvidia_drm)"))

	n.hardware.Update(func(h *sim.Node) { h.DRM = false })
	n.settle()
	n.expectReady()
	n.expectNoCondition(v1alpha1.ConditionRebootRequired)
}
