// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// withholdRepeats leaves out what was written too often, or refused a moment ago, and reports that.
func withholdRepeats(m *member, s *cluster.Snapshot) {
	var kept []action.Action
	var held, refused action.Action
	var again time.Duration               // when the first held action may be carried out
	policyTaints, startup := false, false // of a held action: changes taints for a policy, and takes the startup taint off
	for _, a := range m.Actions {
		remaining := m.WithheldFor(a)
		isRefused := s.Repeats.Refusal(m.Restamped(a)) != ""
		if isRefused {
			refused = a
		}
		switch {
		case remaining == 0:
			kept = append(kept, a)
			continue
		case isRefused:
			m.After = timing.Sooner(m.After, remaining)
			continue
		}
		held, again = a, timing.Sooner(again, remaining)
		keep, keeps := a.(action.KeepTaints)
		policyTaints = policyTaints || keeps
		startup = startup || keeps && !slices.ContainsFunc(keep.Want, isStartupTaint)
	}
	switch {
	case held != nil:
		m.After = timing.Sooner(m.After, again)
		untilSlotExpires(m)
		m.Reason, m.Message = v1alpha1.ReasonChangedByOthers, heldMessage(m, s, held, format.Clock(s.Now.Add(again)))
		if _, deletes := held.(action.DeletePod); deletes { // the operator's own deletions are no other controller's doing
			m.Reason = v1alpha1.ReasonOperandsNotEnding
		}
	case refused != nil:
		m.Reason, m.Message = v1alpha1.ReasonWriteFailed, refusedMessage(m, s, refused)
	default:
		return
	}
	m.Actions, m.CachedState = kept, nil
	if policyTaints {
		reportTaintFight(m, startup)
	}
}

// refusedMessage tells of a write that the API server refuses. It is the same each time.
func refusedMessage(m *member, s *cluster.Snapshot, refused action.Action) string {
	const mostOf, most = 80, 60 // characters of a write, and of the answer to it
	return format.Beside(fmt.Sprintf("The API server refuses a write (%s): %s. It is tried again every minute; look for a webhook or admission policy",
		format.Cut(action.Unstamped(refused).String(), mostOf), format.End(s.Repeats.Refusal(m.Restamped(refused)), most)), m.Message)
}

// heldMessage tells of a write that waits until a time of day because it was made too often.
func heldMessage(m *member, s *cluster.Snapshot, held action.Action, until string) string {
	what := action.Unstamped(held)
	deletion, deletes := held.(action.DeletePod)
	_, rule := held.(action.TaintDevices)
	var message string
	switch {
	case s.Repeats.Returns(held):
		message = fmt.Sprintf("What the operator decides by changes back and forth, so it writes the same again and again (%s). It waits until %s. Find what "+
			"changes: kubectl events --for node/%s", what, until, m.Node.Name)
	case deletes:
		message = fmt.Sprintf("The operator deleted pod %s/%s again and again (%s), and it does not end or comes back as "+
			"it was. It is deleted again at %s. Look at its events and finalizers: kubectl describe pod -n %s %s", deletion.Namespace,
			deletion.Pod, deletion.Why, until, deletion.Namespace, deletion.Pod)
	case rule:
		message = fmt.Sprintf("Another controller deletes again and again what the operator writes (%s). The operator waits "+
			"until %s. The audit log of the API server names the other controller", what, until)
	default:
		message = fmt.Sprintf("Another controller undoes again and again what the operator writes (%s). The operator "+
			"waits until %s. Find the other controller: kubectl get node %s --show-managed-fields -o yaml", what, until, m.Node.Name)
	}
	return format.Beside(message, m.Message)
}

// reportTaintFight reports that taints of a policy are not written for now; startup: that the startup taint is not
// taken off.
func reportTaintFight(m *member, startup bool) {
	m.TaintStatus = taintStatus{m.Reason, m.Message}
	if machine, has := m.Node.Annotations[cluster.AnnotationMachine], startupTaintOn(m.View); machine != "" && has != nil && startup {
		m.Message = fmt.Sprintf("OpenShift sets the taint %s again and again, so no pod starts there. Remove it from "+
			"spec.template.spec.taints of the MachineSet of Machine %s, and from that Machine",
			action.NameOf(*has), machine)
		m.TaintStatus = taintStatus{v1alpha1.ReasonStartupTaintInMachineSet, m.Message}
	}
}
