// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/condition"
)

// Deadlines of the states that wait for somebody else.
const (
	// applyTimeout is how long an agent may take. NVIDIA's own tools wait five minutes for each client and reset GPUs in
	// turn, so a change that is on its way ends well before.
	applyTimeout = 15 * time.Minute
	// quiesceTimeout is how long NVIDIA's programs may take to end: as long as its mig-manager waits for each.
	quiesceTimeout = 5 * time.Minute
	// verifyTimeout is how long a node may take to advertise what was selected. The plugin retries every 30 s, and MPS
	// under the GPU Operator needs up to three minutes (GFD, NFD, scheduling of the MPS pod).
	verifyTimeout = 5 * time.Minute
	// visibleAfter is how long after a nudge a new key is visible in a pod, where no agent says when it is: 0.1 to 0.9 s were
	// measured.
	visibleAfter = 2 * time.Second
	// agentSilent is how long after a wish an agent that watched a pod may say nothing of it. The kubelet projects by itself
	// within 90 s.
	agentSilent = 3 * time.Minute
	// pluginRestart is how long a device plugin is left alone before it is started anew.
	pluginRestart = 10 * time.Minute
	// pluginAway is how long a node may go without the device plugin under our taint before that is taken for the reason, and how
	// long a plugin that must be there is waited for if its pod does not show.
	pluginAway = 30 * time.Second
	// pluginSettles is how long after NVIDIA's device plugin became Ready it surely runs the configuration that the node selects.
	// It starts with the default, and its config-manager corrects that once it has read the Node.
	pluginSettles = 5 * time.Second
	// reportAfter is how long after a pod was bound to a node the agent has surely reported what it holds.
	reportAfter = 20 * time.Second
)

// judgement is the state of a node and what follows from it.
type judgement struct {
	State
	reason, message string
	// actions go on with a change that has begun, or only put right what is ours.
	actions []Action
	// start is the next step of a change that needs a place in the budget. It is an alternative to actions.
	start []Action
	// giveUp is done instead of start when no change may start: it leaves the node as if none had begun.
	giveUp []Action
	after  time.Duration // when to look again; 0: no need
	// rollback is how far a node with StateFailed is on its way back; empty: that has not begun.
	rollback State
}

// gateFunc is a gate that a change has to pass. It reports what the node waits for, and whether it waits.
type gateFunc func(*view) (judgement, bool)

// judge derives the state of a node and what to do about it.
func (v *view) judge() judgement {
	j := v.judgeNode()
	if m, is := v.maintenance(); is {
		return v.maintained(m, j)
	}
	return v.continued(j)
}

// judgeNode judges a node by itself. The order of the questions is the order of a change.
func (v *view) judgeNode() judgement {
	if !v.node.AgentReady && v.node.GPU.Spec.Reboot != nil {
		return v.goneDown()
	}
	if j, is := v.undiscovered(); is {
		return j
	}
	if v.why != nil {
		return judgement{
			State: StateImpossible, reason: v.why.Reason, message: v.why.Message, actions: v.giveBack("the policy cannot be honoured here"),
		}
	}
	j := v.progress()
	if f := v.failed(); f != nil && (v.fallsBack || j.State == StateStaleDisruptive) {
		return v.judgeFailed(*f, j)
	}
	return j
}

// judgeFailed reports why the wish failed, while the node is on its way back, or waits to become idle after all.
func (v *view) judgeFailed(f v1alpha1.FailedChange, j judgement) judgement {
	j.rollback = j.State
	switch {
	case !v.fallsBack && len(v.blockers) == 0:
		return j // it did not become idle in time, but now it is
	case !v.fallsBack:
		j.start, j.giveUp, j.actions = nil, nil, v.letGo("it did not become idle in time")
		j.message = f.Message + "; it is tried again when the node is idle, a policy for it changes or you annotate the GPUNode (" + v.retry() + "); now " + v.inTheWay()
	case j.State == StateUpToDate:
		j.message = f.Message + "; the node was put back to its last good state and is tried again when the policy changes or you annotate the " +
			"GPUNode: " + v.retry()
	default:
		j.message = fmt.Sprintf("%s; the node goes back to its last good state (%s: %s)", f.Message, j.State, j.message)
	}
	j.State, j.reason = StateFailed, f.Reason
	return j
}

// retry is the command that has a failed node tried again.
func (v *view) retry() string {
	return fmt.Sprintf("kubectl annotate gpunode %s --overwrite %s=$(date +%%s)", v.node.Name, v1alpha1.AnnotationRetry)
}

// progress is the state of a node on its way to its target.
func (v *view) progress() judgement {
	asks := v.asks()
	if j, pending := v.byManager(asks); pending {
		return j
	}
	switch {
	case v.leftToOthers():
		return v.applying()
	case asks && v.stranded():
		return v.awaitsSomebody()
	case v.onlyComputeMode():
		return v.afterApplying()
	case asks && v.gaveUp():
		return v.applying()
	case v.disrupts(asks):
		return v.disrupt(asks)
	case !asks:
		return v.setGently()
	}
	if v.applied() {
		return v.afterApplying()
	}
	if j, over := v.afterManager(); over && v.partitions() {
		return j
	}
	return v.applying()
}

// disrupts reports whether the node has to be brought to where its GPUs can be changed. Once the agent is asked, that is only so while
// somebody is in its way.
func (v *view) disrupts(asks bool) bool {
	return v.disruptive() && (!asks || len(v.blockers) > 0 || v.closes() || v.ousts())
}

// afterApplying is the state of a node whose GPUs are as its target has them.
func (v *view) afterApplying() judgement {
	for _, gate := range []gateFunc{(*view).contested, (*view).selecting, (*view).enumerating, (*view).verifying, (*view).settling} {
		if j, pending := gate(v); pending {
			return j
		}
	}
	return v.done()
}

// byManager is the part of NVIDIA's mig-manager, where it partitions the GPUs of the node.
func (v *view) byManager(asks bool) (judgement, bool) {
	switch {
	case v.partitions() && asks && v.node.GPU.Spec.MIGConfigName != "":
		return v.drive(), true
	case v.partitions() && !asks && v.taint() == nil:
		j, pending := v.prepared()
		j.giveUp = v.giveBack("the change is held back")
		return j, pending
	}
	return judgement{}, false
}

// asks says whether the spec asks for the target already, and mig-manager, where that is its business, was asked for it. A spec with
// the record that the target failed asks for nothing until it is written again: the deadlines of another attempt begin with that.
func (v *view) asks() bool {
	f := v.node.GPU.Status.Rollout.Failed
	again := f != nil && !v.fallsBack && f.Hash == v.asked() && !v.superseded(*f)
	if again || v.releasesAgain() || !wishes(v.node.GPU.Spec, v.to) {
		return false
	}
	if !v.partitions() {
		return true
	}
	name := v.config().Name
	_, asked := v.askedFor(name)
	return asked || v.node.GPU.Spec.MIGConfigName == name
}

// underway is the reason of a node on which nothing in particular is waited for.
func (v *view) underway() string {
	if v.by == nil {
		return v1alpha1.ReasonRestoring
	}
	return v1alpha1.ReasonProgressing
}

// setGently changes the spec of a node on which nothing has to be idle.
func (v *view) setGently() judgement {
	j := judgement{
		State: StateStaleGentle, reason: v.underway(),
		message: "the node is not as the policy asks yet; the change disturbs nothing that runs",
		giveUp:  v.giveBack("the change is held back"),
	}
	if fence, pending := v.fence(); pending {
		if fence.giveUp = j.giveUp; len(fence.start) > 0 {
			fence.State = j.State
		}
		return fence
	}
	if g, pending := v.prepareMPS(j); pending {
		return g
	}
	if patch, unsaved := v.unsaved(); unsaved {
		j.start = []Action{patch}
		return j
	}
	j.start = []Action{v.setSpec()}
	return j
}

// disrupt brings a node to where its GPUs can be changed: tainted, drained, NVIDIA's clients paused.
func (v *view) disrupt(asks bool) judgement {
	j := judgement{State: StateStaleDisruptive, reason: v.underway(), giveUp: v.giveBack("the change is held back")}
	blocked := len(v.blockers) > 0
	tainted := v.taint() != nil || v.mustStayUntainted() && !blocked
	switch {
	case v.ousts() && v.reached() && v.labelLeft() > 0:
		return v.besideNVIDIA()
	case blocked && v.drainMode() == v1alpha1.DrainModeNever:
		j.reason, j.message = v1alpha1.ReasonGPUInUse, "waiting until nobody uses what must be changed: "+v.inTheWay()
		j.actions = append(v.letGo("the node is in use"), v.interruptedByUsers(asks)...)
		return j
	case blocked && !tainted && v.fallsBack: // its time is over: nobody is kept off or evicted any more
		j.reason, j.message = v1alpha1.ReasonGPUInUse, "waiting until nobody uses what must be changed: "+v.inTheWay()
		return j
	case !tainted:
		return v.tainting(j)
	case blocked:
		return v.draining(j)
	}
	if pod, age := v.justBound(); pod != "" {
		j.State, j.reason = StateDraining, v1alpha1.ReasonGPUInUse
		j.message = fmt.Sprintf("pod %s was placed on the node just now; waiting for the agent to report what it holds", pod)
		j.after = reportAfter - age
		return j
	}
	return v.quiesce(j, asks)
}

// tainting begins a change: nothing new may come to the node.
func (v *view) tainting(j judgement) judgement {
	if g, pending := v.prepareMPS(j); pending {
		return g
	}
	j.message = "the change needs GPUs or instances idle"
	if len(v.blockers) > 0 {
		j.message += "; in use now: " + v.inTheWay()
	}
	j.start = []Action{v.taintNode()}
	return j
}

// interruptedByUsers records that users of the GPUs interrupt a change, so that the time of the agent begins anew once they are gone.
func (v *view) interruptedByUsers(asks bool) []Action {
	if !asks || v.wasInterrupted() {
		return nil
	}
	patch := v.patch("recording that users of the GPUs interrupt the change")
	patch.Annotations[v1alpha1.AnnotationInterrupted] = new(stamp(stampInUse, v.world.Now))
	return []Action{patch}
}

// draining waits for the node to become idle, and evicts where the policy says so.
func (v *view) draining(j judgement) judgement {
	j.State, j.reason = StateDraining, v1alpha1.ReasonGPUInUse
	left := v.drainLeft()
	evictions, stay := v.evictions()
	why := ""
	if len(stay) > 0 {
		why = "; not evicted: " + list(stay)
	}
	if refused := v.refusals(); len(refused) > 0 {
		why += "; " + list(refused)
	}
	if left <= 0 {
		message := fmt.Sprintf("not idle within %s: %s%s", v.drainTimeout(), v.inTheWay(), why)
		if !v.fallsBack {
			j.start = append(v.letGo("it did not become idle in time"), v.recordFailure(v1alpha1.ReasonDrainTimedOut, message)...)
			j.message = message
			return j
		}
		j.reason, j.actions = v1alpha1.ReasonDrainTimedOut, v.letGo("it did not become idle in time")
		j.message = message + "; the node takes pods again meanwhile, and goes back once nobody uses what must be changed"
		return j
	}
	j.start, j.after = evictions, max(left, 0)
	j.message = "waiting for what must be freed: " + v.inTheWay() + why
	return j
}

// drainLeft is how much of the time for draining is left.
func (v *view) drainLeft() time.Duration {
	since := v.drainsSince()
	if since.IsZero() {
		return v.drainTimeout()
	}
	if c, found := condition.Find(v.node.GPU.Status.Conditions, v1alpha1.ConditionRebootRequired); found && v.reboots() {
		since = latest(since, c.LastTransitionTime.Time) // only then the other GPUs have to be idle too
	}
	return since.Add(v.drainTimeout()).Sub(v.world.Now)
}

// drainsSince is when the time for draining began; zero if it has not, or if that is not recorded.
func (v *view) drainsSince() time.Time {
	switch t := v.taint(); {
	case t != nil && t.TimeAdded != nil:
		return t.TimeAdded.Time
	case t == nil && v.mustStayUntainted() && len(v.ours()) > 0:
		return v.node.HeldSince
	}
	return time.Time{}
}

func latest(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// quiesce fences NVIDIA's mig-manager and pauses NVIDIA's clients where steps need that, then lets the agent go.
func (v *view) quiesce(j judgement, asks bool) judgement {
	gates := []gateFunc{(*view).remember, (*view).fence, (*view).paused, (*view).keepMPSOff}
	if v.ousts() {
		gates = []gateFunc{(*view).remember, (*view).fence, (*view).keepMPSOff, (*view).paused}
	}
	for _, gate := range gates {
		if g, pending := gate(v); pending {
			g.giveUp = j.giveUp
			return v.quiescing(g)
		}
	}
	switch {
	case asks && v.reboots():
		return v.rebooting(j)
	case asks:
		return v.applying()
	}
	j.State, j.message = StateQuiet, "nothing is in the way of the change"
	if patch, unsaved := v.unsaved(); unsaved {
		j.start = []Action{patch}
		return j
	}
	j.start = []Action{v.setSpec()}
	return j
}

// quiescing gives NVIDIA's programs their time to end, after that for draining.
func (v *view) quiescing(j judgement) judgement {
	left := v.drainLeft() + quiesceTimeout
	if len(j.start) > 0 || j.State == StateFailed {
		return j
	}
	if left > 0 {
		j.after = Sooner(j.after, left)
		return j
	}
	if v.fallsBack { // there is no other way back
		j.message += fmt.Sprintf("; for more than %s now: delete those pods, or set back that label", quiesceTimeout)
		return j
	}
	message := fmt.Sprintf("not within %s: %s", quiesceTimeout, j.message)
	j.start, j.message = append(v.letGo("they did not end in time"), v.recordFailure(j.reason, message)...), message
	return j
}

// applying waits for the agent.
func (v *view) applying() judgement {
	j := judgement{State: StateApplying, reason: v1alpha1.ReasonApplying, message: v.agentSays("the agent is changing the GPUs")}
	if reason, message, is := v.stalled(); is {
		return v.fail(j, reason, message)
	}
	late := v1alpha1.ReasonApplyTimedOut
	help, waits := v.waitsForReboot()
	switch {
	case waits:
		j.reason, late = v1alpha1.ReasonRebootRequired, v1alpha1.ReasonRebootRequired
		j.message += help
	case v.permitted():
		j.reason = v1alpha1.ReasonRebooting
	}
	left, timeout, limited := v.timeLeft()
	if !limited {
		return j
	}
	if left <= 0 {
		return v.fail(j, late, v.agentSays(fmt.Sprintf("the GPUs were not as wished within %s", timeout))+help)
	}
	j.actions, j.after = v.nudgeAhead(), left
	return j
}

// timeLeft returns how much is left of the time that the agent has for what it was asked, and how long that is. It is not limited
// for what was reached before, which is waited for.
func (v *view) timeLeft() (left, timeout time.Duration, limited bool) {
	since := v.node.GPU.Spec.ChangeTime
	if since.IsZero() || v.reached() {
		return 0, 0, false
	}
	timeout = applyTimeout
	if _, waits := v.waitsForReboot(); !waits && v.permitted() {
		timeout = rebootTimeout
	}
	return since.Add(timeout).Sub(v.world.Now), timeout, true
}

// gaveUp reports whether the release of the node failed, and the node was given back to its users. There is no other state to go
// back to. To drain it once more at once, and to pause NVIDIA's clients, would disturb the node again and again.
func (v *view) gaveUp() bool {
	if v.by != nil || v.taint() != nil || !v.disruptive() {
		return false
	}
	left, _, limited := v.timeLeft()
	_, _, stalled := v.stalled()
	return stalled || limited && left <= 0
}

// releasesAgain reports whether the release of the node is to be tried again: patience after the agent was asked for it, and only
// while nobody uses what must be changed. NVIDIA's mig-manager is not asked for the same config again, and a node that needs a
// reboot needs a person.
func (v *view) releasesAgain() bool {
	since := v.node.GPU.Spec.ChangeTime
	if v.by != nil || since.IsZero() || v.world.Now.Sub(since.Time) < patience {
		return false
	}
	return v.disruptive() && len(v.blockers) == 0 && !v.managed() && !v.stranded()
}

// fail gives a wish up: the node falls back. What has been reached before is not given up but waited for.
func (v *view) fail(j judgement, reason, message string) judgement {
	if _, is := v.maintenance(); is || v.wasInterrupted() {
		j.message = message
		return j // it is not the wish that failed
	}
	j.State, j.reason, j.message = StateFailed, reason, message
	if v.wish != nil && !v.fallsBack && !v.reached() {
		j.actions = append(j.actions, v.recordFailure(reason, message)...)
	}
	if v.wish == nil { // there is nothing to fall back to: it waits, and holds nobody up
		j.actions = append(j.actions, v.letGo("it did not get back to its state in time")...)
		if again := v.node.GPU.Spec.ChangeTime.Add(patience).Sub(v.world.Now); again > 0 && !v.managed() {
			j.after = again
			j.message += fmt.Sprintf("; the operator tries again at %s if nobody uses the GPUs then", clock(v.world.Now.Add(again)))
		}
	}
	return j
}

// verifying compares what the node advertises with what it must.
func (v *view) verifying() (judgement, bool) {
	differs := v.differs()
	if len(differs) == 0 {
		return judgement{}, false
	}
	j := judgement{
		State: StateVerifying, reason: v1alpha1.ReasonVerifying,
		message: "the node does not advertise yet what it must: " + strings.Join(differs, ", "),
	}
	if left, is := v.keepsPluginOff(); is {
		if j.after = left; left <= 0 {
			j.actions = []Action{Untaint{Node: v.node.Name}}
		}
		return j, true
	}
	if v.reached() || v.to.expected == nil {
		j.State, j.reason = StateDegraded, v1alpha1.ReasonNotAdvertised
		j.message += cmp.Or(v.sick(), "; look at the pods of NVIDIA's device plugin on the node")
		j.actions, j.after = v.restartPlugin()
		return j, true
	}
	since := latest(v.selectedAt(), v.node.GPU.Spec.ChangeTime.Time) // another attempt may find its config selected since the former one
	left := since.Add(verifyTimeout).Sub(v.world.Now)
	if left <= 0 {
		message := fmt.Sprintf("not advertised within %s: %s; %s", verifyTimeout, strings.Join(differs, ", "), cmp.Or(v.pluginSays(),
			"look at the pods of NVIDIA's device plugin on the node: if they log \"device plugin already connected\", the kubelet has "+
				"lost them, and only its restart helps"))
		return v.fail(j, v1alpha1.ReasonNotAdvertised, message), true
	}
	if j.after = left - verifyTimeout/2; j.after > 0 {
		return j, true
	}
	actions, after := v.restartPlugin() // it may have read what another controller had written into the ConfigMap
	j.actions, j.after = actions, Sooner(left, after)
	return j, true
}

// settling waits until what the node advertises is not the device plugin's default any more, which it advertises at each start.
// Where the default is the same the plugin is started once more all the same, and the kubelet refuses pods in that moment.
func (v *view) settling() (judgement, bool) {
	if v.to.key == "" || v.to.expected == nil {
		return judgement{}, false
	}
	for _, p := range v.node.Pods {
		if !v.isPlugin(p) || !p.MountsConfig || p.Terminating || p.ReadySince.IsZero() {
			continue
		}
		if left := p.ReadySince.Add(pluginSettles).Sub(v.world.Now); left > 0 {
			return judgement{
				State: StateVerifying, reason: v1alpha1.ReasonVerifying, after: left,
				message: fmt.Sprintf("Waiting for the device plugin: pod %s/%s has just started, with its default config", p.Namespace, p.Name),
			}, true
		}
	}
	return judgement{}, false
}

// keepsPluginOff says whether our taint may keep NVIDIA's device plugin off the node, whose daemon set does not tolerate it,
// and how long the taint may yet stand: no longer where nothing is offered that it would keep pods off, and for a while where
// the node offers something though no plugin is there. A kubelet that has lost the plugin's end does that for ever.
func (v *view) keepsPluginOff() (left time.Duration, is bool) {
	if v.taint() == nil {
		return 0, false
	}
	if v.advertisesNoGPU() {
		return 0, true
	}
	if slices.ContainsFunc(v.node.Pods, func(p Pod) bool { return p.NodeSelector[deployLabels()[0]] != "" }) {
		return 0, false
	}
	return v.selectedAt().Add(pluginAway).Sub(v.world.Now), true
}

// advertisesNoGPU says whether the node offers nothing that a pod could get. NVIDIA's daemon sets do not tolerate our
// taint, so while it stands none of their pods that is not there comes; and where nothing is offered it keeps nobody off.
func (v *view) advertisesNoGPU() bool {
	for name, count := range v.node.Allocatable {
		if count != 0 && ofGPU(name) {
			return false
		}
	}
	return true
}

// done removes our taint and records what was reached.
func (v *view) done() judgement {
	j := judgement{State: StateUpToDate, reason: v1alpha1.ReasonReady}
	if v.taint() != nil {
		j.State, j.reason, j.message = StateReleasing, v1alpha1.ReasonProgressing, "done; the taint of the operator is being removed"
		j.actions = append(j.actions, Untaint{Node: v.node.Name})
		return j // what was reached is recorded after that, together with Ready
	}
	if v.to.final && v.overridden() {
		return v.allowing(j)
	}
	j.actions = append(j.actions, v.recordReached()...)
	return j
}

// allowing waits until NVIDIA's MPS DaemonSet is allowed on the node again (notNeeded), before the node is forgotten.
func (v *view) allowing(j judgement) judgement {
	j.State, j.reason = StateReleasing, v.underway()
	j.message = fmt.Sprintf("Waiting until the operator no longer overrides %s", LabelMPSCapable)
	if f := v.stale(); f.reason != "" && v.node.Features.Others == labelTrue {
		j.State, j.reason = StateFailed, f.reason
	}
	return j
}

// giveBack is letGo unless the agent is at work on an earlier wish, which holds the node for good reason.
func (v *view) giveBack(why string) []Action {
	if v.busy() {
		return nil
	}
	return v.letGo(why)
}

// letGo takes back what holds a node though its GPUs are not being changed: our taint and our pauses.
func (v *view) letGo(why string) []Action {
	var actions []Action
	if v.taint() != nil {
		actions = append(actions, Untaint{Node: v.node.Name})
	}
	if patch, resumes := v.resume(); resumes {
		patch.Why = "resuming NVIDIA's GPU clients: " + why
		v.stampResumed(patch)
		actions = append(actions, patch)
	}
	return actions
}

func (v *view) taintNode() Action {
	now := metav1.NewTime(v.world.Now)
	return Taint{
		Node: v.node.Name, Policy: v.ref(), Baseline: v.copied(),
		Taint: corev1.Taint{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &now},
	}
}

// agentSays adds to a message what the agent says of why it is not done.
func (v *view) agentSays(message string) string {
	for _, c := range v.node.GPU.Status.Conditions {
		if c.Type == v1alpha1.ConditionApplied && c.Status != metav1.ConditionTrue && c.Message != "" &&
			c.ObservedGeneration == v.node.GPU.Generation {
			return fmt.Sprintf("%s; the agent says %s: %s", message, c.Reason, c.Message)
		}
	}
	return message
}
