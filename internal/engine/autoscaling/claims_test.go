// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"fmt"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

const managed = renamed + "\nautoscaling: {mode: Manage}"

// listing is a node whose kubelet lists a resource.
func listing(n cluster.Node, resource string, count int64) cluster.Node {
	n.Allocatable = map[string]int64{resource: count}
	return n
}

// written is the capacity that is written for Karpenter; nil: nothing is.
func written(t *testing.T, s autoscaling.Snapshot) any {
	t.Helper()
	writes := s.Advise().Writes
	if len(writes) == 0 || writes[0].Overlay == nil {
		return nil
	}
	NewWithT(t).Expect(writes).To(HaveLen(1))
	return writes[0].Overlay.Object["spec"].(map[string]any)["capacity"]
}

var forty = map[string]any{"nvidia.com/gpu": "0", shared: "40"}

// TestAnAgentThatLiesSpeaksForItsNodeOnly: what one agent says of the GPUs of its node is written for the whole group only if its kubelet, or
// the other nodes of the group, say the same. Otherwise it is reported, with the node.
func TestAnAgentThatLiesSpeaksForItsNodeOnly(t *testing.T) {
	honest := func(name string) cluster.Node { return listing(node(name, t4, 4, inPool("t4.four")), shared, 40) }
	lies := map[string]cluster.Node{
		"more GPUs than the kubelet lists":           listing(node("c", t4, 64, inPool("t4.four")), shared, 40),
		"as many GPUs as the kubelet lists replicas": listing(node("c", t4, 40, inPool("t4.four")), shared, 40),
		"more GPUs, while its kubelet lists none":    node("c", t4, 8, inPool("t4.four")),
		"another product":                            listing(node("c", a100, 4, inPool("t4.four")), shared, 20),
	}
	for name, lie := range lies {
		for _, first := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				g := NewWithT(t)
				nodes := []cluster.Node{honest("a"), honest("b"), lie}
				if first {
					lie.Name = "0" + lie.Name
					nodes = []cluster.Node{lie, honest("a"), honest("b")}
				}
				s := karpenter(t, managed, nodes...)
				g.Expect(written(t, s)).To(Equal(forty))
				is := only(t, s)
				g.Expect(is.Reason).To(Equal(v1alpha1.ReasonNodesDisagree))
				g.Expect(is.Message).To(ContainSubstring("node " + lie.Name))
				g.Expect(is.Product).To(Equal(t4))
				c, _ := autoscaling.Condition(s.Advise().Groups["research"])
				g.Expect(string(c.Status)).To(Equal("False"))
			})
		}
	}
}

// TestAnAgentThatLiesAlone: a group of one node has no peers, so its kubelet decides; what was written stays.
func TestAnAgentThatLiesAlone(t *testing.T) {
	for name, lie := range map[string]cluster.Node{
		"above what the kubelet lists": listing(node("c", t4, 64, inPool("t4.four")), shared, 40),
		"below it":                     listing(node("c", t4, 20, inPool("t4.four")), shared, 40),
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			s := karpenter(t, managed, lie)
			s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{{
				Kind: v1alpha1.NodeGroupNodePool, Name: "gpu", Product: t4, GPUsPerNode: 4, InstanceTypes: []string{"t4.four"},
				Advertised: []v1alpha1.NodeResource{{Name: shared, Count: 40}},
			}}
			g.Expect(written(t, s)).To(Equal(forty))
			g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonNodesDisagree))
		})
	}
	t.Run("and nothing is known from before", func(t *testing.T) {
		g := NewWithT(t)
		s := karpenter(t, managed, listing(node("c", t4, 64, inPool("t4.four")), shared, 40))
		g.Expect(written(t, s)).To(BeNil())
		g.Expect(only(t, s).Reason).To(Equal(v1alpha1.ReasonNodesDisagree))
	})
}

// TestNodesThatHonestlyDiffer: GPUs die, and machines are replaced. Neither is a lie.
func TestNodesThatHonestlyDiffer(t *testing.T) {
	remembered := func(s autoscaling.Snapshot) autoscaling.Snapshot {
		s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{{
			Kind: v1alpha1.NodeGroupNodePool, Name: "gpu", Product: t4, GPUsPerNode: 4, InstanceTypes: []string{"t4.four"},
			Advertised: []v1alpha1.NodeResource{{Name: shared, Count: 40}},
		}}
		return s
	}
	for name, s := range map[string]autoscaling.Snapshot{
		"a GPU has died": karpenter(t, managed, listing(node("a", t4, 3, inPool("t4.four")), shared, 30), listing(node("b", t4, 4, inPool("t4.four")), shared, 40)),
		"a GPU has died, and the others are being changed": remembered(karpenter(t, managed, listing(node("a", t4, 3, inPool("t4.four")), shared, 30),
			node("b", t4, 4, inPool("t4.four")), node("c", t4, 4, inPool("t4.four")))),
		"no kubelet lists anything yet":     karpenter(t, managed, node("a", t4, 4, inPool("t4.four")), node("b", t4, 4, inPool("t4.four"))),
		"the only node is being changed":    remembered(karpenter(t, managed, listing(node("a", t4, 4, inPool("t4.four")), shared, 20))),
		"a new node still lists whole GPUs": remembered(karpenter(t, managed, listing(node("a", t4, 4, inPool("t4.four")), "nvidia.com/gpu", 4))),
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			g.Expect(written(t, s)).To(Equal(forty))
			g.Expect(only(t, s).Reason).NotTo(Equal(v1alpha1.ReasonNodesDisagree))
		})
	}
	t.Run("machines with more GPUs took the place of others", func(t *testing.T) {
		g := NewWithT(t)
		s := remembered(karpenter(t, managed, listing(node("a", t4, 8, inPool("t4.four")), "nvidia.com/gpu", 8)))
		g.Expect(written(t, s)).To(HaveKeyWithValue(shared, "80"))
		g.Expect(only(t, s).Reason).NotTo(Equal(v1alpha1.ReasonNodesDisagree))
	})
}

// TestAnAgentThatLiesAboutTheHardwareOfOthers: groups without a node go by what nodes of the product report anywhere, and one agent does not
// change that for all.
func TestAnAgentThatLiesAboutTheHardwareOfOthers(t *testing.T) {
	g := NewWithT(t)
	profiles := func(most int32, more ...v1alpha1.ProfileStatus) []v1alpha1.ProfileStatus {
		return append([]v1alpha1.ProfileStatus{
			{Name: "1g.5gb", ID: 19, Slices: 1, MemoryMiB: 4864, Max: most, Size: 1, Starts: []int32{0, 1, 2, 3, 4, 5, 6}[:most]},
			{Name: "7g.40gb", Slices: 7, MemoryMiB: 40192, Max: 1, Size: 8, Starts: []int32{0}},
		}, more...)
	}
	elsewhere := func(name string, has []v1alpha1.ProfileStatus) cluster.Node {
		n := node(name, a100, 2, nil)
		for i := range n.GPU.Status.Devices {
			n.GPU.Status.Devices[i].Profiles = has
		}
		return n
	}
	lie := profiles(1, v1alpha1.ProfileStatus{Name: "9g.90gb", ID: 99, Slices: 1, Max: 1, Size: 1, Starts: []int32{0}})
	for _, nodes := range [][]cluster.Node{
		{elsewhere("a", profiles(7)), elsewhere("b", profiles(7)), elsewhere("c", lie)},
		{elsewhere("c", lie)}, // nobody else has such a GPU, but the operator knows it
	} {
		s := karpenter(t, filled+declared, nodes...)
		s.Policies[0].Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"karpenter.sh/nodepool": "gpu"}}
		g.Expect(written(t, s)).To(HaveKeyWithValue("nvidia.com/mig-1g.5gb", "14"), "%d nodes", len(nodes))
	}
}

// TestWhatIsReportedOfAGroupFits: what nodes have and are named after fits into status.nodeGroups, or is cut with a count.
func TestWhatIsReportedOfAGroupFits(t *testing.T) {
	g := NewWithT(t)
	var nodes []cluster.Node
	for i := range 40 {
		n := node(fmt.Sprintf("n%02d", i), t4, 1, inPool(fmt.Sprintf("type-%02d", i)))
		n.Allocatable = map[string]int64{"nvidia.com/" + strings.Repeat("x", 60): 1}
		nodes = append(nodes, n)
	}
	is := only(t, karpenter(t, renamed, nodes...))
	g.Expect(is.InstanceTypes).To(HaveLen(32))
	g.Expect(is.Message).To(ContainSubstring("instanceTypes lists 32 of 40"))
	g.Expect(is.Advertised).To(BeEmpty(), "the name is longer than that of any resource of the operator's")

	mixed := node("mixed", t4, 16, map[string]string{"eks.amazonaws.com/nodegroup": "gpu"})
	for i := range mixed.GPU.Status.Devices {
		mixed.GPU.Status.Devices[i].Product = fmt.Sprintf("%02d-%s", i, strings.Repeat("p", 90))
	}
	g.Expect(len([]rune(only(t, karpenter(t, renamed, mixed)).Product))).To(BeNumerically("<=", 256))

	long := node("long", t4, 1, nil)
	long.Annotations = map[string]string{"cluster.x-k8s.io/owner-name": strings.Repeat("o", 300), "cluster.x-k8s.io/owner-kind": "MachineSet"}
	s := karpenter(t, renamed, long)
	s.Pools = nil
	g.Expect(s.Advise().Groups["research"]).To(BeEmpty(), "no object has such a name")
}
