// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
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
`

// TestASecondImportKeepsThePoliciesOfTheFirst: a node that is shared by hand later is described by a policy of another
// name. (A first import in whole clusters: test/cluster.)
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
	s.Expect(env.WriteKubeconfig(cluster.Config, kubeconfig)).To(Succeed())
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
