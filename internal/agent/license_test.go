// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestAnUnlicensedGuestIsNamed(t *testing.T) {
	g := NewWithT(t)
	node, err := sim.NewNode("a", sim.VGPU, sim.VGPU)
	g.Expect(err).NotTo(HaveOccurred())
	shown := func() []v1alpha1.DeviceStatus { return plan.Reported(node.Observe().Devices) }

	g.Expect(shown()).To(HaveEach(And(HaveField("Virtual", true), HaveField("License", v1alpha1.LicenseStateLicensed))))
	g.Expect(licenseMissing(shown()).Status).To(Equal(metav1.ConditionFalse))

	node.GPUs[1].Unlicensed = true
	c := licenseMissing(shown())
	g.Expect(shown()[1].License).To(Equal(v1alpha1.LicenseStateUnlicensed))
	g.Expect(c.Status).To(Equal(metav1.ConditionTrue))
	g.Expect(c.Reason).To(Equal(v1alpha1.ReasonVGPUUnlicensed))
	g.Expect(c.Message).To(And(HavePrefix("GPU 1 (GRID-A100-20C): no vGPU license"), ContainSubstring("licensingConfig")))

	whole, err := sim.NewNode("a", sim.T4)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(plan.Reported(whole.Observe().Devices)[0].License).To(BeEmpty())
}

// TestSinceWhenNobodyHasAnInstanceIsReported: since a pod or process was seen to have it last, or since it was seen first.
func TestSinceWhenNobodyHasAnInstanceIsReported(t *testing.T) {
	g := NewWithT(t)
	start := time.Date(2026, 11, 26, 10, 0, 0, 5e8, time.UTC)
	at := func(minutes int) time.Time { return start.Add(time.Duration(minutes) * time.Minute) }
	var was []v1alpha1.DeviceStatus
	look := func(minutes int, pods, processes []int) (times []string) {
		d := gpu.Device{State: gpu.State{Instances: []gpu.Instance{{ID: 1, UUID: "MIG-1"}, {ID: 2, UUID: "MIG-2"}, {ID: 3}}}}
		d.Holders = []gpu.Holder{{Namespace: "a", Pod: "whole", Instance: gpu.WholeGPU}}
		for _, id := range pods {
			for n := range 64 { // as many as the status lists
				d.Holders = append(d.Holders, gpu.Holder{Namespace: "a", Pod: fmt.Sprint("p", n), Instance: id})
			}
		}
		for _, id := range processes { // the status lists a process with its first instance
			d.Processes = append(d.Processes, gpu.Process{PID: 1, Instance: id})
		}
		is := plan.Reported([]gpu.Device{d})
		sinceHeld(was, is, []gpu.Device{d}, at(minutes))
		was = is
		for _, i := range was[0].Instances {
			if i.LastHeldTime.IsZero() {
				times = append(times, "")
				continue
			}
			times = append(times, i.LastHeldTime.UTC().Format(time.TimeOnly))
		}
		return times
	}
	g.Expect(look(0, nil, nil)).To(Equal([]string{"10:00:00", "10:00:00", ""}), "seen for the first time; one that is not whole has no time")
	g.Expect(look(1, []int{1}, nil)).To(Equal([]string{"", "10:00:00", ""}))
	g.Expect(look(2, []int{1}, []int{2})).To(Equal([]string{"", "", ""}))
	g.Expect(look(3, nil, []int{2})).To(Equal([]string{"10:03:00", "", ""}))
	g.Expect(look(9, nil, nil)).To(Equal([]string{"10:03:00", "10:09:00", ""}))
	g.Expect(look(10, []int{1, 2}, nil)).To(Equal([]string{"", "", ""}), "one whose pods the status has no room for")
	g.Expect(look(11, nil, []int{1, 2})).To(Equal([]string{"", "", ""}), "a process that has two")
	g.Expect(look(12, nil, nil)).To(Equal([]string{"10:12:00", "10:12:00", ""}))
	g.Expect(look(7, nil, nil)).To(Equal([]string{"10:07:00", "10:07:00", ""}), "the clock was ahead, and is not any more")
	g.Expect(look(8, []int{1, 2}, nil)).To(Equal([]string{"", "", ""}))
	g.Expect(look(9, nil, nil)).To(Equal([]string{"10:09:00", "10:09:00", ""}))
	was[0].Instances[0].LastHeldTime = metav1.NewTime(at(3).Truncate(time.Second).Local())
	g.Expect(look(10, nil, nil)).To(Equal([]string{"10:03:00", "10:09:00", ""}), "an agent that starts anew has it from the API")
}
