// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// undecidedDeadline is how long the controller may go without a decision before every policy reports what it waits for.
// What it waits for usually comes within seconds.
const undecidedDeadline = time.Minute

// wait ends a reconcile that cannot decide, because of an error or because it waits for something that comes by itself:
// the cache to show the last write, or the objects of a kind that was installed just now. Either is reported once it
// takes too long.
func (c *Controller) wait(ctx context.Context, reason error, again time.Duration) (reconcile.Result, error) {
	now := c.Clock.Now()
	if c.undecided.IsZero() {
		c.undecided = now
	}
	err := c.reportUndecided(ctx, reason, now)
	if again == 0 {
		return reconcile.Result{}, errors.Join(reason, err)
	}
	log.FromContext(ctx).V(1).Info("Waiting before the next decision", "reason", reason.Error())
	return reconcile.Result{RequeueAfter: again}, err
}

func (c *Controller) reportUndecided(ctx context.Context, reason error, now time.Time) error {
	if now.Sub(c.undecided) < undecidedDeadline {
		return nil
	}
	s, err := c.gatherPolicies(ctx)
	if err != nil {
		return err
	}
	message := fmt.Sprintf("The controller decides nothing since %s: %s", c.undecided.UTC().Format(time.RFC3339), reason)
	return newReconciliation(c, s).report(ctx, rollout.Decision{Policies: rollout.Undecided(s.snapshot.Policies, message, now)})
}
