// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

var one = resource.MustParse("1")

func silence() { ctrllog.SetLogger(logr.Discard()) }

// machine is a node: its GPUs, its kubelet and what makes its agent fail.
type machine struct {
	name     string
	dir      string
	socket   string // of the kubelet's pod resources
	hardware *sim.Hardware
	node     *nodesim.Node
	down     atomic.Bool // the agent is lost
	deaf     atomic.Bool // NVIDIA's device plugin cannot read the GPUs
}

var errDown = errors.New("the agent does not run")

// newMachine makes a node and lets it live.
func newMachine(f *fleet, name string) *machine {
	f.t.Helper()
	m := &machine{name: name, dir: filepath.Join(f.dir, name), hardware: sim.New(models()...)}
	m.socket = filepath.Join(m.dir, "kubelet.sock")
	f.Expect(os.MkdirAll(m.dir, 0o755)).To(Succeed())
	m.node = nodesim.New(nodesim.Options{
		Name: name, Client: f.client, Clock: f.clock, Inventory: m.inventory, Start: m.start,
		StatusPeriod: 100 * time.Millisecond, RestartDelay: 500 * time.Millisecond, RetryDelay: 500 * time.Millisecond,
	})
	f.background(func(ctx context.Context) {
		if err := m.node.ServePodResources(ctx, m.socket); err != nil {
			f.t.Errorf("%s: %v", name, err)
		}
		m.node.Run(ctx, 300*time.Millisecond)
	})
	f.Expect(f.client.Create(f.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ownNamespace, Name: name + "-agent", Labels: map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"},
		},
		Spec: corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "agent", Image: "gpu-sharing-agent"}}},
	})).To(Succeed())
	return m
}

// inventory is what NVIDIA's programs read.
func (m *machine) inventory(ctx context.Context) (gpu.Inventory, error) {
	if m.deaf.Load() {
		return gpu.Inventory{}, errors.New("nvml: GPU is lost")
	}
	return m.hardware.Observe(ctx)
}

// start is the process of a pod: the agent's pod is ready while the agent is not lost.
func (m *machine) start(_ context.Context, pod *corev1.Pod) (nodesim.Program, error) {
	if pod.Labels["app.kubernetes.io/name"] != "gpu-sharing-agent" {
		return nil, nil
	}
	return agentProcess{m}, nil
}

type agentProcess struct{ *machine }

func (agentProcess) Alive() bool                  { return true }
func (p agentProcess) Ready(context.Context) bool { return !p.down.Load() }
func (agentProcess) Stop()                        {}

// gated is the hardware of the agent, which does and sees nothing while it is lost.
func (m *machine) gated() gpu.Hardware { return gate{m.hardware, m} }

type gate struct {
	gpu.Hardware
	m *machine
}

func (g gate) open() error {
	if g.m.down.Load() {
		return errDown
	}
	return nil
}

func (g gate) Observe(ctx context.Context) (gpu.Inventory, error) {
	if err := g.open(); err != nil {
		return gpu.Inventory{}, err
	}
	return g.Hardware.Observe(ctx)
}

func (g gate) CreateInstance(ctx context.Context, uuid, profile string, at gpu.Placement) error {
	if err := g.open(); err != nil {
		return err
	}
	return g.Hardware.CreateInstance(ctx, uuid, profile, at)
}

// runNVIDIA runs NVIDIA's GPU Operator.
func (f *fleet) runNVIDIA() {
	operator := &nodesim.GPUOperator{Client: f.client, Namespace: nvidiaSpace, Clock: f.clock, Tell: func(string, ...any) {}}
	f.background(func(ctx context.Context) { operator.Run(ctx, 500*time.Millisecond) })
}
