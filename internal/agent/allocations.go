// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// podResourcesTimeout is how long the kubelet may take for an answer.
const podResourcesTimeout = 5 * time.Second

// Allocation is a device that the kubelet allocated to a container.
type Allocation struct {
	Namespace, Pod, Container string
	// Device is the device plugin's name of it: the UUID of a GPU or of a MIG device, and for a replica of one ::n
	// after that. For a device of a ResourceClaim it is the name of NVIDIA's DRA driver.
	Device string
	// Claim is the ResourceClaim by which the container has the device, as namespace/name; empty: it has it of the
	// device plugin.
	Claim string
}

// Allocations tells what the kubelet allocated.
type Allocations interface {
	List(ctx context.Context) ([]Allocation, error)
	// Advertised are the devices that the kubelet can allocate, named as in Allocation.
	Advertised(ctx context.Context) ([]string, error)
}

// NoAllocations is for where no kubelet is asked.
type NoAllocations struct{}

// List implements Allocations.
func (NoAllocations) List(context.Context) ([]Allocation, error) { return nil, nil }

// Advertised implements Allocations.
func (NoAllocations) Advertised(context.Context) ([]string, error) { return nil, nil }

// PodResources asks the kubelet's pod resources service (kubernetes/enhancements, KEP 606).
type PodResources struct{ connection *grpc.ClientConn }

// DialPodResources makes a client of the service at a socket, such as
// /var/lib/kubelet/pod-resources/kubelet.sock. It connects when it is first asked.
func DialPodResources(socket string) (*PodResources, error) {
	connection, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
	if err != nil {
		return nil, fmt.Errorf("connecting to the kubelet at %s: %w", socket, err)
	}
	return &PodResources{connection: connection}, nil
}

// Close ends the connection.
func (p *PodResources) Close() error { return p.connection.Close() }

// List implements Allocations.
func (p *PodResources) List(ctx context.Context) ([]Allocation, error) {
	ctx, cancel := context.WithTimeout(ctx, podResourcesTimeout)
	defer cancel()
	response, err := podresources.NewPodResourcesListerClient(p.connection).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("listing pod resources: %w", err)
	}
	var allocations []Allocation
	for _, pod := range response.GetPodResources() {
		for _, container := range pod.GetContainers() {
			for _, devices := range container.GetDevices() {
				for _, id := range devices.GetDeviceIds() {
					allocations = append(allocations, Allocation{
						Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName(), Device: id,
					})
				}
			}
			for _, device := range claimed(container) {
				device.Namespace, device.Pod, device.Container = pod.GetNamespace(), pod.GetName(), container.GetName()
				allocations = append(allocations, device)
			}
		}
	}
	return allocations, nil
}

// Advertised implements Allocations.
func (p *PodResources) Advertised(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, podResourcesTimeout)
	defer cancel()
	response, err := podresources.NewPodResourcesListerClient(p.connection).GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("listing what the kubelet can allocate: %w", err)
	}
	var ids []string
	for _, devices := range response.GetDevices() {
		ids = append(ids, devices.GetDeviceIds()...)
	}
	return ids, nil
}

// holdersOf are the containers that hold a GPU, a replica of it or one of its instances.
func holdersOf(d gpu.Device, allocations []Allocation) []gpu.Holder {
	var holders []gpu.Holder
	for _, a := range allocations {
		for _, instance := range held(d, a) {
			holders = append(holders, gpu.Holder{Namespace: a.Namespace, Pod: a.Pod, Container: a.Container, Instance: instance})
		}
	}
	return holders
}

// withoutAdmin leaves out what containers have by the given ResourceClaims: those with adminAccess, by which nothing is
// held.
func withoutAdmin(allocations []Allocation, claims []string) []Allocation {
	return slices.DeleteFunc(slices.Clone(allocations), func(a Allocation) bool { return a.Claim != "" && slices.Contains(claims, a.Claim) })
}

// held are the instances of a GPU that a container holds by an allocation.
func held(d gpu.Device, a Allocation) []int {
	if a.Claim != "" {
		return claimedInstances(d, a.Device)
	}
	if instance, holds := heldInstance(d, a.Device); holds {
		return []int{instance}
	}
	return nil
}

// heldInstance says which instance of a GPU a device of the device plugin is. The forms of its id:
//
//	GPU-<uuid>  GPU-<uuid>::<replica>       the whole GPU
//	MIG-<uuid>  MIG-<uuid>::<replica>       the instance with that MIG device
//	MIG-GPU-<uuid>/<instance>/<compute>     the same, before driver 470
func heldInstance(d gpu.Device, id string) (instance int, holds bool) {
	id, _, _ = strings.Cut(id, "::")
	if id == d.UUID {
		return gpu.WholeGPU, true
	}
	for _, i := range d.State.Instances {
		if i.UUID != "" && id == i.UUID {
			return i.ID, true
		}
	}
	if rest, old := strings.CutPrefix(id, "MIG-"+d.UUID+"/"); old {
		number, _, _ := strings.Cut(rest, "/")
		if instance, err := strconv.Atoi(number); err == nil {
			return instance, true
		}
	}
	return 0, false
}

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
