// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// rewriting is a way in which another controller changes what the operator has written. It reports whether there was
// anything to do.
func (c *run) rewriting(random *rand.Rand) (what string, again func() bool) {
	name := c.some(random).Name
	node := func(change func(h *host) bool) func() bool {
		return func() bool {
			h := c.hosts[name]
			if h == nil || !change(h) {
				return false
			}
			c.version[name]++
			c.held(h)
			return true
		}
	}
	switch random.IntN(10) {
	case 0:
		return "our taint of " + name, node(func(h *host) bool {
			have := len(h.Taints)
			h.Taints = withoutOurs(h.Taints)
			return len(h.Taints) != have
		})
	case 1:
		return "the policy's taint of " + name, node(func(h *host) bool {
			have := len(h.Taints)
			h.Taints = slices.DeleteFunc(slices.Clone(h.Taints), func(t corev1.Taint) bool { return t.Key == shared.Key || t.Key == v1alpha1.TaintStartup })
			return len(h.Taints) != have
		})
	case 2:
		edits := random.IntN(2) == 0
		return fmt.Sprintf("keys of our ConfigMap, content: %v", edits), func() bool {
			changed := false
			c.Configs = maps.Clone(c.Configs)
			for _, key := range slices.Sorted(maps.Keys(c.Configs)) {
				switch {
				case c.Plugin.Configs[key] != "" || key == "default":
				case edits && c.Configs[key] != "version: v1\n":
					c.Configs[key], changed = "version: v1\n", true
				case !edits:
					delete(c.Configs, key)
					changed = true
				}
			}
			return changed
		}
	case 3:
		return "our NodeFeature of " + name, node(func(h *host) bool {
			had := !h.features.ours.IsZero()
			h.features.ours = time.Time{}
			return had
		})
	case 4:
		return "annotations of GPUNode " + name, node(func(h *host) bool {
			had := len(h.GPU.Annotations) > 0
			h.GPU.Annotations = nil
			return had
		})
	case 5:
		return "tolerations of the ClusterPolicy", func() bool {
			o := c.Plugin.Operands
			if o == nil || len(o.Ours) == 0 {
				return false
			}
			without := *o
			without.Tolerations = slices.DeleteFunc(slices.Clone(o.Tolerations), func(t corev1.Toleration) bool { return slices.Contains(o.Ours, t) })
			without.Ours = nil
			c.Plugin.Operands = &without
			return true
		}
	}
	label, value := history.Other(random)
	c.theirs[name] = append(c.theirs[name], label+"="+value)
	return fmt.Sprintf("%s=%s of %s", label, value, name), node(func(h *host) bool {
		entries := h.Labels
		if strings.HasPrefix(label, v1alpha1.Group+"/") && label != v1alpha1.LabelOverridden {
			entries = h.Annotations
		}
		is, has := entries[label]
		if has == (value != "") && is == value || h.off || value != "" && !has && strings.HasPrefix(label, v1alpha1.Group+"/") || value != "" && !has && entries[label] == "" && isDeploy(label) {
			return false
		}
		if value == "" {
			delete(entries, label)
		} else {
			entries[label] = value
		}
		return true
	})
}

func isDeploy(label string) bool { return strings.HasPrefix(label, "nvidia.com/gpu.deploy.") }

func (c *run) rewriteEvent(random *rand.Rand) {
	what, again := c.rewriting(random)
	c.meddled = true
	c.tell("another controller rewrites %s: %v", what, again())
}

// mostOfAFight is how often the operator may write an object, evict a workload or restart a program in two hours in
// which another controller sets back again and again what it writes: a change with its way back, and a few repetitions.
const mostOfAFight = 40

// mostAtRest is the same for eight hours in which no fault happens: a change, its way back, and another attempt.
const mostAtRest = 60

// fightEvent lets another controller set something again whenever the operator has changed it, for two hours.
func (c *run) fightEvent(random *rand.Rand) {
	what, again := c.rewriting(random)
	c.meddled = true
	c.tell("another controller sets again and again: %s", what)
	clear(c.count)
	c.fights = append(c.fights, again)
	end := c.Now.Add(2 * time.Hour)
	for n, idle := 0, 0; n < 240 && c.Now.Before(end) && c.broken == ""; n++ {
		d := c.step(true)
		if len(d.Actions) > 0 || c.fought() {
			idle = 0
		}
		step := time.Second
		if idle++; idle > 3 {
			step, idle = c.waitsFor(d, 10*time.Minute), 1
		}
		if c.refuses(d) {
			step = askAgain
		}
		c.lapse(step)
	}
	c.fights = nil
	c.bounded("while another controller set again and again "+what, mostOfAFight)
	c.tell("and stops")
}

// fought lets the other controllers look again.
func (c *run) fought() (changed bool) {
	for _, again := range c.fights {
		changed = again() || changed
	}
	return changed
}

// bounded looks whether anything was done too often.
func (c *run) bounded(when string, most int) {
	for _, what := range slices.Sorted(maps.Keys(c.count)) {
		limit := most
		if strings.HasPrefix(what, "pod ") || strings.HasPrefix(what, "ask ") {
			limit = 4 * most // a trigger for the kubelet or a refused eviction, which disturb nobody
		}
		if strings.HasPrefix(what, "restart ") || strings.HasPrefix(what, "evict ") {
			limit = 12
		}
		if c.count[what] > limit {
			c.breaks("bounded", "%s: %d times %s", what, c.count[what], when)
		}
	}
}

// accepts looks whether the API server has refused what the operator wrote. What it refuses once it refuses for ever.
func (c *run) accepts() {
	for _, refused := range c.refused {
		c.breaks("bounded", "the API server refuses: %s", refused)
	}
}

// acceptsStatus looks whether the API server would refuse the status of a policy.
func (c *run) acceptsStatus(p *v1alpha1.GPUSharingPolicy, s v1alpha1.GPUSharingPolicyStatus) {
	if reflect.DeepEqual(p.Status, s) {
		return
	}
	if why := refusal(v1alpha1.GPUSharingPolicy{Status: s}); why != "" {
		c.breaks("bounded", "the API server refuses the status of policy %s: %s", p.Name, why)
	}
}

// backups are older copies of objects, as a backup tool has them.
type backups struct {
	keys     map[string]string
	nodes    map[string]cluster.Node
	policies []v1alpha1.GPUSharingPolicy
}

func (c *run) backUpEvent(*rand.Rand) {
	s := c.world()
	c.backups = backups{keys: maps.Clone(c.Configs), nodes: map[string]cluster.Node{}, policies: s.Policies}
	for _, n := range s.Nodes {
		c.backups.nodes[n.Name] = n
	}
	c.tell("a backup is made")
}

// restoreEvent replaces objects by the copies of the backup: all of a kind, or of one node.
func (c *run) restoreEvent(random *rand.Rand) {
	if c.backups.nodes == nil {
		return
	}
	c.meddled = true
	what := random.IntN(4)
	h := c.some(random)
	old, has := c.backups.nodes[h.Name]
	switch {
	case what == 0:
		c.Configs = maps.Clone(c.backups.keys)
		c.tell("our ConfigMap is restored from the backup")
	case what == 1:
		var restored []v1alpha1.GPUSharingPolicy
		for i := range c.backups.policies {
			p := c.backups.policies[i].DeepCopy()
			c.serial++
			p.Generation, p.UID, p.CreationTimestamp = int64(100+c.serial), types.UID(fmt.Sprint("restored-", c.serial)), metav1.NewTime(c.Now)
			restored = append(restored, *p)
		}
		c.Policies = restored
		c.countsAnew()
		c.tell("the policies are restored from the backup")
	case what == 2 && has:
		h.restoreGPUNode(old.GPU)
		h.backedUp = true
		c.tell("GPUNode %s is restored from the backup", h.Name)
	case what == 3 && has && c.before[h.Name].Created.Equal(old.Created):
		h.backedUp = true
		h.Labels, h.Annotations = maps.Clone(old.Labels), maps.Clone(old.Annotations)
		if c.seed%onDriver >= history.Late { // an annotation of the Node tells NFD which labels are its own
			_, h.features.merged[v1alpha1.LabelOverridden] = old.Labels[v1alpha1.LabelOverridden]
		}
		h.Taints = slices.DeleteFunc(slices.Clone(old.Taints), func(t corev1.Taint) bool { return t.Key == unreachable })
		if h.off {
			h.Taints = append(h.Taints, corev1.Taint{Key: unreachable, Effect: corev1.TaintEffectNoSchedule})
		}
		c.version[h.Name]++
		c.held(h)
		c.tell("Node %s is restored from the backup", h.Name)
	}
}

// restoreGPUNode replaces spec and annotations. The status is the agent's.
func (h *host) restoreGPUNode(old v1alpha1.GPUNode) {
	old = *old.DeepCopy()
	h.GPU.Spec, h.GPU.Annotations = old.Spec, old.Annotations
	h.GPU.Generation++
	h.report()
}

// deleteEvent deletes an object that the operator made.
func (c *run) deleteEvent(random *rand.Rand) {
	h := c.some(random)
	switch random.IntN(3) {
	case 0:
		c.Configs = maps.Clone(c.Plugin.Configs)
		c.meddled = true
		c.tell("our ConfigMap is deleted")
	case 1:
		h.features.ours = time.Time{}
		c.tell("our NodeFeature of %s is deleted", h.Name)
	default:
		c.makeGPUNode(h)
		h.report()
		c.tell("GPUNode %s is deleted", h.Name)
	}
}
