// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// persistence holds GPUs for the steps of a plan, by the driver's own persistence mode.
type persistence struct{ tools }

var _ plan.Persistence = persistence{}

// TurnOn implements plan.Persistence. It is recorded first, so that a crash leaves nothing on for ever.
func (p persistence) TurnOn(ctx context.Context, uuid string) error {
	if err := p.mps.RecordPersistence(uuid, mps.PersistenceHeld); err != nil {
		return err //nolint:wrapcheck // names the file
	}
	err := p.hardware.SetPersistence(ctx, uuid, true)
	if errors.Is(err, gpu.ErrNotSupported) || errors.Is(err, gpu.ErrPermission) {
		return p.mps.RecordPersistence(uuid, mps.PersistenceUnsupported) //nolint:wrapcheck // names the file
	}
	return err //nolint:wrapcheck // names the GPU
}

// Restore implements plan.Persistence.
func (p persistence) Restore(ctx context.Context, uuid string) error {
	now, err := p.mps.Persistence(uuid)
	if now == mps.PersistenceNotHeld || err != nil {
		return err //nolint:wrapcheck // names the file
	}
	if now == mps.PersistenceHeld {
		if err := p.hardware.SetPersistence(ctx, uuid, false); err != nil {
			return err //nolint:wrapcheck // names the GPU
		}
	}
	return p.mps.RecordPersistence(uuid, mps.PersistenceNotHeld) //nolint:wrapcheck // names the file
}

// restoreUnused releases the GPUs that no daemon serves or is to serve, before another program partitions them. What
// fails is tried again with the next reconcile.
func (p persistence) restoreUnused(ctx context.Context, desired []v1alpha1.DeviceSpec, devices []gpu.Device) {
	for _, d := range devices {
		awaits := func(spec v1alpha1.DeviceSpec) bool { return spec.UUID == d.UUID && spec.Sharing.MPS != nil }
		if d.State.MPS != nil || slices.ContainsFunc(desired, awaits) {
			continue
		}
		if err := p.Restore(ctx, d.UUID); err != nil {
			log(ctx).Error(err, "Turning persistence mode off again", "gpu", d.UUID)
		}
	}
}

// markUnsupported marks the GPUs of which it is known that persistence mode cannot be turned on.
func (o observer) markUnsupported(devices []gpu.Device) error {
	for i := range devices {
		d := &devices[i]
		if d.Persistence != gpu.PersistenceOff {
			continue
		}
		known, err := o.mps.Persistence(d.UUID)
		if err != nil {
			return err //nolint:wrapcheck // names the file
		}
		if known == mps.PersistenceUnsupported {
			d.Persistence = gpu.PersistenceUnsupported
		}
	}
	return nil
}

// fleeting are the GPUs that a daemon of the operator serves and whose compute mode no program keeps, in words.
func fleeting(devices []gpu.Device) []string {
	var names []string
	for _, d := range devices {
		if d.Persistence == gpu.PersistenceUnsupported && d.State.MPS != nil && !d.State.MPS.External {
			names = append(names, d.String())
		}
	}
	return names
}
