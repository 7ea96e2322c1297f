// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// ready is a node that reports Ready.
func ready(n cluster.Node) cluster.Node {
	n.GPU.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady}}
	return n
}

func drawn(size int, name string, holders ...string) dashboard.Block {
	return dashboard.Block{Size: size, Name: name, Holders: holders}
}

func TestInstancesAreDrawnToScaleWithWhoHoldsThem(t *testing.T) {
	g := NewWithT(t)
	n := ready(partitioned(t))
	s := sight{snapshot: snapshotOf(n)}
	card := s.page().Nodes[0]
	g.Expect(card.Tone).To(Equal(dashboard.ToneReady))
	devices := plan.Devices(n.GPU.Status.Devices)
	for i, d := range devices {
		at, sum := 0, 0
		for _, b := range card.GPUs[i].Drawing.Blocks {
			if b.Name != "" && d.State.MIG {
				g.Expect(b.Name).To(Equal(d.State.Instances[at].Profile))
				g.Expect(b.Size).To(Equal(d.State.Instances[at].Placement.Size))
				g.Expect(sum).To(Equal(d.State.Instances[at].Placement.Start), "where it is on the GPU")
				at++
			}
			sum += b.Size
		}
		g.Expect(at).To(Equal(len(d.State.Instances)), "each instance is drawn")
		g.Expect(sum).To(Equal(card.GPUs[i].Drawing.Slices))
	}
}

func TestReplicasAreDrawnEachWithItsHolder(t *testing.T) {
	n := ready(newNode(t, "a", sim.T4, sim.T4))
	n.Allocatable["nvidia.com/gpu"] = 8
	hold(&n, "train", 0, nil)
	hold(&n, "train", 0, nil)
	hold(&n, "infer", 0, nil)
	t.Run("by what the node advertises", func(t *testing.T) {
		g := NewWithT(t)
		card := sight{snapshot: snapshotOf(n)}.page().Nodes[0]
		g.Expect(card.GPUs[0].Drawing).To(Equal(dashboard.Drawing{Slices: 4, Blocks: []dashboard.Block{
			drawn(1, "replica", "team/train"), drawn(1, "replica", "team/train"), drawn(1, "replica", "team/infer"), drawn(1, "1 replica"),
		}}))
		g.Expect(card.GPUs[0].Sharing).To(Equal("TimeSlicing, 4 replicas"))
		g.Expect(card.GPUs[1].Drawing.Blocks).To(Equal([]dashboard.Block{drawn(4, "4 replicas")}))
		g.Expect(card.Namespaces).To(Equal([]string{"team"}))
		g.Expect(card.Products).To(Equal([]string{"Tesla-T4"}))
	})
	t.Run("by what the agent measured, if it did", func(t *testing.T) {
		g := NewWithT(t)
		measured := measuredNode{name: "a", report: usage.Report{Units: []usage.Unit{{GPU: n.GPU.Status.Devices[0].UUID, Replicas: 6}}}}
		card := sight{snapshot: snapshotOf(n), measured: map[string]measuredNode{"a": measured}}.page().Nodes[0]
		g.Expect(card.GPUs[0].Drawing.Slices).To(Equal(6))
		g.Expect(card.GPUs[1].Drawing.Slices).To(Equal(4))
	})
	t.Run("not by a number that does not fit the GPUs", func(t *testing.T) {
		g := NewWithT(t)
		odd := n
		odd.Allocatable = map[string]int64{"nvidia.com/gpu": 7}
		card := sight{snapshot: snapshotOf(odd)}.page().Nodes[0]
		g.Expect(card.GPUs[0].Drawing.Blocks).To(Equal([]dashboard.Block{drawn(wholeSlices, wholeGPU, "team/infer", "team/train")}))
		g.Expect(card.GPUs[0].Sharing).To(BeEmpty(), "it is not known")
	})
	t.Run("with those of a GPU that is unhealthy", func(t *testing.T) {
		g := NewWithT(t)
		sick := n
		sick.Allocatable, sick.Unallocatable = map[string]int64{"nvidia.com/gpu": 4}, map[string]int64{"nvidia.com/gpu": 4}
		card := sight{snapshot: snapshotOf(sick)}.page().Nodes[0]
		g.Expect(card.GPUs[0].Sharing).To(Equal("TimeSlicing, 4 replicas"))
		g.Expect(card.GPUs[1].Sharing).To(Equal("TimeSlicing, 4 replicas"))
		g.Expect(card.Notes).To(Equal([]string{"4 of nvidia.com/gpu are unhealthy, so no pod gets them: look at the log of NVIDIA's device plugin"}))
	})
	t.Run("under a new name, while the kubelet lists the former one", func(t *testing.T) {
		g := NewWithT(t)
		renamed := n
		renamed.GPU = *n.GPU.DeepCopy()
		renamed.Allocatable = map[string]int64{"nvidia.com/gpu": 0, "nvidia.com/gpu.shared": 8}
		renamed.Unallocatable = map[string]int64{"nvidia.com/gpu": 2}
		renamed.GPU.Status.Rollout.Resources = []v1alpha1.ResourceCount{{Name: "nvidia.com/gpu.shared", Expected: 8, Advertised: 8}}
		card := sight{snapshot: snapshotOf(renamed)}.page().Nodes[0]
		g.Expect(card.GPUs[0].Sharing).To(Equal("TimeSlicing, 4 replicas"))
		g.Expect(card.GPUs[1].Drawing.Blocks).To(Equal([]dashboard.Block{drawn(4, "4 replicas")}))
		g.Expect(card.Notes).To(BeEmpty(), "no GPU is unhealthy")
	})
	t.Run("of an expected resource without any device, whose plugin restarts or reports them all", func(t *testing.T) {
		g := NewWithT(t)
		gone := n
		gone.GPU = *n.GPU.DeepCopy()
		gone.Allocatable, gone.Unallocatable = map[string]int64{"nvidia.com/gpu": 0}, map[string]int64{"nvidia.com/gpu": 8}
		gone.GPU.Status.Rollout.Resources = []v1alpha1.ResourceCount{{Name: "nvidia.com/gpu", Expected: 8}}
		card := sight{snapshot: snapshotOf(gone)}.page().Nodes[0]
		g.Expect(card.GPUs[0].Sharing).To(Equal("TimeSlicing, 4 replicas"))
		g.Expect(card.Notes).To(ConsistOf(HavePrefix("No pod gets any of 8 nvidia.com/gpu: NVIDIA's device plugin restarts, has stopped, or ")))
	})
	t.Run("a process that holds no replica is named", func(t *testing.T) {
		g := NewWithT(t)
		with := n
		with.GPU = *n.GPU.DeepCopy()
		with.GPU.Status.Devices[0].Processes = []v1alpha1.ProcessStatus{{PID: 7, Name: "python"}, {PID: 8, Name: "train", PodUID: "uid-train"}}
		card := sight{snapshot: snapshotOf(with)}.page().Nodes[0]
		g.Expect(card.GPUs[0].Others).To(Equal([]string{"process 7 (python)"}))
		g.Expect(card.GPUs[0].Drawing.Blocks[3].Holders).To(BeEmpty(), "a replica that nobody holds is free")
	})
}

// TestWhatIsMeasuredIsShownWithTheGPU: the same figures as top prints.
func TestWhatIsMeasuredIsShownWithTheGPU(t *testing.T) {
	g := NewWithT(t)
	n := ready(newNode(t, "a", sim.T4))
	uuid := n.GPU.Status.Devices[0].UUID
	unit := usage.Unit{
		GPU: uuid, Replicas: 4, Memory: &gpu.Memory{Total: 16 << 30, Used: 12 << 30}, Utilization: &gpu.Utilization{Compute: 0.9}, OtherBytes: 1 << 30,
		Containers: []usage.Container{using("greedy", 8, 4, 0.7), using("modest", 3, 4, 0)},
	}
	measured := measuredNode{name: "a", report: usage.Report{Units: []usage.Unit{unit}, Incomplete: "sampling GPU 1: lost"}}
	card := sight{snapshot: snapshotOf(n), measured: map[string]measuredNode{"a": measured}}.page().Nodes[0]
	shown := card.GPUs[0]
	g.Expect(shown.Memory).To(Equal(&dashboard.Memory{Used: 12 << 30, Total: 16 << 30}))
	g.Expect(shown.Utilization).To(HaveValue(Equal(0.9)))
	g.Expect(shown.OtherBytes).To(Equal(int64(1 << 30)))
	g.Expect(shown.Containers).To(Equal([]dashboard.Container{
		{Name: "team/greedy main", UsedBytes: new(int64(8 << 30)), ShareBytes: new(int64(4 << 30)), Utilization: new(0.7), Over: true},
		{Name: "team/modest main", UsedBytes: new(int64(3 << 30)), ShareBytes: new(int64(4 << 30))},
	}))
	g.Expect(card.Notes).To(Equal([]string{"Measured in part: sampling GPU 1: lost"}))

	card = sight{snapshot: snapshotOf(n), measured: map[string]measuredNode{"a": {name: "a", failed: "503"}}}.page().Nodes[0]
	g.Expect(card.Notes).To(Equal([]string{"Not measured: 503"}))
	g.Expect(card.GPUs[0].Memory).To(BeNil(), "what is not known is not 0")
}

func TestAnInstanceIsShownWithItsOwnMemory(t *testing.T) {
	g := NewWithT(t)
	n := ready(partitioned(t))
	at := slices.IndexFunc(n.GPU.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return len(d.Instances) > 1 })
	d := n.GPU.Status.Devices[at]
	id := int(d.Instances[1].ID)
	measured := measuredNode{name: n.Name, report: usage.Report{Units: []usage.Unit{
		{GPU: d.UUID, Index: int(d.Index)},
		{
			GPU: d.UUID, Index: int(d.Index), Instance: &id, Profile: d.Instances[1].Profile, Memory: &gpu.Memory{Total: 10 << 30, Used: 4 << 30},
			Containers: []usage.Container{using("train", 4, 10, 0)},
		},
	}}}
	card := sight{snapshot: snapshotOf(n), measured: map[string]measuredNode{n.Name: measured}}.page().Nodes[0]
	var with []string
	for _, b := range card.GPUs[d.Index].Drawing.Blocks {
		if b.Memory != nil {
			with = append(with, b.Name)
		}
	}
	g.Expect(with).To(Equal([]string{d.Instances[1].Profile}), "no other instance")
	g.Expect(card.GPUs[d.Index].Containers[0].Where).To(HavePrefix("instance "))
}

func TestAContainerWithTwoInstancesIsShownInEach(t *testing.T) {
	g := NewWithT(t)
	n := ready(partitioned(t))
	d := n.GPU.Status.Devices[0]
	var units []usage.Unit
	for at, used := range []int64{8, 4} {
		id := int(d.Instances[at].ID)
		units = append(units, usage.Unit{GPU: d.UUID, Instance: &id, Profile: d.Instances[at].Profile, Containers: []usage.Container{using("train", used, 10, 0)}})
	}
	card := sight{snapshot: snapshotOf(n), measured: map[string]measuredNode{n.Name: {name: n.Name, report: usage.Report{Units: units}}}}.page().Nodes[0]
	var where []string
	for _, c := range card.GPUs[0].Containers {
		where = append(where, c.Where)
	}
	g.Expect(where).To(Equal([]string{
		fmt.Sprintf("instance %d %s", d.Instances[0].ID, d.Instances[0].Profile), fmt.Sprintf("instance %d %s", d.Instances[1].ID, d.Instances[1].Profile),
	}))
}

func TestACardSaysWhyItsNodeIsNotReady(t *testing.T) {
	blocked := newNode(t, "a", sim.A100)
	hold(&blocked, "train", 0, nil)
	blocked.GPU.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonGPUInUse, Message: "waits for pods",
	}}
	blocked.GPU.Status.Rollout = v1alpha1.RolloutStatus{
		PolicyName: "research", State: "Draining", Steps: []string{"GPU 0: enable MIG mode"},
		Blockers:  []v1alpha1.BlockerStatus{{Kind: v1alpha1.BlockerKindPod, Namespace: "ml", Name: "train", Handling: "is waited for"}},
		Resources: []v1alpha1.ResourceCount{{Name: "nvidia.com/gpu", Advertised: 1}, {Name: "nvidia.com/mig-1g.5gb", Expected: 7}},
	}
	failed := newNode(t, "b", sim.A100)
	failed.GPU.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonDrainTimedOut, Message: "not idle",
	}}
	failed.GPU.Status.Rollout = v1alpha1.RolloutStatus{PolicyName: "research", State: "Failed"}
	lost := ready(newNode(t, "c", sim.A100))
	lost.AgentReady = false
	g := NewWithT(t)
	page := sight{snapshot: snapshotOf(blocked, failed, lost, ready(newNode(t, "d", sim.A100)))}.page()
	tones := []dashboard.Tone{}
	for _, n := range page.Nodes {
		tones = append(tones, n.Tone)
	}
	g.Expect(tones).To(Equal([]dashboard.Tone{dashboard.ToneBlocked, dashboard.ToneFailed, dashboard.ToneBlocked, dashboard.ToneReady}))
	card := page.Nodes[0]
	g.Expect(card.State).To(Equal("GPUInUse (Draining)"))
	g.Expect(card.Message).To(Equal("waits for pods"))
	g.Expect(card.Policy).To(Equal("research"))
	g.Expect(card.Steps).To(Equal([]string{"GPU 0: enable MIG mode"}))
	g.Expect(card.Blockers).To(Equal([]string{"pod ml/train: is waited for"}))
	g.Expect(card.Namespaces).To(Equal([]string{"ml", "team"}))
	g.Expect(card.Resources).To(Equal([]dashboard.Resource{
		{Name: "nvidia.com/gpu", Now: new(int64(1)), Then: new(int64(0))}, {Name: "nvidia.com/mig-1g.5gb", Now: new(int64(0)), Then: new(int64(7))},
	}))
	g.Expect(page.Nodes[2].State).To(Equal(v1alpha1.ReasonAgentNotReporting))
}

// The page takes a list that is empty for a list.
func TestAnEmptyListIsNoNull(t *testing.T) {
	for title, s := range map[string]sight{
		"an empty cluster": {}, "an empty node": {snapshot: snapshotOf(cluster.Node{Name: "a"})}, "a node": {snapshot: snapshotOf(ready(newNode(t, "a", sim.T4)))},
	} {
		g := NewWithT(t)
		page := s.page()
		whole, err := json.Marshal(struct {
			dashboard.Page
			Nodes []dashboard.Node
		}{page, page.Nodes})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(string(whole)).NotTo(ContainSubstring("null"), title)
	}
}

func TestWhatAnUnreadableNodeAdvertisesIsNotKnown(t *testing.T) {
	g := NewWithT(t)
	n := newNode(t, "a", sim.A100)
	n.Allocatable = nil
	n.GPU.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonApplying}}
	n.GPU.Status.Rollout = v1alpha1.RolloutStatus{
		PolicyName: "research", State: "Applying", Resources: []v1alpha1.ResourceCount{{Name: "nvidia.com/gpu", Expected: 4}},
	}
	card := sight{snapshot: snapshotOf(n), blind: true}.page().Nodes[0]
	g.Expect(card.Resources).To(Equal([]dashboard.Resource{{Name: "nvidia.com/gpu", Then: new(int64(4))}}))
	g.Expect(card.Tone).To(Equal(dashboard.ToneWorking))
}

func TestAPreviewDrawsGPUsBeforeAndAfter(t *testing.T) {
	n := ready(newNode(t, "a", sim.A100, sim.T4))
	hold(&n, "train", 0, nil)
	t.Run("MIG", func(t *testing.T) {
		g := NewWithT(t)
		nodes := previewsOf(snapshotOf(n), change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "research",
			`{gpuSelector: {products: ["NVIDIA-A100-*"]}, sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 2g.10gb, count: 3}]}]}}}`)}})
		g.Expect(nodes).To(HaveLen(1))
		g.Expect(nodes[0].GPUs).To(HaveLen(1), "the T4 is not selected")
		a100 := nodes[0].GPUs[0]
		g.Expect(a100.Before.Blocks).To(Equal([]dashboard.Block{drawn(wholeSlices, wholeGPU, "team/train")}))
		news := 0
		for _, b := range a100.After.Blocks {
			if b.Name == "2g.10gb" && b.New && len(b.Holders) == 0 {
				news++
			}
		}
		g.Expect(news).To(Equal(3))
	})
	t.Run("time-slicing", func(t *testing.T) {
		g := NewWithT(t)
		nodes := previewsOf(snapshotOf(n), change{applied: []v1alpha1.GPUSharingPolicy{policy(t, "slices", slicing)}})
		g.Expect(nodes).To(HaveLen(1))
		g.Expect(nodes[0].GPUs).To(HaveLen(2))
		g.Expect(nodes[0].GPUs[1].After).To(Equal(dashboard.Drawing{Slices: 4, Blocks: []dashboard.Block{drawn(4, "4 replicas")}}))
	})
	t.Run("nothing", func(t *testing.T) {
		NewWithT(t).Expect(previewsOf(snapshotOf(n), change{})).To(BeEmpty())
	})
}

// TestAPolicyThatWasCorrectedHasNotFailed: what the controller said of an earlier generation is not about this one.
func TestAPolicyThatWasCorrectedHasNotFailed(t *testing.T) {
	g := NewWithT(t)
	p := policy(t, "research", slicing)
	p.Status.ObservedGeneration, p.Status.Nodes.Blocked = 1, 1
	p.Status.Conditions = []metav1.Condition{
		{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNotAdvertised},
		{Type: v1alpha1.ConditionStalled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonNotAdvertised},
	}
	g.Expect(policyCard(&p).Tone).To(Equal(dashboard.ToneFailed))
	p.Generation = 2
	g.Expect(policyCard(&p).State).To(Equal(notObserved))
	g.Expect(policyCard(&p).Tone).To(Equal(dashboard.ToneWorking))
}
