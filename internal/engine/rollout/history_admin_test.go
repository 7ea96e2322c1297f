// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// What an administrator does to all objects at once: goes back to a backup of etcd, calls policies otherwise, installs
// the operator anew without having restored anything.

// etcdEvent makes a backup of etcd, lets policies be edited, and goes back to it: every object of the operator's is as it
// was, with its UID and generation, and the machines are as they are. Every API server is stopped for that (Kubernetes,
// Operating etcd clusters), for longer than a controller leads without one, so that another begins, which reads
// everything anew. What was done to a GPU after the backup, and before anything was recorded of it, nobody can know:
// such a node stays.
func (c *run) etcdEvent(random *rand.Rand) {
	if c.Plugin.Reason != "" {
		return
	}
	s := c.world()
	configs, copied, classes := maps.Clone(c.Configs), maps.Clone(c.ConfigsCopy), slices.Clone(c.DRA.Classes)
	c.tell("etcd is backed up")
	for range 1 + random.IntN(3) {
		history.Edit(c, random)
		c.reconciles(random.IntN(20))
	}
	if c.broken != "" {
		return
	}
	back := func(was cluster.Node) bool {
		h := c.hosts[was.Name]
		return h != nil && h.Created.Equal(was.Created) && !h.off && !h.upgrade.goesOn() && h.driver.serves == (was.DRA != "") && h.recordedIn(was)
	}
	if len(c.hosts) != len(s.Nodes) || slices.ContainsFunc(s.Nodes, func(was cluster.Node) bool { return !back(was) }) {
		return
	}
	c.meddled, c.Policies, c.Configs, c.ConfigsCopy = true, s.Policies, configs, copied
	for _, is := range slices.Clone(c.DRA.Classes) {
		c.dropClass(is.Name)
	}
	for _, was := range classes {
		c.setClass(was)
	}
	for _, was := range s.Nodes {
		c.goesBack(c.hosts[was.Name], was)
	}
	c.CountAnew()
	c.tell("etcd is restored from the backup")
	c.lead()
	if random.IntN(2) == 0 {
		history.LeadAnew(c, random)
	}
}

// recordedIn reports whether a node of a backup has the baseline of all that is not as it came.
func (h *host) recordedIn(was cluster.Node) bool {
	recorded := map[string]v1alpha1.DeviceSpec{}
	if b := was.GPU.Spec.Baseline; b != nil {
		for _, d := range b.Devices {
			recorded[d.UUID] = d
		}
	}
	return !slices.ContainsFunc(h.devices(), func(d gpu.Device) bool {
		before, is := recorded[d.UUID]
		sliced := h.keepsTimeSlice(d.UUID)
		changed := !bornAs(d).equal(h.born[d.UUID]) || d.PendingMIG != d.State.MIG || d.State.ComputeMode != gpu.ComputeDefault
		return changed && !is || sliced && before.Sharing.TimeSliceInterval == ""
	})
}

// keepsTimeSlice reports whether a GPU has another time slice than the default one, also where MIG mode hides it: outside
// of that mode the agent finds it again, and nobody can tell then whose it is.
func (h *host) keepsTimeSlice(uuid string) (keeps bool) {
	h.hardware.Update(func(n *sim.Node) {
		g, err := n.GPU(uuid)
		keeps = err == nil && g.Slice != gpu.TimeSliceUnread && g.Slice != gpu.TimeSliceDefault
	})
	return keeps
}

// goesBack replaces all that is stored of a node.
func (c *run) goesBack(h *host, was cluster.Node) {
	upgrade, upgraded := h.Labels[upgradeLabel]
	h.Labels, h.Annotations, h.Taints = maps.Clone(was.Labels), maps.Clone(was.Annotations), slices.Clone(was.Taints)
	if delete(h.Labels, upgradeLabel); upgraded { // the upgrade controller goes on
		h.Labels[upgradeLabel] = upgrade
	}
	if of := cluster.Owner(&was, nil); of != "" {
		h.lastPolicy = of
	}
	h.DevicesTaintedAt, h.backedUp = was.DevicesTaintedAt, true
	_, h.features.merged[v1alpha1.LabelOverridden] = was.Labels[v1alpha1.LabelOverridden]
	if was.Features.OverriddenSince.IsZero() {
		h.features.ours = time.Time{}
	}
	h.GPU = *was.GPU.DeepCopy()
	c.version[h.Name]++
	c.held(h)
	h.report()
}

// namesEvent deletes each policy and creates it again under another name. A node that was up to date is not kept from
// its users for that, if the controller has seen no moment between the two.
func (c *run) namesEvent(random *rand.Rand) {
	if len(c.Policies) == 0 || c.Plugin.Reason != "" {
		return
	}
	if random.IntN(2) == 0 {
		release := []v1alpha1.ReleasePolicy{v1alpha1.ReleasePolicyRestore, v1alpha1.ReleasePolicyRetain}[random.IntN(2)]
		for i := range c.Policies {
			c.Policies[i].Generation++
			c.Policies[i].Spec.ReleasePolicy = release
		}
		c.retains = true
		c.reconciles(random.IntN(3))
	}
	d, _ := c.rest(time.Hour, 200)
	kept := map[string]string{}
	for _, n := range d.Nodes {
		if h := c.hosts[n.Node]; h != nil && !h.off && h.AgentReady && !h.upgrade.goesOn() && n.State == node.UpToDate && n.Policy != "" && len(h.sick) == 0 {
			kept[n.Node] = fmt.Sprint(h.instances())
		}
	}
	asked, gap := c.Policies, random.IntN(3) == 0
	if c.Policies = nil; gap {
		c.reconciles(1 + random.IntN(20))
	}
	for i := range asked {
		asked[i].Name += "-new"
	}
	c.createAgain(asked)
	for range 12 {
		c.step(true)
		for name, was := range kept {
			if h := c.hosts[name]; !gap && h != nil && (h.isKept() || fmt.Sprint(h.instances()) != was) {
				c.breaks("harmless", "node %s is changed for another name of its policy: %s", name, c.states[name])
			}
		}
		c.lapse(5 * time.Second)
	}
	for i := range c.Policies {
		c.Policies[i].Generation++
		c.Policies[i].Spec.ReleasePolicy = v1alpha1.ReleasePolicyRestore
	}
}

// retainsAsIs notes which nodes a policy has left as they are.
func (c *run) retainsAsIs() {
	for _, h := range c.all() {
		if spec := h.GPU.Spec; c.retains && spec.PolicyName == "" && spec.Baseline != nil && node.Retained(spec) {
			h.isLeft()
		}
	}
}

// anewEvent removes every object of the operator's and its definitions, nothing is restored first, and installs it
// again. The annotations of Nodes stay.
func (c *run) anewEvent(random *rand.Rand) {
	if c.Plugin.Reason != "" {
		return
	}
	asked := c.Policies
	c.Policies, c.meddled = nil, true
	c.Configs, c.ConfigsCopy = maps.Clone(c.Plugin.Configs), nil
	for _, h := range c.all() {
		h.features.ours = time.Time{}
		c.makeGPUNode(h)
		h.report()
	}
	c.tell("the operator is installed anew, and nothing was restored")
	history.LeadAnew(c, random)
	c.reconciles(random.IntN(60))
	c.createAgain(asked)
}
