// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"slices"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// group is the GPUs of which a reset has said that they must be reset together. Only a reset tells, so it is remembered
// until they were: a fabric manager may run before the next reset.
type group struct {
	mu  sync.Mutex
	pci []string // sorted
}

func (g *group) add(lists ...[]string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pci = append(g.pci, slices.Concat(lists...)...)
	slices.Sort(g.pci)
	g.pci = slices.Compact(g.pci)
}

func (g *group) forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pci = nil
}

// describe says of each GPU which others must be reset with it.
func (g *group) describe(devices []gpu.Device) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range devices {
		if !slices.Contains(g.pci, devices[i].PCIBusID) {
			continue
		}
		for _, other := range devices {
			if other.UUID != devices[i].UUID && slices.Contains(g.pci, other.PCIBusID) {
				devices[i].ResetPeers = append(devices[i].ResetPeers, other.UUID)
			}
		}
	}
}
