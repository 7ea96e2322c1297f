// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

// labelMPSCapable keeps a pod of NVIDIA's MPS daemon set on a node. GPU Feature Discovery sets it, as the configuration
// that the node selects says, or a person does.
const labelMPSCapable = "nvidia.com/mps.capable"

// Beside a stand-alone device plugin no label of ours ends NVIDIA's MPS daemon. It ends, or serves with other limits, when
// its pod starts anew under another configuration. So there the configuration is selected first, once the GPUs are
// drained, and then the pod is deleted.

// endsLater says whether a GPU lacks nothing but that NVIDIA's MPS daemon ends or starts anew.
func (v *view) endsLater(d gpu.Device, want v1alpha1.DeviceSharing) bool {
	is := plan.Observed(d)
	if v.world.Wiring.ClusterPolicy || is.MPS == nil || is.MPS.Owner != v1alpha1.MPSDaemonOwnerNVIDIA {
		return false
	}
	is.MPS, want.MPS = nil, nil
	return plan.Same(want, is)
}

// lingers says whether NVIDIA's MPS daemon still serves a GPU that the target shares otherwise.
func (v *view) lingers() bool {
	return slices.ContainsFunc(v.have, func(d gpu.Device) bool {
		return slices.ContainsFunc(v.to.devices, func(want v1alpha1.DeviceSpec) bool {
			return want.UUID == d.UUID && v.endsLater(d, want.Sharing) && !plan.Same(want.Sharing, plan.Observed(d))
		})
	})
}

// leaveMPS deletes the pods of NVIDIA's MPS daemon set that have to read what is being selected. Its GPUs are drained.
func (v *view) leaveMPS() []Action {
	if v.world.Wiring.ClusterPolicy || len(v.leavesNVIDIA()) == 0 {
		return nil
	}
	return v.deleteMPS(v.world.Now)
}

// restartMPS does so after the configuration was selected, where a daemon is still there that has to be gone.
func (v *view) restartMPS() []Action {
	if !v.lingers() {
		return nil
	}
	return v.deleteMPS(v.selectedAt())
}

// deleteMPS deletes the pods of NVIDIA's MPS daemon set that started no later than that.
func (v *view) deleteMPS(latest time.Time) []Action {
	var actions []Action
	for _, p := range v.node.Pods {
		if p.NodeSelector[labelMPSCapable] != "" && !p.Terminating && !p.Scheduled.After(latest) {
			actions = append(actions, v.deletePod(p, "NVIDIA's MPS daemon reads its configuration when it starts, and never again"))
		}
	}
	return actions
}

// awaitsNVIDIA is what a node whose configuration is selected may still lack.
func (v *view) awaitsNVIDIA() string {
	if v.lingers() {
		return "NVIDIA's MPS daemon still serves the GPUs as before; it ends with its pod, which the node's label " +
			labelMPSCapable + " keeps there"
	}
	return "NVIDIA's MPS daemon does not serve the GPUs"
}
