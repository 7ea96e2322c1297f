// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"hash"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// play lets a history take place. Broken names the invariant that does not hold and says how; it is empty if all hold.
func play(h history.History, tells bool) (broken string, transcript []string) {
	return playing(h, tells, watching{})
}

// watching is what looks at all that is decided and written in a history.
type watching struct {
	sum     hash.Hash // of all that is decided; nil: nobody asks
	effects *effects  // nil: nobody asks
	advised *advised  // MIG on demand in mode Advise; nil: off
}

// playing is play, with what looks at all that is decided and written.
func playing(h history.History, tells bool, by watching) (broken string, transcript []string) {
	c := newRun(h.Seed)
	c.tells, c.watching = tells, by
	defer func() {
		if r := recover(); r != nil {
			broken, transcript = fmt.Sprintf("panic: %v\n%s", r, debug.Stack()), c.transcript
		}
	}()
	for _, n := range c.all() {
		c.tell("node %s in pool %s: %s; other partitioner %q, labels %v", n.Name, n.pool, n.hardwareSays(), n.OtherPartitioner, n.Labels)
	}
	c.tell("ClusterPolicy %v, NodeFeature %v, Operands %v", c.Plugin.ClusterPolicy, c.Plugin.NodeFeatures, c.Plugin.Operands != nil)
	for i := range c.Policies {
		c.tell("policy %s: %s", c.Policies[i].Name, history.Says(&c.Policies[i]))
	}
	history.Play(c, h, happenings(), lateHappenings(), driverHappenings())
	return c.broken, c.transcript
}

// reconciles lets so many of them follow one another, on what the cache happens to hold.
func (c *run) reconciles(n int) {
	for range n {
		if c.broken != "" {
			return
		}
		c.step(false)
		c.lapse(time.Duration(1+c.random.IntN(3)) * time.Second)
	}
}

// lapse lets time pass, and looks at what the agents do, before anything else happens.
func (c *run) lapse(d time.Duration) {
	c.tick(d)
	c.harmless()
	c.retainsAsIs()
	c.checkRelease()
	for _, h := range c.all() {
		if c.turns != nil && h.isKept() {
			c.turns[h.Name] = true
		}
	}
}

// rest reconciles as a controller does that wakes up when something changes and when a deadline of its own passes,
// until nothing goes on, or for a time. It reports whether it came to rest.
func (c *run) rest(horizon time.Duration, most int) (d rollout.Decision, rests bool) {
	end := c.Now.Add(horizon)
	idle := 0
	for range most {
		if d = c.step(true); c.broken != "" {
			return d, true
		}
		if len(d.Actions) > 0 {
			idle = 0
		}
		step := time.Second
		if idle++; idle > 3 {
			if step = c.waitsFor(d, 0); step == 0 || !c.Now.Before(end) {
				return d, true
			}
			idle = 2
		}
		if c.refuses(d) {
			step = askAgain
		}
		c.lapse(step)
	}
	return d, false
}

// askAgain is when the controller asks again for an eviction that was refused, as internal/controller/gpusharingpolicy
// does.
const askAgain = 10 * time.Second

// refuses reports whether a PodDisruptionBudget, or a webhook, has refused all that was decided, so that nothing wakes the
// controller.
func (c *run) refuses(d rollout.Decision) bool {
	isRefused := func(a action.Action) bool {
		e, is := a.(action.Evict)
		_, reports := a.(action.Report)
		h := c.hosts[a.NodeName()]
		return is && c.protected[e.Pod] || h != nil && h.refuses && (reports || action.SetsSpec(a))
	}
	return len(d.Actions) > 0 && !slices.ContainsFunc(d.Actions, func(a action.Action) bool { return !isRefused(a) })
}

func (c *run) Rest() {
	clear(c.count)
	d, rests := c.rest(8*time.Hour, 700)
	if rests && slices.ContainsFunc(c.all(), (*host).isKept) { // what timed out is tried again just now
		d, rests = c.rest(mostInOneGo, 200)
	}
	if !rests {
		c.breaks("bounded", "700 reconciles in 8h do not come to rest: %v", said(d.Actions))
	}
	history.Bounded(c, "in 8h in which nobody else does anything", history.MostAtRest)
	c.ended(d)
	c.impartial()
	c.restedOnDriver(d.Nodes)
	c.rested = d
}

// waitsFor is when something happens next though nobody acts; usual if nothing does.
func (c *run) waitsFor(d rollout.Decision, usual time.Duration) time.Duration {
	step := usual
	sooner := func(o time.Duration) {
		if o > 0 && (step == 0 || o < step) {
			step = max(o, time.Second)
		}
	}
	sooner(d.After)
	for _, h := range c.hosts {
		if h.off {
			continue
		}
		if h.upgrade.goesOn() && !h.upgradeStays() || !h.began.IsZero() && h.acts {
			sooner(10 * time.Second)
		}
		if !h.down.IsZero() {
			sooner(30 * time.Second)
		}
		if remaining := resetTime - c.Now.Sub(h.upgrade.returned); h.AgentReady && remaining > 0 {
			sooner(remaining)
		}
		if h.plugin.behind || c.seed%onDriver >= history.Late && h.driver.serves && !h.driverRuns() { // its start is told (2^40+700277)
			sooner(10 * time.Second)
		}
		for name, since := range h.plugin.gone {
			if c.seed%onDriver >= history.Late && h.Unallocatable[name] > 0 { // the kubelet writes that it forgets it (2^40+940152)
				sooner(since.Add(keepsCapacity).Sub(c.Now))
			}
		}
	}
	return step
}

// step is one reconcile: it reads the cache, decides, and acts. A faithful one reads all that is there and does all
// that is decided.
func (c *run) step(faithful bool) rollout.Decision {
	for _, h := range c.all() {
		if h.upgrade.goesOn() {
			h.reborn(h.upgrade.back...)
		}
	}
	c.fought()
	if faithful {
		c.givesBack()
	}
	c.read(func() bool { return faithful || c.random.IntN(c.fresh+1) > 0 })
	s := c.known()
	c.readClasses = s.DRA.Classes
	c.seesOthers(s)
	c.advised.look(&s)
	d := c.memory.decide(s)
	digest(c.sum, d)
	if faithful {
		c.calledUnhealthy(d)
		c.calledAnew(d)
	}
	c.wellSaid(d)
	c.effects.begin(c, d)
	c.tolerate(d.Tolerations)
	c.tellStates(d)
	for _, a := range d.Actions {
		if !faithful && c.random.IntN(10) == 0 || !c.requested(a.For()) || locked(a) && c.cache.version[a.NodeName()] != c.version[a.NodeName()] {
			continue
		}
		c.carryOut(a)
		if c.broken != "" {
			return d
		}
	}
	c.configureMIG(d)
	if faithful {
		c.heldInVain(d)
	}
	c.effects.end(c)
	c.standAlone()
	c.fought()
	if !d.ConfigurePlugin {
		if c.Configs = maps.Clone(c.Plugin.Configs); c.seed%onDriver >= history.Late {
			c.ConfigsCopy = nil
		}
	}
	for i := range c.Policies {
		if s, decided := d.Policies[c.Policies[i].Name]; decided {
			c.acceptsStatus(&c.Policies[i], s)
			c.Policies[i].Status = s
		}
	}
	c.cache.policies = nil
	for i := range c.Policies {
		c.cache.policies = append(c.cache.policies, *c.Policies[i].DeepCopy())
	}
	c.harmless()
	c.withdrawn()
	return d
}

// seesOthers notes on which nodes the controller sees that another one offers the GPUs.
func (c *run) seesOthers(s cluster.Snapshot) {
	for i := range s.Nodes {
		h := c.hosts[s.Nodes[i].Name]
		if h == nil {
			continue
		}
		h.seenAlone = s.Nodes[i].OtherPartitioner == "" && s.Plugin.StackOf(&s.Nodes[i]) == dra.DRADriver
		if offered(&s, &s.Nodes[i]) {
			h.sharedAt = c.Now
		}
		h.recorded = h.recorded || h.Annotations[v1alpha1.AnnotationOtherController] != ""
	}
}

// tellStates tells which nodes have come into another state.
func (c *run) tellStates(d rollout.Decision) {
	for _, n := range d.Nodes {
		if state := fmt.Sprintf("%s (%s) %q: %s", n.State, n.Reason, n.Plan, n.Message); c.states[n.Node] != state {
			c.states[n.Node] = state
			c.tell("    %s under %q: %s", n.Node, n.Policy, state)
		}
	}
}

// standAlone is the DaemonSet of a stand-alone device plugin.
func (c *run) standAlone() {
	for _, h := range c.all() {
		if c.Plugin.ClusterPolicy || h.off || slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.MountsConfig }) {
			continue
		}
		c.serial++
		c.startsAlone(h, fmt.Sprint("plugin-", c.serial))
	}
}

// requested reports whether a policy still asks for what is done on its behalf, as the API server says.
func (c *run) requested(ref action.PolicyRef) bool {
	return ref.Name == "" || slices.ContainsFunc(c.Policies, func(p v1alpha1.GPUSharingPolicy) bool {
		return p.Name == ref.Name && p.Generation == ref.Generation
	})
}

// carryOut carries an action out, as the API server and what is behind it allow.
func (c *run) carryOut(a action.Action) {
	h := c.hosts[a.NodeName()]
	if a.NodeName() != "" && h == nil {
		return
	}
	c.tell("  %s", a)
	if c.isRefused(h, a) {
		return
	}
	c.takesOver(h, a)
	c.opens(h, a)
	switch a := a.(type) {
	case action.Evict:
		c.evicts(h, a)
		return
	case action.DeletePod:
		c.effects.did("delete %s of Node %s", a.Pod, h.Name)
		if h.stuck[a.UID] { // it does not end, or its deletion is refused
			c.count["ask to end a pod of "+h.Name]++
		} else {
			c.count["restart a pod of "+h.Name]++
		}
		c.pluginRestarts(h, a)
	case action.SetSpec:
		c.count["GPUNode "+h.Name]++
		h.returns(a.Spec)
		c.rebootsEmpty(h, a)
	case action.PatchNode, action.Taint, action.Untaint, action.KeepTaints:
		c.count["Node "+h.Name]++
		c.remembers(h, a)
	case action.KeepMPSOff, action.AllowMPS:
		c.count["NodeFeature of "+h.Name]++
	case action.WriteConfigs:
		c.count["our ConfigMap"]++
	case action.TriggerSync:
		c.count["pod "+a.Pod]++
	case action.TaintDevices, action.UntaintDevices:
		c.count["rule of "+h.Name]++
	case action.WriteClass:
		c.count["DeviceClass "+a.Class.Name]++
	case action.DeleteClass:
		c.count["DeviceClass "+a.Name]++
		c.forgets(a)
	case action.Report:
		c.count["status of GPUNode "+h.Name]++
	}
	var was string
	if h != nil {
		was = h.GPU.Spec.PolicyName
	}
	c.do(a)
	c.accepts()
	c.wrote(a)
	c.Repeats.Note(a, c.controllersNow())
	c.inBudget(h, a, was)
}

// evicts is the Eviction API. A pod that tolerates every taint comes back at once, by another name.
func (c *run) evicts(h *host, a action.Evict) {
	kind := c.kinds[a.Pod]
	if a.Namespace == tenant {
		c.count["evict a tenant of "+h.Name]++
		c.bystander(h, a)
		h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.UID == a.UID })
		return
	}
	if c.protected[a.Pod] {
		c.count["ask to evict a pod of "+h.Name]++
	} else {
		c.count[fmt.Sprintf("evict %s of %s", kind, h.Name)]++
	}
	if !slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.UID == a.UID }) {
		return
	}
	c.bystander(h, a)
	c.spared(h, a)
	if !c.protected[a.Pod] {
		c.effects.did("evict %s of Node %s", a.Pod, h.Name)
	}
	switch {
	case c.protected[a.Pod]:
		return
	case c.hangs[a.Pod]:
		for i := range h.Pods {
			if h.Pods[i].UID == a.UID && !h.Pods[i].Terminating {
				h.Pods[i].Terminating, h.Pods[i].EndsBy = true, c.Now.Add(30*time.Second)
			}
		}
		return
	}
	for _, p := range h.userPods() {
		if p.UID == a.UID {
			c.leaves(h, p)
		}
	}
	c.evicted = append(c.evicted, a.Pod)
	switch kind {
	case "cpu-tolerant":
		c.startBeside(h, kind)
	case "tolerant", "daemon", "static":
		c.Start(h, kind, rand.New(rand.NewPCG(uint64(len(c.evicted)), 4)))
	}
}

func (c *run) EndFaults() {
	c.fights = nil
	c.Plugin.Reason, c.Plugin.Message, c.Plugin.Ready, c.Plugin.NodeFeatures = "", "", true, c.opensCRDs
	for _, h := range c.all() {
		if h.broken != nil {
			h.plugin.running = false // who repairs it restarts it
		}
		h.hardware.Fail, h.broken, h.lags = nil, nil, false
		c.hangsNoMore(h)
		switch {
		case h.off && h.lost:
			continue
		case h.off:
			c.returns(h)
			h.AgentReady = !h.forsaken
		case !h.AgentReady && h.Labels[v1alpha1.LabelRunsAgent] == "false":
			h.Labels[v1alpha1.LabelRunsAgent], h.AgentReady = "true", true
		case h.forsaken:
			if h.AgentReady = false; c.seed%onDriver >= history.Late { // an upgrade of the driver waits for NVIDIA's programs
				c.repairs(h)
			}
			continue
		case h.down.IsZero() && h.Labels[v1alpha1.LabelRunsAgent] == "true" && h.upgrade.driver():
			h.AgentReady = true
		case !h.AgentReady && (h.upgrade.goesOn() || c.seed%onDriver >= history.Late && !h.selected()):
			h.upgrade.leaves = true // it comes once the DaemonSet selects the node again
		}
		c.repairs(h)
		c.driverFaultsEnd(h)
	}
	c.read(func() bool { return true })
}

// repairs ends what others have done to a node and would not leave so.
func (c *run) repairs(h *host) {
	was := c.before[h.Name]
	h.startsAgain() // a user deletes the driver's pod
	for _, label := range []string{pluginLabel, gfdLabel, v1alpha1.LabelRunsAgent, dcgmLabel, exporterLabel} {
		value, had := was.Labels[label]
		is := h.Labels[label]
		stopped := h.Annotations[v1alpha1.AnnotationStopped] != "" || h.upgrade.goesOn()
		if had && is != value && (!stopped || is == "" || is == "false") {
			h.Labels[label] = value
		}
	}
	if _, had := was.Labels[v1alpha1.LabelRunsAgent]; !had && h.Labels[v1alpha1.LabelRunsAgent] == "false" {
		delete(h.Labels, v1alpha1.LabelRunsAgent)
	}
	if h.Labels[v1alpha1.LabelConfig] == "theirs" { // there is no such config
		delete(h.Labels, v1alpha1.LabelConfig)
		if key, had := was.Labels[v1alpha1.LabelConfig]; had {
			h.Labels[v1alpha1.LabelConfig] = key
		}
	}
	if h.Labels[v1alpha1.LabelMIGConfigState] == "pending" && !h.acts {
		delete(h.Labels, v1alpha1.LabelMIGConfigState)
	}
	c.version[h.Name]++
	c.marked(h)
}

func (c *run) Repair(h *host) {
	others := !c.Plugin.ClusterPolicy && h.plugin.loaded != c.Configs[h.Labels[v1alpha1.LabelConfig]] // what they had written there
	if !h.off && (len(h.sick) > 0 || others) {
		h.sick, h.plugin.running = nil, false // a user has repaired it and restarted the plugin
	}
	h.podGroupsEnd()
	if h.driver.serves {
		c.driverSettles(h)
	}
	h.canReboot = h.canReboot || h.hardwareNoReset()
	h.report()
}

func (h *host) hardwareNoReset() (virtual bool) {
	h.hardware.Update(func(n *sim.Node) { virtual = slices.ContainsFunc(n.GPUs, func(g sim.GPU) bool { return g.NoReset }) })
	return virtual
}

// releasing is how the policies went.
type releasing struct {
	retains  bool              // some nodes are left as they are
	kept     map[string]string // their configs, as the status of their policies said
	leftAsIs map[string]bool   // by an earlier policy, also where the next one cannot be honoured and took nothing over
}

func (c *run) DeletePolicies() {
	retains := c.random.IntN(4) == 0
	kept := map[string]string{}
	if retains {
		for i := range c.Policies {
			c.Policies[i].Generation++
			retaining(&c.Policies[i])
		}
		for _, h := range c.all() {
			h.AgentReady = h.AgentReady && c.random.IntN(3) > 0
		}
		d := c.step(true)
		for _, h := range c.all() {
			by, _, err := c.Desired(h)
			if by == nil || err != nil || h.off || c.shared(h) {
				continue
			}
			for _, o := range d.Policies[by.Name].Conditions {
				if o.Type == v1alpha1.ConditionAccepted && o.Status == "True" && o.ObservedGeneration == by.Generation {
					kept[h.Name] = h.Labels[v1alpha1.LabelConfig]
				}
			}
		}
		for _, h := range c.all() {
			h.AgentReady = !h.off && !h.forsaken
		}
	}
	leftAsIs := map[string]bool{}
	for _, h := range c.all() {
		n := h.copied() // the GPUNode may have been made anew, and the Node says it
		spec := n.GPU.Spec
		is := func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == spec.PolicyName }
		leftAsIs[h.Name] = spec.Baseline != nil && node.Retained(spec) && !slices.ContainsFunc(c.Policies, is)
		retains = retains || leftAsIs[h.Name]
	}
	c.tell("releasePolicy Retain: %v", retains)
	c.Policies, c.releasing = nil, releasing{retains, kept, leftAsIs}
}

func (c *run) CheckRestored() {
	for _, h := range c.all() {
		if h.off || h.forsaken {
			continue
		}
		if key, retained := c.kept[h.Name]; retained {
			if is := h.Labels[v1alpha1.LabelConfig]; is != key {
				c.breaks("restore", "node %s was to keep config %q, as its policy's status said, and has %q", h.Name, key, is)
			}
			continue
		}
		if c.releasing.retains || c.leftAsIs[h.Name] {
			continue
		}
		if problem := c.unrestored(h); problem != "" && h.waits() == "" {
			c.breaks("restore", "node %s: %s; nothing says so", h.Name, problem)
		}
	}
	for _, h := range c.all() {
		if key := h.Labels[v1alpha1.LabelConfig]; key != "" && !h.off && !slices.Contains(c.theirs[h.Name], v1alpha1.LabelConfig+"="+key) {
			if _, written := c.Configs[key]; !written {
				c.breaks("restore", "node %s selects config %q, which no ConfigMap holds", h.Name, key)
			}
		}
	}
	for _, class := range c.DRA.Classes {
		if class.Own && !c.besideAnother(class) && !c.releasing.retains && !slices.ContainsFunc(c.all(), func(h *host) bool { return h.off || h.forsaken || h.waits() != "" }) {
			c.breaks("restore", "DeviceClass %s is left", class.Name)
		}
	}
	if c.rested.ConfigurePlugin && !c.releasing.retains && !slices.ContainsFunc(c.all(), func(h *host) bool { return h.off || h.forsaken || h.waits() != "" }) {
		c.breaks("restore", "the ClusterPolicy still names our ConfigMap")
	}
}
