// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import "github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"

// What a GPU of a model is, and which models there are.
type (
	// Model names a GPU of the catalogue.
	Model = catalogue.Model
	// Spec is what does not change about a GPU of a model.
	Spec = catalogue.Spec
	// Profile is a MIG profile with all that NVML tells about it.
	Profile = catalogue.Profile
)

// The models that tests name most; Models lists all.
const (
	A100   = catalogue.A100
	A10080 = catalogue.A10080
	A30    = catalogue.A30
	H100   = catalogue.H100
	H200   = catalogue.H200
	B200   = catalogue.B200
	T4     = catalogue.T4
	V100   = catalogue.V100
	L40S   = catalogue.L40S
	GB10   = catalogue.GB10
	VGPU   = catalogue.VGPU
)

// Models lists the catalogue: GPUs with MIG in the order of the table, then those without.
func Models() []Model { return catalogue.Models() }

// SpecOf finds a model in the catalogue.
func SpecOf(m Model) (Spec, error) { return catalogue.SpecOf(m) }
