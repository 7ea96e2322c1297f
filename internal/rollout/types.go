// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/group"
)

// Decision is one safe pass towards what the policies ask.
type Decision struct {
	// Actions are what is to be done now, in this order.
	Actions []action.Action
	// Policies is the status of each policy by name, complete and ready to be applied: conditions that did not change
	// keep their last transition time.
	Policies map[string]v1alpha1.GPUSharingPolicyStatus
	// Unmet tells of each policy the workloads of which no node meets the request once all policies are in force, a line each.
	Unmet map[string][]string
	// Nodes are the states of all nodes that a policy governs or governed, by name.
	Nodes []group.NodeState
	// ConfigurePlugin says that the device plugin has to read our ConfigMap: a policy governs some node and is not paused, or a node
	// is not back at its baseline. Once the ClusterPolicy names our ConfigMap, a policy that governs no node is enough. False: the
	// ClusterPolicy may be put back to what it was.
	ConfigurePlugin bool
	// Held is why devicePlugin.config of the ClusterPolicy must not change now, in either direction; empty if it may.
	Held string
	// KeepStrategy is true if a node that no policy changes has GPUs in MIG mode and no config of its own, so that the default
	// config must offer its instances as mig.strategy of the ClusterPolicy said.
	KeepStrategy bool
	// Tolerations are those in the ClusterPolicy that shall be ours: exactly these and no others.
	Tolerations []corev1.Toleration
	// ConfigureMIGManager says that NVIDIA's mig-manager has to read our ConfigMap: it partitions the GPUs of some node, or is to go back
	// to what it did there before.
	ConfigureMIGManager bool
	// After is when to decide again though nothing changes, because a deadline or the time of a nudge passes; 0: never.
	After time.Duration
}
