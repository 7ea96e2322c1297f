// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
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

// TestAMaintenanceWindowWakesTheController: until it opens nothing is written, and nothing but the clock tells that it
// is open.
func TestAMaintenanceWindowWakesTheController(t *testing.T) {
	t.Parallel()
	s := newScenario(t, env.Start(t, env.WithNVIDIA()))
	s.machine("a100", sim.A100)
	opens := s.clock.Now().UTC().Add(6 * time.Hour).Truncate(time.Hour)
	s.policy("mig", fmt.Sprintf(`{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}, `+
		`rollout: {windows: [{schedule: "0 %d * * *", duration: 4h}]}}`, opens.Hour()))
	s.settle()
	s.expectCondition("mig", v1alpha1.ConditionReady, "False", v1alpha1.ReasonOutsideWindow)
	status := s.getPolicy("mig").Status
	s.Expect(status.NextWindowTime.Time).To(BeTemporally("==", opens))
	s.Expect(status.Pending[0].Reason).To(Equal(v1alpha1.ReasonOutsideWindow))
	s.Expect(s.node("a100").Spec.Taints).To(BeEmpty())

	result, err := s.controller().Reconcile(s.ctx(), reconciliation())
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(result.RequeueAfter).To(Equal(opens.Sub(s.clock.Now())))
	s.clock.Step(result.RequeueAfter)
	s.settle()
	s.expectReady("mig")
	s.Expect(s.getPolicy("mig").Status.NextWindowTime).To(BeNil())
}

// TestNodesThatWorry: what a person should look at is told once on the policy and once on the node, and so is its end.
func TestNodesThatWorry(t *testing.T) {
	t.Parallel()
	s := newScenario(t, env.Start(t, env.WithNVIDIA()))
	s.machine("t4", sim.T4)
	s.policy("t4s", timeSlicing(2))
	s.settle()
	told := func() (all []string) {
		for _, e := range s.announced() {
			if strings.Contains(e, " Node t4: ") && !strings.Contains(e, "nodes ready") && !strings.Contains(e, "node ready") {
				all = append(all, e)
			}
		}
		return all
	}
	s.Expect(told()).To(BeEmpty(), "nothing worries on the way")
	s.label("t4", "nvidia.com/gpu.deploy.operands", "false")
	s.settle()
	s.Expect(told()).To(HaveExactElements(
		HavePrefix("Warning NodeOptedOut Node t4: "), HavePrefix("Warning NodeOptedOut Node t4: "),
	))
	s.label("t4", "nvidia.com/gpu.deploy.operands", "true")
	s.settle()
	end := told() // the device plugin comes back, which may be told too
	s.Expect(len(end)).To(BeNumerically(">=", 2))
	s.Expect(end[len(end)-2:]).To(HaveExactElements(
		HavePrefix("Normal Recovered Node t4: no longer"), HavePrefix("Normal Recovered Node t4: no longer"),
	))
	s.expectReady("t4s")
}
