// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const (
	failing = "test/demo/failing-layout.yaml"
	// agentsTime is how long an agent has for a change before the node goes back, and left what the demo leaves of it:
	// enough for the agent to say once more why it fails.
	agentsTime = 15 * time.Minute
	remaining  = 2 * time.Second
)

// failLayout asks for a layout that one GPU does not take: its node goes back by itself, and no other is touched.
func (d *demo) failLayout(ctx, _ context.Context, _ *sync.WaitGroup) error {
	d.narration.chapter("A change that fails on one node")
	before, err := d.advertisedBy(ctx, changedNode, otherNode)
	if err != nil {
		return err
	}
	m := d.machineOf(changedNode)
	if err := m.breakGPU(ctx, 1); err != nil {
		return err
	}
	d.narration.say("From now on the driver of GPU 1 of %s refuses to destroy instances: a fault that the demo injects.", changedNode)
	if err := d.runKubectl(ctx, "apply", "-f", failing); err != nil {
		return err
	}
	if err := until(ctx, func() (bool, error) { return d.stepFailed(ctx) }); err != nil {
		return err
	}
	if err := d.dateBack(ctx); err != nil {
		return err
	}
	var pending []v1alpha1.PendingNode
	err = until(ctx, func() (bool, error) {
		pending, err = d.pending(ctx)
		return err == nil && rolledBack(pending), err
	})
	if err != nil {
		return err
	}
	var now string
	err = until(ctx, func() (bool, error) { // the device plugin has been started anew, and the kubelet tells so a moment later
		now, err = d.advertisedBy(ctx, changedNode, otherNode)
		return now == before, err
	})
	if err != nil {
		return fmt.Errorf("%w: the nodes advertised %s before the layout that failed, and %s after it", err, before, now)
	}
	d.narration.say("Both nodes offer what they offered before. The policy's status says why:")
	for _, n := range pending {
		d.narration.show(fmt.Sprintf("  %s  %s (%s): %s", n.NodeName, n.State, n.Reason, n.Message))
	}
	return m.driver.ClearFaults()
}

// rolledBack reports whether the first node is back at its last good state, and the other was not begun.
func rolledBack(pending []v1alpha1.PendingNode) bool {
	return len(pending) == 2 && pending[0].State == string(node.Failed) && pending[1].Reason == v1alpha1.ReasonRolloutHalted &&
		strings.Contains(pending[0].Message, "rolled back")
}

// breakGPU lets the driver refuse to destroy instances of a GPU.
func (m *machine) breakGPU(ctx context.Context, index int) error {
	inventory, err := m.inventory(ctx)
	if err != nil {
		return err
	}
	return m.driver.AddFault(simdriver.Fault{
		Call: "nvmlComputeInstanceDestroy", GPU: inventory.Devices[index].UUID, Return: sim.Unknown,
	})
}

// dateBack lets the time of the agent be over soon. The agent goes on trying meanwhile, and the demo does not wait for
// it. It writes as the controller, since nobody else may write the spec.
func (d *demo) dateBack(ctx context.Context) error {
	controller, err := d.cluster.ClientAs(ctx, env.Identity{Namespace: ours, ServiceAccount: "gpu-sharing-controller"})
	if err != nil {
		return fmt.Errorf("writing as the controller: %w", err)
	}
	node := &v1alpha1.GPUNode{}
	if err := controller.Get(ctx, client.ObjectKey{Name: changedNode}, node); err != nil {
		return fmt.Errorf("reading GPUNode %s: %w", changedNode, err)
	}
	base := node.DeepCopy()
	node.Spec.ChangeTime = metav1.NewTime(time.Now().Add(remaining - agentsTime))
	if err := controller.Patch(ctx, node, client.MergeFrom(base)); err != nil {
		return fmt.Errorf("dating the change of %s back: %w", changedNode, err)
	}
	d.narration.say("The agent reports StepFailed and tries again for %.0f minutes. The demo dates the change back; a controller lets nothing fail in its first %.0f minutes.",
		agentsTime.Minutes(), timing.Grace.Minutes())
	return nil
}

// What the change is about: a pod holds an instance of a node while the node's policy asks for another layout, in which
// that instance stays.
const (
	changedPolicy = "mig-a100"
	changedNode   = "gpu-a100"
	otherNode     = "gpu-a100-b" // which the same policy governs
	holder        = "test/demo/holder.yaml"
	layout        = "test/demo/layout.yaml"
)

// changeLayout changes the layout of a node on which a pod runs: first looked at, then done.
func (d *demo) changeLayout(ctx, _ context.Context, _ *sync.WaitGroup) error {
	d.narration.chapter("Another MIG layout, while a pod holds an instance: looked at first, then done")
	if err := d.runKubectl(ctx, "apply", "-f", holder); err != nil {
		return err
	}
	var held string
	err := until(ctx, func() (yes bool, err error) {
		held, err = d.heldInstance(ctx)
		return held != "", err
	})
	if err != nil {
		return err
	}
	d.narration.say("The pod holds %s on %s.", held, changedNode)
	if err := d.showKubectl(ctx, ends, "gpusharing", "plan", "-f", layout); err != nil {
		return err
	}
	began := time.Now()
	if err := d.runKubectl(ctx, "apply", "-f", layout); err != nil {
		return err
	}
	if err := until(ctx, func() (bool, error) { return d.allReady(ctx) }); err != nil {
		return err
	}
	still, err := d.heldInstance(ctx)
	if err != nil {
		return err
	}
	if still != held {
		return fmt.Errorf("the pod held %s before the change and holds %q after it", held, still)
	}
	now, err := d.advertises(ctx, changedNode)
	if err != nil {
		return err
	}
	return d.sayCost(ctx, began, fmt.Sprintf("%s offers %s, and the pod holds the same instance as before", changedNode, now))
}
