// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// NVIDIA's DRA driver, as it was measured with v0.5.0 on Kubernetes 1.37: it enumerates the GPUs once, when its pod
// starts; the kubelet deletes its ResourceSlices 30 s after it is gone; a pod that was allocated a device which does
// not exist waits for ever.

const (
	draDriver    = "gpu.nvidia.com"
	draComponent = "dra-driver-nvidia-gpu-component"
	draPlugin    = "kubelet-plugin"
	// draShares is the variable of its container that has the number of shares of a GPU.
	draShares = "CONSUMABLE_SHARES"
)

// draAccount is the account of its kubelet plugin, as its chart names it.
const draAccount = "dra-driver-nvidia-gpu-service-account-kubeletplugin"

// NewDRAAccess gives the account of NVIDIA's DRA driver the right to publish ResourceSlices, as its chart does.
func NewDRAAccess(namespace string) []client.Object {
	name := "dra-driver-nvidia-gpu-kubeletplugin"
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"},
			Verbs: []string{"get", "list", "watch", "create", "update", "patch", "delete"},
		}}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: draAccount}},
		},
	}
}

// NewDRADriver is the DaemonSet of NVIDIA's DRA driver for the nodes with these labels, and its class for whole GPUs.
func NewDRADriver(namespace string, nodes map[string]string) (*appsv1.DaemonSet, *resourcev1.DeviceClass) {
	set := newDaemonSet(namespace, "dra-driver-nvidia-gpu-kubelet-plugin", map[string]string{draComponent: draPlugin}, corev1.PodSpec{
		NodeSelector: nodes, ServiceAccountName: draAccount, Containers: []corev1.Container{{Name: "gpus", Image: "example.invalid/simulated"}},
		Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		Volumes: []corev1.Volume{{Name: "plugins", VolumeSource: corev1.VolumeSource{
			HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/plugins"},
		}}},
	})
	class := nvidia.DeviceClass("gpu")
	class.Spec.ExtendedResourceName = new("nvidia.com/gpu")
	return set, class
}

// publisher is the driver's kubelet plugin on the node, and the kubelet that cleans up behind it.
type publisher struct {
	by    types.UID // the pod that has published; empty: none
	gone  time.Time // since when there is no such pod
	there bool      // slices are published
	// shares is how many claims a GPU is prepared for.
	shares int64
}

// preparedClaim is a claim that NVIDIA's driver has prepared, for however many pods of the node.
type preparedClaim struct {
	devices []string
	holds   []string // without those for administrators
}

// isDRA reports whether a pod is the driver's kubelet plugin.
func isDRA(pod *corev1.Pod) bool {
	return pod.Labels[draComponent] == draPlugin || pod.Labels["app"] == draApp
}

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
	shares, _ := strconv.ParseInt(state.env(draShares), 10, 64)
	if err := k.publishSlice(ctx, devicesOf(inventory.Devices, shares)); err != nil {
		k.crashed(state, err.Error())
		return false
	}
	k.publisher = publisher{by: state.pod.UID, there: true, shares: max(shares, 1)}
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

// wipeSlices deletes what is published of the node when the kubelet starts: no driver has registered yet (kubelet
// pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go, wipeResourceSlices).
func (k *kubelet) wipeSlices(ctx context.Context) error {
	if k.wiped {
		return nil
	}
	ofNode := client.MatchingFields{resourcev1.ResourceSliceSelectorNodeName: k.Name}
	if err := k.Client.DeleteAllOf(ctx, &resourcev1.ResourceSlice{}, ofNode); client.IgnoreNotFound(err) != nil && !meta.IsNoMatchError(err) {
		return err
	}
	k.wiped = true
	return nil
}

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
	case now.Sub(p.gone) >= nvidia.SlicesOutlive:
		err := k.Client.Delete(ctx, &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: sliceName(k.Name)}})
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		*p = publisher{}
	}
	return nil
}

// devicesOf are the GPUs and instances as the driver publishes them.
func devicesOf(gpus []gpu.Device, shares int64) []resourcev1.Device {
	var devices []resourcev1.Device
	for _, d := range nvidia.Devices(gpus, shares) {
		attributes := map[string]string{"type": d.Type, "uuid": d.UUID}
		if d.Parent != "" {
			attributes["profile"], attributes["parentUUID"] = d.Profile, d.Parent
		}
		devices = append(devices, withShares(device(d.Name, attributes), shares))
	}
	slices.SortFunc(devices, func(a, b resourcev1.Device) int { return cmp.Compare(a.Name, b.Name) })
	return devices
}

func device(name string, attributes map[string]string) resourcev1.Device {
	d := resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
	for attribute, value := range attributes {
		d.Attributes[resourcev1.QualifiedName(attribute)] = resourcev1.DeviceAttribute{StringValue: &value}
	}
	return d
}

func withShares(d resourcev1.Device, n int64) resourcev1.Device {
	if n > 1 {
		d.AllowMultipleAllocations = new(true)
		each, all := *resource.NewQuantity(1, resource.DecimalSI), *resource.NewQuantity(n, resource.DecimalSI)
		d.Capacity = map[resourcev1.QualifiedName]resourcev1.DeviceCapacity{"shares": {Value: all, RequestPolicy: &resourcev1.CapacityRequestPolicy{
			Default: &each, ValidRange: &resourcev1.CapacityRequestPolicyRange{Min: &each, Max: &all, Step: &each},
		}}}
	}
	return d
}

// prepare prepares the claims of a pod, before its containers start. Where a driver does not answer, a device does not
// exist or a driver refuses, the kubelet tries again and again.
func (k *kubelet) prepare(ctx context.Context, state *podState) error {
	if state.admitted || len(state.claims) > 0 && !state.hangs || k.Clock.Now().Before(state.restart) {
		return nil
	}
	names := []string{}
	for i := range state.pod.Spec.Containers {
		names = append(names, claimsOf(state.pod, &state.pod.Spec.Containers[i])...)
	}
	slices.Sort(names)
	known, claims, err := k.known(ctx, state.pod, slices.Compact(names))
	if err == nil {
		err = k.prepareAll(ctx, known, claims)
	}
	if apiError := apierrors.APIStatus(nil); errors.As(err, &apiError) && !apierrors.IsNotFound(err) {
		return err
	}
	state.claims, state.hangs = claims, err != nil
	if state.hangs {
		state.waiting = "FailedPrepareDynamicResources: " + err.Error()
		state.restart = k.Clock.Now().Add(k.RestartDelay)
	}
	return nil
}

// known are the claims of a pod of which the kubelet takes notice: of none while a driver of one of them is not
// registered (kubelet pkg/kubelet/cm/dra/manager.go, prepareResources).
func (k *kubelet) known(ctx context.Context, pod *corev1.Pod, names []string) ([]*resourcev1.ResourceClaim, map[string][]string, error) {
	var known []*resourcev1.ResourceClaim
	claims := map[string][]string{}
	for _, name := range names {
		c := &resourcev1.ResourceClaim{}
		if err := k.Client.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: name}, c); err != nil {
			return nil, nil, err
		}
		if !reservedFor(c, pod) || c.Status.Allocation == nil {
			return nil, nil, fmt.Errorf("pod %s is not allowed to use ResourceClaim %s", pod.Name, name)
		}
		for _, result := range c.Status.Allocation.Devices.Results {
			_, other := k.OtherDrivers[result.Driver]
			if serves := other || result.Driver == draDriver && k.serves(); !serves {
				return nil, nil, fmt.Errorf("DRA driver %s is not registered", result.Driver)
			}
		}
		known, claims[name] = append(known, c), nil
	}
	return known, claims, nil
}

// serves reports whether a pod of NVIDIA's driver runs on the node and has registered.
func (k *kubelet) serves() bool {
	state, runs := k.pods[k.publisher.by]
	return runs && state.pod.DeletionTimestamp == nil
}

func reservedFor(c *resourcev1.ResourceClaim, pod *corev1.Pod) bool {
	return slices.ContainsFunc(c.Status.ReservedFor, func(r resourcev1.ResourceClaimConsumerReference) bool {
		group := pod.Spec.SchedulingGroup
		return r.UID == pod.UID || r.Resource == "podgroups" && group != nil && group.PodGroupName != nil && *group.PodGroupName == r.Name
	})
}

// prepareAll fills in the devices that are prepared: all of a claim, or none.
func (k *kubelet) prepareAll(ctx context.Context, known []*resourcev1.ResourceClaim, claims map[string][]string) error {
	inventory, err := k.Inventory(ctx)
	if err != nil {
		return err
	}
	there := nvidia.Devices(inventory.Devices, k.publisher.shares)
	for _, c := range known {
		if prepared, is := k.prepared[c.UID]; is {
			claims[c.Name] = prepared.devices
			continue
		}
		p := preparedClaim{}
		for _, result := range c.Status.Allocation.Devices.Results {
			if err := k.prepareDevice(result, there); err != nil {
				return fmt.Errorf("NodePrepareResources failed for ResourceClaim %s: %w", c.Name, err)
			}
			if result.Driver == draDriver {
				p.devices = append(p.devices, result.Device)
			}
			if result.Driver == draDriver && !isAdmins(result) {
				p.holds = append(p.holds, result.Device)
			}
		}
		k.prepared[c.UID], claims[c.Name] = p, p.devices
	}
	return nil
}

// prepareDevice asks the driver of a device to prepare it for a claim.
func (k *kubelet) prepareDevice(result resourcev1.DeviceRequestAllocationResult, there []dra.Device) error {
	if result.Driver != draDriver {
		return k.OtherDrivers[result.Driver]()
	}
	users := int64(0)
	for _, p := range k.prepared {
		if slices.Contains(p.holds, result.Device) {
			users++
		}
	}
	return nvidia.Prepare(result.Device, isAdmins(result), there, users)
}

func isAdmins(result resourcev1.DeviceRequestAllocationResult) bool {
	return result.AdminAccess != nil && *result.AdminAccess
}

// unprepare forgets the claims of which no pod of the node is left.
func (k *kubelet) unprepare(ctx context.Context) error {
	if len(k.prepared) == 0 || !k.serves() {
		return nil // the driver gives them back, once it answers
	}
	list := &resourcev1.ResourceClaimList{}
	if err := k.Client.List(ctx, list); err != nil {
		return err
	}
	maps.DeleteFunc(k.prepared, func(uid types.UID, _ preparedClaim) bool {
		at := slices.IndexFunc(list.Items, func(c resourcev1.ResourceClaim) bool { return c.UID == uid })
		if at < 0 {
			return true
		}
		for _, state := range k.pods {
			if _, uses := state.claims[list.Items[at].Name]; uses && state.pod.Namespace == list.Items[at].Namespace {
				return false
			}
		}
		return true
	})
	return nil
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

// dynamicResources are the claims of a container as the kubelet lists them: with their devices once these are prepared.
// It lists none if it does not know one of them yet (kubelet pkg/kubelet/cm/container_manager_linux.go,
// GetDynamicResources).
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

// DRAScheduler is the part of Kubernetes' scheduler that serves extended resources by DeviceClasses: it allocates a
// free, untainted device that a slice of the node shows to a claim of its own, and binds the pod.
type DRAScheduler struct {
	Client client.Client

	mu     sync.Mutex
	known  map[string]dra.Class // by name, as last seen
	serves nvidia.Classes
}

// Schedule puts a pod that requests one of an extended resource on a node, and says why not if that is so.
func (s *DRAScheduler) Schedule(ctx context.Context, pod *corev1.Pod, node string) (why string, err error) {
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

// ScheduleByClaim puts a pod on a node that names a claim. The first one has the claim allocated: its devices, or, for
// administrators, all that the node shows. For every further one the claim is reserved as it is, in spite of taints
// (kubernetes pkg/scheduler/framework/plugins/dynamicresources).
func (s *DRAScheduler) ScheduleByClaim(ctx context.Context, pod *corev1.Pod, node string, claim *resourcev1.ResourceClaim) (why string, err error) {
	if claim.Status.Allocation == nil {
		results, err := s.allocate(ctx, node, claim)
		if err != nil || len(results) == 0 {
			return "cannot allocate all claims", err
		}
		claim.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{Results: results}}
	}
	if err := s.Client.Create(ctx, pod); err != nil {
		return "", err
	}
	claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID})
	if err := s.Client.Status().Update(ctx, claim); err != nil {
		return "", err
	}
	return "", s.Client.SubResource("binding").Create(ctx, pod, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: node}})
}

// allocate finds devices for the requests of a claim. A request of a class that is not NVIDIA's has a device of the
// class's name as driver.
func (s *DRAScheduler) allocate(ctx context.Context, node string, claim *resourcev1.ResourceClaim) ([]resourcev1.DeviceRequestAllocationResult, error) {
	var results []resourcev1.DeviceRequestAllocationResult
	for _, r := range claim.Spec.Devices.Requests {
		if r.Exactly.DeviceClassName != draDriver {
			results = append(results, resourcev1.DeviceRequestAllocationResult{Request: r.Name, Driver: r.Exactly.DeviceClassName, Pool: node, Device: "device-0"})
			continue
		}
		if r.Exactly.AdminAccess != nil && *r.Exactly.AdminAccess {
			published := &resourcev1.ResourceSliceList{}
			if err := s.Client.List(ctx, published); err != nil {
				return nil, err
			}
			for _, slice := range published.Items {
				for _, d := range slice.Spec.Devices {
					if slice.Spec.NodeName != nil && *slice.Spec.NodeName == node && read(d).Type == "gpu" {
						results = append(results, resourcev1.DeviceRequestAllocationResult{
							Request: r.Name, Driver: draDriver, Pool: node, Device: d.Name, AdminAccess: new(true),
						})
					}
				}
			}
			continue
		}
		device, err := s.free(ctx, node, "nvidia.com/gpu")
		if err != nil || device == "" {
			return nil, err
		}
		results = append(results, resourcev1.DeviceRequestAllocationResult{Request: r.Name, Driver: draDriver, Pool: node, Device: device})
	}
	return results, nil
}

// Run deletes the claims of pods that are gone, and gives back what pods that are gone had by claims that they shared,
// as Kubernetes' garbage collector does, until the context ends.
func (s *DRAScheduler) Run(ctx context.Context, interval time.Duration) {
	ticker := clock.RealClock{}.NewTicker(interval)
	defer ticker.Stop()
	for {
		_, _ = s.classOf(ctx, "") // what comes and goes between two pods counts
		_ = s.collect(ctx)        // it is tried again
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

func (s *DRAScheduler) collect(ctx context.Context) error {
	claims, pods := &resourcev1.ResourceClaimList{}, &corev1.PodList{}
	if err := s.Client.List(ctx, claims); err != nil { // first: a claim that comes later may be of a pod that is not listed
		return err
	}
	if err := s.Client.List(ctx, pods); err != nil {
		return err
	}
	for i := range claims.Items {
		c := &claims.Items[i]
		gone := func(uid types.UID) bool {
			return !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.UID == uid })
		}
		if owner := metav1.GetControllerOf(c); owner != nil && gone(owner.UID) {
			if err := client.IgnoreNotFound(s.Client.Delete(ctx, c)); err != nil {
				return err
			}
			continue
		}
		before := len(c.Status.ReservedFor)
		c.Status.ReservedFor = slices.DeleteFunc(c.Status.ReservedFor, func(r resourcev1.ResourceClaimConsumerReference) bool {
			return r.Resource == "pods" && gone(r.UID)
		})
		if len(c.Status.ReservedFor) == before {
			continue
		}
		if len(c.Status.ReservedFor) == 0 {
			c.Status.Allocation = nil
		}
		if err := client.IgnoreNotFound(s.Client.Status().Update(ctx, c)); err != nil {
			return err
		}
	}
	return nil
}

// classOf is the class that serves an extended resource; empty if the scheduler knows none.
func (s *DRAScheduler) classOf(ctx context.Context, resource string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	classes := &resourcev1.DeviceClassList{}
	if err := s.Client.List(ctx, classes); err != nil {
		return "", err
	}
	now := map[string]dra.Class{}
	for _, c := range classes.Items {
		now[c.Name] = dra.Class{Name: c.Name, Resource: ptr.Deref(c.Spec.ExtendedResourceName, ""), Age: c.CreationTimestamp.Unix()}
	}
	if s.serves == nil {
		s.serves = nvidia.Classes{}
	}
	for name, was := range s.known {
		if _, is := now[name]; !is {
			s.serves.Drop(was)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if was, knew := s.known[name]; !knew {
			s.serves.Set(nil, now[name])
		} else if was != now[name] {
			s.serves.Set(&was, now[name])
		}
	}
	s.known = now
	return s.serves[resource].Name, nil
}

// free is a device of the node that matches a resource and that nothing holds or taints; empty if there is none.
func (s *DRAScheduler) free(ctx context.Context, node, wants string) (string, error) {
	rules, claims, published := &resourcev1.DeviceTaintRuleList{}, &resourcev1.ResourceClaimList{}, &resourcev1.ResourceSliceList{}
	for _, list := range []client.ObjectList{rules, claims, published} {
		if err := s.Client.List(ctx, list); err != nil {
			return "", err
		}
	}
	used := inUse(claims.Items, node)
	for _, slice := range published.Items {
		for _, d := range slice.Spec.Devices {
			if slice.Spec.NodeName != nil && *slice.Spec.NodeName == node && nvidia.Serves(read(d), wants, used[d.Name]) && !tainted(rules.Items, node, d) {
				return d.Name, nil
			}
		}
	}
	return "", nil
}

// tainted reports whether a device is tainted by its driver or by a rule, so that nothing that does not tolerate it is
// allocated. A taint with the effect None is a dry run.
func tainted(rules []resourcev1.DeviceTaintRule, node string, d resourcev1.Device) bool {
	keepsOff := func(t resourcev1.DeviceTaint) bool {
		return t.Effect == resourcev1.DeviceTaintEffectNoSchedule || t.Effect == resourcev1.DeviceTaintEffectNoExecute
	}
	return slices.ContainsFunc(d.Taints, keepsOff) || slices.ContainsFunc(rules, func(r resourcev1.DeviceTaintRule) bool {
		return keepsOff(r.Spec.Taint) && selects(r.Spec.DeviceSelector, node, d.Name)
	})
}

// selects reports whether a rule is about a device. A rule without a selector is about none (k8s.io/api/resource/v1,
// DeviceTaintRuleSpec).
func selects(s *resourcev1.DeviceTaintSelector, node, name string) bool {
	return s != nil && (s.Pool == nil || *s.Pool == node) && (s.Driver == nil || *s.Driver == draDriver) && (s.Device == nil || *s.Device == name)
}

// inUse counts the claims to which each device of a node is allocated, without those of administrators and of other
// drivers.
func inUse(claims []resourcev1.ResourceClaim, node string) map[string]int64 {
	used := map[string]int64{}
	for i := range claims {
		if claims[i].Status.Allocation == nil {
			continue
		}
		for _, result := range claims[i].Status.Allocation.Devices.Results {
			if result.Driver == draDriver && result.Pool == node && !isAdmins(result) {
				used[result.Device]++
			}
		}
	}
	return used
}

// read is what of a published device the scheduler looks at.
func read(d resourcev1.Device) dra.Device {
	text := func(name resourcev1.QualifiedName) string { return ptr.Deref(d.Attributes[name].StringValue, "") }
	shares := d.Capacity["shares"].Value
	return dra.Device{Name: d.Name, Type: text("type"), Profile: text("profile"), Shares: shares.Value()}
}

// GPUCluster is NVIDIA's GPU Operator v26.7.0 where a GPUCluster has it run the DRA driver: its labels on nodes, the
// DaemonSets that they start and stop, and the DeviceClass of whole GPUs. Sources:
// controllers/nodelabeling_controller.go, manifests/state-dra-driver and manifests/state-dcgm-exporter of
// NVIDIA/gpu-operator.
type GPUCluster struct {
	Client    client.Client
	Namespace string

	mu    sync.Mutex
	swept map[string]int
}

// draApp is the label app of the driver's kubelet plugin there.
const draApp = "nvidia-dra-driver-kubelet-plugin"

// Run reconciles until the context ends.
func (o *GPUCluster) Run(ctx context.Context, interval time.Duration) {
	for ctx.Err() == nil {
		_ = o.Reconcile(ctx) // the next one tries again
		select {
		case <-ctx.Done():
		case <-time.After(interval):
		}
	}
}

// Swept is how often each label was removed from a node that had it.
func (o *GPUCluster) Swept() map[string]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.swept)
}

// Reconcile reconciles once. Beside a ClusterPolicy it refuses the GPUCluster and deploys nothing.
func (o *GPUCluster) Reconcile(ctx context.Context) error {
	const exporter = "nvidia-dcgm-exporter-dra"
	policies, err := Listed(ctx, o.Client, "v1", "ClusterPolicy")
	if err != nil {
		return err
	}
	if len(policies) > 0 {
		return o.report(ctx, nvidia.Refuses)
	}
	for _, object := range []client.Object{nvidia.DeviceClass("gpu"), o.daemonSet(draApp, "dra-driver", "gpus"), o.daemonSet(exporter, "dcgm-exporter-dra", exporter)} {
		if err := o.Client.Create(ctx, object); client.IgnoreAlreadyExists(err) != nil {
			return fmt.Errorf("creating %s: %w", object.GetName(), err)
		}
	}
	if err := o.report(ctx, nvidia.Reports); err != nil {
		return err
	}
	nodes := &corev1.NodeList{}
	if err := o.Client.List(ctx, nodes); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	for i := range nodes.Items {
		if err := o.label(ctx, &nodes.Items[i]); err != nil && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}

// report tells in the status of the GPUCluster where the GPU Operator runs, and whether it follows it.
func (o *GPUCluster) report(ctx context.Context, writes func(*unstructured.Unstructured, string, time.Time) []map[string]any) error {
	clusters, err := Listed(ctx, o.Client, "v1alpha1", "GPUCluster")
	if err != nil {
		return err
	}
	for i := range clusters {
		if err := WriteStatus(ctx, o.Client, &clusters[i], writes(&clusters[i], o.Namespace, time.Now())); err != nil {
			return err
		}
	}
	return nil
}

func (o *GPUCluster) label(ctx context.Context, n *corev1.Node) error {
	if n.Labels[nvidia.LabelPresent] != "true" {
		return nil
	}
	return relabel(ctx, o.Client, n, func(labels map[string]string) { o.count(nvidia.LabelForGPUCluster(labels)) })
}

func (o *GPUCluster) count(swept []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.swept == nil {
		o.swept = map[string]int{}
	}
	for _, name := range swept {
		o.swept[name]++
	}
}

func (o *GPUCluster) daemonSet(app, deploy, container string) *appsv1.DaemonSet {
	return newDaemonSet(o.Namespace, app, map[string]string{"app": app}, corev1.PodSpec{
		NodeSelector: map[string]string{nvidia.LabelDeploy + deploy: "true"},
		Containers:   []corev1.Container{{Name: container, Image: "example.invalid/simulated"}},
		Tolerations:  []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
	})
}

// newDaemonSet is one whose pods have these labels.
func newDaemonSet(namespace, name string, labels map[string]string, pod corev1.PodSpec) *appsv1.DaemonSet {
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod},
		},
	}
}
