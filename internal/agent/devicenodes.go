// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// DeviceNodes are the device nodes of MIG instances, which pods need, and which no kernel makes.
type DeviceNodes interface {
	// Ensure makes those that are missing. It changes nothing if none is.
	Ensure(ctx context.Context) error
}

// ensureDeviceNodes keeps the device nodes of the instances that the spec asks for. The controller brings NVIDIA's
// device plugin back only when they are there. NVIDIA's mig-manager makes those of its own instances.
func (c *Controller) ensureDeviceNodes(ctx context.Context, spec v1alpha1.GPUNodeSpec) error {
	partitions := slices.ContainsFunc(spec.Devices, func(d v1alpha1.DeviceSpec) bool { return len(d.Sharing.Instances) > 0 })
	if c.nodes == nil || !partitions || spec.MIGActuator == v1alpha1.MIGActuatorMIGManager {
		return nil
	}
	return c.nodes.Ensure(ctx)
}
