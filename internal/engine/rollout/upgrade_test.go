// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

const driverStopped = "paused-for-driver-upgrade"

// upgrade is a driver upgrade on a host, as NVIDIA's upgrade controller and k8s-driver-manager make it: the deploy
// labels are stopped, also over the value of another, everything that has the driver open must be gone, the module is
// unloaded, the labels are restored before the new driver is there, and the node takes pods again once the device
// plugin advertises.
type upgrade struct {
	state    string
	restart  bool          // only the pod restarts: workloads and the module stay
	builds   time.Duration // how long the new driver takes
	began    time.Time     // the state
	unloaded bool
	back     []string // UUIDs of GPUs that were given back before
	stuck    string   // what had the driver open when it was to be unloaded
	leaves   bool     // the agent has left, and returns
	returned time.Time
	// alone: nothing has the driver open when the old driver container ends, so that this unloads the module. Then
	// k8s-driver-manager stops nothing, and the agent stays, which looks at the GPUs once in a minute or for another
	// spec.
	alone bool
	// byHand: the GPU Operator's upgrade controller is off, so that a user deletes the driver's pod and no label tells
	// a state.
	byHand bool
	last   int64 // generation of the spec for which the agent looked last before that
}

// agentLooks is how often an agent looks at the GPUs without a reason.
const agentLooks = time.Minute

// blind reports whether the agent has not looked since the driver was replaced under it.
func (h *host) blind() bool {
	u := &h.upgrade
	return u.alone && u.unloaded && h.GPU.Generation == u.last && h.now.Sub(u.began) < agentLooks
}

// resetTime is how long the agent is at work on the GPUs after it has returned.
const resetTime = 20 * time.Second

// begins lets the upgrade controller begin.
func (h *host) begins(u upgrade) {
	h.upgrade = u
	h.upgrade.back = h.back()
	if u.byHand {
		h.upgradeTo("pod-restart-required")
		return
	}
	h.upgradeTo("cordon-required")
}

func (h *host) upgradeTo(state string) {
	if !h.upgrade.byHand {
		h.Labels[upgradeLabel] = state
	}
	h.upgrade.state, h.upgrade.began = state, h.now
}

// goesOn reports whether the upgrade has begun and not ended. The node takes no pods meanwhile.
func (u *upgrade) goesOn() bool { return u.state != "" && u.state != "upgrade-done" }

// upgrading is the next thing that happens in an upgrade.
func (c *site) upgrading(h *host) {
	u := &h.upgrade
	c.goesOnFromLabel(h)
	if state := u.state; u.goesOn() {
		c.version[h.Name]++
		defer func() {
			if u.state != state {
				c.held(h)
			}
		}()
	}
	switch u.state {
	case nvidia.CordonRequired:
		if h.upgradesOn(); !u.restart { // no job is waited for
			h.upgradesOn()
		}
	case nvidia.PodDeletionRequired:
		for _, d := range h.devices() {
			for _, o := range d.Holders {
				c.end(h, o.Pod)
			}
		}
		h.upgradesOn()
	case nvidia.PodRestartRequired:
		c.manageDriver(h)
	case nvidia.ValidationRequired:
		if !h.upgradeStays() && (h.plugin.running || h.driver.serves && h.validates()) {
			h.upgradesOn()
		}
	case nvidia.UncordonRequired:
		h.upgradesOn()
	}
}

// upgradesOn takes the node to the next state.
func (h *host) upgradesOn() {
	states := nvidia.UpgradeStates(h.upgrade.restart)
	h.upgradeTo(states[slices.Index(states, h.upgrade.state)+1])
}

// validates reports whether NVIDIA's dra-validator of a GPUCluster can run, on which alone the upgrade controller
// waits: its claim is for one device of the class gpu.nvidia.com, which is a whole GPU, and tolerates no taint
// (NVIDIA/gpu-operator v26.7.0 manifests/state-dra-validation). The driver's chart has none.
func (h *host) validates() bool {
	if !cluster.OfGPUCluster(h.Node.Labels) {
		return true
	}
	return h.Labels[draValidatorLabel] == "true" && h.driverRuns() && h.DevicesTaintedAt.IsZero() && h.Published != nil &&
		slices.ContainsFunc(h.Published.Devices, func(d dra.Device) bool { return d.Type == "gpu" && d.Tainted == "" })
}

// goesOnFromLabel is what the upgrade controller does with a node whose label was restored from a backup. The label is
// all that it remembers, and from each earlier state a node whose driver pod is new and Ready comes to where it was
// (NVIDIA/k8s-operator-libs pkg/upgrade, ProcessPodRestartNodes). But with the deploy labels that k8s-driver-manager had
// stopped, no DaemonSet selects the node for the validator, and without a pod of it the upgrade stays (Validate there),
// until k8s-driver-manager runs again: it is an init container of the driver's pod, and the GPU Operator leaves such values
// (NVIDIA/gpu-operator v26.7.0 controllers/state_manager.go, addGPUStateLabels).
func (c *site) goesOnFromLabel(h *host) {
	state := h.upgrade.state
	renewed := slices.Contains([]string{nvidia.ValidationRequired, nvidia.UncordonRequired, "upgrade-done"}, state)
	switch label, has := h.Labels[upgradeLabel]; {
	case renewed && state != nvidia.ValidationRequired && h.stoppedForUpgrade():
		h.upgradeTo(nvidia.ValidationRequired)
		c.version[h.Name]++
		c.held(h)
	case has && label != state && renewed:
		h.Labels[upgradeLabel] = state
		c.version[h.Name]++
		c.held(h)
	}
}

// stoppedForUpgrade reports whether k8s-driver-manager has stopped what selects the node by a deploy label.
func (h *host) stoppedForUpgrade() bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(h.Labels)), func(value string) bool { return strings.Contains(value, driverStopped) })
}

// upgradeStays reports whether nothing ends an upgrade before k8s-driver-manager runs again.
func (h *host) upgradeStays() bool {
	return h.upgrade.state == nvidia.ValidationRequired && h.stoppedForUpgrade()
}

// startsAgain is k8s-driver-manager in a driver pod that starts anew.
func (h *host) startsAgain() {
	if h.upgrade.unloaded && h.stoppedForUpgrade() {
		_, restored := nvidia.PauseForUpgrade(h.Labels)
		maps.Copy(h.Labels, restored)
	}
}

// manageDriver is k8s-driver-manager.
func (c *site) manageDriver(h *host) {
	u := &h.upgrade
	switch {
	case u.alone && !u.unloaded:
		u.last = h.GPU.Generation
		h.unload()
	case !u.unloaded && !h.stoppedForUpgrade():
		paused, _ := nvidia.PauseForUpgrade(h.Labels)
		delete(paused, v1alpha1.LabelMIGManager) // with these two the pods that come anew have other numbers in the record of effects
		delete(paused, exporterLabel)
		maps.Copy(h.Labels, paused)
		c.held(h)
	case !u.unloaded:
		h.unload()
	case h.now.Sub(u.began) >= u.builds:
		h.upgradesOn()
	}
}

const draValidatorLabel = "nvidia.com/gpu.deploy.dra-validator"

// unload takes the module out, with all MIG instances, and restores the labels.
func (h *host) unload() {
	u := &h.upgrade
	switch {
	case u.restart:
	case h.AgentReady && !u.alone:
		u.stuck = "the agent"
	case slices.ContainsFunc(h.Pods, playedBy(pluginLabel)):
		u.stuck = "NVIDIA's device plugin"
	default:
		h.hardware.Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].Instances = nil
				if n.GPUs[i].Model == sim.H100 {
					n.GPUs[i].MIG, n.GPUs[i].PendingMIG = false, false
				}
			}
		})
	}
	u.unloaded = true
	_, restored := nvidia.PauseForUpgrade(h.Labels)
	maps.Copy(h.Labels, restored)
	u.began = h.now
}

// driver reports whether there is a driver.
func (u *upgrade) driver() bool { return u.state != "pod-restart-required" || !u.unloaded }

// attend brings the agent to the node and takes it away, by its deploy label and as the driver is there.
func (h *host) attend() {
	switch runs := h.selected() && h.upgrade.driver(); {
	case !runs && h.AgentReady:
		h.AgentReady, h.upgrade.leaves = false, true
	case runs && h.upgrade.leaves:
		h.AgentReady, h.AgentSince, h.upgrade.leaves, h.upgrade.returned = true, h.now.Add(h.skew), false, h.now
	}
}

// selected reports whether a DaemonSet of the agent selects the node.
func (h *host) selected() bool {
	if by := h.Labels[cluster.LabelDRADriver]; by == "true" || by == driverStopped {
		return by == "true" && h.Labels[draValidatorLabel] != driverStopped && h.Labels[v1alpha1.LabelRunsAgent] != "false"
	}
	return h.Labels[v1alpha1.LabelRunsAgent] == "true"
}

// awaitsAgents reports whether an agent returns by itself.
func (c *site) awaitsAgents() bool {
	for _, h := range c.hosts {
		if h.upgrade.goesOn() || h.upgrade.leaves && h.selected() {
			return true
		}
	}
	return false
}

// TestDriverUpgrade: a driver upgrade, in full or of the pod only, on a node that is as its policy desires. Our
// programs never keep the module loaded. The geometry is there again before anything is advertised, and before the node
// takes pods.
func TestDriverUpgrade(t *testing.T) {
	for name, c := range map[string]struct {
		model   sim.Model
		sharing v1alpha1.Sharing
		upgrade upgrade
	}{
		"in full, MIG on Hopper":         {sim.H100, mig(count("2g", 3)), upgrade{builds: 5 * time.Minute}},
		"in full, MIG on Ampere":         {sim.A100, mig(count("2g", 3)), upgrade{builds: 5 * time.Minute}},
		"in full, a driver built slowly": {sim.H100, mig(count("2g", 3)), upgrade{builds: 20 * time.Minute}},
		"in full, time-slicing":          {sim.A100, timeSlicing(4), upgrade{builds: time.Minute}},
		"in full, MPS":                   {sim.A100, mps(4), upgrade{builds: time.Minute}},
		"in full, with nothing open":     {sim.H100, mig(count("2g", 3)), upgrade{builds: 2 * time.Second, alone: true}},
		"in full, without a controller":  {sim.H100, mig(count("2g", 3)), upgrade{builds: time.Minute, byHand: true}},
		"of the pod only, MIG":           {sim.H100, mig(count("2g", 3)), upgrade{restart: true}},
		"of the pod only, time-slicing":  {sim.A100, timeSlicing(4), upgrade{restart: true}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w := newSite()
			h := w.add("a", c.model)
			w.setPolicy("research", c.sharing)
			w.run(30)
			g.Expect(w.Policies[0].Status.Nodes.Ready).To(Equal(int32(1)))
			want := advertised(h)
			h.begins(c.upgrade)
			reasons := map[string]bool{}
			for range 3000 {
				for _, n := range w.reconcile().Nodes {
					reasons[n.Reason] = true
				}
				w.tick(time.Second)
				for resource, n := range advertised(h) {
					g.Expect(n).To(Equal(want[resource]), "%s in %s", resource, h.upgrade.state)
				}
			}
			g.Expect(h.upgrade.stuck).To(BeEmpty())
			g.Expect(h.upgrade.goesOn()).To(BeFalse())
			isOffered(g, h, want)
			w.settles(g, 10)
			g.Expect(reasons).To(HaveKey(v1alpha1.ReasonDriverUpgrade))
			if !c.upgrade.byHand { // where nothing tells what goes on once the module is unloaded
				g.Expect(reasons).NotTo(HaveKey(v1alpha1.ReasonAgentNotReporting))
			}
			h.leftNothing(g)
		})
	}
}

// TestTheAgentThatHasAnsweredAfterAnUpgradeIsLost: its instances were there again and are offered, so nothing is stopped
// for them once more, for which the node would have no slot.
func TestTheAgentThatHasAnsweredAfterAnUpgradeIsLost(t *testing.T) {
	g := NewWithT(t)
	w, h := toMIG()
	w.run(100)
	h.begins(upgrade{builds: time.Minute})
	offered := func() bool {
		_, interrupted := h.Annotations[v1alpha1.AnnotationInterrupted]
		return h.upgrade.state == "validation-required" && interrupted && h.Labels[pluginLabel] == "true"
	}
	for range 600 {
		if w.steps(1); offered() {
			break
		}
	}
	g.Expect(offered()).To(BeTrue())
	h.AgentReady = false
	for range 60 {
		w.steps(1)
		g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
	}
	g.Expect(h.upgrade.goesOn()).To(BeFalse())
	h.AgentReady = true
	w.settles(g, 100)
}

// TestAPolicyThatChangesDuringAnUpgradeIsNoFight: the node selects the former configuration until the upgrade is over,
// which nobody but the operator has set.
func TestAPolicyThatChangesDuringAnUpgradeIsNoFight(t *testing.T) {
	g := NewWithT(t)
	w, h := toMIG()
	w.run(100)
	h.begins(upgrade{builds: time.Minute})
	w.steps(10)
	w.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g", 7)) })
	for range 600 {
		w.steps(1)
		g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationOverruled))
	}
	w.settles(g, 100)
	g.Expect(h.upgrade.goesOn()).To(BeFalse())
}

// TestDriverUpgradeDuringAChange: an upgrade begins after each reconcile of a change. The change is given up or
// continues afterwards, and does not fail for the time that the upgrade took.
func TestDriverUpgradeDuringAChange(t *testing.T) {
	for _, model := range []sim.Model{sim.A100, sim.H100} {
		for reconciles := range 14 {
			t.Run(fmt.Sprintf("%s after reconcile %d", model, reconciles), func(t *testing.T) {
				g := NewWithT(t)
				w := newSite()
				h := w.add("a", model)
				w.hold(h, "train", 0, gpu.WholeGPU)
				w.setPolicy("research", mig(count("2g", 3)), evicting)
				w.steps(reconciles)
				h.begins(upgrade{builds: 18 * time.Minute})
				w.steps(1500)
				g.Expect(h.upgrade.stuck).To(BeEmpty())
				g.Expect(h.upgrade.state).To(Equal("upgrade-done"))
				d, _ := w.run(40)
				isUpToDate(g, one(d))
				isOffered(g, h, one(d).Expected)
				h.leftNothing(g)
			})
		}
	}
}

// leftNothing: what maintenance has interrupted or stopped is as before.
func (h *host) leftNothing(g *WithT) {
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationInterrupted))
	for _, name := range []string{pluginLabel, gfdLabel, v1alpha1.LabelRunsAgent} {
		g.Expect(h.Labels).To(HaveKeyWithValue(name, "true"))
	}
}

// TestMaintenanceHoldsNoSlotForEver: an upgrade that does not end keeps its slot for 30 minutes. Then the next node
// goes on.
func TestMaintenanceHoldsNoSlotForEver(t *testing.T) {
	g := NewWithT(t)
	w := newSite()
	a, b := w.add("a", sim.A100), w.add("b", sim.A100)
	w.setPolicy("research", mig(count("2g", 3)))
	a.hardware.Fail = func(op sim.Op, _ string) error { // its agent does not come far
		if op == sim.OpObserve {
			return nil
		}
		return sim.ErrCrash
	}
	w.steps(6)
	g.Expect(a.GPU.Spec.PolicyName).NotTo(BeEmpty(), "the change has begun")
	a.Labels[upgradeLabel] = "upgrade-failed"
	d, _ := w.run(1700)
	hasReason(g, d, v1alpha1.ReasonDriverUpgrade)
	g.Expect(one(d).Message).To(And(
		ContainSubstring("upgrade of NVIDIA's driver failed"), ContainSubstring("nvidia.com/gpu-driver-upgrade-state=upgrade-required")))
	g.Expect(b.GPU.Spec.PolicyName).To(BeEmpty())
	d, _ = w.run(200)
	isUpToDate(g, d.Nodes[1])
	hasMessage(g, d, "no slot in the budget")
	g.Expect(a.isKept()).To(BeFalse(), "what its users still lack is not the operator's")
	a.hardware.Fail = nil
	a.Labels[upgradeLabel] = "upgrade-done"
	w.settles(g, 60)
	a.leftNothing(g)
}

// TestAnAgentThatDoesNotReturnFromAnUpgradeKeepsNoOperandsStopped: they are started again in time, and not stopped again.
func TestAnAgentThatDoesNotReturnFromAnUpgradeKeepsNoOperandsStopped(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(60)
	h := c.hosts["n0"]
	h.Labels[upgradeLabel], h.AgentReady = "pod-restart-required", false
	c.version[h.Name]++
	c.during(time.Minute, 10*time.Second)
	g.Expect(h.Annotations).To(HaveKey(v1alpha1.AnnotationStopped))
	h.Labels[upgradeLabel] = "upgrade-done"
	c.version[h.Name]++
	c.during(time.Hour, 10*time.Second)
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationStopped))
	g.Expect(c.writes["action.PatchNode"]).To(BeNumerically("<", 20))
	clear(c.writes)
	d := c.during(3*time.Hour, 10*time.Second)
	g.Expect(c.writes).To(BeEmpty())
	hasReason(g, d, v1alpha1.ReasonAgentNotReporting)
	h.AgentReady = true
	c.settles(g, 120)
	h.leftNothing(g)
}

// TestAfterLongMaintenanceOperandsStayStoppedUntilTheAgentAnswers: its slot has expired, and the instances may be gone.
func TestAfterLongMaintenanceOperandsStayStoppedUntilTheAgentAnswers(t *testing.T) {
	g := NewWithT(t)
	c := fleet(1, mig(count("3g", 2)))
	c.run(60)
	h := c.hosts["n0"]
	h.Labels[upgradeLabel], h.AgentReady = "pod-restart-required", false
	c.version[h.Name]++
	c.during(40*time.Minute, 10*time.Second)
	h.Labels[upgradeLabel], h.AgentReady, h.lags = "upgrade-done", true, true
	c.version[h.Name]++
	for range 30 {
		c.reconcile()
		g.Expect(h.Annotations).To(HaveKey(v1alpha1.AnnotationStopped))
		c.tick(10 * time.Second)
	}
	h.lags = false
	c.settles(g, 120)
	h.leftNothing(g)
}

// TestNoChangeBeginsUnderMaintenance: whatever says so, and until it no longer does.
func TestNoChangeBeginsUnderMaintenance(t *testing.T) {
	for name, c := range map[string]struct {
		labels, annotations map[string]string
		reason              string
	}{
		"an upgrade is required":        {labels: map[string]string{upgradeLabel: "upgrade-required"}, reason: v1alpha1.ReasonDriverUpgrade},
		"a state that nobody knows yet": {labels: map[string]string{upgradeLabel: "something-new"}, reason: v1alpha1.ReasonDriverUpgrade},
		"an upgrade has failed":         {labels: map[string]string{upgradeLabel: "upgrade-failed"}, reason: v1alpha1.ReasonDriverUpgrade},
		"the driver manager alone":      {labels: map[string]string{dcgmLabel: driverStopped}, reason: v1alpha1.ReasonDriverUpgrade},
		"OpenShift's machine config": {annotations: map[string]string{
			"machineconfiguration.openshift.io/currentConfig": "rendered-worker-1",
			"machineconfiguration.openshift.io/desiredConfig": "rendered-worker-2",
		}, reason: v1alpha1.ReasonNodeMaintenance},
		"an upgrade is skipped": {labels: map[string]string{
			upgradeLabel: "upgrade-required", "nvidia.com/gpu-driver-upgrade.skip": "true",
		}},
		"an upgrade is done": {labels: map[string]string{upgradeLabel: "upgrade-done"}},
		"a machine config that is there": {annotations: map[string]string{
			"machineconfiguration.openshift.io/currentConfig": "rendered-worker-1",
			"machineconfiguration.openshift.io/desiredConfig": "rendered-worker-1",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w, h := toMIG()
			maps.Copy(h.Labels, c.labels)
			maps.Copy(h.Annotations, c.annotations)
			d, _ := w.run(30)
			if c.reason == "" {
				isUpToDate(g, one(d))
				return
			}
			g.Expect(one(d).Reason).To(Equal(c.reason))
			isForgotten(g, h)
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(w.writes).NotTo(HaveKey("action.PatchNode"))
		})
	}
}

// TestAStopOfOursUnderAnother: k8s-driver-manager adds its stop to ours and later takes only its own away. Ours is
// never overwritten meanwhile and goes when it is back, whatever became of the change.
func TestAStopOfOursUnderAnother(t *testing.T) {
	g := NewWithT(t)
	w, h := toMIG()
	for h.Labels[pluginLabel] != managerStopped {
		w.steps(1)
	}
	both := managerStopped + "_" + driverStopped
	h.Labels[pluginLabel], h.Labels[gfdLabel] = both, both
	w.Policies = nil
	w.steps(5)
	g.Expect(h.Labels).To(And(HaveKeyWithValue(pluginLabel, both), HaveKeyWithValue(gfdLabel, both)))
	g.Expect(h.Annotations).To(HaveKey(v1alpha1.AnnotationStopped))
	h.Labels[pluginLabel], h.Labels[gfdLabel] = managerStopped, managerStopped
	w.run(30)
	h.leftNothing(g)
}

// TestANodeThatIsProtectedAfterAnUpgradeCounts: NVIDIA's device plugin is kept away until the agent has made its instances
// again, which waits for no slot. In the same step no other node is taken from its users beyond the budget.
func TestANodeThatIsProtectedAfterAnUpgradeCounts(t *testing.T) {
	g := NewWithT(t)
	w, upgraded := toMIG()
	w.run(100)
	other := w.add("b", sim.A100)
	for w.reconcile(); other.GPU.Spec.PolicyName == ""; w.reconcile() { // its agent has the spec, and has not begun
		w.tick(time.Second)
	}
	other.Taints = nil
	delete(other.Annotations, v1alpha1.AnnotationStopped)
	upgraded.Annotations[v1alpha1.AnnotationInterrupted] = timing.Stamp("maintenance", w.Now)
	w.Repeats = &action.Repeats{}
	off := func() (nodes []string) {
		for _, a := range rollout.Decide(w.world()).Actions {
			if action.KeepsOff(a) || action.Stops(a) {
				nodes = append(nodes, a.NodeName())
				w.Repeats.Refuse(a, "admission webhook denied the request", w.Now)
			}
		}
		return nodes
	}
	g.Expect(off()).To(Equal([]string{"a"}))
	g.Expect(off()).To(Equal([]string{"b"}), "it is refused, so nothing is taken there")
}
