// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
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

func TestMetricsOfSteps(t *testing.T) {
	g := NewWithT(t)
	registry := prometheus.NewPedanticRegistry()
	m := newMetrics()
	g.Expect(m.register(registry)).To(Succeed())
	second := newMetrics()
	g.Expect(second.register(registry)).To(Succeed())

	steps := plan.Diff(gpu.Device{MIGCapable: true}, gpu.State{MIG: true})
	g.Expect(steps).To(HaveLen(1))
	m.took(steps[0], 2*time.Second, nil)
	second.took(steps[0], time.Second, errors.New("busy"))
	g.Expect(testutil.CollectAndCount(m.steps)).To(Equal(2), "one that succeeded, one that failed")
	families, err := registry.Gather()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(families[0].GetName()).To(Equal("gpusharing_agent_step_duration_seconds"))
	g.Expect(families[0].GetMetric()[0].String()).To(ContainSubstring(`value:"setMIG"`))
	problems, err := testutil.GatherAndLint(registry)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(problems).To(BeEmpty())
}

func TestTheInstanceOfAClaimIsFoundByItsPlace(t *testing.T) {
	split := gpu.Device{
		Minor:    1,
		Profiles: []gpu.Profile{{Name: "1g.5gb", ID: 19}, {Name: "1g.5gb+me", ID: 20}, {Name: "3g.20gb", ID: 9}},
		State: gpu.State{MIG: true, Instances: []gpu.Instance{
			{ID: 7, Profile: "1g.5gb", Placement: gpu.Placement{Start: 0, Size: 1}},
			{ID: 8, Profile: "1g.5gb+me", Placement: gpu.Placement{Start: 1, Size: 1}},
			{ID: 2, Profile: "3g.20gb", Placement: gpu.Placement{Start: 4, Size: 4}},
		}},
	}
	whole, unknown := gpu.Device{Minor: 1}, split
	unknown.Minor = -1
	all := []int{gpu.WholeGPU, 7, 8, 2}
	for title, c := range map[string]struct {
		device gpu.Device
		name   string
		want   []int
	}{
		"a GPU":                                      {whole, "gpu-1", []int{gpu.WholeGPU}},
		"another GPU":                                {whole, "gpu-0", nil},
		"another GPU, whose number begins alike":     {whole, "gpu-10", nil},
		"an instance":                                {split, "gpu-1-mig-1g5gb-19-0", []int{7}},
		"an instance with a dash in its profile":     {split, "gpu-1-mig-1g5gb-me-20-1", []int{8}},
		"an instance that begins later":              {split, "gpu-1-mig-3g20gb-9-4", []int{2}},
		"an instance of another GPU":                 {split, "gpu-0-mig-1g5gb-19-0", nil},
		"an instance that is gone":                   {split, "gpu-1-mig-1g5gb-19-2", all},
		"an instance in whose place is another":      {split, "gpu-1-mig-2g10gb-14-0", all},
		"a GPU that is in MIG mode by now":           {split, "gpu-1", all},
		"a name that the driver does not have today": {split, "gpu-vfio-0", all},
		"a GPU of unknown number":                    {unknown, "gpu-0", all},
	} {
		t.Run(title, func(t *testing.T) {
			a := Allocation{Device: c.name, Claim: "ml/claim"}
			NewWithT(t).Expect(held(c.device, a)).To(Equal(c.want))
		})
	}
}
