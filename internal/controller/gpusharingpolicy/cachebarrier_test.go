// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpusharingpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestTheCacheCatchesUp is about reconciles that read Nodes or GPUNodes late.
func TestTheCacheCatchesUp(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	for name, test := range map[string]func(*scenario){
		"a reconcile waits for what the last one wrote":                  testOwnWrites,
		"a reconcile waits for what the last one may have written":       testDoubt,
		"a new leader waits for what the last one wrote":                 testNewLeader,
		"a node that was deleted is not waited for":                      testDeleted,
		"a cache that lags for long is an error, and nothing is decided": testLag,
		"a node that took another's place is not written to":             testTookPlace,
	} {
		t.Run(name, func(t *testing.T) { test(newScenario(t, cluster)) })
	}
}

// late is a cache that shows Nodes and GPUNodes as they were when it stopped.
type late struct {
	client.WithWatch
	nodes    *corev1.NodeList
	gpuNodes *v1alpha1.GPUNodeList
}

// stop keeps the cache as it is now.
func (l *late) stop(s *scenario) {
	s.t.Helper()
	l.nodes, l.gpuNodes = &corev1.NodeList{}, &v1alpha1.GPUNodeList{}
	s.Expect(s.client.List(s.ctx(), l.nodes)).To(Succeed())
	s.Expect(s.client.List(s.ctx(), l.gpuNodes)).To(Succeed())
}

// follow brings it up to date.
func (l *late) follow() { l.nodes, l.gpuNodes = nil, nil }

func (l *late) Get(ctx context.Context, key client.ObjectKey, into client.Object, opts ...client.GetOption) error {
	switch o := into.(type) {
	case *corev1.Node:
		if l.nodes != nil {
			for i := range l.nodes.Items {
				if l.nodes.Items[i].Name == key.Name {
					l.nodes.Items[i].DeepCopyInto(o)
					return nil
				}
			}
			return apierrors.NewNotFound(corev1.Resource("nodes"), key.Name)
		}
	case *v1alpha1.GPUNode:
		if l.gpuNodes != nil {
			for i := range l.gpuNodes.Items {
				if l.gpuNodes.Items[i].Name == key.Name {
					l.gpuNodes.Items[i].DeepCopyInto(o)
					return nil
				}
			}
		}
	}
	return l.WithWatch.Get(ctx, key, into, opts...)
}

func (l *late) List(ctx context.Context, into client.ObjectList, opts ...client.ListOption) error {
	switch o := into.(type) {
	case *corev1.NodeList:
		if l.nodes != nil {
			l.nodes.DeepCopyInto(o)
			return nil
		}
	case *v1alpha1.GPUNodeList:
		if l.gpuNodes != nil {
			l.gpuNodes.DeepCopyInto(o)
			return nil
		}
	}
	return l.WithWatch.List(ctx, into, opts...)
}

// tainting is a scenario in which the next reconcile taints the node, with the controller that will and its cache,
// which has stopped.
func (s *scenario) tainting() (*gpusharingpolicy.Controller, *late) {
	s.t.Helper()
	s.machine("a100", sim.A100)
	s.policy("research", migPolicy("WaitForIdle"))
	for range 2 {
		_, err := s.reconcile()
		s.Expect(err).NotTo(HaveOccurred())
		s.others()
	}
	s.Expect(s.client.Patch(s.ctx(), s.node("a100"), client.RawPatch("application/merge-patch+json",
		[]byte(`{"spec":{"taints":null}}`)))).To(Succeed())
	cache := &late{WithWatch: s.acts}
	s.acts = cache
	c := s.controller()
	cache.stop(s)
	return c, cache
}

// nothing expects that a reconcile waits and writes nothing.
func (s *scenario) nothing(c *gpusharingpolicy.Controller) {
	s.t.Helper()
	s.writes = nil
	result, err := c.Reconcile(s.ctx(), reconciliation())
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(result.RequeueAfter).To(And(BeNumerically(">", 0), BeNumerically("<", time.Second)))
	s.Expect(s.writes).To(BeEmpty())
}

// something expects that a reconcile decides: it always reports.
func (s *scenario) something(c *gpusharingpolicy.Controller) {
	s.t.Helper()
	s.writes = nil
	_, err := c.Reconcile(s.ctx(), reconciliation())
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(s.writes).NotTo(BeEmpty())
}

func (s *scenario) expectTainted() {
	s.t.Helper()
	s.Expect(s.node("a100").Spec.Taints).To(ConsistOf(HaveField("Key", v1alpha1.TaintChanging)))
}

func testOwnWrites(s *scenario) {
	c, cache := s.tainting()
	s.something(c)
	s.expectTainted()
	s.nothing(c)
	s.others()
	s.nothing(c)
	cache.follow()
	s.something(c)
	s.Expect(s.announced()).NotTo(BeEmpty())
}

func testDoubt(s *scenario) {
	c, cache := s.tainting()
	s.doubt = true // what is written is carried out, and the answer is lost
	_, err := c.Reconcile(s.ctx(), reconciliation())
	s.Expect(err).To(MatchError(context.DeadlineExceeded))
	s.doubt = false
	s.expectTainted()
	s.nothing(c)
	cache.follow()
	s.something(c)
}

func testNewLeader(s *scenario) {
	first, cache := s.tainting()
	s.something(first)
	s.expectTainted()
	second := s.controller()
	s.nothing(second)
	cache.follow()
	s.something(second)
}

func testDeleted(s *scenario) {
	c, cache := s.tainting()
	s.something(c)
	s.nothing(c)
	s.Expect(s.client.Delete(s.ctx(), s.node("a100"))).To(Succeed())
	s.Expect(s.client.Delete(s.ctx(), s.gpuNode("a100"))).To(Succeed())
	s.nodes = nil
	cache.stop(s)
	s.something(c)
}

func testLag(s *scenario) {
	c, cache := s.tainting()
	s.something(c)
	s.nothing(c)
	s.clock.Step(31 * time.Second)
	s.writes = nil
	_, err := c.Reconcile(s.ctx(), reconciliation())
	s.Expect(err).To(MatchError(ContainSubstring("the cache has not shown Node a100 at resource version")))
	s.Expect(s.writes).To(BeEmpty())
	s.nothing(c)
	cache.follow()
	s.something(c)
}

func testTookPlace(s *scenario) {
	c, cache := s.tainting()
	anew := &corev1.Node{}
	anew.Name = "a100"
	s.fail = func(write string) error {
		_, stopped := s.node("a100").Annotations[v1alpha1.AnnotationStopped]
		if write == "patch Node a100" && stopped { // NVIDIA's operands are started again: no resource version conflicts
			s.Expect(s.client.Delete(s.ctx(), s.node("a100"))).To(Succeed())
			s.Expect(s.client.Create(s.ctx(), anew)).To(Succeed())
		}
		return nil
	}
	var err error
	for range 20 {
		cache.stop(s)
		if _, err = c.Reconcile(s.ctx(), reconciliation()); err != nil {
			break
		}
		s.others()
	}
	s.fail = nil
	s.Expect(err).To(MatchError(ContainSubstring("metadata.uid")))
	s.Expect(s.node("a100").Labels).To(BeEmpty())
	s.Expect(s.node("a100").Annotations).To(BeEmpty())
}
