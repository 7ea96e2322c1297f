// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The driver has one number of shares for all GPUs of all nodes, since its chart has one DaemonSet. To change it
// restarts the driver on every node at once, so that is the administrator's: the operator says what to set, and
// compares.

// RequestedShares is how many claims must be able to share a GPU, by the policies that ask for whole GPUs on nodes of
// the driver.
type RequestedShares map[int64][]string

// Add notes that a policy asks for so many shares.
func (a RequestedShares) Add(shares int64, policy string) {
	if !slices.Contains(a[shares], policy) {
		a[shares] = append(a[shares], policy)
		slices.Sort(a[shares])
	}
}

// String names what is asked for, so that two values can be compared.
func (a RequestedShares) String() string {
	var parts []string
	for _, shares := range slices.Sorted(maps.Keys(a)) {
		parts = append(parts, fmt.Sprintf("%d: %s", shares, strings.Join(a[shares], ", ")))
	}
	return strings.Join(parts, "; ")
}

// SharesProblem says what to set so that a GPU of a node has the shares that the policy wants, and which other policies
// on nodes of the driver want another number; nil if the pool shows that number, or nothing yet.
func SharesProblem(p *Pool, want int64, policy string, requested RequestedShares) *plan.Problem {
	have, known := p.Shares()
	if !known || have == want {
		return nil
	}
	is := fmt.Sprintf("%d shares", have)
	switch have {
	case 0:
		is = "no number of shares (consumableShares is unlimited or memory)"
	case 1:
		is = "no shares"
	}
	message := fmt.Sprintf("NVIDIA's DRA driver publishes %s for each GPU, and policy %s needs %s. ", is, policy, wanted(want))
	if others := against(requested, want); len(others) > 0 {
		return &plan.Problem{
			Reason: v1alpha1.ReasonDRASharesDiffer,
			Message: message + fmt.Sprintf("The driver has one number for all nodes, and %s. Give all of them the same replicas, or leave the nodes of "+
				"the driver out of all but one", format.List(others)),
		}
	}
	return &plan.Problem{Reason: v1alpha1.ReasonDRASharesDiffer, Message: message + remedy(have, want)}
}

func wanted(shares int64) string {
	if shares == 1 {
		return "whole GPUs"
	}
	return fmt.Sprintf("%d shares", shares)
}

// against are the policies that ask for another number.
func against(requested RequestedShares, want int64) []string {
	var others []string
	for _, shares := range slices.Sorted(maps.Keys(requested)) {
		if shares == want {
			continue
		}
		for _, policy := range requested[shares] {
			others = append(others, fmt.Sprintf("policy %s needs %s", policy, wanted(shares)))
		}
	}
	return others
}

// Values names the values of the driver's chart that give each GPU so many shares, more than one.
func Values(shares int64) string {
	return fmt.Sprintf("featureGates.ConsumableShares=true and consumableShares=%d in its chart", shares)
}

// remedy is the value to set, and in which order. A pod that holds a whole GPU keeps it, and one more that gets a GPU
// of which shares are in use hangs, so switching off needs idle GPUs (device_state.go of the driver).
func remedy(have, want int64) string {
	if want == 1 {
		return "First drain the pods that use its GPUs, or others hang. Then set consumableShares=disabled (docs/dra.md)"
	}
	values := "Set " + Values(want) + " (a GPUCluster: docs/dra.md)"
	if have > want {
		return values + ". Running pods keep their shares"
	}
	return values + ". No running pod is restarted"
}
