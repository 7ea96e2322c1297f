// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// driverHappenings are the events of histories of NVIDIA's DRA driver alone.
func driverHappenings() history.Happenings[*run] {
	return history.Happenings[*run]{
		"driver-slow": (*run).slowEvent, "driver-broken": (*run).brokenEvent, "driver-shares": (*run).sharesEvent,
		"driver-taints": (*run).taintsEvent, "driver-clears": (*run).clearsEvent, "driver-dynamic": (*run).dynamicEvent,
		"class-edit": (*run).classEditEvent, "class-delete": (*run).classDeleteEvent, "class-theirs": (*run).classTheirsEvent,
		"class-theirs-goes": (*run).classTheirsGoesEvent, "class-fight": (*run).classFightEvent,
		"rule-edit": (*run).taintRuleEditEvent, "rule-fight": (*run).taintRuleFightEvent,
		"reshare": (*run).reshareEvent, "rests": (*run).restsEvent, "rests-more": (*run).restsEvent,
		"gpu-away": (*run).gpuAwayEvent, "claims": (*run).claimsEvent, "claims-more": (*run).claimsEvent,
		"claim-monitor": (*run).monitorEvent, "claim-shared": (*run).sharedEvent, "switch": (*run).switchEvent,
	}
}

// onDRA is one of the machines that NVIDIA's DRA driver serves and that run; nil if there is none.
func (c *run) onDRA(random *rand.Rand) *host {
	hosts := slices.DeleteFunc(c.all(), func(h *host) bool { return !h.driver.serves || h.off || !h.down.IsZero() || h.upgrade.goesOn() })
	if len(hosts) == 0 {
		return nil
	}
	return hosts[random.IntN(len(hosts))]
}

// slowEvent restarts the driver, which takes as long as to pull an image. Meanwhile nothing is prepared.
func (c *run) slowEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil {
		return
	}
	h.driver.pulls = time.Duration(5+random.IntN(400)) * time.Second
	h.restartDriver()
	c.tell("the driver of %s restarts, and takes %s to start", h.Name, h.driver.pulls)
	if random.IntN(2) == 0 {
		c.reconciles(random.IntN(3))
		c.startByClaim(h, "replica", random)
	}
	c.resharesUnder(random)
	if random.IntN(2) == 0 {
		c.rest(h.driver.pulls, 60)
	}
	if random.IntN(2) == 0 {
		h.driver.pulls = 0
	}
}

// brokenEvent lets the driver start and publish nothing new, or repairs it.
func (c *run) brokenEvent(random *rand.Rand) {
	if h := c.onDRA(random); h != nil {
		h.driver.broken = !h.driver.broken
		h.restartDriver()
		c.tell("the driver of %s is broken: %v", h.Name, h.driver.broken)
	}
}

// sharesEvent sets the number of shares for all nodes, as an upgrade of the driver's chart does.
func (c *run) sharesEvent(random *rand.Rand) {
	shares := []int64{1, 2, 4}[random.IntN(3)]
	for _, h := range c.all() {
		if h.driver.serves {
			h.driver.shares = shares
			h.restartDriver()
		}
	}
	c.tell("the driver gives each GPU %d shares", shares)
}

// taintsEvent lets the driver, or an administrator by a DeviceTaintRule, taint a device.
func (c *run) taintsEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil || h.Published == nil || len(h.Published.Devices) == 0 {
		return
	}
	device := h.Published.Devices[random.IntN(len(h.Published.Devices))].Name
	if random.IntN(3) == 0 {
		h.driver.barred = map[string]bool{device: true}
		c.tell("an administrator's DeviceTaintRule taints %s of %s", device, h.Name)
		return
	}
	if h.driverRuns() && !h.driver.broken {
		h.driver.tainted = withKey(h.driver.tainted, device, "gpu.nvidia.com/xid=79")
		h.republish()
		c.tell("the driver of %s taints %s", h.Name, device)
	}
}

// republish writes the slices anew with the devices that they have, and the taints that the driver has set.
func (h *host) republish() {
	devices := slices.Clone(h.Published.Devices)
	for i := range devices {
		devices[i].Tainted = h.driver.tainted[devices[i].Name]
	}
	pool := dra.PoolOf([]dra.Slice{{Generation: 1, Count: 1, Devices: devices}})
	h.Published = &pool
}

// clearsEvent takes the taints of devices away.
func (c *run) clearsEvent(random *rand.Rand) {
	if h := c.onDRA(random); h != nil && h.Published != nil {
		h.driver.tainted, h.driver.barred = nil, nil
		h.republish()
		c.tell("no device of %s is tainted any more", h.Name)
	}
}

// dynamicEvent switches the gate DynamicMIG of the driver on, or off again.
func (c *run) dynamicEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil || slices.ContainsFunc(slices.Collect(maps.Values(h.born)), func(b born) bool { return b.mig || b.before != nil }) {
		return // the driver would take what a person has made
	}
	c.setDynamic(h, !h.driver.dynamic)
}

func (c *run) setDynamic(h *host, on bool) {
	h.keepsDynamic()
	h.driver.dynamic, h.DynamicMIG = on, on
	h.restartDriver()
	c.tell("the driver of %s makes instances on demand: %v", h.Name, on)
}

// keepsDynamic notes what a driver that makes instances on demand leaves on a node that was released to it: what pods
// used then, and how long they keep a GPU.
func (h *host) keepsDynamic() {
	if h.driver.dynamic && h.GPU.Spec.Baseline == nil {
		h.isLeft()
	}
}

// isLeft notes that the GPUs of a host are another's as they are, and may be what they were.
func (h *host) isLeft() {
	for _, d := range h.devices() {
		is, was := bornAs(d), h.born[d.UUID]
		if was.sliced && is.equal(was) {
			continue
		}
		is.sliced, is.before = h.GPU.Spec.Baseline != nil, &was
		if h.born[d.UUID] = is; d.PendingMIG != is.mig { // as it is after a reboot
			h.born[d.UUID] = born{mig: d.PendingMIG, sliced: is.sliced, before: &is}
		}
	}
}

// ourClass is one of the operator's classes; nil if there is none.
func (c *run) ourClass(random *rand.Rand) *dra.Class {
	ours := slices.DeleteFunc(slices.Clone(c.DRA.Classes), func(class dra.Class) bool { return !class.Own })
	if len(ours) == 0 {
		return nil
	}
	return &ours[random.IntN(len(ours))]
}

// classEditEvent lets another controller edit one of the operator's classes.
func (c *run) classEditEvent(random *rand.Rand) {
	if class := c.ourClass(random); class != nil {
		c.setClass(editedClass(*class, random))
		c.tell("DeviceClass %s is edited: %+v", class.Name, c.class(class.Name))
	}
}

func editedClass(class dra.Class, random *rand.Rand) dra.Class {
	switch random.IntN(4) {
	case 0:
		class.Selector = "true"
	case 1:
		class.Resource = ""
	case 2:
		class.Configured = true
	default:
		class.Resource = "example.com/other"
	}
	return class
}

func (c *run) classDeleteEvent(random *rand.Rand) {
	if class := c.ourClass(random); class != nil {
		c.dropClass(class.Name)
		c.tell("DeviceClass %s is deleted", class.Name)
	}
}

// classTheirsEvent lets an administrator add a class with the resource of one of the operator's, or of one that is to
// come.
func (c *run) classTheirsEvent(random *rand.Rand) {
	resource := "nvidia.com/mig-" + []string{"1g.5gb", "2g.10gb", "3g.20gb", "1g.10gb"}[random.IntN(4)]
	if class := c.ourClass(random); class != nil && class.Resource != "" && random.IntN(4) > 0 {
		resource = class.Resource
	}
	c.serial++
	name := []string{"theirs", "a-theirs"}[random.IntN(2)]
	c.setClass(dra.Class{Name: fmt.Sprint(name, c.serial), Resource: resource, Age: c.Now.Unix()})
	c.tell("an administrator adds DeviceClass %s%d for %s", name, c.serial, resource)
}

func (c *run) classTheirsGoesEvent(*rand.Rand) {
	for _, class := range c.DRA.Classes {
		if strings.Contains(class.Name, "theirs") {
			c.unread[class.Resource] = !slices.Contains(c.readClasses, class)
			c.dropClass(class.Name)
			c.tell("an administrator removes DeviceClass %s", class.Name)
			return
		}
	}
}

// classFightEvent lets another controller edit the operator's classes whenever these are whole.
func (c *run) classFightEvent(random *rand.Rand) {
	dice := random.Uint64()
	c.fightsFor("an edit of the operator's DeviceClasses", func() (changed bool) {
		for _, class := range c.DRA.Classes {
			if class.Own && class.Selector != "true" && !class.Configured && class.Resource != "" && class.Resource != "example.com/other" {
				c.setClass(editedClass(class, rand.New(rand.NewPCG(dice, 5))))
				changed = true
			}
		}
		return changed
	})
}

// fightsFor lets another controller do something again and again for two hours.
func (c *run) fightsFor(what string, again func() bool) {
	c.tell("another controller does again and again: %s", what)
	clear(c.count)
	c.fights = append(c.fights, again)
	c.rest(2*time.Hour, 240)
	c.fights = nil
	const bursts, repeats = 3, 8 + 16 // three hours begin. In each a rule is made eight times, and restored at most twice as often (action.Repeats)
	history.Bounded(c, "while another controller did again and again "+what, bursts*repeats)
	c.tell("and stops")
}

// taintRuleEditEvent lets another controller narrow the operator's DeviceTaintRule of a node, delete it, or take its
// label.
func (c *run) taintRuleEditEvent(random *rand.Rand) {
	for _, h := range c.all() {
		if h.DevicesTaintedAt.IsZero() {
			continue
		}
		c.losesTaintRules(h, random.IntN(3))
		return
	}
}

func (c *run) losesTaintRules(h *host, how int) {
	h.DevicesTaintedAt = time.Time{}
	h.driver.edited, h.TaintRuleTaken = how == 1, how == 2
	c.version[h.Name]++
	c.tell("the DeviceTaintRule of %s is %s", h.Name, []string{"deleted", "narrowed", "no longer labelled as the operator's"}[how])
}

// taintRuleFightEvent lets another controller delete or narrow the operator's rules whenever there is one.
func (c *run) taintRuleFightEvent(random *rand.Rand) {
	how := random.IntN(2)
	c.fightsFor("removing the operator's DeviceTaintRules", func() (changed bool) {
		for _, h := range c.all() {
			if !h.DevicesTaintedAt.IsZero() {
				c.losesTaintRules(h, how)
				changed = true
			}
		}
		return changed
	})
}

// gpuAwayEvent takes a GPU off the bus, and puts it back a while later: its driver starts it anew then.
func (c *run) gpuAwayEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil || len(h.devices()) < 2 {
		return
	}
	at := len(h.devices()) - 1 // the others keep their minor numbers
	d := h.devices()[at]
	for _, p := range h.userPods() {
		if c.heldGPUs[p.Name].uuid == d.UUID && c.heldGPUs[p.Name].node == h.Name {
			c.leaves(h, p)
		}
	}
	isOther := func(uuid string) bool { return uuid != d.UUID } // which stays, and the operator may change it meanwhile (2^40+1028269)
	back, gone := slices.DeleteFunc(h.back(), isOther), sim.GPU{}
	h.hardware.Update(func(n *sim.Node) {
		n.GPUs[at].Start()
		gone = n.GPUs[at]
		n.GPUs = slices.Delete(slices.Clone(n.GPUs), at, at+1)
	})
	h.report()
	c.tell("GPU %d of %s falls off the bus", at, h.Name)
	c.reconciles(3 + random.IntN(20))
	if boot := h.bootID(); boot != "" && len(h.devices()) == at {
		h.hardware.Update(func(n *sim.Node) { n.GPUs = append(n.GPUs, gone) })
		h.report()
		if h.isManagersAgain() { // as where the node is forgotten (2^40+1014490)
			back = append(back, d.UUID)
		}
		h.reborn(back...)
		c.tell("GPU %d of %s is back", at, h.Name)
	}
}

// claimsEvent lets pods come to a node of the driver that are allocated a device: some wait for a device of another
// driver, some are never Ready, some belong to a PodGroup.
func (c *run) claimsEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil || h.Published == nil || len(h.Published.Published()) == 0 {
		return
	}
	for range 1 + random.IntN(3) {
		had := len(h.Pods)
		waits := random.IntN(4) == 0
		if waits { // before it is allocated anything
			h.driver.waits = withKey(h.driver.waits, fmt.Sprintf("claim-%d", c.serial+1), true)
		}
		c.startByClaim(h, "replica", random)
		if len(h.Pods) == had {
			continue
		}
		p := &h.Pods[len(h.Pods)-1]
		claim := slices.IndexFunc(h.Claims, func(claim dra.Claim) bool { return p.Has(claim) })
		switch random.IntN(6) {
		case 0:
			h.driver.unready, p.Starting = withKey(h.driver.unready, p.Name, true), true
			c.tell("pod %s is never Ready", p.Name)
		case 1:
			p.PodGroup, p.Controller = "gang", "Job"
			h.Claims[claim].Shared, h.Claims[claim].Pods = true, nil
			h.Claims[claim].Others = []dra.Consumer{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang"}}
			c.tell("pod %s has its claim by PodGroup gang", p.Name)
		case 2:
			p.Controller = ""
			c.tell("pod %s is bare", p.Name)
		}
		if waits {
			c.tell("pod %s waits for the node's network device", p.Name)
		}
	}
	c.resharesUnder(random)
}

// resharesUnder lets the policies be edited under pods that have just been allocated a device, at times.
func (c *run) resharesUnder(random *rand.Rand) {
	switch random.IntN(4) {
	case 0:
		history.Edit(c, random)
	case 1:
		c.reshareEvent(random)
	}
}

// reshareEvent gives the policies another sharing that the driver can honour.
func (c *run) reshareEvent(random *rand.Rand) {
	c.reshare(random)
	for i := range c.Policies {
		c.Policies[i].Generation++
		c.tell("policy %s is edited: sharing, now %s", c.Policies[i].Name, history.Says(&c.Policies[i]))
	}
}

// reshare has most policies partition GPUs: MPS is refused on nodes of the driver, and so is a number of shares that it
// does not have.
func (c *run) reshare(random *rand.Rand) {
	for i := range c.Policies {
		p := &c.Policies[i]
		for range 6 {
			p.Spec.Sharing = history.Policy(p.Name, "", random).Spec.Sharing
			if m := p.Spec.Sharing.MIG; m != nil && m.Actuator == "" && m.ResourceNames != v1alpha1.MIGResourceNamesUniform {
				break
			}
		}
	}
}

// restsEvent lets a change come to its end, or most of it.
func (c *run) restsEvent(random *rand.Rand) {
	c.rest(time.Duration(20+random.IntN(200))*time.Second, 100)
}

// sharedEvent lets another pod, a bare one or a controller's, come by a claim that pods can share, in spite of taints.
func (c *run) sharedEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil {
		return
	}
	h.Claims = slices.Clone(h.Claims)
	for i := range h.Claims {
		claim := &h.Claims[i]
		if !claim.Shared || len(claim.Devices) == 0 || len(claim.Others) > 0 {
			continue
		}
		c.serial++
		name := fmt.Sprintf("beside-%d", c.serial)
		claim.Pods = append(slices.Clone(claim.Pods), "uid-"+name)
		controller := []string{"", "ReplicaSet"}[random.IntN(2)]
		h.Pods = append(h.Pods, cluster.Pod{
			Namespace: "user", Name: name, UID: "uid-" + name, Controller: controller, Claim: claim.Name, Scheduled: c.Now, Starting: true,
		})
		c.kinds[name] = "allocated"
		c.prepare(h)
		c.heldGPUsOf(h)
		c.tell("pod %s of %q comes by %s, too", name, controller, claim)
		return
	}
}

// monitorEvent lets a pod of a DaemonSet come that has all GPUs by a claim with adminAccess. The driver refuses that
// for instances.
func (c *run) monitorEvent(random *rand.Rand) {
	if h := c.onDRA(random); h != nil {
		c.comesToMonitor(h, "DaemonSet", random.IntN(2) == 0)
	}
}

// comesToMonitor lets such a pod of a controller come to a host, empty for none, by a claim that pods may share or not.
func (c *run) comesToMonitor(h *host, controller string, shareable bool) {
	if h.Published == nil || !h.driverRuns() {
		return
	}
	c.serial++
	name := fmt.Sprintf("monitor-%d", c.serial)
	if c.monitor(h, name, controller, shareable) {
		c.kinds[name] = "monitor"
		c.tell("monitor %s of %q comes to %s", name, controller, h.Name)
	}
}

// switchEvent moves a node from NVIDIA's device plugin to its DRA driver, or back, as docs/dra.md leads.
func (c *run) switchEvent(random *rand.Rand) { c.switches(c.some(random), random) }

// switches moves a node to the other stack, if it can be moved now.
func (c *run) switches(h *host, random *rand.Rand) {
	if h.off || !h.down.IsZero() || h.upgrade.goesOn() || !c.Plugin.ClusterPolicy || h.OtherPartitioner != "" ||
		!h.driver.serves && (h.DRA != "" || slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA })) {
		return
	}
	for _, p := range h.userPods() {
		c.leaves(h, p)
	}
	before := c.before[h.Name]
	before.Labels = maps.Clone(before.Labels)
	c.before[h.Name] = before
	c.tell("%s is drained, and moves to the other stack; it was on the driver: %v", h.Name, h.driver.serves)
	if h.driver.serves {
		h.keepsDynamic()
		h.driver.serves, h.DRA, h.driver.dynamic, h.DynamicMIG = false, "", false, false
		h.driver.gone, h.driver.uid = c.Now, ""
		h.restartDriver()
		if c.seed%onDriver >= history.Late && random.IntN(2) == 0 { // who moves it waits for nothing
			h.Labels[pluginLabel], before.Labels[pluginLabel] = "true", "true"
		}
		for range 60 {
			if c.reconciles(1); h.Published == nil {
				break
			}
		}
		if h.driver.serves || h.off {
			return
		}
		h.Labels[pluginLabel], before.Labels[pluginLabel] = "true", "true"
		c.version[h.Name]++
		return
	}
	h.Labels[pluginLabel], before.Labels[pluginLabel] = "false", "false"
	c.version[h.Name]++
	c.reconciles(2 + random.IntN(5))
	c.offersClaims()
	h.driver, h.DRA = driver{serves: true, shares: 1, boot: h.driver.boot}, "DaemonSet nvidia-dra/kubelet-plugin"
}

// driverFaultsEnd ends what others have done to nodes of the driver.
func (c *run) driverFaultsEnd(h *host) {
	if h.driver.broken || len(h.driver.tainted) > 0 {
		h.restartDriver() // who repairs it restarts it
	}
	h.driver.broken, h.driver.pulls, h.driver.tainted, h.driver.barred, h.TaintRuleTaken = false, 0, nil, nil, false
	for _, p := range h.userPods() {
		delete(h.driver.waits, p.Name)
	}
}

// podGroupsEnd ends those that have devices of a host, also where the driver is gone.
func (h *host) podGroupsEnd() {
	h.Claims = slices.DeleteFunc(slices.Clone(h.Claims), func(claim dra.Claim) bool { return len(claim.Others) > 0 })
}

// driverSettles ends the gate DynamicMIG, and has the driver look again.
func (c *run) driverSettles(h *host) {
	if h.driver.dynamic {
		c.setDynamic(h, false)
	}
	h.restartDriver() // an upgrade of the chart
}

// spared looks whether a pod is evicted that must not be: under another mode than Evict, or one whose place another takes
// by the same claim.
func (c *run) spared(h *host, a action.Evict) {
	if !h.driver.serves || c.seed < onDriver {
		return
	}
	mode := v1alpha1.DrainModeEvict
	for i := range c.Policies {
		if p := &c.Policies[i]; p.Name == a.For().Name {
			mode = p.Spec.Rollout.Drain.Mode
		}
	}
	if a.For().Name != "" && mode != v1alpha1.DrainModeEvict {
		c.breaks("harmless", "%s is evicted, and the drain mode of policy %s is %q", a.Pod, a.For().Name, mode)
	}
	for _, p := range h.Pods {
		for _, claim := range h.Claims {
			if p.UID == a.UID && p.Controller != "" && claim.Shared && p.Has(claim) {
				c.breaks("harmless", "%s is evicted for nothing: another comes by %s", a.Pod, claim)
			}
		}
	}
}

// served: while a class of the operator's serves its resource, the scheduler knows the name. That of two
// administrators' classes is theirs. It forgets that of a class that goes; where no reconcile has read the class, nobody can
// tell that the operator's is to be written again (2^40+800721).
func (c *run) served() {
	for _, class := range c.DRA.Classes {
		_, known := c.scheduler[class.Resource]
		c.unread[class.Resource] = c.unread[class.Resource] && !known
		if class.Own && ofItsName(class) && !known && !c.unread[class.Resource] {
			c.breaks("progress", "the scheduler does not know %s, which DeviceClass %s serves", class.Resource, class.Name)
		}
	}
}

// ofItsName reports whether a class of the operator's serves the resource of its profile, as it was written.
func ofItsName(class dra.Class) bool {
	return class.Resource == plan.ResourceOf(strings.TrimPrefix(class.Name, dra.ClassName("")))
}

// besideAnother reports whether another class serves the resource of one, so that the scheduler would forget it with
// that one.
func (c *run) besideAnother(class dra.Class) bool {
	return class.Resource != "" && slices.ContainsFunc(c.DRA.Classes, func(o dra.Class) bool { return o.Name != class.Name && o.Resource == class.Resource })
}

// forgets looks whether the operator deletes a class beside another of the same resource, which the scheduler forgets
// then.
func (c *run) forgets(a action.DeleteClass) {
	if ours := c.class(a.Name); ours != nil && c.besideAnother(*ours) {
		c.breaks("harmless", "DeviceClass %s is deleted beside another of its resource, so the scheduler forgets %s", a.Name, ours.Resource)
	}
}

// truthfulOfDriver says why what is said of a node of the driver at rest is not so; empty: it is.
func (c *run) truthfulOfDriver(h *host, reason string) string {
	if !h.driver.serves || c.seed < onDriver {
		return ""
	}
	switch reason {
	case v1alpha1.ReasonDeviceGone:
		if len(h.hanging()) == 0 {
			return "no pod hangs"
		}
	case v1alpha1.ReasonDynamicMIGActive:
		if !h.driver.dynamic {
			return "the gate is off"
		}
	case v1alpha1.ReasonDRAUnavailable:
		if !slices.ContainsFunc(c.DRA.Classes, func(class dra.Class) bool { return class.Own && !ofItsName(class) }) {
			return "Kubernetes has all that is needed, and no class is edited"
		}
	case v1alpha1.ReasonDRADriverFailing:
		if h.driverRuns() {
			return "the driver runs"
		}
	case v1alpha1.ReasonDRADriverUnknown:
		return "the driver is known"
	}
	return ""
}

// restedOnDriver: at rest the agent of a driver that makes instances on demand is asked for nothing, a node that says
// it is as desired publishes so.
func (c *run) restedOnDriver(nodes []rollout.NodeState) {
	for _, n := range nodes {
		h := c.hosts[n.Node]
		if h == nil || h.off || c.seed < onDriver || !h.driver.serves || !h.AgentReady {
			continue
		}
		if h.driver.dynamic && len(h.GPU.Spec.Devices) > 0 {
			c.breaks("progress", "the agent of %s is asked for %v, and the driver makes the instances itself (%s)", h.Name, h.GPU.Spec.Devices, n.Reason)
		}
		if problem := c.truthfulOfDriver(h, n.Reason); problem != "" {
			c.breaks("truth", "node %s, %s (%s), at rest: %s: %s", n.Node, n.State, n.Reason, problem, n.Message)
		}
	}
	c.served()
}
