// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package usage_test

import (
	"encoding/json"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

const (
	uuid = "GPU-1"
	gib  = int64(1 << 30)
)

// node is a node of which the agent has reported one GPU.
func node(sharing v1alpha1.DeviceSharing, instances ...v1alpha1.InstanceStatus) *v1alpha1.GPUNode {
	return &v1alpha1.GPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: v1alpha1.GPUNodeSpec{PolicyName: "research"},
		Status: v1alpha1.GPUNodeStatus{Devices: []v1alpha1.DeviceStatus{
			{UUID: uuid, Product: "NVIDIA-A100-SXM4-40GB", Sharing: sharing, Instances: instances},
		}},
	}
}

// device is a GPU of 40 GiB with four replicas, which two pods hold.
func device(processes ...gpu.ProcessUse) usage.Device {
	return usage.Device{
		DeviceUse: gpu.DeviceUse{
			UUID: uuid, Index: 0, Memory: &gpu.Memory{Total: 40 * gib, Used: 20 * gib, Free: 20 * gib},
			Utilization: &gpu.Utilization{Compute: 0.9}, Processes: processes,
		},
		Holders:  []gpu.Holder{holder("greedy", gpu.WholeGPU), holder("idle", gpu.WholeGPU)},
		Replicas: map[int]int{gpu.WholeGPU: 4},
	}
}

func holder(pod string, instance int) gpu.Holder {
	return gpu.Holder{Namespace: "ml", Pod: pod, Container: "main", Instance: instance}
}

func name(pod string) usage.Name { return usage.Name{Namespace: "ml", Pod: pod, Container: "main"} }

func process(pid int, bytes int64, compute float64) gpu.ProcessUse {
	p := gpu.ProcessUse{PID: pid, Instance: gpu.WholeGPU, MemoryBytes: &bytes}
	if compute > 0 {
		p.Utilization = &gpu.Utilization{Compute: compute, Memory: compute / 2}
	}
	return p
}

func TestTimeSlicing(t *testing.T) {
	g := NewWithT(t)
	owners := map[int]usage.Name{1: name("greedy"), 2: name("greedy")}
	d := device(process(1, 12*gib, 0.5), process(2, 4*gib, 0.25), process(3, gib, 0))
	r := usage.Of(node(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}), []usage.Device{d}, owners)
	g.Expect(r.Node).To(Equal("n1"))
	g.Expect(r.Policy).To(Equal("research"))
	g.Expect(r.Units).To(HaveLen(1))
	u := r.Units[0]
	g.Expect(u.Strategy).To(Equal(v1alpha1.StrategyTimeSlicing))
	g.Expect(u.Product).To(Equal("NVIDIA-A100-SXM4-40GB"))
	g.Expect(u.Containers).To(Equal([]usage.Container{
		{
			Name: name("greedy"), MemoryBytes: new(16 * gib), ShareBytes: new(10 * gib), Processes: 2,
			Utilization: &gpu.Utilization{Compute: 0.75, Memory: 0.375},
		},
		{Name: name("idle"), MemoryBytes: new(int64(0)), ShareBytes: new(10 * gib)},
	}), "the largest first, and one that holds a replica and uses nothing")
	g.Expect(u.Containers[0].Over()).To(BeTrue())
	g.Expect(u.Containers[1].Over()).To(BeFalse())
	g.Expect(u.OtherBytes).To(Equal(gib), "of a process of no container")
}

func TestTheShareIsNotExceededByUsingAllOfIt(t *testing.T) {
	g := NewWithT(t)
	d := device(process(1, 10*gib, 0))
	r := usage.Of(node(v1alpha1.DeviceSharing{}), []usage.Device{d}, map[int]usage.Name{1: name("greedy")})
	g.Expect(r.Units[0].Containers[0].Over()).To(BeFalse())
}

func TestTwoReplicasAreTwoShares(t *testing.T) {
	g := NewWithT(t)
	d := device(process(1, 16*gib, 0))
	d.Holders = append(d.Holders, holder("greedy", gpu.WholeGPU))
	r := usage.Of(node(v1alpha1.DeviceSharing{}), []usage.Device{d}, map[int]usage.Name{1: name("greedy")})
	g.Expect(*r.Units[0].Containers[0].ShareBytes).To(Equal(20 * gib))
	g.Expect(r.Units[0].Containers[0].Over()).To(BeFalse())
}

func TestTheMemoryGuardOfThePolicySaysTheShare(t *testing.T) {
	g := NewWithT(t)
	n := node(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled})
	n.Spec.Memory = &v1alpha1.TimeSlicedMemory{PerReplica: new(resource.MustParse("4Gi"))}
	d := device(process(1, 5*gib, 0))
	d.Holders = append(d.Holders, holder("idle", gpu.WholeGPU))
	containers := usage.Of(n, []usage.Device{d}, map[int]usage.Name{1: name("greedy")}).Units[0].Containers
	g.Expect(*containers[0].ShareBytes).To(Equal(4 * gib))
	g.Expect(containers[0].Over()).To(BeTrue())
	g.Expect(*containers[1].ShareBytes).To(Equal(8*gib), "two replicas are two shares")
}

func TestALimitThatHoldsIsThatOfThePod(t *testing.T) {
	g := NewWithT(t)
	n, d := node(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}), device(process(1, 5*gib, 0))
	n.Spec.Memory = &v1alpha1.TimeSlicedMemory{Limit: v1alpha1.MemoryLimitEnforce}
	limit := func(reason string) *int64 {
		greedy := name("greedy")
		n.Status.MemoryLimits.Pods = []v1alpha1.PodMemoryLimit{{
			Namespace: greedy.Namespace, PodName: greedy.Pod, DeviceUUID: d.UUID, LimitBytes: 4 * gib, Reason: reason,
		}}
		return usage.Of(n, []usage.Device{d}, map[int]usage.Name{1: greedy}).Units[0].Containers[0].LimitBytes
	}
	g.Expect(limit("")).To(HaveValue(Equal(4 * gib)))
	g.Expect(limit(v1alpha1.ReasonForeignLimit)).To(BeNil())
	n.Spec.Memory.Limit = v1alpha1.MemoryLimitReport
	g.Expect(limit("")).To(BeNil())
}

func TestAGPUThatIsNotSharedIsOneShare(t *testing.T) {
	g := NewWithT(t)
	d := device(process(1, 30*gib, 0))
	d.Replicas = map[int]int{gpu.WholeGPU: 1}
	r := usage.Of(node(v1alpha1.DeviceSharing{}), []usage.Device{d}, map[int]usage.Name{1: name("greedy")})
	g.Expect(r.Units[0].Strategy).To(Equal(v1alpha1.StrategyExclusive))
	g.Expect(*r.Units[0].Containers[0].ShareBytes).To(Equal(40 * gib))
}

func TestMPS(t *testing.T) {
	daemon := &v1alpha1.MPSDaemon{ResourceName: "nvidia.com/gpu", ActiveThreadPercentage: 25}
	for title, tc := range map[string]struct {
		limit  string
		share  int64
		limits usage.Limits
	}{
		"the limit is the share":             {"6Gi", 6 * gib, usage.Limits{ActiveThreads: 0.25, MemoryBytes: new(6 * gib)}},
		"without a limit it is the replicas": {"", 10 * gib, usage.Limits{ActiveThreads: 0.25}},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			mps := daemon.DeepCopy()
			if tc.limit != "" {
				mps.PinnedMemoryLimit = new(resource.MustParse(tc.limit))
			}
			n := node(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled, MPS: mps})
			n.Status.MPS = []v1alpha1.MPSStatus{{ResourceName: "nvidia.com/gpu", Clients: 2, OutdatedClients: 1}}
			d := device(gpu.ProcessUse{PID: 1, Instance: gpu.WholeGPU, MPSClient: true, MemoryBytes: new(gib)})
			r := usage.Of(n, []usage.Device{d}, map[int]usage.Name{1: name("greedy")})
			g.Expect(r.Units[0].Strategy).To(Equal(v1alpha1.StrategyMPS))
			g.Expect(*r.Units[0].Limits).To(Equal(tc.limits))
			g.Expect(*r.Units[0].Containers[0].ShareBytes).To(Equal(tc.share))
			g.Expect(r.Units[0].Containers[0].Utilization).To(BeNil())
			g.Expect(r.Daemons).To(Equal([]usage.Daemon{{Resource: "nvidia.com/gpu", Clients: 2, OutdatedClients: 1}}))
		})
	}
}

func TestInstances(t *testing.T) {
	g := NewWithT(t)
	n := node(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled}, v1alpha1.InstanceStatus{ID: 9, Profile: "1g.5gb", UUID: "MIG-9"})
	d := device(gpu.ProcessUse{PID: 1, Instance: 9, MemoryBytes: new(4 * gib)})
	d.Instances = []gpu.InstanceUse{
		{ID: 9, UUID: "MIG-9", Memory: &gpu.Memory{Total: 5 * gib}, Utilization: &gpu.Utilization{Compute: 0.5}}, {ID: 10, UUID: "MIG-10", Memory: &gpu.Memory{Total: 5 * gib}},
	}
	d.Holders, d.Replicas, d.Utilization = []gpu.Holder{holder("train", 9)}, map[int]int{9: 1, 10: 2}, nil
	r := usage.Of(n, []usage.Device{d}, map[int]usage.Name{1: name("train")})
	g.Expect(r.Units).To(HaveLen(3))
	g.Expect(r.Units[0].Partitioned).To(BeTrue())
	g.Expect(r.Units[0].Containers).To(BeEmpty(), "they are on the instances")
	g.Expect(*r.Units[1].Instance).To(Equal(9))
	g.Expect(r.Units[1].Profile).To(Equal("1g.5gb"))
	g.Expect(r.Units[1].Strategy).To(Equal(v1alpha1.StrategyMIG))
	g.Expect(r.Units[1].Utilization).To(Equal(&gpu.Utilization{Compute: 0.5}))
	g.Expect(r.Units[2].Utilization).To(BeNil(), "the driver does not report it")
	g.Expect(r.Units[1].Containers).To(Equal([]usage.Container{
		{Name: name("train"), MemoryBytes: new(4 * gib), ShareBytes: new(5 * gib), Processes: 1},
	}))
	g.Expect(r.Units[2].Replicas).To(Equal(2))
	g.Expect(r.Units[2].Containers).To(BeEmpty())
}

func TestWhatIsNotKnownIsAbsent(t *testing.T) {
	g := NewWithT(t)
	owners := map[int]usage.Name{1: name("greedy"), 2: name("greedy")}
	d := device(process(1, gib, 0), gpu.ProcessUse{PID: 2, Instance: gpu.WholeGPU})
	d.Memory, d.Utilization = nil, nil
	r := usage.Of(node(v1alpha1.DeviceSharing{}), []usage.Device{d}, owners)
	greedy := r.Units[0].Containers[1]
	g.Expect(greedy.Name).To(Equal(name("greedy")), "what is not known comes last")
	g.Expect(greedy.MemoryBytes).To(BeNil(), "the memory of one of its processes is not known")
	g.Expect(greedy.ShareBytes).To(BeNil(), "the memory of the GPU is not known")
	g.Expect(greedy.Over()).To(BeFalse())

	unknown := device()
	unknown.ProcessesUnknown = true
	r = usage.Of(node(v1alpha1.DeviceSharing{}), []usage.Device{unknown}, nil)
	for _, c := range r.Units[0].Containers {
		g.Expect(c.MemoryBytes).To(BeNil(), "the driver's lists of processes cannot be used")
	}
}

// The kubelet lists no device of a device plugin that restarts, and none of a GPU that the plugin calls unhealthy.
func TestNoShareIsKnownWhileTheGPUIsNotAdvertised(t *testing.T) {
	g := NewWithT(t)
	d := device(process(1, 12*gib, 0))
	d.Replicas = map[int]int{}
	u := usage.Of(node(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}), []usage.Device{d}, map[int]usage.Name{1: name("greedy")}).Units[0]
	g.Expect(u.Strategy).To(BeEmpty(), "two pods hold replicas of it, so it is not exclusive")
	for _, c := range u.Containers {
		g.Expect(c.ShareBytes).To(BeNil(), "the share of a replica is not the whole GPU")
	}
}

// The name of the log of a container with long names is cut, so that its container is not known.
func TestMemoryOfAContainerThatCannotBeNamedIsNot0(t *testing.T) {
	g := NewWithT(t)
	d := device(process(1, 12*gib, 0), process(2, gib, 0))
	u := usage.Of(node(v1alpha1.DeviceSharing{}), []usage.Device{d}, map[int]usage.Name{1: {}, 2: name("greedy")}).Units[0]
	g.Expect(u.Containers).To(HaveLen(2))
	g.Expect(u.Containers[0].MemoryBytes).To(HaveValue(Equal(gib)))
	g.Expect(u.Containers[1].MemoryBytes).To(BeNil(), "the 12 GiB may be its")
	g.Expect(u.OtherBytes).To(Equal(12 * gib))
}

func TestAReportSurvivesItsJSON(t *testing.T) {
	g := NewWithT(t)
	d := device(process(1, 12*gib, 0.5), gpu.ProcessUse{PID: 2, Instance: gpu.WholeGPU})
	r := usage.Of(node(v1alpha1.DeviceSharing{}), []usage.Device{d}, map[int]usage.Name{1: name("greedy"), 2: name("idle")})
	raw, err := json.Marshal(r)
	g.Expect(err).NotTo(HaveOccurred())
	var read usage.Report
	g.Expect(json.Unmarshal(raw, &read)).To(Succeed())
	g.Expect(read).To(Equal(r))
}

// TestWhatNVIDIAsDRADriverOffers: the kubelet lists none of it as a device, so that the number of shares is the one
// that the ResourceSlices show.
func TestWhatNVIDIAsDRADriverOffers(t *testing.T) {
	whole, split := v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}, v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled}
	instance := gpu.InstanceUse{ID: 7, UUID: "MIG-7", Memory: &gpu.Memory{Total: 5 * gib}}
	for name, c := range map[string]struct {
		sharing   v1alpha1.DeviceSharing
		shares    int64
		plugin    int // the replicas that the kubelet lists
		instances []gpu.InstanceUse
		replicas  []int
		strategy  v1alpha1.Strategy
		share     int64
	}{
		"four shares":                {sharing: whole, shares: 4, replicas: []int{4}, strategy: v1alpha1.StrategyTimeSlicing, share: 10 * gib},
		"whole GPUs":                 {sharing: whole, shares: 1, replicas: []int{1}, strategy: v1alpha1.StrategyExclusive, share: 40 * gib},
		"the device plugin":          {sharing: whole, plugin: 2, replicas: []int{2}, strategy: v1alpha1.StrategyTimeSlicing, share: 20 * gib},
		"the device plugin has come": {sharing: whole, shares: 4, plugin: 2, replicas: []int{2}, strategy: v1alpha1.StrategyTimeSlicing, share: 20 * gib},
		"nothing is published":       {sharing: whole, replicas: []int{0}},
		"an instance":                {sharing: split, shares: 4, instances: []gpu.InstanceUse{instance}, replicas: []int{0, 1}, strategy: v1alpha1.StrategyMIG},
		"MIG mode without instances": {sharing: split, shares: 4, replicas: []int{0}, strategy: v1alpha1.StrategyMIG},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			n, d := node(c.sharing), device()
			n.Status.Rollout.Shares = c.shares
			d.Instances, d.Replicas = c.instances, map[int]int{gpu.WholeGPU: c.plugin}
			d.Holders = []gpu.Holder{holder("train", gpu.WholeGPU), holder("part", 7)}
			units := usage.Of(n, []usage.Device{d}, nil).Units
			var replicas []int
			for _, u := range units {
				replicas = append(replicas, u.Replicas)
			}
			g.Expect(replicas).To(Equal(c.replicas))
			g.Expect(units[0].Strategy).To(Equal(c.strategy))
			if c.share > 0 {
				g.Expect(units[0].Containers[0].ShareBytes).To(HaveValue(Equal(c.share)))
			}
			if len(units) > 1 {
				g.Expect(units[1].Containers).To(Equal([]usage.Container{{Name: usage.Name{Namespace: "ml", Pod: "part", Container: "main"}, MemoryBytes: new(int64(0)), ShareBytes: new(5 * gib)}}))
			}
		})
	}
}
