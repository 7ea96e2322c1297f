// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/utils/clock"
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

// Sampler measures the GPUs at an interval and keeps in memory, while the agent runs, what the samples come to. It
// writes nothing.
type Sampler struct {
	interval time.Duration // 0: it measures nothing
	measure  func(context.Context) (usage.Report, error)
	clock    clock.WithTicker

	mu       sync.Mutex
	recorder *usage.Recorder
}

// NewSampler makes the sampler of a node, of what measure measures. The interval is 0 to measure nothing.
func NewSampler(node string, interval time.Duration, measure func(context.Context) (usage.Report, error), now clock.WithTicker) *Sampler {
	return &Sampler{interval: interval, measure: measure, clock: now, recorder: usage.NewRecorder(node, now.Now(), interval)}
}

// Start samples until the context ends. A sample that takes longer than the interval delays the next one.
func (s *Sampler) Start(ctx context.Context) error {
	if s.interval == 0 {
		return nil
	}
	ticker := s.clock.NewTicker(s.interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			s.sample(ctx)
		}
	}
}

func (s *Sampler) sample(ctx context.Context) {
	report, err := s.measure(ctx)
	if ctx.Err() != nil {
		return // it was cut off
	}
	if err != nil {
		log(ctx).V(1).Info("Not all GPUs could be measured", "reason", err.Error()) // the history counts it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recorder.Add(report, err == nil, s.clock.Now())
}

// ServeHTTP answers with the history as JSON, or with 404 if none is kept.
func (s *Sampler) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if s.interval == 0 {
		http.Error(w, "the agent keeps no history: set metrics.sampling.interval of the Helm chart (docs/monitoring.md)", http.StatusNotFound)
		return
	}
	s.mu.Lock()
	history := s.recorder.History()
	s.mu.Unlock()
	writeJSON(w, history)
}

func writeJSON(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // the client has gone
}
