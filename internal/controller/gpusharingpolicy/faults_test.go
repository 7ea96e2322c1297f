// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"errors"
	"testing"

	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
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
