// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"errors"

	"github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func leavesToManager(s scenario) {
	n := s.node("", sim.H100)
	n.settle()
	spec := v1alpha1.GPUNodeSpec{
		PolicyName: "research", MIGActuator: v1alpha1.MIGActuatorMIGManager, MIGConfigName: "gpusharing-5f3a1c",
		Devices: []v1alpha1.DeviceSpec{mig(n.uuid(0), instances("1g.10gb", 1))},
	}
	n.setSpec(spec)
	observed := 0
	n.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpObserve {
			observed++
		}
		return errors.New("the driver is not to be opened")
	}
	n.settle()
	n.Expect(observed).To(gomega.BeZero())
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonMIGManagerPartitioning)).
		To(gomega.ContainSubstring("applies gpusharing-5f3a1c; the driver is left closed"))
	n.Expect(n.get().Status.Devices).To(gomega.HaveLen(1), "as last seen")
	n.expectCondition(v1alpha1.ConditionDiscovered, metav1.ConditionTrue, v1alpha1.ReasonDiscovered)

	n.hardware.Fail = nil
	spec.MIGConfigName = ""
	n.setSpec(spec)
	_, err := n.reconcile()
	n.Expect(err).NotTo(gomega.HaveOccurred())
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonApplying)).
		To(gomega.ContainSubstring("NVIDIA's mig-manager partitions the GPUs of this node"))
	n.Expect(n.hardware.Writes()).To(gomega.BeEmpty(), "what is missing is not the agent's to make")

	n.Expect(n.hardware.SetMIG(n.Context(), n.uuid(0), true)).To(gomega.Succeed())
	n.Expect(n.hardware.CreateInstance(n.Context(), n.uuid(0), "1g.10gb", gpu.Placement{Start: 0, Size: 1})).To(gomega.Succeed())
	n.settle()
	n.expectReady()
}
