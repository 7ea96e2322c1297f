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
	config, err := nvidia.Parse(state.defaultConfig())
	if err != nil {
		d.crashed(state, err.Error())
		return false
	}
	state.mps = true
	if d.MountShm != nil {
		d.MountShm(ctx)
	}
	if config.Sharing.SharingStrategy() == spec.SharingStrategyMPS {
		d.Tell("NVIDIA's MPS daemon: serves what the default configuration says")
	} else {
		d.Tell("NVIDIA's MPS daemon: no devices are configured for MPS sharing; waiting indefinitely")
	}
	return true
}

// defaultConfig is the configuration of nodes without a label.
func (s *podState) defaultConfig() string {
	for _, v := range s.volumes {
		if content, found := v.data[s.env("DEFAULT_CONFIG")]; found {
			return content
		}
	}
	return ""
}
