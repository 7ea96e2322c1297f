// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
)

// kubelet serves pod resources.
type kubelet struct {
	podresources.UnimplementedPodResourcesListerServer

	pods        []*podresources.PodResources
	allocatable []*podresources.ContainerDevices
}

func (k *kubelet) GetAllocatableResources(
	context.Context, *podresources.AllocatableResourcesRequest,
) (*podresources.AllocatableResourcesResponse, error) {
	return &podresources.AllocatableResourcesResponse{Devices: k.allocatable}, nil
}

func (k *kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	return &podresources.ListPodResourcesResponse{PodResources: k.pods}, nil
}

func (k *kubelet) serve(t *testing.T, socket string) *grpc.Server {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, k)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return server
}

func dial(t *testing.T, socket string) *agent.PodResources {
	t.Helper()
	client, err := agent.DialPodResources(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestPodResources(t *testing.T) {
	g := NewWithT(t)
	socket := filepath.Join(t.TempDir(), "kubelet.sock")
	client := dial(t, socket)

	_, err := client.List(t.Context())
	g.Expect(err).To(MatchError(ContainSubstring("listing pod resources: ")), "no kubelet answers yet")

	server := (&kubelet{allocatable: []*podresources.ContainerDevices{
		{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-2::0", "GPU-2::1"}}, {ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1"}},
	}, pods: []*podresources.PodResources{
		{Namespace: "ml", Name: "train-0", Containers: []*podresources.ContainerResources{
			{Name: "main", Devices: []*podresources.ContainerDevices{
				{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1", "GPU-2::3"}},
				{ResourceName: "nvidia.com/mig-1g.5gb", DeviceIds: []string{"MIG-4"}},
			}},
			{Name: "sidecar"},
		}},
		{Namespace: "web", Name: "no-gpu"},
		{Namespace: "ml", Name: "claims", Containers: []*podresources.ContainerResources{
			{Name: "prepared", DynamicResources: []*podresources.DynamicResource{
				{ClaimNamespace: "ml", ClaimName: "one", ClaimResources: []*podresources.ClaimResource{{DriverName: "gpu.nvidia.com", DeviceName: "gpu-0"}}},
			}},
			{Name: "not-prepared", DynamicResources: []*podresources.DynamicResource{{ClaimName: "later"}}},
			{Name: "network", DynamicResources: []*podresources.DynamicResource{
				{ClaimResources: []*podresources.ClaimResource{{DriverName: "dra.net"}}},
			}},
		}},
	}}).serve(t, socket)
	g.Eventually(func() ([]agent.Allocation, error) { return client.List(t.Context()) }, "10s").Should(Equal([]agent.Allocation{
		{Namespace: "ml", Pod: "train-0", Container: "main", Device: "GPU-1"},
		{Namespace: "ml", Pod: "train-0", Container: "main", Device: "GPU-2::3"},
		{Namespace: "ml", Pod: "train-0", Container: "main", Device: "MIG-4"},
		{Namespace: "ml", Pod: "claims", Container: "prepared", Device: "gpu-0", Claim: "ml/one"},
	}))

	g.Expect(client.Advertised(t.Context())).To(Equal([]string{"GPU-2::0", "GPU-2::1", "GPU-1"}))

	server.Stop()
	_, err = client.List(t.Context())
	g.Expect(err).To(HaveOccurred(), "a kubelet that went is an error, not an empty node")
}
