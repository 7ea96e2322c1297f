// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// A change that fails falls back. A release, the way back itself and what was reached before have nothing to fall back
// to. When a stage of theirs does not end in time, the operator removes its taint, resumes NVIDIA's programs and
// records that in the same write (v1alpha1.AnnotationTimedOut). Until the rest is over it takes neither again, whatever
// the stage.

// Timeout is the record that a change with nothing to fall back to did not end in time.
type Timeout struct {
	Reason string
	Times  int // in succession
	At     time.Time
}

// Until is when the operator may begin again.
func (t Timeout) Until() time.Time { return t.At.Add(timing.Backoff(t.Times)) }

// recordedTimeout returns that record; ok is false if the change of the node has not timed out since the agent was last
// asked for it, or needs nothing from the node any more. NVIDIA's mig-manager is not asked for the same config again,
// and a node that needs a reboot needs a person.
func recordedTimeout(v *View) (t Timeout, ok bool) {
	t, ok = lastTimeout(v)
	ok = ok && !v.Node.GPU.Spec.ChangeTime.After(t.At) && v.Disruptive() && !v.Managed() && !stranded(v)
	return t, ok
}

// releasesAgain reports whether the release of a node from which nothing had to be taken back is to be tried again:
// timing.Patience after the agent was asked for it, and only while nobody uses what must be changed.
func releasesAgain(v *View) bool {
	since := v.Node.GPU.Spec.ChangeTime
	if t, recorded := lastTimeout(v); recorded && !since.After(t.At) {
		return false
	}
	if v.Policy != nil || since.IsZero() || v.Snapshot.Now.Sub(since.Time) < timing.Patience {
		return false
	}
	return v.Disruptive() && len(v.Blockers) == 0 && !v.Managed() && !stranded(v)
}

// restsAfterTimeout reports whether the node is left to its users after a timeout. A release also waits until nobody
// uses what must be changed, and a node that only a reboot helps, which the operator may not make, waits for that.
func restsAfterTimeout(v *View) (t Timeout, is bool) {
	t, isTimedOut := recordedTimeout(v)
	_, reboot := waitsForReboot(v)
	return t, isTimedOut && (reboot || v.Snapshot.Now.Before(t.Until()) || v.Policy == nil && len(v.Blockers) > 0)
}

// nextTimeout is the value of v1alpha1.AnnotationTimedOut for a change that times out now.
func nextTimeout(v *View, reason string) string {
	last, _ := lastTimeout(v)
	return timing.Stamp(fmt.Sprintf("%s.%s.%d", reason, attempt(v), last.Times+1), v.Snapshot.Now)
}

// mostTimeouts is the highest count that is read: the rest is as long as it gets well before.
const mostTimeouts = 100

// lastTimeout reads the record. Kubelets may write the annotations of their Nodes, and the clock of the controller that
// wrote it may have been wrong: a record from the future is none.
func lastTimeout(v *View) (t Timeout, ok bool) {
	value, at, ok := timing.Parse(v.Node.Annotations[v1alpha1.AnnotationTimedOut])
	parts := strings.Split(value, ".")
	if !ok || len(parts) != 3 || parts[1] != attempt(v) || fromFuture(v, at) {
		return Timeout{}, false
	}
	times, err := strconv.Atoi(parts[2])
	return Timeout{Reason: parts[0], Times: min(times, mostTimeouts), At: at}, err == nil && times > 0
}

func fromFuture(v *View, at time.Time) bool {
	now := v.Snapshot.Now // zero where nothing may depend on it
	return !now.IsZero() && at.After(now.Add(timing.ClocksDiffer))
}

// attempt names one attempt at what is asked of the node.
func attempt(v *View) string {
	hash := ""
	if v.Desired != nil { // the baseline to which a release returns changes with NVIDIA's MPS daemon
		hash = v.Desired.Hash()
	}
	sum := sha256.Sum256([]byte(v.Attempt() + hash))
	return hex.EncodeToString(sum[:4])
}
