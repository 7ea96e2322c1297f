// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// editEvent changes something of a policy.
func (c *chronicle) editEvent(random *rand.Rand) {
	if len(c.Policies) == 0 {
		return
	}
	p := &c.Policies[random.IntN(len(c.Policies))]
	p.Generation++
	what := "sharing"
	switch random.IntN(7) {
	case 0:
		c.someRollout(p, random)
		what = "rollout"
	case 1:
		p.Spec.Rollout.Paused = !p.Spec.Rollout.Paused
		what = fmt.Sprintf("paused=%v", p.Spec.Rollout.Paused)
	case 2:
		p.Spec.GPUSelector, what = nil, "gpuSelector"
		c.countsAnew()
		if p.Spec.Sharing.MIG != nil && random.IntN(2) == 0 {
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Indexes: []int32{int32(random.IntN(2))}}
		}
	case 3:
		if len(p.Spec.Taints) > 0 {
			p.Spec.Taints = nil
		} else {
			tainting(shared)(p)
		}
		what = "taints"
	default:
		p.Spec.Sharing = someSharing(random)
		if p.Spec.Sharing.MIG == nil {
			p.Spec.GPUSelector = nil
		}
	}
	c.tell("policy %s is edited: %s, now %s", p.Name, what, policySays(p))
}

func policySays(p *v1alpha1.GPUSharingPolicy) string {
	says := string(p.Spec.Sharing.Strategy)
	if p.Spec.Sharing.MIG != nil {
		says += fmt.Sprint(p.Spec.Sharing.MIG.Layouts[0].Instances)
	}
	if p.Spec.NodeSelector != nil {
		says += fmt.Sprint(" for ", p.Spec.NodeSelector.MatchLabels)
	}
	if p.Spec.GPUSelector != nil {
		says += fmt.Sprintf(" on %+v", *p.Spec.GPUSelector)
	}
	r := p.Spec.Rollout
	return fmt.Sprintf("%s, %s, maxUnavailable %s, maxFailures %d, paused %v, reboot %s, %s", says, r.Eviction.Mode, r.MaxUnavailable, r.MaxFailures, r.Paused,
		r.Reboot, p.Spec.DeletionPolicy)
}

// splitEvent makes two policies of one, for a pool each.
func (c *chronicle) splitEvent(random *rand.Rand) {
	if len(c.Policies) != 1 {
		return
	}
	c.Policies = []v1alpha1.GPUSharingPolicy{c.somePolicy("pool-a", "a", random), c.somePolicy("pool-b", "b", random)}
	c.countsAnew()
	c.tell("the policy is split in two: %s; %s", policySays(&c.Policies[0]), policySays(&c.Policies[1]))
}

func (c *chronicle) dropEvent(random *rand.Rand) {
	if len(c.Policies) == 0 {
		return
	}
	i := random.IntN(len(c.Policies))
	c.tell("policy %s is deleted", c.Policies[i].Name)
	c.Policies = slices.Delete(slices.Clone(c.Policies), i, i+1)
}

func (c *chronicle) createEvent(random *rand.Rand) {
	if len(c.Policies) == 0 {
		c.Policies = c.somePolicies(random)
		c.countsAnew()
		c.tell("%d policies are created", len(c.Policies))
	}
}

// relabelEvent moves a node to the other pool.
func (c *chronicle) relabelEvent(random *rand.Rand) {
	h := c.some(random)
	h.pool = map[string]string{"a": "b", "b": "a"}[h.pool]
	h.Labels["pool"] = h.pool
	c.version[h.Name]++
	c.tell("node %s moves to pool %s", h.Name, h.pool)
}

// somePolicies are the policies of a cluster: one for all nodes, one for each pool, or one that overrides another.
func (c *chronicle) somePolicies(random *rand.Rand) []v1alpha1.GPUSharingPolicy {
	switch random.IntN(5) {
	case 0:
		return []v1alpha1.GPUSharingPolicy{c.somePolicy("pool-a", "a", random), c.somePolicy("pool-b", "b", random)}
	case 1:
		first, second := c.somePolicy("all", "", random), c.somePolicy("pool-a", "a", random)
		second.Spec.Priority = 5
		return []v1alpha1.GPUSharingPolicy{first, second}
	}
	return []v1alpha1.GPUSharingPolicy{c.somePolicy("all", "", random)}
}

// somePolicy is a policy for the nodes of a pool.
func (c *chronicle) somePolicy(name, pool string, random *rand.Rand) v1alpha1.GPUSharingPolicy {
	p := policyOf(name, someSharing(random))
	c.serial++
	p.UID, p.Generation, p.CreationTimestamp = types.UID(fmt.Sprint(name, "-", c.serial)), 1, metav1.NewTime(c.Now)
	if pool != "" {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": pool}}
	}
	c.someRollout(&p, random)
	if p.Spec.Sharing.MIG != nil {
		switch random.IntN(4) {
		case 0:
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Indexes: []int32{0}}
		case 1:
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"NVIDIA-*"}}
		}
	}
	if random.IntN(4) == 0 {
		tainting(shared)(&p)
	}
	return p
}

func someSharing(random *rand.Rand) v1alpha1.Sharing {
	sharings := []v1alpha1.Sharing{
		{Strategy: v1alpha1.StrategyExclusive},
		timeSlicing(2), timeSlicing(4), mps(4), mps(10), mig(count("1g", 7)), mig(count("3g", 1), count("1g", 2)), mig(count("2g", 3)),
	}
	return sharings[random.IntN(len(sharings))]
}

func (c *chronicle) someRollout(p *v1alpha1.GPUSharingPolicy, random *rand.Rand) {
	modes := []v1alpha1.EvictionMode{v1alpha1.EvictionModeEvict, v1alpha1.EvictionModeEvict, v1alpha1.EvictionModeWaitForIdle, v1alpha1.EvictionModeNever}
	slots := int32(1 + random.IntN(2))
	r := &p.Spec.Rollout
	r.MaxUnavailable = new(intstr.FromInt32(slots))
	c.slots[p.Name] = max(c.slots[p.Name], slots)
	r.Eviction.Mode = modes[random.IntN(len(modes))]
	r.MaxFailures = []int32{1, 2, 5}[random.IntN(3)]
	r.Reboot = []v1alpha1.RebootMode{v1alpha1.RebootModeNever, v1alpha1.RebootModeIfRequired}[random.IntN(2)]
	if random.IntN(4) == 0 {
		r.NewNodes = v1alpha1.NewNodesTaintUntilReady
	}
}

func (c *chronicle) countsAnew() {
	for _, h := range c.all() {
		h.countsAnew()
	}
}
