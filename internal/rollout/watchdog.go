// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/policy"
)

// Deadlines of what is left half-done.
const (
	// leftTimeout is how long NVIDIA's clients may be paused, and its mig-manager at work, while neither says anything new.
	// It waits five minutes at most for each of its clients, and tells nothing meanwhile (contract §4.4).
	leftTimeout = 15 * time.Minute
	// endTimeout is how long a pod may still be there after it must have ended.
	endTimeout = 2 * time.Minute
	// outdatedTimeout is how long pods may go on reading another ConfigMap before they are started anew.
	outdatedTimeout = 10 * time.Minute
)

// finding is something that is left half-done on a node, by us or by somebody else.
type finding struct {
	reason, message string        // empty: nothing, or not yet
	beside          bool          // no change waits for it, so it is the reason of no node that is being changed
	repair          []Action      // what is ours to put right
	after           time.Duration // when to look again; 0: no need
}

// check finds what is left half-done on a node in a state.
type check func(*view, State) finding

// watch adds to a judgement what is left half-done on the node. A finding is the reason of a node that has not
// failed; repairs wait for no place in the budget, since they only give back.
func (v *view) watch(j judgement) judgement {
	checks := []check{ // the one that matters most comes last
		(*view).limitsPending, (*view).userWaiting, (*view).mpsUnreachable, (*view).gpuMissing, (*view).migConfigIgnored,
		(*view).notNeeded, (*view).notKeptOff, (*view).computeModeLeft, (*view).pluginFailing, (*view).outdated, (*view).notEnding,
		(*view).unfenced, (*view).managerStuck, (*view).leftPaused,
	}
	if _, is := v.maintenance(); is {
		checks = []check{(*view).notKeptOff, (*view).leftPaused} // all else follows from the maintenance
	}
	for _, find := range checks {
		f := find(v, j.State)
		j.actions, j.after = append(j.actions, f.repair...), Sooner(j.after, f.after)
		if f.reason == "" {
			continue
		}
		if j.State == StateFailed || j.State == StateImpossible || f.beside && j.State != StateUpToDate {
			j.message += "; " + f.message
			continue
		}
		j.reason = f.reason
		j.message = strings.TrimSuffix(f.message+"; "+j.message, "; ")
	}
	return j
}

// gpuMissing finds that GPUs are missing which the policy selects by index.
func (v *view) gpuMissing(State) finding {
	if v.wish == nil {
		return finding{}
	}
	missing := policy.Missing(v.by, policyNode(v.node))
	if len(missing) == 0 {
		return finding{}
	}
	return finding{
		reason: v1alpha1.ReasonGPUMissing, beside: true,
		message: fmt.Sprintf("The node no longer has %s, which gpuSelector.indexes selected. Policy %s keeps the other GPUs that it "+
			"selected, though their indexes have changed. Replace the GPU, or change gpuSelector.indexes", list(missing), v.by.Name),
	}
}

// leftPaused finds NVIDIA's clients paused though nobody changes anything: by us, on a node whose agent is gone, or by a
// mig-manager that ended on its way. k8s-driver-manager pauses them with another value, and is left alone.
func (v *view) leftPaused(s State) finding {
	if !v.world.Wiring.ClusterPolicy || v.node.HeldSince.IsZero() {
		return finding{}
	}
	left := v.node.HeldSince.Add(leftTimeout).Sub(v.world.Now)
	theirs := v.pausedByOthers()
	switch {
	case len(theirs) > 0 && !v.managerWorks():
		if left > 0 {
			return finding{after: left}
		}
		patch := v.patch("resuming NVIDIA's GPU clients, which its mig-manager left paused")
		for _, name := range theirs {
			patch.Labels[name] = new("true")
		}
		patch.Locked = true
		return finding{
			reason: v1alpha1.ReasonClientsLeftPaused, repair: []Action{patch},
			message: fmt.Sprintf("NVIDIA's GPU clients were left paused since %s (%s) by a mig-manager that does not work on "+
				"the node any more; they are being resumed", clock(v.node.HeldSince), list(theirs)),
		}
	case len(v.ours()) > 0 && s == StateUndiscovered:
		if left > 0 {
			return finding{after: left}
		}
		return finding{
			reason: v1alpha1.ReasonClientsLeftPaused, repair: v.letGo("the agent does not come back"),
			message: fmt.Sprintf("the operator paused NVIDIA's GPU clients at %s for a change that the agent has not ended; "+
				"they are being resumed, and the change goes on once the agent reports again", clock(v.node.HeldSince)),
		}
	}
	return finding{}
}

// pausedByOthers are the deploy labels that carry mig-manager's value and that we did not set to it.
func (v *view) pausedByOthers() []string {
	var theirs []string
	for name, value := range v.node.Labels {
		if strings.HasPrefix(name, deployPrefix) && value == pausedValue && !slices.Contains(v.ours(), name) {
			theirs = append(theirs, name)
		}
	}
	slices.Sort(theirs)
	return theirs
}

// notEnding finds pods of NVIDIA's that should be gone long since, in a state that waits for that.
func (v *view) notEnding(s State) finding {
	if s != StateQuiescing && s != StateSelecting && s != StateVerifying && s != StateDegraded {
		return finding{}
	}
	var names []string
	f := finding{}
	for _, p := range v.node.Pods {
		if !p.Terminating || !selectsDeploy(p.NodeSelector) {
			continue
		}
		if left := p.EndsBy.Add(endTimeout).Sub(v.world.Now); left > 0 {
			f.after = Sooner(f.after, left)
			continue
		}
		names = append(names, fmt.Sprintf("%s/%s (since %s)", p.Namespace, p.Name, clock(p.EndsBy)))
	}
	if len(names) > 0 {
		slices.Sort(names)
		f.reason = v1alpha1.ReasonClientsNotEnding
		f.message = fmt.Sprintf("these pods of NVIDIA's were deleted and do not end: %s; look at the kubelet and the container "+
			"runtime of the node, which have to end them", list(names))
	}
	return f
}

// outdated finds pods of NVIDIA's device plugin that the GPU Operator has not started anew since the ClusterPolicy names
// our ConfigMap, as with updateStrategy OnDelete, and starts them anew.
func (v *view) outdated(s State) finding {
	since, names := v.node.GPU.Spec.ChangeTime, v.readingOthers()
	if s != StateSelecting || len(names) == 0 || since.IsZero() || !v.world.Wiring.Ready {
		return finding{}
	}
	if left := since.Add(outdatedTimeout).Sub(v.world.Now); left > 0 {
		return finding{after: left}
	}
	restarts, after := v.restart("it still reads another ConfigMap than the operator's", readsOthers)
	return finding{
		reason: v1alpha1.ReasonDevicePluginOutdated, repair: restarts, after: after,
		message: fmt.Sprintf("these pods read another ConfigMap than the operator's, though the ClusterPolicy names that: %s; "+
			"they are being started anew; look at daemonsets.updateStrategy of the ClusterPolicy", list(names)),
	}
}

// restart deletes pods of NVIDIA's daemon sets on the node, so that they start anew. One that has been started lately is
// left alone: then that does not help.
func (v *view) restart(why string, which func(Pod) bool) (actions []Action, after time.Duration) {
	if !v.world.Wiring.ClusterPolicy {
		return nil, 0
	}
	for _, p := range v.node.Pods {
		if p.Terminating || p.Scheduled.IsZero() || p.Controller != "DaemonSet" || !which(p) {
			continue // one that has just been made is about to start
		}
		if left := p.Scheduled.Add(pluginRestart).Sub(v.world.Now); left > 0 {
			after = Sooner(after, left)
			continue
		}
		actions = append(actions, v.deletePod(p, why))
	}
	return actions, after
}

func (v *view) deletePod(p Pod, why string) DeletePod {
	return DeletePod{Node: v.node.Name, Namespace: p.Namespace, Pod: p.Name, UID: p.UID, Why: why}
}

// computeModeLeft finds GPUs that let only one process in, or none, though no MPS control daemon serves them: the daemon
// died, or somebody set it by hand.
func (v *view) computeModeLeft(s State) finding {
	if s != StateUpToDate {
		return finding{} // until then it is a step of the plan, or changes all the time
	}
	var ours, others []string
	for _, d := range v.have {
		if d.State.MIG || d.Virtual || d.State.MPS != nil || d.State.ComputeMode == gpu.ComputeDefault {
			continue
		}
		name := fmt.Sprintf("GPU %d (%s)", d.Index, d.State.ComputeMode)
		if v.wishesFor(d.UUID) {
			ours = append(ours, name)
		} else {
			others = append(others, name)
		}
	}
	f := finding{reason: v1alpha1.ReasonComputeModeLeft}
	switch {
	case len(ours) > 0:
		f.message = fmt.Sprintf("%s: not in the default compute mode, and no MPS control daemon serves it, so pods get \"busy or "+
			"unavailable\"; the agent sets it back once nobody uses the GPU", list(ours))
		if len(v.blockers) > 0 {
			f.message += ", now " + v.inTheWay()
		}
	case len(others) > 0:
		f.message = fmt.Sprintf("%s: not in the default compute mode, and no MPS control daemon serves it, so pods get \"busy or "+
			"unavailable\"; the policy does not select this GPU, so set it back by hand: nvidia-smi -i INDEX -c DEFAULT", list(others))
	default:
		return finding{}
	}
	return f
}

// wishesFor says whether the target says how a GPU shall be.
func (v *view) wishesFor(uuid string) bool {
	for _, d := range v.to.devices {
		if d.UUID == uuid {
			return true
		}
	}
	return false
}

// clock is a time of day as messages tell it.
func clock(at time.Time) string { return at.UTC().Format("15:04:05") + " UTC" }
