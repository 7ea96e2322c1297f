// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpusharingpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// errKilled ends the controller where it stands.
var errKilled = errors.New("killed")

// TestFaults is a whole life in which every write fails once before it succeeds, or is the last that a controller makes
// before it is killed. Each ends as a life without faults does. What is decided under each fault in each state is shown
// by TestEveryFaultInEveryState of internal/engine/rollout.
func TestFaults(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	nodes := schema.GroupResource{Resource: "nodes"}
	for name, answer := range map[string]error{
		"every write fails once":                       errKilled,
		"every write is answered once with a conflict": apierrors.NewConflict(nodes, "a100", errors.New("changed")),
		"every write is answered once with a throttle": apierrors.NewTooManyRequests("later", 1),
	} {
		t.Run(name, func(t *testing.T) {
			attempts := map[string]int{}
			newScenario(t, cluster).live(func(write string, _ int) error {
				attempts[write]++
				if attempts[write]%2 == 1 {
					return answer
				}
				return nil
			})
		})
	}
	t.Run("every controller is killed after its first write", func(t *testing.T) {
		newScenario(t, cluster).live(func(_ string, inReconcile int) error {
			if inReconcile > 1 {
				return errKilled
			}
			return nil
		})
	})
}

// live is the life of a policy on a node, from an untouched cluster to one that is as before.
func (s *scenario) live(fault func(write string, inReconcile int) error) {
	s.t.Helper()
	s.machine("a100", sim.A100)
	s.others()
	s.others()
	before, inReconcile := s.footprint(), 0
	s.fail = func(write string) error {
		inReconcile++
		return fault(write, inReconcile)
	}
	through := func() {
		for range 120 {
			inReconcile = 0
			if written, err := s.reconcile(); err == nil && len(written) == 0 && s.quiet() {
				return
			}
			s.others()
		}
		s.t.Fatal("does not end")
	}
	s.policy("a100s", `{gpuSelector: {products: ["NVIDIA-A100-*"]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}}`)
	through()
	s.expectReady("a100s")
	s.Expect(s.allocatable("a100")).To(Equal(map[string]int64{"nvidia.com/mig-1g.5gb": 7}))
	s.Expect(s.client.DeleteAllOf(s.ctx(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	through()
	s.Expect(s.footprint()).To(Equal(before))
}

// quiet says that nothing is written though time passes.
func (s *scenario) quiet() bool {
	for range 3 {
		s.others()
		if written, err := s.reconcile(); err != nil || len(written) > 0 {
			return false
		}
	}
	return true
}

// twoReady is a cluster in which a policy shares the GPUs of nodes a and b, one after the other.
func twoReady(t *testing.T) *scenario {
	t.Helper()
	s := newScenario(t, env.Start(t, env.WithNVIDIA()))
	s.machine("a", sim.T4)
	s.machine("b", sim.T4)
	s.policy("research", timeSlicing(4))
	s.settle()
	s.expectReady("research")
	return s
}

// reconciled lets one controller reconcile.
func (s *scenario) reconciled(c *gpusharingpolicy.Controller) error {
	s.t.Helper()
	_, err := c.Reconcile(log.IntoContext(s.ctx(), logr.Discard()), reconciliation())
	return err
}

func (s *scenario) pending(policy, node string) v1alpha1.PendingNode {
	s.t.Helper()
	for _, n := range s.getPolicy(policy).Status.Pending {
		if n.NodeName == node {
			return n
		}
	}
	return v1alpha1.PendingNode{}
}

// TestAGPUNodeThatCannotBeMadeAgainCostsItsNodeOnly: the API server refuses to make the GPUNode of a node that the operator has changed.
// All other nodes go on, the node stays as it is, and its policy names it.
func TestAGPUNodeThatCannotBeMadeAgainCostsItsNodeOnly(t *testing.T) {
	t.Parallel()
	s := twoReady(t)
	label := s.node("a").Labels[v1alpha1.LabelConfig]
	s.Expect(s.client.Delete(s.ctx(), s.gpuNode("a"))).To(Succeed())
	nodes := s.nodes
	s.nodes = nodes[1:] // nobody makes the GPUNode of a again
	s.policy("research", timeSlicing(2))
	c := s.controller()
	for range 40 {
		_ = s.reconciled(c)
		s.others()
	}
	s.Expect(s.allocatable("b")).To(HaveKeyWithValue("nvidia.com/gpu", int64(2)), "the other node")
	s.Expect(s.pending("research", "a").Reason).To(Equal(v1alpha1.ReasonGPUNodeMissing))
	s.Expect(s.node("a").Labels).To(HaveKeyWithValue(v1alpha1.LabelConfig, label), "the node stays as it is")
	s.Expect(s.configMap().Data).To(HaveKey(label), "and so does what it selects")

	s.Expect(s.client.DeleteAllOf(s.ctx(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	for range 40 {
		_ = s.reconciled(c)
		s.others()
	}
	s.Expect(s.node("b").Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
	s.Expect(s.configMap().Data).To(HaveKey(label), "the ClusterPolicy is not restored as long as node a is not")
	s.nodes = nodes
	s.others()
	s.clock.Step(15 * time.Minute) // a GPUNode that was made anew waits for its policy
	for range 40 {
		s.Expect(s.reconciled(c)).To(Succeed())
		s.others()
	}
	s.Expect(s.node("a").Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
	s.Expect(s.configMap()).To(BeNil())
}

// TestARefusedConfigMapIsReported: nothing makes NVIDIA's programs read what is not there, no node begins, and the policy says why.
func TestARefusedConfigMapIsReported(t *testing.T) {
	for says, refuse := range map[string]error{
		"not today":                           apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, pluginconfig.ConfigMapName, errors.New("not today")),
		`namespaces "gpu-operator" not found`: apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "gpu-operator"), // and the ClusterPolicy names it still
	} {
		t.Run(says, func(t *testing.T) {
			t.Parallel()
			s := newScenario(t, env.Start(t, env.WithNVIDIA()))
			s.machine("a", sim.A100)
			was := s.clusterSpec()
			s.fail = func(write string) error {
				if write == "apply ConfigMap "+pluginconfig.ConfigMapName {
					return refuse
				}
				return nil
			}
			s.policy("research", "{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}}}")
			c := s.controller()
			for range 20 {
				_ = s.reconciled(c)
				s.others()
			}
			is := s.pending("research", "a")
			s.Expect(is.Reason).To(Equal(v1alpha1.ReasonWriteFailed))
			s.Expect(is.Message).To(ContainSubstring(says))
			s.Expect(s.clusterSpec()).To(Equal(was))
			s.Expect(s.node("a").Spec.Taints).To(BeEmpty())
			s.fail = nil
			for range 60 {
				_ = s.reconciled(c)
				s.others()
			}
			s.expectReady("research")
		})
	}
}

// TestARefusedWriteCostsItsNodeOnly: an admission webhook refuses what the operator writes about one node, which would be the first to change.
func TestARefusedWriteCostsItsNodeOnly(t *testing.T) {
	for name, refuse := range map[string]error{
		"by a policy":  apierrors.NewForbidden(schema.GroupResource{Resource: "gpunodes"}, "a", errors.New("not today")),
		"for its size": apierrors.NewInvalid(schema.GroupKind{Kind: "GPUNode"}, "a", nil),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := twoReady(t)
			s.fail = func(write string) error {
				if write == "apply GPUNode a" {
					return refuse
				}
				return nil
			}
			s.policy("research", timeSlicing(2))
			c := s.controller()
			for range 40 {
				_ = s.reconciled(c)
				s.others()
			}
			s.Expect(s.allocatable("b")).To(HaveKeyWithValue("nvidia.com/gpu", int64(2)), "the other node")
			is := s.pending("research", "a")
			s.Expect(is.Reason).To(Equal(v1alpha1.ReasonWriteFailed))
			s.Expect(is.Message).To(ContainSubstring("GPUNode a"))
			s.fail = nil
			s.clock.Step(time.Minute)
			for range 40 {
				_ = s.reconciled(c)
				s.others()
			}
			s.expectReady("research")
		})
	}
}

// TestUndecided: a definition of NVIDIA's serves no version, so that nobody can tell whether the DRA driver has taken
// over.
func TestUndecided(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	s := newScenario(t, cluster)
	s.machine("t4", sim.T4)
	s.policy("research", timeSlicing(4))
	s.settle()
	s.expectReady("research")
	observed := s.getPolicy("research").Status

	const definition = "gpuclusters.nvidia.com"
	s.Expect(cluster.Serve(s.ctx(), definition)).To(Succeed())
	s.policy("fresh", "{nodeSelector: {matchLabels: {no: such}}, sharing: {strategy: Exclusive}}")
	c := s.controller()
	reconcileOnce := func() time.Duration {
		s.t.Helper()
		result, err := c.Reconcile(log.IntoContext(s.ctx(), logr.Discard()), reconciliation())
		s.Expect(err).NotTo(HaveOccurred())
		return result.RequeueAfter
	}
	s.announced()
	s.Expect(reconcileOnce()).To(BeNumerically(">", 0), "it looks again by itself")
	s.clock.Step(59 * time.Second)
	s.Expect(reconcileOnce()).To(BeNumerically(">", 0))
	s.Expect(s.getPolicy("research").Status).To(Equal(observed), "what usually passes within seconds is not reported")
	since := s.clock.Now().Add(-59 * time.Second).UTC().Format(time.RFC3339)
	s.clock.Step(time.Second)
	s.Expect(reconcileOnce()).To(BeNumerically(">", 0))
	for _, name := range []string{"research", "fresh"} {
		message := s.expectCondition(name, v1alpha1.ConditionReady, metav1.ConditionUnknown, v1alpha1.ReasonClusterNotRead)
		s.Expect(message).To(Equal("The controller decides nothing since " + since + ": CustomResourceDefinition gpuclusters.nvidia.com serves no version, so " +
			"GPUCluster is not read yet; serve one of its versions, or delete it"))
	}
	s.expectCondition("research", v1alpha1.ConditionAccepted, metav1.ConditionTrue, v1alpha1.ReasonAccepted)
	s.expectCondition("fresh", v1alpha1.ConditionAccepted, metav1.ConditionUnknown, v1alpha1.ReasonClusterNotRead)
	s.Expect(s.announced()).To(ContainElement(HavePrefix("Warning " + v1alpha1.ReasonClusterNotRead)))

	s.writes = nil
	s.clock.Step(time.Hour)
	reconcileOnce()
	s.Expect(s.writes).To(BeEmpty(), "reported once")
	s.Expect(cluster.Serve(s.ctx(), definition, "v1beta1")).To(Succeed())
	s.Eventually(func() []string { reconcileOnce(); return s.writes }, "20s", "100ms").ShouldNot(BeEmpty())
	s.expectReady("research")

	s.Expect(cluster.Serve(s.ctx(), definition)).To(Succeed())
	s.clock.Step(time.Hour)
	reconcileOnce()
	s.expectReady("research") // the time counts from the first reconcile that could not decide
}

// TestPoliciesThatVanishAreNotReleased: only policies that were deleted by themselves are. The cache may show that
// they are gone before it shows what became of their definition, and it may show none while a watch on definitions
// that came back has not begun again.
func TestPoliciesThatVanishAreNotReleased(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	t.Run("the definition may be gone", func(t *testing.T) { testDefinitionGone(newScenario(t, cluster)) })
	t.Run("the cache lacks the policy", func(t *testing.T) { testPolicyNotCached(newScenario(t, cluster)) })
	t.Run("the GPUNode of the node is gone", func(t *testing.T) { testGPUNodeGone(newScenario(t, cluster)) })
}

// shared is a cluster with a node that a policy shares, and all that the operator changes there before and after.
func (s *scenario) shared() (before, after map[string]any) {
	s.machine("t4", sim.T4)
	s.settle()
	before = s.footprint()
	s.policy("research", timeSlicing(4))
	s.settle()
	s.expectReady("research")
	return before, s.footprint()
}

func testDefinitionGone(s *scenario) {
	before, after := s.shared()
	s.Expect(s.client.Delete(s.ctx(), s.getPolicy("research"))).To(Succeed())
	resource := schema.GroupResource{Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"}
	for _, name := range []string{pluginconfig.PolicyDefinition, "gpunodes.gpusharing.io"} {
		for says, answer := range map[string]func(*metav1.PartialObjectMetadata) error{
			"is being deleted": func(o *metav1.PartialObjectMetadata) error {
				o.DeletionTimestamp = &metav1.Time{Time: s.clock.Now()}
				return nil
			},
			"does not exist": func(*metav1.PartialObjectMetadata) error { return apierrors.NewNotFound(resource, name) },
			"forbidden": func(*metav1.PartialObjectMetadata) error {
				return apierrors.NewForbidden(resource, name, errors.New("no rights"))
			},
		} {
			gone := true
			s.uncached = interceptor.NewClient(s.client, interceptor.Funcs{
				Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
					definition, is := o.(*metav1.PartialObjectMetadata)
					if !gone || !is || key.Name != name {
						return c.Get(ctx, key, o, opts...)
					}
					return errors.Join(c.Get(ctx, key, o, opts...), answer(definition))
				},
			})
			s.announced()
			s.writes = nil
			controller := s.controller()
			_, err := controller.Reconcile(log.IntoContext(s.ctx(), logr.Discard()), reconciliation())
			s.Expect(s.writes).To(BeEmpty(), "%s %s", name, says)
			s.Expect(s.footprint()).To(Equal(after))
			if says == "forbidden" {
				s.Expect(err).To(MatchError(ContainSubstring(says)))
				continue
			}
			s.Expect(err).NotTo(HaveOccurred())
			s.Expect(controller.Ready(nil)).To(MatchError(And(ContainSubstring(name+" "+says), MatchRegexp(`^.{1,200}$`))))
			s.Expect(s.announced()).To(ConsistOf(HavePrefix("Warning KindsGone CustomResourceDefinition " + name + " " + says)))

			gone = false
			s.fail = func(string) error { return errors.New("not yet") } // the next of these finds the cluster as this one did
			_, _ = controller.Reconcile(log.IntoContext(s.ctx(), logr.Discard()), reconciliation())
			s.fail = nil
			s.Expect(controller.Ready(nil)).To(Succeed(), "the definitions are back")
		}
	}
	s.uncached = s.client
	s.settle()
	s.Expect(s.footprint()).To(Equal(before))
}

func testPolicyNotCached(s *scenario) {
	_, after := s.shared()
	server := s.acts
	s.acts = interceptor.NewClient(server, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if _, is := list.(*v1alpha1.GPUSharingPolicyList); is {
				return nil
			}
			return c.List(ctx, list, opts...)
		},
	})
	written, err := s.reconcile()
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(written).To(BeEmpty())
	s.acts = server
	s.Expect(s.settle()).To(BeEmpty())
	s.Expect(s.footprint()).To(Equal(after))
}

// testGPUNodeGone: what is restored once no node is changed is not restored while nobody knows of one that is.
func testGPUNodeGone(s *scenario) {
	before, _ := s.shared()
	plugin := s.clusterSpec()
	s.Expect(s.client.Delete(s.ctx(), s.gpuNode("t4"))).To(Succeed())
	s.Expect(s.client.Delete(s.ctx(), s.getPolicy("research"))).To(Succeed())
	written, err := s.reconcile()
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(written).To(BeEmpty())
	s.Expect(s.clusterSpec()).To(Equal(plugin))
	s.settle()
	s.Expect(s.clusterSpec()).To(Equal(plugin), "its policy may follow")
	s.stepFrom(s.gpuNode("t4").CreationTimestamp.Time, timing.PoliciesReturn)
	s.settle()
	s.Expect(s.footprint()).To(Equal(before))
}
