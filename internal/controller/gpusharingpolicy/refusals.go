// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"sync"
	"time"

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
