// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice_test

import (
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// selecting is a node whose pod selects it by a label.
func selecting(product, label string) advice.Cluster {
	c := running(on(gpus(product, 1), equal(1, 1, 0.1)...), "nvidia.com/gpu", new(int64(1)))
	c.Nodes[0].Pods[0].SharingLabels = []string{label}
	return c
}

// NVIDIA's GPU Feature Discovery writes labels anew when a GPU is shared: Tesla-T4 becomes Tesla-T4-SHARED. A pod that selects the
// former finds no node when it is started again.
func TestPodsThatSelectNVIDIAsLabelsKeepThem(t *testing.T) {
	for _, product := range []string{t4, a100} {
		for _, o := range adviseOne(t, selecting(product, "nvidia.com/gpu.product")).Options {
			says := ContainElement("pod team/infer-0 selects its node by nvidia.com/gpu.product, which changes")
			if o.Name == "Exclusive" {
				says = BeEmpty()
			}
			NewWithT(t).Expect(o.Against).To(says, o.Name)
		}
	}
	sliced := running(underPolicy(on(gpus(t4, 1), equal(1, 1, 0.1)...), timeSliced(4, false)), "nvidia.com/gpu", nil)
	sliced.Nodes[0].Pods[0].SharingLabels = []string{"nvidia.com/gpu.product"}
	a := adviseOne(t, sliced)
	NewWithT(t).Expect(option(t, a, "TimeSlicing").Against).To(BeEmpty(), "the label keeps its suffix")
	NewWithT(t).Expect(option(t, a, "MPS").Against).To(ConsistOf(ContainSubstring("runAsUser")), "the suffix is the same")
	NewWithT(t).Expect(option(t, a, "Exclusive").Against).NotTo(BeEmpty(), "the suffix goes")
}

// A pod that has an instance by a ResourceClaim counts on it as one that requests the resource.
func TestPodsKeepWhatTheyHaveByResourceClaims(t *testing.T) {
	g := NewWithT(t)
	containers := equal(2, 3, 0.1)
	containers[1].Compute95 = new(0.25) // too much for 1g
	c := underPolicy(on(gpus(a100, 1), containers...), v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		ResourceNames: v1alpha1.MIGResourceNamesPerProfile,
		Layouts:       []v1alpha1.MIGLayout{{Instances: []v1alpha1.MIGInstances{{Profile: "2g.10gb", Count: 2}, {Profile: "1g.5gb", Count: 3}}}},
	}})
	n := &c.Nodes[0]
	n.DRANode = cluster.DRANode{DRA: "ResourceSlice a", Published: &dra.Pool{Complete: true}}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		profile := "1g.5gb"
		if name < "c" {
			profile = "2g.10gb"
		}
		n.Published.Devices = append(n.Published.Devices, dra.Device{Name: name, Type: "mig", UUID: "MIG-" + name, Parent: "GPU-0", Profile: profile, Shares: 1})
	}
	for i, device := range []string{"a", "b"} {
		pod := cluster.Pod{Namespace: "team", Name: containers[i].Pod, UID: device}
		n.Pods = append(n.Pods, pod)
		n.Claims = append(n.Claims, dra.Claim{Name: "team/" + device, Pods: []string{device}, Devices: []dra.Allocated{{Pool: "a", Device: device}}})
	}
	o := option(t, adviseOne(t, c), "MIG, 1 × 2g.10gb and")
	g.Expect(o.Against).To(ContainElement("pods on node a request 2 nvidia.com/mig-2g.10gb, and it would offer 1"))
}

// A limit that a user has chosen for few clients does not bound many of them.
func TestMPSWithALimitIsNotOvercommitted(t *testing.T) {
	g := NewWithT(t)
	limited := v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: 2, PinnedMemoryLimit: new(resource.MustParse("20Gi"))}}
	c := underPolicy(on(gpus(a100, 1), equal(8, 10, 0.1)...), limited)
	g.Expect(option(t, adviseOne(t, c), "MPS with 8").Against).To(ContainElement(ContainSubstring("the 8 largest containers used 80.0 GiB together")))
	c = underPolicy(on(gpus(a100, 1), equal(8, 2, 0.1)...), limited)
	g.Expect(option(t, adviseOne(t, c), "MPS with 8").Against).To(BeEmpty())
}
