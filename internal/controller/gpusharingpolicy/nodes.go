// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
)

// writeFor is after how long a reconcile begins with no further node. What it leaves the next reconcile decides anew,
// from what has become of the nodes and policies meanwhile.
const writeFor = 5 * time.Second

// executeOnNodes carries out the actions on nodes: those of one node in their order, and some nodes at the same time.
// It takes the nodes in the order of the actions.
func (r *reconciliation) executeOnNodes(ctx context.Context, actions []action.Action) error {
	nodes := byNode(actions)
	next := make(chan []action.Action)
	errs := make([]error, max(r.Writers, 1))
	var writers sync.WaitGroup
	for i := range errs {
		writers.Go(func() {
			for todo := range next {
				for _, a := range todo {
					errs[i] = errors.Join(errs[i], r.carryOut(ctx, a))
				}
			}
		})
	}
	begun := r.Clock.Now()
	for _, todo := range nodes {
		if r.Clock.Since(begun) > writeFor {
			r.unfinished = true
			break
		}
		next <- todo
	}
	close(next)
	writers.Wait()
	r.recorder.announceTogether()
	return errors.Join(errs...)
}

// byNode are the actions of each node, nodes in the order in which they come. Keys come before all nodes, and are not
// among them.
func byNode(actions []action.Action) [][]action.Action {
	var nodes [][]action.Action
	at := map[string]int{}
	for _, a := range actions {
		if _, isKeys := a.(action.WriteConfigs); isKeys {
			continue
		}
		i, found := at[a.NodeName()]
		if !found {
			i, at[a.NodeName()] = len(nodes), len(nodes)
			nodes = append(nodes, nil)
		}
		nodes[i] = append(nodes[i], a)
	}
	return nodes
}
