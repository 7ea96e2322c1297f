// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"errors"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func timed(uuid string, interval v1alpha1.TimeSliceInterval) v1alpha1.DeviceSpec {
	return v1alpha1.DeviceSpec{UUID: uuid, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled, TimeSliceInterval: interval}}
}

// timeSlice is that of the first GPU.
func (n *node) timeSlice() (slice gpu.TimeSlice) {
	n.hardware.Update(func(s *sim.Node) { slice = s.GPUs[0].Slice })
	return slice
}

// setByHand is what nvidia-smi compute-policy does on the node.
func (n *node) setByHand(slice gpu.TimeSlice) {
	n.hardware.Update(func(s *sim.Node) { n.Expect(s.SetTimeSlice(s.GPUs[0].UUID, slice)).To(Succeed()) })
}

// requestTimed asks for an interval, the former one recorded.
func (n *node) requestTimed(interval, former v1alpha1.TimeSliceInterval) {
	n.setSpec(v1alpha1.GPUNodeSpec{
		PolicyName: "research", Devices: []v1alpha1.DeviceSpec{timed(n.uuid(0), interval)},
		Baseline: &v1alpha1.Baseline{Devices: []v1alpha1.DeviceSpec{timed(n.uuid(0), former)}},
	})
}

func setsTimeSlice(s scenario) {
	n := s.node("", sim.T4)
	n.setByHand(gpu.TimeSliceMedium)
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 1, Name: "python3", Instance: gpu.WholeGPU})).To(Succeed())
	n.specify(timed(n.uuid(0), v1alpha1.TimeSliceIntervalShort))
	n.settle()
	n.Expect(n.timeSlice()).To(Equal(gpu.TimeSliceMedium))
	n.Expect(n.get().Status.Devices[0].Sharing.TimeSliceInterval).To(Equal(v1alpha1.TimeSliceIntervalMedium), "reported, to be recorded")
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonApplying)).
		To(ContainSubstring("is set once the controller has recorded the former one"))

	n.requestTimed(v1alpha1.TimeSliceIntervalShort, v1alpha1.TimeSliceIntervalMedium)
	n.settle()
	n.expectReady()
	n.Expect(n.timeSlice()).To(Equal(gpu.TimeSliceShort), "while a process uses the GPU")
	n.Expect(n.get().Status.Devices[0].Sharing.TimeSliceInterval).To(Equal(v1alpha1.TimeSliceIntervalShort))

	n.hardware.Reboot()
	n.processes.Reboot("boot-2")
	n.restartAgent()
	n.settle()
	n.Expect(n.timeSlice()).To(Equal(gpu.TimeSliceShort))

	n.specify()
	n.settle()
	n.Expect(n.get().Status.Devices[0].Sharing.TimeSliceInterval).To(BeEmpty())
}

func restoresBeforeMIG(s scenario) {
	n := s.node("", sim.H100)
	n.requestTimed(v1alpha1.TimeSliceIntervalShort, v1alpha1.TimeSliceIntervalMedium)
	n.settle()
	n.Expect(n.timeSlice()).To(Equal(gpu.TimeSliceShort))
	former := mig(n.uuid(0), instances("1g.10gb", 1))
	former.Sharing.TimeSliceInterval = v1alpha1.TimeSliceIntervalMedium
	n.specify(former)
	n.settle()
	n.expectReady()
	n.Expect(n.timeSlice()).To(Equal(gpu.TimeSliceMedium))
}

func noTimeSlice(s scenario) {
	n := s.node("", sim.VGPU)
	n.specify(timed(n.uuid(0), v1alpha1.TimeSliceIntervalLong))
	n.settle()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplyStalled, metav1.ConditionTrue, v1alpha1.ReasonTimeSliceNotSupported)).
		To(ContainSubstring("Remove sharing.timeSlicing.interval"))
	n.Expect(n.hardware.Writes()).To(BeEmpty())
}

func leavesTimeSlice(s scenario) {
	n := s.node("", sim.T4)
	n.requestTimed(v1alpha1.TimeSliceIntervalShort, v1alpha1.TimeSliceIntervalDefault)
	n.settle()
	for range 3 {
		n.setByHand(gpu.TimeSliceLong)
		n.settle()
		n.Expect(n.timeSlice()).To(Equal(gpu.TimeSliceShort))
		n.clock.Step(time.Minute)
	}
	n.setByHand(gpu.TimeSliceLong)
	n.settle()
	n.Expect(n.timeSlice()).To(Equal(gpu.TimeSliceLong))
	n.Expect(n.expectCondition(v1alpha1.ConditionApplyStalled, metav1.ConditionTrue, v1alpha1.ReasonChangedByOthers)).
		To(ContainSubstring("now with time-slice interval Long"))
}

func readsNoTimeSlice(s scenario) {
	n := s.node("", sim.T4)
	n.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpTimeSlices {
			return errors.New("nvidia-smi is run")
		}
		return nil
	}
	n.specify(timed(n.uuid(0), ""))
	n.settle()
	n.expectReady()
	n.specify(timed(n.uuid(0), v1alpha1.TimeSliceIntervalShort))
	_, err := n.reconcile()
	n.Expect(err).To(MatchError(ContainSubstring("nvidia-smi is run")))
}

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
	n.Expect(observed).To(BeZero())
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonMIGManagerPartitioning)).
		To(ContainSubstring("applies gpusharing-5f3a1c; the driver is left closed"))
	n.Expect(n.get().Status.Devices).To(HaveLen(1), "as last seen")
	n.expectCondition(v1alpha1.ConditionDiscovered, metav1.ConditionTrue, v1alpha1.ReasonDiscovered)

	n.hardware.Fail = nil
	spec.MIGConfigName = ""
	n.setSpec(spec)
	n.reconciled()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonApplying)).
		To(ContainSubstring("NVIDIA's mig-manager partitions the GPUs of this node"))
	n.Expect(n.hardware.Writes()).To(BeEmpty(), "what is missing is not the agent's to make")

	n.Expect(n.hardware.SetMIG(n.Context(), n.uuid(0), true)).To(Succeed())
	n.Expect(n.hardware.CreateInstance(n.Context(), n.uuid(0), "1g.10gb", gpu.Placement{Start: 0, Size: 1})).To(Succeed())
	n.settle()
	n.expectReady()
}
