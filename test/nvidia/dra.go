// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
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

// Serves reports whether the scheduler can give a device to one more claim for an extended resource, beside so many
// that have it. The first claim for an instance has all its capacity.
func Serves(d dra.Device, resource string, used int64) bool {
	if d.Type == "gpu" {
		return resource == resourceGPU && used < max(d.Shares, 1)
	}
	return d.Type == "mig" && resource == resourceMIG(d.Profile) && used == 0
}

// Prepare says why the driver refuses to prepare a device for one more claim; nil: it does not. It shares a GPU that it
// has shares of, and a claim for administrators holds nothing (cmd/gpu-kubelet-plugin/device_state.go, v0.5.0). There
// are the devices as they are now, and users the other claims for which this one is prepared.
func Prepare(name string, admin bool, there []dra.Device, users int64) error {
	at := slices.IndexFunc(there, func(d dra.Device) bool { return d.Name == name })
	switch {
	case at < 0:
		return fmt.Errorf("device %s does not exist", name)
	case admin && there[at].Type != "gpu":
		return errors.New("requests admin access on a non-full-GPU device, which is not supported")
	case !admin && users >= max(there[at].Shares, 1):
		return fmt.Errorf("requested device %s is already allocated to different claim", name)
	}
	return nil
}

// Classes are those by which the scheduler serves extended resources
// (k8s.io/dynamic-resource-allocation v0.37.1, deviceclass/extendedresourcecache).
type Classes map[string]dra.Class

// Set hears of a class that is new or was changed. Of two with the same resource the newer one serves it
// (updateResourceName2class).
func (c Classes) Set(was *dra.Class, class dra.Class) {
	used, taken := c[class.Resource]
	if taken && cmp.Or(cmp.Compare(class.Age, used.Age), cmp.Compare(used.Name, class.Name)) <= 0 {
		return
	}
	if was != nil {
		delete(c, was.Resource)
	}
	if class.Resource != "" {
		c[class.Resource] = class
	}
}

// Drop hears that a class is gone, and forgets its resource, whichever class serves that (removeResourceName2class).
func (c Classes) Drop(class dra.Class) { delete(c, class.Resource) }
