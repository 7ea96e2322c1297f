// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// sampleTimeout bounds a measurement, also the wait for a reconcile. Prometheus waits 10 s for an answer.
const sampleTimeout = 8 * time.Second

// errAside says why nothing can be measured.
var errAside = errors.New("NVIDIA's mig-manager is changing the GPUs, so the agent leaves the driver closed")

// hardwareLock lets one reconcile or one measurement at a time use the hardware, since either closes it at its end.
type hardwareLock chan struct{}

// take waits for its turn.
func (t hardwareLock) take(ctx context.Context) (done func(), err error) {
	select {
	case t <- struct{}{}:
		return func() { <-t }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for the agent to have finished with the GPUs: %w", ctx.Err())
	}
}

// meter measures who uses the GPUs.
type meter struct {
	tools

	containers host.Containers
}

// Usage measures who uses the GPUs. It opens NVML, closes it again and writes nothing. With an error the report has the
// GPUs that could be read.
func (m meter) Usage(ctx context.Context) (usage.Report, error) {
	report, err := m.usage(ctx)
	report.Node = m.node
	return report, err
}

func (m meter) usage(ctx context.Context) (usage.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, sampleTimeout)
	defer cancel()
	node, sample, partial := m.sample(ctx)
	if partial != nil && len(sample.Devices) == 0 {
		return usage.Report{}, partial
	}
	devices, err := m.allocated(ctx, node, sample)
	if err != nil {
		return usage.Report{}, err
	}
	owners, err := m.owners(sample)
	if err != nil {
		return usage.Report{}, err
	}
	report := usage.Of(node, devices, owners)
	if partial != nil {
		report.Incomplete = partial.Error()
	}
	return report, partial
}

// sample measures the GPUs of the node, unless they are mig-manager's. Whose they are may change until its turn has
// come.
func (m meter) sample(ctx context.Context) (*v1alpha1.GPUNode, gpu.Sample, error) {
	done, err := m.lock.take(ctx)
	if err != nil {
		return nil, gpu.Sample{}, err
	}
	defer done()
	node := &v1alpha1.GPUNode{}
	if err := m.client.Get(ctx, client.ObjectKey{Name: m.node}, node); err != nil {
		return nil, gpu.Sample{}, fmt.Errorf("reading GPUNode %s: %w", m.node, err)
	}
	if node.Spec.MIGConfigName != "" {
		return nil, gpu.Sample{}, errAside
	}
	sample, err := m.hardware.Sample(ctx)
	return node, sample, errors.Join(err, m.hardware.Close())
}

// allocated adds what the kubelet says of the GPUs. It knows no replicas of what NVIDIA's DRA driver offers.
func (m meter) allocated(ctx context.Context, node *v1alpha1.GPUNode, sample gpu.Sample) ([]usage.Device, error) {
	allocations, err := m.allocations.List(ctx)
	if err != nil {
		return nil, err
	}
	allocations = withoutAdmin(allocations, node.Spec.AdminClaims)
	advertised, err := m.allocations.Advertised(ctx)
	if err != nil {
		return nil, err
	}
	devices := make([]usage.Device, 0, len(sample.Devices))
	for _, use := range sample.Devices {
		known := gpu.Device{UUID: use.UUID}
		for _, i := range use.Instances {
			known.State.Instances = append(known.State.Instances, gpu.Instance{ID: i.ID, UUID: i.UUID})
		}
		d := usage.Device{DeviceUse: use, Replicas: map[int]int{}}
		for _, a := range allocations {
			instance, holds := heldInstance(known, a.Device)
			if a.Claim != "" {
				instance, holds = claimedUnit(use, a.Device)
			}
			if holds {
				d.Holders = append(d.Holders, gpu.Holder{Namespace: a.Namespace, Pod: a.Pod, Container: a.Container, Instance: instance})
			}
		}
		for _, id := range advertised {
			if instance, of := heldInstance(known, id); of {
				d.Replicas[instance]++
			}
		}
		devices = append(devices, d)
	}
	return devices, nil
}

// owners are the containers of the processes that use the GPUs, by PID. The MPS server works for others.
func (m meter) owners(sample gpu.Sample) (map[int]usage.Name, error) {
	names, err := m.containers.Names()
	if err != nil {
		return nil, err
	}
	owners := map[int]usage.Name{}
	for _, d := range sample.Devices {
		for _, p := range d.Processes {
			process := m.processes.Describe(p.PID)
			if process.PodUID == "" || process.Runs(gpu.MPSServer) {
				continue
			}
			name, known := names[process.ContainerID]
			if !known { // the name of its log was too long for the ID
				name = names[process.PodUID]
			}
			owners[p.PID] = usage.Name(name)
		}
	}
	return owners, nil
}

// ServeUsage answers with a measurement as JSON.
func (m meter) ServeUsage(w http.ResponseWriter, r *http.Request) {
	report, err := m.Usage(r.Context())
	if err != nil && report.Incomplete == "" {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	writeJSON(w, report)
}
