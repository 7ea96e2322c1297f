// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// offering is the one of NVIDIA's programs that offers the GPUs of a node to pods: its device plugin, or its DRA driver
// where that alone does. Nobody else asks which one it is, only what it does.
type offering interface {
	// ReadsConfigs reports whether it reads a config of the operator's ConfigMap, which a label of the node selects.
	ReadsConfigs() bool
	// ByClaims reports whether pods get its devices by ResourceClaims alone, so that a taint of the devices keeps them off.
	ByClaims() bool
	// lacks says what is lacking for the target of the node; nil: nothing.
	lacks(*View) *plan.Problem
	// taint keeps new pods off the GPUs.
	taint(*View) []action.Action
	// stampSeen notes in a patch which GPUs and instances it has seen.
	stampSeen(*View, action.PatchNode)
	// gates wait until it offers the target; findings are what may be left half-done of it, what matters most last.
	gates() []gateFunc
	findings() []findingFunc
}

// offeringOf is what offers the GPUs of a node. Where both do, nothing is changed on the node.
func offeringOf(stack dra.Stack) offering {
	if stack == dra.DRADriver {
		return draDriver{}
	}
	return devicePlugin{}
}
