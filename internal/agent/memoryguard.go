// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"

	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/memoryguard"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// guardFieldManager owns status.memoryPressure, which is reported apart from the rest: it comes from samples, not from
// reconciles.
const guardFieldManager = FieldManager + "-guard"

// MemoryGuard measures the GPUs of a node whose policy has a memory guard, and reports those that are almost full while
// a container uses more than its share. It evicts nothing: the controller decides that. On a node without a guard it
// measures nothing.
type MemoryGuard struct {
	node    string
	owner   ssa.Owner
	client  client.Client
	measure func(context.Context) (usage.Report, error)
	clock   clock.PassiveClock
	watch   memoryguard.Watch
}

// NewMemoryGuard makes the guard of a node, of what measure measures.
func NewMemoryGuard(node string, c client.Client, measure func(context.Context) (usage.Report, error), now clock.PassiveClock) *MemoryGuard {
	return &MemoryGuard{
		node: node, client: c, owner: ssa.Owner{Client: c, Name: guardFieldManager}, measure: measure, clock: now, watch: memoryguard.Watch{},
	}
}

// Name is the name in logs and metrics.
func (*MemoryGuard) Name() string { return "agent-memory-guard" }

// Register adds the guard to a manager. A new spec wakes it.
func (m *MemoryGuard) Register(mgr ctrl.Manager) error {
	err := onNode(mgr, m.Name(), m.node, controller.Options{ReconciliationTimeout: sampleTimeout + reportTimeout}).
		Complete(reconcile.AsReconciler(m.client, m))
	if err != nil {
		return fmt.Errorf("registering the agent's memory guard: %w", err)
	}
	return nil
}

// Reconcile takes a sample, if the node has a guard, and reports what has changed.
func (m *MemoryGuard) Reconcile(ctx context.Context, node *v1alpha1.GPUNode) (reconcile.Result, error) {
	if !node.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil
	}
	spec := node.Spec.Memory
	if !spec.Guarded() {
		m.watch = memoryguard.Watch{}
		return reconcile.Result{}, m.report(ctx, node, nil)
	}
	measured, err := m.measure(ctx)
	if err != nil {
		log(ctx).V(1).Info("Not all GPUs could be measured", "reason", err.Error()) // those that could not are not known
	}
	now := m.clock.Now()
	var found []v1alpha1.MemoryPressure
	m.watch, found = m.watch.Next(*spec, measured.Units, now)
	return reconcile.Result{RequeueAfter: m.watch.Interval()}, m.report(ctx, node, memoryguard.Kept(*spec, node.Status.MemoryPressure, found, now))
}

// report writes which GPUs are under pressure, if that changed. A node that is gone needs none.
func (m *MemoryGuard) report(ctx context.Context, node *v1alpha1.GPUNode, pressure []v1alpha1.MemoryPressure) error {
	if len(pressure) == 0 && len(node.Status.MemoryPressure) == 0 {
		return nil // an apply without any field would be one more write
	}
	want := ac.GPUNode(node.Name)
	if len(pressure) > 0 {
		status, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](v1alpha1.GPUNodeStatus{MemoryPressure: pressure})
		if err != nil {
			return err
		}
		want.WithStatus(status)
	}
	_, err := ssa.ApplyStatus(ctx, m.owner, node, want, ac.ExtractGPUNodeStatus)
	if err := client.IgnoreNotFound(err); err != nil {
		return fmt.Errorf("reporting the memory pressure: %w", err)
	}
	return nil
}
