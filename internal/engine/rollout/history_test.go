// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// historyOf is the history of a seed.
func historyOf(seed uint64) history.History {
	h := history.Of(seed, kindsOf(seed))
	if seed >= onDriver { // more happens: only on such nodes
		more := history.Of(^seed, driverHappenings().Names())
		h.Events = slices.Concat(more.Events, h.Events)
	}
	if seed%onDriver >= history.Late {
		h = h.WithLate(lateKinds())
	}
	return h
}

// kindsOf are the names of the events, late ones excepted, that a history of that seed may have: those of NVIDIA's DRA driver
// only where it serves nodes.
func kindsOf(seed uint64) []string {
	shared := history.Events[*host]().Names()
	if seed >= onDriver {
		shared = driverHappenings().Names(shared...)
	}
	return happenings().Names(shared...)
}

func lateKinds() []string { return lateHappenings().Names(history.LateEvents[*host]().Names()...) }

// kinds are the names of all events.
func kinds() []string { return slices.Concat(kindsOf(onDriver), lateKinds()) }

// run is a history as it takes place, in the cluster in miniature. The controller reads a cache that may be out of
// date, and its reconciles may end early.
type run struct {
	seed uint64
	*site
	random *rand.Rand
	fresh  int // of so many objects one is read late
	cache  cached

	transcript []string // what has happened, for people
	tells      bool     // the transcript is wanted
	broken     string   // the first invariant that does not hold, by its name, and how
	serial     int      // of GPUs, pods and policies
	heldGPUs   map[string]heldGPU
	kinds      map[string]string // of the pods of users
	protected  map[string]bool   // pods that a PodDisruptionBudget keeps
	hangs      map[string]bool   // pods that do not end when told to
	slots      map[string]int32  // by policy: the largest budget that it had
	count      map[string]int    // writes, evictions and restarts, by object
	fights     []func() bool     // other controllers that set something again and again
	theirs     map[string][]string
	before     map[string]cluster.Node
	mentioned  map[string]bool // generations of policies that a status has named as observed
	backups    backups
	retained   map[string]bool
	states     map[string]string // that the transcript has told of last
	opensCRDs  bool
	watching
	releasing
	rested      rollout.Decision       // the last one when everything rested
	guises      map[string]bool        // UIDs of pods of users that have a GPU and look like one of NVIDIA's
	tenants     map[string]*corev1.Pod // pods of tenants as they would look without a disguise, by UID
	turns       map[string]bool        // nodes that were kept from their users in this window; nil: nobody asks
	readClasses []dra.Class            // by the last reconcile
	unread      map[string]bool        // resources of classes that came and went between two reconciles
	nights      bool                   // a machine has started with other GPUs each night; once is enough
	retains     bool                   // a policy may have left nodes as they are before the end
	meddled     bool                   // another controller has changed what NVIDIA's config-manager reads
}

// heldGPU is what a pod of a user uses.
type heldGPU struct {
	node, uuid, instance string
	mig                  bool
	boot                 string
	unseen               bool // it came while the agent reported nothing, though it had just reported that all is well
}

// newRun makes the cluster of a seed.
func newRun(seed uint64) *run {
	c := &run{
		site: newSite(), random: rand.New(rand.NewPCG(seed, 0)),
		heldGPUs: map[string]heldGPU{}, kinds: map[string]string{}, protected: map[string]bool{}, hangs: map[string]bool{},
		slots: map[string]int32{}, count: map[string]int{}, theirs: map[string][]string{}, before: map[string]cluster.Node{},
		seed: seed, mentioned: map[string]bool{}, retained: map[string]bool{}, states: map[string]string{},
		tenants: map[string]*corev1.Pod{}, guises: map[string]bool{}, unread: map[string]bool{},
	}
	c.memory, c.Repeats, c.OtherControllers = mostlyRemembering(), &action.Repeats{}, &cluster.OtherControllers{}
	random := rand.New(rand.NewPCG(seed, 2))
	one := func(in int) bool { return random.IntN(in) == 0 }
	c.Plugin.NodeFeatures, c.Plugin.ClusterPolicy = !one(4), !one(10)
	c.opensCRDs = c.Plugin.NodeFeatures
	if one(6) && c.Plugin.ClusterPolicy {
		c.byHand = mpsByHand(3)
	}
	if one(5) {
		c.Configs = map[string]string{"by-hand": "version: v1\n"}
	}
	c.Plugin.Configs = maps.Clone(c.Configs)
	if one(3) && c.Plugin.ClusterPolicy {
		c.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy", Tolerations: []corev1.Toleration{ofNVIDIA}}
	}
	for i := range []int{1, 2, 2, 2, 3, 4}[random.IntN(6)] {
		c.machine(fmt.Sprintf("n%d", i), random)
	}
	c.fresh = 1 + random.IntN(3)
	c.tick(time.Second)
	c.tick(time.Second)
	c.tick(time.Minute)
	for _, h := range c.all() {
		c.snapshot(h)
	}
	c.ReplacePolicies(history.Policies(random))
	if seed >= onDriver {
		c.reshare(random)
	}
	c.lead()
	return c
}

// machine adds a node.
func (c *run) machine(name string, random *rand.Rand) {
	one := func(in int) bool { return random.IntN(in) == 0 }
	models := history.Models(random)
	if c.version[name] > 0 && c.seed%onDriver >= history.Late {
		c.replaced++
	}
	h := c.add(name, models...)
	h.pool = []string{"a", "b"}[random.IntN(2)]
	h.Labels[history.PoolLabel] = h.pool
	h.Created = c.Now
	if !c.Plugin.ClusterPolicy {
		h.Labels = map[string]string{"kubernetes.io/hostname": name, "pool": h.pool}
		h.Pods = []cluster.Pod{pluginAlone("plugin-"+name, c.Now)}
		h.plugin.running = false
	}
	if one(2) && c.Plugin.ClusterPolicy {
		h.Labels[v1alpha1.LabelMIGManager] = "true"
		if one(2) {
			h.Labels[v1alpha1.LabelMIGConfig], h.Labels[v1alpha1.LabelMIGConfigState] = "all-disabled", "success"
		}
	}
	if one(4) && c.Plugin.ClusterPolicy {
		h.monitored()
	}
	if _, has := c.Configs["by-hand"]; has && one(2) {
		h.Labels[v1alpha1.LabelConfig] = "by-hand"
		h.plugin.seen = maps.Clone(c.Configs)
	}
	if one(3) {
		h.Taints = []corev1.Taint{{Key: "team.example/only", Effect: corev1.TaintEffectPreferNoSchedule}}
		h.Labels["team.example/label"], h.Annotations["team.example/owner"] = "research", "us"
	}
	if one(6) && models[0] != sim.T4 && c.byHand == "" {
		h.partitionedByHand()
	}
	if one(5) {
		h.virtual()
	}
	if one(8) {
		h.Pods = append(h.Pods, cluster.Pod{Namespace: "nvidia-dra", Name: "dra-" + name, UID: "dra-" + name, Controller: "DaemonSet", DRA: true, Scheduled: c.Now})
	} else if one(12) {
		h.OtherPartitioner = "mig.das.com/1g.5gb"
	}
	c.startBeside(h, "cpu")
	if len(models) > 1 {
		c.startBeside(h, "cpu-tolerant")
	}
	h.watches, h.plugin.slow = one(2), time.Duration(random.IntN(4))*time.Second
	h.remember()
	if dice := rand.New(rand.NewPCG(c.seed, uint64(c.serial+len(c.hosts)))); c.seed >= onDriver && c.Plugin.ClusterPolicy && !c.shared(h) && dice.IntN(3) > 0 {
		c.serveByDRA(h)
	}
	c.version[name]++
}

// partitionedByHand makes an instance on the first GPU, as a user has who does without the operator.
func (h *host) partitionedByHand() {
	uuid := h.devices()[0].UUID
	h.change(uuid, func(g *sim.GPU) { g.MIG, g.PendingMIG = true, true })
	h.nextByHand()
	history.Partition(h, h.devices()[0])
	h.report()
	h.plugin.running = false
}

// all are the hosts by name.
func (c *run) all() []*host {
	var hosts []*host
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		hosts = append(hosts, c.hosts[name])
	}
	return hosts
}

// some is one of the hosts.
func (c *run) some(random *rand.Rand) *host {
	hosts := c.all()
	return hosts[random.IntN(len(hosts))]
}

// snapshot notes how a node is before the operator has changed it.
func (c *run) snapshot(h *host) {
	n := h.copied()
	n.GPU.Status = v1alpha1.GPUNodeStatus{}
	c.before[h.Name] = n
}
