// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"cmp"
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

// ChangeNode lets another controller change labels, annotations or taints of a Node.
func (c *run) ChangeNode(name string, change func(*corev1.Node)) bool {
	return c.rewrites(name, func(h *host) bool {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: h.Labels, Annotations: h.Annotations}, Spec: corev1.NodeSpec{Taints: h.Taints}}
		n = n.DeepCopy()
		change(n)
		changed := len(n.Spec.Taints) != len(h.Taints) || !maps.Equal(n.Labels, h.Labels) || !maps.Equal(n.Annotations, h.Annotations)
		h.Labels, h.Annotations, h.Taints = n.Labels, n.Annotations, n.Spec.Taints
		return changed
	})
}

// rewrites lets another controller change what belongs to a node.
func (c *run) rewrites(node string, change func(*host) bool) bool {
	h := c.hosts[node]
	if h == nil || !change(h) {
		return false
	}
	c.version[node]++
	c.marked(h)
	return true
}

func (c *run) Theirs(name, label, value string) {
	c.theirs[name] = append(c.theirs[name], label+"="+value)
	c.meddled = true
}

func (c *run) SetByOthers(name, label, value string) bool {
	return c.hosts[name] != nil && !c.hosts[name].off && c.ChangeNode(name, func(n *corev1.Node) { history.SetByOthers(n, label, value) })
}

func (c *run) ChangeConfigMap(change func(map[string]string)) bool {
	c.meddled = true
	ours := maps.Clone(c.Configs)
	maps.DeleteFunc(ours, func(key, _ string) bool { return c.Plugin.Configs[key] != "" || key == "default" })
	had := maps.Clone(ours)
	change(ours)
	c.Configs = maps.Clone(c.Configs)
	maps.DeleteFunc(c.Configs, func(key, _ string) bool { return had[key] != "" })
	maps.Copy(c.Configs, ours)
	return !maps.Equal(had, ours)
}

func (c *run) ChangeGPUNode(name string, change func(*v1alpha1.GPUNode)) bool {
	return c.rewrites(name, func(h *host) bool {
		had := len(h.GPU.Annotations)
		change(&h.GPU)
		return len(h.GPU.Annotations) != had
	})
}

func (c *run) ClusterPolicyRewrites() []history.Rewrite {
	return []history.Rewrite{{What: "tolerations of the ClusterPolicy", Again: func() bool {
		o := c.Plugin.Operands
		if o == nil || len(o.Ours) == 0 {
			return false
		}
		without := *o
		without.Tolerations = slices.DeleteFunc(slices.Clone(o.Tolerations), func(t corev1.Toleration) bool { return slices.Contains(o.Ours, t) })
		without.Ours = nil
		c.Plugin.Operands = &without
		return true
	}}}
}

// dailyEvent lets another controller undo once in two hours what the operator has set, for days. That is no fight, however often it happens: it is set
// again each time.
func (c *run) dailyEvent(random *rand.Rand) {
	r, inARow := history.ARewrite(c, random), 0
	c.tell("once in two hours another controller rewrites %s", r.What)
	for n := 0; n < 62 && c.broken == ""; n++ {
		if inARow++; !r.Again() {
			if inARow > 10 {
				c.breaks("bounded", "the operator sets again no more what was rewritten once in two hours: %s", r.What)
			}
			inARow = 0
		}
		for _, o := range c.step(true).Nodes {
			if n > 0 && o.Reason == v1alpha1.ReasonChangedByOthers {
				c.breaks("bounded", "node %s is given up, though %s is rewritten once in two hours: %s", o.Node, r.What, o.Message)
			}
		}
		c.lasts(2*time.Hour, 200)
	}
}

func isDeploy(label string) bool { return strings.HasPrefix(label, "nvidia.com/gpu.deploy.") }

func (c *run) Fight(again func() bool, d time.Duration) {
	clear(c.count)
	c.fights = append(c.fights, again)
	end := c.Now.Add(d)
	for n, idle := 0, 0; n < 240 && c.Now.Before(end) && c.broken == ""; n++ {
		decided := c.step(true)
		if len(decided.Actions) > 0 || c.fought() {
			idle = 0
		}
		step := time.Second
		if idle++; idle > 3 {
			step, idle = c.waitsFor(decided, 10*time.Minute), 1
		}
		if c.refuses(decided) {
			step = askAgain
		}
		c.lapse(step)
	}
	c.fights = nil
}

// fought lets the other controllers look again.
func (c *run) fought() (changed bool) {
	for _, again := range c.fights {
		changed = again() || changed
	}
	return changed
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
		c.CountAnew()
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

func (c *run) DeleteConfigMap() { c.Configs, c.meddled = maps.Clone(c.Plugin.Configs), true }

func (c *run) DeleteNodeFeature(name string) bool {
	h := c.hosts[name]
	if h == nil || h.features.ours.IsZero() {
		return false
	}
	h.features.ours = time.Time{}
	return true
}

func (c *run) DeleteGPUNode(name string) {
	c.makeGPUNode(c.hosts[name])
	c.hosts[name].report()
}

func (c *run) HasClusterPolicy() bool { return c.Plugin.ClusterPolicy && c.Plugin.Reason == "" }

// DeleteClusterPolicy: until the status of the next one tells where the GPU Operator runs, there is no device plugin to configure.
func (c *run) DeleteClusterPolicy(random *rand.Rand) {
	c.Plugin.Reason, c.Plugin.Message, c.Plugin.Ready = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy", false
	c.reconciles(1 + random.IntN(10))
}

// ApplyChart lets the ClusterPolicy be as the chart of the GPU Operator writes it, until the operator has patched it.
func (c *run) ApplyChart(random *rand.Rand) {
	c.Plugin.Reason, c.Plugin.Message = "", ""
	c.inForce(func() { c.reconciles(1 + random.IntN(5)) })
	c.tell("the ClusterPolicy names our ConfigMap")
}

// standBackEvent lets another controller write the ClusterPolicy as the chart has it, and again when the operator has
// patched it, so that the operator stands back, for up to 65 minutes. A change that is under way does not fail by that:
// another layout of the GPUs would be offered no better.
func (c *run) standBackEvent(random *rand.Rand) {
	if !c.Plugin.ClusterPolicy || c.Plugin.Reason != "" {
		return
	}
	failed := map[string]*v1alpha1.FailedChange{}
	for _, h := range c.all() {
		failed[h.Name] = h.GPU.Status.Rollout.Failed
	}
	c.tell("another controller keeps the ClusterPolicy as the chart writes it")
	c.Plugin.Message = "another controller keeps the ClusterPolicy"
	c.inForce(func() { c.rest(time.Duration(1+random.IntN(65))*time.Minute, 150) })
	c.Plugin.Message = ""
	c.tell("and stops; the ClusterPolicy names our ConfigMap")
	for _, h := range c.all() {
		f := h.GPU.Status.Rollout.Failed
		if f != nil && f.Reason == v1alpha1.ReasonNotAdvertised && !reflect.DeepEqual(f, failed[h.Name]) && !h.driver.serves {
			c.breaks("harmless", "the change of %s failed for the ClusterPolicy of another controller: %s", h.Name, f.Message)
		}
	}
}

// inForce lets the ClusterPolicy be as the chart of the GPU Operator writes it while something happens. With
// mig.strategy: single, NVIDIA's device plugin offers nothing on a node with MIG instances. Both changes start it anew
// on every node.
func (c *run) inForce(happens func()) {
	var single []*host
	for _, h := range c.all() {
		if h.broken == nil {
			h.broken = func(s cluster.Snapshot) bool { return !s.Plugin.Ready && len(h.instances()) > 0 }
			single = append(single, h)
		}
	}
	c.Plugin.Ready = false
	c.rollsOut()
	happens()
	for _, h := range single {
		h.broken = nil
	}
	c.Plugin.Ready, c.Plugin.Overruled = true, c.Now
	c.rollsOut()
}

// optOutEvent takes NVIDIA's programs off a node for a while, by the label for that. The GPU Operator removes every
// deploy label then, whatever its value, that of the agent too, and again when another controller sets one. It sets
// them when the node is no longer opted out. Nobody is told to set what it removes.
func (c *run) optOutEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || !h.down.IsZero() || h.upgrade.goesOn() || !c.Plugin.ClusterPolicy || h.driver.serves || !h.AgentReady {
		return
	}
	var had []string
	off := func() {
		for _, label := range append(cluster.DeployLabels(), v1alpha1.LabelRunsAgent, v1alpha1.LabelMIGManager) {
			if _, has := h.Labels[label]; has {
				had = append(had, label)
				delete(h.Labels, label)
				c.version[h.Name]++
			}
		}
	}
	c.tell("%s opts out of NVIDIA's programs", h.Name)
	h.Labels[optOutLabel], h.AgentReady = "false", false
	for n := range 3 + random.IntN(12) {
		off()
		c.step(true)
		c.lapse(time.Second)
		if n > 1 && strings.Contains(h.waits(), "set it to true") {
			c.breaks("truth", "%s has opted out, and a person is told what the GPU Operator undoes: %s", h.Name, h.waits())
		}
	}
	c.tell("%s opts in again", h.Name)
	delete(h.Labels, optOutLabel)
	for _, label := range had {
		h.Labels[label] = cmp.Or(h.Labels[label], "true")
	}
	h.AgentReady = !h.forsaken
	c.version[h.Name]++
}

// rollsOut replaces the pods of NVIDIA's device plugin.
func (c *run) rollsOut() {
	for _, h := range c.all() {
		at := slices.IndexFunc(h.Pods, playedBy(pluginLabel))
		if !h.off && at >= 0 {
			uid := h.Pods[at].UID
			c.deletePod(h, uid)
			if !h.stuck[uid] { // it may have been a pod of NVIDIA's MPS DaemonSet, which has the same label in its selector
				h.plugin.running = false
			}
			c.version[h.Name]++
		}
	}
}
