// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"math/rand/v2"
	"regexp"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// renameEvent has a policy advertise replicas under another name. While the kubelet still lists the devices of the
// former one as capacity, the plugin of a node advertises one device less than it must for a moment.
func (c *run) renameEvent(random *rand.Rand) {
	h := c.some(random)
	by, _, _ := c.desired(h)
	if h.off || by == nil || by.Spec.Sharing.TimeSlicing == nil {
		return
	}
	for i := range c.Policies {
		if p := &c.Policies[i]; p.Name == by.Name {
			renamed := !plan.Renamed(p.Spec.Sharing)
			p.Spec.Sharing.Advertise = &v1alpha1.Advertise{RenameByDefault: &renamed}
			p.Generation++
			c.allows(p)
			c.tell("policy %s is edited: renameByDefault is %v", p.Name, renamed)
		}
	}
	c.rest(keepsCapacity/2, 60)
	if c.broken != "" || h.off || !h.plugin.running || len(h.sick) > 0 {
		return
	}
	for _, name := range []string{"nvidia.com/gpu", "nvidia.com/gpu.shared"} {
		all := h.Allocatable[name]
		if all < 2 {
			continue
		}
		h.Allocatable[name] = all - 1
		c.version[h.Name]++
		c.tell("the device plugin of %s advertises %d %s", h.Name, h.Allocatable[name], name)
		for range 3 {
			c.step(true)
			c.lapse(time.Second)
		}
		if h.Allocatable[name] == all-1 {
			h.Allocatable[name] = all
			c.version[h.Name]++
		}
		return
	}
}

// called is a resource that a message calls unhealthy.
var called = regexp.MustCompile(`\d+ of (nvidia\.com/[^,) ]+)`)

// calledUnhealthy looks whether a device is called unhealthy of a resource that the node neither advertises nor must.
func (c *run) calledUnhealthy(d rollout.Decision) {
	for _, n := range d.Nodes {
		_, says, is := strings.Cut(n.Message, "unhealthy (")
		h := c.hosts[n.Node]
		if !is || h == nil || n.Expected == nil {
			continue
		}
		for _, name := range called.FindAllStringSubmatch(says, -1) {
			if n.Expected[name[1]] == 0 && h.Allocatable[name[1]] == 0 {
				c.breaks("truth", "%s of node %s is called unhealthy, which is to advertise %v: %s", name[1], n.Node, n.Expected, n.Message)
			}
		}
	}
}
