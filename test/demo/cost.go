// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// cost is what changes cost since the demo asked last: for how long nodes were kept from new pods, as their taints say,
// and how many at once.
type cost struct {
	mu      sync.Mutex
	since   map[string]time.Time // by node that is kept from new pods now
	most    int                  // nodes at once
	longest time.Duration
}

// follow watches the nodes until the context ends.
func (c *cost) follow(ctx context.Context, s *site) {
	for ctx.Err() == nil {
		w, err := s.cluster.Client.Watch(ctx, &corev1.NodeList{})
		if err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			continue
		}
		for event := range w.ResultChan() {
			if n, is := event.Object.(*corev1.Node); is && event.Type != watch.Deleted {
				c.observe(n, time.Now())
			}
		}
	}
}

func (c *cost) observe(n *corev1.Node, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging })
	since, was := c.since[n.Name]
	switch {
	case kept && !was:
		c.since[n.Name] = now
		c.most = max(c.most, len(c.since))
	case !kept && was:
		c.longest = max(c.longest, now.Sub(since))
		delete(c.since, n.Name)
	}
}

// sum says what was observed since it was asked last, and begins anew.
func (c *cost) sum() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	most, longest := c.most, c.longest
	c.most, c.longest = len(c.since), 0
	if most == 0 {
		return "no node was kept from new pods"
	}
	return fmt.Sprintf("at most %s at once kept from new pods, for %.1f s at most", nodes(most), longest.Seconds())
}

// evictions is how many pods the API server was asked to evict since it started.
func (s *site) evictions(ctx context.Context) (int, error) {
	return env.Evictions(ctx, s.cluster.Config)
}

func nodes(n int) string {
	if n == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", n)
}
