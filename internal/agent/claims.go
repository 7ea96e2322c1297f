// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"regexp"
	"slices"
	"strconv"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// draDriver is the driver of NVIDIA's that serves GPUs through ResourceClaims.
const draDriver = "gpu.nvidia.com"

// claimed are the devices that a container has from NVIDIA's DRA driver. A claim that the kubelet has not prepared yet
// gives it none: the container has not started, and the claim may be of another driver. What is allocated to it the
// controller reads in the claim.
func claimed(container *podresources.ContainerResources) []Allocation {
	var devices []Allocation
	for _, claim := range container.GetDynamicResources() {
		for _, resource := range claim.GetClaimResources() {
			if resource.GetDriverName() == draDriver {
				devices = append(devices, Allocation{
					Device: resource.GetDeviceName(), Claim: claim.GetClaimNamespace() + "/" + claim.GetClaimName(),
				})
			}
		}
	}
	return devices
}

// The names that NVIDIA's DRA driver gives devices (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin,
// CanonicalName): a GPU by the minor number of its device file, and an instance also by the driver's number of its
// profile and the memory slice at which it begins.
//
//	gpu-0  gpu-0-mig-1g5gb-19-4
var claimedDevice = regexp.MustCompile(`^gpu-(\d+)(?:-mig-.+-(\d+)-(\d+))?$`)

// claimedInstances are the instances of a GPU that a container holds by a device of NVIDIA's DRA driver. The driver
// gives an instance the name of one that was destroyed at the same place. That is no danger: an instance that a
// container holds is not destroyed. Where the name says nothing, or names what is not there, the GPU counts with all
// its instances.
func claimedInstances(d gpu.Device, name string) []int {
	parts := claimedDevice.FindStringSubmatch(name)
	if parts == nil || d.Minor < 0 {
		return everyInstance(d)
	}
	if parts[1] != strconv.Itoa(d.Minor) {
		return nil
	}
	for _, i := range d.State.Instances {
		if parts[2] == strconv.Itoa(profileID(d, i.Profile)) && parts[3] == strconv.Itoa(i.Placement.Start) {
			return []int{i.ID}
		}
	}
	return everyInstance(d)
}

// claimedUnit is the GPU or instance that a device of NVIDIA's DRA driver is. Unlike claimedInstances, which must not
// miss what is in use, it shows nothing where the name says nothing, or names what is not there.
func claimedUnit(d gpu.DeviceUse, name string) (instance int, holds bool) {
	parts := claimedDevice.FindStringSubmatch(name)
	if parts == nil || d.Minor < 0 || parts[1] != strconv.Itoa(d.Minor) {
		return 0, false
	}
	if parts[2] == "" {
		return gpu.WholeGPU, len(d.Instances) == 0
	}
	for _, i := range d.Instances {
		if parts[2] == strconv.Itoa(i.ProfileID) && parts[3] == strconv.Itoa(i.Start) {
			return i.ID, true
		}
	}
	return 0, false
}

// profileID is the driver's number of a profile; -1: unknown.
func profileID(d gpu.Device, name string) int {
	i := slices.IndexFunc(d.Profiles, func(p gpu.Profile) bool { return p.Name == name })
	if i < 0 {
		return -1
	}
	return d.Profiles[i].ID
}

// everyInstance are the instances of a GPU, and the whole.
func everyInstance(d gpu.Device) []int {
	all := []int{gpu.WholeGPU}
	for _, i := range d.State.Instances {
		all = append(all, i.ID)
	}
	return all
}
