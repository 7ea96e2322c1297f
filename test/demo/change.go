// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

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
	d.narration.say("The pod holds %s.", held)
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
	d.narration.say("%s offers %s, and the pod holds the same instance as before.", changedNode, now)
	return d.sayCost(ctx, began)
}
