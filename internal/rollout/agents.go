// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"

// The agent has the driver open, so it runs where v1alpha1.LabelClient is true: k8s-driver-manager and mig-manager pause that
// label and wait until the pods that select it are gone. The GPU Operator sets it since v26.7. On other nodes we do, once in
// an hour at most, and never change another value.

const (
	labelOperands = deployPrefix + "operands" // false: no deploy label stays on the node
	labelPresent  = nvidiaDomain + "gpu.present"
	// clientSet begins the value of v1alpha1.AnnotationClient.
	clientSet = "true"
)

// allowAgent sets the label that the agent's DaemonSet selects where it is absent.
func (m *member) allowAgent() {
	labels := m.node.Labels
	if labels[v1alpha1.LabelClient] != "" || labels[labelOperands] == "false" || labels[labelPresent] == "false" {
		return
	}
	if at, did := stamped(m.node.Annotations[v1alpha1.AnnotationClient], clientSet); did && m.world.Now.Sub(at) < patience {
		m.after = Sooner(m.after, at.Add(patience).Sub(m.world.Now)) // another controller removed it
		return
	}
	patch := PatchNode{
		Node: m.node.Name, Why: "allowing the agent on the node",
		Labels:      map[string]*string{v1alpha1.LabelClient: new("true")},
		Annotations: map[string]*string{v1alpha1.AnnotationClient: new(stamp(clientSet, m.world.Now))},
	}
	m.actions = append(m.actions, patch)
}

// takeBackAgent lets the agent return where NVIDIA's mig-manager, which we asked, has paused it and given up.
func (v *view) takeBackAgent() []Action {
	if !v.managed() || v.managerBusy() {
		return nil
	}
	patch := v.patch("allowing the agent on the node again, which NVIDIA's mig-manager left paused")
	patch.Labels[v1alpha1.LabelClient] = new("true")
	patch.Locked = true
	return []Action{patch}
}
