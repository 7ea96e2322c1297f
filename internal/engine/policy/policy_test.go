// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"context"
	"errors"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func named(name string, with ...func(*v1alpha1.GPUSharingPolicy)) v1alpha1.GPUSharingPolicy {
	p := v1alpha1.GPUSharingPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(1000, 0))},
		Spec:       v1alpha1.GPUSharingPolicySpec{Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}},
	}
	for _, change := range with {
		change(&p)
	}
	return p
}

func priority(n int32) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Priority = n }
}

func created(seconds int64) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.CreationTimestamp = metav1.NewTime(time.Unix(seconds, 0)) }
}

func deleted(p *v1alpha1.GPUSharingPolicy) {
	p.DeletionTimestamp = &metav1.Time{Time: time.Unix(2000, 0)}
}

func onNodes(s v1alpha1.NodeSelector) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.Spec.NodeSelector = &s }
}

func onGPUs(m v1alpha1.GPUMatch) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.Spec.GPUSelector = &m }
}

func sharing(s v1alpha1.Sharing) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = s }
}

// nodeWith is a node whose agent reports simulated GPUs.
func nodeWith(t *testing.T, models ...sim.Model) policy.Node {
	t.Helper()
	inventory, err := sim.New(models...).Observe(context.Background())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return policy.Node{Name: "node-1", Labels: map[string]string{"pool": "a"}, Devices: plan.Reported(inventory.Devices)}
}

func TestGovern(t *testing.T) {
	requirement := func(operator v1alpha1.NodeSelectorOperator, values ...string) v1alpha1.NodeSelector {
		return v1alpha1.NodeSelector{MatchExpressions: []v1alpha1.NodeSelectorRequirement{{Key: "pool", Operator: operator, Values: values}}}
	}
	for name, c := range map[string]struct {
		policies []v1alpha1.GPUSharingPolicy
		by       string
		over     []string
	}{
		"none":                     {},
		"without a selector":       {policies: []v1alpha1.GPUSharingPolicy{named("p")}, by: "p"},
		"by label":                 {policies: []v1alpha1.GPUSharingPolicy{named("p", onNodes(v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "a"}}))}, by: "p"},
		"by another label":         {policies: []v1alpha1.GPUSharingPolicy{named("p", onNodes(v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "b"}}))}},
		"In":                       {policies: []v1alpha1.GPUSharingPolicy{named("p", onNodes(requirement("In", "a", "b")))}, by: "p"},
		"NotIn":                    {policies: []v1alpha1.GPUSharingPolicy{named("p", onNodes(requirement("NotIn", "a", "b")))}},
		"Exists":                   {policies: []v1alpha1.GPUSharingPolicy{named("p", onNodes(requirement("Exists")))}, by: "p"},
		"DoesNotExist":             {policies: []v1alpha1.GPUSharingPolicy{named("p", onNodes(requirement("DoesNotExist")))}},
		"a value no node can have": {policies: []v1alpha1.GPUSharingPolicy{named("p", onNodes(requirement("In", "not a label value")))}},
		"by product":               {policies: []v1alpha1.GPUSharingPolicy{named("p", onGPUs(v1alpha1.GPUMatch{Products: []string{"NVIDIA-A100-*"}}))}, by: "p"},
		"by another product":       {policies: []v1alpha1.GPUSharingPolicy{named("p", onGPUs(v1alpha1.GPUMatch{Products: []string{"NVIDIA-H100-*"}}))}},
		"by index":                 {policies: []v1alpha1.GPUSharingPolicy{named("p", onGPUs(v1alpha1.GPUMatch{Indexes: []int32{1}}))}, by: "p"},
		"by an index it lacks":     {policies: []v1alpha1.GPUSharingPolicy{named("p", onGPUs(v1alpha1.GPUMatch{Indexes: []int32{2}}))}},
		"the highest priority": {
			policies: []v1alpha1.GPUSharingPolicy{named("a", created(1)), named("b", priority(5)), named("c", priority(-5), created(1))},
			by:       "b", over: []string{"a", "c"},
		},
		"among equals the oldest": {
			policies: []v1alpha1.GPUSharingPolicy{named("a"), named("b", created(999)), named("c")},
			by:       "b", over: []string{"a", "c"},
		},
		"among those the first by name": {
			policies: []v1alpha1.GPUSharingPolicy{named("b"), named("a")}, by: "a", over: []string{"b"},
		},
		"one that is being deleted does not count": {
			policies: []v1alpha1.GPUSharingPolicy{named("a", priority(9), deleted), named("b")}, by: "b",
		},
		"one that selects other nodes is no conflict": {
			policies: []v1alpha1.GPUSharingPolicy{
				named("a"), named("b", priority(1), onNodes(v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "b"}})),
			},
			by: "a",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			governed := policy.Rank(c.policies).Govern(nodeWith(t, sim.A100, sim.A100))
			by := ""
			if governed.By != nil {
				by = governed.By.Name
			}
			var over []string
			for _, p := range governed.Over {
				over = append(over, p.Name)
			}
			g.Expect(by).To(Equal(c.by))
			g.Expect(over).To(Equal(c.over))
		})
	}
}

var (
	slicing = v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4}}
	mps     = v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: 4}}
)

func layouts(names v1alpha1.MIGResourceNames, layouts ...v1alpha1.MIGLayout) v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{ResourceNames: names, Layouts: layouts}}
}

func TestDesiredState(t *testing.T) {
	for name, c := range map[string]struct {
		models    []sim.Model
		with      []func(*v1alpha1.GPUSharingPolicy)
		devices   []v1alpha1.DeviceSharing // by index; nil: not changed
		resources map[string]int64
	}{
		"time-slicing leaves no trace on the GPUs": {
			models: []sim.Model{sim.A100, sim.T4}, with: []func(*v1alpha1.GPUSharingPolicy){sharing(slicing)},
			devices:   []v1alpha1.DeviceSharing{{MIGMode: v1alpha1.MIGModeDisabled}, {MIGMode: v1alpha1.MIGModeDisabled}},
			resources: map[string]int64{"nvidia.com/gpu": 8},
		},
		"layouts by product, the rest whole": {
			models: []sim.Model{sim.A100, sim.H100, sim.T4},
			with: []func(*v1alpha1.GPUSharingPolicy){sharing(layouts(v1alpha1.MIGResourceNamesPerProfile,
				v1alpha1.MIGLayout{GPUs: &v1alpha1.GPUMatch{Products: []string{"*H100*"}}, Fill: "1g"},
				v1alpha1.MIGLayout{
					GPUs:      &v1alpha1.GPUMatch{Products: []string{"*A100*"}},
					Instances: []v1alpha1.MIGInstances{{Profile: "3g", Count: 2, Replicas: 2}},
				}))},
			devices: []v1alpha1.DeviceSharing{
				{MIGMode: v1alpha1.MIGModeEnabled, Instances: []v1alpha1.InstanceCount{{Profile: "3g.20gb", Count: 2}}},
				{MIGMode: v1alpha1.MIGModeEnabled, Instances: []v1alpha1.InstanceCount{{Profile: "1g.10gb", Count: 7}}},
				{MIGMode: v1alpha1.MIGModeDisabled},
			},
			resources: map[string]int64{"nvidia.com/mig-3g.20gb": 4, "nvidia.com/mig-1g.10gb": 7, "nvidia.com/gpu": 1},
		},
		"GPUs that are not selected are not touched, and count": {
			models: []sim.Model{sim.A100, sim.A100},
			with: []func(*v1alpha1.GPUSharingPolicy){
				onGPUs(v1alpha1.GPUMatch{Indexes: []int32{1}}),
				sharing(layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{Fill: "7g"})),
			},
			devices: []v1alpha1.DeviceSharing{
				{}, {MIGMode: v1alpha1.MIGModeEnabled, Instances: []v1alpha1.InstanceCount{{Profile: "7g.40gb", Count: 1}}},
			},
			resources: map[string]int64{"nvidia.com/mig-7g.40gb": 1, "nvidia.com/gpu": 1},
		},
		"MPS with limits of its own": {
			models: []sim.Model{sim.A100}, with: []func(*v1alpha1.GPUSharingPolicy){sharing(v1alpha1.Sharing{
				Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: 4, ActiveThreadPercentage: new(int32(50))},
			})},
			devices: []v1alpha1.DeviceSharing{{MIGMode: v1alpha1.MIGModeDisabled, MPS: &v1alpha1.MPSDaemon{
				ResourceName: "nvidia.com/gpu", Owner: v1alpha1.MPSDaemonOwnerGPUSharing, ActiveThreadPercentage: 50, PinnedMemoryLimit: resource.NewQuantity(10<<30, resource.BinarySI),
			}}},
			resources: map[string]int64{"nvidia.com/gpu": 4},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			p, n := named("p", c.with...), nodeWith(t, c.models...)
			desired, err := policy.DesiredState(&p, n)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(desired.Policy).To(Equal("p"))
			g.Expect(desired.Config.Resources).To(Equal(c.resources))
			resolved := make([]v1alpha1.DeviceSharing, len(n.Devices))
			for _, d := range desired.Devices {
				for i := range n.Devices {
					if n.Devices[i].UUID == d.UUID {
						resolved[i] = d.Sharing
					}
				}
			}
			g.Expect(resolved).To(Equal(c.devices))
			again, err := policy.DesiredState(&p, n)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(again.Hash()).To(Equal(desired.Hash()))
		})
	}
}

func renamed(s v1alpha1.Sharing) v1alpha1.Sharing {
	s.Advertise = &v1alpha1.Advertise{RenameByDefault: new(true)}
	return s
}

// wholeShared time-slices the GPUs beside the instances.
func wholeShared(s v1alpha1.Sharing) v1alpha1.Sharing {
	s.MIG.WholeGPUs = &v1alpha1.MIGWholeGPUs{Replicas: 4}
	return s
}

func TestDesiredStateRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		models      []sim.Model
		partitioned []int // the GPUs that have an instance 1g.5gb already
		labels      map[string]string
		workload    string // of spec.sandboxWorkloads
		with        []func(*v1alpha1.GPUSharingPolicy)
		reason      string
		message     string
	}{
		"a node that has opted out": {
			models: []sim.Model{sim.A100}, labels: map[string]string{"nvidia.com/gpu.deploy.operands": "false"},
			reason: v1alpha1.ReasonNodeOptedOut, message: "nvidia.com/gpu.deploy.operands=false",
		},
		"a node of virtual machines": {
			models: []sim.Model{sim.A100}, labels: map[string]string{"nvidia.com/gpu.workload.config": "vm-passthrough"}, workload: "container",
			reason: v1alpha1.ReasonNodeOptedOut, message: "nvidia.com/gpu.workload.config=vm-passthrough",
		},
		"a node in a cluster of virtual machines": {
			models: []sim.Model{sim.A100}, workload: "vm-vgpu",
			reason: v1alpha1.ReasonNodeOptedOut, message: "spec.sandboxWorkloads.defaultWorkload of the ClusterPolicy is vm-vgpu",
		},
		"time-slicing of some GPUs": {
			models: []sim.Model{sim.A100, sim.T4},
			with:   []func(*v1alpha1.GPUSharingPolicy){sharing(slicing), onGPUs(v1alpha1.GPUMatch{Indexes: []int32{0}})},
			reason: v1alpha1.ReasonPartialSelection, message: "gpuSelector leaves out GPU 1 (Tesla-T4)",
		},
		"MPS of some GPUs": {
			models: []sim.Model{sim.A100, sim.T4},
			with:   []func(*v1alpha1.GPUSharingPolicy){sharing(mps), onGPUs(v1alpha1.GPUMatch{Products: []string{"Tesla-T4"}})},
			reason: v1alpha1.ReasonPartialSelection, message: "under MPS",
		},
		"a whole GPU left out where whole GPUs are time-sliced beside instances": {
			models: []sim.Model{sim.A100, sim.T4},
			with: []func(*v1alpha1.GPUSharingPolicy){
				sharing(wholeShared(layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{Fill: "1g"}))),
				onGPUs(v1alpha1.GPUMatch{Indexes: []int32{0}}),
			},
			reason: v1alpha1.ReasonPartialSelection,
			message: "gpuSelector leaves out GPU 1 (Tesla-T4), but NVIDIA's device plugin shares all GPUs of a node alike under " +
				"replicas of sharing.mig; select all GPUs of the node, or leave the node out of nodeSelector",
		},
		"instances left out where those of the same profile are time-sliced": {
			models: []sim.Model{sim.A100, sim.A100}, partitioned: []int{1},
			with: []func(*v1alpha1.GPUSharingPolicy){
				sharing(layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{
					Fill: "1g", Replicas: 2,
				})),
				onGPUs(v1alpha1.GPUMatch{Indexes: []int32{0}}),
			},
			reason: v1alpha1.ReasonPartialSelection, message: "gpuSelector leaves out GPU 1 (NVIDIA-A100-SXM4-40GB)",
		},
		"virtual GPUs": {
			models: []sim.Model{sim.VGPU}, with: []func(*v1alpha1.GPUSharingPolicy){sharing(slicing)},
			reason: v1alpha1.ReasonVirtualGPUNotSupported, message: "virtual",
		},
		"a GPU without MIG": {
			models: []sim.Model{sim.T4},
			with:   []func(*v1alpha1.GPUSharingPolicy){sharing(layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{Fill: "1g"}))},
			reason: v1alpha1.ReasonMIGNotSupported, message: "Tesla-T4",
		},
		"single where a GPU is not selected": {
			models: []sim.Model{sim.A100, sim.A100},
			with: []func(*v1alpha1.GPUSharingPolicy){
				sharing(layouts(v1alpha1.MIGResourceNamesUniform, v1alpha1.MIGLayout{Fill: "1g"})), onGPUs(v1alpha1.GPUMatch{Indexes: []int32{0}}),
			},
			reason: v1alpha1.ReasonMixedInstances, message: "GPU 1 (NVIDIA-A100-SXM4-40GB) stays whole",
		},
		"more MPS clients than an old GPU serves": {
			models: []sim.Model{sim.V100},
			with: []func(*v1alpha1.GPUSharingPolicy){sharing(v1alpha1.Sharing{
				Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: 17},
			})},
			reason: v1alpha1.ReasonMPSClientLimitExceeded, message: "16",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			p, n := named("p", c.with...), nodeWith(t, c.models...)
			n.Labels, n.Workload = c.labels, c.workload
			for _, i := range c.partitioned {
				n.Devices[i].Sharing = v1alpha1.DeviceSharing{
					MIGMode: v1alpha1.MIGModeEnabled, Instances: []v1alpha1.InstanceCount{{Profile: "1g.5gb", Count: 1}},
				}
				n.Devices[i].Instances = []v1alpha1.InstanceStatus{{ID: 1, Profile: "1g.5gb"}}
			}
			_, err := policy.DesiredState(&p, n)
			var problem *plan.Problem
			g.Expect(errors.As(err, &problem)).To(BeTrue(), "%v", err)
			g.Expect(problem.Reason).To(Equal(c.reason), problem.Message)
			g.Expect(problem.Message).To(ContainSubstring(c.message))
		})
	}
}

// TestTheWorkloadOfANodeCountsAsForTheGPUOperator: only with spec.sandboxWorkloads on, and only if it is one that the
// GPU Operator knows.
func TestTheWorkloadOfANodeCountsAsForTheGPUOperator(t *testing.T) {
	for name, c := range map[string]struct {
		label, workload string
		out             bool
	}{
		"sandbox workloads are off":                   {label: "vm-passthrough"},
		"a label that the GPU Operator does not know": {label: "vms", workload: "container"},
		"the same where the default is another":       {label: "vms", workload: "vm-vgpu", out: true},
		"containers":                                  {label: "container", workload: "vm-passthrough"},
		"containers by default":                       {workload: "container"},
		"virtual machines":                            {label: "vm-vgpu", workload: "container", out: true},
	} {
		problem := policy.OptedOut(map[string]string{"nvidia.com/gpu.workload.config": c.label}, c.workload)
		NewWithT(t).Expect(problem != nil).To(Equal(c.out), name)
	}
}

// TestBothStacks: the same policies on the same GPUs, where NVIDIA's device plugin serves them and where its DRA driver
// does. Pods request the same resources on both, or there is a reason.
func TestBothStacks(t *testing.T) {
	slices := func(replicas int32, change func(*v1alpha1.TimeSlicing)) v1alpha1.Sharing {
		s := v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: replicas}}
		if change != nil {
			change(s.TimeSlicing)
		}
		return s
	}
	managed := layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{Fill: "1g"})
	managed.MIG.Actuator = v1alpha1.MIGActuatorMIGManager
	for name, c := range map[string]struct {
		models    []sim.Model
		sharing   v1alpha1.Sharing
		resources map[string]int64 // on both
		refused   string           // by the driver: part of the message
		interval  bool             // which the agent sets beside the device plugin alone
	}{
		"Exclusive": {
			models: []sim.Model{sim.A100, sim.T4}, sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}, resources: map[string]int64{"nvidia.com/gpu": 2},
		},
		"TimeSlicing": {models: []sim.Model{sim.A100, sim.T4}, sharing: slices(4, nil), resources: map[string]int64{"nvidia.com/gpu": 8}},
		"TimeSlicing with an interval": {
			models: []sim.Model{sim.T4}, sharing: slices(4, func(t *v1alpha1.TimeSlicing) { t.Interval = v1alpha1.TimeSliceIntervalLong }),
			resources: map[string]int64{"nvidia.com/gpu": 4}, interval: true,
		},
		"TimeSlicing, renamed": {
			models: []sim.Model{sim.T4}, sharing: renamed(slices(4, nil)),
			resources: map[string]int64{"nvidia.com/gpu.shared": 4}, refused: "no renameByDefault",
		},
		"TimeSlicing with a memory guard": {
			models: []sim.Model{sim.T4}, sharing: slices(4, func(t *v1alpha1.TimeSlicing) { t.Memory = &v1alpha1.TimeSlicedMemory{} }),
			resources: map[string]int64{"nvidia.com/gpu": 4},
		},
		"MPS": {models: []sim.Model{sim.A100}, sharing: mps, resources: map[string]int64{"nvidia.com/gpu": 4}, refused: "no MPS"},
		"MIG": {
			models: []sim.Model{sim.A100, sim.T4},
			sharing: layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{
				GPUs: &v1alpha1.GPUMatch{Products: []string{"*A100*"}}, Instances: []v1alpha1.MIGInstances{{Profile: "1g", Count: 2}, {Profile: "1g.5gb+me", Count: 1}, {Profile: "3g", Count: 1}},
			}),
			resources: map[string]int64{"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-1g.5gb.me": 1, "nvidia.com/mig-3g.20gb": 1, "nvidia.com/gpu": 1},
		},
		"MIG, single": {
			models: []sim.Model{sim.A100}, sharing: layouts(v1alpha1.MIGResourceNamesUniform, v1alpha1.MIGLayout{Fill: "1g"}),
			resources: map[string]int64{"nvidia.com/gpu": 7}, refused: "no resourceNames Uniform",
		},
		"MIG by NVIDIA's mig-manager": {
			models: []sim.Model{sim.A100}, sharing: managed, resources: map[string]int64{"nvidia.com/mig-1g.5gb": 7}, refused: "no actuator MIGManager",
		},
		"MIG with shared instances": {
			models: []sim.Model{sim.A100},
			sharing: layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{
				Fill: "1g", Replicas: 2,
			}),
			resources: map[string]int64{"nvidia.com/mig-1g.5gb": 14}, refused: "no replicas of 1g.5gb",
		},
		"MIG beside shared GPUs": {
			models:    []sim.Model{sim.A100, sim.T4},
			sharing:   wholeShared(layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{GPUs: &v1alpha1.GPUMatch{Products: []string{"*A100*"}}, Fill: "1g"})),
			resources: map[string]int64{"nvidia.com/mig-1g.5gb": 7, "nvidia.com/gpu": 4}, refused: "no wholeGPUs",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			p, n := named("p", sharing(c.sharing)), nodeWith(t, c.models...)
			plugin, err := policy.DesiredState(&p, n)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(plugin.Config.Resources).To(Equal(c.resources))
			n.Stack = dra.DRADriver
			driver, err := policy.DesiredState(&p, n)
			if c.refused != "" {
				var problem *plan.Problem
				g.Expect(errors.As(err, &problem)).To(BeTrue(), "%v", err)
				g.Expect(problem.Reason).To(Equal(v1alpha1.ReasonNotOnDRA))
				g.Expect(problem.Message).To(ContainSubstring(c.refused))
				return
			}
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(driver.Config.Resources).To(Equal(c.resources))
			if c.interval {
				g.Expect(driver.Devices).NotTo(Equal(plugin.Devices))
				plugin.Devices[0].Sharing.TimeSliceInterval = ""
			}
			g.Expect(driver.Devices).To(Equal(plugin.Devices), "the agent partitions alike")
			g.Expect(driver.Config.Data).To(BeEmpty())
			g.Expect(dra.IsConfig(driver.Config.Key)).To(BeTrue())
			g.Expect(dra.IsConfig(plugin.Config.Key)).To(BeFalse())
			g.Expect(driver.Hash()).NotTo(Equal(plugin.Hash()), "to move a node from one to the other is a change")
		})
	}
	t.Run("the published shares count where a policy asks for none", func(t *testing.T) {
		g := NewWithT(t)
		desiredOf := func(s v1alpha1.Sharing, published int64) deviceplugin.Config {
			p, n := named("p", sharing(s)), nodeWith(t, sim.A100, sim.T4, sim.T4)
			n.Stack, n.Shares = dra.DRADriver, published
			desired, err := policy.DesiredState(&p, n)
			g.Expect(err).NotTo(HaveOccurred())
			return desired.Config
		}
		some := layouts(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{GPUs: &v1alpha1.GPUMatch{Products: []string{"*A100*"}}, Fill: "1g"})
		for published, whole := range map[int64]int64{0: 2, 1: 2, 4: 8} { // 0: not known, or any number
			is := desiredOf(some, published)
			g.Expect(is.Resources).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7, "nvidia.com/gpu": whole}))
			g.Expect(is.Key).To(Equal(desiredOf(some, 0).Key), "the number is no part of what is asked of the node")
		}
		g.Expect(desiredOf(some, 4).Replicas).To(Equal(map[string]int32{"nvidia.com/gpu": 4}))
		g.Expect(desiredOf(some, 1).Replicas).To(BeEmpty())
		for _, s := range []v1alpha1.Sharing{slicing, {Strategy: v1alpha1.StrategyExclusive}} {
			g.Expect(desiredOf(s, 16)).To(Equal(desiredOf(s, 0)), "it asks for a number of its own")
		}
	})
	t.Run("a selection of some GPUs is refused on both", func(t *testing.T) {
		for stack, program := range map[dra.Stack]string{dra.DevicePlugin: "device plugin", dra.DRADriver: "DRA driver"} {
			p, n := named("p", sharing(slicing), onGPUs(v1alpha1.GPUMatch{Indexes: []int32{0}})), nodeWith(t, sim.A100, sim.T4)
			n.Stack = stack
			_, err := policy.DesiredState(&p, n)
			NewWithT(t).Expect(err).To(MatchError(ContainSubstring("NVIDIA's " + program + " shares all GPUs of a node alike")))
		}
	})
}

// TestGPUsFollowDemand within what the policy allows, under one of two keys that name the same content.
func TestGPUsFollowDemand(t *testing.T) {
	g := NewWithT(t)
	p := named("a", sharing(v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		ResourceNames: v1alpha1.MIGResourceNamesPerProfile,
		Layouts: []v1alpha1.MIGLayout{{Fill: "1g.5gb", OnDemand: &v1alpha1.MIGOnDemand{
			Mode: v1alpha1.OnDemandModeApply, Profiles: []v1alpha1.MIGProfile{"3g"}, IdleSeconds: 300,
		}}},
	}}))
	n := nodeWith(t, sim.A100)
	uuid := n.Devices[0].UUID
	decide := func(profile string, count int32) policy.Desired {
		n.Demand = []v1alpha1.GPUDemand{{UUID: uuid, Instances: []v1alpha1.InstanceCount{{Profile: profile, Count: count}}}}
		w, err := policy.DesiredState(&p, n)
		g.Expect(err).NotTo(HaveOccurred())
		return w
	}
	rests := decide("none", 1)
	g.Expect(rests.Devices[0].Sharing.Instances).To(Equal([]v1alpha1.InstanceCount{{Profile: "1g.5gb", Count: 7}}))
	g.Expect(decide("2g.10gb", 1).Devices).To(Equal(rests.Devices), "2g is not allowed")
	g.Expect(decide("3g.20gb", 3).Devices).To(Equal(rests.Devices), "3 do not fit")
	n.ConfigName, n.Asked = rests.Config.Key, rests.Devices
	g.Expect(decide("none", 1)).To(Equal(rests))
	follows := decide("3g.20gb", 2)
	g.Expect(follows.Config.Resources).To(Equal(map[string]int64{"nvidia.com/mig-3g.20gb": 2}))
	g.Expect([]string{follows.Config.Twin, follows.Config.Key}).To(Equal([]string{rests.Config.Key, rests.Config.Twin}), "the other key")
	g.Expect(follows.Config.Data).To(Equal(rests.Config.Data))
	n.ConfigName, n.Asked = follows.Config.Key, follows.Devices
	g.Expect(decide("3g.20gb", 2)).To(Equal(follows))
	g.Expect(decide("none", 1)).To(Equal(rests))
	p.Spec.Sharing.MIG.Layouts[0].OnDemand.Mode = v1alpha1.OnDemandModeAdvise
	g.Expect(decide("3g.20gb", 2).Devices).To(Equal(rests.Devices), "mode Advise changes nothing")
	g.Expect(decide("3g.20gb", 2).Config.Twin).To(BeEmpty())
}
