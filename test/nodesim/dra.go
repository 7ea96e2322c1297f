// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// NVIDIA's DRA driver, as it was measured with v0.5.0 on Kubernetes 1.37: it enumerates the GPUs once, when its pod starts; the kubelet
// deletes its ResourceSlices 30 s after it is gone; a pod that was allocated a device which does not exist waits for ever.

const (
	draDriver    = "gpu.nvidia.com"
	draComponent = "dra-driver-nvidia-gpu-component"
	draPlugin    = "kubelet-plugin"
	// draShares is the variable of its container that has the number of shares of a GPU.
	draShares = "CONSUMABLE_SHARES"
	// slicesOutlive is how long the kubelet keeps the slices of a driver that is gone.
	slicesOutlive = 30 * time.Second
)

// NewDRADriver is the DaemonSet of NVIDIA's DRA driver for the nodes with these labels, and its class for whole GPUs.
func NewDRADriver(namespace string, nodes map[string]string) (*appsv1.DaemonSet, *resourcev1.DeviceClass) {
	labels := map[string]string{draComponent: draPlugin}
	set := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "dra-driver-nvidia-gpu-kubelet-plugin"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					NodeSelector: nodes, Containers: []corev1.Container{{Name: "gpus", Image: "example.invalid/simulated"}},
					Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
				},
			},
		},
	}
	class := &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: draDriver},
		Spec: resourcev1.DeviceClassSpec{
			ExtendedResourceName: new("nvidia.com/gpu"),
			Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
				Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'",
			}}},
		},
	}
	return set, class
}

// publisher is the driver's kubelet plugin on the node, and the kubelet that cleans up behind it.
type publisher struct {
	by    types.UID // the pod that has published; empty: none
	gone  time.Time // since when there is no such pod
	there bool      // slices are published
}

// isDRA reports whether a pod is the driver's kubelet plugin.
func isDRA(pod *corev1.Pod) bool { return pod.Labels[draComponent] == draPlugin }

// runDRA starts the driver in its pod: it publishes what is there now.
func (k *kubelet) runDRA(ctx context.Context, state *podState) bool {
	if k.publisher.by == state.pod.UID {
		return true
	}
	inventory, err := k.Inventory(ctx)
	if err != nil {
		k.crashed(state, err.Error())
		return false
	}
	if err := k.publishSlice(ctx, devicesOf(inventory.Devices, state.env(draShares))); err != nil {
		k.crashed(state, err.Error())
		return false
	}
	k.publisher = publisher{by: state.pod.UID, there: true}
	state.waiting = ""
	k.Tell("NVIDIA's DRA driver: published what is there")
	return true
}

// publishSlice writes the one slice of the node.
func (k *kubelet) publishSlice(ctx context.Context, devices []resourcev1.Device) error {
	want := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: sliceName(k.Name)},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: draDriver, NodeName: &k.Name, Pool: resourcev1.ResourcePool{Name: k.Name, Generation: 1, ResourceSliceCount: 1}, Devices: devices,
		},
	}
	have := &resourcev1.ResourceSlice{}
	err := k.Client.Get(ctx, client.ObjectKeyFromObject(want), have)
	if apierrors.IsNotFound(err) {
		return k.Client.Create(ctx, want)
	}
	if err != nil {
		return err
	}
	have.Spec.Devices = devices
	return k.Client.Update(ctx, have)
}

func sliceName(node string) string { return node + "-" + draDriver }

// expireSlices deletes the slices of a driver that is gone for long enough.
func (k *kubelet) expireSlices(ctx context.Context) error {
	p := &k.publisher
	if _, runs := k.pods[p.by]; runs || !p.there {
		p.gone = time.Time{}
		return nil
	}
	switch now := k.Clock.Now(); {
	case p.gone.IsZero():
		p.gone = now
	case now.Sub(p.gone) >= slicesOutlive:
		err := k.Client.Delete(ctx, &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: sliceName(k.Name)}})
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		*p = publisher{}
	}
	return nil
}

// devicesOf are the GPUs and instances as the driver publishes them. A GPU in MIG mode is none.
func devicesOf(gpus []gpu.Device, shares string) []resourcev1.Device {
	var devices []resourcev1.Device
	for _, d := range gpus {
		if !d.State.MIG {
			devices = append(devices, withShares(device(fmt.Sprintf("gpu-%d", d.Minor), map[string]string{"type": "gpu", "uuid": d.UUID}), shares))
			continue
		}
		for _, i := range d.State.Instances {
			if !i.Partial {
				devices = append(devices, device(instanceName(d, i), map[string]string{"type": "mig", "uuid": i.UUID, "profile": i.Profile, "parentUUID": d.UUID}))
			}
		}
	}
	slices.SortFunc(devices, func(a, b resourcev1.Device) int { return cmp.Compare(a.Name, b.Name) })
	return devices
}

// instanceName is the name that the driver gives an instance: it tells where it is, and is used again.
func instanceName(d gpu.Device, i gpu.Instance) string {
	profile := strings.ToLower(strings.NewReplacer(".", "", "+", "-").Replace(i.Profile))
	id := -1
	for _, p := range d.Profiles {
		if p.Name == i.Profile {
			id = p.ID
		}
	}
	return fmt.Sprintf("gpu-%d-mig-%s-%d-%d", d.Minor, profile, id, i.Placement.Start)
}

func device(name string, attributes map[string]string) resourcev1.Device {
	d := resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
	for attribute, value := range attributes {
		d.Attributes[resourcev1.QualifiedName(attribute)] = resourcev1.DeviceAttribute{StringValue: &value}
	}
	return d
}

func withShares(d resourcev1.Device, shares string) resourcev1.Device {
	if n, err := strconv.ParseInt(shares, 10, 64); err == nil && n > 1 {
		d.AllowMultipleAllocations = new(true)
		each, all := *resource.NewQuantity(1, resource.DecimalSI), *resource.NewQuantity(n, resource.DecimalSI)
		d.Capacity = map[resourcev1.QualifiedName]resourcev1.DeviceCapacity{"shares": {Value: all, RequestPolicy: &resourcev1.CapacityRequestPolicy{
			Default: &each, ValidRange: &resourcev1.CapacityRequestPolicyRange{Min: &each, Max: &all, Step: &each},
		}}}
	}
	return d
}

// prepare prepares the devices that are allocated to a pod by claims, once. One that does not exist is tried again for ever.
func (k *kubelet) prepare(ctx context.Context, state *podState) error {
	if state.admitted || len(state.claims) > 0 && !state.hangs {
		return nil
	}
	missing, claims, err := k.prepared(ctx, state.pod)
	if err != nil {
		return err
	}
	state.claims, state.hangs = claims, missing != ""
	if state.hangs {
		state.waiting = missing
	}
	return nil
}

// prepared are the claims of a pod, by name, with the devices that are prepared. One of which a device is missing has none.
func (k *kubelet) prepared(ctx context.Context, pod *corev1.Pod) (missing string, claims map[string][]string, err error) {
	list := &resourcev1.ResourceClaimList{}
	if err := k.Client.List(ctx, list, client.InNamespace(pod.Namespace)); err != nil {
		return "", nil, err
	}
	claims = map[string][]string{}
	for i := range list.Items {
		c := &list.Items[i]
		reserved := slices.ContainsFunc(c.Status.ReservedFor, func(r resourcev1.ResourceClaimConsumerReference) bool { return r.UID == pod.UID })
		if !reserved || c.Status.Allocation == nil {
			continue
		}
		inventory, err := k.Inventory(ctx)
		if err != nil {
			return "", nil, err
		}
		there := devicesOf(inventory.Devices, "")
		var devices []string
		absent := ""
		for _, result := range c.Status.Allocation.Devices.Results {
			devices = append(devices, result.Device)
			if !slices.ContainsFunc(there, func(d resourcev1.Device) bool { return d.Name == result.Device }) {
				absent = "FailedPrepareDynamicResources: device " + result.Device + " does not exist"
			}
		}
		if claims[c.Name] = devices; absent != "" {
			claims[c.Name], missing = nil, absent
		}
	}
	return missing, claims, nil
}

// claimsOf are the names of the claims of a container: those that it names, and that of its extended resources (kubelet
// pkg/kubelet/cm/dra/manager.go, GetContainerClaimInfos).
func claimsOf(pod *corev1.Pod, c *corev1.Container) []string {
	var names []string
	for _, wanted := range pod.Spec.ResourceClaims {
		if !slices.ContainsFunc(c.Resources.Claims, func(r corev1.ResourceClaim) bool { return r.Name == wanted.Name }) {
			continue
		}
		if wanted.ResourceClaimName != nil {
			names = append(names, *wanted.ResourceClaimName)
		}
		for _, made := range pod.Status.ResourceClaimStatuses {
			if made.Name == wanted.Name && made.ResourceClaimName != nil {
				names = append(names, *made.ResourceClaimName)
			}
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil && slices.ContainsFunc(extended.RequestMappings,
		func(m corev1.ContainerExtendedResourceRequest) bool { return m.ContainerName == c.Name }) {
		names = append(names, extended.ResourceClaimName)
	}
	return names
}

// dynamicResources are the claims of a container as the kubelet lists them: with their devices once these are prepared. It lists none if it
// does not know one of them yet (kubelet pkg/kubelet/cm/container_manager_linux.go, GetDynamicResources).
func (s *podState) dynamicResources(pool string, c *corev1.Container) []*podresourcesv1.DynamicResource {
	var resources []*podresourcesv1.DynamicResource
	for _, name := range claimsOf(s.pod, c) {
		devices, known := s.claims[name]
		if !known {
			return nil
		}
		claim := &podresourcesv1.DynamicResource{ClaimName: name, ClaimNamespace: s.pod.Namespace}
		for _, device := range devices {
			claim.ClaimResources = append(claim.ClaimResources, &podresourcesv1.ClaimResource{
				DriverName: draDriver, PoolName: pool, DeviceName: device,
				CdiDevices: []*podresourcesv1.CDIDevice{{Name: "k8s.gpu.nvidia.com/claim=" + name + "-" + device}},
			})
		}
		resources = append(resources, claim)
	}
	return resources
}

// DRAScheduler is the part of Kubernetes' scheduler that serves extended resources by DeviceClasses: it allocates a free, untainted device
// that a slice of the node shows to a claim of its own, and binds the pod.
type DRAScheduler struct{ Client client.Client }

// Schedule puts a pod that requests one of an extended resource on a node, and says why not if that is so.
func (s DRAScheduler) Schedule(ctx context.Context, pod *corev1.Pod, node string) (why string, err error) {
	wants := ""
	for name := range pod.Spec.Containers[0].Resources.Limits {
		wants = string(name)
	}
	class, err := s.classOf(ctx, wants)
	if err != nil || class == "" {
		return "Insufficient " + wants, err
	}
	device, err := s.free(ctx, node, wants)
	if err != nil || device == "" {
		return "cannot allocate all claims", err
	}
	if err := s.Client.Create(ctx, pod); err != nil {
		return "", err
	}
	claim := &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name + "-extended-resources", Annotations: map[string]string{resourcev1.ExtendedResourceClaimAnnotation: "true"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: new(true)}},
		},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
			Name: "container-0-request-0", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}
	if err := s.Client.Create(ctx, claim); err != nil {
		return "", err
	}
	claim.Status = resourcev1.ResourceClaimStatus{
		Allocation: &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{Results: []resourcev1.DeviceRequestAllocationResult{{
			Request: "container-0-request-0", Driver: draDriver, Pool: node, Device: device,
		}}}},
		ReservedFor: []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: pod.Name, UID: pod.UID}},
	}
	if err := s.Client.Status().Update(ctx, claim); err != nil {
		return "", err
	}
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
		ResourceClaimName: claim.Name,
		RequestMappings: []corev1.ContainerExtendedResourceRequest{{
			ContainerName: pod.Spec.Containers[0].Name, ResourceName: wants, RequestName: "container-0-request-0",
		}},
	}
	if err := s.Client.Status().Update(ctx, pod); err != nil {
		return "", err
	}
	return "", s.Client.SubResource("binding").Create(ctx, pod, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: node}})
}

// Run deletes the claims of pods that are gone, as Kubernetes' garbage collector does, until the context ends.
func (s DRAScheduler) Run(ctx context.Context, interval time.Duration) {
	ticker := clock.RealClock{}.NewTicker(interval)
	defer ticker.Stop()
	for {
		_ = s.collect(ctx) // it is tried again
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

func (s DRAScheduler) collect(ctx context.Context) error {
	claims, pods := &resourcev1.ResourceClaimList{}, &corev1.PodList{}
	if err := s.Client.List(ctx, claims); err != nil { // first: a claim that comes later may be of a pod that is not listed
		return err
	}
	if err := s.Client.List(ctx, pods); err != nil {
		return err
	}
	for i := range claims.Items {
		owner := metav1.GetControllerOf(&claims.Items[i])
		if owner == nil || slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.UID == owner.UID }) {
			continue
		}
		if err := client.IgnoreNotFound(s.Client.Delete(ctx, &claims.Items[i])); err != nil {
			return err
		}
	}
	return nil
}

// classOf is the class that serves an extended resource: the one created last.
func (s DRAScheduler) classOf(ctx context.Context, name string) (string, error) {
	classes := &resourcev1.DeviceClassList{}
	if err := s.Client.List(ctx, classes); err != nil {
		return "", err
	}
	found, last := "", time.Time{}
	for _, c := range classes.Items {
		if c.Spec.ExtendedResourceName != nil && *c.Spec.ExtendedResourceName == name && !c.CreationTimestamp.Time.Before(last) {
			found, last = c.Name, c.CreationTimestamp.Time
		}
	}
	return found, nil
}

// free is a device of the node that matches a resource and that nothing holds or taints; empty if there is none.
func (s DRAScheduler) free(ctx context.Context, node, wants string) (string, error) {
	rules, claims, published := &resourcev1.DeviceTaintRuleList{}, &resourcev1.ResourceClaimList{}, &resourcev1.ResourceSliceList{}
	for _, list := range []client.ObjectList{rules, claims, published} {
		if err := s.Client.List(ctx, list); err != nil {
			return "", err
		}
	}
	if slices.ContainsFunc(rules.Items, func(r resourcev1.DeviceTaintRule) bool { return taintsAll(r.Spec.DeviceSelector, node) }) {
		return "", nil
	}
	used := inUse(claims.Items, node)
	for _, slice := range published.Items {
		for _, d := range slice.Spec.Devices {
			if slice.Spec.NodeName != nil && *slice.Spec.NodeName == node && !used[d.Name] && offers(d, wants) {
				return d.Name, nil
			}
		}
	}
	return "", nil
}

// taintsAll reports whether a rule taints all devices of a node.
func taintsAll(selects *resourcev1.DeviceTaintSelector, node string) bool {
	return selects != nil && (selects.Pool == nil || *selects.Pool == node) && (selects.Driver == nil || *selects.Driver == draDriver) && selects.Device == nil
}

// inUse are the devices of a node that are allocated to claims.
func inUse(claims []resourcev1.ResourceClaim, node string) map[string]bool {
	used := map[string]bool{}
	for i := range claims {
		if claims[i].Status.Allocation == nil {
			continue
		}
		for _, result := range claims[i].Status.Allocation.Devices.Results {
			if result.Pool == node {
				used[result.Device] = true
			}
		}
	}
	return used
}

// offers reports whether a device matches the class that serves a resource.
func offers(d resourcev1.Device, wants string) bool {
	text := func(name string) string {
		if a := d.Attributes[resourcev1.QualifiedName(name)].StringValue; a != nil {
			return *a
		}
		return ""
	}
	if text("type") == "gpu" {
		return wants == "nvidia.com/gpu"
	}
	return wants == "nvidia.com/mig-"+strings.ReplaceAll(text("profile"), "+", ".")
}
