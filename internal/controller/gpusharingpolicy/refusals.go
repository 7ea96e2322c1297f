// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// refusals are why the API server refused to evict pods. They stand in the status as long as the controller asks again.
type refusals struct {
	mu    sync.Mutex
	byUID map[string]refusal
}

type refusal struct {
	node, message string
	at            time.Time // when it was refused last
}

// refusalLasts is how long a refusal counts. The controller asks again every askAgain.
const refusalLasts = time.Minute

// note remembers a refusal of a pod on a node, and reports whether it is another one than before.
func (r *refusals) note(uid, node, message string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byUID == nil {
		r.byUID = map[string]refusal{}
	}
	known := r.byUID[uid]
	r.byUID[uid] = refusal{node: node, message: message, at: now}
	return known.message != message
}

// prune forgets those that no longer count, and returns the nodes of their pods.
func (r *refusals) prune(now time.Time) (nodes []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, known := range r.byUID {
		if now.Sub(known.at) >= refusalLasts {
			delete(r.byUID, uid)
			nodes = append(nodes, known.node)
		}
	}
	return nodes
}

// remaining is when the next of them no longer counts; 0: there is none.
func (r *refusals) remaining(now time.Time) (after time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, known := range r.byUID {
		after = timing.Sooner(after, max(known.at.Add(refusalLasts).Sub(now), time.Second))
	}
	return after
}

func (r *refusals) of(uid string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byUID[uid].message
}

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
