// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// What the change is about: a pod holds an instance of a node while the node's policy asks for another layout, in which
// that instance stays.
const (
	changedPolicy = "mig-a100"
	changedNode   = "gpu-a100"
	holder        = "test/demo/holder.yaml"
	pausedLayout  = `{"spec":{"rollout":{"paused":true},"sharing":{"mig":{"layouts":[{"instances":[` +
		`{"profile":"3g.20gb","count":1},{"profile":"1g.5gb","count":4}]}]}}}}`
	resume = `{"spec":{"rollout":{"paused":false}}}`
)

// changeLayout changes the layout of a node on which a pod runs: first looked at, then done.
func (d *demo) changeLayout(ctx, _ context.Context, _ *sync.WaitGroup) error {
	d.story.chapter("Another layout, while a pod holds an instance: looked at first, then done")
	if err := d.runKubectl(ctx, "apply", "-f", holder); err != nil {
		return err
	}
	var held string
	err := d.until(ctx, func() (yes bool, err error) {
		held, err = d.heldInstance(ctx)
		return held != "", err
	})
	if err != nil {
		return err
	}
	d.story.say(changedNode, "the pod holds %s", held)
	if err := d.preview(ctx); err != nil {
		return err
	}
	if err := d.runKubectl(ctx, "patch", "gsp", changedPolicy, "--type=merge", "-p", resume); err != nil {
		return err
	}
	if err := d.until(ctx, func() (bool, error) { return d.allReady(ctx) }); err != nil {
		return err
	}
	still, err := d.heldInstance(ctx)
	if err != nil {
		return err
	}
	if still != held {
		return fmt.Errorf("the pod held %s before the change and holds %q after it", held, still)
	}
	d.story.say(changedNode, "the pod still holds %s", still)
	return d.showKubectl(ctx, "gpusharing", "status", changedNode)
}

// preview asks for the layout with the rollout paused, and shows what would be done.
func (d *demo) preview(ctx context.Context) error {
	if err := d.runKubectl(ctx, "patch", "gsp", changedPolicy, "--type=merge", "-p", pausedLayout); err != nil {
		return err
	}
	policy := &v1alpha1.GPUSharingPolicy{}
	err := d.until(ctx, func() (bool, error) {
		if err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: changedPolicy}, policy); err != nil {
			return false, err
		}
		ready := meta.FindStatusCondition(policy.Status.Conditions, v1alpha1.ConditionReady)
		current := ready != nil && ready.ObservedGeneration == policy.Generation
		return current && len(policy.Status.Pending) > 0 && len(policy.Status.Pending[0].Plan) > 0, nil
	})
	if err != nil {
		return err
	}
	pending := policy.Status.Pending[0]
	d.story.show("\n         The policy's status says what would be done, and nothing is done:\n           " +
		strings.Join(pending.Plan, "\n           ") + "\n")
	return nil
}

// heldInstance is the instance that the pod holds, as the node's agent reports it; empty while it reports none.
func (d *demo) heldInstance(ctx context.Context) (string, error) {
	node := &v1alpha1.GPUNode{}
	if err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: changedNode}, node); err != nil {
		return "", fmt.Errorf("reading GPUNode %s: %w", changedNode, err)
	}
	for _, device := range node.Status.Devices {
		for _, h := range device.Holders {
			for _, i := range device.Instances {
				if h.Instance != nil && *h.Instance == i.ID {
					return fmt.Sprintf("instance %s at %d:%d of GPU %d (%s)", i.Profile, i.Start, i.Size, device.Index, i.UUID), nil
				}
			}
		}
	}
	return "", nil
}
