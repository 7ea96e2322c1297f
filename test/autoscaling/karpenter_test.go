// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// noMore checks that Karpenter has started as many nodes as that, and starts no further one in its next eight
// scheduling loops. They take about 30 s, in which the control gets three nodes.
func (s *site) noMore(nodes int, when string) {
	s.t.Helper()
	until := s.looks() + 8
	s.Eventually(func() int {
		s.Expect(s.nodeClaims()).To(HaveLen(nodes), when)
		return s.looks()
	}, wait, poll).Should(BeNumerically(">=", until), "Karpenter looks at the pod")
}

// TestMain silences what controller-runtime would say of not being told where to log to, and gives the tests a network
// of their own.
func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	if os.Getenv("GPUSHARING_PROGRAMS") != "" {
		if err := flag.Set("test.parallel", "4"); err != nil { // they wait most of the time
			fmt.Fprintln(os.Stderr, "setting how many tests run at a time:", err)
			os.Exit(1)
		}
		for _, program := range []func() (string, error){karpenterProgram, kueueProgram} {
			if _, err := program(); err != nil {
				fmt.Fprintln(os.Stderr, "building Karpenter and Kueue:", err)
				os.Exit(1)
			}
		}
		code, done, err := env.InNetworkOfItsOwn()
		if err != nil {
			fmt.Fprintln(os.Stderr, "making a network of its own:", err)
			os.Exit(1)
		}
		if done {
			os.Exit(code)
		}
	}
	os.Exit(m.Run())
}

// TestATaintThatTheNodePoolDoesNotListMultipliesNodes is the control: without the operator, what the other tests
// exclude happens in their world.
func TestATaintThatTheNodePoolDoesNotListMultipliesNodes(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[]")
	s.playMachines(corev1.Taint{Key: v1alpha1.TaintStartup, Effect: corev1.TaintEffectNoSchedule})
	close(s.toolkit)
	s.pendingPods(1, "nvidia.com/gpu")
	s.Eventually(s.nodeClaims, wait, poll).ShouldNot(BeEmpty())
	first := time.Now()
	s.Eventually(s.nodeClaims, wait, poll).Should(HaveLen(4))
	t.Logf("4 NodeClaims for one pod, %s after the first", time.Since(first).Round(poll))
}

// TestANodePoolWithoutTheStartupTaint: the operator puts no taint on the node, neither the startup taint nor, while it
// partitions the GPU, that of a change.
func TestANodePoolWithoutTheStartupTaint(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[]")
	s.share()
	s.onlyNode(func() { s.Expect(s.taints()).To(BeEmpty()) })
	s.Expect(s.everTainted()).To(BeEmpty())
	c, _ := condition.Find(s.policy().Status.Conditions, v1alpha1.ConditionTainted)
	s.Expect(c.Status).To(Equal(metav1.ConditionFalse))
	s.Expect(c.Reason).To(Equal(v1alpha1.ReasonStartupTaintMissing))
	s.Expect(c.Message).To(HavePrefix("NodePool gpu of Karpenter"))
}

// TestANodeThatIsChangedAfterItWasReadyCostsOneNode is the limit of a NodePool without the startup taint. If the node
// advertises its GPUs before the operator knows them, it is initialized. Then the change has the taint, so the pod,
// which a scheduler would have bound by then, gets one further node.
func TestANodeThatIsChangedAfterItWasReadyCostsOneNode(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[]")
	s.share()
	close(s.toolkit)
	s.pendingPods(1, "nvidia.com/gpu")
	s.Eventually(s.nodeClaims, wait, poll).Should(HaveLen(1))
	s.Eventually(func() string { return s.initialized(s.nodeClaims()[0]) }, wait, poll).Should(Equal("Initialized"))
	close(s.driver)
	s.Eventually(s.partitioning, wait, poll).Should(BeTrue())
	s.Expect(s.taints()).To(ConsistOf(v1alpha1.TaintChanging))
	changed := time.Now()
	s.Eventually(s.nodeClaims, wait, poll).Should(HaveLen(2))
	t.Logf("NodeClaim 2 comes %s after the change began", time.Since(changed).Round(poll))
	s.noMore(2, "while the GPU of the first is partitioned")
	close(s.changing)
	s.advertise("nvidia.com/gpu", 14)
	s.Expect(s.nodeClaims()).To(HaveLen(2))
}

// TestANodePoolWithTheStartupTaint: Karpenter puts the taint on the node, and the operator removes it once the node is
// ready.
func TestANodePoolWithTheStartupTaint(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[{key: "+v1alpha1.TaintStartup+", effect: NoSchedule}]")
	s.share()
	s.onlyNode(func() {
		s.Expect(s.taints()).To(ConsistOf(v1alpha1.TaintStartup))
		s.Expect(s.initialized(s.nodeClaims()[0])).To(Equal("StartupTaintsExist"))
	})
	s.Expect(s.everTainted()).To(ConsistOf(v1alpha1.TaintStartup))
	c, _ := condition.Find(s.policy().Status.Conditions, v1alpha1.ConditionTainted)
	s.Expect(c.Reason).To(Equal(v1alpha1.ReasonTaintsPresent), c.Message)
	claim := s.nodeClaims()[0]
	s.Expect(s.condition(claim, "Drifted")).To(BeEmpty())
	s.apply(fmt.Sprintf(nodePool, "[]"))
	s.Eventually(func() string { return s.condition(claim, "Drifted") }, wait, poll).Should(Equal("NodePoolDrifted"), "an edit of the list lets Karpenter replace all nodes")
}

// TestTheReadinessTaint: Karpenter v1.13 and newer waits for a node with this taint, though the NodePool does not list
// it.
func TestTheReadinessTaint(t *testing.T) {
	t.Parallel()
	s := newSite(t, "[]")
	s.share("--karpenter-readiness-taint")
	s.onlyNode(func() {
		s.Expect(s.taints()).To(ConsistOf(v1alpha1.TaintStartupReadiness))
		s.Expect(s.initialized(s.nodeClaims()[0])).To(Equal("KnownEphemeralTaintsExist"))
	})
	s.Expect(s.everTainted()).To(ConsistOf(v1alpha1.TaintStartupReadiness))
	c, _ := condition.Find(s.policy().Status.Conditions, v1alpha1.ConditionTainted)
	s.Expect(c.Reason).To(Equal(v1alpha1.ReasonTaintsPresent), c.Message)
}

// share starts the operator and its policy, which needs the GPUs of a node idle: MIG.
func (s *site) share(flags ...string) {
	s.t.Helper()
	s.startController(flags...)
	s.playMachines()
	s.narrate()
	s.apply(`
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {}
  sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g.5gb}]}}
  rollout: {startupTaint: UntilReady}
`)
	s.Eventually(func() int64 { return s.policy().Status.ObservedGeneration }, wait, poll).Should(BeEquivalentTo(1), "before the first node")
}

// onlyNode has Karpenter start a node for a pod, and checks that it starts no other one while the GPU is partitioned,
// nor afterwards. What must hold meanwhile is checked too.
func (s *site) onlyNode(meanwhile func()) {
	s.t.Helper()
	s.pendingPods(1, "nvidia.com/gpu")
	s.Eventually(s.nodeClaims, wait, poll).Should(HaveLen(1))
	close(s.driver)
	s.Eventually(s.partitioning, wait, poll).Should(BeTrue())
	close(s.toolkit)
	s.t.Logf("the change of the GPU begins after %s", time.Since(s.requested).Round(poll))
	s.noMore(1, "while the GPU is partitioned")
	meanwhile()

	close(s.changing)
	s.advertise("nvidia.com/gpu", 7)
	s.Eventually(func() string { return s.initialized(s.nodeClaims()[0]) }, wait, poll).Should(Equal("Initialized"))
	s.Eventually(s.taints, wait, poll).Should(BeEmpty())
	s.t.Logf("the node is ready after %s", time.Since(s.requested).Round(poll))
	s.noMore(1, "once the node is ready")
	s.Eventually(func() int32 { return s.policy().Status.Nodes.Ready }, wait, poll).Should(BeEquivalentTo(1))
	s.t.Logf("1 NodeClaim for one pod, after %s", time.Since(s.requested).Round(poll))
}

// narrate logs what the policy reports of its nodes, whenever that changes.
func (s *site) narrate() {
	s.t.Helper()
	s.background(func(ctx context.Context) {
		told := map[string]string{}
		ticker := time.NewTicker(poll)
		defer ticker.Stop()
		for {
			p := &v1alpha1.GPUSharingPolicy{}
			if err := s.client.Get(ctx, client.ObjectKey{Name: "research"}, p); err == nil {
				for _, node := range p.Status.Pending {
					if told[node.NodeName] != node.Message {
						told[node.NodeName] = node.Message
						s.t.Logf("%s: %s: %s", node.NodeName, node.Reason, node.Message)
					}
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	})
}
