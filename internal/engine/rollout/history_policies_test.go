// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// editEvent changes something of a policy.
func (c *run) editEvent(random *rand.Rand) {
	if len(c.Policies) == 0 {
		return
	}
	p := &c.Policies[random.IntN(len(c.Policies))]
	p.Generation++
	what := history.Edit(p, random)
	if what == "gpuSelector" {
		c.countsAnew()
	}
	c.allows(p)
	c.tell("policy %s is edited: %s, now %s", p.Name, what, history.Says(p))
}

// splitEvent makes two policies of one, for a pool each.
func (c *run) splitEvent(random *rand.Rand) {
	if len(c.Policies) != 1 {
		return
	}
	c.create(history.Split(random))
	c.countsAnew()
	c.tell("the policy is split in two: %s; %s", history.Says(&c.Policies[0]), history.Says(&c.Policies[1]))
}

func (c *run) dropEvent(random *rand.Rand) {
	if len(c.Policies) == 0 {
		return
	}
	i := random.IntN(len(c.Policies))
	c.tell("policy %s is deleted", c.Policies[i].Name)
	c.Policies = slices.Delete(slices.Clone(c.Policies), i, i+1)
}

func (c *run) createEvent(random *rand.Rand) {
	if len(c.Policies) == 0 {
		c.create(history.Policies(random))
		c.countsAnew()
		c.tell("%d policies are created", len(c.Policies))
	}
}

// relabelEvent moves a node to the other pool.
func (c *run) relabelEvent(random *rand.Rand) {
	h := c.some(random)
	h.pool = map[string]string{"a": "b", "b": "a"}[h.pool]
	h.Labels[history.PoolLabel] = h.pool
	c.version[h.Name]++
	c.tell("node %s moves to pool %s", h.Name, h.pool)
}

// create replaces the policies of the cluster.
func (c *run) create(policies []v1alpha1.GPUSharingPolicy) {
	c.Policies = policies
	for i := range policies {
		p := &policies[i]
		c.serial++
		p.UID, p.CreationTimestamp = types.UID(fmt.Sprint(p.Name, "-", c.serial)), metav1.NewTime(c.Now)
		c.allows(p)
	}
}

// allows notes the budget of a policy.
func (c *run) allows(p *v1alpha1.GPUSharingPolicy) {
	slots, err := intstr.GetScaledValueFromIntOrPercent(p.Spec.Rollout.MaxUnavailable, len(c.hosts)+4, true) // more nodes may join
	if err != nil {
		panic(err)
	}
	c.slots[p.Name] = max(c.slots[p.Name], int32(slots))
}

func (c *run) countsAnew() {
	for _, h := range c.all() {
		h.countsAnew()
	}
}

// manyEvent creates two dozen policies, of which several select each node, and deletes them after a while.
func (c *run) manyEvent(random *rand.Rand) {
	for i := range 24 {
		p := history.Policy(fmt.Sprint("many-", i), []string{"a", "b", "none"}[random.IntN(3)], random)
		p.Spec.Priority = int32(random.IntN(3))
		c.serial++
		p.UID, p.CreationTimestamp = types.UID(fmt.Sprint(p.Name, "-", c.serial)), metav1.NewTime(c.Now)
		c.Policies = append(slices.Clone(c.Policies), p)
		c.allows(&p)
	}
	c.countsAnew()
	c.tell("there are %d policies", len(c.Policies))
	c.rest(time.Duration(2+random.IntN(30))*time.Minute, 150)
	c.Policies = slices.DeleteFunc(slices.Clone(c.Policies), func(p v1alpha1.GPUSharingPolicy) bool { return strings.HasPrefix(p.Name, "many-") })
	c.countsAnew()
	c.tell("there are %d policies", len(c.Policies))
}
