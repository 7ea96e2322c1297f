// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"

	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"

	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// appMPS is NVIDIA's MPS DaemonSet, which the GPU Operator always renders.
const appMPS = "nvidia-device-plugin-mps-control-daemon"

// runMPS is a pod of NVIDIA's MPS DaemonSet. When it starts, its init container unmounts the shared memory of the
// node's MPS daemons and mounts a new one (cmd/mps-control-daemon/mount/mount-shm.go). Its config-manager links the
// default configuration, whatever the label of the node says, and its signal never reaches the daemon
// (cmd/config-manager, v0.18.2 to v0.20.0). So the daemon serves what the default configuration shares by MPS, else
// nothing.
func (d devicePlugin) runMPS(ctx context.Context, state *podState) bool {
	if state.mps {
		return true
	}
	if d.Clock.Now().Before(state.restart) {
		return false
	}
	if !state.shm && d.MountShm != nil {
		d.MountShm(ctx)
	}
	state.shm = true
	_, content, err := state.selectConfig("")
	var config *spec.Config
	if err == nil {
		config, err = nvidia.Parse(content)
	}
	if err != nil {
		d.crashed(state, err.Error())
		return false
	}
	state.mps = true
	if config.Sharing.SharingStrategy() == spec.SharingStrategyMPS {
		d.Tell("NVIDIA's MPS daemon: serves what the default configuration says")
	} else {
		d.Tell("NVIDIA's MPS daemon: no devices are configured for MPS sharing; waiting indefinitely")
	}
	return true
}
