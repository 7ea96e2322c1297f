// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
)

// governs names the policy that would govern a node once the printed ones are applied.
func governs(c advice.Cluster, printed []advice.Advice, n cluster.Node) string {
	all := append([]v1alpha1.GPUSharingPolicy{}, c.Policies...)
	for _, a := range printed {
		a.Policy.CreationTimestamp = metav1.Now()
		all = append(all, *a.Policy)
	}
	g := policy.Rank(all).Govern(policy.Node{Labels: n.Labels, Devices: n.GPU.Status.Devices})
	if g.By == nil {
		return ""
	}
	return g.By.Name
}

// TestAPolicyTakesNoOtherNodes: of several products, or of another policy.
func TestAPolicyTakesNoOtherNodes(t *testing.T) {
	research := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research", CreationTimestamp: metav1.Unix(2, 0)}}
	older := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "older", CreationTimestamp: metav1.Unix(1, 0)}}
	older.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"kubernetes.io/hostname": "b.example"}}
	both := append(gpus(a100, 1), gpus(t4, 1)...)
	for name, tc := range map[string]struct {
		policies []v1alpha1.GPUSharingPolicy
		of       string
		other    cluster.Node
	}{
		"several products, governed":   {[]v1alpha1.GPUSharingPolicy{research}, "research", node("b", "research", both)},
		"several products, ungoverned": {nil, "", node("b", "", both)},
		"another policy":               {[]v1alpha1.GPUSharingPolicy{older, research}, "research", node("b", "older", gpus(a100, 1))},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := on(gpus(a100, 1), equal(3, 3, 0.1)...)
			c.Policies, c.Nodes[0].GPU.Spec.PolicyName = tc.policies, tc.of
			tc.other.Labels = map[string]string{"kubernetes.io/hostname": "b.example"}
			c.Nodes = append(c.Nodes, tc.other, node("c", tc.of, gpus(t4, 1)))
			c.Scope.Policy = tc.of
			all, err := advice.Of(c)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(all).To(HaveLen(1))
			g.Expect(all[0].Policy).NotTo(BeNil())
			g.Expect(governs(c, all, c.Nodes[0])).To(Equal(all[0].Policy.Name))
			g.Expect(governs(c, all, c.Nodes[1])).To(Equal(tc.other.GPU.Spec.PolicyName), "no advice is for it")
		})
	}
}

// TestPoliciesOfOneOutputHaveNamesOfTheirOwn: one that has the name of another would replace it.
func TestPoliciesOfOneOutputHaveNamesOfTheirOwn(t *testing.T) {
	g := NewWithT(t)
	const long = "team-research-inference-cluster"
	c := on(gpus(a100, 1), equal(3, 3, 0.1)...)
	c.Policies = []v1alpha1.GPUSharingPolicy{{ObjectMeta: metav1.ObjectMeta{Name: long}}}
	other := gpus(a100, 1)
	other[0].Product, other[0].MemoryMiB = "NVIDIA-A100-SXM4-80GB", 81920
	c.Nodes[0].GPU.Spec.PolicyName = long
	c.Nodes = append(c.Nodes, node("b", long, other))
	c.Seen.Time["b"], c.Seen.Concurrent["b"] = c.Seen.Time["a"], 3
	for _, container := range equal(3, 3, 0.1) {
		container.Node = "b"
		c.Seen.Containers = append(c.Seen.Containers, container)
	}
	all, err := advice.Of(c)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(all).To(HaveLen(2))
	g.Expect(all[0].Policy.Name).NotTo(Equal(all[1].Policy.Name))
	g.Expect([]string{all[0].Policy.Name, all[1].Policy.Name}).NotTo(ContainElement(long))
}

// TestAPriorityThatCannotBeHigher: the API takes none above a million.
func TestAPriorityThatCannotBeHigher(t *testing.T) {
	g := NewWithT(t)
	c := on(gpus(a100, 1), equal(3, 3, 0.1)...)
	c.Policies = []v1alpha1.GPUSharingPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "research"}}}
	c.Policies[0].Spec.Priority = 1000000
	c.Nodes[0].GPU.Spec.PolicyName = "research"
	c.Nodes = append(c.Nodes, node("b", "research", gpus(t4, 1)))
	a := adviseOne(t, c)
	g.Expect(a.Policy).To(BeNil())
	g.Expect(a.NoPolicy).To(ContainSubstring("lower its priority"))
}

// TestNoInstancesOfAGPUWithoutMIG: of a product that can, where the driver or the platform cannot.
func TestNoInstancesOfAGPUWithoutMIG(t *testing.T) {
	g := NewWithT(t)
	devices := gpus(a100, 1)
	devices[0].MIGCapable = false
	for _, o := range adviseOne(t, on(devices, equal(3, 3, 0.1)...)).Options {
		g.Expect(o.Name).NotTo(HavePrefix("MIG"))
	}
}

// TestAShortContainerCounts: one that began and ended between two looks into the past still used its memory.
func TestAShortContainerCounts(t *testing.T) {
	g := NewWithT(t)
	labels := map[string]string{"node": "a", "namespace": "team", "pod": "job", "container": "main"}
	seen := advice.FromPrometheus(map[advice.Query][]advice.Sample{
		advice.QueryTime:      {{Labels: map[string]string{"node": "a"}, Value: 6 * 24 * 3600}},
		advice.QueryMemory:    {{Labels: labels, Value: 30 << 30}},
		advice.QueryCompute95: {{Labels: labels, Value: 0.9}},
	}, time.Time{})
	g.Expect(seen.Containers).To(HaveLen(1))
	g.Expect(*seen.Containers[0].MemoryBytes).To(Equal(int64(30 << 30)))
	g.Expect(*seen.Containers[0].Compute95).To(Equal(0.9))
	g.Expect(seen.Containers[0].Held).To(Equal(1))
}
