// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// draDevice is a device in the ResourceSlices of NVIDIA's DRA driver.
type draDevice struct {
	// UUID is that of the GPU or MIG device, and Profile that of a MIG device.
	UUID, Profile string
	// Shares is how many claims may have it at a time. Zero: the driver publishes no number, and it is one.
	Shares int64
}

// published are the devices of the node in the ResourceSlices of NVIDIA's DRA driver, by name. It is an error if the
// slices are not complete.
func published(ctx context.Context) (map[string]draDevice, error) {
	list := &resourcev1.ResourceSliceList{}
	if err := kube.List(ctx, list); err != nil {
		return nil, fmt.Errorf("listing ResourceSlices: %w", err)
	}
	found, count, of := map[string]draDevice{}, int64(0), int64(0)
	for _, s := range list.Items {
		if s.Spec.Driver != draDriver || s.Spec.Pool.Name != nodeName {
			continue
		}
		count, of = count+1, s.Spec.Pool.ResourceSliceCount
		for _, d := range s.Spec.Devices {
			found[d.Name] = draDevice{UUID: text(d, "uuid"), Profile: text(d, "profile"), Shares: shares(d)}
		}
	}
	if count != of {
		return nil, fmt.Errorf("pool %s has %d of %d slices", nodeName, count, of)
	}
	return found, nil
}

func text(d resourcev1.Device, attribute resourcev1.QualifiedName) string {
	if value := d.Attributes[attribute].StringValue; value != nil {
		return *value
	}
	return ""
}

func shares(d resourcev1.Device) int64 {
	capacity := d.Capacity["shares"]
	return capacity.Value.Value()
}

// devicesOfDriver are the devices that NVIDIA's DRA driver must publish for the GPUs as they are now, each in so many
// shares: MIG devices, and GPUs that are not in MIG mode.
func devicesOfDriver(count int64) map[string]draDevice {
	GinkgoHelper()
	n, err := gpus.Node()
	Expect(err).NotTo(HaveOccurred())
	found := map[string]draDevice{}
	for _, d := range nvidia.Devices(n.Observe().Devices, count) {
		found[d.Name] = draDevice{UUID: d.UUID, Profile: d.Profile, Shares: d.Shares}
	}
	return found
}

// allocated are the devices that users' pods have by their claims, by the pod's name.
func allocated(ctx context.Context) (map[string][]string, error) {
	claims := &resourcev1.ResourceClaimList{}
	if err := kube.List(ctx, claims, client.InNamespace(users)); err != nil {
		return nil, fmt.Errorf("listing ResourceClaims: %w", err)
	}
	found := map[string][]string{}
	for _, claim := range claims.Items {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, pod := range claim.Status.ReservedFor {
			for _, result := range claim.Status.Allocation.Devices.Results {
				found[pod.Name] = append(found[pod.Name], result.Device)
			}
			slices.Sort(found[pod.Name])
		}
	}
	return found, nil
}

// allocatedUUID is the UUID that is published for the one device of a user's pod.
func allocatedUUID(ctx context.Context, pod string) string {
	GinkgoHelper()
	devices, err := allocated(ctx)
	Expect(err).NotTo(HaveOccurred())
	Expect(devices[pod]).To(HaveLen(1))
	all, err := published(ctx)
	Expect(err).NotTo(HaveOccurred())
	return all[devices[pod][0]].UUID
}

// migClass is a DeviceClass by which pods ask for instances of a profile under the name that the device plugin has for
// them.
func migClass(name, profile string) *resourcev1.DeviceClass {
	return &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.DeviceClassSpec{
			ExtendedResourceName: new(string(resourceOf(profile))),
			Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: fmt.Sprintf(
				"device.driver == '%[1]s' && device.attributes['%[1]s'].type == 'mig' && device.attributes['%[1]s'].profile == '%[2]s'", draDriver, profile)}}},
		},
	}
}
