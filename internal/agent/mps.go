// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
)

// The most that the API has room for.
const (
	maxDaemons = 8
	maxMPSPods = 64
)

// mpsStatus is how the MPS control daemons of this operator are used, by resource.
func mpsStatus(serving []mps.Serving) []v1alpha1.MPSStatus {
	var daemons []v1alpha1.MPSStatus
	for _, s := range serving {
		if s.External {
			continue
		}
		daemon := v1alpha1.MPSStatus{
			ResourceName: s.Resource, User: s.Use.User,
			Clients: int32(len(s.Use.Clients)), OutdatedClients: int32(len(s.Use.Outdated)),
			OutdatedPodUIDs: s.Use.OutdatedPods[:min(len(s.Use.OutdatedPods), maxMPSPods)], Unreachable: s.Use.Unreachable,
		}
		for _, pod := range s.Use.Waiting() {
			if len(daemon.WaitingPods) < maxMPSPods {
				daemon.WaitingPods = append(daemon.WaitingPods, v1alpha1.MPSWaitingPod{UID: pod.UID, User: slices.Min(pod.Users)})
			}
		}
		daemons = append(daemons, daemon)
	}
	slices.SortFunc(daemons, func(a, b v1alpha1.MPSStatus) int { return cmp.Compare(a.ResourceName, b.ResourceName) })
	return daemons[:min(len(daemons), maxDaemons)]
}

// sameUse reports whether the same pods wait, run with former limits, or cannot reach the daemon. Clients that come and
// go are no change: that would be a reconcile for each.
func sameUse(a, b []v1alpha1.MPSStatus) bool {
	return slices.EqualFunc(a, b, func(a, b v1alpha1.MPSStatus) bool {
		return a.ResourceName == b.ResourceName && a.OutdatedClients == b.OutdatedClients && a.Unreachable == b.Unreachable &&
			slices.Equal(a.WaitingPods, b.WaitingPods)
	})
}
