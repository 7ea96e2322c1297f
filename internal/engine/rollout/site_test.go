// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

const (
	pluginLabel = "nvidia.com/gpu.deploy.device-plugin"
	gfdLabel    = "nvidia.com/gpu.deploy.gpu-feature-discovery"

	upgradeLabel = "nvidia.com/gpu-driver-upgrade-state"
	mpsLabel     = "nvidia.com/mps.capable"
	optOutLabel  = "nvidia.com/gpu.deploy.operands"
)

// site is a cluster in miniature: an API server that refuses what the real one refuses, agents over simulated hardware,
// and NVIDIA's device plugin with its config-manager, which exits when a label names a key that it cannot see.
type site struct {
	cluster.Snapshot
	hosts        map[string]*host
	memory       remembering
	reads        readings
	sleeps       sleeping
	pods         int     // given out so far
	replaced     int     // machines that got the name of a former one: their GPUs have other UUIDs
	reconfigured bool    // by the last reconcile: what mig-manager reads
	crashes      []crash // of NVIDIA's config-manager
	byHand       string  // the default configuration, which nodes without a label get
	nfd          nfd
	beside       []string // nodes on which NVIDIA's MPS DaemonSet started beside our daemons, and unmounted their shared memory
	killed       []string // clients of an MPS daemon that ended before them
	evicted      []string
	wronged      []string // pods of tenants that the operator deletes as NVIDIA's
	told         []string
	version      map[string]int // of each Node
	writes       map[string]int // by kind of action
	refused      []string       // what the API server has refused, and why

	ahead      time.Duration // by which the controller's clock is ahead of all others
	dropsNames bool          // the feature gate DRAExtendedResource is off
	orphans    []string      // DeviceTaintRules of nodes that are gone
	scheduler  nvidia.Classes
}

// readings are objects as they were last read: nodes as they are stored, and with what their annotations say.
type readings struct {
	policies []v1alpha1.GPUSharingPolicy
	stored   map[string]*cluster.Node
	nodes    map[string]cluster.Node
	all      []cluster.Node // of the last snapshot
}

// joined is a node with what its annotations say.
func (r *readings) joined(n *cluster.Node) cluster.Node {
	if !reflect.DeepEqual(r.stored[n.Name], n) {
		r.stored[n.Name], r.nodes[n.Name] = n, n.WithCopy(&n.GPU)
	}
	return r.nodes[n.Name]
}

// crash is an end of NVIDIA's config-manager, because the label of its node names a key that it cannot see.
type crash struct {
	node, key string
	leaving   bool // its pod was being deleted
}

// host is a node with its hardware.
type host struct {
	*cluster.Node
	made        int // GPUNodes of its name
	hardware    *sim.Hardware
	daemons     map[string]plan.Daemon
	done        []string       // what the agent did
	theirs      *gpu.MPSDaemon // of NVIDIA's DaemonSet
	features    features
	driver      driver
	broken      func(cluster.Snapshot) bool // the plugin does not advertise what it reads
	watches     bool                        // the agent reports who sees a key
	noTimeSlice bool                        // the driver has none for the GPUs
	machine
	manager
	hardwareEvents
	refusals
	authored map[string]string // labels as the operator has set them, where nobody else has since
	ownWrote time.Time         // to the Node, by the API server's clock
	marks    map[string]mark   // labels of others that say that a controller works there

	upgrade upgrade
	late    bool                // the agent reports a moment later what it does
	dcgm    map[string][]string // UUIDs of the instances that each pod of DCGM has seen
	flips   bool                // the plugin starts with its default, as NVIDIA's does
	plugin  struct {
		selected  string               // what the plugin reads
		loaded    string               // what it has read, also once that key is gone
		synced    map[string]time.Time // since when, by pod and key
		slow      time.Duration        // how long the kubelet takes for a sync, where the agent watches; otherwise a second
		seen      map[string]string    // what the kubelet has projected
		behind    bool                 // that is not what the ConfigMap holds
		projected time.Time            // when it last was
		running   bool
		uuids     []string             // of the MIG instances that it advertises
		kinds     map[string]string    // the resources of these, and of those that it advertised before
		shown     []string             // of those that the GPUNode showed lately
		early     bool                 // it looked at its instances before the GPUNode showed them
		gone      map[string]time.Time // since when the kubelet has no plugin for a resource that it lists
	}
}

// projectsWithin is how long the kubelet takes at most to project a changed ConfigMap into the pods that mount it.
const projectsWithin = 90 * time.Second

// isUpToDate expects that a node is as its policy asks.
func isUpToDate(g Gomega, n rollout.NodeState) {
	g.ExpectWithOffset(1, n.State).To(Equal(node.UpToDate), n.Message)
}

func newSite() *site {
	return &site{
		Snapshot: cluster.Snapshot{
			Now:    time.Unix(1_800_000_000, 0),
			Plugin: cluster.DevicePlugin{Ready: true, ClusterPolicy: true, NodeFeatures: true},
		},
		hosts: map[string]*host{}, version: map[string]int{}, writes: map[string]int{}, scheduler: nvidia.Classes{},
		reads: readings{stored: map[string]*cluster.Node{}, nodes: map[string]cluster.Node{}},
	}
}

// withGPUs is a site with one node.
func withGPUs(models ...sim.Model) (*site, *host) {
	c := newSite()
	h := c.add("a", models...)
	return c, h
}

func (c *site) add(name string, models ...sim.Model) *host {
	chassis := name
	if c.replaced > 0 {
		chassis = fmt.Sprintf("%s-%d", name, c.replaced)
	}
	n, err := sim.NewNode(chassis, models...)
	if err != nil {
		panic(err)
	}
	h := &host{
		hardware: sim.On(n), daemons: map[string]plan.Daemon{}, features: features{merged: map[string]bool{}},
		dcgm: map[string][]string{}, authored: map[string]string{}, marks: map[string]mark{},
	}
	h.Node = &cluster.Node{
		Name: name, AgentReady: true, Allocatable: map[string]int64{}, Annotations: map[string]string{},
		Labels: map[string]string{
			"kubernetes.io/hostname": name, pluginLabel: "true", gfdLabel: "true", v1alpha1.LabelRunsAgent: "true",
		},
	}
	h.plugin.synced, h.plugin.gone, h.plugin.kinds = map[string]time.Time{}, map[string]time.Time{}, map[string]string{}
	c.makeGPUNode(h)
	c.hosts[name] = h
	c.settle(h)
	c.mergeFeatures(h)
	return h
}

// makeGPUNode makes the GPUNode of a host, or makes it anew after it was deleted. The API server says when.
func (c *site) makeGPUNode(h *host) {
	h.made++
	h.GPU = v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{
		Name: h.Name, Generation: 1, UID: types.UID(fmt.Sprintf("%s-%d", h.Name, h.made)),
		CreationTimestamp: metav1.NewTime(c.Now.Truncate(time.Second)),
	}}
	for _, conditionType := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled} {
		h.GPU.Status.Conditions = append(h.GPU.Status.Conditions, metav1.Condition{ // the default of the API
			Type: conditionType, Status: metav1.ConditionUnknown, Reason: v1alpha1.ReasonAwaitingReport, LastTransitionTime: metav1.Unix(0, 0),
		})
	}
}

// world is the snapshot that a reconcile reads: values of its own.
func (c *site) world() cluster.Snapshot {
	s := c.withoutNodes()
	for i := range c.Policies {
		s.Policies = append(s.Policies, *c.Policies[i].DeepCopy())
	}
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		s.Nodes = append(s.Nodes, c.hosts[name].copied())
	}
	return s
}

// watched is world, in which what is as it was when it was last read is that value, as in the controller's cache.
func (c *site) watched() cluster.Snapshot {
	s := c.withoutNodes()
	if !reflect.DeepEqual(c.reads.policies, c.Policies) {
		c.reads.policies = nil
		for i := range c.Policies {
			c.reads.policies = append(c.reads.policies, *c.Policies[i].DeepCopy())
		}
	}
	names := slices.Sorted(maps.Keys(c.hosts))
	same := len(c.reads.all) == len(names)
	for i, name := range names {
		h := c.hosts[name]
		if h.Features = h.features.seen(); !reflect.DeepEqual(c.reads.stored[name], h.Node) {
			is := h.alone()
			is.GPU = *h.GPU.DeepCopy()
			c.reads.joined(&is)
			same = false
		}
		same = same && c.reads.all[i].Name == name
	}
	if !same {
		c.reads.all = nil
		for _, name := range names {
			c.reads.all = append(c.reads.all, c.reads.nodes[name])
		}
	}
	s.Policies, s.Nodes = c.reads.policies, c.reads.all
	return s
}

// withoutNodes is the snapshot without its nodes and policies.
func (c *site) withoutNodes() cluster.Snapshot {
	s := c.Snapshot
	s.Now = c.controllersNow()
	s.Configs, s.Policies, s.Nodes = maps.Clone(c.Configs), nil, nil
	s.DRA.DevicesTaintedOn, s.DRA.Named, s.DRA.Edited = c.devicesTaintedOn(), c.named(), c.edited()
	return s
}

// controllersNow is what the controller's clock shows.
func (c *site) controllersNow() time.Time { return c.Now.Add(c.ahead) }

// copied is the node as it is now.
func (h *host) copied() cluster.Node { return h.alone().WithCopy(h.GPU.DeepCopy()) }

// copiedUnless is the node alone as it was, unless it has changed.
func (h *host) copiedUnless(was cluster.Node) cluster.Node {
	is := *h.Node
	is.Features = h.features.seen()
	if was.GPU, is.GPU = (v1alpha1.GPUNode{}), (v1alpha1.GPUNode{}); reflect.DeepEqual(was, is) {
		return was
	}
	return h.alone()
}

// alone is the node as it is now, without its GPUNode.
func (h *host) alone() cluster.Node {
	n := *h.Node
	n.GPU = v1alpha1.GPUNode{}
	n.Labels, n.Annotations, n.Allocatable = maps.Clone(n.Labels), maps.Clone(n.Annotations), maps.Clone(n.Allocatable)
	n.Unallocatable = maps.Clone(n.Unallocatable)
	n.Taints, n.Pods, n.Claims = slices.Clone(n.Taints), slices.Clone(n.Pods), slices.Clone(n.Claims)
	n.Features = h.features.seen()
	return n
}

// hold lets a pod of a user hold a GPU of a node, or an instance of it.
func (c *site) hold(h *host, name string, index, instance int) {
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "user", Name: name, UID: "uid-" + name, Controller: "ReplicaSet", GPU: true, Scheduled: c.Now,
	})
	h.holds(h.devices()[index].UUID, instance, name)
	h.report()
}

// end lets a pod of a user end.
func (c *site) end(h *host, name string) {
	h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.Name == name && p.Namespace != tenant })
	h.unclaim(name)
	h.frees(name)
	h.report()
}

// do carries out an action as the executor does.
func (c *site) do(a action.Action) {
	c.writes[fmt.Sprintf("%T", a)]++
	h := c.hosts[a.NodeName()]
	switch a := a.(type) {
	case action.WriteConfigs:
		c.Configs, c.ConfigsCopy = maps.Clone(a.Data), maps.Clone(a.Data)
	case action.TriggerSync:
		c.sync(h, a)
	case action.PatchNode:
		patch(h.Labels, a.Labels)
		patch(h.Annotations, a.Annotations)
		for name, value := range a.Labels {
			if delete(h.authored, name); value != nil {
				h.authored[name] = *value
			}
		}
		c.wroteNode(h)
	case action.Taint:
		c.wroteNode(h)
		if !slices.ContainsFunc(h.Taints, func(t corev1.Taint) bool { return t.Key == a.Taint.Key }) {
			h.Taints = append(h.Taints, a.Taint)
			if a.Baseline != "" {
				h.Annotations[v1alpha1.AnnotationBaseline] = a.Baseline
			}
		}
	case action.Untaint:
		c.wroteNode(h)
		h.Taints = slices.DeleteFunc(h.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging })
	case action.KeepTaints:
		c.wroteNode(h)
		taints, record := rollout.Retaint(h.Taints, h.Annotations[v1alpha1.AnnotationTaints], a.Want)
		h.Taints = taints
		patch(h.Annotations, map[string]*string{v1alpha1.AnnotationTaints: nil})
		if record != "" {
			h.Annotations[v1alpha1.AnnotationTaints] = record
		}
	case action.Evict:
		c.evicted = append(c.evicted, a.Pod)
		c.end(h, a.Pod)
	case action.DeletePod:
		c.deletePod(h, a.UID)
	case action.KeepMPSOff:
		c.keepMPSOff(h)
	case action.AllowMPS:
		h.features.ours = time.Time{}
	case action.TaintDevices:
		if c.DRA.ServesTaintRules && !h.TaintRuleTaken && !h.driver.refused && !h.driver.edited {
			h.DevicesTaintedAt = a.Since
		}
	case action.UntaintDevices:
		if c.orphans = slices.DeleteFunc(c.orphans, func(node string) bool { return node == a.Node }); h != nil {
			h.DevicesTaintedAt, h.driver.edited = time.Time{}, false
		}
	case action.WriteClass:
		c.writeClass(a.Class)
	case action.DeleteClass:
		c.dropClass(a.Name)
	case action.Report:
		if !c.takes(a, v1alpha1.GPUNode{Status: a.Status}) {
			return
		}
		h.setReported(*a.Status.DeepCopy())
		c.told = append(c.told, h.waits())
	case action.SetSpec:
		if !c.takes(a, v1alpha1.GPUNode{Spec: a.Spec}) {
			return
		}
		h.setSpec(*a.Spec.DeepCopy())
	}
}

// takes reports whether the API server takes what an action writes, which must not exceed the schema.
func (c *site) takes(a action.Action, n v1alpha1.GPUNode) bool {
	why := refusal(n)
	if why != "" {
		c.refused = append(c.refused, fmt.Sprintf("%s: %s", a, why))
	}
	return why == ""
}

// setSpec stores a spec as the API server does, whose generations count what the agent looks at.
func (h *host) setSpec(want v1alpha1.GPUNodeSpec) {
	want.ChangeTime = metav1.NewTime(want.ChangeTime.Truncate(time.Second))
	if !reflect.DeepEqual(want, h.GPU.Spec) {
		h.GPU.Spec = want
		h.GPU.Generation++
	}
}

// setReported stores the controller's part of the status, beside the agent's.
func (h *host) setReported(status v1alpha1.GPUNodeStatus) {
	agents := h.agents()
	h.GPU.Status.ObservedGeneration, h.GPU.Status.Rollout = status.ObservedGeneration, status.Rollout
	h.GPU.Status.Conditions = slices.Concat(status.Conditions, agents)
}

// agents are the conditions of the agent.
func (h *host) agents() []metav1.Condition {
	ours := rollout.ReportedStatus(h.GPU.Status).Conditions
	return slices.DeleteFunc(slices.Clone(h.GPU.Status.Conditions), func(c metav1.Condition) bool { return slices.Contains(ours, c) })
}

// waits is why a node is not ready, as its GPUNode reports it: <reason>: <message>.
func (h *host) waits() string {
	if c, _ := condition.Find(h.GPU.Status.Conditions, v1alpha1.ConditionReady); c.Status == metav1.ConditionFalse {
		return c.Reason + ": " + c.Message
	}
	return ""
}

// annotate sets an annotation of the GPUNode.
func (h *host) annotate(name, value string) {
	h.GPU.Annotations = maps.Clone(h.GPU.Annotations)
	if h.GPU.Annotations == nil {
		h.GPU.Annotations = map[string]string{}
	}
	h.GPU.Annotations[name] = value
}

func (c *site) sync(h *host, a action.TriggerSync) {
	for i := range h.Pods {
		if h.Pods[i].UID == a.UID {
			h.Pods[i].SyncTriggered = a.Value
			key, _, _ := strings.Cut(a.Value, "@")
			if _, again := h.plugin.synced[a.UID+key]; !again {
				h.plugin.synced[a.UID+key] = c.Now.Truncate(time.Second)
			}
		}
	}
}

// mark is a label's value, and when who set it last wrote to the Node.
type mark struct {
	value string
	wrote time.Time
}

// held notes that one of NVIDIA's programs has written to a Node, of which they are one author.
func (c *site) held(h *host) {
	clear(h.marks)
	c.marked(h)
}

// wroteNode notes that the operator has written to a Node.
func (c *site) wroteNode(h *host) {
	c.version[h.Name]++
	h.ownWrote = c.Now
	c.marked(h)
}

// marked tells since when a Node says that a controller works there, as its managed fields and the operator's record do.
func (c *site) marked(h *host) {
	h.MarkedAtWorkSince = time.Time{}
	_, stopped := cluster.Stopped(h.Annotations)
	for name, value := range h.Labels {
		works := name == "nvidia.com/mig.config.state" && value == "pending" || name == upgradeLabel && value != "" && value != "upgrade-done" ||
			strings.HasPrefix(name, "nvidia.com/gpu.deploy.") && !slices.Contains([]string{"", "true", "false"}, value)
		set, own := h.authored[name]
		if own = own && set == value; !own {
			delete(h.authored, name)
		}
		if !works || own {
			delete(h.marks, name)
		} else if h.marks[name].value != value {
			h.marks[name] = mark{value, c.Now}
		}
		wrote := h.marks[name].wrote
		if own && stopped.IsZero() {
			wrote = h.ownWrote
		} else if own {
			wrote = stopped
		}
		if works {
			h.MarkedAtWorkSince = timing.Latest(h.MarkedAtWorkSince, wrote)
		}
	}
	maps.DeleteFunc(h.marks, func(name string, m mark) bool { return h.Labels[name] != m.value })
}

// deletePod ends a pod of one of NVIDIA's DaemonSets, with what runs in it.
func (c *site) deletePod(h *host, uid string) {
	at := slices.IndexFunc(h.Pods, func(p cluster.Pod) bool { return p.UID == uid })
	if at < 0 {
		return
	}
	if h.Pods[at].Namespace == tenant {
		c.wronged = append(c.wronged, h.Pods[at].Name) // it comes back, or the admission policy keeps it
		return
	}
	if h.stuck[uid] {
		c.hang(h, at)
		return
	}
	if h.Pods[at].Validator {
		c.end(h, h.Pods[at].Name)
		return
	}
	servesMPS := playedBy(mpsLabel)(h.Pods[at])
	h.Pods = slices.Delete(h.Pods, at, at+1)
	switch {
	case h.dcgm[uid] != nil:
	case !servesMPS:
		h.plugin.running = false
	default:
		c.endMPS(h)
	}
}

// hang tells a pod of NVIDIA's to end that does not. The deletion of a test workload of its validator is refused.
func (c *site) hang(h *host, at int) {
	if p := &h.Pods[at]; !p.Validator && !p.Terminating {
		p.Terminating, p.EndsBy = true, c.Now.Add(30*time.Second)
	}
}

func patch(have map[string]string, with map[string]*string) {
	for name, value := range with {
		if value == nil {
			delete(have, name)
			continue
		}
		have[name] = *value
	}
}

// settle lets what is not ours catch up: DaemonSets, the kubelet, the agent, the plugin.
func (c *site) settle(h *host) {
	h.now = c.Now
	if h.off {
		return
	}
	c.upgrading(h)
	h.attend()
	c.mergeFeatures(h)
	c.daemonSets(h)
	c.project(h)
	h.boot()
	c.partition(h)
	h.reports(h.converge())
	h.reportConfig()
	h.goDown()
	c.advertise(h)
	h.plugin.shown = reported(h)
	c.publish(h)
	c.discoverFeatures(h)
}

// reported are the UUIDs of the MIG instances that a GPUNode shows.
func reported(h *host) (uuids []string) {
	for _, d := range h.GPU.Status.Devices {
		for _, i := range d.Instances {
			uuids = append(uuids, i.UUID)
		}
	}
	return uuids
}

// daemonSets starts and ends the pods of NVIDIA's programs by their deploy labels. A pod with other tolerations than
// those of the ClusterPolicy is replaced; none comes to a node with a taint that it does not tolerate, and none goes
// for one.
func (c *site) daemonSets(h *host) {
	for _, label := range append([]string{pluginLabel, gfdLabel, v1alpha1.LabelMIGManager}, monitorLabels()...) {
		at := slices.IndexFunc(h.Pods, playedBy(label))
		if at >= 0 && h.stuck[h.Pods[at].UID] {
			if h.Labels[label] != "true" {
				c.hang(h, at)
			}
			continue
		}
		if at >= 0 && c.Plugin.Operands != nil && !slices.Equal(h.Pods[at].Tolerations, c.Plugin.Operands.Tolerations) {
			h.Pods = slices.Delete(h.Pods, at, at+1)
			h.plugin.running = false
			at = -1
		}
		switch wanted := h.Labels[label] == "true"; {
		case wanted && at < 0 && c.keptOff(h):
		case wanted && at < 0:
			c.pods++
			h.Pods = append(h.Pods, cluster.Pod{
				Namespace: "gpu-operator", Name: fmt.Sprintf("nvidia-%d", c.pods), UID: fmt.Sprintf("nvidia-%d", c.pods),
				Controller: "DaemonSet", NVIDIA: true, NodeSelector: map[string]string{label: "true"},
				MountsConfig: !monitors(label) && (label != v1alpha1.LabelMIGManager || c.Plugin.MIGReady), Scheduled: c.Now,
				Serves: true, Tolerations: c.tolerations(),
			})
			if monitors(label) {
				h.dcgm[h.Pods[len(h.Pods)-1].UID] = append([]string{}, h.instances()...)
			}
			h.plugin.seen = maps.Clone(c.Configs) // a new pod is given what is there
		case !wanted && at >= 0:
			h.Pods = slices.Delete(h.Pods, at, at+1)
		}
	}
	c.mpsDaemonSet(h)
}

// playedBy reports whether a pod is the one of NVIDIA's that a label keeps on its node. The cluster knows that of
// itself: a pod of a tenant may select any label.
func playedBy(label string) func(cluster.Pod) bool {
	return func(p cluster.Pod) bool {
		return p.Namespace != tenant && p.Namespace != "user" && p.NodeSelector[label] != ""
	}
}

func (c *site) tolerations() []corev1.Toleration {
	if c.Plugin.Operands == nil {
		return nil
	}
	return c.Plugin.Operands.Tolerations
}

// keptOff reports whether a taint keeps NVIDIA's programs off a node.
func (c *site) keptOff(h *host) bool {
	return slices.ContainsFunc(h.Taints, func(t corev1.Taint) bool {
		return c.Plugin.Operands != nil && t.Effect != corev1.TaintEffectPreferNoSchedule && !clusterpolicy.Tolerates(c.tolerations(), t)
	})
}

// tolerate makes exactly these tolerations of the ClusterPolicy ours.
func (c *site) tolerate(ours []corev1.Toleration) {
	if c.Plugin.Operands == nil {
		return
	}
	o := *c.Plugin.Operands
	o.Tolerations = slices.DeleteFunc(slices.Clone(o.Tolerations), func(t corev1.Toleration) bool { return slices.Contains(o.Ours, t) })
	o.Tolerations, o.Ours = append(o.Tolerations, ours...), ours
	c.Plugin.Operands = &o
}

// endMPS ends NVIDIA's MPS daemon and all that use it. Who has a GPU that the operator's daemon serves uses that.
func (c *site) endMPS(h *host) {
	if h.theirs == nil {
		return
	}
	runs, deployed := h.Labels[pluginLabel]
	// NVIDIA itself ended it, for an upgrade of its driver or on a node that has opted out.
	theirs := strings.HasPrefix(runs, "paused-for-driver") || c.Plugin.ClusterPolicy && !deployed
	for _, d := range h.devices() {
		for _, o := range d.Holders {
			if theirs || d.State.MIG || d.State.MPS != h.theirs { // NVIDIA's plugin gives no MIG instance to a daemon
				continue
			}
			c.killed = append(c.killed, o.Pod)
		}
	}
	h.theirs = nil
	if len(h.daemons) == 0 {
		h.computeMode(gpu.ComputeDefault)
	}
}

func (h *host) computeMode(mode gpu.ComputeMode) {
	h.hardware.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			if mode == gpu.ComputeDefault || !n.GPUs[i].MIG { // refused in MIG mode
				n.GPUs[i].ComputeMode = mode
			}
		}
	})
}

// parsed keeps what parse has read: a simulation reads the same few configurations again and again.
var parsed sync.Map

func parse(data string) *spec.Config {
	if config, known := parsed.Load(data); known {
		return config.(*spec.Config)
	}
	config, err := nvidia.Parse(data)
	if err != nil {
		panic(err)
	}
	parsed.Store(data, config)
	return config
}

// project shows the ConfigMap to the pods of which a sync was triggered a while ago, and to all of them once the
// kubelet comes round to it.
func (c *site) project(h *host) {
	if h.plugin.behind = len(h.readers()) > 0 && !maps.Equal(h.plugin.seen, c.Configs); !h.plugin.behind {
		h.plugin.projected = c.Now
	} else if c.Now.Sub(h.plugin.projected) >= projectsWithin {
		h.plugin.seen = maps.Clone(c.Configs)
	}
	takes := time.Second
	if h.watches && !slices.ContainsFunc(h.readers(), func(uid string) bool { return !slices.Contains(h.GPU.Status.Config.PodUIDs, uid) }) {
		takes = max(takes, h.plugin.slow)
	}
	for _, p := range h.Pods {
		key, _, synced := strings.Cut(p.SyncTriggered, "@")
		if synced && c.Now.Sub(h.plugin.synced[p.UID+key]) >= takes {
			h.plugin.seen = maps.Clone(c.Configs)
		}
	}
}

// readers are the pods that read our ConfigMap.
func (h *host) readers() []string {
	var uids []string
	for _, p := range h.Pods {
		if p.MountsConfig {
			uids = append(uids, p.UID)
		}
	}
	return uids
}

// reportConfig is the agent's report of who sees the desired key, if it is one that reports that.
func (h *host) reportConfig() {
	key := h.GPU.Spec.ConfigName
	if _, seen := h.plugin.seen[key]; h.watches && seen && key != "" {
		h.GPU.Status.Config = v1alpha1.ConfigStatus{Name: key, ChangeTime: h.GPU.Spec.ChangeTime, PodUIDs: h.readers()}
	}
}

// devices are the GPUs as the agent observes them.
func (h *host) devices() []gpu.Device {
	inventory, err := h.hardware.Observe(context.Background())
	if err != nil {
		panic(err)
	}
	for i := range inventory.Devices {
		d := &inventory.Devices[i]
		d.Holders = slices.DeleteFunc(slices.Clone(d.Holders), h.isAdmins)
		timed := func(s v1alpha1.DeviceSpec) bool { return s.UUID == d.UUID && s.Sharing.TimeSliceInterval != "" }
		if !d.State.MIG && slices.ContainsFunc(h.GPU.Spec.Devices, timed) {
			d.State.TimeSlice = h.timeSlice(d.UUID)
		}
		if !d.State.MIG { // mps.Assign
			d.State.MPS = h.theirs
		}
		for resource, d := range h.daemons {
			for _, served := range d.Devices {
				if served.UUID == inventory.Devices[i].UUID {
					inventory.Devices[i].State.MPS = &gpu.MPSDaemon{
						Resource: resource, ActiveThreadPercentage: d.ActiveThreadPercentage,
						PinnedMemoryLimitMiB: served.PinnedMemoryLimitMiB,
					}
				}
			}
		}
	}
	return inventory.Devices
}

// timeSlice is that of a GPU, whether or not the agent reads it.
func (h *host) timeSlice(uuid string) (slice gpu.TimeSlice) {
	h.hardware.Update(func(n *sim.Node) {
		var err error
		if slice, err = n.TimeSlice(uuid); err != nil || h.noTimeSlice {
			slice = gpu.TimeSliceNone
		}
	})
	return slice
}

// Start implements plan.MPS.
func (h *host) Start(_ context.Context, d plan.Daemon) error {
	h.daemons[d.Resource] = d
	return nil
}

// Stop implements plan.MPS.
func (h *host) Stop(_ context.Context, resource string) error {
	delete(h.daemons, resource)
	return nil
}

// advertise is NVIDIA's device plugin with its config-manager. It enumerates the GPUs when it starts and when another
// key is selected, and never else.
func (c *site) advertise(h *host) {
	c.forgetGone(h)
	pod := slices.IndexFunc(h.Pods, func(p cluster.Pod) bool {
		return playedBy(pluginLabel)(p) || !c.Plugin.ClusterPolicy && p.MountsConfig
	})
	if pod < 0 || !h.upgrade.driver() {
		h.plugin.running = false
		c.offerNothing(h)
		return
	}
	key := h.Labels[v1alpha1.LabelConfig]
	if !h.plugin.running && h.flips {
		h.Pods[pod].ReadySince = c.Now.Add(h.skew)
		h.plugin.running, h.plugin.selected = true, "default"
		h.forgetHealth()
		c.offer(h, c.Configs["default"])
		return
	}
	if h.plugin.running && key == h.plugin.selected {
		return
	}
	files := c.configs(h)
	if _, err := nvidia.SelectConfig(key, "", files); err != nil {
		c.crashes = append(c.crashes, crash{node: h.Name, key: key, leaving: h.Pods[pod].Terminating})
		return
	}
	starts := !h.plugin.running
	h.plugin.running, h.plugin.selected = true, key
	if h.skew != 0 {
		h.Pods[pod].ReadySince = c.Now.Add(h.skew)
	} else if starts && !h.flips { // it never offers its default
		h.Pods[pod].ReadySince = c.Now.Add(-timing.PluginSettles)
	}
	h.forgetHealth()
	if h.broken != nil && h.broken(c.Snapshot) {
		c.offerNothing(h)
		return
	}
	c.offer(h, files[key])
	h.plugin.uuids = h.instances()
	for _, d := range h.devices() {
		for _, i := range d.State.Instances {
			h.plugin.kinds[i.UUID] = plan.ResourceOf(i.Profile)
		}
	}
	h.plugin.early = !slices.Equal(slices.Sorted(slices.Values(h.plugin.uuids)), slices.Sorted(slices.Values(h.plugin.shown)))
}

// configs are the configurations that config-manager finds, by name. The default one has none here.
func (c *site) configs(h *host) map[string]string { return withKey(h.plugin.seen, "", c.byHand) }

// keepsCapacity is how long the kubelet lists the devices of a plugin that is gone as capacity: endpointStopGracePeriod
// of https://github.com/kubernetes/kubernetes/blob/v1.37.1/pkg/kubelet/cm/devicemanager/types.go
const keepsCapacity = 5 * time.Minute

// offer is NVIDIA's device plugin that registers what it makes of a configuration: its former resources are gone. If it
// refuses the configuration it exits, and is started again.
func (c *site) offer(h *host, data string) {
	c.offerNothing(h)
	c.version[h.Name]++
	h.plugin.loaded = data
	resources, err := nvidia.Advertise(parse(data), nvidia.Environment{MPSRoot: "/run/nvidia/mps"}, h.devices())
	if err != nil {
		h.plugin.running = false
		return
	}
	for name, devices := range resources {
		delete(h.plugin.gone, name)
		healthy := slices.DeleteFunc(slices.Clone(devices), h.isSick)
		h.Allocatable[name] = int64(len(healthy))
		h.unallocatable(name, int64(len(devices)-len(healthy)))
	}
}

// offerNothing leaves each resource with 0, because the kubelet never forgets one, and with its devices as capacity for
// a while.
func (c *site) offerNothing(h *host) {
	for name, n := range h.Allocatable {
		if _, gone := h.plugin.gone[name]; !gone {
			h.plugin.gone[name] = c.Now
			h.unallocatable(name, n+h.Unallocatable[name])
		}
		h.Allocatable[name] = 0
	}
}

// forgetGone is the kubelet that lists the devices of a plugin that is gone no longer.
func (c *site) forgetGone(h *host) {
	for name, since := range h.plugin.gone {
		if h.Unallocatable[name] > 0 && c.Now.Sub(since) >= keepsCapacity {
			h.unallocatable(name, 0)
			c.version[h.Name]++
		}
	}
}

// unallocatable sets how many devices of a resource are capacity and cannot be allocated.
func (h *host) unallocatable(name string, n int64) {
	if h.Unallocatable == nil {
		h.Unallocatable = map[string]int64{}
	}
	if h.Unallocatable[name] = n; n == 0 {
		delete(h.Unallocatable, name)
	}
}

// instances are the UUIDs of the MIG instances.
func (h *host) instances() []string {
	var uuids []string
	for _, d := range h.devices() {
		for _, i := range d.State.Instances {
			uuids = append(uuids, i.UUID)
		}
	}
	return uuids
}

// destroy takes an instance away by hand, and the agent makes it again.
func (h *host) destroy(index int) {
	d := h.devices()[index]
	if err := h.hardware.DestroyInstance(context.Background(), d.UUID, d.State.Instances[0].ID); err != nil {
		panic(err)
	}
	h.converge()
	h.report()
}

// tick lets time pass and everybody catch up.
func (c *site) tick(d time.Duration) {
	c.Now = c.Now.Add(d)
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		c.settle(c.hosts[name])
	}
}

// reconcile decides, if anything wakes the controller, acts, and keeps the statuses.
func (c *site) reconcile() rollout.Decision {
	d := c.sleeps.decide(c.watched(), c.memory.decide)
	c.tolerate(d.Tolerations)
	for _, a := range d.Actions {
		c.do(a)
	}
	c.configureMIG(d)
	for i := range c.Policies {
		c.Policies[i].Status = d.Policies[c.Policies[i].Name]
	}
	return d
}

// run reconciles until nothing is left to do, or for so many reconciles; the states that each node went through are
// returned.
func (c *site) run(reconciles int) (d rollout.Decision, states map[string][]node.State) {
	states = map[string][]node.State{}
	for range reconciles {
		d = c.reconcile()
		for _, n := range d.Nodes {
			if seen := states[n.Node]; len(seen) == 0 || seen[len(seen)-1] != n.State {
				states[n.Node] = append(seen, n.State)
			}
		}
		if len(d.Actions) == 0 && d.After == 0 && !c.reconfigured && !c.awaitsAgents() {
			return d, states
		}
		c.tick(time.Second)
	}
	return d, states
}
