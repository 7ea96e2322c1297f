// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func observed(t *testing.T, models ...sim.Model) []gpu.Device {
	t.Helper()
	return newWorld(models...).devices(t)
}

func exclusive() v1alpha1.Sharing { return v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive} }

func timeSlicing() v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4}}
}

func shareOf(memory string) v1alpha1.Sharing {
	s := timeSlicing()
	s.TimeSlicing.Memory = &v1alpha1.TimeSlicedMemory{PerReplica: new(resource.MustParse(memory))}
	return s
}

func mps(m v1alpha1.MPS) v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &m}
}

func mixed(layouts ...v1alpha1.MIGLayout) v1alpha1.Sharing {
	return v1alpha1.Sharing{
		Strategy: v1alpha1.StrategyMIG,
		MIG:      &v1alpha1.MIG{ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: layouts},
	}
}

func single(layouts ...v1alpha1.MIGLayout) v1alpha1.Sharing {
	s := mixed(layouts...)
	s.MIG.ResourceNames = v1alpha1.MIGResourceNamesUniform
	return s
}

func instances(list ...v1alpha1.MIGInstances) v1alpha1.MIGLayout {
	return v1alpha1.MIGLayout{Instances: list}
}

func ask(profile v1alpha1.MIGProfile, n int32) v1alpha1.MIGInstances {
	return v1alpha1.MIGInstances{Profile: profile, Count: n}
}

func fill(profile v1alpha1.MIGProfile) v1alpha1.MIGLayout { return v1alpha1.MIGLayout{Fill: profile} }

func products(l v1alpha1.MIGLayout, patterns ...string) v1alpha1.MIGLayout {
	if l.GPUs == nil {
		l.GPUs = &v1alpha1.GPUMatch{}
	}
	l.GPUs.Products = patterns
	return l
}

func indexes(l v1alpha1.MIGLayout, list ...int32) v1alpha1.MIGLayout {
	if l.GPUs == nil {
		l.GPUs = &v1alpha1.GPUMatch{}
	}
	l.GPUs.Indexes = list
	return l
}

func asks(profile v1alpha1.MIGProfile, count, replicas int32) v1alpha1.MIGInstances {
	return v1alpha1.MIGInstances{Profile: profile, Count: count, Replicas: replicas}
}

// replicated gives replicas to the instances of a layout: to those of fill, or to the first.
func replicated(l v1alpha1.MIGLayout, n int32) v1alpha1.MIGLayout {
	if l.Fill != "" {
		l.Replicas = n
	} else {
		l.Instances[0].Replicas = n
	}
	return l
}

func renamed(s v1alpha1.Sharing) v1alpha1.Sharing {
	s.Advertise = &v1alpha1.Advertise{RenameByDefault: new(true)}
	return s
}

// wholeShared time-slices the GPUs that no layout is for.
func wholeShared(s v1alpha1.Sharing, replicas int32) v1alpha1.Sharing {
	s.MIG.WholeGPUs = &v1alpha1.MIGWholeGPUs{Replicas: replicas}
	return s
}

// short writes the normal form of a GPU.
func short(s v1alpha1.DeviceSharing) string {
	if s.MPS != nil {
		return fmt.Sprintf("%s %s MPS %s %s %d%% %d MiB", s.MIGMode, parts(s), s.MPS.ResourceName, s.MPS.Owner,
			s.MPS.ActiveThreadPercentage, plan.MiB(s.MPS.PinnedMemoryLimit))
	}
	return strings.TrimSpace(fmt.Sprintf("%s %s", s.MIGMode, parts(s)))
}

func parts(s v1alpha1.DeviceSharing) string {
	list := make([]string, 0, len(s.Instances))
	for _, i := range s.Instances {
		list = append(list, fmt.Sprintf("%d×%s", i.Count, i.Profile))
	}
	return strings.Join(list, "+")
}

func TestResolve(t *testing.T) {
	cases := map[string]struct {
		models  []sim.Model
		sharing v1alpha1.Sharing
		want    []string
	}{
		"no GPU selected": {sharing: mixed(fill("1g")), want: []string{}},
		"exclusive GPUs are whole, virtual ones too": {
			models: []sim.Model{sim.A100, sim.VGPU}, sharing: exclusive(), want: []string{"Disabled", "Disabled"},
		},
		"time-slicing leaves GPUs whole": {
			models: []sim.Model{sim.A100, sim.T4}, sharing: timeSlicing(), want: []string{"Disabled", "Disabled"},
		},
		"MPS has NVIDIA's limits by default, rounded down as NVIDIA's": {
			models: []sim.Model{sim.T4, sim.H100}, sharing: mps(v1alpha1.MPS{Replicas: 7}),
			want: []string{
				"Disabled  MPS nvidia.com/gpu GPUSharing 14% 2194 MiB",
				"Disabled  MPS nvidia.com/gpu GPUSharing 14% 11651 MiB",
			},
		},
		"MPS has no memory limit on a GPU of unknown memory": {
			models: []sim.Model{sim.GB10}, sharing: mps(v1alpha1.MPS{Replicas: 4}),
			want: []string{"Disabled  MPS nvidia.com/gpu GPUSharing 25% 0 MiB"},
		},
		"time-slicing of a GPU of unknown memory": {
			models: []sim.Model{sim.GB10}, sharing: timeSlicing(), want: []string{"Disabled"},
		},
		"MPS with its own limits and name": {
			models: []sim.Model{sim.T4},
			sharing: renamed(mps(v1alpha1.MPS{
				Replicas: 48, ActiveThreadPercentage: new(int32(10)), PinnedMemoryLimit: new(resource.MustParse("4Gi")),
			})),
			want: []string{"Disabled  MPS nvidia.com/gpu.shared GPUSharing 10% 4096 MiB"},
		},
		"a client that may have the whole memory": {
			models: []sim.Model{sim.T4}, sharing: mps(v1alpha1.MPS{Replicas: 2, PinnedMemoryLimit: new(resource.MustParse("15Gi"))}),
			want: []string{"Disabled  MPS nvidia.com/gpu GPUSharing 50% 15360 MiB"},
		},
		"MPS on an old GPU, as far as it goes": {
			models: []sim.Model{sim.V100}, sharing: mps(v1alpha1.MPS{Replicas: 16, PinnedMemoryLimit: new(resource.MustParse("512Mi"))}),
			want: []string{"Disabled  MPS nvidia.com/gpu GPUSharing 6% 512 MiB"},
		},
		"fill by slices, with each GPU's own names": {
			models: []sim.Model{sim.A100, sim.H200, sim.A30}, sharing: mixed(fill("1g")),
			want: []string{"Enabled 7×1g.5gb", "Enabled 7×1g.18gb", "Enabled 4×1g.6gb"},
		},
		"fill with double memory": {
			models: []sim.Model{sim.A100}, sharing: mixed(fill("1g.10gb")), want: []string{"Enabled 4×1g.10gb"},
		},
		"instances in the order of their names": {
			models:  []sim.Model{sim.A100},
			sharing: mixed(instances(ask("3g.20gb", 1), ask("1g+me", 1), ask("1g", 2))),
			want:    []string{"Enabled 2×1g.5gb+1×1g.5gb+me+1×3g.20gb"},
		},
		"two names of one profile are added up": {
			models: []sim.Model{sim.A100}, sharing: mixed(instances(ask("1g", 2), ask("1g.5gb", 3))),
			want: []string{"Enabled 5×1g.5gb"},
		},
		"the first layout that matches, by product and index; a GPU that none matches stays whole": {
			models: []sim.Model{sim.A100, sim.A100, sim.H100, sim.T4},
			sharing: mixed(
				indexes(products(instances(ask("3g", 2)), "NVIDIA-A100-SXM4-*"), 1, 2),
				products(fill("1g"), "NVIDIA-A100-*", "NVIDIA-V?00"),
				products(fill("7g"), "NVIDIA-H100-80GB-HBM3"),
			),
			want: []string{"Enabled 7×1g.5gb", "Enabled 2×3g.20gb", "Enabled 1×7g.80gb", "Disabled"},
		},
		"single with the same profile on every GPU, in different numbers": {
			models:  []sim.Model{sim.A100, sim.A100},
			sharing: single(indexes(instances(ask("2g", 1)), 1), fill("2g.10gb")),
			want:    []string{"Enabled 3×2g.10gb", "Enabled 1×2g.10gb"},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			have := observed(t, c.models...)
			specs, err := plan.Resolve(c.sharing, have)
			g.Expect(err).NotTo(HaveOccurred())
			got := make([]string, 0, len(specs))
			for i, s := range specs {
				g.Expect(s.UUID).To(Equal(have[i].UUID))
				got = append(got, short(s.Sharing))
			}
			g.Expect(got).To(Equal(c.want))
			_, err = plan.Node(specs, have)
			g.Expect(err).NotTo(HaveOccurred(), "what is resolved can be planned")
		})
	}
}

func TestResolveRefuses(t *testing.T) {
	cases := map[string]struct {
		models          []sim.Model
		sharing         v1alpha1.Sharing
		reason, message string
	}{
		"MIG on a GPU without": {
			models: []sim.Model{sim.A100, sim.T4}, sharing: mixed(fill("1g")), reason: v1alpha1.ReasonMIGNotSupported,
			message: "GPU 1 (Tesla-T4) has no MIG; say in sharing.mig.layouts[].gpus which GPUs the layout is for, or leave " +
				"this one out with gpuSelector",
		},
		"a profile that the GPU does not have": {
			models: []sim.Model{sim.A30}, sharing: mixed(instances(ask("3g", 1))), reason: v1alpha1.ReasonProfileNotAvailable,
			message: "GPU 0 (NVIDIA-A30) has no MIG profile 3g; it has 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb; " +
				"change the profile, or say in sharing.mig.layouts[].gpus which GPUs the layout is for",
		},
		"a profile to fill with that the GPU does not have": {
			models: []sim.Model{sim.H100}, sharing: mixed(fill("1g.5gb")), reason: v1alpha1.ReasonProfileNotAvailable,
			message: "GPU 0 (NVIDIA-H100-80GB-HBM3) has no MIG profile 1g.5gb; it has 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, " +
				"3g.40gb, 4g.40gb, 7g.80gb; change the profile, or say in sharing.mig.layouts[].gpus which GPUs the layout is for",
		},
		"instances that do not fit": {
			models: []sim.Model{sim.A100}, sharing: mixed(instances(ask("3g", 2), ask("1g", 1))),
			reason: v1alpha1.ReasonLayoutDoesNotFit,
			message: "GPU 0 (NVIDIA-A100-SXM4-40GB) cannot hold 1 × 1g.5gb + 2 × 3g.20gb: they need 9 memory slices and the " +
				"GPU has 8; 2 × 3g.20gb would fit; ask for fewer or smaller instances in sharing.mig.layouts",
		},
		"no layout for any GPU": {
			models: []sim.Model{sim.A30, sim.T4}, sharing: mixed(products(fill("1g"), "NVIDIA-H100-*")),
			reason: v1alpha1.ReasonNoLayoutMatches,
			message: "no layout of sharing.mig.layouts is for GPU 0 (NVIDIA-A30) and GPU 1 (Tesla-T4); add one that matches in " +
				"layouts[].gpus, or leave the node out of the policy",
		},
		"single with different profiles": {
			models: []sim.Model{sim.A100, sim.A30}, sharing: single(fill("1g")), reason: v1alpha1.ReasonMixedInstances,
			message: "resourceNames Uniform needs the same one profile on every GPU of a node, and GPU 0 (NVIDIA-A100-SXM4-40GB) would " +
				"get 7 × 1g.5gb but GPU 1 (NVIDIA-A30) 4 × 1g.6gb; use PerProfile, or layouts that give every GPU the same profile",
		},
		"single with a GPU that stays whole": {
			models: []sim.Model{sim.T4, sim.A100}, sharing: single(products(fill("1g"), "NVIDIA-*")),
			reason: v1alpha1.ReasonMixedInstances,
			message: "resourceNames Uniform needs the same one profile on every GPU of a node, and GPU 1 (NVIDIA-A100-SXM4-40GB) would " +
				"get 7 × 1g.5gb but GPU 0 (Tesla-T4) none; use PerProfile, or layouts that give every GPU the same profile",
		},
		"single with two profiles on one GPU": {
			models: []sim.Model{sim.A100}, sharing: single(instances(ask("1g", 1), ask("2g", 1))),
			reason: v1alpha1.ReasonMixedInstances,
			message: "resourceNames Uniform needs instances of one profile, and GPU 0 (NVIDIA-A100-SXM4-40GB) would get 1 × 1g.5gb + " +
				"1 × 2g.10gb; use PerProfile, or one profile",
		},
		"more MPS clients than an old GPU serves": {
			models: []sim.Model{sim.T4, sim.V100}, sharing: mps(v1alpha1.MPS{Replicas: 17}), reason: v1alpha1.ReasonMPSClientLimitExceeded,
			message: "GPU 1 (Tesla-V100-SXM2-32GB) serves at most 16 MPS clients at compute capability 7.0, and " +
				"sharing.mps.replicas is 17; use 16 or fewer, or leave the GPU's node out of the policy",
		},
		"more MPS clients than any GPU serves": {
			models: []sim.Model{sim.T4}, sharing: mps(v1alpha1.MPS{Replicas: 49}), reason: v1alpha1.ReasonMPSClientLimitExceeded,
			message: "GPU 0 (Tesla-T4) serves at most 48 MPS clients at compute capability 7.5, and sharing.mps.replicas is 49; " +
				"use 48 or fewer, or leave the GPU's node out of the policy",
		},
		"more memory for a client than the GPU has": {
			models: []sim.Model{sim.T4}, sharing: mps(v1alpha1.MPS{Replicas: 2, PinnedMemoryLimit: new(resource.MustParse("16Gi"))}),
			reason: v1alpha1.ReasonMemoryLimitExceeded,
			message: "GPU 0 (Tesla-T4) has 15360 MiB of memory, and sharing.mps.pinnedMemoryLimit is 16Gi for one client; lower " +
				"it, or leave it out for the GPU's memory divided by replicas",
		},
		"a limit that is none": {
			models: []sim.Model{sim.T4}, sharing: mps(v1alpha1.MPS{Replicas: 2, PinnedMemoryLimit: new(resource.MustParse("4G"))}),
			reason:  v1alpha1.ReasonMemoryLimitExceeded,
			message: "sharing.mps.pinnedMemoryLimit is 4G; use a whole number of MiB, such as 512Mi or 4Gi",
		},
		"a share of all the memory that the GPU has": {
			models: []sim.Model{sim.A100, sim.T4}, sharing: shareOf("15Gi"), reason: v1alpha1.ReasonMemoryLimitExceeded,
			message: "GPU 1 (Tesla-T4) has 15360 MiB of memory, and no container can use more than sharing.timeSlicing.memory.perReplica, " +
				"15Gi: lower it, or leave it out for the GPU's memory divided by replicas",
		},
		"time-slicing of a virtual GPU": {
			models: []sim.Model{sim.VGPU}, sharing: timeSlicing(), reason: v1alpha1.ReasonVirtualGPUNotSupported,
			message: "GPU 0 (GRID-A100-20C) is a virtual GPU, which cannot be shared further; leave its node or GPU out of the " +
				"policy, or use strategy Exclusive there",
		},
		"MPS on a virtual GPU": {
			models: []sim.Model{sim.VGPU}, sharing: mps(v1alpha1.MPS{Replicas: 2}), reason: v1alpha1.ReasonVirtualGPUNotSupported,
		},
		"MIG on a virtual GPU": {
			models: []sim.Model{sim.VGPU}, sharing: mixed(fill("1g")), reason: v1alpha1.ReasonVirtualGPUNotSupported,
		},
		"time-slicing of a virtual GPU beside instances": {
			models:  []sim.Model{sim.A100, sim.VGPU},
			sharing: wholeShared(mixed(products(fill("1g"), "NVIDIA-A100-*")), 2), reason: v1alpha1.ReasonVirtualGPUNotSupported,
			message: "GPU 1 (GRID-A100-20C) is a virtual GPU, which cannot be shared further; leave its node or GPU out of the " +
				"policy, or use strategy Exclusive there",
		},
		"replicas that differ": {
			models:  []sim.Model{sim.A100, sim.A100},
			sharing: mixed(indexes(replicated(fill("1g"), 2), 0), fill("1g")), reason: v1alpha1.ReasonReplicasDiffer,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := plan.Resolve(c.sharing, observed(t, c.models...))
			isProblem(t, err, c.reason, c.message)
		})
	}
}

// isProblem expects a problem with a reason and, if one is given, a message.
func isProblem(t *testing.T, err error, reason, message string) {
	t.Helper()
	g := NewWithT(t)
	var p *plan.Problem
	g.Expect(errors.As(err, &p)).To(BeTrue(), "%v", err)
	g.Expect(p.Reason).To(Equal(reason), p.Message)
	if message != "" {
		g.Expect(p.Message).To(Equal(message))
	}
}

func TestReplicas(t *testing.T) {
	cases := map[string]struct {
		sharing         v1alpha1.Sharing
		want            map[string]int32
		reason, message string
	}{
		"of another strategy":       {sharing: timeSlicing()},
		"instances advertised once": {sharing: mixed(fill("1g")), want: map[string]int32{}},
		"by the exact names":        {sharing: mixed(replicated(fill("1g"), 3)), want: map[string]int32{"1g.5gb": 3}},
		"the same on GPUs by layouts": {
			sharing: mixed(
				indexes(replicated(instances(ask("3g", 1), ask("1g", 1)), 2), 0),
				replicated(instances(ask("3g.20gb", 2)), 2),
			),
			want: map[string]int32{"3g.20gb": 2},
		},
		"one profile by two names, the same": {
			sharing: mixed(instances(asks("1g", 1, 2), asks("1g.5gb", 1, 2))), want: map[string]int32{"1g.5gb": 2},
		},
		"one profile by two names, different": {
			sharing: mixed(instances(asks("1g", 1, 2), asks("1g.5gb", 1, 3))), reason: v1alpha1.ReasonReplicasDiffer,
			message: "the layout asks for 2 and for 3 replicas of 1g.5gb on GPU 0 (NVIDIA-A100-SXM4-40GB); name the profile once",
		},
		"different on two GPUs": {
			sharing: mixed(indexes(replicated(fill("1g"), 2), 0), replicated(fill("1g"), 4)),
			reason:  v1alpha1.ReasonReplicasDiffer,
			message: "instances 1g.5gb would be advertised 2 times on GPU 0 (NVIDIA-A100-SXM4-40GB) and 4 times on GPU 1 " +
				"(NVIDIA-A100-SXM4-40GB), and NVIDIA's device plugin has one number for a resource of a node; give the profile " +
				"the same replicas in each layout",
		},
		"on one GPU only": {
			sharing: mixed(indexes(fill("1g"), 0), replicated(fill("1g"), 2)), reason: v1alpha1.ReasonReplicasDiffer,
		},
		"of a layout for nobody": {
			sharing: mixed(products(fill("1g"), "Tesla-*")), reason: v1alpha1.ReasonNoLayoutMatches,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got, err := plan.Replicas(c.sharing, observed(t, sim.A100, sim.A100))
			if c.reason != "" {
				isProblem(t, err, c.reason, c.message)
				return
			}
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Expect(got).To(Equal(c.want))
		})
	}
}

func TestMatches(t *testing.T) {
	d := gpu.Device{Index: 2, Product: "NVIDIA A100-SXM4-40GB"}
	cases := map[string]struct {
		match *v1alpha1.GPUMatch
		want  bool
	}{
		"no selection":                 {nil, true},
		"the exact product":            {&v1alpha1.GPUMatch{Products: []string{"NVIDIA-A100-SXM4-40GB"}}, true},
		"a glob":                       {&v1alpha1.GPUMatch{Products: []string{"NVIDIA-H100-*", "*A100*"}}, true},
		"a question mark":              {&v1alpha1.GPUMatch{Products: []string{"NVIDIA-A?00-SXM4-40GB"}}, true},
		"part of the name":             {&v1alpha1.GPUMatch{Products: []string{"A100"}}, false},
		"another case":                 {&v1alpha1.GPUMatch{Products: []string{"nvidia-a100-*"}}, false},
		"the index":                    {&v1alpha1.GPUMatch{Indexes: []int32{0, 2}}, true},
		"another index":                {&v1alpha1.GPUMatch{Indexes: []int32{0, 1}}, false},
		"the product, another index":   {&v1alpha1.GPUMatch{Products: []string{"*"}, Indexes: []int32{1}}, false},
		"the index, another product":   {&v1alpha1.GPUMatch{Products: []string{"Tesla-*"}, Indexes: []int32{2}}, false},
		"the product and the index":    {&v1alpha1.GPUMatch{Products: []string{"*"}, Indexes: []int32{2}}, true},
		"a pattern that is no pattern": {&v1alpha1.GPUMatch{Products: []string{"[", "*"}}, true},
	}
	for name, c := range cases {
		NewWithT(t).Expect(plan.Matches(c.match, d)).To(Equal(c.want), name)
	}
}
