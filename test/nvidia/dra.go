// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import (
	"fmt"
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// SlicesOutlive is how long the kubelet keeps the ResourceSlices of a DRA driver that is gone.
const SlicesOutlive = 30 * time.Second

// DeviceClass is the driver's for devices of a type, gpu or mig, without the name of an extended resource.
func DeviceClass(device string) *resourcev1.DeviceClass {
	return &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: device + ".nvidia.com"},
		Spec: resourcev1.DeviceClassSpec{Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == '%s'", device),
		}}}},
	}
}

// Devices are the GPUs and instances as NVIDIA's DRA driver publishes them, each with so many shares, though nothing
// shares an instance. A GPU in MIG mode is none. Measured with v0.5.0.
func Devices(gpus []gpu.Device, shares int64) []dra.Device {
	var devices []dra.Device
	for _, d := range gpus {
		if !d.State.MIG {
			devices = append(devices, dra.Device{Name: DeviceName(d, gpu.Instance{ID: gpu.WholeGPU}), Type: "gpu", UUID: d.UUID, Shares: shares})
			continue
		}
		for _, i := range d.State.Instances {
			if !i.Partial {
				devices = append(devices, dra.Device{Name: DeviceName(d, i), Type: "mig", UUID: i.UUID, Profile: i.Profile, Parent: d.UUID, Shares: shares})
			}
		}
	}
	return devices
}

// DeviceName is the name that the driver gives an instance, or the GPU where the ID is gpu.WholeGPU: it tells where it
// is, and is used again.
func DeviceName(d gpu.Device, i gpu.Instance) string {
	if i.ID == gpu.WholeGPU {
		return fmt.Sprintf("gpu-%d", d.Minor)
	}
	id := -1
	for _, p := range d.Profiles {
		if p.Name == i.Profile {
			id = p.ID
		}
	}
	profile := strings.ToLower(strings.NewReplacer(".", "", "+", "-").Replace(i.Profile))
	return fmt.Sprintf("gpu-%d-mig-%s-%d-%d", d.Minor, profile, id, i.Placement.Start)
}
