// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package action

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

func (WriteConfigs) isAction() {}

func (TriggerSync) isAction() {}

func (PatchNode) isAction() {}

func (Taint) isAction() {}

func (Untaint) isAction() {}

func (KeepTaints) isAction() {}

func (Evict) isAction() {}

func (DeletePod) isAction() {}

func (KeepMPSOff) isAction() {}

func (AllowMPS) isAction() {}

func (TaintDevices) isAction() {}

func (UntaintDevices) isAction() {}

func (WriteClass) isAction() {}

func (DeleteClass) isAction() {}

func (SetSpec) isAction() {}

func (Report) isAction() {}

// NodeName is empty: all nodes read the ConfigMap.
func (WriteConfigs) NodeName() string { return "" }

// NodeName is the node of the pod.
func (a TriggerSync) NodeName() string { return a.Node }

// NodeName is the node.
func (a PatchNode) NodeName() string { return a.Node }

// NodeName is the node.
func (a Taint) NodeName() string { return a.Node }

// NodeName is the node.
func (a Untaint) NodeName() string { return a.Node }

// NodeName is the node.
func (a KeepTaints) NodeName() string { return a.Node }

// NodeName is the node of the pod.
func (a Evict) NodeName() string { return a.Node }

// NodeName is the node of the pod.
func (a DeletePod) NodeName() string { return a.Node }

// NodeName is the node.
func (a KeepMPSOff) NodeName() string { return a.Node }

// NodeName is the node.
func (a AllowMPS) NodeName() string { return a.Node }

// NodeName is the node.
func (a TaintDevices) NodeName() string { return a.Node }

// NodeName is the node.
func (a UntaintDevices) NodeName() string { return a.Node }

// NodeName is empty: a class serves all nodes.
func (WriteClass) NodeName() string { return "" }

// NodeName is empty: a class serves all nodes.
func (DeleteClass) NodeName() string { return "" }

// NodeName is the node.
func (a SetSpec) NodeName() string { return a.Node }

// NodeName is the node.
func (a Report) NodeName() string { return a.Node }

// For is nobody: it reports what is observed, whatever the policy asks for by now.
func (Report) For() PolicyRef { return PolicyRef{} }

// For is nobody: keys are written for all policies at once.
func (WriteConfigs) For() PolicyRef { return PolicyRef{} }

// For is nobody: a sync changes nothing that is visible.
func (TriggerSync) For() PolicyRef { return PolicyRef{} }

// For is the policy that governs the node.
func (a PatchNode) For() PolicyRef { return a.Policy }

// For is the policy that governs the node.
func (a Taint) For() PolicyRef { return a.Policy }

// For is nobody: a taint of ours is never kept for a policy's sake.
func (Untaint) For() PolicyRef { return PolicyRef{} }

// For is the policy that governs the node, if one does.
func (a KeepTaints) For() PolicyRef { return a.Policy }

// For is the policy that governs the node.
func (a Evict) For() PolicyRef { return a.Policy }

// For is nobody: it is what the GPUs of the node need, whatever a newer generation asks for.
func (DeletePod) For() PolicyRef { return PolicyRef{} }

// For is the policy that governs the node, if one does.
func (a KeepMPSOff) For() PolicyRef { return a.Policy }

// For is nobody: the node no longer needs it.
func (AllowMPS) For() PolicyRef { return PolicyRef{} }

// For is the policy that governs the node.
func (a TaintDevices) For() PolicyRef { return a.Policy }

// For is nobody: a rule of ours is never kept for a policy's sake.
func (UntaintDevices) For() PolicyRef { return PolicyRef{} }

// For is nobody: a class serves all policies at once.
func (WriteClass) For() PolicyRef { return PolicyRef{} }

// For is nobody: nothing needs the class any more.
func (DeleteClass) For() PolicyRef { return PolicyRef{} }

// For is the policy that governs the node.
func (a SetSpec) For() PolicyRef { return a.Policy }

func (a WriteConfigs) String() string {
	return "write keys " + format.List(slices.Sorted(maps.Keys(a.Data)))
}

func (a TriggerSync) String() string {
	return fmt.Sprintf("trigger a sync of pod %s/%s for %s", a.Namespace, a.Pod, a.Value)
}

func (a PatchNode) String() string {
	var parts []string
	for _, entries := range []map[string]*string{a.Labels, a.Annotations} {
		for _, name := range slices.Sorted(maps.Keys(entries)) {
			switch value := entries[name]; {
			case value == nil:
				parts = append(parts, name+"-")
			case name == v1alpha1.AnnotationBaseline: // long, and of no interest here
				parts = append(parts, name)
			default:
				parts = append(parts, name+"="+*value)
			}
		}
	}
	return fmt.Sprintf("patch node %s (%s): %s", a.Node, a.Why, strings.Join(parts, " "))
}

func (a Taint) String() string {
	return fmt.Sprintf("taint node %s with %s:%s", a.Node, a.Taint.Key, a.Taint.Effect)
}

func (a Untaint) String() string { return "remove our taint from node " + a.Node }

func (a KeepTaints) String() string {
	if len(a.Want) == 0 {
		return fmt.Sprintf("take the taints of policies off node %s", a.Node)
	}
	return fmt.Sprintf("keep on node %s the taints %s", a.Node, format.List(Names(a.Want)))
}

func (a Evict) String() string { return fmt.Sprintf("evict pod %s/%s: %s", a.Namespace, a.Pod, a.Why) }

func (a DeletePod) String() string {
	return fmt.Sprintf("delete pod %s/%s: %s", a.Namespace, a.Pod, a.Why)
}

func (a KeepMPSOff) String() string {
	return fmt.Sprintf("keep NVIDIA's MPS DaemonSet off node %s by NodeFeature %s", a.Node, OverrideName(a.Node))
}

func (a AllowMPS) String() string {
	return fmt.Sprintf("delete NodeFeature %s, which kept NVIDIA's MPS DaemonSet off node %s", OverrideName(a.Node), a.Node)
}

func (a TaintDevices) String() string {
	return fmt.Sprintf("write DeviceTaintRule %s, which keeps new pods off the GPUs of node %s", dra.TaintRuleName(a.Node), a.Node)
}

func (a UntaintDevices) String() string {
	return fmt.Sprintf("delete DeviceTaintRule %s, which kept new pods off the GPUs of node %s", dra.TaintRuleName(a.Node), a.Node)
}

func (a WriteClass) String() string {
	return fmt.Sprintf("write DeviceClass %s, by which pods get %s", a.Class.Name, a.Class.Resource)
}

func (a DeleteClass) String() string {
	return fmt.Sprintf("delete DeviceClass %s, which nothing needs any more", a.Name)
}

func (a SetSpec) String() string { return fmt.Sprintf("set spec of GPUNode %s: %s", a.Node, a.Why) }

func (a Report) String() string { return fmt.Sprintf("status of GPUNode %s: %s", a.Node, a.Why) }
