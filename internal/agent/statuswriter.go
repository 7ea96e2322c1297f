// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// ackDelay is how long the agent keeps the news to itself that it has seen a spec which changes nothing on the GPUs, while a report of
// the configuration is due, which then tells both: a write of a GPUNode costs the API server as much as a change of a few Pods.
const ackDelay = 3 * time.Second

// StatusWriter writes the part of the GPUNode's status that a Controller and a ConfigReporter report, each from its own goroutine. What
// an apply leaves out, it deletes, so it keeps the part of both; of a GPUNode that it has not written to, it takes what is there.
type StatusWriter struct {
	owner ssa.Owner
	mu    sync.Mutex
	of    types.UID // of the GPUNode
	part  v1alpha1.GPUNodeStatus
}

// NewStatusWriter makes a writer for the GPUNode of one node.
func NewStatusWriter(c client.Client) *StatusWriter {
	return &StatusWriter{owner: ssa.Owner{Client: c, Name: FieldManager}}
}

// change sets the part as it is to be reported, and reports it if that changes something. A GPUNode that is gone needs no report.
// Where it may wait, it waits for the report on the configuration if that is due and nothing but the generation of the spec is news.
func (w *StatusWriter) change(
	ctx context.Context, node *v1alpha1.GPUNode, mayWait bool, set func(v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus,
) (waits bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.of != node.UID {
		w.of, w.part = node.UID, agentPart(node.Status)
	}
	part := set(*w.part.DeepCopy())
	if mayWait && ackOnly(w.part, part) && configDue(node, part) {
		w.part = part
		return true, nil
	}
	configuration, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](part)
	if err != nil {
		return false, err
	}
	_, err = ssa.ApplyStatus(ctx, w.owner, node, ac.GPUNode(node.Name).WithStatus(configuration), ac.ExtractGPUNodeStatus)
	if err := client.IgnoreNotFound(err); err != nil {
		return false, fmt.Errorf("reporting: %w", err)
	}
	w.part = part
	return false, nil
}

// agentPart is what the writer reports in a status.
func agentPart(s v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus {
	part := *s.DeepCopy()
	part.Rollout, part.ObservedGeneration = v1alpha1.RolloutStatus{}, 0 // are the controller's
	part.MemoryPressure, part.MemoryEvictions = nil, nil                // are the MemoryGuard's and the controller's
	part.Demand = nil                                                   // is the controller's
	part.MemoryLimits = v1alpha1.MemoryLimitsStatus{}                   // is the MemoryLimiter's
	part.Conditions = own(part.Conditions)
	return part
}

// ackOnly reports whether two parts differ in nothing but the generation of the spec that was seen.
func ackOnly(was, is v1alpha1.GPUNodeStatus) bool {
	was, is = *was.DeepCopy(), *is.DeepCopy()
	for _, part := range []v1alpha1.GPUNodeStatus{was, is} {
		for i := range part.Conditions {
			part.Conditions[i].ObservedGeneration = 0
		}
	}
	return equality.Semantic.DeepEqual(was, is)
}

// configDue reports whether the configuration of a spec is still to be reported.
func configDue(node *v1alpha1.GPUNode, part v1alpha1.GPUNodeStatus) bool {
	return node.Spec.ConfigName != "" && (part.Config.Name != node.Spec.ConfigName || !part.Config.ChangeTime.Equal(&node.Spec.ChangeTime))
}
