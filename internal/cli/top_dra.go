// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/dra"
	"github.com/gpusharing/gpu-sharing-operator/internal/usage"
)

// share adds to what was measured how often each GPU and instance is shared where NVIDIA's DRA driver serves it: the kubelet, which an agent
// asks, does not know. It returns what is not known, because the user may not read ResourceSlices.
func (o *driverObjects) share(nodes []measuredNode) (lacks []string) {
	pools, unknown := o.pools(), []string{}
	for i := range nodes {
		n := &nodes[i]
		for j := range n.report.Units {
			if n.report.Units[j].Replicas == 0 {
				shareUnit(&n.report.Units[j], pools[n.name])
			}
		}
		if slices.ContainsFunc(n.report.Units, func(u usage.Unit) bool { return u.Replicas == 0 && !u.Partitioned }) {
			unknown = append(unknown, n.name)
		}
	}
	if o.unread[kindSlice] && len(unknown) > 0 {
		lacks = append(lacks, fmt.Sprintf("You may not list ResourceSlices, so the shares of containers are not known on %s, if NVIDIA's DRA driver serves them. Ask an "+
			"administrator to bind the ClusterRole gpu-sharing-cli to you", nodesNamed(unknown)))
	}
	return lacks
}

// measureShared is measure, and adds what ResourceSlices tell.
func (a *agents) measureShared(ctx context.Context, now time.Time) (nodes []measuredNode, lacks []string, err error) {
	if nodes, err = a.measure(ctx, now); err != nil {
		return nil, nil, err
	}
	driver, err := readDRA(ctx, a.client)
	if err != nil {
		return nil, nil, err
	}
	return nodes, driver.share(nodes), nil
}

// shareUnit fills in how often the pool offers a GPU or an instance, and with that the shares of its containers.
func shareUnit(u *usage.Unit, pool *dra.Pool) {
	if pool == nil {
		return
	}
	for _, d := range pool.Devices {
		switch {
		case u.Instance == nil && d.UUID == u.GPU && d.Shares > 0:
			u.Replicas, u.Strategy = int(d.Shares), v1alpha1.StrategyExclusive
			if d.Shares > 1 {
				u.Strategy = v1alpha1.StrategyTimeSlicing
			}
		case u.Instance != nil && d.Parent == u.GPU && d.Profile == u.Profile:
			u.Replicas = 1 // a pod takes all of an instance
		}
	}
	if u.Replicas == 0 || u.Memory == nil {
		return
	}
	for i := range u.Containers {
		if c := &u.Containers[i]; c.ShareBytes == nil {
			c.ShareBytes = new(u.Memory.Total / int64(u.Replicas))
		}
	}
}
