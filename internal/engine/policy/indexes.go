// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// The driver counts the GPUs that it finds, so when one dies the indexes of those behind it shift. A policy that names
// indexes must not move on to GPUs that it never selected. So the indexes are resolved once for each node and policy,
// and the UUIDs are kept (GPUNode.spec.numbering) until the policy names other indexes. A GPU that takes the place of a
// missing one, in a node that is complete again, takes its index too.

// none is the index of a GPU that no policy can name by index.
const none = -1

// indexesOf lists the indexes that a policy names, each once.
func indexesOf(p *v1alpha1.GPUSharingPolicy) []int32 {
	var all []int32
	add := func(m *v1alpha1.GPUMatch) {
		if m != nil {
			all = append(all, m.Indexes...)
		}
	}
	add(p.Spec.GPUSelector)
	if p.Spec.Sharing.MIG != nil {
		for i := range p.Spec.Sharing.MIG.Layouts {
			add(p.Spec.Sharing.MIG.Layouts[i].GPUs)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// numbered returns the UUIDs by index as they were resolved for the policy; nil if they were not.
func (n Node) numbered(p *v1alpha1.GPUSharingPolicy) []string {
	if n.Numbering == nil || n.Policy != p.Name || !slices.Equal(n.Numbering.Indexes, indexesOf(p)) {
		return nil
	}
	return n.Numbering.UUIDs
}

// devices returns the GPUs of the node with the indexes by which the policy names them.
func (n Node) devices(p *v1alpha1.GPUSharingPolicy) []gpu.Device {
	devices, kept := plan.Devices(n.Devices), n.numbered(p)
	if kept == nil {
		return devices
	}
	there := func(uuid string) bool {
		return slices.ContainsFunc(n.Devices, func(d v1alpha1.DeviceStatus) bool { return d.UUID == uuid })
	}
	for i := range devices {
		d := &devices[i]
		at := slices.Index(kept, d.UUID)
		switch {
		case at >= 0:
			d.Index = at
		case len(devices) < len(kept), d.Index < len(kept) && there(kept[d.Index]):
			d.Index = none
		}
	}
	return devices
}

// Number returns what to keep of the indexes of a node under a policy; nil if the policy names none.
func Number(p *v1alpha1.GPUSharingPolicy, n Node) *v1alpha1.Numbering {
	indexes := indexesOf(p)
	if len(indexes) == 0 || len(n.Devices) == 0 {
		return nil
	}
	uuids := slices.Clone(n.numbered(p))
	devices := n.devices(p)
	slices.SortFunc(devices, func(a, b gpu.Device) int { return a.Index - b.Index })
	for _, d := range devices {
		switch {
		case d.Index == none:
		case d.Index < len(uuids):
			uuids[d.Index] = d.UUID
		default:
			uuids = append(uuids, d.UUID)
		}
	}
	return &v1alpha1.Numbering{Indexes: indexes, UUIDs: uuids}
}

// Missing names the GPUs that the policy selects by index and that the node no longer has, each with its index.
func Missing(p *v1alpha1.GPUSharingPolicy, n Node) []string {
	if p.Spec.GPUSelector == nil || len(n.Devices) == 0 {
		return nil
	}
	var missing []string
	devices := n.devices(p)
	for i, uuid := range n.numbered(p) {
		taken := slices.ContainsFunc(devices, func(d gpu.Device) bool { return d.Index == i })
		if !taken && slices.Contains(p.Spec.GPUSelector.Indexes, int32(i)) {
			missing = append(missing, fmt.Sprintf("GPU %d (%s)", i, uuid))
		}
	}
	return missing
}
