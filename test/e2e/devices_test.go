// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// device is a file of NVIDIA's in the /dev of a user's pod.
type device struct {
	Path, Type   string
	Major, Minor uint32
	// Open is the error of opening it. ENXIO: no driver answers, as anywhere without a GPU. EPERM: the pod may not.
	Open string
}

// names are the paths of the device files below /dev.
func (g given) names() []string {
	var names []string
	for _, d := range g.Devices {
		names = append(names, d.Path)
	}
	return names
}

// uuids are the GPUs and MIG instances that a user's pod can open, by its device files and nothing else.
func (g given) uuids() []string {
	GinkgoHelper()
	node, err := gpus.Node()
	Expect(err).NotTo(HaveOccurred())
	var found []string
	for i, gpu := range node.GPUs {
		if !slices.Contains(g.names(), fmt.Sprintf("nvidia%d", i)) {
			continue
		}
		if !gpu.MIG {
			found = append(found, gpu.UUID)
		}
		for _, c := range computeInstances(i, gpu) {
			if slices.Contains(g.names(), capName(c.gpuInstance)) && slices.Contains(g.names(), capName(c.computeInstance)) {
				found = append(found, c.uuid)
			}
		}
	}
	return found
}

// uuid is the only one of uuids.
func (g given) uuid() string {
	GinkgoHelper()
	Expect(g.uuids()).To(HaveLen(1), "the pod has the device files %v", g.names())
	return g.uuids()[0]
}

// computeInstance is a MIG device with the minor numbers of its capabilities.
type computeInstance struct {
	uuid                         string
	gpuInstance, computeInstance int
}

func computeInstances(minor int, g sim.GPU) []computeInstance {
	var found []computeInstance
	for _, i := range g.Instances {
		for _, c := range i.Compute {
			found = append(found, computeInstance{c.UUID, simdriver.InstanceMinor(minor, i.ID), simdriver.ComputeMinor(minor, i.ID, c.ID)})
		}
	}
	return found
}

func capName(minor int) string { return fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor) }

// beExactly is met by a pod that has the device files of one GPU or MIG device and no others: name, type and number are
// those of the driver, and no driver answers behind them.
func beExactly(uuid string) types.GomegaMatcher {
	GinkgoHelper()
	node, err := gpus.Node()
	Expect(err).NotTo(HaveOccurred())
	want := driver.Controls()
	for i, gpu := range node.GPUs {
		if gpu.UUID == uuid {
			want = append(want, driver.GPU(i))
		}
		for _, c := range computeInstances(i, gpu) {
			if c.uuid == uuid {
				want = append(want, driver.GPU(i), driver.Cap(c.gpuInstance), driver.Cap(c.computeInstance))
			}
		}
	}
	var devices []device
	for _, d := range want {
		devices = append(devices, device{Path: d.Path, Type: "c", Major: d.Major, Minor: d.Minor, Open: "ENXIO"})
	}
	return WithTransform(func(g given) []device { return g.Devices }, ConsistOf(devices))
}
