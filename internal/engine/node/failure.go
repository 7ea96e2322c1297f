// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// A change that fails is recorded, and the node rolled back to its last good state or, without one, to its baseline; what
// has nothing to fall back to rests (docs/dev/contracts.md#deadlines).
//
//	failChange ─ a fallback: recordFailure → FallbackTarget → afterFailure ─ retry → AttemptID
//	           └ none, on a node that is unavailable: RecordTimeout → resting
//
//	record                written by                                ends
//	status.rollout.failed recordFailure: failChange with a          another desired state or attempt: another generation
//	                      fallback; drain.go without one            of the policy or retry by annotation (recordedFailure)
//	AnnotationTimedOut    RecordTimeout: nothing to fall back to;   its time is over, twice as long each time
//	                      EndTurn: the window has closed;           (Timeout.Until), or another attempt (timeoutAttemptID)
//	                      EndInterrupted: interrupted too long
//	AnnotationInterrupted maintenance, users, a lost agent          the agent has answered again (continueInterrupted)

// failChange gives a desired state up: the node falls back. The last good state is not given up but waited for.
func failChange(v *View, r Result, reason, message string) Result {
	if _, is := UnderMaintenance(v); is || WasInterrupted(v) {
		r.Message = message
		return r // it is not the desired state that failed
	}
	r.State, r.Reason, r.Message = Failed, reason, message
	actions, _ := SplitAct(r.Next)
	switch {
	case hasFallback(v):
		actions = append(actions, recordFailure(v, reason, message)...)
	case v.MadeUnavailable():
		actions = append(actions, RecordTimeout(v, reason, "the change did not end in time")...)
	case v.Desired == nil && canRequestAgain(v):
		if again := v.Node.GPU.Spec.ChangeTime.Add(timing.Patience); again.After(v.Snapshot.Now) {
			r.After = again.Sub(v.Snapshot.Now)
			r.Message += fmt.Sprintf("; the operator tries again at %s if nobody uses the GPUs then", format.Clock(again))
		}
	}
	r.Next = atOnce(actions...)
	return r
}

// hasFallback reports whether the node falls back when the change fails. A release, a node that falls back already and
// one that reached its target before do not: they are waited for, and hold nobody up.
func hasFallback(v *View) bool { return v.Desired != nil && !v.FallsBack && !v.TargetIsLastGood() }

// recordFailure records that the desired state failed, and withdraws the permission to reboot the node for it.
func recordFailure(v *View, reason, message string) []action.Action {
	const most = 1024 // of the schema, in characters
	failed := &v1alpha1.FailedChange{
		Hash: v.DesiredHash(), Reason: reason, Message: format.Cut(message, most), Attempt: v.AttemptID(), Time: metav1.NewTime(v.Snapshot.Now.Truncate(time.Second)),
	}
	status := v1alpha1.GPUNodeStatus{Rollout: v1alpha1.RolloutStatus{LastGood: v.Node.GPU.Status.Rollout.LastGood, Failed: failed}}
	actions := []action.Action{action.Report{Node: v.Node.Name, Status: status, Policy: v.Ref(), Why: "recording that the change failed"}}
	if spec := *v.Node.GPU.Spec.DeepCopy(); withdrawRebootPermission(v, &spec) {
		actions = append(actions, v.setSpec(spec, "withdrawing the permission to reboot the node"))
	}
	return actions
}

// recordedFailure is the record that what is asked failed on this node; nil if it has not, or is to be tried again.
func recordedFailure(v *View) *v1alpha1.FailedChange {
	f := v.Node.GPU.Status.Rollout.Failed
	if f == nil || f.Hash != v.DesiredHash() || f.Attempt != v.AttemptID() || FailureSuperseded(v, *f) {
		return nil
	}
	if f.Reason == v1alpha1.ReasonRebootRequired && mayReboot(v) {
		return nil // what was missing is there
	}
	return f
}

// FailureSuperseded reports whether the agent was asked once more for what failed.
func FailureSuperseded(v *View, f v1alpha1.FailedChange) bool {
	spec := v.Node.GPU.Spec
	return policy.Hash(spec.ConfigName, spec.Devices) == f.Hash && spec.ChangeTime.After(f.Time.Time)
}

// AttemptID tells one attempt at the desired state from the next: another generation of the policy, or another value of
// v1alpha1.AnnotationRetry.
func (v *View) AttemptID() string {
	ref, uid := v.Ref(), types.UID("")
	if v.Policy != nil {
		uid = v.Policy.UID
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d/%s", uid, ref.Generation, v.Node.GPU.Annotations[v1alpha1.AnnotationRetry]))
	return hex.EncodeToString(sum[:8])
}

// afterFailure reports why the change failed, while the node is on its way back, or waits to become idle after all.
func afterFailure(v *View, f v1alpha1.FailedChange, r Result) Result {
	r.Rollback = r.State
	switch {
	case !v.FallsBack && len(v.Blockers) == 0:
		return r // it did not become idle in time, but now it is
	case !v.FallsBack:
		r.Next = atOnce(RestoreScheduling(v, "it did not become idle in time")...)
		r.Message = afterDrainTimedOut(v, f.Message)
	case r.State == UpToDate:
		r.Message = rolledBack(v, f.Message)
	default:
		r.Message = fmt.Sprintf("the node goes back to its last good state (%s: %s); it failed: %s", r.State, r.Message, f.Message)
	}
	r.State, r.Reason = Failed, f.Reason
	return r
}

// afterDrainTimedOut says who blocks a change whose time for draining is over, or why one of them was not evicted.
func afterDrainTimedOut(v *View, failed string) string {
	first, stay, _ := strings.Cut(failed, "; ")
	what, _, _ := strings.Cut(first, ": ") // who was there then may be gone
	if slices.ContainsFunc(v.Blockers, func(b plan.Blocker) bool { return strings.Contains(stay, blockerName(v, b)+" ") }) {
		return what + "; tried again once the node is idle; " + stay
	}
	return what + ", now " + describeBlockers(v) + "; tried again once the node is idle, or by " + retryAdvice(v)
}

// rolledBack says that a change failed and, as far as a message has room beside why and what to do about that, how it is
// tried again.
func rolledBack(v *View, failed string) string {
	if said := format.Beside(failed, "rolled back: edit the policy, or "+retryAdvice(v)); said != failed {
		return said
	}
	return format.Beside(failed, "rolled back; retry by "+v1alpha1.AnnotationRetry)
}

// retryAdvice is the command that has a failed node tried again.
func retryAdvice(v *View) string {
	return fmt.Sprintf("kubectl annotate gpunode %s --overwrite %s=$(date +%%s)", v.Node.Name, v1alpha1.AnnotationRetry)
}

// FallbackTarget is where a node goes when the desired state failed: to its last good state, else to its baseline. GPUs
// that the last good state does not list, since they were deselected or have come later, go to their baseline.
func FallbackTarget(by string, n *v1alpha1.GPUNode, have []gpu.Device) Target {
	if good := lastGood(n); good != nil {
		before := withoutNVIDIAMPS(restorable(n, have)) // its configuration does not ask for that daemon
		devices := plan.WithFormer(withoutLost(good.Devices, have), before)
		for _, d := range before {
			if !cluster.Lists(devices, d.UUID) {
				devices = append(devices, d)
			}
		}
		return Target{Policy: by, Strategy: good.Strategy, Config: good.ConfigName, Devices: devices}
	}
	t := baselineTarget(n, have)
	t.Policy, t.ReleasesNode, t.Labels = by, false, nil
	return t
}

// A change that fails falls back. A release, the way back itself and what was reached before have nothing to fall back
// to. When a stage of theirs does not end in time, the operator removes its taint, starts NVIDIA's programs again and
// records that in the same write (v1alpha1.AnnotationTimedOut). Until the rest is over it takes neither again, whatever
// the stage.

// Timeout is the record that a change with nothing to fall back to did not end in time.
type Timeout struct {
	Reason string
	Times  int // in succession; 0: it has only been interrupted, or has had its turn in a window
	At     time.Time
}

// Until is when the operator may begin again.
func (t Timeout) Until() time.Time { return t.At.Add(timing.Backoff(t.Times)) }

// LastTurn is when the node last took pods again before its change was done; zero if it was not.
func LastTurn(v *View) time.Time {
	t, _ := lastTimeout(v)
	return t.At
}

// RecordTimeout is RestoreScheduling for a change that did not end in time and has nothing to fall back to, with a
// record of that.
func RecordTimeout(v *View, reason, why string) []action.Action {
	if !canRequestAgain(v) {
		return RestoreScheduling(v, why)
	}
	last, _ := lastTimeout(v)
	return restoreAndRecord(v, Timeout{Reason: reason, Times: last.Times + 1}, why)
}

// EndTurn is RestoreScheduling for a change that ends with its maintenance window. The record has the nodes come first
// in the next window that had no turn in this one. The change has not timed out.
func EndTurn(v *View) []action.Action {
	last, _ := lastTimeout(v)
	return restoreAndRecord(v, Timeout{Reason: v1alpha1.ReasonOutsideWindow, Times: last.Times}, "its maintenance window has closed")
}

// EndInterrupted is RestoreScheduling for a change that was interrupted for too long, by maintenance or because the
// agent was lost. It goes on as soon as that is over, but not at once if that has happened before.
func EndInterrupted(v *View, why string) []action.Action {
	t, again := lastTimeout(v)
	if again {
		t.Times++
	}
	return restoreAndRecord(v, Timeout{Reason: v1alpha1.ReasonApplyTimedOut, Times: t.Times}, why)
}

// restoreAndRecord is RestoreScheduling with a record, in the write that starts NVIDIA's programs again. That comes first: a
// node without our taint and without the record would be tainted again at once.
func restoreAndRecord(v *View, t Timeout, why string) []action.Action {
	patch, _ := startOperands(v, why)
	record := timing.Stamp(fmt.Sprintf("%s.%s.%d", t.Reason, timeoutAttemptID(v), t.Times), v.Snapshot.Now)
	patch.Annotations[v1alpha1.AnnotationTimedOut] = &record
	return append([]action.Action{patch}, removeTaints(v)...)
}

// recordedTimeout returns that record; ok is false if the change of the node has not timed out since the agent was last
// asked for it, or needs nothing from the node any more. An agent that comes back before the rest is over is asked what
// is there, and does not end it. NVIDIA's mig-manager is not asked for the same config again, and a node that needs a
// reboot needs a person.
func recordedTimeout(v *View) (t Timeout, ok bool) {
	t, ok = lastTimeout(v)
	goesOn := v.Node.GPU.Spec.ChangeTime.After(t.At) && !v.Snapshot.Now.Before(t.Until())
	ok = ok && t.Times > 0 && t.Reason != v1alpha1.ReasonOutsideWindow && !goesOn && v.ChangeIsDisruptive() && canRequestAgain(v) && !needsManualReboot(v)
	return t, ok
}

// releasesAgain reports whether the release of a node is to be tried again, and only while nobody uses what must be
// changed: at once after an interruption and, where nothing had to be taken back, timing.Patience after the agent was
// asked for it.
func releasesAgain(v *View) bool {
	since := v.Node.GPU.Spec.ChangeTime
	t, recorded := lastTimeout(v)
	recorded = recorded && !since.After(t.At)
	if v.Policy != nil || since.IsZero() || recorded && t.Times > 0 || !recorded && v.Snapshot.Now.Sub(since.Time) < timing.Patience {
		return false
	}
	return v.ChangeIsDisruptive() && len(v.Blockers) == 0 && canRequestAgain(v) && !needsManualReboot(v)
}

// releaseFailed reports whether the release of the node failed, and its scheduling was restored. There is no other
// state to go back to. To drain it once more at once, and to stop NVIDIA's operands, would disturb the node again and
// again.
func releaseFailed(v *View) bool {
	if v.Policy != nil || v.Taint() != nil || !v.ChangeIsDisruptive() {
		return false
	}
	if len(v.Blockers) > 0 && v.DrainMode() == v1alpha1.DrainModeNever {
		return false // it is left to those who use it, and neither drained nor stopped
	}
	remaining, _, limited := timeRemaining(v)
	_, _, stalled := v.ApplyStalled()
	return stalled || limited && remaining <= 0
}

// restsAfterTimeout reports whether the node is left to its users after a timeout. A release also waits until nobody
// uses what must be changed, and a node that only a reboot helps, which the operator may not make, waits for that.
func restsAfterTimeout(v *View) (t Timeout, is bool) {
	t, isTimedOut := recordedTimeout(v)
	_, reboot := whyNotRebooted(v)
	return t, isTimedOut && (reboot || v.Snapshot.Now.Before(t.Until()) || v.Policy == nil && len(v.Blockers) > 0)
}

// resting leaves a node to its users for a while, because a change with nothing to fall back to did not end in time.
func resting(v *View, t Timeout) Result {
	r := Result{State: Failed, Reason: t.Reason}
	r.Next = atOnce(RestoreScheduling(v, "the change did not end in time")...)
	r.Message = "The change did not end in time"
	if pods := podsNotEnding(v); len(pods) > 0 {
		r.Message += "; pods of NVIDIA's do not end: " + format.List(pods)
	}
	if _, reboot := whyNotRebooted(v); reboot {
		r.Message = agentMessage(v, r.Message) + ". A GPU takes its MIG mode only at a reboot. Reboot the node"
		return r
	}
	remaining := t.Until().Sub(v.Snapshot.Now)
	if r.After = max(remaining, 0); remaining <= 0 {
		r.Message = agentMessage(v, r.Message+"; the operator tries again when nobody uses what must be changed: "+describeBlockers(v))
		return r
	}
	r.Message += fmt.Sprintf("; the operator tries again at %s", format.Clock(t.Until()))
	if v.Policy == nil {
		r.Message += " if nobody uses the GPUs then"
	}
	r.Message = agentMessage(v, r.Message)
	return r
}

// mostTimeouts is the highest count that is read: the rest is as long as it gets well before.
const mostTimeouts = 100

// lastTimeout reads the record. Kubelets may write the annotations of their Nodes, and the clock of the controller that
// wrote it may have been wrong: a record from the future is none.
func lastTimeout(v *View) (t Timeout, ok bool) {
	value, at, ok := timing.Parse(v.Node.Annotations[v1alpha1.AnnotationTimedOut])
	parts := strings.Split(value, ".")
	if !ok || len(parts) != 3 || parts[1] != timeoutAttemptID(v) || fromFuture(v, at) {
		return Timeout{}, false
	}
	times, err := strconv.Atoi(parts[2])
	return Timeout{Reason: parts[0], Times: min(times, mostTimeouts), At: at}, err == nil && times >= 0
}

func fromFuture(v *View, at time.Time) bool {
	now := v.Snapshot.Now // zero where nothing may depend on it
	return !now.IsZero() && at.After(now.Add(timing.ClocksDiffer))
}

// latestOf is the latest of moments, some of which the clock of the node told, without those in the future.
func latestOf(v *View, moments ...time.Time) (latest time.Time) {
	for _, at := range moments {
		if !fromFuture(v, at) {
			latest = timing.Latest(latest, at)
		}
	}
	return latest
}

// timeoutAttemptID names one attempt at what is asked of the node.
func timeoutAttemptID(v *View) string {
	hash := ""
	if v.Desired != nil { // the baseline to which a release returns changes with NVIDIA's MPS daemon
		hash = v.Desired.Hash()
	}
	sum := sha256.Sum256([]byte(v.AttemptID() + hash))
	return hex.EncodeToString(sum[:4])
}
