// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// byHand shares GPUs as an administrator does: a ConfigMap that the ClusterPolicy names, and labels on nodes.
const byHand = `
apiVersion: v1
kind: ConfigMap
metadata: {name: time-slicing-config, namespace: gpu-operator}
data:
  slice-4: |
    version: v1
    sharing:
      timeSlicing:
        resources:
        - name: nvidia.com/gpu
          replicas: 4
  mig-twice: |
    version: v1
    sharing:
      timeSlicing:
        failRequestsGreaterThanOne: true
        resources:
        - name: nvidia.com/mig-3g.20gb
          replicas: 2
`

// TestImportChangesNothing: what `kubectl gpusharing import` prints of a cluster that was shared by hand, applied,
// leaves every node as it was: nobody is evicted or kept off, the same is advertised, no instance is touched.
func TestImportChangesNothing(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	s := newScenario(t, cluster)
	s.apply(byHand)
	s.apply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy}, spec: {devicePlugin: {enabled: true, " +
		"config: {name: time-slicing-config}}, mig: {strategy: mixed}}}")
	sliced, cut := s.machine("t4", sim.T4, sim.T4), s.machine("a100", sim.A100)
	plain := s.machine("plain", sim.T4)
	uuid := cut.uuids(t)[0]
	s.Expect(cut.hardware.SetMIG(t.Context(), uuid, true)).To(Succeed())
	for _, start := range []int{0, 4} {
		s.Expect(cut.hardware.CreateInstance(t.Context(), uuid, "3g.20gb", gpu.Placement{Start: start, Size: 4})).To(Succeed())
	}
	s.label("t4", "nvidia.com/device-plugin.config", "slice-4")
	s.label("a100", "nvidia.com/device-plugin.config", "mig-twice")
	for range 20 {
		s.others()
	}
	want := map[string]map[string]int64{
		"t4": {"nvidia.com/gpu": 8}, "a100": {"nvidia.com/mig-3g.20gb": 4}, "plain": {"nvidia.com/gpu": 1},
	}
	for name, resources := range want {
		s.Expect(s.allocatable(name)).To(Equal(resources), "as it was shared by hand")
	}
	s.pod("default", "train", "a100", nil)
	s.Expect(cut.hardware.SetHolders(uuid, gpu.Holder{Namespace: "default", Pod: "train", Container: "main", Instance: 1})).To(Succeed())
	instances, writes := cut.instances(t), len(cut.hardware.Writes())
	s.others()

	text := s.imported(cluster)
	s.Expect(text).To(ContainSubstring("# Not described: node plain: whole GPUs that are not shared need no policy."))
	s.applyPolicies(text)
	all := s.settle()
	s.Expect(count(all, "eviction")).To(BeZero(), "%v", all)
	for name, resources := range want {
		s.Expect(s.allocatable(name)).To(Equal(resources), name)
		s.Expect(s.node(name).Spec.Taints).To(BeEmpty(), name)
	}
	for _, e := range s.announced() {
		s.Expect(e).NotTo(Or(ContainSubstring("GPUSchedulingDisabled"), ContainSubstring("Evicting")))
	}
	s.expectReady("slice-4")
	s.expectReady("mig-twice")
	s.Expect(cut.instances(t)).To(Equal(instances))
	s.Expect(cut.hardware.Writes()).To(HaveLen(writes), "NVML was not asked to change anything")
	s.Expect(sliced.hardware.Writes()).To(BeEmpty())
	s.Expect(plain.hardware.Writes()).To(BeEmpty())
	s.Expect(s.imported(cluster)).To(ContainSubstring("# Not described: node t4: policy slice-4 governs already."))
}

// TestASecondImportKeepsThePoliciesOfTheFirst: a node that is shared by hand later is described by a policy of another
// name.
func TestASecondImportKeepsThePoliciesOfTheFirst(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	s := newScenario(t, cluster)
	s.apply(byHand)
	s.apply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy}, spec: {devicePlugin: {enabled: true, " +
		"config: {name: time-slicing-config}}, mig: {strategy: mixed}}}")
	s.machine("t4", sim.T4)
	s.machine("late", sim.T4)
	s.label("t4", "nvidia.com/device-plugin.config", "slice-4")
	for range 5 {
		s.others()
	}
	s.policy("slice-4", "{nodeSelector: {matchLabels: {kubernetes.io/hostname: t4}}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}}}")
	s.settle()
	s.expectReady("slice-4")
	s.label("late", "nvidia.com/device-plugin.config", "slice-4")
	for range 5 {
		s.others()
	}
	s.applyPolicies(s.imported(cluster))
	s.settle()
	s.Expect(s.getPolicy("slice-4").Spec.Sharing.TimeSlicing.Replicas).To(Equal(int32(8)))
	s.Expect(s.gpuNode("t4").Spec.PolicyName).To(Equal("slice-4"))
	s.Expect(s.allocatable("t4")).To(Equal(map[string]int64{"nvidia.com/gpu": 8}))
	s.Expect(s.gpuNode("late").Spec.PolicyName).To(Equal("slice-4-2"))
	s.Expect(s.allocatable("late")).To(Equal(map[string]int64{"nvidia.com/gpu": 4}), "as it was shared by hand")
}

// applyPolicies applies the policies of a text with several documents.
func (s *scenario) applyPolicies(text string) {
	s.t.Helper()
	for document := range strings.SplitSeq(text, "\n---\n") {
		if strings.Contains(document, "kind: GPUSharingPolicy") {
			s.apply(document)
		}
	}
}

// imported is what the kubectl plugin prints.
func (s *scenario) imported(cluster *env.Cluster) string {
	s.t.Helper()
	kubeconfig := filepath.Join(s.t.TempDir(), "kubeconfig")
	data, err := env.Kubeconfig(cluster.Config)
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(os.WriteFile(kubeconfig, data, 0o600)).To(Succeed())
	var out strings.Builder
	program := cli.Program{Out: &out, Clock: clocktesting.NewFakeClock(s.clock.Now())}
	s.Expect(program.Run(s.ctx(), []string{"import", "--kubeconfig", kubeconfig})).To(Succeed())
	return out.String()
}

// label labels a node by hand.
func (s *scenario) label(node, name, value string) {
	s.t.Helper()
	patch := []byte(`{"metadata":{"labels":{"` + name + `":"` + value + `"}}}`)
	s.Expect(s.client.Patch(s.ctx(), s.node(node), client.RawPatch(types.MergePatchType, patch))).To(Succeed())
}

func (m *machine) uuids(t *testing.T) []string {
	t.Helper()
	inventory, err := m.hardware.Observe(t.Context())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	var uuids []string
	for _, d := range inventory.Devices {
		uuids = append(uuids, d.UUID)
	}
	return uuids
}

func (m *machine) instances(t *testing.T) []gpu.Instance {
	t.Helper()
	inventory, err := m.hardware.Observe(t.Context())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	var all []gpu.Instance
	for _, d := range inventory.Devices {
		all = append(all, d.State.Instances...)
	}
	return all
}
