// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// breaks notes that an invariant does not hold. The first one counts.
func (c *run) breaks(invariant, format string, args ...any) {
	if c.broken != "" {
		return
	}
	c.broken = invariant + ": " + fmt.Sprintf(format, args...)
	c.tell("BROKEN %s", c.broken)
}

// wellSaid looks whether each message that is reported is a sentence that a person reads to its end, and names few of many.
func (c *run) wellSaid(d rollout.Decision) {
	conditions := func(where string, all []metav1.Condition) {
		for _, said := range all {
			c.wellPut(where+" "+said.Type, said.Message)
		}
	}
	for name, s := range d.Policies {
		conditions("policy "+name, s.Conditions)
		for _, n := range s.Pending {
			c.wellPut("policy "+name+", node "+n.NodeName, n.Message)
		}
	}
	for _, a := range d.Actions {
		c.wellPut("an Event", format.Message(a.String()))
		if r, is := a.(action.Report); is {
			conditions("node "+r.Node, r.Status.Conditions)
		}
	}
}

// wellPut looks at one message. A list has eight names at most (format.List).
func (c *run) wellPut(where, message string) {
	const most = 9 // commas: of a list, and of the sentence
	switch {
	case format.Sentence(message) != message:
		c.breaks("sentences", "%s begins in lower case: %q", where, message)
	case utf8.RuneCountInString(message) > 200:
		c.breaks("sentences", "%s has more than 200 characters: %q", where, message)
	case strings.Count(message, ", ") > most:
		c.breaks("sentences", "%s lists too much: %q", where, message)
	case message == "":
		c.breaks("sentences", "%s says nothing", where)
	}
}

// pluginRestarts looks whether NVIDIA's device plugin is restarted though it has marked a GPU unhealthy, which it
// forgets then. Once after each boot it may be, and where its pod came with the instances: nobody can tell whether it
// started before the agent made them, or after.
func (c *run) pluginRestarts(h *host, a action.DeletePod) {
	plugin := slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.UID == a.UID && playedBy(pluginLabel)(p) })
	slices.Sort(h.plugin.uuids)
	if plugin && h.booted {
		h.booted = false
		return
	}
	if plugin && len(h.sick) > 0 && !h.plugin.early && slices.Equal(h.plugin.uuids, slices.Sorted(slices.Values(h.instances()))) {
		c.breaks("harmless", "the device plugin of %s is restarted again (%s), which offers an unhealthy GPU", h.Name, a.Why)
	}
}

// takesOver looks whether a change begins on a node whose GPUs another controller offers, of which a pod or a resource
// may be away for a moment.
func (c *run) takesOver(h *host, a action.Action) {
	spec, sets := a.(action.SetSpec)
	taints := action.KeepsOff(a)
	if h != nil && h.seenAlone {
		return // the device plugin has left, as was read just now: its pods block the change until they end, and no other comes
	}
	if a.For().Name != "" && (taints || sets && spec.Why != "" && len(spec.Spec.Devices) > len(h.GPU.Spec.Devices)) && c.Now.Sub(h.sharedAt) < 5*time.Minute {
		c.breaks("harmless", "node %s is taken over, whose GPUs another controller offers (recorded: %v): %s", h.Name, h.recorded, a)
	}
}

// opens looks whether a taint that a policy keeps on a node is taken off though the policy still asks for it, and
// nothing else has changed than that NVIDIA's stand-alone plugin restarts. The taint goes where a program of NVIDIA's
// does not tolerate it.
func (c *run) opens(h *host, a action.Action) {
	keep, keeps := a.(action.KeepTaints)
	isShared := func(t corev1.Taint) bool { return t.Key == shared.Key }
	if !keeps || keep.Policy.Name == "" || c.Plugin.ClusterPolicy || c.Plugin.Reason != "" || slices.ContainsFunc(keep.Want, isShared) || !slices.ContainsFunc(h.Taints, isShared) {
		return
	}
	refuses := func(p cluster.Pod) bool {
		return (p.Serves || p.MountsConfig) && !clusterpolicy.Tolerates(p.Tolerations, shared)
	}
	if slices.ContainsFunc(c.all(), func(o *host) bool { return slices.ContainsFunc(o.Pods, refuses) }) {
		return
	}
	for i := range c.Policies {
		if p := &c.Policies[i]; p.Name == keep.Policy.Name && len(p.Spec.Taints) > 0 && !p.Spec.Rollout.Paused {
			c.breaks("harmless", "node %s loses the taint of policy %s, which asks for it", h.Name, p.Name)
		}
	}
}

// remembers looks whether the record of the pods that must go before instances are seen names one that is gone, as the
// controller knows: it would grow with every restart.
func (c *run) remembers(h *host, a action.Action) {
	patch, _ := a.(action.PatchNode)
	record := patch.Annotations[v1alpha1.AnnotationInstances]
	if record == nil {
		return
	}
	_, uids, _ := strings.Cut(*record, "@")
	for uid := range strings.SplitSeq(uids, ",") {
		if uid != "" && !slices.ContainsFunc(c.cache.pods[h.Name].Pods, func(p cluster.Pod) bool { return p.UID == uid }) {
			c.breaks("bounded", "what is recorded of node %s names pod %s, which is gone: %s", h.Name, uid, *record)
		}
	}
}

// empties reports whether a node is to be drained of all pods before its reboot, by the policy on whose behalf
// something is done, or the last one that governed it.
func (c *run) empties(h *host, by string) bool {
	drain := v1alpha1.Drain{}
	if r := h.GPU.Spec.Release; r != nil && by == "" {
		drain = r.Drain
	}
	for i := range c.Policies {
		if c.Policies[i].Name == by {
			drain = c.Policies[i].Spec.Rollout.Drain
		}
	}
	return drain.BeforeReboot == v1alpha1.BeforeRebootAllPods
}

// rebootsEmpty looks whether a node that is to be drained of all pods before its reboot has one, as the controller sees
// it, when the reboot is permitted.
func (c *run) rebootsEmpty(h *host, a action.SetSpec) {
	if p := a.Spec.Reboot; p == nil || h.GPU.Spec.Reboot != nil && *h.GPU.Spec.Reboot == *p || !c.empties(h, a.For().Name) {
		return
	}
	for _, p := range c.cache.pods[h.Name].Pods {
		if p.Controller != "DaemonSet" && !p.Mirror {
			c.breaks("harmless", "node %s is rebooted under pod %s, and its policy drains it of all pods", h.Name, p.Name)
		}
	}
}

// bystander looks whether a pod that is evicted uses a GPU that the policy selects, or that the operator has changed.
// Others are evicted before a reboot alone.
func (c *run) bystander(h *host, a action.Evict) {
	known := c.cache.gpus[h.Name]
	holdsNothing := a.Namespace == tenant || strings.HasPrefix(c.kinds[a.Pod], "cpu") || c.kinds[a.Pod] == "monitor" // that has GPUs by a claim with adminAccess
	if holdsNothing && (!condition.IsTrue(known.Status.Conditions, v1alpha1.ConditionRebootRequired) || !c.empties(h, a.For().Name)) {
		c.breaks("harmless", "%s is evicted for policy %q, which holds no GPU", a.Pod, a.Policy.Name)
	}
	s, holds := c.heldGPUs[a.Pod]
	if !holds || a.Namespace == tenant {
		return
	}
	if c.kinds[a.Pod] == "claim" {
		c.breaks("harmless", "%s is evicted, which has its GPU by a claim", a.Pod)
	}
	if h.required || h.GPU.Spec.MIGActuator != "" || c.mayChange(h, s.uuid) {
		return
	}
	c.breaks("harmless", "%s is evicted for policy %q, which does not select its GPU (%s)", a.Pod, a.Policy.Name, s.uuid)
}

// mayChange reports whether a GPU is the operator's to change: a policy selects it, by where it is in the machine, or
// it is not as it came any more.
func (c *run) mayChange(h *host, uuid string) bool {
	for _, d := range h.devices() {
		ours := d.State.ComputeMode != gpu.ComputeDefault && h.theirs == nil || // set for MPS, and left
			d.State.MPS != nil && !d.State.MPS.External // of an agent that ended before it set the mode (993255)
		was := h.born[uuid].before
		taken := was != nil && !bornAs(d).equal(*was) && h.restored(uuid) // a policy left it so, and one took it over with its baseline
		if d.UUID == uuid && (ours || taken || !bornAs(d).equal(h.born[uuid])) {
			return true
		}
	}
	if h.GPU.Spec.PolicyName == "" && h.GPU.Spec.Baseline == nil && len(c.Policies) == 0 {
		return false
	}
	slotted := c.slotted(h)
	for i := range c.Policies {
		for _, d := range slotted {
			if d.UUID == uuid && plan.Matches(c.Policies[i].Spec.GPUSelector, d) {
				return true
			}
		}
	}
	for _, d := range h.GPU.Spec.Devices {
		if d.UUID == uuid && d.Sharing.MPS != nil {
			return true // its daemon goes
		}
	}
	return false
}

// restored reports whether a GPU that a policy had selected is as it came: a boot or a person changed it after its
// baseline was recorded, so that its return to that is the first that the agent does with it.
func (h *host) restored(uuid string) bool {
	recorded := h.GPU.Spec.Baseline != nil && slices.ContainsFunc(h.GPU.Spec.Baseline.Devices, func(d v1alpha1.DeviceSpec) bool { return d.UUID == uuid })
	return recorded && slices.ContainsFunc(h.devices(), func(d gpu.Device) bool { return d.UUID == uuid && bornAs(d).equal(h.born[uuid]) })
}

// slotted are the GPUs of a host with their places in the machine for indexes, which do not shift when one dies.
func (c *run) slotted(h *host) []gpu.Device {
	devices := h.devices()
	for i := range devices {
		devices[i].Index = h.slots[devices[i].UUID]
	}
	return devices
}

// inBudget looks whether a write disturbs more nodes of a policy than it allows. A policy takes a node over with its
// first write that taints the node, stops NVIDIA's operands, sets the spec or names the policy in the copy of the
// baseline. From then on the node counts in its budget, also while it goes back, and in no other. What protects a node
// after an upgrade of the driver, until the agent has made its instances again, waits for no slot (713036).
func (c *run) inBudget(h *host, a action.Action, was string) {
	disturbs, takes := false, false
	switch a := a.(type) {
	case action.Taint:
		disturbs = true
	case action.TaintDevices:
		disturbs = true
	case action.PatchNode:
		_, upgraded := timing.Stamped(h.Annotations[v1alpha1.AnnotationInterrupted], "maintenance")
		_, continues := a.Annotations[v1alpha1.AnnotationInterrupted] // what is stopped is only recorded anew (809517)
		disturbs = a.Annotations[v1alpha1.AnnotationStopped] != nil && !upgraded && !continues && !h.isTainted()
		takes = a.Annotations[v1alpha1.AnnotationBaseline] != nil
	case action.SetSpec:
		takes = a.Spec.PolicyName != "" && a.Spec.PolicyName != was
	}
	if by := a.For().Name; (disturbs || takes) && by != "" && by != h.lastPolicy {
		h.lastPolicy, disturbs = by, true
		h.countsAnew() // the indexes of a policy are those that the GPUs have when it is first applied on a node
	}
	if !disturbs {
		return
	}
	owner := h.lastPolicy
	disturbed := int32(0)
	for _, o := range c.hosts {
		if o.lastPolicy != owner || o.off || o.upgrade.goesOn() {
			continue
		}
		_, stopped := o.Annotations[v1alpha1.AnnotationStopped]
		if stopped || o.isTainted() {
			disturbed++
		}
	}
	if disturbed > c.slots[owner] {
		c.breaks("harmless", "%d nodes of policy %s are disturbed, and it allows %d: %s", disturbed, owner, c.slots[owner], a)
	}
}

// harmless looks whether pods still have what they use, and whether nobody but NVIDIA has harmed anything of NVIDIA's.
func (c *run) harmless() {
	for _, crash := range c.crashes {
		// In a pod that is being deleted the kubelet has told it to end anyway, does not start it again, and shows it
		// no key any more.
		if !c.meddled && crash.key != "theirs" && !crash.leaving {
			c.breaks("harmless", "NVIDIA's config-manager ended on node %s, which selects config %q", crash.node, crash.key)
		}
	}
	for _, h := range c.all() {
		for _, write := range h.hardware.Writes()[h.looked:] {
			h.looked++
			if h.manual[h.looked-1] {
				continue
			}
			uuid, _, _ := strings.Cut(strings.SplitN(write, " ", 2)[1], " ")
			if !h.wrote[uuid] && h.GPU.Spec.MIGActuator == "" && !c.mayChange(h, uuid) && !h.restored(uuid) {
				c.breaks("harmless", "GPU %s of %s is changed, which no policy selects: %s", uuid, h.Name, write)
			}
			if h.wrote == nil {
				h.wrote = map[string]bool{}
			}
			h.wrote[uuid] = true
		}
	}
	c.clientsOfMPS()
	c.crashes, c.beside = nil, nil
	defer func() {
		for _, h := range c.all() {
			if h.driver.serves {
				c.heldGPUsOf(h)
			}
		}
	}()
	for _, name := range slices.Sorted(maps.Keys(c.heldGPUs)) {
		s := c.heldGPUs[name]
		h := c.hosts[s.node]
		if h == nil || !slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.Name == name && p.Namespace == "user" }) || h.bootID() != s.boot {
			delete(c.heldGPUs, name)
			continue
		}
		for _, d := range h.devices() {
			if d.UUID != s.uuid {
				continue
			}
			lost := d.State.MIG != s.mig
			if s.instance != "" {
				lost = !slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return i.UUID == s.instance })
			}
			gone := h.driver.dynamic || !h.hasAllocated(name) // NVIDIA's driver destroys such instances when it starts, or calls the device otherwise now
			if lost && gone && !h.driver.prepared[name] {
				delete(c.heldGPUs, name)
			} else if lost {
				c.breaks("harmless", "what %s uses (GPU %s of %s) was taken from it", name, s.uuid, s.node)
			}
		}
	}
}

// clientsOfMPS looks whether the operator has ended NVIDIA's MPS daemon under a client: by stopping it, or by the label
// that it keeps that daemon off by. A pod that ignores the operator's taint may come at any moment, and nobody knows of a
// process that asks for no GPU before the agent reports it.
func (c *run) clientsOfMPS() {
	for _, name := range c.killed {
		h := c.hosts[c.heldGPUs[name].node]
		if h == nil || c.heldGPUs[name].unseen || slices.Contains([]string{"tolerant", "static", "daemon"}, c.kinds[name]) {
			continue
		}
		_, stopped := h.Annotations[v1alpha1.AnnotationStopped]
		if stopped && h.Labels[pluginLabel] == cluster.StoppedValue || !h.features.ours.IsZero() {
			c.breaks("harmless", "%s of %s ended with NVIDIA's MPS daemon, of which it was a client", name, h.Name)
		}
	}
	c.killed = nil
}

// desired is what a policy desires of a node as it really is; an error where it cannot be.
func (c *run) Desired(h *host) (by *v1alpha1.GPUSharingPolicy, want policy.Desired, err error) {
	n := policy.Node{Name: h.Name, Labels: h.Labels, Stack: c.Plugin.StackOf(h.Node)}
	if n.Stack == dra.DRADriver {
		n.Shares = h.driver.shares
	}
	n.Devices = plan.Reported(c.slotted(h))
	by = policy.Rank(c.Policies).Govern(n).By
	if by != nil {
		want, err = policy.DesiredState(by, n)
	}
	if err == nil && by != nil && n.Stack == dra.DRADriver && want.Config.Resources["nvidia.com/gpu"] > 0 && requestsOtherShares(by, h) {
		err = errShares
	}
	if err == nil && by != nil && n.Stack == dra.DRADriver && dra.Interval(by.Spec.Sharing) != "" {
		err = errShares // nobody sets intervals in these histories
	}
	return by, want, err
}

// requestsOtherShares reports whether a policy asks for another number of shares than the driver has. Policies of
// strategy MIG ask for none.
func requestsOtherShares(p *v1alpha1.GPUSharingPolicy, h *host) bool {
	switch s := p.Spec.Sharing; s.Strategy {
	case v1alpha1.StrategyTimeSlicing:
		return int64(s.TimeSlicing.Replicas) != h.driver.shares
	case v1alpha1.StrategyExclusive:
		return h.driver.shares != 1
	case v1alpha1.StrategyMIG, v1alpha1.StrategyMPS:
	}
	return false
}

// errShares is why a node of NVIDIA's DRA driver is not as its policy desires: the administrator has set another number
// of shares, or time slice.
var errShares = errors.New("the driver gives each GPU another number of shares")

// shared reports whether other controllers offer the GPUs of a node. NVIDIA's DRA driver alone is none.
func (c *run) shared(h *host) bool { return offered(&c.Snapshot, h.Node) }

func offered(s *cluster.Snapshot, n *cluster.Node) bool {
	drives := func(p cluster.Pod) bool { return p.DRA && p.Namespace != tenant }
	return n.OtherPartitioner != "" || s.Plugin.StackOf(n) != dra.DRADriver && (n.DRA != "" || slices.ContainsFunc(n.Pods, drives))
}

func (c *run) OfferedByOthers(h *host, _ string) bool { return c.shared(h) }

// state is how far a node was when everything rested.
func (c *run) state(h *host) (s rollout.NodeState) {
	if at := slices.IndexFunc(c.rested.Nodes, func(n rollout.NodeState) bool { return n.Node == h.Name }); at >= 0 {
		s = c.rested.Nodes[at]
	}
	return s
}

func (c *run) Excused(h *host, _ *v1alpha1.GPUSharingPolicy) bool {
	s := c.state(h)
	return h.forsaken || s.Reason == v1alpha1.ReasonNoNodeFeatures || h.missesGPU(s) || c.keptFromReboot(h, s) || c.keptByTenant(h, s)
}

func (c *run) Unready(h *host, _ *v1alpha1.GPUSharingPolicy) string {
	if s := c.state(h); s.State != node.UpToDate {
		return fmt.Sprintf("it is %s (%s): %s", s.State, s.Reason, s.Message)
	}
	return ""
}

// Unknown: no agent has ever reported the GPUs by which a policy selects the node.
func (c *run) Unknown(h *host, p *v1alpha1.GPUSharingPolicy) bool {
	s := c.state(h)
	return s.Policy != p.Name && h.missesGPU(s) || p.Spec.GPUSelector != nil && len(h.GPU.Status.Devices) == 0
}

func (c *run) AgentRuns(h *host) bool { return h.AgentReady && !h.off }

func (c *run) InMaintenance(h *host) bool { return h.upgrade.goesOn() || stoppedByOthers(h) }

func (c *run) NamesUser(h *host, message string) bool {
	named := func(o cluster.Pod) bool { return strings.Contains(message, o.Namespace+"/"+o.Name) }
	claimed := func(claim dra.Claim) bool {
		return h.blockedBy(claim) && strings.Contains(message, "ResourceClaim "+claim.Name+" (")
	}
	return slices.ContainsFunc(h.Pods, named) || slices.ContainsFunc(h.Claims, claimed)
}

// missesGPU reports whether a node waits for a GPU that its policy selects by index, that was in the machine and is not
// any more. Until it is replaced the policy keeps the node, also where another policy selects the GPUs that are left.
func (h *host) missesGPU(s rollout.NodeState) bool {
	if s.Reason != v1alpha1.ReasonGPUMissing {
		return false
	}
	for uuid := range h.born {
		is := func(d gpu.Device) bool { return d.UUID == uuid }
		if strings.Contains(s.Message, uuid) && !slices.ContainsFunc(h.devices(), is) {
			return true
		}
	}
	return false
}

// keptFromReboot reports whether a node is not rebooted because that destroys MIG instances on a GPU that its policy
// does not select, which a person has made there.
func (c *run) keptFromReboot(h *host, s rollout.NodeState) bool {
	const destroys = "because that destroys the MIG instances of GPU "
	if s.Reason != v1alpha1.ReasonRebootRequired || !h.hardwareNoReset() || !strings.Contains(s.Message, destroys) {
		return false
	}
	return slices.ContainsFunc(h.devices(), func(d gpu.Device) bool {
		return len(d.State.Instances) > 0 && strings.Contains(s.Message, fmt.Sprint(destroys, d.Index)) && !h.changedByUs(d.UUID)
	})
}

// keptByTenant reports whether a pod of a tenant keeps the node from a reboot, as any user's pod does that is not
// evicted. That it does so by its looks is what impartial finds.
func (c *run) keptByTenant(h *host, s rollout.NodeState) bool {
	by, _, _ := c.Desired(h)
	return by.Spec.Rollout.Drain.Mode != v1alpha1.DrainModeEvict &&
		strings.Contains(s.Message, "pod "+tenant+"/") && strings.Contains(s.Message, "the node, which must be rebooted")
}

// Differs says how a node differs from what is desired; empty: it does not.
func (c *run) Differs(h *host, want policy.Desired) string {
	has := advertised(h)
	if c.Plugin.StackOf(h.Node) == dra.DRADriver {
		if stale := h.Published.Differs(h.GPU.Status.Devices, 0); len(stale) > 0 {
			return fmt.Sprintf("its slices are stale: %v", stale)
		}
		has = h.Published.Published()
	}
	if !maps.Equal(has, want.Config.Resources) {
		return fmt.Sprintf("it advertises %v and not %v", has, want.Config.Resources)
	}
	desired := map[string]v1alpha1.DeviceSharing{}
	for _, w := range want.Devices {
		desired[w.UUID] = w.Sharing
	}
	for _, d := range h.devices() {
		want, selected := desired[d.UUID]
		if selected && !plan.Met(want, plan.Observed(d)) {
			return fmt.Sprintf("GPU %d is %+v and not %+v", d.Index, plan.Observed(d), want)
		}
		if !selected && h.changedByUs(d.UUID) && !bornAs(d).equal(h.born[d.UUID]) {
			return fmt.Sprintf("GPU %d, which is not selected, is %+v and came as %+v", d.Index, bornAs(d), h.born[d.UUID])
		}
	}
	return ""
}

// ended: nothing that has begun on a machine that runs is left as it is, and no deadline is forgotten.
func (c *run) ended(d rollout.Decision) {
	for _, h := range c.all() {
		_, stopped := h.Annotations[v1alpha1.AnnotationStopped]
		if !h.off && (stopped || len(withoutOurs(h.Taints)) < len(h.Taints) || !h.DevicesTaintedAt.IsZero() || h.driver.edited) {
			c.breaks("progress", "node %s is left tainted or with NVIDIA's operands stopped (%s)", h.Name, c.states[h.Name])
		}
	}
	passing := []node.State{
		node.Draining, node.StoppingOperands, node.Idle, node.Applying, node.Selecting, node.Finishing,
	}
	for _, n := range d.Nodes {
		if h := c.hosts[n.Node]; h != nil && !h.off && h.AgentReady && slices.Contains(passing, n.State) && n.Reason != v1alpha1.ReasonPaused {
			c.breaks("progress", "node %s is %s (%s) at rest: %s", n.Node, n.State, n.Reason, n.Message)
		}
	}
}

// deferredBy reports whether a ResourceClaim blocks a change by itself: it has a device of the node, and no pod of the
// node could be named in its place.
func (h *host) blockedBy(claim dra.Claim) bool {
	return len(claim.Of(h.Name)) > 0 && !slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.Has(claim) })
}

func stoppedByOthers(h *host) bool {
	for name, value := range h.Labels {
		if isDeploy(name) && strings.HasPrefix(value, "paused") {
			return true
		}
	}
	return false
}

// unrestored says how a node differs from what it was before the operator; empty: it does not.
func (c *run) unrestored(h *host) string {
	theirs := func(name, value string) bool { return slices.Contains(c.theirs[h.Name], name+"="+value) }
	if left := history.Left(c.before[h.Name], *h.Node, theirs); left != "" {
		return left
	}
	for _, d := range h.devices() {
		if is, born := bornAs(d), h.born[d.UUID]; !is.equal(born) {
			return fmt.Sprintf("GPU %d (%s) is %+v and came as %+v", d.Index, d.UUID, is, born)
		}
		if d.State.ComputeMode != gpu.ComputeDefault && h.theirs == nil {
			return fmt.Sprintf("GPU %d is in compute mode %s", d.Index, d.State.ComputeMode)
		}
		if slice := h.timeSlice(d.UUID); slice != gpu.TimeSliceDefault && slice != gpu.TimeSliceNone && !h.born[d.UUID].sliced {
			return fmt.Sprintf("GPU %d has time slice %s", d.Index, slice)
		}
	}
	switch {
	case !h.DevicesTaintedAt.IsZero():
		return "a DeviceTaintRule is left"
	case len(h.daemons) > 0:
		return "MPS daemons of the operator run"
	case !h.features.ours.IsZero():
		return "our NodeFeature is left"
	}
	return ""
}
