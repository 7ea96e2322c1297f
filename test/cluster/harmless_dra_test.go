// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"strings"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

const drivenLabel = "test.example/dra"

// driven installs NVIDIA's DRA driver, for every other cluster; sometimes with shares, and with classes of a person's for instances.
func (s *run) driven() {
	s.t.Helper()
	if s.drives = history.Maybe(s.random); !s.drives {
		return
	}
	set, class := nodesim.NewDRADriver(draSpace, map[string]string{drivenLabel: "true"})
	shares := history.Pick(s.random, "", "", "2", "4")
	set.Spec.Template.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "CONSUMABLE_SHARES", Value: shares}}
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: draSpace}}
	s.Expect(client.IgnoreAlreadyExists(s.client.Create(s.t.Context(), space))).To(Succeed())
	objects := []client.Object{set, class}
	if history.Maybe(s.random) {
		objects = append(objects, &resourcev1.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: "small"},
			Spec: resourcev1.DeviceClassSpec{ExtendedResourceName: new("nvidia.com/mig-1g.5gb"), Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
				Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].profile == '1g.5gb'",
			}}}},
		})
	}
	for _, o := range objects {
		s.Expect(s.client.Create(s.t.Context(), o)).To(Succeed())
	}
	scheduler := nodesim.DRAScheduler{Client: s.sim}
	s.background(func(ctx context.Context) { scheduler.Run(ctx, 200*time.Millisecond) })
	s.tell("NVIDIA's DRA driver, shares %q, %d classes", shares, len(objects)-1)
}

// orDriven are the labels of a node, which may become one of NVIDIA's DRA driver.
func (s *run) orDriven(labels map[string]string) map[string]string {
	if s.drives && s.random.IntN(3) > 0 {
		labels[drivenLabel], labels["nvidia.com/gpu.deploy.device-plugin"] = "true", "false"
	}
	return labels
}

// isDriven reports whether NVIDIA's DRA driver serves the node.
func (p *place) isDriven() bool { return p.labels[drivenLabel] != "" }

// published are the devices that the slices of a node show.
func (s *run) published(p *place) (devices []resourcev1.Device) {
	s.t.Helper()
	list := &resourcev1.ResourceSliceList{}
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	for _, slice := range list.Items {
		if *slice.Spec.NodeName == p.name {
			devices = append(devices, slice.Spec.Devices...)
		}
	}
	return devices
}

// offers is what pods can get of the GPUs of a node, by resource.
func (s *run) offers(p *place) map[string]int64 {
	s.t.Helper()
	offers := offered(s.node(p.name))
	if !p.isDriven() {
		return offers
	}
	for _, d := range s.published(p) {
		resource, count := plan.ResourceGPU, int64(1)
		if profile := d.Attributes["profile"].StringValue; profile != nil {
			resource = plan.ResourceOf(*profile)
		}
		if shares, has := d.Capacity["shares"]; has {
			count = shares.Value.Value()
		}
		offers[resource] += count
	}
	return offers
}

// sharesGPUs reports whether several claims can have a GPU of the node.
func (s *run) sharesGPUs(p *place) bool {
	s.t.Helper()
	for _, d := range s.published(p) {
		if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
			return true
		}
	}
	return false
}

// schedules binds a pod to its node with a claim: one for its resource or, of whole GPUs, sometimes one that it names.
func (s *run) schedules(pod *corev1.Pod) (why string) {
	s.t.Helper()
	scheduler, node := nodesim.DRAScheduler{Client: s.sim}, pod.Spec.NodeName
	pod.Spec.NodeName = ""
	_, whole := pod.Spec.Containers[0].Resources.Limits[plan.ResourceGPU]
	var err error
	switch {
	case len(pod.Spec.ResourceClaims) == 0 && (!whole || s.random.IntN(3) > 0):
		why, err = scheduler.Schedule(s.t.Context(), pod, node)
	default:
		claim := &resourcev1.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: "of-" + pod.Name},
			Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
				Name: "device", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"},
			}}}},
		}
		if err := s.client.Create(s.t.Context(), claim); client.IgnoreAlreadyExists(err) != nil {
			s.Expect(err).NotTo(HaveOccurred())
		}
		s.Expect(s.client.Get(s.t.Context(), client.ObjectKeyFromObject(claim), claim)).To(Succeed())
		pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "device"}}}
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "device", ResourceClaimName: &claim.Name}}
		why, err = scheduler.ScheduleByClaim(s.t.Context(), pod, node, claim)
	}
	s.Expect(err).NotTo(HaveOccurred())
	return strings.TrimSpace(why)
}
