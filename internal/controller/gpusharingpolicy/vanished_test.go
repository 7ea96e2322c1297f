// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"context"
	"errors"
	"testing"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

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
