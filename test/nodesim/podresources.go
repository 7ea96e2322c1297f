// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// podResources serves the kubelet's pod-resources API of a node.
type podResources struct {
	podresourcesv1.UnimplementedPodResourcesListerServer
	machine *machine
}

// ServePodResources serves the pod-resources API on a socket until the context ends.
func (k *kubelet) ServePodResources(ctx context.Context, socket string) error {
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return fmt.Errorf("making the folder of the pod-resources socket: %w", err)
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing an old pod-resources socket: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("listening for pod-resources requests: %w", err)
	}
	server := grpc.NewServer()
	podresourcesv1.RegisterPodResourcesListerServer(server, &podResources{machine: k.machine})
	go func() {
		<-ctx.Done()
		server.Stop()
	}()
	go func() { _ = server.Serve(listener) }()
	return nil
}

// List implements the API: every pod of the node, with the devices of its containers by resource.
func (r *podResources) List(context.Context, *podresourcesv1.ListPodResourcesRequest) (*podresourcesv1.ListPodResourcesResponse, error) {
	r.machine.mu.Lock()
	defer r.machine.mu.Unlock()
	response := &podresourcesv1.ListPodResourcesResponse{}
	for _, state := range r.machine.pods {
		response.PodResources = append(response.PodResources, state.podResources(r.machine.Name))
	}
	return response, nil
}

// GetAllocatableResources implements the API: every device that a plugin offers.
func (r *podResources) GetAllocatableResources(
	context.Context, *podresourcesv1.AllocatableResourcesRequest,
) (*podresourcesv1.AllocatableResourcesResponse, error) {
	r.machine.mu.Lock()
	defer r.machine.mu.Unlock()
	response := &podresourcesv1.AllocatableResourcesResponse{}
	for resource, e := range r.machine.endpoints {
		devices := &podresourcesv1.ContainerDevices{ResourceName: resource}
		for _, d := range e.devices {
			devices.DeviceIds = append(devices.DeviceIds, d.ID)
		}
		response.Devices = append(response.Devices, devices)
	}
	return response, nil
}

// Get implements the API.
func (r *podResources) Get(_ context.Context, request *podresourcesv1.GetPodResourcesRequest) (*podresourcesv1.GetPodResourcesResponse, error) {
	r.machine.mu.Lock()
	defer r.machine.mu.Unlock()
	for _, state := range r.machine.pods {
		if state.pod.Namespace == request.PodNamespace && state.pod.Name == request.PodName {
			return &podresourcesv1.GetPodResourcesResponse{PodResources: state.podResources(r.machine.Name)}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "pod %s in namespace %s not found", request.PodName, request.PodNamespace)
}

func (s *podState) podResources(node string) *podresourcesv1.PodResources {
	pod := &podresourcesv1.PodResources{Name: s.pod.Name, Namespace: s.pod.Namespace}
	for _, c := range s.pod.Spec.Containers {
		container := &podresourcesv1.ContainerResources{Name: c.Name, DynamicResources: s.dynamicResources(node, &c)}
		for _, d := range s.devices {
			if d.container == c.Name {
				container.Devices = append(container.Devices, &podresourcesv1.ContainerDevices{
					ResourceName: d.resource, DeviceIds: []string{d.id},
				})
			}
		}
		pod.Containers = append(pod.Containers, container)
	}
	return pod
}
