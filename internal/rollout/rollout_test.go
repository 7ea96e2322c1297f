// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// policyOf is a policy with the defaults of the API.
func policyOf(name string, s v1alpha1.Sharing, with ...func(*v1alpha1.GPUSharingPolicy)) v1alpha1.GPUSharingPolicy {
	p := v1alpha1.GPUSharingPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1},
		Spec: v1alpha1.GPUSharingPolicySpec{
			Sharing: s, DeletionPolicy: v1alpha1.DeletionPolicyRestore,
			Rollout: v1alpha1.Rollout{
				MaxUnavailable: ptr.To(intstr.FromInt32(1)), MaxFailures: 1,
				Eviction: v1alpha1.Eviction{Mode: v1alpha1.EvictionModeWaitForIdle, TimeoutSeconds: 600},
			},
		},
	}
	for _, change := range with {
		change(&p)
	}
	return p
}

func timeSlicing(replicas int32) v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: replicas}}
}

func mps(replicas int32) v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: replicas}}
}

func mig(instances ...v1alpha1.MIGInstances) v1alpha1.Sharing {
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
		Strategy: v1alpha1.MIGStrategyMixed, Layouts: []v1alpha1.MIGLayout{{Instances: instances}},
	}}
}

func count(profile v1alpha1.MIGProfile, n int32) v1alpha1.MIGInstances {
	return v1alpha1.MIGInstances{Profile: profile, Count: n}
}

func TestEachStrategyIsReached(t *testing.T) {
	for name, c := range map[string]struct {
		sharing     v1alpha1.Sharing
		allocatable map[string]int64
		states      []rollout.State
	}{
		"time-slicing": {
			sharing: timeSlicing(4), allocatable: map[string]int64{"nvidia.com/gpu": 8},
			states: []rollout.State{
				rollout.StateStaleGentle, rollout.StateSelecting, rollout.StateUpToDate,
			},
		},
		"MPS": {
			sharing: mps(10), allocatable: map[string]int64{"nvidia.com/gpu": 20},
			states: []rollout.State{
				rollout.StateStaleDisruptive, rollout.StateQuiet, rollout.StateSelecting, rollout.StateReleasing, rollout.StateUpToDate,
			},
		},
		"MIG": {
			sharing:     mig(count("3g.20gb", 1), count("1g", 3)),
			allocatable: map[string]int64{"nvidia.com/mig-3g.20gb": 2, "nvidia.com/mig-1g.5gb": 6},
			states: []rollout.State{
				rollout.StateStaleDisruptive, rollout.StateQuiescing, rollout.StateQuiet, rollout.StateSelecting,
				rollout.StateReleasing, rollout.StateUpToDate,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := newCluster()
			node := cl.add("a", sim.A100, sim.A100)
			cl.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", c.sharing)}
			d, states := cl.run(60)
			g.Expect(d.Nodes).To(HaveLen(1))
			g.Expect(d.Nodes[0].Message).To(BeEmpty())
			g.Expect(states["a"]).To(Equal(c.states))
			g.Expect(advertised(node)).To(Equal(c.allocatable))
			g.Expect(node.Taints).To(BeEmpty())
			g.Expect(cl.crashes).To(BeEmpty())
			g.Expect(node.Labels[pluginLabel]).To(Equal("true"))
			g.Expect(d.Policies["research"].Nodes.Ready).To(Equal(int32(1)))
			g.Expect(rollout.Decide(cl.world()).Actions).To(BeEmpty())
		})
	}
}

func advertised(h *host) map[string]int64 {
	found := map[string]int64{}
	for name, n := range h.Allocatable {
		if n != 0 {
			found[name] = n
		}
	}
	return found
}
