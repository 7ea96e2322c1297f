// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// withheldFor is how long an action on a node has to wait, because it was repeated too often.
func withheldFor(m *member, a action.Action) time.Duration {
	return m.Snapshot.Repeats.Left(restamped(m.Node, a), m.Node.Created, m.Snapshot.Now)
}

func restamped(n *cluster.Node, a action.Action) action.Action {
	return action.Restamped(a, n.Labels, n.Annotations, n.GPU.Spec)
}

// withholdRepeats leaves out what was written too often, and reports that.
func withholdRepeats(m *member, s *cluster.Snapshot) {
	var kept []action.Action
	var held action.Action
	var again time.Duration               // when the first held action may be carried out
	policyTaints, startup := false, false // of a held action: changes taints for a policy, and takes the startup taint off
	for _, a := range m.Actions {
		left := withheldFor(m, a)
		if left == 0 {
			kept = append(kept, a)
			continue
		}
		held, again = a, timing.Sooner(again, left)
		keep, keeps := a.(action.KeepTaints)
		policyTaints = policyTaints || keeps
		startup = startup || keeps && !slices.ContainsFunc(keep.Want, isStartupTaint)
	}
	if held == nil {
		return
	}
	m.After = timing.Sooner(m.After, again)
	m.Actions, m.Reason, m.CachedState = kept, v1alpha1.ReasonChangedByOthers, nil
	m.Message = strings.TrimSuffix(fmt.Sprintf("Another controller undoes again and again what the operator writes (%s). The operator "+
		"waits until %s. Find the other controller: kubectl get node %s --show-managed-fields -o yaml; %s",
		action.Unstamped(held), format.Clock(s.Now.Add(again)), m.Node.Name, m.Message), "; ")
	if _, rule := held.(action.TaintDevices); rule {
		m.Message = strings.TrimSuffix(fmt.Sprintf("Another controller deletes or refuses again and again what the operator writes (%s). The operator waits "+
			"until %s. Look for an admission webhook or policy that refuses it: the log of the operator's controller has the error; %s",
			action.Unstamped(held), format.Clock(s.Now.Add(again)), m.Message), "; ")
	}
	if deletion, is := held.(action.DeletePod); is { // the operator's own deletions are no other controller's doing
		m.Reason = v1alpha1.ReasonClientsNotEnding
		m.Message = strings.TrimSuffix(fmt.Sprintf("The operator deleted pod %s/%s again and again (%s), and it does not end or comes back as "+
			"it was. It is deleted again at %s. Look at its events and finalizers: kubectl describe pod -n %s %s; %s", deletion.Namespace,
			deletion.Pod, deletion.Why, format.Clock(s.Now.Add(again)), deletion.Namespace, deletion.Pod, m.Message), "; ")
	}
	if !policyTaints {
		return
	}
	m.TaintStatus.Reason, m.TaintStatus.Message = m.Reason, m.Message
	if machine, has := m.Node.Annotations[cluster.AnnotationMachine], startupTaintOn(m.View); machine != "" && has != nil && startup {
		m.TaintStatus.Reason = v1alpha1.ReasonStartupTaintInMachineSet
		m.TaintStatus.Message = fmt.Sprintf("OpenShift puts the taint %s back again and again, so no pod starts there. Remove it from "+
			"spec.template.spec.taints of the MachineSet of Machine %s, and from spec.taints of that Machine. The operator itself adds a startup taint to new nodes",
			action.NameOf(*has), machine)
		m.Message = m.TaintStatus.Message
	}
}
